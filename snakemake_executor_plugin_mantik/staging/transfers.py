"""Downloads: complete and verified, or not at all.

A file is written beside its final path under a temporary name, compared with the job's record of
it, and renamed only when all files of the job are there. A broken transfer continues where it
stopped.
"""

import asyncio
import hashlib
import os
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path, PurePath
from typing import NoReturn, Protocol, TypeVar, cast

from ..common.errors import OutputsLost, SiteError, SiteNotFound, SiteUnreachable, TransferError
from ..common.state_directory import change_mode, make_private, open_private, read_umask
from ..jobs.markers import OutputEntry
from ..jobs.packs import TarDamaged, read_tar
from ..jobs.paths import MAX_PATH_DEPTH, local_path
from ..sites.base import Site
from .local import sha256_of

_T = TypeVar("_T")


class Repeat(Protocol):
    """Repeats an attempt while the site fails, as `engine.site_retry.SiteRetry` does."""

    async def __call__(self, act: Callable[[], Awaitable[_T]], /) -> _T: ...


SUFFIX = ".mantik-part"
"""End of the names of files that are not whole yet."""


class _ShorterError(TransferError):
    """The site itself reports that a file is shorter than the one that the job made."""


async def read_file(
    site: Site, path: str, limit: int = 64 << 20, *, size: int | None = None
) -> bytes:
    """Read a small file's content, at most `limit` bytes; `size` as for `Site.get`.

    Raises:
        SiteUnreachable: the connection broke.
    """
    content = bytearray()
    # Both APIs return generators: one that is not read to its end must be closed.
    chunks = cast(AsyncGenerator[bytes, None], site.get(path, size=size))
    async with aclosing(chunks):
        async for chunk in chunks:
            content += chunk
            if len(content) > limit:
                break
    return bytes(content[:limit])


