"""A small disk of its own for a directory, that can be filled to the last byte and freed again."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_SIZE = "6m"
"""Large enough for a workflow with small files."""
_PIECE = 1 << 12


@dataclass
class Disk:
    """A file system on which only what lies below `place` is."""

    place: Path

    @property
    def _filler(self) -> Path:
        return self.place / ".filler"

    def fill(self) -> None:
        with self._filler.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * _PIECE)
            except OSError:
                return

    def free(self) -> None:
        self._filler.unlink(missing_ok=True)


@contextmanager
def small_disk(place: Path) -> Iterator[Disk]:
    """Mount a small file system at `place`, which only the superuser may."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("to fill a disk needs a disk of its own, and that the right to mount one")
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "mantik-test", str(place)]
    mounted = subprocess.run(mount, check=False, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield Disk(place)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
