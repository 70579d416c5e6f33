"""A site behind firecREST v2: the Site protocol, implemented with connection, jobs and files."""

import asyncio
import re
import shlex
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import SiteRejected, SiteUnreachable
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.jobs.paths import workspace_below

from ..base import (
    Entry,
    JobState,
    Phase,
    SharedFile,
    SiteDetails,
    SiteFacts,
    Submission,
    do_nothing,
)
from ..credentials import Credential
from ..slurm import is_scheduler_id
from .connection import FirecrestConnection
from .files import FirecrestFiles
from .jobs import OUTPUT_BYTES, FirecrestJobs
from .opening import (
    FirecrestSystem,
    FirecrestUser,
    choose_workspace,
    list_known_defects,
    read_partitions,
    read_system,
    read_user,
)
from .script import (
    JOBS,
    TRANSFERS,
    WorkspacePaths,
    is_expressible,
    scheduler_job_name,
    submission_body,
)
from .transfers import FirecrestTransfers, transfer_script

_ATTEMPTS: Final = 5
"""How often the job connects; each attempt goes on where the one before broke off."""
_STALLED_S: Final = 120
"""Seconds of next to no bytes after which an attempt ends."""

_SAFE: Final = re.compile(r"https?://[!#-\[\]-~]+")
"""URLs that are one option of curl's, in quotes: ASCII without blanks, quotes and backslashes."""

_FETCH: Final = """\
config={config}
trap 'rm -f -- "$config"' EXIT
umask 077
for attempt in {attempts}; do
  curl --config "$config" --fail --silent --show-error --location --continue-at - \\
    --connect-timeout 60 --speed-limit 1000 --speed-time {stalled} --output {target} && exit
  sleep "$attempt"
done
exit 1
"""


class FirecrestImports:
    """Imports to the workspace.

    Their ids are those of their jobs, if these are known, and of the private files.
    """

    def __init__(
        self,
        system: FirecrestSystem,
        paths: WorkspacePaths,
        files: FirecrestFiles,
        jobs: FirecrestJobs,
        account: str | None,
    ) -> None:
        self._system = system
        self._paths = paths
        self._files = files
        self._jobs = jobs
        self._account = account

    async def start(self, source: SharedFile, path: str) -> str | None:
        if source.api or not _SAFE.fullmatch(source.url):
            return None
        name = str(uuid.uuid4())
        config = f"{TRANSFERS}/{name}"
        commands = _FETCH.format(
            config=shlex.quote(self._paths.absolute(config)),
            target=shlex.quote(self._paths.absolute(path)),
            attempts=" ".join(map(str, range(1, _ATTEMPTS + 1))),
            stalled=_STALLED_S,
        )
        script = transfer_script(self._system, self._paths.absolute(JOBS), self._account, commands)
        await self._files.make_directory(TRANSFERS, private=True)
        scheme = source.url.partition(":")[0]
        options = f'url = "{source.url}"\ngloboff\nproto = "={scheme}"\nproto-redir = "={scheme}"\n'
        await self._files.put(config, options.encode(), private=True)
        try:
            job = await self._jobs.submit(script, self._paths.root)
        except SiteRejected:
            await self._files.remove(config)
            raise
        except SiteUnreachable:  # it may have been submitted
            job = ""
        return f"{job}/{name}"

    async def state(self, import_id: str) -> JobState:
        job = import_id.partition("/")[0]
        return await self._jobs.state(job) if job else JobState(Phase.UNKNOWN)

    async def end(self, import_id: str) -> None:
        job, _, name = import_id.partition("/")
        await self._files.remove(f"{TRANSFERS}/{name}")  # a job that starts later ends at once
        if not job:
            return
        if (await self._jobs.state(job)).phase is not Phase.ENDED:
            await self._jobs.cancel([job])
        await self._files.remove(f"{JOBS}/{job}.out")


@dataclass(frozen=True)
class _Opened:
    system: FirecrestSystem
    user: FirecrestUser
    paths: WorkspacePaths
    files: FirecrestFiles
    imports: FirecrestImports


