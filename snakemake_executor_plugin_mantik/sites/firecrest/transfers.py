"""Large files: through the site's object store, or in parts that a job joins or makes there.

Both need a job of the site's scheduler, which queues like any other. firecREST's streamer is not
used: its current version adds 98 bytes to every file (measured).
"""

import asyncio
import hashlib
import shlex
import tempfile
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Protocol

from snakemake_executor_plugin_mantik.common.errors import (
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.config.addresses import is_confidential
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.sites.answers import MALFORMED
from snakemake_executor_plugin_mantik.sites.base import Entry, Phase
from snakemake_executor_plugin_mantik.sites.firecrest.answers import malformed_answer
from snakemake_executor_plugin_mantik.sites.firecrest.connection import FirecrestConnection
from snakemake_executor_plugin_mantik.sites.firecrest.jobs import FirecrestJobs
from snakemake_executor_plugin_mantik.sites.firecrest.opening import FirecrestSystem
from snakemake_executor_plugin_mantik.sites.firecrest.paths import (
    JOBS,
    TRANSFERS,
    WorkspacePaths,
    is_transferable,
)

FIRST_LOOK_S: Final = 0.5
"""Wait before the first poll of a transfer job, seconds; each further wait is 1.5 times longer."""
_LONGEST_LOOK_S: Final = 15.0
UNSEEN_S: Final = 120.0
"""How long a transfer job may be unknown to the scheduler before it counts as lost, seconds."""
_CHECKED_BYTES: Final = 256 << 20
"""Files up to this size are also compared by checksum: `sha256sum` has 5 s at the site."""

_CHUNK_BYTES: Final = 1 << 20
"""Bytes of a file in memory at once for each part; pyfirecrest itself would take 64 MiB."""
_DIGITS: Final = 6

_AGAIN: Final = frozenset((Reason.NODE_FAILURE, Reason.PREEMPTED))


class SmallFiles(Protocol):
    """The operations of `FirecrestFiles` that transfers need; small files go directly."""

    async def put(self, path: str, content: bytes | Path, *, private: bool) -> None: ...
    async def stat(self, path: str) -> Entry | None: ...
    async def checksum(self, path: str) -> str: ...
    async def make_directory(self, path: str) -> None: ...
    async def remove(self, path: str) -> None: ...
    def get(self, path: str, offset: int) -> AsyncIterator[bytes]: ...


@dataclass
class _Staged:
    """A file that is ready to be downloaded: an object's URL, or a directory of parts.

    `entry` is the file when it was prepared; `users` counts its current readers.
    """

    entry: Entry
    url: str = ""
    parts: str = ""
    users: int = 0


class FirecrestTransfers:
    """Large files of one workspace."""

    def __init__(
        self,
        connection: FirecrestConnection,
        system: FirecrestSystem,
        paths: WorkspacePaths,
        jobs: FirecrestJobs,
        account: str | None,
    ) -> None:
        self.account = account
        self._connection = connection
        self._system = system
        self._paths = paths
        self._jobs = jobs
        self._where = f"site {connection.site}"
        self._part_bytes = system.direct_bytes * 3 // 4 - 3
        self._staged: dict[str, _Staged] = {}
        self._staging: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def _stored(self, path: str) -> bool:
        return self._system.transfer == "s3" and is_transferable(self._paths.absolute(path))

    async def upload(self, path: str, content: bytes | Path, size: int, small: SmallFiles) -> None:
        """Write a large file into an existing directory.

        firecREST's own jobs report success also if they could not write, so the size of the result
        is checked, and its checksum up to `_CHECKED_BYTES` if the site can compute it in time.
        """
        entry = await small.stat(path)
        if entry is not None and entry.directory:
            raise SiteRejected(f"{path} is a directory", where=self._where)
        with _as_file(content) as file:
            if self._stored(path):
                await self._upload_stored(path, file, size)
            else:
                await self._upload_parts(path, file, size, small)
            await self._compare(path, file, size, small)

    async def _compare(self, path: str, file: Path, size: int, small: SmallFiles) -> None:
        entry = await small.stat(path)
        if entry is None or entry.size != size:
            there = f"{entry.size} bytes" if entry else "nothing"
            raise SiteUnreachable(
                f"{path}: {size} bytes were uploaded, {there} arrived", where=self._where
            )
        if size > _CHECKED_BYTES:
            return
        try:
            remote = await small.checksum(path)
        except SiteUnreachable:
            return  # it takes the site too long: the size has to do
        if remote and remote != await asyncio.to_thread(_sha256, file):
            raise SiteUnreachable(
                f"{path} has a wrong checksum after its upload", where=self._where
            )

    async def _upload_stored(self, path: str, file: Path, size: int) -> None:
        directory, _, name = self._paths.absolute(path).rpartition("/")
        upload: Any = await self._connection.once(
            "transfer",
            lambda c: c.upload(
                self._system.name,
                file,
                directory,
                name,
                account=self.account,
                blocking=False,
                transfer_method="s3",
            ),
        )
        job = self._job_of(upload.transfer_data)
        try:
            self._check_urls(upload.transfer_data)
            upload.chunk_size = _CHUNK_BYTES
            await self._connection.store("part", lambda _: upload.upload_file_to_stage(), size)
        except BaseException:
            await self._give_up(job)  # it would wait for the file for a day
            raise
        await self._wait(job)

    async def _upload_parts(self, path: str, file: Path, size: int, small: SmallFiles) -> None:
        directory = f"{TRANSFERS}/{uuid.uuid4()}"
        length = self._system.direct_bytes
        numbers = iter(range(-(-size // length)))

        async def send(opened: IO[bytes]) -> None:
            for number in numbers:
                part = await asyncio.to_thread(_read, opened, number * length, length)
                await small.put(f"{directory}/{number:0{_DIGITS}}", part, private=False)

        with file.open("rb", buffering=0) as one, file.open("rb", buffering=0) as two:
            await asyncio.gather(send(one), send(two))
        source, target = self._paths.absolute(directory), self._paths.absolute(path)
        await self._run(
            small,
            f"cat -- {shlex.quote(source)}/[0-9]* > {shlex.quote(source)}/whole",
            f"mv -fT -- {shlex.quote(source)}/whole {shlex.quote(target)}",
            f"rm -r -- {shlex.quote(source)}",
        )

    async def download(
        self, path: str, entry: Entry, offset: int, small: SmallFiles
    ) -> AsyncIterator[bytes]:
        """Download a large file from `offset` on.

        The prepared file also serves further readers, and those that continue after a broken
        connection.
        """
        staged = await self._stage(path, entry, small)
        staged.users += 1
        came = offset
        try:
            chunks = (
                self._from_store(staged, offset)
                if staged.url
                else self._from_parts(staged, offset, small)
            )
            async for chunk in chunks:
                came += len(chunk)
                yield chunk
        except (SiteNotFound, SiteRejected):
            self._staged.pop(path, None)  # the object or a part is gone: prepare them again
            message = f"{path} was removed at the site during its download"
            raise SiteUnreachable(message, where=self._where) from None
        finally:
            staged.users -= 1
        if came != entry.size:
            self._staged.pop(path, None)
            raise SiteUnreachable(
                f"{path}: {came} of {entry.size} bytes arrived", where=self._where
            )
        if not staged.users:
            self._staged.pop(path, None)
            if staged.parts:
                await small.remove(staged.parts)

    async def _stage(self, path: str, entry: Entry, small: SmallFiles) -> _Staged:
        async with self._staging[path]:
            staged = self._staged.get(path)
            if staged is None or staged.entry != entry:
                if self._stored(path):
                    staged = _Staged(entry, url=await self._store(path))
                else:
                    staged = _Staged(entry, parts=await self._split(path, small))
                self._staged[path] = staged
            return staged

    async def _store(self, path: str) -> str:
        target = self._paths.absolute(path)
        with tempfile.TemporaryDirectory() as scratch:  # pyfirecrest needs a path
            download: Any = await self._connection.once(
                "transfer",
                lambda c: c.download(
                    self._system.name,
                    target,
                    Path(scratch) / "unused",
                    account=self.account,
                    blocking=False,
                    transfer_method="s3",
                ),
            )
        urls = self._check_urls(download.transfer_data)
        await self._wait(self._job_of(download.transfer_data))
        if not urls:
            raise malformed_answer("a transfer", self._connection.site)
        return urls[0]

    async def _from_store(self, staged: _Staged, offset: int) -> AsyncIterator[bytes]:
        async with self._connection.download(staged.url, offset) as (response, chunks):
            if response.status_code in (403, 404):
                raise SiteNotFound("the object is gone", where=self._where)
            if response.status_code != (206 if offset else 200):
                raise SiteUnreachable(
                    f"the site's object store answered with {response.status_code}",
                    where=self._where,
                    status=response.status_code,
                )
            async for chunk in chunks:
                yield chunk

    async def _split(self, path: str, small: SmallFiles) -> str:
        directory = f"{TRANSFERS}/{uuid.uuid4()}"
        await small.make_directory(directory)
        source, target = self._paths.absolute(path), self._paths.absolute(directory)
        await self._run(
            small,
            f"split -d -a {_DIGITS} -b {self._part_bytes} -- {shlex.quote(source)} "
            f"{shlex.quote(target)}/",
        )
        return directory

    async def _from_parts(
        self, staged: _Staged, offset: int, small: SmallFiles
    ) -> AsyncIterator[bytes]:
        first, within = divmod(offset, self._part_bytes)
        for number in range(first, -(-staged.entry.size // self._part_bytes)):
            async for chunk in small.get(f"{staged.parts}/{number:0{_DIGITS}}", 0):
                yield chunk[within:]
                within = 0

    async def finish(self, job: Any) -> None:
        """Wait for a transfer job of firecREST that pyfirecrest has started."""
        await self._wait(self._job_of(job))

    async def _run(self, small: SmallFiles, *commands: str) -> None:
        script = transfer_script(
            self._system, self._paths.absolute(JOBS), self.account, "\n".join(commands)
        )
        job_id = await self._jobs.submit(script, self._paths.root)
        await self._wait(job_id)
        await small.remove(f"{JOBS}/{job_id}.out")

    async def _wait(self, job_id: str) -> None:
        """Wait until a transfer job has succeeded.

        Raises:
            SiteRejected: it ended in another way.
            SiteUnreachable: the scheduler no longer knows it, its node failed, or it was preempted.
        """
        pause, unseen = FIRST_LOOK_S, 0.0
        while True:
            await asyncio.sleep(pause)
            state = await self._jobs.state(job_id)
            if state.phase is Phase.ENDED:
                break
            unseen = unseen + pause if state.phase is Phase.UNKNOWN else 0.0
            if unseen > UNSEEN_S:
                raise SiteUnreachable(
                    f"the scheduler no longer knows the transfer job {job_id}", where=self._where
                )
            pause = min(pause * 1.5, _LONGEST_LOOK_S)
        if state.reason is not Reason.SUCCESS:
            kind = SiteUnreachable if state.reason in _AGAIN else SiteRejected
            raise kind(
                f"the transfer job {job_id} ended as {state.detail}",
                where=self._where,
                do="Check your quota and permissions at the site",
            )

    async def _give_up(self, job_id: str) -> None:
        try:
            await self._jobs.cancel([job_id])
        except SiteError:
            return  # its own time limit ends it

    def _job_of(self, told: Any) -> str:
        try:
            return str(told["transferJob"]["jobId"])
        except MALFORMED as error:
            raise malformed_answer("a transfer", self._connection.site) from error

    def _check_urls(self, told: Any) -> list[str]:
        """Return the URLs of a transfer; they must be confidential, because they grant access."""
        found: list[Any] = []
        try:
            directives = told.get("transferDirectives") or {}
            for name in ("partsUploadUrls", "parts_upload_urls"):
                found += directives.get(name) or []
            for name in ("completeUploadUrl", "complete_upload_url", "downloadUrl", "download_url"):
                found += [directives[name]] if directives.get(name) else []
        except (*MALFORMED, AttributeError) as error:
            raise malformed_answer("a transfer", self._connection.site) from error
        if not all(isinstance(url, str) and is_confidential(url) for url in found):
            raise SiteRejected(
                "the URLs of the site's object store do not start with https://", where=self._where
            )
        return found


def transfer_script(
    system: FirecrestSystem, output: str, account: str | None, commands: str
) -> str:
    """Make a batch script with the directives of the site's transfer jobs.

    Raises:
        SiteRejected: the directives need an account and there is none.
    """
    directives = "\n".join(system.directives)
    if "{account}" in directives:
        if not account:
            raise SiteRejected(
                "large files are transferred by jobs at this site, which need an account",
                do="Set MANTIK_COMPUTE_BUDGET_ACCOUNT",
            )
        directives = directives.replace("{account}", account)
    own = (
        ("#SBATCH --job-name=mantik-transfer", f'#SBATCH --output="{output}/%j.out"')
        if system.scheduler == "slurm"
        else ("#PBS -S /bin/bash", "#PBS -N mantik-transfer", f'#PBS -o "{output}/"', "#PBS -j oe")
    )
    return "\n".join(["#!/bin/bash", *own, directives, "set -e", commands, ""])


@contextmanager
def _as_file(content: bytes | Path) -> Iterator[Path]:
    if isinstance(content, Path):
        yield content
        return
    with tempfile.NamedTemporaryFile(prefix="mantik-") as file:
        file.write(content)
        file.flush()
        yield Path(file.name)


def _read(file: IO[bytes], offset: int, length: int) -> bytes:
    file.seek(offset)
    parts = bytearray()
    while len(parts) < length and (part := file.read(length - len(parts))):
        parts += part
    return bytes(parts)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
