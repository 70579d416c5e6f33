"""Run the engine: one thread with one event loop does all the I/O, with helpers for local files.

The executor hands over requests and collects outcomes: these calls return at once. A commit waits
for the journal. All calls may come from any thread.
"""

import asyncio
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Container, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..common.errors import (
    JournalError,
    MantikError,
    SiteBusy,
    SiteError,
    SiteUnreachable,
    UserError,
    of_one_job,
    printable,
)
from ..common.humanize import humanize_count
from ..jobs.paths import workspace_root
from ..jobs.reasons import Reason
from ..journal import AttemptRecord, AttemptState, FileLedger, Journal
from ..sites.base import Site
from ..staging.project_files import ProjectFiles
from .adopt import ended_since_message
from .cancel import CANCEL_WAIT_S
from .expect import Load, Outlook
from .messages import learned_error
from .observer import Observer
from .place import Places
from .plan import Planner, choose_queue
from .request import JobNumber, JobRequest, Outcome
from .site_retry import SiteRetry
from .site_runner import JOB_STATES, SiteRunner
from .transfer_meter import TransferMeter, publish_transfers
from .workflow_context import WorkflowContext

_T = TypeVar("_T")

AT_ONCE_S = 5.0
"""Seconds to cancel all jobs at the sites, for a user who does not want to wait."""
_MOST_TOLD = 5
"""Most jobs that a message names."""
CLOSE_WAIT_S = 45.0
"""Most seconds for tidying up at the end of a run; then the run ends without it."""

_DRAIN_S = 10.0
"""Most seconds to presubmit jobs before a run ends that leaves its jobs running."""
_UNREQUESTED_S = 20.0
"""Seconds to wait for jobs to end that Snakemake has not requested."""
_SPARE_S = 5.0
"""Most seconds for writing the places' spares at the end of a run."""
_LET_GO_S = 1.0
"""Seconds for tasks that still run then to stop."""


_AWAY = SiteUnreachable, SiteBusy
"""Errors of a site that may be away for a while."""


