"""Run jobs at one site, from the request to the outcome."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ..common.errors import JournalError, MantikError, SiteRejected, UserError
from ..jobs.paths import ATTEMPTS, display_path, is_at
from ..jobs.reasons import Reason
from ..jobs.segments import GO_ON_CODE
from ..journal import AttemptRecord, AttemptState, FileRecord
from ..sites.base import JobState, Site, SiteFacts
from ..sites.slurm import explain_pending
from ..staging.bundle import FileChanged
from ..staging.local import LocalFile
from .attempt import Attempt
from .cancel import Canceller
from .dispatch import Dispatcher
from .ending import Ending
from .evidence import Evidence, Finding
from .expect import Load
from .fetch import Fetcher
from .live_copies import LiveCopies
from .machine import Do, End, Verdict, decide
from .observer import Observer
from .place import Place, Places, make_retry
from .plan import Planner
from .presubmit import Presubmitter
from .request import JobRequest, Outcome
from .site_retry import LONGEST_BUSY_S
from .undeclared import UndeclaredFiles
from .watch import Watcher
from .work import SiteWork

_FULL_FIRST_S = 30.0
"""Seconds before resubmitting a job that exceeded a limit on jobs; doubled each time, up to
`LONGEST_BUSY_S`."""
_AWAY_FIRST_S = 5.0
"""Seconds before resubmitting a job that a site lost while one of its services was down; doubled,
too. The site has answered by then: otherwise the loss would not be certain."""
JOB_STATES = ("running", "queued", "staging")

_MAX_RESENDS = 2
"""How often a job is resubmitted because files at the site differ from those that it was submitted
with, while the local files stay the same."""


class SiteRunner:
    """Run the jobs of one site. Call all methods from the event loop's thread."""

    def __init__(
        self,
        site: Site,
        facts: SiteFacts,
        planner: Planner,
        place: Place,
        places: Places,
        *,
        observer: Observer | None = None,
        room: Callable[[], int] = lambda: 0,
    ) -> None:
        """Prepare; `room` returns how many jobs may be submitted before they are requested."""
        workflow, settings = places.workflow, planner.config.site
        self._observer = observer or Observer()
        self.site = site
        self.facts = facts
        self.planner = planner
        self.place = place
        self.local = places.local
        self._journal = workflow.journal
        self._notify = workflow.notify
        self._give_up = workflow.give_up
        retry = self._retry = make_retry(site, workflow.notify, settings.timing)
        self._live = LiveCopies(site, self._observer, workflow.workdir, workflow.notify)
        self.watcher = Watcher(
            site, settings, retry, workflow.journal.submitted, asyncio.get_running_loop().time,
            on_started=self._started, on_logged=self._live.grown,
            on_waiting=self._waiting, on_pending=self._pending,
        )  # fmt: skip
        place.lead.on_deposed(self.watcher.fail)
        self._work = work = SiteWork(
            site, facts, planner, place, places, self._observer, retry,
            Fetcher(site, retry, workflow, place.scratch), UndeclaredFiles(workflow),
        )  # fmt: skip
        self.canceller = Canceller(work, self.watcher)
        self._dispatcher = Dispatcher(work, self.canceller)
        self.presubmitter = Presubmitter(
            work, self._dispatcher, lambda: min(room(), settings.max_jobs - self._running)
        )
        self._slots = asyncio.Semaphore(settings.max_jobs)
        self._requested = self._running = 0
        self._hindered: set[tuple[str, str]] = set()

    def count_jobs(self) -> Mapping[str, int]:
        """Return how many jobs are in each of `JOB_STATES`. Any thread may call this method.

        Jobs that Snakemake has not requested yet are queued, and so are those that wait here
        because of the site's MaxJobs. The files of a job that is staging are on the way, to the
        site or from it.
        """
        running, waiting = self.watcher.count()
        return {
            "running": running,
            "queued": waiting + self.presubmitter.number + self._requested - self._running,
            "staging": max(0, self._running - running - waiting),
        }

    @property
    def is_full(self) -> bool:
        """Whether further jobs wait here because of the site's MaxJobs."""
        return self._requested >= self.planner.config.site.max_jobs

    async def load(self, name: str) -> Load:
        """Return how busy the site is, which jobs know by `name`.

        Raises:
            MantikError: it does not answer.
        """
        if (nodes := await self.site.free_nodes()) is None:
            await self.site.stat(ATTEMPTS)  # to see that it answers
        return Load(nodes, self._journal.waits(name))

    async def run(self, request: JobRequest) -> Outcome:
        """Run a job; return when its end is known and, after a success, its outputs are local.

        Raises:
            MantikError: the job cannot be run at all; or this controller cannot follow it any more,
                because another one leads (PlaceTaken) or the journal cannot be written: then an
                attempt of it may still run.
        """
        self._requested += 1
        slot = asyncio.ensure_future(self._slots.acquire())
        try:
            if not self._is_there(request) and not self.is_pooled(request):
                await slot
            self._running += 1
            try:
                return await self._run(request)
            finally:
                self._running -= 1
                self.presubmitter.forget(request)
        finally:
            self._requested -= 1
            if not slot.cancel() and not slot.cancelled():
                self._slots.release()

    def _is_there(self, request: JobRequest) -> bool:
        """Return whether a job was submitted already: it is watched even if no slot is free."""
        attempts = self._journal.open_attempts(*request.jobs)
        return self.presubmitter.has(request) or any(
            r.state is not AttemptState.PLANNED for r in attempts
        )

    def is_pooled(self, request: JobRequest) -> bool:
        """Return whether a job is none of the scheduler's: `MaxJobs` limits those."""
        return self.planner.resources(request.resources, request.threads).pool is not None

    async def _run(self, request: JobRequest) -> Outcome:
        presubmitted = await self.presubmitter.take(request)
        resent, pause, before = 0, 0.0, frozenset[FileRecord]()
        while resent <= _MAX_RESENDS:
            files = await self._dispatcher.look_at_files(request)
            contents = frozenset(file.record for file in files)
            # Inputs that the user has edited meanwhile are no sign of trouble at the site.
            resent, before = (resent if contents == before else 0), contents
            verdict, outcome = await self._run_attempt(request, files, presubmitted)
            if outcome is not None:
                return outcome
            if verdict.end is End.GOES_ON:
                resent, pause, presubmitted = 0, 0.0, None
            elif verdict.end is End.LATER:
                first = _FULL_FIRST_S if verdict.reason is Reason.REJECTED else _AWAY_FIRST_S
                pause = min(max(2 * pause, first), LONGEST_BUSY_S)
                await asyncio.sleep(pause * random.uniform(1.0, 1.25))  # noqa: S311
            else:
                resent += 1
        if verdict.reason is Reason.ALLOCATION_ENDED:
            raise MantikError(
                "the pool's allocations keep ending while they run this job",
                where=f"{request.name} at {request.site}",
                do="Check whether it uses more memory than it requests, and see the output of the"
                " allocations at the site; or leave out mantik_pool",
            )
        raise MantikError(
            "files that the job needs keep disappearing or changing at the site",
            where=f"{request.name} at {request.site}",
            do="Check whether the workspace is on a file system that is purged or full, and whether"
            " the command changes its own inputs; or set Site: Workspace to another file system",
        )

    async def _run_attempt(
        self, request: JobRequest, files: list[LocalFile], presubmitted: Attempt | None
    ) -> tuple[Verdict, Outcome | None]:
        """Run one attempt; return what its end means, and the outcome if it is the last.

        `presubmitted` is the attempt that was submitted before the job was requested, if any.
        """
        record = await self._dispatcher.choose_attempt(request, files)
        if presubmitted is not None and presubmitted.record.id == record.id:
            attempt, attempt.record = presubmitted, record
        else:
            attempt = Attempt.of(record)
            self.presubmitter.forget(request)
        attempt.files = files
        try:
            await self._dispatcher.observe(request, attempt)
            if record.after:  # it does not wait for other jobs any more
                with suppress(JournalError):  # the disk is full: only MLflow shows less
                    self._journal.waiting(record.id, record.waits)
            self._live.follow(record, attempt.extras)
            end = await self._submit_and_watch(request, attempt)
        except FileChanged as error:
            await self.place.stager.look_again(error.path)
            verdict = Verdict(End.AGAIN, why="its inputs changed while they were being sent")
            if attempt.sent:  # it left no trace, but may still start; `record` is from before
                sent = replace(record, state=AttemptState.SUBMITTED, site_jobs=tuple(attempt.ids))
                await self._give_up([sent])
            else:
                await self.canceller.record_end(record, End.AGAIN, verdict.why)
            await self.presubmitter.end_segments(request, record)
            await self._follow(request, record, End.AGAIN)
            return verdict, None
        except MantikError as error:
            await self._dispatcher.abandon_if_unsent(attempt, error)
            if self._journal.attempts([record.id])[0].state.final:
                # Others may wait for an earlier submission of it.
                await self._follow(request, record, End.REFUSED)
            raise
        finally:
            await self._live.stop(record)
        if end.exit_code is None:  # another controller may have adopted it and removed its marker
            await self._assure()
        verdict, outcome = await self._conclude(request, attempt, end)
        if outcome is None and attempt.withdrawn:
            outcome = Outcome(request.number, "", False, withdrawn=True)
        return verdict, outcome

    async def _conclude(
        self, request: JobRequest, attempt: Attempt, end: Evidence
    ) -> tuple[Verdict, Outcome | None]:
        """Fetch what an attempt has made; return what its end means, and the outcome if final."""
        record = attempt.record
        # Segments that wait for this one run only if its own script says that the job goes on.
        if asks := end.exit_code == GO_ON_CODE:
            await self.presubmitter.stop_segments(request)
        else:
            await self.presubmitter.end_segments(request, record)
        verdict, outcome = await Ending(self._work, attempt, self.canceller).conclude(end)
        if asks and verdict.end is not End.GOES_ON:
            await self.presubmitter.end_segments(request, record)
        if verdict.end is End.GOES_ON:
            self._dispatcher.gone_on.add(record.id)
        if verdict.purged:
            self._dispatcher.purged()
        await self._follow(request, record, verdict.end)
        if verdict.end is End.SUCCEEDED:
            self.local.settled(self._made(request))
            await self._report_changed(request, attempt.files)
        return verdict, outcome

    async def _follow(self, request: JobRequest, record: AttemptRecord, end: End) -> None:
        """Do what follows here from the end of an attempt, which is closed."""
        todo = decide(end).todo
        # At once: no other attempt may be submitted behind it any more.
        if todo & {Do.FREE, Do.WITHDRAW}:
            self.presubmitter.ended(request, record, succeeded=Do.FREE in todo)
        if Do.DOUBT in todo:
            self.place.lead.doubt()
        if Do.ASSURE in todo:  # another controller may have changed its outputs
            await self._assure()

    async def _assure(self) -> None:
        """Check with the site that this controller still leads, however recent the last listing.

        Raises:
            PlaceTaken: another controller has taken over.
        """
        self.place.lead.doubt()
        await self.place.lead.assure()

    def _started(self, record: AttemptRecord, began: bool) -> None:
        """Record that a job runs, and since when if it `began` while it was watched."""
        with suppress(JournalError):  # the disk is full: only smk-mantik jobs shows less
            self._journal.started(record.id, time.time() if began else 0.0)
        self._observer.started(record)

    def _pending(self, record: AttemptRecord, reason: str, state: JobState) -> None:
        """Record why a job has not started, and when it is expected to."""
        expected, clock = None, self.site.clock
        if state.started is not None and clock is not None and state.started > clock:
            expected = time.time() + state.started - clock
        with suppress(JournalError):
            self._journal.pending(record.id, reason, state.starts_after, expected=expected)

    def _waiting(self, record: AttemptRecord, why: str) -> None:
        """Record why a job cannot start, or with an empty `why` that nothing hinders it now.

        Each reason is reported once: some come and go with each round of the scheduler.
        """
        self._journal.waiting(record.id, why)
        if why and (record.id, why) not in self._hindered:
            self._hindered.add((record.id, why))
            self._notify(
                f"{record.name}: waits at {record.site} and cannot start: {explain_pending(why)}."
            )

    async def _report_changed(self, request: JobRequest, files: Sequence[LocalFile]) -> None:
        """Warn if inputs have changed since the job was submitted, by other hands than its own."""
        updated = [output.path for output in request.updated]
        known = {
            file.path: file
            for file in files
            if file.content is None and not file.stored and not file.directory
            and not any(is_at(file.path, path) for path in updated)
        }  # fmt: skip
        if not known:
            return
        other = await asyncio.to_thread(lambda: [p for p, f in known.items() if f.is_touched()])
        changed = []
        for path in other:
            with suppress(UserError):  # it is gone
                now = await self.local.look_at([(path, known[path].local)])
                changed += [path for file in now if file.sha256 != known[path].sha256]
        if changed:
            self._notify(
                f"{request.name}: {', '.join(map(display_path, changed))} changed while the job"
                " ran; its outputs were made from the earlier content. To make them again, type:"
                f" snakemake --forcerun {request.rule}"
            )

    async def _submit_and_watch(self, request: JobRequest, attempt: Attempt) -> Evidence:
        """Submit the attempt unless the site may know it already, and wait for its end."""
        submit = attempt.sent == 0
        while True:
            if submit:
                await self._dispatcher.submit(attempt)
            self.presubmitter.submitted(request, attempt)
            watching = self.watcher.watch(
                attempt.record, attempt.ids, sent=attempt.sent, live=attempt.live is not None,
                interrupted=not submit,
            )  # fmt: skip
            end = await self._wait(request, attempt, watching)
            attempt.ids = list(dict.fromkeys([*attempt.ids, *end.ids]))
            if end.found is not Finding.VANISHED:
                return end
            self._notify(f"{request.name}: no trace of it at {request.site}; submitting it again.")
            # The directory for claims may have been purged.
            self._dispatcher.purged()
            submit = True

    async def _wait(
        self, request: JobRequest, attempt: Attempt, watching: "asyncio.Future[Evidence]"
    ) -> Evidence:
        """Wait for the end of an attempt; withdraw it if it has not started in time.

        A segment goes on where its checkpoint is. The end of an attempt that is withdrawn is
        noticed as any other, which proves that it has not run.
        """
        record, patience_s = attempt.record, request.patience_s
        if patience_s is None or record.follows:
            return await watching
        begun = time.time() if record.after else record.created
        try:
            await asyncio.wait([watching], timeout=max(0.0, begun + patience_s - time.time()))
            if not watching.done() and not self.watcher.has_started(record.id):
                await self.place.lead.assure()
                sent = replace(record, site_jobs=tuple(attempt.ids))
                with suppress(SiteRejected):  # there is no room to revoke it: it waits on
                    attempt.withdrawn = await self.canceller.withdraw(sent)
            return await watching
        except asyncio.CancelledError:
            watching.cancel()
            raise

    async def commit(self, outcome: Outcome, request: JobRequest, *, taken: bool = True) -> None:
        """Close an attempt whose outcome Snakemake knows.

        `taken=False` marks outputs of a success that do not meet the rule's requirements.
        """
        if outcome.attempt_id and not taken:
            self._journal.spoiled(outcome.attempt_id)
            [record] = self._journal.attempts([outcome.attempt_id])
            self.presubmitter.ended(request, record, succeeded=False)
        self.place.in_use.used([*request.inputs, *(output.path for output in request.outputs)])
        if outcome.succeeded:
            self.local.touched(self._made(request))
            if taken:
                self.presubmitter.accepted(request)
        if outcome.attempt_id:
            environment = self.planner.config.all_environments[request.environment]
            let_end = bool(environment.after_on_login)
            self.canceller.done(
                outcome.attempt_id, outcome.site_job.split(), let_end=let_end,
                succeeded=outcome.succeeded,
            )  # fmt: skip

    def _made(self, request: JobRequest) -> list[FileRecord]:
        """Return the records of a succeeded job's outputs, which are the same there and here."""
        paths = [output.path for output in request.outputs]
        return self._journal.files.remote_files_at(self.place.id, paths)
