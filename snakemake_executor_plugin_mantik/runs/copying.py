"""Copies of files for a run directory: sharing blocks with the original where that is possible."""

import fcntl
import os
import shutil
import sys
from collections.abc import Container
from pathlib import Path
from typing import Final

from snakemake_executor_plugin_mantik.config.exclude import Exclude
from snakemake_executor_plugin_mantik.staging.secret_files import Matching
from snakemake_executor_plugin_mantik.staging.sources import list_candidates

_FICLONE: Final = 0x40049409
"""Linux's ioctl that makes a file share another one's blocks (Btrfs, XFS, bcachefs)."""


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, or what a link leads to, with its times and mode; its directory is made.

    Raises:
        OSError: it cannot be copied.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if not _clone(source, target):
        shutil.copyfile(source, target)
    shutil.copystat(source, target)


def _clone(source: Path, target: Path) -> bool:
    if sys.platform != "linux":
        return False
    with source.open("rb") as there, target.open("wb") as here:
        try:
            fcntl.ioctl(here, _FICLONE, there.fileno())
        except OSError:  # another file system, or one that cannot do it
            return False
    return True


def copy_sources(
    source: Path, target: Path, exclude: Exclude, leave: Container[str] = (), *, include: Matching
) -> None:
    """Copy what of a project's folder a job may be sent, whatever its size.

    Args:
        source: the folder.
        target: a directory.
        exclude: the backend config's.
        leave: further paths in the folder that are left out.
        include: matches what is copied although it seems to hold a secret.

    Raises:
        OSError: something cannot be copied.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path, _ in list_candidates(source, exclude, leave, include):
        copy_file(source / path, target / path)


def copy_any(source: Path, target: Path) -> None:
    """Copy a file or a directory, whatever is in it, hidden things included.

    Raises:
        OSError: something cannot be copied.
    """
    if not source.is_dir():
        copy_file(source, target)
        return
    for at, _, files in os.walk(source):
        below = target / Path(at).relative_to(source)
        below.mkdir(parents=True, exist_ok=True)
        for name in files:
            if os.path.isfile(os.path.join(at, name)):
                copy_file(Path(at, name), below / name)
