"""Run jobs at one site, from the request to the outcome."""

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from snakemake_executor_plugin_mantik.common.errors import (
    MantikError,
    UserError,
)
from snakemake_executor_plugin_mantik.engine.adopt import (
    choose_tries,
    kept_message,
    stale_message,
    why_unwanted,
)
from snakemake_executor_plugin_mantik.engine.attempt import Attempt, TryEnd, TryEndKind
from snakemake_executor_plugin_mantik.engine.cancel import Canceller
from snakemake_executor_plugin_mantik.engine.dispatch import Dispatcher
from snakemake_executor_plugin_mantik.engine.failure_classifier import FailureClassifier
from snakemake_executor_plugin_mantik.engine.fetch import Fetcher
from snakemake_executor_plugin_mantik.engine.finalize import Finalizer
from snakemake_executor_plugin_mantik.engine.live_copies import LiveCopies
from snakemake_executor_plugin_mantik.engine.observer import Observer
from snakemake_executor_plugin_mantik.engine.place import Place, Places, make_retry
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.engine.request import JobRequest, Outcome, fingerprint_of
from snakemake_executor_plugin_mantik.engine.site_retry import LONGEST_BUSY_S
from snakemake_executor_plugin_mantik.engine.submit import Submitter
from snakemake_executor_plugin_mantik.engine.watch import Watcher
from snakemake_executor_plugin_mantik.jobs.paths import display_path
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import FileRecord, TryRecord, TryState
from snakemake_executor_plugin_mantik.sites.base import JobState, Site, SiteFacts
from snakemake_executor_plugin_mantik.staging.bundle import FileChanged
from snakemake_executor_plugin_mantik.staging.local import LocalFile
from snakemake_executor_plugin_mantik.staging.transfers import OutputStaging

