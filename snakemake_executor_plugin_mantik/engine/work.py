"""All work at one site: the life of a job from the request to its outcome."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from snakemake_executor_plugin_mantik.engine import claims, messages
from snakemake_executor_plugin_mantik.engine.adopt import choose
from snakemake_executor_plugin_mantik.engine.end import Ender
from snakemake_executor_plugin_mantik.engine.fetch import Fetcher
from snakemake_executor_plugin_mantik.engine.observe import Addition, Ended, How, Nobody, Observer
from snakemake_executor_plugin_mantik.engine.patience import Patience
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.engine.request import JobRequest, Outcome
from snakemake_executor_plugin_mantik.engine.stage import Staged, Stager
from snakemake_executor_plugin_mantik.engine.submit import Submitter
from snakemake_executor_plugin_mantik.engine.watch import Watcher
from snakemake_executor_plugin_mantik.engine.watched import End, EndKind
from snakemake_executor_plugin_mantik.errors import (
    MantikError,
    SiteError,
    SiteRejected,
    UserError,
)
from snakemake_executor_plugin_mantik.jobs.markers import Marker, MarkerInvalid
from snakemake_executor_plugin_mantik.jobs.script import STEPS
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.journal import FileRecord, Journal, TryRecord, TryState
from snakemake_executor_plugin_mantik.sites.base import Reason, Site, SiteFacts
from snakemake_executor_plugin_mantik.staging.local import LocalFile, LocalFiles

BEFORE_INPUTS = STEPS[: STEPS.index("inputs")]
"""Steps of a script in which what it carried may not have been unpacked."""

RESTAGED = 2
"""How often a job is sent again because files were purged at the site while it waited."""


@dataclass
class _Life:
    """One try that this run has to do with.

    Attributes:
        ids: the site's ids of it.
        submitted_at: seconds since the epoch.
        sent: how often it was submitted, at most.
        staged: what each script that this run submitted carried.
        addition: what an observer adds to it.
    """

    record: TryRecord
    ids: list[str]
    submitted_at: float
    sent: int
    staged: list[Staged] = field(default_factory=list)
    addition: Addition | None = None


class SiteWork:
    """The jobs of one site. All methods belong to the event loop's thread."""

    def __init__(
        self,
        site: Site,
        facts: SiteFacts,
        planner: Planner,
        journal: Journal,
        *,
        workdir: Path,
        state: Path,
        tell: Callable[[str], None],
        give_up: Callable[[Sequence[TryRecord]], Awaitable[None]],
        observer: Observer | None = None,
    ) -> None:
        """Make the work of an opened site.

        Args:
            site: opened.
            facts: what it told.
            planner: knows its config.
            journal: of the workflow.
            workdir: the workflow's directory.
            state: our own local directory, for logs and things on their way.
            tell: writes a line to the user's log.
            give_up: sees to it that tries, at whatever site, are over and will never run.
            observer: looks on.
        """
        self._observer = observer or Nobody()
        settings = planner.config.site
        self.site = site
        self.facts = facts
        self.planner = planner
        self._journal = journal
        self._workdir = workdir
        self._logs = state / "logs"
        self._tell = tell
        self._give_up = give_up
        scratch = state / "transfers" / quote(site.name, safe="")
        scratch.mkdir(parents=True, exist_ok=True)
        for left in scratch.iterdir():
            left.unlink()  # of a run that was killed
        self.local = LocalFiles(workdir, journal.files)
        clock = asyncio.get_running_loop().time
        patience = self._patience = Patience(site.name, tell, clock)
        self.stager = Stager(site, journal.files, patience, scratch, settings.inline_limit_bytes)
        self.watcher = Watcher(
            site, settings, patience, journal.submitted, clock, on_started=self._observer.started
        )
        self._fetcher = Fetcher(site, patience, workdir, scratch, on_links=journal.files.set_links)
        self._submitter = Submitter(site, journal, patience)
        self.ender = Ender(
            site, journal, self.watcher, settings=settings, patience=patience, tell=tell,
            observer=self._observer, workdir=workdir,
        )  # fmt: skip
        self._slots = asyncio.Semaphore(settings.max_jobs)

    @classmethod
    def sharing(cls, twin: "SiteWork", planner: Planner) -> "SiteWork":
        """The work of another name of the same workspace: other jobs, the same files and client."""
        work = copy(twin)
        work.planner = planner
        work._slots = asyncio.Semaphore(planner.config.site.max_jobs)
        return work

    async def run(self, request: JobRequest) -> Outcome:
        """The whole life of a job; returns when its end is known and its outputs are here.

        Raises:
            MantikError: it cannot be run at all, with nothing left at the site.
        """
        files = await self._files(request)
        async with self._slots:
            for _ in range(RESTAGED + 1):
                record = await self._try(request, files)
                # An earlier run may have submitted it once more than it could write down.
                sent = len(record.site_jobs) + 1 if record.state is not TryState.PLANNED else 0
                submitted_at = record.submitted or time.time()
                life = _Life(record, list(record.site_jobs), submitted_at, sent)
                try:
                    whole, more = await self._observed(request, life)
                    end = await self._carry(whole, life, [*files, *more])
                except MantikError as error:
                    self._unsent(life, error)
                    raise
                outcome = await self._conclude(whole, life, end)
                # Its own files are nobody else's, and no part of what lies at the site for others.
                self.stager.lost([file.path for file in more])
                if outcome is not None:
                    return outcome
        raise MantikError(
            "files that the job needs keep disappearing at the site",
            where=f"{request.name} at {request.site}",
            do="See whether the workspace is on a file system that is purged or full; set Site:"
            " Workspace to another one",
        )

    async def _files(self, request: JobRequest) -> list[LocalFile]:
        files = []
        kept = [o.path for o in request.outputs if o.keep and (self._workdir / o.path).exists()]
        for path in dict.fromkeys([*request.inputs, *kept]):
            files += await self.local.look(path)
        if (image := self.planner.image) is not None:
            files += await self.local.look(image[1], local=image[0])
        return files

    async def _try(self, request: JobRequest, files: list[LocalFile]) -> TryRecord:
        """The try to go on with: one of an earlier run, or a new one."""
        inputs = {file.path: file.sha256 for file in files}
        fingerprint = request.fingerprint(inputs, self.planner.environment)
        choice = choose(request, fingerprint, self._journal.open_tries(request.job))
        await self._give_up(choice.unwanted)
        if choice.adopted is not None:
            if choice.adopted.state is not TryState.PLANNED:
                self._tell(f"{request.name}: taken up again at {request.site}, not run twice.")
            return choice.adopted
        return self._journal.new_try(
            site=request.site, job=request.job, rule=request.rule, name=request.name,
            fingerprint=fingerprint,
        )  # fmt: skip

    async def _observed(
        self, request: JobRequest, life: _Life
    ) -> tuple[JobRequest, list[LocalFile]]:
        """The request with what an observer adds to it, and that one's files."""
        life.addition = added = await self._observer.prepare(
            request, life.record, self.facts.workspace
        )
        if added is None:
            return request, []
        outputs = (*request.outputs, OutputFile(added.directory, "log", directory=True, keep=True))
        variables = {**request.variables, **added.variables}
        whole = replace(request, variables=variables, outputs=outputs)
        return whole, await self.local.look(added.directory)

    async def _carry(self, request: JobRequest, life: _Life, files: list[LocalFile]) -> End:
        """Submit the try unless the site may know it already, and wait for its end."""
        resources = self.planner.resources(request.resources, request.threads)
        submit = life.sent == 0
        while True:
            if submit:
                await self._submit(request, life, files)
            end = await self.watcher.watch(
                life.record, life.ids, resources.runtime_s, sent=life.sent
            )
            life.ids = list(dict.fromkeys([*life.ids, *end.ids]))
            if end.kind is not EndKind.VANISHED:
                return end
            self._tell(f"{request.name}: no trace of it at {request.site}, submitted again.")
            submit = True

    async def _submit(self, request: JobRequest, life: _Life, files: list[LocalFile]) -> None:
        staged = await self.stager.stage(files, request.inputs)
        spec = self.planner.spec(request, life.record, self.facts, staged)
        # From now on the job may change them there, whether it succeeds or not.
        self.stager.lost([output.path for output in request.outputs])
        life.submitted_at = time.time()
        self._observer.submitting(life.record, spec)
        try:
            site_job = await self._submitter.submit(life.record, spec, request.secrets)
        except SiteRejected as error:
            if life.sent and not await self._revoke(life.record):
                return  # an earlier submission of it runs, after all
            self._unsendable(life, error)
            raise
        life.sent += 1
        life.staged.append(staged)
        if site_job:
            # Earlier ids stay: any of them may be the one that runs.
            life.ids.append(site_job)
            queue = spec.resources.queue
            self._observer.submitted(life.record, site_job, queue or "")
            self._tell(messages.submitted(request.name, request.site, site_job, queue))

    def _unsent(self, life: _Life, error: MantikError) -> None:
        """A try that could not be sent and never was is over; the next run makes another one."""
        if isinstance(error, UserError) and not life.sent and life.record.state is TryState.PLANNED:
            self._unsendable(life, error)

    def _unsendable(self, life: _Life, error: MantikError) -> None:
        self._observer.ended(life.record, Ended("failed", error.what))
        self._journal.abandoned(life.record.id, f"failed: {error.what}")

    async def _revoke(self, record: TryRecord) -> bool:
        """Whether a try is certain never to run from now on."""
        return await self._patience(lambda: claims.revoke(self.site, record))

    async def _conclude(self, request: JobRequest, life: _Life, end: End) -> Outcome | None:
        """The job's outcome from its try's end; None if it is to be tried again at once."""
        record = life.record
        path = self._log_path(request, record)
        if end.exit_code is None:
            return await self._conclude_without_marker(request, life, end, path)
        try:
            marker = await self._fetcher.marker(record, end)
        except (MarkerInvalid, SiteError) as error:
            await self._log(record, None, path)
            words = f"The job ended with exit code {end.exit_code}, but what it made is unknown"
            return self._failed(request, life, f"{words}. {error}\n", path, None)
        if self._purged(life, marker):
            await self._again(life, "files were purged at the site")
            return None
        # Of several submissions it is not known which one ran, and so what it unpacked.
        if marker.failed_step not in BEFORE_INPUTS and life.sent == len(life.staged) == 1:
            self.stager.confirm(life.staged[0])
        if marker.exit_code != 0:
            self.stager.lost([output.path for output in request.outputs])
            return await self._command_failed(request, life, marker, path)
        return await self._command_succeeded(request, life, marker, path)

    async def _command_succeeded(
        self, request: JobRequest, life: _Life, marker: Marker, path: Path
    ) -> Outcome:
        """The job itself says that it succeeded; now its outputs have to come here."""
        record = life.record
        try:
            fetched = await self._outputs(request, life, marker)
        except MantikError as error:
            await self._log(record, marker, path)
            return self._failed(request, life, f"{error}\n", path, marker)
        except OSError as error:
            return self._failed(
                request, life,
                f"The outputs cannot be written here ({error.strerror}: {error.filename}). They are"
                " still at the site: free space and start again.\n", None, None, keep=True,
            )  # fmt: skip
        await self._log(record, marker, path)
        return self._succeeded(request, life, marker, fetched, path)

    async def _outputs(
        self, request: JobRequest, life: _Life, marker: Marker
    ) -> tuple[FileRecord, ...]:
        """Fetch the outputs: if need be without what an observer asked for.

        Raises:
            MantikError, OSError: an output cannot be had.
        """
        record, added = life.record, life.addition
        if added is None:
            return (await self._fetcher.outputs(record, marker, request.outputs)).files
        below = f"{added.directory}/"
        try:
            fetched = await self._fetcher.outputs(record, marker, request.outputs)
        except (MantikError, OSError) as error:
            own = [e for e in marker.files if not f"{e.path}/".startswith(below)]
            if len(own) == len(marker.files):
                raise
            without = replace(marker, files=tuple(own))
            fetched = await self._fetcher.outputs(record, without, request.outputs[:-1])
            self._tell(f"{record.name}: what it logged to {below} did not come back. {error}")
        return tuple(file for file in fetched.files if not file.path.startswith(below))

    async def _conclude_without_marker(
        self, request: JobRequest, life: _Life, end: End, path: Path
    ) -> Outcome | None:
        if (lost := self._lost(request, life, end)) is not None:
            await self._again(life, lost)
            return None
        log = await self._log(life.record, None, path)
        words = messages.stopped(end.state, self._where(request, life), log, self._shown(path))
        await self.ender.rescue(life.record.id)
        cancelled = end.state is not None and end.state.reason is Reason.CANCELLED
        how: How = "killed" if cancelled else "failed"
        return self._failed(request, life, words, path if log else None, None, how=how)

    async def _again(self, life: _Life, why: str) -> None:
        """A try is over and is nobody's failure; the job gets another one."""
        self._observer.ended(life.record, Ended("killed", why))
        self._journal.abandoned(life.record.id, f"failed: {why}")
        await self.ender.done(life.record.id, life.ids)

    @staticmethod
    def _where(request: JobRequest, life: _Life) -> str:
        return f"{request.site}, {', '.join(life.ids) or life.record.id}"

    async def _command_failed(
        self, request: JobRequest, life: _Life, marker: Marker, path: Path
    ) -> Outcome:
        """The job itself says that it failed; trouble with its logs does not change that."""
        with suppress(MantikError, OSError):
            if not marker.bare:
                await self._outputs(request, life, marker)
        log = await self._log(life.record, marker, path)
        limit = self.planner.resources(request.resources, request.threads).runtime_s
        timed_out = limit is not None and _ran(marker) >= limit - max(60, 0.02 * limit)
        where = self._where(request, life)
        words = messages.failed(marker, where, log, self._shown(path), timed_out)
        how: How = "killed" if marker.signal and not timed_out else "failed"
        return self._failed(request, life, words, path, marker, how=how)

    def _lost(self, request: JobRequest, life: _Life, end: End) -> str | None:
        """Why a try without a marker is nobody's failure and is to be run again; None if it is."""
        if end.kind is EndKind.REVOKED:
            return "given up before it started"
        if life.record.state is TryState.ENDED:
            return "its results are no longer at the site"
        if end.claimed or end.state is None or end.state.reason is not Reason.SUCCESS:
            return None
        # The script ends well without a claim only where the directory for it has gone.
        self._tell(f"{request.name}: the workspace at {request.site} has lost files; sent again.")
        self.stager.purged()
        self._submitter.purged()
        return "the workspace was purged"

    def _purged(self, life: _Life, marker: Marker) -> bool:
        """Whether the job did not find what was to be there; then that is sent again."""
        if marker.missing_inputs:
            self.stager.lost(marker.missing_inputs)
            return True
        if marker.failed_step != "bundles" or marker.signal:
            return False
        bundles = [bundle for staged in life.staged for bundle in staged.bundles]
        self.stager.gone(list(dict.fromkeys(bundles)))
        # What an earlier run's script carried is not known.
        return bool(bundles) or not life.staged

    async def _log(self, record: TryRecord, marker: Marker | None, path: Path) -> bytes:
        """The end of the job's log; trouble with it does not change how the job ended."""
        try:
            return await self._fetcher.log(record, marker, path)
        except (SiteError, OSError) as error:
            self._tell(f"{record.name}: its log could not be fetched. {error}")
            return marker.log if marker is not None else b""

    def _succeeded(
        self,
        request: JobRequest,
        life: _Life,
        marker: Marker,
        files: tuple[FileRecord, ...],
        path: Path,
    ) -> Outcome:
        waited, ran = self._times(life, marker)
        self.stager.made(files)
        log = path if path.exists() else None
        self._observer.ended(
            life.record, Ended("finished", exit_code=0, log=log, waited=waited, ran=ran)
        )
        self._journal.ended(life.record.id, "succeeded", waited=waited, ran=ran, log=str(log or ""))
        self._tell(messages.finished(request.name, request.site, waited, ran, self._shown(path)))
        return Outcome(request.number, life.record.id, True, log=log, site_job=_join(life.ids))

    def _failed(
        self,
        request: JobRequest,
        life: _Life,
        words: str,
        path: Path | None,
        marker: Marker | None,
        *,
        keep: bool = False,
        how: How = "failed",
    ) -> Outcome:
        """A failure; with `keep` the try stays open, so that the next run fetches its results."""
        waited, ran = self._times(life, marker) if marker is not None else (None, None)
        log = path if path is not None and path.exists() else None
        if not keep:
            first, code = words.splitlines()[0], marker.exit_code if marker is not None else None
            self._observer.ended(life.record, Ended(how, first, code, log, waited, ran))
            self._journal.ended(
                life.record.id, f"failed: {first}", waited=waited, ran=ran,
                log=str(log or ""),
            )  # fmt: skip
        return Outcome(
            request.number, "" if keep else life.record.id, False, words, log, _join(life.ids)
        )

    def _log_path(self, request: JobRequest, record: TryRecord) -> Path:
        readable = re.sub(r"[^\w=.,+-]+", "_", request.name)[:100]
        return self._logs / f"{readable}.{record.id[:8]}.log"

    def _shown(self, path: Path) -> Path | None:
        """A log's path as the user reads it; None if there is none."""
        if not path.exists():
            return None
        return path.relative_to(self._workdir) if path.is_relative_to(self._workdir) else path

    def _times(self, life: _Life, marker: Marker) -> tuple[float, float]:
        """Seconds waited and run. Both clocks are used only against themselves."""
        total = time.time() - life.submitted_at
        return max(0.0, total - _ran(marker)), _ran(marker)

    async def commit(self, outcome: Outcome, request: JobRequest) -> None:
        """Snakemake has taken the outcome: nothing of the try is needed any more."""
        for output in request.outputs:
            known = self._journal.files.remote_file(self.site.name, output.path)
            if known is not None and outcome.succeeded:
                self.local.touched(output.path, known.size, known.sha256)
        if outcome.try_id:
            let_end = bool(self.planner.config.environment.after_on_login)
            await self.ender.done(outcome.try_id, outcome.site_job.split(), let_end=let_end)


def _join(ids: list[str]) -> str:
    return " ".join(ids)


def _ran(marker: Marker) -> float:
    """Seconds that the job ran, by the node's own clock."""
    if marker.started is None or marker.ended is None:
        return 0.0
    return max(0.0, marker.ended - marker.started)
