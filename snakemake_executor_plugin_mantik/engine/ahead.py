"""Submit jobs before their inputs exist, behind the tries that make these.

So a pipeline goes on while no controller runs. The scheduler starts such a job when the others have
ended, and its script decides whether it runs (`jobs/bash/predecessors.sh.j2`). Nothing watches it.
When Snakemake requests the job, its try is adopted like one of an earlier run: its fingerprint
names each input that did not exist by the try that makes it.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from snakemake_executor_plugin_mantik.common.errors import MantikError, SiteError, SiteRejected
from snakemake_executor_plugin_mantik.engine.attempt import Attempt
from snakemake_executor_plugin_mantik.engine.cancel import Canceller
from snakemake_executor_plugin_mantik.engine.dispatch import Dispatcher
from snakemake_executor_plugin_mantik.engine.observer import Observer
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.engine.watch import EXTEND_BY_S
from snakemake_executor_plugin_mantik.jobs.spec import Predecessor
from snakemake_executor_plugin_mantik.journal import Journal, TryRecord
from snakemake_executor_plugin_mantik.sites.base import Site
from snakemake_executor_plugin_mantik.staging.local import LocalFile

_NAMED_WAIT_S = 120.0
"""Most seconds to wait for the scheduler's id of a submitted job."""
_NAMED_FIRST_S = 0.25
_NAMED_LONGEST_S = 5.0
"""Shortest and longest seconds between two requests for such ids; doubled each time."""