_FULL_FIRST_S = 30.0
"""Seconds before resubmitting a job that exceeded a limit on jobs; doubled each time, up to
`LONGEST_BUSY_S`."""
_AWAY_FIRST_S = 5.0
"""Seconds before resubmitting a job that a site lost while one of its services was down; doubled,
too. The site has answered by then: otherwise the loss would not be certain."""
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
    ) -> None:
        self._observer = observer or Observer()
        settings = planner.config.site
        self.site = site
        self.facts = facts
        self.planner = planner
        self.place = place
        self.local = places.local
        workflow = places.workflow
        self._journal = journal = workflow.journal
        self._workdir = workdir = workflow.workdir
        self._notify = notify = workflow.notify
        self._give_up = workflow.give_up
        clock = asyncio.get_running_loop().time
        retry = self._retry = make_retry(
            site, notify, settings.marker_grace_s, settings.fetch_wait_s
        )
        self._live = LiveCopies(site, self._observer, workdir, notify)
        self.watcher = Watcher(
            site, settings, retry, journal.submitted, clock, on_seen=place.lead.saw,
            on_started=self._observer.started, on_logged=self._live.grown,
            on_waiting=self._waiting,
        )  # fmt: skip
        place.lead.on_deposed(self.watcher.fail)
        self._submitter = Submitter(site, journal, retry)
        fetcher = Fetcher(site, retry, workdir, place.scratch, on_links=journal.files.set_links)
        self.canceller = Canceller(
            site, workflow, self.watcher, fetcher, place.leftovers,
            settings=settings, retry=retry, observer=self._observer,
        )  # fmt: skip
        self._dispatcher = Dispatcher(
            site, facts, planner, place, places, submitter=self._submitter,
            canceller=self.canceller, retry=retry, observer=self._observer,
        )  # fmt: skip
        self._finalizer = Finalizer(
            workflow,
            stager=place.stager,
            submitter=self._submitter,
            fetcher=fetcher,
            canceller=self.canceller,
            classifier=FailureClassifier(site, settings),
            observer=self._observer,
        )
        self._slots = asyncio.Semaphore(settings.max_jobs)

    async def run(self, request: JobRequest) -> Outcome:
        """Run a job; return when its end is known and, after a success, its outputs are local.

        Raises:
            MantikError: the job cannot be run at all; or this controller cannot follow it any more,
                because another one leads (PlaceTaken) or the journal cannot be written: then a
                try of it may still run.
        """
        async with self._slots:
            resent, pause, before = 0, 0.0, frozenset[FileRecord]()
            while resent <= _MAX_RESENDS:
                files = await self._dispatcher.look_at_files(request)
                contents = frozenset(file.record for file in files)
                # Inputs that the user has edited meanwhile are no sign of trouble at the site.
                resent, before = (resent if contents == before else 0), contents
                outcome, later = await self._run_try(request, files)
                if outcome is not None:
                    return outcome
                if later is None:
                    resent += 1
                    continue
                first = _FULL_FIRST_S if later[1].reason is Reason.REJECTED else _AWAY_FIRST_S
                pause = min(max(2 * pause, first), LONGEST_BUSY_S)
                await self._wait_to_submit(*later, pause)
        raise MantikError(
            "files that the job needs keep disappearing or changing at the site",
            where=f"{request.name} at {request.site}",
            do="Check whether the workspace is on a file system that is purged or full, and whether"
            " the command changes its own inputs; or set Site: Workspace to another file system",
        )

    async def _run_try(
        self, request: JobRequest, files: list[LocalFile]
    ) -> tuple[Outcome | None, tuple[Attempt, JobState] | None]:
        """Run one try: return its outcome, or the attempt and the state that delays the next one.

        Both are None if the job is to be submitted again at once.
        """
        record = await self._try(request, files)
        self.place.conflicts.own(record)
        # An earlier run may have died before it recorded the id of its last submission.
        times = len(record.site_jobs) + 1 if record.state is not TryState.PLANNED else 0
        submitted_at = record.submitted or time.time()
        attempt = Attempt(record, list(record.site_jobs), submitted_at, times, record.sent)
        try:
            whole, own = await self._dispatcher.observe(request, attempt)
            self._live.follow(record, attempt.extras)
            end = await self._submit_and_watch(whole, attempt, files, own)
        except FileChanged as error:
            self._unfetch(request, record)
            await self.place.look_again(error.path)
            if attempt.sent:  # it left no trace, but may still start; `record` is from before
                sent = replace(record, state=TryState.SUBMITTED, site_jobs=tuple(attempt.ids))
                await self._give_up([sent])
            else:
                await self._finalizer.again(
                    attempt, "its inputs changed while they were being sent"
                )
            return None, None
        except MantikError as error:
            self._dispatcher.abandon_if_unsent(attempt, error)
            raise
        finally:
            await self._live.stop(record)
        if end.exit_code is None:  # another controller may have adopted it and removed its marker
            await self._assure()
        if end.state is not None and end.state.later and not end.claimed:
            return None, (attempt, end.state)
        outcome = await self._finalizer.conclude(whole, attempt, end, self._runtime_s(request))
        if outcome is None:
            self.place.lead.doubt()
        elif outcome.succeeded:
            self.local.settled(self._made(request))
            await self._report_changed(request, files)
        elif not outcome.try_id:  # another controller may have changed its outputs
            await self._assure()
        if outcome is None or not outcome.succeeded:
            self._unfetch(request, record)
        return outcome, None

    async def _assure(self) -> None:
        """Check with the site that this controller still leads, however recent the last listing.

        Raises:
            PlaceTaken: another controller has taken over.
        """
        self.place.lead.doubt()
        await self.place.lead.assure()

    def _unfetch(self, request: JobRequest, record: TryRecord) -> None:
        """Remove the temporary files of outputs that a killed run had begun to download."""
        OutputStaging(self._workdir, record.id, [o.path for o in request.outputs]).clear()

    async def _wait_to_submit(self, attempt: Attempt, state: JobState, pause: float) -> None:
        """Close this try, and sleep until the site may take the next one."""
        if state.reason is Reason.REJECTED:
            self._retry.note(
                f"it takes no more jobs just now ({state.detail}); they are submitted again until"
                " it does. Set Site: MaxJobs to keep their number below its limit"
            )
            why = "the scheduler took no more jobs"
        else:
            self._retry.note(
                "it lost jobs before they started, because one of its services was down"
                f" ({state.detail}); they are submitted again"
            )
            why = "a part of the site was away"
        await self._finalizer.again(attempt, why)
        await asyncio.sleep(pause * random.uniform(1.0, 1.25))  # noqa: S311

    def _waiting(self, record: TryRecord, why: str) -> None:
        """Record why a job cannot start, or with an empty `why` that nothing hinders it now."""
        self._journal.waiting(record.id, why)
        self._observer.waiting(record, why)
        if why:
            self._notify(f"{record.name}: waits at {record.site} and cannot start: {why}.")

    async def _try(self, request: JobRequest, files: list[LocalFile]) -> TryRecord:
        """Return an open try of an earlier run to adopt, or a new one; give up the other ones."""
        inputs = {file.path: file.sha256 for file in files}
        made_of = self._dispatcher.made_of(request, inputs)
        choice = choose_tries(
            request, fingerprint_of(made_of), self._journal.open_tries(*request.jobs),
            already=self._is_already_updated(request, files),
        )  # fmt: skip
        left = self._journal.left_tries(request.jobs, self.place.id)
        gone = (*choice.unwanted, *left)
        for message in filter(None, (why_unwanted(request, record, made_of) for record in gone)):
            self._notify(message)
        await self._give_up(choice.unwanted)
        # They are in this workspace, even if their site's name means another one now.
        await self.canceller.give_up(left)
        for record in gone:
            self._unfetch(request, record)
        if choice.adopted is not None:
            resources = self._dispatcher.requested_resources(request)
            if message := kept_message(choice.adopted, resources):
                self._notify(message)
            if message := stale_message(choice.adopted, fingerprint_of(self.place.sources)):
                self._retry.note(message)
            return choice.adopted
        return self._dispatcher.new_try(request, made_of)

    def _is_already_updated(self, request: JobRequest, files: list[LocalFile]) -> bool:
        """Check that the local updated outputs are as the last job at the site left them."""
        ledger, place = self._journal.files, self.place.id
        there: set[FileRecord] = set()
        for output in request.updated:
            there.update(filter(None, [ledger.remote_file(place, output.path)]))
            there.update(ledger.remote_files(place, below=output.path))
        below = tuple(f"{output.path}/" for output in request.updated)
        here = {f.record for f in files if not f.directory and f"{f.path}/".startswith(below)}
        return bool(here) and _contents(here) == _contents(there)

    async def _report_changed(self, request: JobRequest, files: Sequence[LocalFile]) -> None:
        """Warn if inputs have changed since the job was submitted."""
        known = {file.path: file for file in files if file.content is None and not file.directory}
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

    async def _submit_and_watch(
        self, request: JobRequest, attempt: Attempt, files: list[LocalFile], own: list[LocalFile]
    ) -> TryEnd:
        """Submit the try unless the site may know it already, and wait for its end."""
        submit = attempt.sent == 0
        while True:
            if submit:
                await self._dispatcher.submit(request, attempt, files, own)
            end = await self.watcher.watch(
                attempt.record, attempt.ids, sent=attempt.sent, live=attempt.live is not None,
                interrupted=not submit,
            )  # fmt: skip
            attempt.ids = list(dict.fromkeys([*attempt.ids, *end.ids]))
            if end.kind is not TryEndKind.VANISHED:
                return end
            self._notify(f"{request.name}: no trace of it at {request.site}; submitting it again.")
            # The directory for claims may have been purged.
            self._submitter.purged()
            submit = True

    def _runtime_s(self, request: JobRequest) -> int | None:
        return self.planner.resources(request.resources, request.threads).runtime_s

    async def commit(self, outcome: Outcome, request: JobRequest, *, taken: bool = True) -> None:
        """Close a try whose outcome Snakemake knows.

        `taken=False` marks outputs of a success that do not meet the rule's requirements.
        """
        if outcome.try_id and not taken:
            self._journal.spoiled(outcome.try_id)
        self.place.cleanup.used([*request.inputs, *(output.path for output in request.outputs)])
        if outcome.succeeded:
            self.local.touched(self._made(request))
        if outcome.try_id:
            let_end = bool(self.planner.config.environment.after_on_login)
            await self.canceller.done(
                outcome.try_id, outcome.site_job.split(), let_end=let_end,
                succeeded=outcome.succeeded,
            )  # fmt: skip

    def _made(self, request: JobRequest) -> list[FileRecord]:
        """Return the records of a succeeded job's outputs, which are the same there and here."""
        ledger, place = self._journal.files, self.place.id
        files = [ledger.remote_file(place, output.path) for output in request.outputs]
        below = [ledger.remote_files(place, below=o.path) for o in request.outputs if o.directory]
        return [*filter(None, files), *chain.from_iterable(below)]


def _contents(files: Iterable[FileRecord]) -> set[tuple[str, int, str]]:
    return {(file.path, file.size, file.sha256) for file in files}
