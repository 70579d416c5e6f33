"""Submit tries behind others: before their inputs exist, or before the segment before has ended.

So a pipeline goes on while no controller runs. The scheduler starts such a try when the others have
ended, and its script decides whether it runs (`jobs/bash/inputs.sh`). Nothing watches it.
When Snakemake requests the job, its try is adopted like one of an earlier run: its fingerprint
names each input that did not exist by the try that makes it.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from snakemake_executor_plugin_mantik.common.errors import (
    MantikError,
    SiteError,
    SiteRejected,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.jobs.segments import GO_ON_CODE
from snakemake_executor_plugin_mantik.jobs.spec import Predecessor
from snakemake_executor_plugin_mantik.journal import TryRecord

from .attempt import Attempt
from .dispatch import Dispatcher
from .request import JobRequest
from .watch import EXTEND_BY_S
from .work import SiteWork, Worker

_NAMED_WAIT_S = 120.0
"""Most seconds to wait for the scheduler's id of a submitted job."""
_NAMED_FIRST_S = 0.25
_NAMED_LONGEST_S = 5.0
"""Shortest and longest seconds between two requests for such ids; doubled each time."""


class Behind(Worker):
    """The tries of one site that wait there for others, and the jobs that are to be such.

    Jobs are submitted ahead of their inputs before Snakemake requests them; of a job that goes on
    past its walltime, the next segments.
    """

    def __init__(self, work: SiteWork, dispatcher: Dispatcher, room: Callable[[], int]) -> None:
        """Prepare; `room` returns how many tries may wait at this site."""
        super().__init__(work)
        self._dispatcher = dispatcher
        self._most = room
        self._wanted: dict[str, JobRequest] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._submitting: set[str] = set()
        self._sent: dict[str, tuple[JobRequest, Attempt]] = {}
        self._makers: dict[str, Attempt] = {}
        self._made: set[str] = set()
        self._accepted: set[str] = set()
        self._own: set[str] = set()
        self._ending: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._named: dict[str, asyncio.Task[str]] = {}
        self._segments: dict[str, asyncio.Task[None]] = {}
        self._stopped: set[str] = set()
        self._waiting: dict[str, int] = {}
        self._closed = False
        dispatcher.end_behind = self.end_behind

    @property
    def records(self) -> list[TryRecord]:
        """The tries that were submitted and not requested by Snakemake since, oldest first."""
        found = self._journal.tries(attempt.record.id for _, attempt in self._sent.values())
        return [record for record in found if not record.state.final]

    @property
    def left(self) -> list[TryRecord]:
        """All open tries that this run has submitted ahead, or was about to."""
        return [record for record in self._journal.open_ahead() if record.id in self._own]

    @property
    def number(self) -> int:
        """How many jobs are submitted ahead, or about to be."""
        return len(self._sent) + len(self._sending)

    def _room(self) -> int:
        return self._most() - self.number - sum(self._waiting.values())

    def propose(self, request: JobRequest) -> None:
        """Submit a job as soon as the tries that make its inputs are submitted."""
        if request.job not in self._sent and request.job not in self._sending:
            self._wanted[request.job] = request
            self.look()

    def submitted(self, request: JobRequest, attempt: Attempt) -> None:
        """Note a requested try that the site knows: others can be submitted behind it.

        `request` is without an observer's additions, which are those of one try.
        """
        self._forget_outputs(request)
        if not attempt.ids:
            return
        if request.continuation is None:  # else it is not the last try
            self._makers[request.job] = attempt
            self.look()
        elif request.job not in self._segments:
            self._stopped.discard(request.job)
            sending = self._send_segments(request, attempt)
            self._segments[request.job] = asyncio.create_task(sending)

    def ended(self, request: JobRequest, record: TryRecord, *, succeeded: bool) -> None:
        """Note the end of a requested try. Unless it has succeeded, end those that wait for it."""
        self._makers.pop(request.job, None)
        if succeeded:
            self._made.add(request.job)
        else:
            self._forget_outputs(request)
            self._withdraw([record.id])
        self.look()

    def _forget_outputs(self, request: JobRequest) -> None:
        self._made.discard(request.job)
        self._accepted.discard(request.job)

    def accepted(self, request: JobRequest) -> None:
        """Note that Snakemake has accepted a job's outputs and will not change them any more."""
        self._accepted.add(request.job)
        self.look()

    def forget(self, request: JobRequest) -> None:
        """Note that a requested try is not followed any more, whatever its end."""
        self._makers.pop(request.job, None)

    async def take(self, request: JobRequest) -> Attempt | None:
        """Return the attempt of a job that Snakemake requests now, if it was submitted ahead.

        First wait until a try of it that is not wanted any more is over.
        """
        while (sending := self._sending.get(request.job)) is not None:
            self._interrupt(request.job, sending)
            await asyncio.wait([sending])
            self._done(request.job, sending)
        while tasks := [task for job, task in self._ending.values() if job == request.job]:
            await asyncio.wait(tasks)
        self._wanted.pop(request.job, None)
        return self._sent.pop(request.job, (request, None))[1]

    def _interrupt(self, job: str, sending: asyncio.Task[None]) -> None:
        if job not in self._submitting:
            sending.cancel()

    async def end_behind(self, ids: Iterable[str]) -> None:
        """End the tries that wait for some others, and those that wait for them."""
        if tasks := self._withdraw(ids):
            await asyncio.wait(tasks)

    def _withdraw(self, ids: Iterable[str]) -> list[asyncio.Task[None]]:
        """Begin to end the tries that wait for others, directly or not, and return the tasks.

        Those of this run are submitted again if other tries of the same jobs follow.
        """
        if self._closed:
            return []
        records = self._journal.all_dependents(ids)
        for record in records:
            self._take_back(record)
            if record.id not in self._ending:
                task = asyncio.create_task(self._end(record))
                self._ending[record.id] = record.job, task
                task.add_done_callback(lambda _, key=record.id: self._ending.pop(key))  # type: ignore[misc]
        return [self._ending[record.id][1] for record in records]

    def _take_back(self, record: TryRecord) -> None:
        maker, sent = self._makers.get(record.job), self._sent.get(record.job)
        if maker is not None and maker.record.id == record.id:
            del self._makers[record.job]
        if sent is not None and sent[1].record.id == record.id:
            del self._sent[record.job]
            self._wanted[record.job] = sent[0]

    async def _end(self, record: TryRecord) -> None:
        if (sending := self._sending.get(record.job)) is not None:
            self._interrupt(record.job, sending)
            await asyncio.wait([sending])
            self._take_back(record)
        # Until then its state may have changed.
        left = [r for r in self._journal.tries([record.id]) if not r.state.final]
        try:
            await self._give_up(left)
        except Exception as error:  # noqa: BLE001 - a refusal of the site, or a bug of ours
            # It will not run: its predecessors have not succeeded, or its inputs differ.
            self._retry.note(
                f"{record.name}: this job is no longer wanted, but could not be ended at the site;"
                f" its outputs are not used. {error}"
            )

    async def drain(self) -> None:
        """Wait until all jobs that can be submitted now have been submitted."""
        while self._sending:
            await asyncio.wait(self._sending.values())

    async def close(self) -> None:
        """Submit no more jobs and segments."""
        self._closed = True
        ending = [task for _, task in self._ending.values()]
        sending = [*self._sending.values(), *self._segments.values()]
        tasks = [*sending, *ending, *self._named.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> None:
        """Start to submit the wanted jobs that can be submitted now."""
        for job, request in list(self._wanted.items()):
            if self._closed or self._room() <= 0:
                return
            makers = set(request.unmade.values())
            if job in self._sending:
                continue
            if makers <= self._accepted:
                del self._wanted[job]  # Snakemake is about to request it
            elif makers <= self._makers.keys() | self._accepted:
                del self._wanted[job]
                task = self._sending[job] = asyncio.create_task(self._send(request))
                task.add_done_callback(lambda task, job=job: self._done(job, task))  # type: ignore[misc]

    def _done(self, job: str, task: asyncio.Task[None]) -> None:
        if self._sending.get(job) is task:
            del self._sending[job]
            self._submitting.discard(job)
            self.look()

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
            self._own.add(record.id)
            attempt = Attempt.of(record, files)
            if not attempt.sent:
                await self._send_after(request, attempt, makers)
        except asyncio.CancelledError:
            if not set(request.unmade.values()) <= self._makers.keys() | self._accepted:
                self._wanted[request.job] = request  # for another try of what makes its inputs
            raise
        except MantikError as error:
            # The reason is reported when Snakemake requests the job, if it still exists then.
            if attempt is not None and not attempt.sent:
                await self._dispatcher.abandon_if_unsent(attempt, error)
        except Exception as error:  # noqa: BLE001 - the job's own request meets it, too
            self._retry.note(f"{request.name}: a bug in the executor kept it here ({error!r})")
        if attempt is not None and attempt.sent:
            self._sent[request.job] = request, attempt
            if attempt.ids and request.continuation is None:
                self._makers[request.job] = attempt

    async def _send_after(
        self, request: JobRequest, attempt: Attempt, makers: Mapping[str, Attempt]
    ) -> None:
        after: dict[str, list[str]] = {}
        for path, maker in makers.items():
            after.setdefault(maker.record.id, []).append(path)
        paths = {maker.record.id: maker.record.paths for maker in makers.values()}
        if makers != self._current(request):
            # What they have made may not be recorded for it.
            self._journal.abandoned(attempt.record.id, "cancelled")
            self._wanted[request.job] = request
            return
        ids = await self._scheduler_ids(i for maker in makers.values() for i in maker.ids)
        self._submitting.add(request.job)  # from here on, `take` does not cancel it
        [record] = self._journal.tries([attempt.record.id])
        if record.state.final or not self._may_follow(request, makers):
            self._wanted[request.job] = request
            return
        predecessors = [Predecessor(paths[one], tuple(made)) for one, made in after.items()]
        await self._submit(request, attempt, predecessors, ids)

    async def _submit(
        self,
        request: JobRequest,
        attempt: Attempt,
        after: Sequence[Predecessor],
        after_jobs: Sequence[str],
        *,
        segment: bool = False,
    ) -> None:
        """Submit a try behind others; a `segment` again, until its own id is known.

        Raises:
            MantikError: the site refuses it, or a file cannot be read.
        """
        await self._dispatcher.observe(request, attempt, waits=segment)

        async def submit() -> None:
            await self._dispatcher.submit(attempt, after=after, after_jobs=after_jobs)
            if segment and not attempt.ids and request.job not in self._stopped:
                # The segments behind it need its id. Submitted again, it still runs once.
                raise SiteUnreachable(
                    f"the answer to the submission of {attempt.record.part} was lost",
                    where=f"site {request.site}",
                )

        await (self._retry(submit) if segment else submit())
        with suppress(SiteError):
            # No controller may be there to do it when the server's default lifetime is over.
            await self._site.extend(attempt.ids, EXTEND_BY_S)

    def _may_follow(self, request: JobRequest, makers: Mapping[str, Attempt]) -> bool:
        """Return whether the tries that make a job's inputs are still wanted, or have succeeded."""
        current = self._current(request)
        return all(
            current.get(path) is maker or request.unmade[path] in self._made
            for path, maker in makers.items()
        )

    def _current(self, request: JobRequest) -> dict[str, Attempt]:
        """Return the attempts that make the inputs of a job which do not exist yet, by path."""
        return {p: self._makers[job] for p, job in request.unmade.items() if job in self._makers}

    async def _scheduler_ids(self, job_ids: Iterable[str]) -> list[str]:
        """Return the scheduler's ids of some jobs of the site.

        Raises:
            SiteRejected: one is not known after a while.
        """
        return list(await asyncio.gather(*map(self._scheduler_id, dict.fromkeys(job_ids))))

    async def _scheduler_id(self, job_id: str) -> str:
        if (task := self._named.get(job_id)) is None:
            task = self._named[job_id] = asyncio.create_task(self._find_scheduler_id(job_id))

            def found(task: asyncio.Task[str]) -> None:
                if task.cancelled() or task.exception() is not None:
                    self._named.pop(job_id, None)  # the next one asks again

            task.add_done_callback(found)
        return await asyncio.shield(task)

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

    # Segments

    async def stop_segments(self, request: JobRequest) -> None:
        """Submit no more segments behind the present one, which has ended."""
        self._stopped.add(request.job)
        if (task := self._segments.pop(request.job, None)) is not None:
            await asyncio.wait([task])
        self._waiting.pop(request.job, None)

    async def end_segments(self, request: JobRequest, record: TryRecord) -> None:
        """End the segments behind one after which the job does not go on.

        Call it before anything is recorded about the outputs, which these were to make, too.
        """
        if request.continuation is not None:
            await self.stop_segments(request)
            await self._give_up(self._journal.segments.waiting_after(record.id))

    async def _send_segments(self, request: JobRequest, before: Attempt) -> None:
        assert request.continuation is not None
        files, waiting = before.files, self._journal.segments.waiting_after(before.record.id)
        self._waiting[request.job] = len(waiting)
        before = Attempt.of(waiting[-1]) if waiting else before
        try:
            while (
                before.record.segment + 1 < request.continuation.most
                and before.ids
                and request.job not in self._stopped
                and self._facts.orders_jobs
                and self._room() > 0
            ):
                ids = await self._scheduler_ids(before.ids)
                attempt = Attempt.of(self._dispatcher.next_segment(before.record), files)
                after = Predecessor(before.record.paths, request.continuation.paths, GO_ON_CODE)
                await self._submit(request, attempt, [after], ids, segment=True)
                before = attempt
                self._waiting[request.job] += 1
        except MantikError:
            pass  # it is submitted when the one before has ended, which reports the reason
        except Exception as error:  # noqa: BLE001 - the job goes on all the same
            self._retry.note(
                f"{request.name}: a bug in the executor kept segments here ({error!r})"
            )
