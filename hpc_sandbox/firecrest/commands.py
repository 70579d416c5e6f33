"""The commands on files that firecREST runs: `ls`, `stat`, `head`, ... as functions.

Each raises `CommandError` with the words of the GNU tool in the C locale.
"""

import hashlib
import os
import shutil
import stat
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..faults import spoil
from ..files import group_name, owner_name
from ..tsi import change_mode, culprit
from .shell import CommandError

Entry = dict[str, Any]
"""A file as `ls -l` shows it."""

_TIME = "%Y-%m-%dT%H:%M:%S"
_CHUNK = 1 << 20
_LINES = 10
"""Default number of lines of head and tail."""

_ESCAPES = {7: "\\a", 8: "\\b", 9: "\\t", 10: "\\n", 11: "\\v", 12: "\\f", 13: "\\r"}


@contextmanager
def _errors(tool: str, doing: str, status: int = 1) -> Iterator[None]:
    try:
        spoil()
        yield
    except OSError as error:
        raise CommandError(status, f"{tool}: {doing}: {error.strerror}") from error


def shown_name(name: str) -> str:
    """Return a file's name as `ls` prints it, with escapes for control and non-ASCII characters."""
    return "".join(
        chr(byte) if 32 <= byte < 127 else _ESCAPES.get(byte, f"\\{byte:03o}")
        for byte in os.fsencode(name)
    )


def _entry(name: str, path: Path, *, follow: bool = False, numeric: bool = False) -> Entry:
    status = path.stat() if follow else path.lstat()
    mode = stat.filemode(status.st_mode)
    return {
        "name": shown_name(name),
        "type": mode[0],
        "linkTarget": shown_name(os.readlink(path)) if mode[0] == "l" else None,
        "user": str(status.st_uid) if numeric else owner_name(status.st_uid),
        "group": str(status.st_gid) if numeric else group_name(status.st_gid),
        "permissions": mode[1:],
        "lastModified": time.strftime(_TIME, time.localtime(status.st_mtime)),
        "size": str(status.st_size),
    }


def _entry_of(path: str) -> Entry:
    """Return the entry of the file itself: `ls -d`."""
    with _errors("ls", f"cannot access '{path}'", 2):
        return _entry(path, Path(path))


def ls(path: str, *, hidden: bool, recursive: bool, numeric: bool, follow: bool) -> list[Entry]:
    """Return the entries of a directory, or the entry of a file under the name `path`."""
    root = Path(path)
    with _errors("ls", f"cannot access '{path}'", 2):
        mode = (root.stat() if follow else root.lstat()).st_mode
        if stat.S_ISLNK(mode) and path.endswith("/"):
            mode = root.stat().st_mode
    if not stat.S_ISDIR(mode):
        return [_entry(path, root, follow=follow, numeric=numeric)]
    found: list[Entry] = []
    folders = [""]
    while folders:
        folder = folders.pop(0)
        with _errors("ls", f"cannot open directory '{root / folder}'", 2):
            names = sorted(os.listdir(root / folder), key=os.fsencode)
        inner = []
        for name in names:
            if name.startswith(".") and not hidden:
                continue
            with _errors("ls", f"cannot access '{root / folder / name}'", 1):
                entry = _entry(folder + name, root / folder / name, follow=follow, numeric=numeric)
            found.append(entry)
            if recursive and entry["type"] == "d":
                inner.append(f"{folder}{name}/")
        folders = inner + folders
    return found


_STAT = ("mode", "ino", "dev", "nlink", "uid", "gid", "size", "atime", "ctime", "mtime")


def stat_file(path: str, *, follow: bool) -> dict[str, int]:
    """Return the fields of `stat`; `mode` includes the file's type."""
    with _errors("stat", f"cannot statx '{path}'"):
        found = Path(path).stat() if follow else Path(path).lstat()
    return {name: int(getattr(found, f"st_{name}")) for name in _STAT}


def file_type(path: str) -> str:
    """Return the output of `file`, which has no error for a missing file."""
    try:
        if Path(path).is_dir():
            return "directory"
        with Path(path).open("rb") as file:
            start = file.read(_CHUNK)
    except OSError as error:
        return f"cannot open `{path}' ({error.strerror})"
    if not start:
        return "empty"
    if start.startswith(b"\x1f\x8b"):
        return "gzip compressed data"
    return "ASCII text" if start.isascii() and b"\0" not in start else "data"