class Engine:
    """Run jobs at sites, in a thread of its own. The executor makes and uses it."""

    def __init__(
        self,
        sites: Mapping[str, tuple[Site, Planner]],
        *,
        journal: Journal,
        workdir: Path,
        state: Path,
        notify: Callable[[str], None],
        observer: Observer | None = None,
        configs: Mapping[str, Path] | None = None,
        presubmit: int = 0,
        most_jobs: int | None = None,
        meter: TransferMeter | None = None,
    ) -> None:
        """Start the thread.

        `sites` are not yet opened, and names may share a site object; `configs` are the paths of
        their backend configs, for the journal, which is closed with the engine. `state` is our own
        local directory, for logs and files in transfer; `notify` writes a line to the user's log.
        `presubmit` is the most jobs per site that are submitted before they are requested; they
        count among `most_jobs`, the most jobs at once, if that is limited.
        """
        self._observer = observer or Observer()
        self._sites = sites
        self._most_presubmitted = presubmit
        self._most_jobs = most_jobs
        self._configs = {name: str(path) for name, path in (configs or {}).items()}

        def notify_printable(text: str) -> None:
            notify(printable(text))

        self._notify = notify_printable
        self._warned: set[tuple[str, str]] = set()
        self._journal = journal
        self._meter = meter or TransferMeter()
        self._state = state
        self.places = Places(
            WorkflowContext(journal, workdir, state, self._notify, self._give_up, self._meter),
            self._answering,
        )
        self._chosen: set[tuple[str, str]] = set()
        self._runners: dict[str, SiteRunner] = {}
        self._opening: dict[str, asyncio.Task[SiteRunner]] = {}
        self._away: dict[str, asyncio.Task[SiteRunner]] = {}
        self._watching: list[asyncio.Task[None]] = []
        self._outlook = Outlook(self._load)
        self._jobs: dict[JobNumber, asyncio.Task[None]] = {}
        self._requests: dict[JobNumber, JobRequest] = {}
        self._requested: set[str] = set()
        self._unordered: set[str] = set()
        self._ending = self._cancelled = False
        self._outcomes: deque[Outcome] = deque()
        self._begin()

    def _begin(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="mantik-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        # Tasks that no call awaits any more, such as a cancelling that a second Ctrl-C interrupted.
        if left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(left, timeout=_LET_GO_S))
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, _T]) -> "Future[_T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    # Called by the executor, from Snakemake's threads

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a coroutine, which runs in the engine's thread."""
        return self._call(coroutine).result()

    def open(
        self,
        names: Sequence[str],
        project_files: Callable[[str], ProjectFiles],
        spare: Collection[str] = (),
    ) -> None:
        """Open the sites that jobs will run at, as far as is known.

        `project_files` returns the project files to upload to one. Those that are `spare` may be
        away: all their jobs can run elsewhere. While others answer, one that an earlier run has
        used may be away, too: its jobs wait.

        Raises:
            MantikError: a site cannot be used; nothing has been submitted.
        """
        self._project_files_of = project_files
        self.run(self._open_all(names, spare))

    def facts_fit(
        self, site: str, resources: Mapping[str, object], threads: int, environment: str = ""
    ) -> None:
        """Check that an opened site allows the resources and the environment of a job.

        Of one that is away nothing is known.

        Raises:
            UserError: it does not.
        """
        if (runner := self._runners.get(site)) is None:
            return
        asked = runner.planner.resources(resources, threads)
        for warning in runner.planner.fits(asked, runner.facts):
            if (site, warning) not in self._warned:
                self._warned.add((site, warning))
                self._notify(f"{site}: {warning}")
        runner.planner.mounts_fit(environment, runner.facts)

    def workspace(self, site: str) -> str:
        """Return the absolute path of the workspace at a site; open the site if necessary.

        That of one that is away is in the journal, and is compared when it answers.

        Raises:
            MantikError: the site cannot be used.
        """

        async def find() -> str:
            if site not in self._away or self._away[site].done():
                try:
                    return (await self._site(site)).facts.workspace
                except _AWAY:
                    if not self._may_wait(site):
                        raise
            return self._journal.sites()[site].workspace

        return self.run(find())

    def submit(self, request: JobRequest) -> None:
        """Start a job; `collect` returns its outcome later."""
        self._loop.call_soon_threadsafe(self._start, request)

    def propose(self, request: JobRequest) -> None:
        """Submit a job that is not requested yet, behind those that make its inputs."""
        self._loop.call_soon_threadsafe(self._propose, request)

    def sites_of_jobs(self, jobs: Sequence[str]) -> tuple[str, list[str]]:
        """Return the site with an open attempt of jobs, or '', and those that they have left."""

        async def find() -> tuple[str, list[str]]:
            at = [record.site for record in self._journal.open_attempts(*jobs)]
            return at.pop() if at else "", self._journal.tried_sites(*jobs)

        return self.run(find())

    def sites_of(self, paths: Collection[str]) -> set[str]:
        """Return the names of the sites at which remote outputs are that are not here."""

        async def find() -> set[str]:
            stored = filter(None, map(self._journal.files.stored, paths))
            places = {output.place for output in stored if not output.here}
            return {name for name, site in self._journal.sites().items() if site.place in places}

        return self.run(find())

    def order_sites(self, asked: Mapping[str, tuple[Mapping[str, object], int]]) -> list[str]:
        """Return the sites for a job in the order in which they are expected to start it.

        `asked` are its resources and threads, by site. It counts as submitted to the first one.

        Raises:
            UserError: a resource of the rule is wrong.
        """

        async def order() -> list[str]:
            wanted, full = {}, set()
            for name, given in asked.items():
                planner, runner = self._sites[name][1], self._runners.get(name)
                resources = planner.resources(*given)
                if runner is not None:
                    resources = choose_queue(resources, runner.facts)
                if runner is not None and runner.is_full:
                    full.add(name)
                wanted[name] = resources, planner.cores(resources)
            return await self._outlook.order(wanted, full)

        return self.run(order())

    def presubmit(self) -> list[AttemptRecord]:
        """Submit what can be presubmitted now; return all jobs that are not requested yet.

        They go on by themselves when the engine ends. Waits a few seconds at most.
        """
        return self.run(self._presubmit())

    def end_unneeded(self, jobs: Callable[[], Container[str]]) -> None:
        """End attempts that earlier runs presubmitted, of jobs whose identities are returned.

        `jobs` is called, in the engine's thread, only if there are any such attempts.
        """
        self.run(self._end_unneeded(jobs))

    def count_jobs(self) -> Mapping[str, int]:
        """Return how many jobs are running, queued, and staging; see `SiteRunner.count_jobs`."""
        counts = [runner.count_jobs() for runner in list(self._runners.values())]
        return {state: sum(each[state] for each in counts) for state in JOB_STATES}

    def collect(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def commit(self, outcome: Outcome, *, taken: bool = True) -> None:
        """Record in the journal that Snakemake knows an outcome, and wait for that.

        `taken` says whether the outputs of a success meet the rule's requirements.
        """
        self.run(self._commit(outcome, taken))

    def cycles(self, site: str) -> int:
        """Return how often the jobs of an opened site have been listed so far."""
        return self._runners[site].watcher.cycles

    def write_files(self, change: Callable[[FileLedger], None]) -> None:
        """Change the journal's records of files.

        Raises:
            JournalError: it cannot be written.
        """

        async def act() -> None:
            change(self._journal.files)

        self.run(act())

    def cancel(self, *, at_once: bool = False) -> list[AttemptRecord]:
        """Cancel all jobs; return those that did not confirm their end.

        It may be called again while it waits, for example from a handler of Ctrl-C. With `at_once`
        it waits only `AT_ONCE_S`, and some more for hundreds of jobs.
        """
        return self.run(self._cancel(AT_ONCE_S if at_once else CANCEL_WAIT_S))

    def close(
        self, *, tidy: bool = True, ending: str = "", pipeline: Mapping[str, object] | None = None
    ) -> None:
        """End the thread; jobs at the sites continue. With `tidy`, tidy up at the sites first.

        `ending` and `pipeline` say how the run has ended, for the journal; nothing if it has not
        begun.
        """
        if not self._thread.is_alive():
            return
        closing = self._call(self._close(tidy))
        try:
            closing.result(timeout=CLOSE_WAIT_S)
        except TimeoutError:
            closing.cancel()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            if pipeline is not None:
                with suppress(JournalError):  # a full disk: what matters is recorded
                    self._journal.end_run(ending, pipeline)
            self._journal.close()

    @property
    def learned(self) -> Collection[str]:
        """Paths of remote outputs that the journal did not know when this process opened it."""
        return self._journal.learned

    # In the engine's thread

    async def _open_all(self, names: Sequence[str], spare: Collection[str]) -> None:
        publishing = publish_transfers(self._meter, self._state)
        self._watching.append(asyncio.create_task(publishing))
        results = await asyncio.gather(
            *(self._site(name) for name in names), return_exceptions=True
        )
        errors = []
        for name, result in zip(names, results, strict=True):
            if isinstance(result, _AWAY) and name in spare and self._runners:
                self._notify(f"{result} Jobs that may run at any site go to others meanwhile.")
                if self._is_known(name):
                    self._away[name] = asyncio.create_task(self._come_back(name))
            elif isinstance(result, _AWAY) and self._may_wait(name):
                self._wait_for(name, result)
            elif isinstance(result, BaseException):
                errors.append(result)
        if len(errors) > 1 and all(isinstance(error, MantikError) for error in errors):
            raise MantikError("; ".join(str(error) for error in errors))
        if errors:
            raise errors[0]

    def _may_wait(self, name: str) -> bool:
        """Return whether the jobs of a site that is away wait, while others answer."""
        return bool(self._runners) and self._is_known(name)

    def _wait_for(self, name: str, error: SiteError) -> None:
        self._notify(
            f"Site {name} is away ({error.what}). Its jobs wait until it answers; those at other"
            " sites run meanwhile."
        )
        self._away[name] = asyncio.create_task(self._come_back(name))

    def _is_known(self, name: str) -> bool:
        """Return whether an earlier run has used a site at the present address."""
        known = self._journal.sites().get(name)
        return known is not None and known.url == self._sites[name][1].config.server

    async def _come_back(self, name: str) -> SiteRunner:
        """Return the runner of a site that was away when the run started, once it answers."""
        before, learned = self._journal.sites()[name].workspace, set(self._journal.learned)
        retry = SiteRetry(name, self._notify, self._loop.time)
        runner = await retry(lambda: self._site(name))
        if new := set(self._journal.learned) - learned:
            raise learned_error(new)
        if runner.facts.workspace != before:  # requests may name it
            raise UserError(
                f"its workspace was {before} in the last run and is {runner.facts.workspace} now",
                where=f"site {name}",
                do="Start again",
            )
        return runner

    async def _answering(self, name: str) -> SiteRunner:
        """Return the runner of a site; wait for a known one that is away."""
        task = self._away.get(name)
        failed = task.exception() if task is not None and task.done() else None
        if not isinstance(failed, UserError | None):  # the next job tries again
            del self._away[name]
        if name not in self._away:
            try:
                return await self._site(name)
            except _AWAY as error:
                if not self._may_wait(name):
                    raise
                if name not in self._away:
                    self._wait_for(name, error)
        return await asyncio.shield(self._away[name])

    async def _load(self, name: str) -> Load:
        return await (await self._site(name)).load(name)

    async def _site(self, name: str) -> SiteRunner:
        if name not in self._sites:
            raise UserError(
                "an input is stored at a site that this run does not use",
                where=f"site {name}",
                do="Name its backend config, too: --mantik-backend-config NAME=FILE",
            )
        if name not in self._opening:
            self._opening[name] = asyncio.create_task(self._open_site(name))
        try:
            return await self._opening[name]
        except BaseException:
            self._opening.pop(name, None)  # the next job tries again
            raise

    def _refuse_to_leave(self, name: str, workspace: str) -> None:
        """Check that no outputs stay in another workspace that the site's name has meant.

        Raises:
            UserError: some do; no run could reach them any more.
        """
        sites = self._journal.sites()
        known = sites.get(name)
        if known is None or known.workspace == workspace:
            return
        if any(sites[n].place == known.place for n in self._sites if n != name and n in sites):
            return  # they can be reached by another name
        if stored := self._journal.files.all_stored(known.place):
            raise UserError(
                f"{humanize_count(len(stored), 'output stays', 'outputs stay')} in the workspace"
                f" {known.workspace}, but this run would use {workspace} (nothing submitted)",
                where=f"site {name}",
                do=f"Set Site: Workspace to {workspace_root(known.workspace)} in the backend"
                " config; a working directory that was copied needs it, too. To make the outputs"
                " again instead, remove that workspace",
            )

    async def _open_site(self, name: str) -> SiteRunner:
        site, planner = self._sites[name]
        facts, place = await self.places.open(
            name, site, planner, lambda facts: self._refuse_to_leave(name, facts.workspace),
            "then start again" + ("" if self._runners else "; nothing was submitted"),
        )  # fmt: skip
        left = self._journal.set_site(
            name, planner.config.server, facts.workspace, place.id, self._configs.get(name, "")
        )
        if left:
            self._notify(
                f"Site {name} has another server or workspace than in the last run. Jobs of that"
                f" run are not reattached ({_listed(left)}), but may"
                " still run: see smk-mantik jobs."
            )
        site.notify, site.record = self._notify, self._journal.record_allocation
        runner = SiteRunner(
            site, facts, planner, place, self.places, observer=self._observer,
            room=partial(self._room_to_presubmit, name),
        )  # fmt: skip
        chosen = (place.id, str(planner.config.exclude))
        if chosen not in self._chosen:  # of names with the same choice, the first one uploads
            self._chosen.add(chosen)
            try:
                project_files = await asyncio.to_thread(self._project_files_of, name)
                await place.stager.send_project_files(project_files.paths)
            except BaseException:
                self._chosen.discard(chosen)
                raise
        if all(other.place is not place for other in self._runners.values()):
            self._watching.append(asyncio.create_task(place.spare.keep()))
        self._runners[name] = runner
        return runner

    def _room_to_presubmit(self, name: str) -> int:
        """Return how many jobs a site may have that are not requested yet."""
        if self._most_jobs is None:
            return self._most_presubmitted
        active = sum(not task.done() for task in self._jobs.values())
        others = sum(r.presubmitter.number for site, r in self._runners.items() if site != name)
        return min(self._most_presubmitted, self._most_jobs - active - others)

    async def _give_up(self, records: Sequence[AttemptRecord]) -> None:
        for record in records:
            if (runner := await self._keeper(record)) is not None:
                await runner.canceller.give_up([record])
            else:
                self._notify(
                    f"{record.name}: an earlier run submitted it to {record.site}, which is not"
                    " among this run's sites. It is left there and its results are not used."
                    f" To end it, type: smk-mantik cancel {record.id}"
                )
                known = self._journal.sites().get(record.site)
                where = known.workspace if known is not None else record.site
                self._journal.left_behind(record.id, where)

    async def _keeper(self, record: AttemptRecord) -> SiteRunner | None:
        """Return the runner of an attempt's site, or of another one at its place; None without.

        The site's name may mean another place now, and the place may have another name.
        """
        for name in filter(self._sites.__contains__, self._names(record)):
            runner = await self._answering(name)
            if runner.place.id == record.place:
                return runner
        return None

    def _names(self, record: AttemptRecord) -> list[str]:
        """Return the names by which the place of an attempt may be known."""
        known = self._journal.sites().values()
        return [record.site, *(s.site for s in known if s.place == record.place)]

    def _start(self, request: JobRequest) -> None:
        self._requests[request.number] = request
        self._requested.update(request.jobs)
        task = self._jobs[request.number] = asyncio.create_task(self._job(request))
        task.add_done_callback(self._look_again)

    def _look_again(self, _: asyncio.Task[None]) -> None:
        """Use the room that a job leaves."""
        for runner in self._runners.values():
            runner.presubmitter.look()

    def _propose(self, request: JobRequest) -> None:
        runner = self._runners.get(request.site)
        if self._ending or runner is None:  # a site whose job makes an input is open
            return
        if runner.facts.orders_jobs or runner.is_pooled(request):
            runner.presubmitter.propose(request)
        elif request.site not in self._unordered:
            self._unordered.add(request.site)
            self._notify(
                f"{request.site}: jobs cannot wait for others there (Site: Scheduler is none);"
                " each is submitted when its inputs exist."
            )

    async def _job(self, request: JobRequest) -> None:
        try:
            runner = await self._answering(request.site)
            # The first job at a site was checked before that was open.
            self.facts_fit(request.site, request.resources, request.threads, request.environment)
            outcome = await runner.run(request)
        except MantikError as error:
            words, reason = f"{of_one_job(error)}\n", Reason.REJECTED
            outcome = Outcome(request.number, "", False, words, reason=reason)
        except asyncio.CancelledError:
            if self._ending:
                raise
            # Every job needs an outcome, or Snakemake would wait for ever.
            words, reason = f"{request.name}: it was given up.\n", Reason.CANCELLED
            outcome = Outcome(request.number, "", False, words, reason=reason)
        except Exception:  # noqa: BLE001 - a bug of ours: report it with its traceback, fail the job
            words = (
                f"This is a bug in the executor itself; please report it with"
                f" {self._journal.path}.\n{traceback.format_exc()}\n"
            )
            outcome = Outcome(request.number, "", False, words, reason=Reason.UNKNOWN)
        self._outcomes.append(replace(outcome, site=request.site))

    async def _commit(self, outcome: Outcome, taken: bool) -> None:
        request = self._requests.pop(outcome.number)
        self._jobs.pop(outcome.number, None)
        if outcome.attempt_id:
            await (await self._site(request.site)).commit(outcome, request, taken=taken)

    async def _cancel(self, wait_s: float) -> list[AttemptRecord]:
        self._ending = self._cancelled = True
        for task in self._jobs.values():
            task.cancel()
        await asyncio.gather(*self._jobs.values(), return_exceptions=True)
        presubmitters = [runner.presubmitter for runner in self._runners.values()]
        await asyncio.gather(*(each.close() for each in presubmitters))
        keys = {job for request in self._requests.values() for job in request.jobs}
        # Attempts that have ended need no cancelling: the next run adopts them.
        known = {record.id: record for record in self._journal.open_attempts(*keys)}
        known |= {record.id: record for each in presubmitters for record in each.left}
        known |= {record.id: record for record in self._journal.all_dependents(known)}
        records = [r for r in known.values() if r.state is not AttemptState.ENDED]
        # Leave jobs to another controller that has taken over their place; some sites never opened.
        ours = {n: r for n, r in self._runners.items() if r.place.lead.deposed is None}
        left = await asyncio.gather(
            *(
                runner.canceller.cancel([r for r in records if r.site == name], wait_s)
                for name, runner in ours.items()
            )
        )
        others = [record for record in records if record.site not in ours and record.may_run]
        return [*others, *(record for of_site in left for record in of_site)]

    async def _presubmit(self) -> list[AttemptRecord]:
        presubmitters = [runner.presubmitter for runner in self._runners.values()]
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await asyncio.gather(*(each.drain() for each in presubmitters))
        return [record for each in presubmitters for record in each.records]

    async def _end_unrequested(self) -> None:
        """End the jobs of this run that Snakemake did not request in the end."""
        for runner in self._runners.values():
            records = [r for r in runner.presubmitter.left if r.job not in self._requested]
            if not records or runner.place.lead.deposed is not None:
                continue
            self._notify(
                f"Ending jobs at {runner.site.name} that wait for others and are not"
                f" needed any more: {_listed(records)}."
            )
            if left := await runner.canceller.cancel(records, _UNREQUESTED_S):
                self._notify(
                    f"These have not confirmed their end and may still run: {_listed(left)}. See"
                    " smk-mantik jobs; smk-mantik cancel ends them."
                )

    async def _end_unneeded(self, jobs: Callable[[], Container[str]]) -> None:
        if records := self._journal.open_presubmitted():
            unneeded = jobs()
            for record in [r for r in records if r.job in unneeded]:
                names = [n for n in self._names(record) if n in self._sites]
                with suppress(*_AWAY):  # it is reported at the end of the run
                    if not self._away.keys() & names:
                        for name in names:
                            await self._site(name)
                        self._notify(
                            ended_since_message(record, "since its outputs are not needed")
                        )
                        await self._give_up([record])

    def _report_unrequested(self) -> None:
        """Warn of jobs of earlier runs that this run did not request and that may still run."""
        left = [
            r
            for r in self._journal.all_open_attempts()
            if r.may_run and r.job not in self._requested
        ]
        if not left:
            return
        self._notify(
            "Earlier runs submitted jobs that this run does not need and that may still run:"
            f" {_listed(left)}. See smk-mantik jobs; smk-mantik cancel ends them."
        )

    async def _close(self, tidy: bool) -> None:
        self._ending = True
        self._outlook.close()
        tasks = [*self._jobs.values(), *self._away.values(), *self._watching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        runners = self._runners.values()
        for runner in runners:
            runner.watcher.close()
        await asyncio.gather(*(runner.presubmitter.close() for runner in runners))
        cancellers = [runner.canceller for runner in runners]
        if tidy:
            if not self._cancelled:
                await self._end_unrequested()
            self._report_unrequested()
            await asyncio.gather(*(canceller.settle() for canceller in cancellers))
            await asyncio.gather(*(place.tidy() for place in self.places))
        await asyncio.gather(*(canceller.close() for canceller in cancellers))
        with suppress(TimeoutError):
            async with asyncio.timeout(_SPARE_S):
                await asyncio.gather(
                    *(place.spare.write() for place in self.places), return_exceptions=True
                )
        clients = {id(site): site for site, _ in self._sites.values()}.values()
        await asyncio.gather(*(site.close() for site in clients), return_exceptions=True)


def _listed(records: Sequence[AttemptRecord]) -> str:
    """Return the names of the first few attempts, and how many more there are."""
    names = ", ".join(record.name for record in records[:_MOST_TOLD])
    return names + (f" and {len(records) - _MOST_TOLD} more" if len(records) > _MOST_TOLD else "")
