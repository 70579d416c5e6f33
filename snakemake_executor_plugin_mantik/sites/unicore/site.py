"""A site behind UNICORE: the Site protocol, implemented with connection, jobs and files."""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import (
    SiteError,
    SiteNotFound,
    SiteRejected,
    one_line,
)
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.jobs.paths import workspace_below
from snakemake_executor_plugin_mantik.jobs.reasons import Reason

from ..answers import shorten
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
from .connection import UnicoreConnection
from .description import job_description, lost_resources
from .files import LISTING_LIMIT, UnicoreFiles
from .jobs import UnicoreJobs
from .opening import (
    UnicoreQueues,
    locate_workspace,
    read_base,
    read_budgets,
    read_condition,
    read_queues,
    read_space,
)
from .paths import StoragePaths, is_encodable

API: Final = "unicore"

_QUERY: Final = re.compile(r"(\?|%3[Ff]|;)\S+")
"""The end of a URL, which may grant access to a file."""

_PHASES: Final = {
    "CREATED": Phase.WAITING,
    "RUNNING": Phase.RUNNING,
    "DONE": Phase.ENDED,
    "FAILED": Phase.ENDED,
    "ABORTED": Phase.ENDED,
}


def _hidden(text: str, url: str) -> str:
    """Return a server's text without what grants access to the file at `url`."""
    return _QUERY.sub("?…", text.replace(url, url.partition("?")[0]) if url else text)


class UnicoreImports:
    """Imports to the workspace, and the addresses of its files for those of other servers."""

    def __init__(self, connection: UnicoreConnection, paths: StoragePaths) -> None:
        self._connection = connection
        self._paths = paths

    def share(self, path: str) -> SharedFile:
        return SharedFile(f"{self._connection.base}{self._paths.url(path)}", API)

    async def start(self, source: SharedFile, path: str) -> str:
        self._paths.url(path)  # which checks it
        body = {"file": self._paths.below(path), "source": source.url}
        url = f"{self._paths.storage}/transfers"
        try:
            answer = await self._connection.once("import", "POST", url, json=body)
        except SiteError as error:  # the server may repeat the address
            error.what = _hidden(error.what, source.url)
            raise
        import_id = str(answer.headers.get("location", "")).rstrip("/").rpartition("/")[2]
        if not import_id:
            raise self._connection.nonsense(url)
        return import_id

    async def state(self, import_id: str) -> JobState:
        url = f"/transfers/{import_id}"
        try:
            found = await self._connection.get("import state", url)
        except SiteNotFound:
            return JobState(Phase.UNKNOWN)
        phase = _PHASES.get(str(found.get("status")))
        if phase is None:
            raise self._connection.nonsense(url)
        if phase is not Phase.ENDED:
            return JobState(phase)
        done = found["status"] == "DONE"
        message = str(found.get("statusMessage") or "").removeprefix("NOT_SUCCESSFUL").strip()
        message = shorten(one_line(_hidden(message, str(found.get("source") or ""))))
        return JobState(phase, Reason.SUCCESS if done else Reason.UNKNOWN, message)

    async def end(self, import_id: str) -> None:
        try:
            await self._connection.ask("end import", "DELETE", f"/transfers/{import_id}")
        except SiteNotFound:
            return


_log = logging.getLogger(__name__)


