"""Downloads of large files: from the site's object store, or in parts that a job makes there.

Both need a job of the site's scheduler, which queues like any other. firecREST's streamer is not
used: its current version adds 98 bytes to every file (measured).
"""

import asyncio
import math
import shlex
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, urlsplit

from snakemake_executor_plugin_mantik.common.errors import (
    SiteNotFound,
    SiteRejected,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.config.values import is_confidential
from snakemake_executor_plugin_mantik.jobs.reasons import Reason

from ..answers import MALFORMED
from ..base import Entry, Phase
from .answers import malformed_answer
from .connection import FirecrestConnection
from .jobs import FirecrestJobs
from .opening import FirecrestSystem
from .script import JOBS, TRANSFERS, WorkspacePaths, is_transferable

FIRST_LOOK_S: Final = 0.5
"""Wait before the first poll of a transfer job, seconds; each further wait is 1.5 times longer."""
_LONGEST_LOOK_S: Final = 15.0
UNSEEN_S: Final = 120.0
"""How long a transfer job may be unknown to the scheduler before it counts as lost, seconds."""
_DIGITS: Final = 6
_LEAST_SHARE: Final = 0.5
"""Share of a URL's life that it must have left when another server is to use it, maybe later."""

_AGAIN: Final = frozenset((Reason.NODE_FAILURE, Reason.PREEMPTED))


class SmallFiles(Protocol):
    """The operations of `FirecrestFiles` that transfers need; small files go directly."""

    async def make_directory(self, path: str) -> None: ...
    async def remove(self, path: str) -> None: ...
    def get(self, path: str, offset: int) -> AsyncGenerator[bytes, None]: ...


@dataclass
class _Staged:
    """A file that is ready to be downloaded: an object's URL, or a directory of parts.

    `entry` is the file when it was prepared; `users` counts its current readers. `until` is the
    time until which other servers may be given the URL (`time.monotonic`).
    """

    entry: Entry
    url: str = ""
    until: float = math.inf
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

    async def download(
        self, path: str, entry: Entry, offset: int, small: SmallFiles
    ) -> AsyncGenerator[bytes, None]:
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
            async with aclosing(chunks):
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

    async def share(self, path: str, entry: Entry, small: SmallFiles) -> str | None:
        """Return a URL of the site's object store from which everybody can read a file.

        A download of the same file uses it, too. None if the site has no object store.
        """
        if not self._stored(path):
            return None
        staged = self._staged.get(path)
        if staged is not None and time.monotonic() > staged.until:
            self._staged.pop(path)
        return (await self._stage(path, entry, small)).url

    async def _stage(self, path: str, entry: Entry, small: SmallFiles) -> _Staged:
        async with self._staging[path]:
            staged = self._staged.get(path)
            if staged is None or staged.entry != entry:
                if self._stored(path):
                    asked = time.monotonic()
                    url = await self._store(path)
                    staged = _Staged(entry, url=url, until=asked + _life_s(url) * _LEAST_SHARE)
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

    async def _from_store(self, staged: _Staged, offset: int) -> AsyncGenerator[bytes, None]:
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
    ) -> AsyncGenerator[bytes, None]:
        first, within = divmod(offset, self._part_bytes)
        for number in range(first, -(-staged.entry.size // self._part_bytes)):
            async with aclosing(small.get(f"{staged.parts}/{number:0{_DIGITS}}", 0)) as chunks:
                async for chunk in chunks:
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


def _life_s(url: str) -> float:
    """Return for how many seconds a presigned URL is valid; infinity if it does not say so."""
    expires = parse_qs(urlsplit(url).query).get("X-Amz-Expires", [""])[0]
    return float(expires) if expires.isdecimal() else math.inf
