"""Copies on this machine of what is stored, at the local paths that Snakemake gives them."""

import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..common.errors import UserError
from ..common.state_directory import change_mode, read_umask
from ..jobs.paths import local_path
from ..journal import TIMESTAMP, FileRecord, RemoteOutput, is_checksum
from ..staging.local import sha256_of
from ..staging.transfers import SUFFIX, remove_path
from .access import Access

_SNAKEMAKE = ".snakemake"
"""Directory of Snakemake's own files."""


def fetch_copy(
    access: Access, output: RemoteOutput, target: Path, came: Callable[[int], object]
) -> None:
    """Make `target` a verified copy of a remote output, whole or not at all.

    `came` as for `Access.download`.

    Raises:
        MantikError: it cannot be fetched.
        OSError: it cannot be written here.
    """
    if odd := access.uncarried(output):
        raise UserError(
            "the site's file API cannot carry the name",
            where=f"site {access.name(output.place)}, file {odd[0]!r}",
            do="Let the rule pack its files, for example with tar",
        )
    part = target.with_name(f".{target.name}{SUFFIX}")
    part.parent.mkdir(parents=True, exist_ok=True)
    if output.directory:
        part.mkdir(exist_ok=True)
    wanted = []
    for file in output.files:
        local = Path(f"{part}{file.path.removeprefix(output.path)}")
        if not file.sha256:
            local.mkdir(parents=True, exist_ok=True)
            continue
        sha256 = file.sha256 if is_checksum(file.sha256) else ""
        if not sha256:  # what came of it before may be another content
            local.unlink(missing_ok=True)
        wanted.append((file.path, local, file.size, sha256))
    access.download(output.place, wanted, came)
    modes = [file.mode for file in output.files if file.sha256]
    for mode, (_, local, *_) in zip(modes, wanted, strict=True):
        change_mode(local, mode & ~read_umask() | 0o400)
    for path, to in output.links:
        link = Path(f"{part}{path.removeprefix(output.path)}")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(to)
    if output.directory:
        (part / TIMESTAMP).touch()
    os.utime(part, (output.made, output.made))
    put_in_place(part, target)


def link_copy(home: Path, target: Path, prefix: Path, keep: Callable[[Path], bool]) -> None:
    """Make `target`, below `prefix`, lead to what lies at `home` on this machine.

    A directory becomes one of links to files, and no link leads to a directory: Snakemake may
    remove files by paths below it. What is right already stays, because another process may read
    it. What else is in the directory is removed unless `keep` says that it is a copy.
    """
    if os.path.abspath(home) == os.path.abspath(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if home.is_dir():
        _mirror(home, target, os.path.realpath(prefix), keep, frozenset())
    else:
        _link(home, target)


def _mirror(
    home: Path, target: Path, prefix: str, keep: Callable[[Path], bool], above: frozenset[str]
) -> None:
    """See `link_copy`; `above` are the real paths of the directories that contain `home`."""
    real = os.path.realpath(home)
    if real in above or real == prefix:
        return
    if target.is_symlink() or not target.is_dir():
        remove_path(target)
        target.mkdir()
    known = {_SNAKEMAKE, TIMESTAMP}
    for entry in home.iterdir():
        if entry.name == _SNAKEMAKE:
            continue
        known.add(entry.name)
        with suppress(OSError):  # unreadable, or just removed
            if entry.is_dir():
                _mirror(entry, target / entry.name, prefix, keep, above | {real})
            else:
                _link(entry, target / entry.name)
    if os.path.realpath(target) != prefix:
        for entry in target.iterdir():
            coming = entry.name.endswith(SUFFIX)
            if entry.name not in known and not coming and not keep(entry):
                remove_path(entry)


def _link(file: Path, target: Path) -> None:
    """Make `target` a link to a file, at once."""
    with suppress(OSError):
        if os.path.samefile(file, target):
            return
    if target.is_dir() and not target.is_symlink():
        remove_path(target)
    new = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{SUFFIX}")
    try:
        os.link(os.path.realpath(file), new)
    except OSError:  # on another file system, or a link that leads nowhere
        new.symlink_to(os.path.realpath(file))
    new.replace(target)


def is_here(output: RemoteOutput, workdir: Path) -> bool:
    """Check whether a remote output is on this machine, too, where its rule names it."""
    home = local_path(output.path, workdir)

    def same(file: FileRecord) -> bool:
        path = Path(f"{home}{file.path.removeprefix(output.path)}")
        if not file.sha256:
            return path.is_dir()
        alike = path.is_file() and path.stat().st_size == file.size
        return alike and sha256_of(path) == file.sha256

    return all(map(same, output.files))


def copy_by_link(source: Path, target: Path) -> None:
    """Make `target` a hard link to the file `source`, or a directory of such links, or copies."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copy2(one, other)

    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, copy_function=link)
    else:
        link(str(source), str(target))


def put_in_place(part: Path, target: Path) -> None:
    """Move a file or directory to its final path; other files in a directory there stay."""
    if target.is_symlink() or (target.exists() and not (target.is_dir() and part.is_dir())):
        remove_path(target)
    if not target.exists():
        part.replace(target)
        return
    for each in part.iterdir():
        put_in_place(each, target / each.name)
    part.rmdir()