class UnicoreSite:
    """One workspace behind one UNICORE server; implements `Site`.

    UNICORE waits two minutes for the exit code of a job that has left the scheduler's queue
    (measured: 133 to 142 s) and calls it running until then.
    """

    states_lag = True

    def __init__(
        self,
        name: str,
        url: str,
        credentials: Credential,
        *,
        workspace_name: str,
        settings: SiteSettings,
        base: Path | None = None,
    ) -> None:
        """Prepare a site; `open` makes the first request.

        `url` is the base of the REST API, which ends with /rest/core. `workspace_name` is used if
        the workspace's path is not configured. `base` is the directory of a relative CA file, by
        default the current one.

        Raises:
            UserError: the URL or CA file cannot be used.
            SiteRejected: `workspace_name` is not valid.
        """
        if "/" in workspace_name or not is_encodable(workspace_name):
            raise SiteRejected(f"{workspace_name!r} is not a valid workspace name", where=name)
        self.name = name
        self._settings = settings
        self._workspace_name = workspace_name
        self._connection = UnicoreConnection(
            name,
            url,
            credentials,
            ca_file=(base or Path()) / settings.ca_file if settings.ca_file else None,
            proxy=settings.proxy,
            timeout_s=settings.timing.timeout_s,
            concurrent_requests=settings.timing.concurrent_requests,
        )
        self._jobs = UnicoreJobs(self._connection, name, settings.timing.submissions_per_second)
        self._opened_files: UnicoreFiles | None = None
        self._opened_imports: UnicoreImports | None = None
        self._queues = UnicoreQueues()
        self._server = ""
        self._storage: str | None = None

    @property
    def requests(self) -> Counter[str]:
        """Number of HTTP requests so far, by kind."""
        return self._connection.requests

    @property
    def _files(self) -> UnicoreFiles:
        if self._opened_files is None:
            raise RuntimeError(f"site {self.name} was not opened")
        return self._opened_files

    @property
    def _imports(self) -> UnicoreImports:
        if self._opened_imports is None:
            raise RuntimeError(f"site {self.name} was not opened")
        return self._opened_imports

    @property
    def clock(self) -> float | None:
        return self._connection.clock

    async def open(self, *, make: bool = True) -> SiteFacts:
        base = await read_base(self._connection, self.name)
        self._server = base.server
        self._queues, (storage, below, root) = await asyncio.gather(
            read_queues(self._connection),
            locate_workspace(
                self._connection,
                self.name,
                name=self._workspace_name,
                workspace=self._settings.workspace,
                storage=self._settings.storage,
            ),
        )
        self._storage = storage
        paths = StoragePaths(self.name, storage, workspace_below(below))
        self._opened_files = UnicoreFiles(self._connection, paths, self.name)
        self._opened_imports = UnicoreImports(self._connection, paths)
        if make:
            await self._opened_files.make_workspace(shared=self._settings.sharing == "group")
        return SiteFacts(
            workspace_below(root), base.server, base.user, self._queues.limits, LISTING_LIMIT,
            orders_jobs=self._settings.scheduler != "none",
        )  # fmt: skip

    async def describe(self) -> SiteDetails:
        if self._storage is None:
            raise RuntimeError(f"site {self.name} was not opened")
        free, budgets, notes = await asyncio.gather(
            read_space(self._connection, self._storage),
            read_budgets(self._connection),
            read_condition(self._connection),
        )
        return SiteDetails(free_bytes=free, accounts=budgets, notes=tuple(notes))

    async def close(self) -> None:
        await self._connection.close()

    async def submit(self, submission: Submission, begin: Callable[[], None] = do_nothing) -> str:
        known = self._queues.known.get(submission.resources.queue or "", frozenset())
        scheduler = self._settings.scheduler
        description = job_description(submission, scheduler, known, self._server)
        for lost in lost_resources(submission.resources, self._server):
            _log.debug("%s: submitted RAW, since %s loses %s", submission.name, self._server, lost)
        return await self._jobs.submit(description, begin)

    async def find(self, names: Mapping[str, str]) -> dict[str, list[str]]:
        return await self._jobs.find(names)

    async def states(self, ids: Sequence[str]) -> dict[str, JobState]:
        return await self._jobs.states(ids)

    async def glance(self, ids: Sequence[str]) -> None:
        """Return None: each job takes a request of its own."""

    async def scheduler_ids(self, ids: Sequence[str]) -> dict[str, str]:
        known = {i: state.scheduler_id for i, state in (await self.states(ids)).items()}
        return {i: known[i] for i in ids if is_scheduler_id(known[i])}

    async def explain(self, job_id: str) -> JobState:
        return await self._jobs.explain(job_id)

    async def cancel(self, ids: Sequence[str]) -> None:
        await self._jobs.cancel(ids)

    async def forget(
        self,
        ids: Sequence[str],
        *,
        succeeded: bool = False,  # noqa: ARG002 - directories are left
    ) -> None:
        await self._jobs.forget(ids)

    async def extend(self, ids: Sequence[str], seconds: float) -> None:
        await self._jobs.extend(ids, seconds)

    async def put(self, path: str, content: bytes, *, private: bool = False) -> None:
        await self._files.put(path, content, private=private)

    def get(
        self,
        path: str,
        *,
        offset: int = 0,
        size: int | None = None,  # noqa: ARG002 - one way
    ) -> AsyncIterator[bytes]:
        return self._files.get(path, offset)

    async def share(self, path: str) -> SharedFile | None:
        return self._imports.share(path)

    async def start_import(self, source: SharedFile, path: str) -> str | None:
        return await self._imports.start(source, path)

    async def import_state(self, import_id: str) -> JobState:
        return await self._imports.state(import_id)

    async def end_import(self, import_id: str) -> None:
        await self._imports.end(import_id)

    async def list(self, path: str) -> dict[str, Entry]:
        return await self._files.list(path)

    async def stat(self, path: str) -> Entry | None:
        return await self._files.stat(path)

    async def make_directory(self, path: str, *, private: bool = False) -> None:
        await self._files.make_directory(path, private=private)

    async def remove(self, path: str) -> None:
        await self._files.remove(path)
