"""Files of the workspace through firecREST's file API: each request is a command over ssh.

Large files come from the site's object store, or in parts that a job makes there; files from other
sites come by a job. Such a job queues like any other. firecREST's streamer is not used: its current
version adds 98 bytes to every file (measured).
"""

import asyncio
import io
import math
import re
import shlex
import stat
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import httpx

from ...common.errors import SiteNotFound, SiteRejected, SiteUnreachable
from ...config.values import is_confidential
from ...jobs.paths import OURS, ROOT
from ..base import NOT_SAFE, Entry, JobState, Phase, SharedFile
from ..rest import repeat_request
from .connection import FirecrestConnection, FirecrestUser, local_time, zone_offset
from .jobs import JOB_CHANNELS, FirecrestJobs
from .script import JOBS, TRANSFERS, transfer_script

_COMMAND_TIMEOUT: Final = 408
"""A command at the site took longer than the server's time-out (5 s by default)."""
_TOO_LARGE: Final = frozenset((413, _COMMAND_TIMEOUT, 500))
"""Statuses of a download that is larger than the server's `max_ops_file_size`: the server stops
reading at its limit and waits for the command, which waits for the rest to be read."""
_OCTETS: Final = "application/octet-stream"
_OCTAL: Final = re.compile(rb"\\([0-7]{3})")
_ESCAPED: Final = frozenset("&<>")
"""firecREST HTML-escapes paths in the scripts of its transfer jobs (autoescape)."""
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


