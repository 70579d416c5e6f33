"""What we make on this machine: where it is, and that it is closed to others unless shared."""

import os
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import BinaryIO, Final, Literal

STATE: Final = Path(".snakemake", "mantik")
"""Our own directory, below a workflow's working directory."""


def data_home(environ: Mapping[str, str] | None = None) -> Path:
    """Where we keep what belongs to a user and to no workflow; it need not be there yet.

    Args:
        environ: the environment; None: this process's.
    """
    data = (os.environ if environ is None else environ).get("XDG_DATA_HOME", "")
    # The XDG specification has relative paths ignored.
    above = Path(data) if os.path.isabs(data) else Path("~/.local/share").expanduser()
    return above / "mantik"


@cache
def read_umask() -> int:
    """The file mode mask of this process. It can only be read by setting it: once is enough."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def make_private(directory: Path, *, shared: bool = False) -> None:
    """Make a directory of ours, and its parents as they are usually made.

    One that is there keeps its mode, but that `shared` opens it to its group.

    Args:
        directory: closed to others, and so all that is in it.
        shared: whether its group may do there what our file mode mask lets it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    if shared:
        change_mode(directory, directory.stat().st_mode | 0o070 & ~read_umask())


def change_mode(path: str | Path, mode: int) -> None:
    """Give a file or directory the permissions `mode`.

    A directory stays one whose files belong to its group (setgid): project directories are shared
    that way, and quotas are counted by it.
    """
    now = os.stat(path).st_mode
    os.chmod(path, mode & 0o777 | (now & stat.S_ISGID if stat.S_ISDIR(now) else 0))


def open_private(path: str | Path, mode: Literal["wb", "ab"]) -> BinaryIO:
    """Open a file to write to; a new one is closed to others."""
    return open(path, mode, opener=lambda file, flags: os.open(file, flags, 0o600))
