"""Apptainer as `tests/real/install` brings it, and small images of this machine's own programs."""

import os
import shutil
import subprocess
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "real" / "apptainer" / "root"
PROGRAM = Path(shutil.which("apptainer") or CACHE / "usr" / "bin" / "apptainer")

_PROGRAMS = (
    "basename", "bash", "cat", "cp", "echo", "env", "id", "ls", "mkdir", "mv", "printenv",
    "printf", "rm", "sh", "sleep", "stat", "test", "touch", "true", "wc",
)  # fmt: skip
_RUNSCRIPT = '#!/bin/sh\nexec "$@"\n'
"""Without one, `apptainer run IMAGE COMMAND` runs nothing."""


def lacking() -> list[str]:
    wanted = {"apptainer": PROGRAM.exists(), "squashfuse": shutil.which("squashfuse") is not None}
    return [name for name, there in wanted.items() if not there]


def search_path() -> str:
    return f"{PROGRAM.parent}:{os.environ['PATH']}"


def environment() -> dict[str, str]:
    # A container of root's needs more capabilities than a container has that the tests run in.
    return {"PATH": search_path(), "APPTAINER_USERNS": "1"}


def make_root(root: Path) -> Path:
    """Make an image's directory of this machine's programs and the libraries that they need."""
    (root / "usr" / "bin").mkdir(parents=True)
    for name in ("dev", "proc", "sys", "tmp", "var/tmp", "root", "home", "etc", "opt"):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    libraries = set()
    for name in _PROGRAMS:
        program = shutil.which(name, path="/usr/bin:/bin")
        assert program is not None, name
        shutil.copy(program, root / "usr" / "bin" / name)
        told = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        libraries |= {word for word in told.split() if word.startswith("/")}
    for library in libraries:
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    for name, text in (("image", "made of local files\n"), ("passwd", ""), ("group", "")):
        (root / "etc" / name).write_text(text)
    (root / ".singularity.d").mkdir()
    runscript = root / ".singularity.d" / "runscript"
    runscript.write_text(_RUNSCRIPT)
    runscript.chmod(0o755)
    return root


def build(root: Path, image: Path) -> Path:
    """Pack an image's directory into an image file."""
    subprocess.run(
        [PROGRAM, "build", "--force", image, root],
        capture_output=True, check=True, timeout=600,
    )  # fmt: skip
    return image