async def download_file(
    site: Site,
    path: str,
    target: Path,
    *,
    size: int,
    sha256: str,
    repeat: Repeat,
    arrived: Callable[[int], None] = lambda _: None,
) -> None:
    """Download one file to the local `target`; continue where an earlier attempt stopped.

    `path` is relative to the workspace. The file must have `size` bytes and the checksum `sha256`,
    unless that is empty. `repeat` repeats an attempt as long as it sees fit. `arrived` is called
    with the number of bytes that are here, again and again.

    Raises:
        TransferError: the download is not what the job made, and attempts differ, or there was only
            one.
        OutputsLost: the file at the site is not what the job made: it is shorter, or all attempts
            brought the same other content.
        SiteNotFound: the file no longer exists.
        SiteRejected: the site refuses the download.
        OSError: the file cannot be written here.
    """
    others: list[str] = []

    async def attempt() -> None:
        """Download the rest of the file; add a wrong checksum to `others`."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_private(target, "ab") as file:
            offset = here = file.tell()
            arrived(here)
            if offset < size:
                async for part in site.get(path, offset=offset, size=size):
                    await asyncio.to_thread(file.write, part)
                    here += len(part)
                    arrived(here)
                    if here > size:
                        break  # it has grown since: no use to read on
        if here < size:
            await _not_whole(site, path, here, size)
        if here == size:
            found = await asyncio.to_thread(sha256_of, target) if sha256 else ""
            if found == sha256:
                return
            others.append(found)
        target.unlink()  # none of it can be trusted
        raise TransferError(
            "the file is not what the job made (its checksum differs)",
            where=f"site {site.name}, file {path}",
            do="It was changed at the site or during the download",
        )

    try:
        await repeat(attempt)
    except _ShorterError as error:
        raise OutputsLost(error.what, where=error.where, do=error.do) from error
    except TransferError as error:
        if len(others) > 1 and len(set(others)) == 1:
            do = "Something replaced it at the site; run the rule again"
            raise OutputsLost(error.what, where=error.where, do=do) from error
        raise


async def stream_file(
    site: Site, path: str, *, size: int, offset: int, repeat: Repeat
) -> AsyncGenerator[bytes, None]:
    """Yield a file's bytes from `offset` to its end at `size`; nothing is written to this machine.

    After a broken connection the stream goes on where it stopped. `repeat` as for `download_file`.

    Raises:
        OutputsLost: the file at the site is shorter.
        SiteNotFound: it no longer exists.
        SiteRejected: the site refuses the download.
    """
    stream: AsyncGenerator[bytes, None] | None = None

    async def read() -> bytes:
        """Return the next bytes, at least one; it may be repeated after an error."""
        nonlocal stream
        try:
            if stream is None:
                stream = cast(AsyncGenerator[bytes, None], site.get(path, offset=offset, size=size))
            while not (chunk := await anext(stream)):
                pass
        except StopAsyncIteration:
            await close()
            await _not_whole(site, path, offset, size)
        except BaseException:
            await close()
            raise
        return chunk

    async def close() -> None:
        nonlocal stream
        ended, stream = stream, None
        if ended is not None:
            await ended.aclose()

    try:
        while offset < size:
            chunk = (await repeat(read))[: size - offset]
            offset += len(chunk)
            yield chunk
        if stream is not None:
            with suppress(SiteError):  # at its end the site removes what it has prepared for it
                await anext(stream, b"")
    except _ShorterError as error:
        raise OutputsLost(error.what, where=error.where, do=error.do) from error
    finally:
        await close()


async def _not_whole(site: Site, path: str, here: int, size: int) -> NoReturn:
    """Raise the error for a transfer that broke off, or for a file that became shorter."""
    where = f"site {site.name}, file {path}"
    entry = await site.stat(path)
    if entry is None:
        raise SiteNotFound(f"there is no file {path}", where=where)
    if entry.size < size:
        raise _ShorterError(
            f"the file has {entry.size} bytes at the site, but the job made {size}",
            where=where,
            do="Something changed it at the site; run the rule again",
        )
    raise SiteUnreachable(f"{here} of {size} bytes arrived", where=where)


class OutputStaging:
    """Temporary paths of one attempt's outputs until all of them are complete and `settled`."""

    def __init__(self, workdir: Path, attempt_id: str, outputs: Iterable[str]) -> None:
        """Prepare for `outputs`, the paths in the workspace that the rule declares."""
        self.settled = False
        self._workdir = workdir
        self._made: set[str] = set()
        declared = dict.fromkeys(outputs)
        # Files in an output directory are moved together with it.
        outer = [p for p in declared if not any(str(up) in declared for up in PurePath(p).parents)]
        names = {path: hashlib.sha256(os.fsencode(path)).hexdigest()[:12] for path in outer}
        # A suffix to a long name would make it too long.
        self._roots = {
            path: str(local_path(path, workdir).with_name(f".{attempt_id[:8]}-{name}{SUFFIX}"))
            for path, name in names.items()
        }

    def place(self, entry: OutputEntry) -> Path:
        """Return the temporary local path of an output's content.

        Raises:
            OutputsLost: the job reports a file that the rule does not declare, or one too deep.
        """
        return Path(self._place(entry)[1])

    def _place(self, entry: OutputEntry) -> tuple[str, str]:
        """Return the temporary paths of the declared output that contains it, and of itself."""
        if entry.path in self._roots and entry.type != "l":
            return self._roots[entry.path], self._roots[entry.path]
        for end in (end for end, letter in enumerate(entry.path) if letter == "/"):
            if temporary := self._roots.get(entry.path[:end]):
                parts = entry.path[end + 1 :].split("/")
                if len(parts) > MAX_PATH_DEPTH:
                    raise OutputsLost(
                        f"the job made directories nested more than {MAX_PATH_DEPTH} levels deep",
                        where=entry.path[:end],
                        do="Let it pack them into an archive",
                    )
                # Absolute paths and `..` would lead out of the output.
                if not {"", ".", ".."} & set(parts) and "\0" not in entry.path:
                    return temporary, f"{temporary}/{entry.path[end + 1 :]}"
        raise OutputsLost(
            "the job reports a file that is none of the rule's outputs", where=entry.path
        )

    def write(self, entry: OutputEntry, content: Iterable[bytes] = ()) -> None:
        """Write the content of an output, or make a directory.

        Raises:
            OutputsLost: the job reports a file that the rule does not declare, or one too deep; or
                the content is not what it has reported.
            OSError: it cannot be written here.
        """
        root, path = self._place(entry)
        if entry.type == "d":
            self._make(path, root)
            return
        self._make(os.path.dirname(path), root if path != root else None)
        digest = hashlib.sha256()
        with open_private(path, "wb") as file:
            for chunk in content:
                digest.update(chunk)
                file.write(chunk)
        if entry.sha256 and digest.hexdigest() != entry.sha256:
            raise OutputsLost("the content is not what the job made", where=entry.path)

    def _make(self, folder: str, root: str | None) -> None:
        """Make a directory; the `root` of an output is closed to others."""
        if root is not None and root not in self._made:
            make_private(Path(root))
            self._made.add(root)
        if folder not in self._made:
            os.makedirs(folder, exist_ok=True)
            self._made.add(folder)

    def unpack(self, archive: Path, entries: Sequence[OutputEntry]) -> None:
        """Extract `entries` from a downloaded archive, which has them under their own names.

        Raises:
            OutputsLost: a file is missing or differs, or the archive is damaged.
        """
        wanted = {entry.path: entry for entry in entries}
        try:
            with archive.open("rb") as file:
                for name, content in read_tar(file):
                    entry = wanted.pop(os.path.normpath(name), None)
                    if entry is not None:
                        self.write(entry, content)
        except TarDamaged as error:
            raise OutputsLost(f"the archive of outputs is damaged ({error})") from error
        if wanted:
            raise OutputsLost("the archive of outputs lacks a file", where=next(iter(wanted)))

    def settle(self, entries: Iterable[OutputEntry]) -> None:
        """Give every output its mode and rename it to its final path, once all are complete.

        Files in an output directory keep their modification time, unless it is in the future by the
        clock of this machine. The rule's outputs themselves get the time of the download, because
        Snakemake compares them with its inputs.

        Raises:
            OutputsLost: the job reports a file below a link, or one path twice.
            OSError: a file cannot be written here.
        """
        entries = list(entries)
        links = {self.place(entry): entry.target for entry in entries if entry.type == "l"}
        for entry in entries:
            path = self._place(entry)[1]
            above = Path(path).parents
            if any(each in links for each in above) or (entry.type != "l" and Path(path) in links):
                raise OutputsLost(
                    "the job reports a file below a link, or two files under one name",
                    where=entry.path,
                )
            if entry.type != "l":
                mode = entry.mode & ~read_umask()  # a job may have opened it to everybody
                change_mode(path, mode | (0o700 if entry.type == "d" else 0o400))
        # Made last, so that no file is ever written through a link.
        for place, target in links.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)  # left by a run that was killed just here
            place.symlink_to(target)
        self._date(entries)
        for root, temporary in self._roots.items():
            if not os.path.lexists(temporary):
                continue
            final = local_path(root, self._workdir)
            if final.is_dir() and not final.is_symlink():
                shutil.rmtree(final)
            os.rename(temporary, final)
        self.settled = True

    def _date(self, entries: Sequence[OutputEntry]) -> None:
        now = time.time_ns()
        # Contents of a directory first: making them has changed the directory's own time.
        for entry in sorted(entries, key=lambda each: each.path.count("/"), reverse=True):
            modified, path = entry.modified_ns, self._place(entry)[1]
            if modified is not None and entry.path not in self._roots:
                modified = min(modified, now)
                os.utime(path, ns=(modified, modified), follow_symlinks=False)

    def clear(self) -> None:
        """Remove the outputs that were not settled."""
        for temporary in self._roots.values():
            shutil.rmtree(temporary, ignore_errors=True)  # all that can be
            with suppress(OSError):
                remove_path(Path(temporary))


def remove_path(path: Path) -> None:
    """Remove a file, a link or a directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            path.unlink()


def move_beside(path: Path, final: Path) -> bool:
    """Move the file `path` to `final`, unless something lies there.

    Returns:
        whether it was moved.

    Raises:
        OSError: it cannot be moved.
    """
    try:
        os.link(path, final)  # fails if something is there, at whatever moment that was made
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if os.path.lexists(final):
            return False
        os.rename(path, final)
    else:
        path.unlink()
    return True
