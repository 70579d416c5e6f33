"""Large files: from the site's object store, in parts that a job makes there, or from other sites.

All need a job of the site's scheduler, which queues like any other. firecREST's streamer is not
used: its current version adds 98 bytes to every file (measured).
"""

import asyncio
import math
import re
import shlex
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from snakemake_executor_plugin_mantik.common.errors import (
    SiteNotFound,
    SiteRejected,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.config.values import is_confidential

from ..base import Entry, JobState, Phase, SharedFile, do_nothing
from .connection import FirecrestSystem
from .files import FirecrestFiles
from .script import JOBS, TRANSFERS, is_transferable, job_body

_DIGITS: Final = 6
_LEAST_SHARE: Final = 0.5
"""Share of a URL's life that it must have left when another server is to use it, maybe later."""
_SAFE: Final = re.compile(r"https?://[!#-\[\]-~]+")
"""URLs that are one option of curl's, in quotes: ASCII without blanks, quotes and backslashes."""

_FETCH: Final = """\
config={config}
trap 'rm -f -- "$config"' EXIT
umask 077
for attempt in 1 2 3 4 5; do
  curl --config "$config" --fail --silent --show-error --location --continue-at - \\
    --connect-timeout 60 --speed-limit 1000 --speed-time 120 --output {target} && exit
  sleep "$attempt"
done
exit 1
"""
"""Each attempt goes on where the one before broke off, and ends after 120 s of next to no bytes."""


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


class FirecrestTransfers(FirecrestFiles):
    """The part of a site that deals with files of any size, and with imports from other sites.

    The ids of imports are those of their jobs, if these are known, and of their private files.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._staged: dict[str, _Staged] = {}
        self._staging: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(
        self, path: str, *, offset: int = 0, size: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """See `Site.get`; a file that the server does not return directly needs a transfer.

        The way is chosen by the size before the file is requested: beyond its limit a server may
        refuse at once (413), or only after a deadlock with its own process (408 and 500). A small
        file of known size is one request. The server cannot return bytes from the middle: its
        `view` decodes them as text, and replaces invalid bytes.
        """
        entry = None
        if offset or size is None or size > self._down_bytes:
            entry = await self._reachable(path, offset)
            size = entry.size
            if size == offset:
                return
        if size <= self._down_bytes:
            content = await self._load(path)
            if content is not None:
                if len(content) > offset:
                    yield content[offset:]
                return
            entry = None  # it has grown
        entry = entry or await self._reachable(path, offset)
        async with aclosing(self._download(path, entry, offset)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _is_stored(self, path: str) -> bool:
        return self._open.system.transfer == "s3" and is_transferable(self._absolute(path))

    async def _download(self, path: str, entry: Entry, offset: int) -> AsyncGenerator[bytes, None]:
        """Download a large file from `offset` on.

        The prepared file also serves further readers, and those that continue after a broken
        connection.
        """
        staged = await self._stage(path, entry)
        staged.users += 1
        came = offset
        try:
            chunks = (
                self._from_store(staged, offset) if staged.url else self._from_parts(staged, offset)
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
                await self.remove(staged.parts)

    async def share(self, path: str) -> SharedFile | None:
        """See `Site.share`; a download of the same file uses the URL, too."""
        if not self._is_stored(path):
            return None
        entry = await self._reachable(path, 0)
        staged = self._staged.get(path)
        if staged is not None and time.monotonic() > staged.until:
            self._staged.pop(path)
        return SharedFile((await self._stage(path, entry)).url)

    async def _stage(self, path: str, entry: Entry) -> _Staged:
        async with self._staging[path]:
            staged = self._staged.get(path)
            if staged is None or staged.entry != entry:
                if self._is_stored(path):
                    asked = time.monotonic()
                    url = await self._make_object(path)
                    staged = _Staged(entry, url=url, until=asked + _life_s(url) * _LEAST_SHARE)
                else:
                    staged = _Staged(entry, parts=await self._split(path))
                self._staged[path] = staged
            return staged

    async def _make_object(self, path: str) -> str:
        body: dict[str, Any] = {"source_path": self._absolute(path)}
        if self._open.system.offers_methods:
            body["transfer_directives"] = {"transferMethod": "s3"}
        if self._open.account:
            body["account"] = self._open.account
        answer = await self._connection.once(
            "transfer", "POST", self._files_path("transfer/download"), json=body
        )
        transfer = self._connection.json_of(answer)
        urls = self._check_urls(transfer)
        await self._wait(self._job_of(transfer))
        if not urls:
            raise self._connection.nonsense("a transfer")
        return urls[0]

    async def _from_store(self, staged: _Staged, offset: int) -> AsyncGenerator[bytes, None]:
        async with self._connection.download(staged.url, offset) as (response, chunks):
            if response.status_code in (403, 404):
                raise SiteNotFound("the object is gone", where=self._where)
            self._connection.check_range(response, "the site's object store", offset)
            async for chunk in chunks:
                yield chunk

    async def _split(self, path: str) -> str:
        directory = f"{TRANSFERS}/{uuid.uuid4()}"
        await self.make_directory(directory)
        source, target = self._absolute(path), self._absolute(directory)
        await self._run(
            f"split -d -a {_DIGITS} -b {self._down_bytes} -- {shlex.quote(source)} "
            f"{shlex.quote(target)}/",
        )
        return directory

    async def _from_parts(self, staged: _Staged, offset: int) -> AsyncGenerator[bytes, None]:
        first, within = divmod(offset, self._down_bytes)
        for number in range(first, -(-staged.entry.size // self._down_bytes)):
            async with aclosing(self.get(f"{staged.parts}/{number:0{_DIGITS}}")) as chunks:
                async for chunk in chunks:
                    yield chunk[within:]
                    within = 0

    async def _run(self, *commands: str) -> None:
        job_id = await self._start("\n".join(commands))
        await self._wait(job_id)
        await self.remove(f"{JOBS}/{job_id}.out")

    async def _start(self, commands: str) -> str:
        """Submit a job that runs `commands`; return its id."""
        opened = self._open
        script = transfer_script(opened.system, self._absolute(JOBS), opened.account, commands)
        return await self._submit(job_body(script, opened.paths.root), do_nothing)

    def _check_urls(self, told: Any) -> list[str]:
        """Return the URLs of a transfer; they must be confidential, because they grant access."""
        found: list[Any] = []
        with self._connection.parsing("a transfer"):
            directives = told.get("transferDirectives") or {}
            for name in ("downloadUrl", "download_url"):
                found += [directives[name]] if directives.get(name) else []
        if not all(isinstance(url, str) and is_confidential(url) for url in found):
            raise SiteRejected(
                "the URLs of the site's object store do not start with https://", where=self._where
            )
        return found

    async def start_import(self, source: SharedFile, path: str) -> str | None:
        if source.api or not _SAFE.fullmatch(source.url):
            return None
        name = str(uuid.uuid4())
        config = f"{TRANSFERS}/{name}"
        commands = _FETCH.format(
            config=shlex.quote(self._absolute(config)),
            target=shlex.quote(self._absolute(path)),
        )
        await self.make_directory(TRANSFERS, private=True)
        scheme = source.url.partition(":")[0]
        options = f'url = "{source.url}"\ngloboff\nproto = "={scheme}"\nproto-redir = "={scheme}"\n'
        await self.put(config, options.encode(), private=True)
        try:
            job = await self._start(commands)
        except SiteRejected:
            await self.remove(config)
            raise
        except SiteUnreachable:  # it may have been submitted
            job = ""
        return f"{job}/{name}"

    async def import_state(self, import_id: str) -> JobState:
        job = import_id.partition("/")[0]
        return await self._state(job) if job else JobState(Phase.UNKNOWN)

    async def end_import(self, import_id: str) -> None:
        job, _, name = import_id.partition("/")
        await self.remove(f"{TRANSFERS}/{name}")  # a job that starts later ends at once
        if not job:
            return
        if (await self._state(job)).phase is not Phase.ENDED:
            await self.cancel([job])
        await self.remove(f"{JOBS}/{job}.out")


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
