"""Our files on this machine: their directories, closed to others unless shared."""

import os
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import BinaryIO, Final, Literal

STATE: Final = Path(".snakemake", "mantik")
"""Our own directory, below a workflow's working directory."""


def data_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory for data of the user, not of a workflow; it may be missing.

    `environ` is by default this process's environment.
    """
    data = (os.environ if environ is None else environ).get("XDG_DATA_HOME", "")
    # The XDG specification requires that relative paths are ignored.
    above = Path(data) if os.path.isabs(data) else Path("~/.local/share").expanduser()
    return above / "mantik"


@cache
def read_umask() -> int:
    """Return this process's umask. It can only be read by setting it: once is enough."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def make_private(directory: Path, *, shared: bool = False) -> None:
    """Make one of our directories, closed to others; its parents get default modes.

    An existing directory keeps its mode. With `shared` the group gets the permissions in it that
    the umask allows, also if it exists.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    if shared:
        change_mode(directory, directory.stat().st_mode | 0o070 & ~read_umask())


def change_mode(path: str | Path, mode: int) -> None:
    """Give a file or directory the permissions `mode`.

    A directory keeps its setgid bit: project directories are shared that way, and quotas are
    counted by group.
    """
    now = os.stat(path).st_mode
    os.chmod(path, mode & 0o777 | (now & stat.S_ISGID if stat.S_ISDIR(now) else 0))


def replace_file(path: Path, text: str) -> None:
    """Write a file (UTF-8) as a whole, or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def open_private(path: str | Path, mode: Literal["wb", "ab"]) -> BinaryIO:
    """Open a file for writing; a new one is closed to others."""
    return open(path, mode, opener=lambda file, flags: os.open(file, flags, 0o600))


def read_end(path: Path, most: int) -> bytes:
    """Return the last bytes of a file, `most` at most; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            return file.read()
    except OSError:
        return b""