def part(path: str, *, tool: str, size: int | None, lines: int | None, rest: bool) -> bytes:
    """Return what `head` or `tail` prints of a file; `tool` is one of them.

    `rest`: head leaves out the given amount at the end; tail begins with this byte or line,
    counted from 1.
    """
    with _errors(tool, f"cannot open '{path}' for reading"):
        try:
            with Path(path).open("rb") as file:
                whole = file.read() if size else file.readlines()
        except IsADirectoryError as error:
            raise CommandError(1, f"{tool}: error reading '{path}': {error.strerror}") from error
    count = size or lines or _LINES
    if tool == "head":
        found = whole[: max(0, len(whole) - count) if rest else count]
    else:
        found = whole[max(0, count - 1 if rest else len(whole) - count) :]
    return found if isinstance(found, bytes) else b"".join(found)


def view(path: str, *, size: int, offset: int) -> bytes:
    """Return two blocks of a file, from the one with `offset` on, as the server does with `dd`."""
    with _errors("dd", f"failed to open '{path}'"), Path(path).open("rb") as file:
        file.seek(offset // size * size)
        return file.read(2 * size)


def checksum(path: str) -> str:
    """Return the SHA-256 sum of a file."""
    with _errors("sha256sum", path), Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(path: str) -> bytes:
    """Return the content of a file, for a direct download."""
    if Path(path).is_dir():
        raise CommandError(1, "base64: read error: Is a directory")
    with _errors("base64", path):
        return Path(path).read_bytes()


def write(path: str, *, content: bytes) -> None:
    """Write or replace a file in an existing directory."""
    with _errors("bash: line 1", path), Path(path).open("wb") as file:
        file.write(content)


def mkdir(path: str, *, parents: bool) -> Entry:
    """Create a directory; with `parents`, an existing one is no error."""
    try:
        spoil()
        Path(path).mkdir(parents=parents, exist_ok=parents)
    except OSError as error:
        named = culprit(Path(path), error) if parents else path
        reason = f"mkdir: cannot create directory '{named}': {error.strerror}"
        raise CommandError(1, reason) from error
    return _entry_of(path)


def rm(path: str) -> None:
    """Remove a file or a directory tree."""
    with _errors("rm", f"cannot remove '{path}'"):
        if Path(path).is_dir() and not Path(path).is_symlink():
            shutil.rmtree(path)
        else:
            Path(path).unlink()


def symlink(target: str, path: str) -> Entry:
    """Create a symbolic link at `path`."""
    with _errors("ln", f"failed to create symbolic link '{path}'"):
        Path(path).symlink_to(target)
    return _entry_of(path)


def chmod(path: str, *, mode: str) -> Entry:
    """Change the permissions to `mode`, in octal digits."""
    if not mode or set(mode) - set("01234567"):
        raise CommandError(1, f"chmod: invalid mode: '{mode}'")
    with _errors("chmod", f"cannot access '{path}'"):
        change_mode(Path(path), int(mode, 8))
    return _entry_of(path)


def chown(path: str, *, owner: str, group: str) -> Entry:
    """Change owner and group, each unless it is empty."""
    try:
        with _errors("chown", f"changing ownership of '{path}'"):
            if owner or group:
                # The type stubs reject two optional arguments, although one is enough.
                shutil.chown(path, owner or None, group or None)  # type: ignore[arg-type]
    except LookupError as error:
        kind = "user" if "user" in str(error) else "group"
        raise CommandError(1, f"chown: invalid {kind}: '{owner}:{group}'") from error
    return _entry_of(path)


_COMPRESSIONS = {"none": "", "gzip": "gz", "bzip2": "bz2", "xz": "xz"}
COMPRESSIONS = tuple(_COMPRESSIONS)


def compress(source: str, target: str, *, compression: str, follow: bool) -> None:
    """Pack a file or directory into an archive, under its name without the path."""
    name = Path(source).name
    with _errors("tar", f"{name}: Cannot stat", 2):
        Path(source).lstat()
    mode: Any = f"w:{_COMPRESSIONS[compression]}"
    with (
        _errors("tar", f"{target}: Cannot open", 2),
        tarfile.open(target, mode, dereference=follow) as archive,
    ):
        archive.add(source, arcname=name)


def extract(source: str, target: str, *, compression: str) -> None:
    """Unpack an archive into an existing directory."""
    with _errors("tar", f"{source}: Cannot open", 2):
        Path(source).open("rb").close()
    with _errors("tar", f"{target}: Cannot open", 2):
        os.scandir(target).close()
    mode: Any = f"r:{_COMPRESSIONS[compression]}"
    try:
        with tarfile.open(source, mode) as archive:
            archive.extractall(target, filter="tar")
    except (tarfile.TarError, EOFError) as error:
        what = f"{compression}: stdin: not in {compression} format\n"
        ending = "tar: Error is not recoverable: exiting now"
        raise CommandError(2, f"{what}tar: Child returned status 1\n{ending}") from error