class AheadJobs:
    """The jobs of one site that Snakemake has not requested yet.

    Call all methods from the event loop's thread.
    """

    def __init__(
        self,
        site: Site,
        dispatcher: Dispatcher,
        journal: Journal,
        canceller: Canceller,
        *,
        retry: SiteRetry,
        observer: Observer,
        room: Callable[[], int],
    ) -> None:
        """Prepare; `room` returns how many more jobs the site may have, besides these."""
        self._site = site
        self._dispatcher = dispatcher
        self._journal = journal
        self._canceller = canceller
        self._retry = retry
        self._observer = observer
        self._room = room
        self._wanted: dict[str, JobRequest] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._sent: dict[str, tuple[JobRequest, Attempt]] = {}
        self._makers: dict[str, Attempt] = {}
        self._made: set[str] = set()
        self._ending: dict[asyncio.Task[None], None] = {}
        self._named: dict[str, asyncio.Task[str]] = {}
        self._closed = False

    @property
    def records(self) -> list[TryRecord]:
        """The tries that were submitted and not requested by Snakemake since, oldest first."""
        return self._journal.tries(attempt.record.id for _, attempt in self._sent.values())

    @property
    def jobs(self) -> list[str]:
        """The identities of all jobs that were proposed and not requested since."""
        return [*self._wanted, *self._sending, *self._sent]

    def propose(self, request: JobRequest) -> None:
        """Submit a job as soon as the tries that make its inputs are submitted."""
        if request.job not in self._sent and request.job not in self._sending:
            self._wanted[request.job] = request
            self._look()

    def submitted(self, request: JobRequest, attempt: Attempt) -> None:
        """Note a requested try that the site knows: others can be submitted behind it."""
        if attempt.ids:
            self._makers[request.job] = attempt
            self._look()

    def ended(self, request: JobRequest, record: TryRecord, *, succeeded: bool) -> None:
        """Note the end of a requested try. Unless it has succeeded, end those that wait for it."""
        self._makers.pop(request.job, None)
        if succeeded:
            self._made.add(request.job)
        else:
            self.withdraw(record.id)
        self._look()

    def forget(self, request: JobRequest) -> None:
        """Note that a requested try is not followed any more, whatever its end."""
        self._makers.pop(request.job, None)

    async def take(self, request: JobRequest) -> Attempt | None:
        """Return the attempt of a job that Snakemake requests now, if it was submitted ahead.

        First wait until tries that are not wanted any more are over.
        """
        self._wanted.pop(request.job, None)
        if (sending := self._sending.get(request.job)) is not None:
            await asyncio.wait([sending])
        while self._ending:
            await asyncio.wait(self._ending)
        self._makers.pop(request.job, None)
        return self._sent.pop(request.job, (request, None))[1]

    def withdraw(self, try_id: str) -> None:
        """End the tries that wait for a try, and those that wait for them, in the background.

        Those of this run are submitted again if another try of the same job follows.
        """
        for record in self._journal.dependents(try_id):
            self._makers.pop(record.job, None)
            if (sent := self._sent.pop(record.job, None)) is not None:
                self._wanted[record.job] = sent[0]
            self.withdraw(record.id)
            task = asyncio.create_task(self._end(record))
            self._ending[task] = None
            task.add_done_callback(self._ending.pop)

    async def _end(self, record: TryRecord) -> None:
        if (sending := self._sending.get(record.job)) is not None:
            await asyncio.wait([sending])
            if (sent := self._sent.pop(record.job, None)) is not None:
                self._wanted[record.job] = sent[0]
        # Until then its state may have changed.
        left = [r for r in self._journal.tries([record.id]) if not r.state.final]
        with suppress(SiteError):
            await self._canceller.give_up(left)

    async def drain(self) -> None:
        """Wait until all jobs that can be submitted now are."""
        while self._sending:
            await asyncio.wait(self._sending.values())

    async def close(self) -> None:
        """Submit no more jobs."""
        self._closed = True
        tasks = [*self._sending.values(), *self._ending, *self._named.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _look(self) -> None:
        """Start to submit the wanted jobs that can be submitted now."""
        for job, request in list(self._wanted.items()):
            if self._closed or self._room() - len(self._sent) - len(self._sending) <= 0:
                return
            makers = set(request.unmade.values())
            if makers <= self._made:
                del self._wanted[job]  # Snakemake is about to request it
            elif makers <= self._makers.keys() | self._made:
                del self._wanted[job]
                task = self._sending[job] = asyncio.create_task(self._send(request))
                task.add_done_callback(lambda _, job=job: self._sent_or_not(job))  # type: ignore[misc]

    def _sent_or_not(self, job: str) -> None:
        del self._sending[job]
        self._look()

    async def _send(self, request: JobRequest) -> None:
        attempt: Attempt | None = None
        try:
            makers = self._current(request)
            files = await self._dispatcher.look_at_files(request, makers)
            if makers != self._current(request):
                self._wanted[request.job] = request
                return
            ids = {path: maker.record.id for path, maker in makers.items()}
            record = await self._dispatcher.choose_try(request, files, ids)
            attempt = Attempt.of(record)
            if makers != self._current(request) and not attempt.sent:
                # What they have made may not be recorded for it.
                self._journal.abandoned(record.id, "cancelled")
                self._wanted[request.job] = request
                return
            if not attempt.sent:
                await self._submit(request, attempt, makers, files)
        except MantikError as error:
            # Its own request reports the reason, if it is still there then.
            if attempt is not None and not attempt.sent:
                self._dispatcher.abandon_if_unsent(attempt, error)
            return
        self._sent[request.job] = request, attempt
        if attempt.ids:
            self._makers[request.job] = attempt

    async def _submit(
        self,
        request: JobRequest,
        attempt: Attempt,
        makers: Mapping[str, Attempt],
        files: list[LocalFile],
    ) -> None:
        after: dict[str, list[str]] = {}
        for path, maker in makers.items():
            after.setdefault(maker.record.id, []).append(path)
        paths = {maker.record.id: maker.record.paths for maker in makers.values()}
        ids = dict.fromkeys(job_id for maker in makers.values() for job_id in maker.ids)
        scheduler_ids = await asyncio.gather(*map(self._scheduler_id, ids))
        whole, own = await self._dispatcher.observe(request, attempt)
        await self._dispatcher.submit(
            whole, attempt, files, own,
            after=[Predecessor(paths[one], tuple(made)) for one, made in after.items()],
            after_jobs=scheduler_ids,
        )  # fmt: skip
        names = dict.fromkeys(maker.record.name for maker in makers.values())
        self._observer.waiting(attempt.record, f"queued behind {', '.join(names)}")
        with suppress(SiteError):
            # No controller may be there to do it when the server's default lifetime is over.
            await self._site.extend(attempt.ids, EXTEND_BY_S)

    def _current(self, request: JobRequest) -> dict[str, Attempt]:
        """Return the attempts that make the inputs of a job which do not exist yet, by path."""
        return {p: self._makers[job] for p, job in request.unmade.items() if job in self._makers}

    async def _scheduler_id(self, job_id: str) -> str:
        if job_id not in self._named:
            self._named[job_id] = asyncio.create_task(self._find_scheduler_id(job_id))
        return await asyncio.shield(self._named[job_id])

    async def _find_scheduler_id(self, job_id: str) -> str:
        clock = asyncio.get_running_loop().time
        until, pause = clock() + _NAMED_WAIT_S, _NAMED_FIRST_S
        while True:
            found = await self._retry(lambda: self._site.scheduler_ids([job_id]))
            if job_id in found:
                return found[job_id]
            if clock() > until:
                raise SiteRejected(f"the scheduler's id of job {job_id} is not known")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _NAMED_LONGEST_S)