class FirecrestSite:
    """One workspace at one system behind a firecREST server; implements `Site`."""

    states_lag = False

    def __init__(
        self,
        name: str,
        url: str,
        machine: str,
        credentials: Credential,
        *,
        workspace_name: str,
        settings: SiteSettings,
        base: Path | None = None,
        account: str | None = None,
    ) -> None:
        """Prepare a site; `open` makes the first request.

        `machine` is the system's name at the server. `workspace_name` is used if the workspace's
        path is not configured. `base` is the directory of a relative CA file, by default the
        current one. `account` pays for the jobs that transfer large files; by default the user's
        default account.

        Raises:
            UserError: the URL or CA file cannot be used.
            SiteRejected: `workspace_name` is not valid.
        """
        if "/" in workspace_name or not is_expressible(workspace_name):
            raise SiteRejected(f"{workspace_name!r} is not a valid workspace name", where=name)
        self.name = name
        self._machine = machine
        self._settings = settings
        self._workspace_name = workspace_name
        self._account = account
        self._connection = FirecrestConnection(
            name,
            url,
            credentials,
            ca_file=(base or Path()) / settings.ca_file if settings.ca_file else None,
            proxy=settings.proxy,
            timeout_s=settings.timing.timeout_s,
            concurrent_requests=settings.timing.concurrent_requests,
        )
        self._jobs = FirecrestJobs(self._connection, settings.timing.submissions_per_second)
        self._opened: _Opened | None = None

    @property
    def requests(self) -> Counter[str]:
        """Number of HTTP requests so far, by kind."""
        return self._connection.requests

    @property
    def _open(self) -> _Opened:
        if self._opened is None:
            raise RuntimeError(f"site {self.name} was not opened")
        return self._opened

    @property
    def _files(self) -> FirecrestFiles:
        return self._open.files

    @property
    def clock(self) -> float | None:
        return self._connection.clock

    async def open(self, *, make: bool = True) -> SiteFacts:
        system = await read_system(self._connection, self._machine)
        self._jobs.system = system.name
        user, queues = await asyncio.gather(
            read_user(self._connection, system.name), read_partitions(self._connection, system.name)
        )
        root = choose_workspace(
            system.file_systems,
            user=user.name,
            site=self.name,
            name=self._workspace_name,
            workspace=self._settings.workspace,
            storage=self._settings.storage,
        )
        if not all(is_expressible(part) for part in root.strip("/").split("/")):
            raise SiteRejected(
                f"firecREST cannot carry the workspace's path {root!r}",
                where=f"site {self.name}",
                do="Set Workspace in the backend config to a plain path",
            )
        workspace = workspace_below(root)
        paths = WorkspacePaths(self.name, workspace)
        account = self._account or user.account or None
        transfers = FirecrestTransfers(self._connection, system, paths, self._jobs, account)
        files = FirecrestFiles(self._connection, system, paths, transfers)
        imports = FirecrestImports(system, paths, files, self._jobs, account)
        if make:
            await files.make_workspace(shared=self._settings.sharing == "group")
        self._opened = _Opened(system, user, paths, files, imports)
        return SiteFacts(
            workspace,
            system.server,
            user.name,
            queues,
            accounts=user.accounts,
            orders_jobs=True,
            upload_bytes=system.direct_bytes,
        )

    async def describe(self) -> SiteDetails:
        opened = self._open
        return SiteDetails(
            accounts=dict.fromkeys(opened.user.accounts, ""),
            default_account=opened.user.account,
            scheduler=opened.system.scheduler,
            notes=tuple(list_known_defects(opened.system)),
        )

    async def close(self) -> None:
        await self._connection.close()

    async def submit(self, submission: Submission, begin: Callable[[], None] = do_nothing) -> str:
        opened = self._open
        job = submission_body(submission, opened.system.scheduler, opened.paths.root)["job"]
        return await self._jobs.submit(job["script"], job["working_directory"], begin)

    async def find(self, names: Mapping[str, str]) -> dict[str, list[str]]:
        wanted = {tag: scheduler_job_name(name, tag) for tag, name in names.items()}
        return await self._jobs.find(wanted, filters=self._open.system.filters_jobs)

    async def states(self, ids: Sequence[str]) -> dict[str, JobState]:
        return await self._jobs.states(ids)

    async def glance(self, ids: Sequence[str]) -> dict[str, JobState]:
        return await self._jobs.glance(ids)

    async def scheduler_ids(self, ids: Sequence[str]) -> dict[str, str]:
        return {i: i for i in ids if is_scheduler_id(i)}

    async def explain(self, job_id: str) -> JobState:
        opened = self._open
        path = f"{opened.paths.absolute(JOBS)}/{job_id}.out"
        return await self._jobs.explain(
            job_id, lambda client: client.tail(opened.system.name, path, num_bytes=OUTPUT_BYTES)
        )

    async def cancel(self, ids: Sequence[str]) -> None:
        await self._jobs.cancel(ids)

    async def forget(self, ids: Sequence[str], *, succeeded: bool = False) -> None:
        if succeeded and self._open.system.scheduler == "slurm":
            return
        known = [job_id for job_id in ids if job_id.isalnum()]
        await self._jobs.each(known, lambda job: self._files.remove(f"{JOBS}/{job}.out"))

    async def extend(self, ids: Sequence[str], seconds: float) -> None:
        """Do nothing: schedulers keep their records themselves."""

    async def put(self, path: str, content: bytes, *, private: bool = False) -> None:
        await self._files.put(path, content, private=private)

    def get(self, path: str, *, offset: int = 0, size: int | None = None) -> AsyncIterator[bytes]:
        return self._files.get(path, offset, size)

    async def share(self, path: str) -> SharedFile | None:
        url = await self._files.share(path)
        return None if url is None else SharedFile(url)

    async def start_import(self, source: SharedFile, path: str) -> str | None:
        return await self._open.imports.start(source, path)

    async def import_state(self, import_id: str) -> JobState:
        return await self._open.imports.state(import_id)

    async def end_import(self, import_id: str) -> None:
        await self._open.imports.end(import_id)

    async def list(self, path: str) -> dict[str, Entry]:
        return await self._files.list(path)

    async def stat(self, path: str) -> Entry | None:
        return await self._files.stat(path)

    async def make_directory(self, path: str, *, private: bool = False) -> None:
        await self._files.make_directory(path, private=private)

    async def remove(self, path: str) -> None:
        await self._files.remove(path)