class FirecrestFiles(FirecrestJobs):
    """The part of a site that deals with files, and with imports from other sites.

    The ids of imports are those of their jobs, if these are known, and of their private files.
    """

    refused = NOT_SAFE
    plain = "Use names of ASCII characters without % ' $ ` \" and backslash"

    def __init__(
        self, *arguments: Any, machine: str, account: str | None = None, **named: Any
    ) -> None:
        """Prepare a site; see `RestSite`.

        `machine` is the system's name at the server. `account` pays for the jobs that transfer
        large files; by default the user's default account.
        """
        super().__init__(*arguments, **named)
        self._machine = machine
        self._account = account
        self._staged: dict[str, _Staged] = {}
        self._zone = 0.0
        self._made: set[str] = set()
        # By path: what is made, or prepared for a download, is so once.
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def _down_bytes(self) -> int:
        """Largest file that is downloaded directly.

        It comes as base64 in a buffer of the size that uploaded files may have.
        """
        return self._open.system.direct_bytes * 3 // 4 - 3

    def _files_path(self, name: str) -> str:
        return f"/filesystem/{self._open.system.name}/{name}"

    async def _output(self, kind: str, method: str, name: str, **arguments: Any) -> Any:
        """Run a command at the site, repeatedly where that may help; return its output."""

        async def act() -> Any:
            path = self._files_path(f"ops/{name}")
            answer = await self._connection.once(kind, method, path, **arguments)
            with self._connection.parsing(name):
                return self._connection.json_of(answer)["output"]

        return await repeat_request(act)

    async def make_workspace(self) -> None:
        """Make the workspace unless it exists, open to its group if the config says so.

        In a directory that the user made, only our own subdirectory is closed to others.
        """
        known = await self._stat(JOBS)
        new = known is None and await self._stat(ROOT) is None
        answer = await self._mkdir(JOBS)
        if known is None:
            await self._protect(
                ROOT if new else OURS, "750" if self._settings.sharing == "group" else "700"
            )
        known = known or await self._stat(JOBS)
        with self._connection.parsing("mkdir"):
            self._zone = zone_offset(
                str(answer["lastModified"]), int(known["mtime"]) if known else 0
            )

    async def put(self, path: str, content: bytes, *, private: bool = False) -> None:
        """See `Site.put`; a private file is created with a newline, protected, and then filled.

        It is not created empty, because a server waits 5 s for the end of an empty file.
        """
        if private:
            await self._store(path, b"\n")
            await self._protect(path, "600")
        await self._store(path, content)

    async def _store(self, path: str, content: bytes) -> None:
        """Write a file directly; make its directory unless it is known to exist."""
        self._at(path)  # which checks it
        directory, _, name = path.rpartition("/")
        directory = directory or "."
        params = {"path": self._at(directory)}

        async def act() -> None:
            await self._make(directory)
            try:
                # Sent piece by piece, and closed: requests are part of cycles that live long.
                with io.BytesIO(content) as file:
                    await self._connection.once(
                        "upload",
                        "POST",
                        self._files_path("ops/upload"),
                        size=len(content),
                        params=params,
                        files={"file": (name, file)},
                    )
            except SiteNotFound as error:
                # The directory was removed: repeat, and make it again.
                self._made.discard(directory)
                raise SiteUnreachable(error.what, where=error.where, status=error.status) from error
            except SiteUnreachable as error:
                if not content and error.status == _COMMAND_TIMEOUT and await self._is_empty(path):
                    return
                # If the directory is missing, a server answers so, or that its input broke.
                self._made.discard(directory)
                raise

        await repeat_request(act)

    async def _is_empty(self, path: str) -> bool:
        """Check for an empty file, which a server creates although it answers with a time-out."""
        entry = await self.stat(path)
        return entry is not None and not entry.directory and entry.size == 0

    async def _protect(self, path: str, mode: str) -> None:
        await self._output("chmod", "PUT", "chmod", json={"path": self._at(path), "mode": mode})

    async def _load(self, path: str) -> bytes | None:
        """Return the bytes of a presumably small file; None if it has become too large."""
        params = {"path": self._at(path)}

        async def act() -> bytes | None:
            try:
                answer = await self._connection.once(
                    "download",
                    "GET",
                    self._files_path("ops/download"),
                    size=self._down_bytes,
                    params=params,
                )
            except (SiteRejected, SiteUnreachable) as error:
                if error.status not in _TOO_LARGE:
                    raise
                entry = await self.stat(path)
                if entry is None or entry.size <= self._down_bytes:
                    raise
                return None
            if not str(answer.headers.get("Content-Type", "")).startswith(_OCTETS):
                raise self._connection.nonsense("a download")
            return answer.content

        return await repeat_request(act)

    async def list(self, path: str) -> dict[str, Entry]:
        # With a slash, `ls` lists a directory's entries, also behind a link, and refuses a file.
        there = f"/{self._checked(path[1:])}" if path.startswith("/") else self._at(path)
        params = {"path": f"{there}/", "showHidden": True}
        try:
            answer = await self._output("list", "GET", "ls", params=params)
        except SiteRejected as error:
            if "Not a directory" in error.what:
                raise SiteNotFound(f"{path} is not a directory", where=self._where) from error
            raise
        with self._connection.parsing("ls"):
            entries = [self._entry(found) for found in answer]
        if any("/" in entry.name for entry in entries):
            raise SiteNotFound(f"{path} is not a directory", where=self._where)
        return {entry.name: entry for entry in entries}

    def _entry(self, found: Any) -> Entry:
        directory = found["type"] == "d"
        modified = local_time(str(found["lastModified"])) - self._zone
        name = _unescaped(str(found["name"]))
        size = 0 if directory else int(found["size"])
        return Entry(name, size, directory, modified, link=found["type"] == "l")

    async def stat(self, path: str) -> Entry | None:
        found = await self._stat(path)
        if found is None:
            return None
        with self._connection.parsing("stat"):
            directory = stat.S_ISDIR(int(found["mode"]))
            size, modified = int(found["size"]), float(found["mtime"])
        return Entry(path.rpartition("/")[2], 0 if directory else size, directory, modified)

    async def _stat(self, path: str) -> dict[str, Any] | None:
        params = {"path": self._at(path), "dereference": True}
        try:
            answer = await self._output("stat", "GET", "stat", params=params)
        except SiteNotFound:
            return None
        except SiteRejected as error:
            if "Not a directory" in error.what:  # something above it is a file
                return None
            raise
        if not isinstance(answer, dict):
            raise self._connection.nonsense("stat")
        return answer

    async def make_directory(self, path: str, *, private: bool = False) -> None:
        await self._mkdir(path)
        if private:
            await self._protect(path, "700")

    async def _mkdir(self, path: str) -> dict[str, Any]:
        body = {"sourcePath": self._at(path), "parent": True}
        answer = await self._output("mkdir", "POST", "mkdir", json=body)
        self._made.add(path)
        return answer if isinstance(answer, dict) else {}

    async def _make(self, directory: str) -> None:
        """Make a directory unless we have made it before; concurrent calls make it once."""
        if directory in self._made:
            return
        async with self._locks[directory]:
            if directory not in self._made:
                await self._mkdir(directory)

    async def remove(self, path: str) -> None:
        """See `Site.remove`; what takes long is removed by a job of the site's."""
        params = {"path": self._at(path)}
        if params["path"] == self._open.root:
            raise self._connection.refusal("the workspace itself cannot be removed")
        self._made = {d for d in self._made if d != path and not d.startswith(f"{path}/")}

        async def act(name: str) -> httpx.Response:
            return await self._connection.once(
                "remove", "DELETE", self._files_path(name), params=params
            )

        async def remove() -> httpx.Response:
            try:
                return await act("ops/rm")
            except SiteUnreachable as error:
                if error.status != _COMMAND_TIMEOUT and "exit status:124" not in error.what:
                    raise
            if account := await self._payer():
                params["account"] = account
            return await act("transfer/rm")

        try:
            answer = await repeat_request(remove)
        except SiteNotFound:
            return
        if answer.status_code != httpx.codes.NO_CONTENT:
            await self._wait(self._job_of(self._connection.json_of(answer)))

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
        return self._open.system.transfer == "s3" and not _ESCAPED & set(self._at(path))

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
        async with self._locks[path]:
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
        body: dict[str, Any] = {"source_path": self._at(path)}
        if self._open.system.is_since((2, 4)):  # which offers several ways
            body["transfer_directives"] = {"transferMethod": "s3"}
        if account := await self._payer():
            body["account"] = account
        answer = await self._connection.once(
            "transfer", "POST", self._files_path("transfer/download"), json=body
        )
        transfer = self._connection.json_of(answer)
        url = self._url_in(transfer)
        await self._wait(self._job_of(transfer))
        if not url:
            raise self._connection.nonsense("a transfer")
        return url

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
        source, target = self._at(path), self._at(directory)
        job_id = await self._start(
            f"split -d -a {_DIGITS} -b {self._down_bytes} -- {shlex.quote(source)} "
            f"{shlex.quote(target)}/"
        )
        await self._wait(job_id)
        await self.remove(f"{JOBS}/{job_id}.out")
        return directory

    async def _from_parts(self, staged: _Staged, offset: int) -> AsyncGenerator[bytes, None]:
        first, within = divmod(offset, self._down_bytes)
        for number in range(first, -(-staged.entry.size // self._down_bytes)):
            async with aclosing(self.get(f"{staged.parts}/{number:0{_DIGITS}}")) as chunks:
                async for chunk in chunks:
                    yield chunk[within:]
                    within = 0

    async def _start(self, commands: str) -> str:
        """Submit a job that runs `commands`; return its id."""
        system = self._open.system
        script = transfer_script(
            system.scheduler, system.directives, self._at(JOBS), await self._payer(), commands
        )
        return await self._submit(script)

    async def _payer(self) -> str | None:
        """Return the account of transfer jobs.

        Where they need one and the server has not named the default, it is asked for again.
        """
        opened = self._open
        account = self._account or opened.user.account
        if not account and "{account}" in "\n".join(opened.system.directives):
            user = await read_user(self._connection, self._machine)
            self._opened, account = replace(opened, user=user), user.account
        return account or None

    def _url_in(self, told: Any) -> str:
        """Return the URL of a transfer, or none; it must be confidential: it grants access."""
        with self._connection.parsing("a transfer"):
            directives = told.get("transferDirectives") or {}
            url = directives.get("downloadUrl") or directives.get("download_url") or ""
        if url and not (isinstance(url, str) and is_confidential(url)):
            raise self._connection.refusal(
                "the URLs of the site's object store do not start with https://"
            )
        return str(url)

    async def start_import(self, source: SharedFile, path: str) -> str | None:
        if source.api or not _SAFE.fullmatch(source.url):
            return None
        name = str(uuid.uuid4())
        config = f"{TRANSFERS}/{name}"
        commands = _FETCH.format(
            config=shlex.quote(self._at(config)), target=shlex.quote(self._at(path))
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


def _unescaped(name: str) -> str:
    """Restore a name: `ls` in the C locale prints non-ASCII bytes as octal numbers."""
    if "\\" not in name:
        return name
    raw = name.encode("utf-8", "surrogateescape")
    raw = _OCTAL.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), raw)
    return raw.decode("utf-8", "surrogateescape")


def _life_s(url: str) -> float:
    """Return for how many seconds a presigned URL is valid; infinity if it does not say so."""
    expires = parse_qs(urlsplit(url).query).get("X-Amz-Expires", [""])[0]
    return float(expires) if expires.isdecimal() else math.inf


async def read_user(connection: FirecrestConnection, system: str) -> FirecrestUser:
    """Read the user's login name and accounts at the system.

    A list without a default account is asked for once more: Slurm's database may have been away,
    and firecREST leaves the default out when its command for that alone fails.
    """
    path = f"/status/{system}/userinfo"
    for _ in range(2):
        answer = await connection.get("userinfo", path, channels=JOB_CHANNELS)
        accounts = answer.get("accounts")
        known = [
            account
            for account in (accounts if isinstance(accounts, list) else [])
            if isinstance(account, Mapping) and account.get("name")
        ]
        default = next((str(account["name"]) for account in known if account.get("default")), "")
        if default or accounts is None:
            break
    user = answer.get("user")
    name = user.get("name") if isinstance(user, Mapping) else user
    if not isinstance(name, str) or not name or "/" in name:
        raise connection.nonsense("userinfo")
    names = dict.fromkeys(str(account["name"]) for account in known)
    return FirecrestUser(name, default, tuple(names))
