"""Run jobs at one site, from the request to the outcome."""

import asyncio
import random
import time
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain, starmap
from pathlib import Path

from snakemake_executor_plugin_mantik.common.errors import (
    MantikError,
    SiteRejected,
    UserError,
)
from snakemake_executor_plugin_mantik.engine import claims
from snakemake_executor_plugin_mantik.engine.adopt import (
    choose_tries,
    encode_basis,
    kept_message,
    named_checksums,
    stale_message,
    why_unwanted,
)
from snakemake_executor_plugin_mantik.engine.attempt import Attempt, TryEnd, TryEndKind
from snakemake_executor_plugin_mantik.engine.cancel import Canceller
from snakemake_executor_plugin_mantik.engine.failure_classifier import FailureClassifier
from snakemake_executor_plugin_mantik.engine.fetch import Fetcher
from snakemake_executor_plugin_mantik.engine.finalize import Finalizer
from snakemake_executor_plugin_mantik.engine.live_copies import LiveCopies
from snakemake_executor_plugin_mantik.engine.observer import JobEnd, Observer
from snakemake_executor_plugin_mantik.engine.place import Place, Places, make_retry
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.engine.request import JobRequest, Outcome, fingerprint_of
from snakemake_executor_plugin_mantik.engine.site_retry import LONGEST_BUSY_S
from snakemake_executor_plugin_mantik.engine.submit import Submitter, make_submission
from snakemake_executor_plugin_mantik.engine.watch import Watcher
from snakemake_executor_plugin_mantik.jobs.paths import display_path, local_path
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
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
                files = await self._files(request)
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
            whole, own = await self._observed(request, attempt)
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
            self._abandon_if_unsent(attempt, error)
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

    async def _files(self, request: JobRequest) -> list[LocalFile]:
        kept = [o.path for o in request.updated if local_path(o.path, self._workdir).exists()]
        wanted: list[tuple[str, Path | None]] = []
        wanted += [(path, None) for path in dict.fromkeys([*request.inputs, *kept])]
        if (image := self.planner.image) is not None and not request.own_environment:
            wanted.append((image[1], image[0]))
        wanted += [(u.path, u.local) for u in request.uploads if u.content is None]
        made = [(u.path, u.content) for u in request.uploads if u.content is not None]
        return [*await self.local.look_at(wanted), *starmap(LocalFile.holding, made)]

    async def _try(self, request: JobRequest, files: list[LocalFile]) -> TryRecord:
        """Return an open try of an earlier run to adopt, or a new one; give up the other ones."""
        inputs = {file.path: file.sha256 for file in files}
        code = self._code(request, inputs)
        made_of = request.made_of(inputs, self.planner.environment, code)
        resources, sources = self._requested_resources(request), fingerprint_of(self.place.sources)
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
            if message := kept_message(choice.adopted, resources):
                self._notify(message)
            if message := stale_message(choice.adopted, sources):
                self._retry.note(message)
            return choice.adopted
        return self._journal.new_try(
            site=request.site, job=request.job, rule=request.rule, name=request.name,
            fingerprint=fingerprint_of(made_of), members=request.members,
            made_of=encode_basis(made_of, resources, sources),
        )  # fmt: skip

    def _code(self, request: JobRequest, inputs: Container[str]) -> dict[str, str]:
        """Return the checksums of the sources that a job's command names, without its inputs."""
        sources = {p: sha for p, sha in self.place.sources.items() if p not in inputs}
        return named_checksums(_text(request), sources)

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

    def _requested_resources(self, request: JobRequest) -> dict[str, str]:
        resources = self.planner.resources(request.resources, request.threads)
        return {name: str(value) for name, value in asdict(resources).items() if value is not None}

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

    async def _observed(
        self, request: JobRequest, attempt: Attempt
    ) -> tuple[JobRequest, list[LocalFile]]:
        """Return the request with an observer's additions, and the observer's files."""
        attempt.extras = added = await self._observer.prepare(
            request, attempt.record, self.facts.workspace
        )
        if added is None:
            return request, []
        whole = replace(
            request,
            variables={**request.variables, **added.variables},
            secrets={**request.secrets, **added.secrets},
        )
        if not added.directory:
            return whole, []
        output = OutputFile(added.directory, "log", directory=True, keep=True)
        whole = replace(whole, outputs=(*request.outputs, output))
        made = [(f"{added.directory}/{path}", content) for path, content in added.files.items()]
        return whole, list(starmap(LocalFile.holding, made))

    async def _submit_and_watch(
        self, request: JobRequest, attempt: Attempt, files: list[LocalFile], own: list[LocalFile]
    ) -> TryEnd:
        """Submit the try unless the site may know it already, and wait for its end."""
        submit = attempt.sent == 0
        while True:
            if submit:
                await self._submit(request, attempt, files, own)
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

    async def _submit(
        self, request: JobRequest, attempt: Attempt, files: list[LocalFile], own: list[LocalFile]
    ) -> None:
        await self.place.lead.assure()
        await self.place.cleanup.follow()
        outputs = [output.path for output in request.outputs]
        made = [output.path for output in request.outputs if output.kind == "output"]
        code = self._code(request, {file.path for file in files})
        files = [*files, *self.place.stager.code(code)]
        for message in await self.place.conflicts.make_way(files, made):
            self._notify(message)
        limit = self.planner.config.site.inline_limit_bytes
        staged = await self.place.stager.stage(
            files, request.inputs, outputs, own, inline_limit=limit
        )
        spec = self.planner.spec(
            request, attempt.record, self.facts, staged, term=self.place.lead.term
        )
        spec = replace(spec, live=attempt.live)
        submission = make_submission(spec)
        # From now on the job may change its outputs at the site, whether it succeeds or not.
        self.place.stager.lost(outputs)
        self.place.stager.carry(attempt.record.id, staged, made)
        if not attempt.sent:
            attempt.submitted_at = time.time()
        self._observer.submitting(attempt.record, spec, submission.script)
        try:
            site_job = await self._submitter.submit(attempt.record, submission, request.secrets)
        except SiteRejected as error:
            if attempt.sent and not await self._revoke(attempt.record):
                return  # an earlier submission of it has started after all
            self._abandon(attempt, error)
            await self.canceller.remove_secrets(attempt.record)
            raise
        attempt.sent += 1
        attempt.staged.append(staged)
        if site_job:
            if attempt.sent_at is None:
                attempt.sent_at = self.site.clock
            # Earlier ids stay: any of them may be the one that runs.
            attempt.ids.append(site_job)
            self._observer.submitted(attempt.record, site_job, spec.resources.queue or "")

    def _abandon_if_unsent(self, attempt: Attempt, error: MantikError) -> None:
        """Close a try that a user's mistake kept from being submitted; the next run makes another.

        A try that was ever submitted, and one with another error, stays open.
        """
        if (
            isinstance(error, UserError)
            and not attempt.sent
            and attempt.record.state is TryState.PLANNED
        ):
            self._abandon(attempt, error)

    def _abandon(self, attempt: Attempt, error: MantikError) -> None:
        self._observer.ended(attempt.record, JobEnd("failed", error.what, reason=Reason.REJECTED))
        self._journal.abandoned(attempt.record.id, f"failed: {error.what}")

    async def _revoke(self, record: TryRecord) -> bool:
        return await self._retry.found(lambda: claims.revoke_try(self.site, record))

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


def _text(request: JobRequest) -> str:
    """Return the command and the generated files of a job as one text."""
    made = [u.content.decode(errors="replace") for u in request.uploads if u.content is not None]
    return "\n".join([request.command, *made])


def _contents(files: Iterable[FileRecord]) -> set[tuple[str, int, str]]:
    return {(file.path, file.size, file.sha256) for file in files}
