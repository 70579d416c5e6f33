"""Submit attempts behind others: before their inputs exist, or before the segment before has ended.

So a pipeline goes on while no controller runs. The scheduler starts such an attempt when the others
have ended, and its script decides whether it runs (`jobs/bash/inputs.sh`). Nothing watches it. When
Snakemake requests the job, its attempt is adopted like one of an earlier run: its fingerprint names
each input that did not exist by the attempt that makes it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..common.errors import MantikError, SiteError, SiteRejected, SiteUnreachable
from ..jobs.segments import GO_ON_CODE
from ..jobs.spec import Predecessor
from ..journal import AttemptRecord
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


@dataclass(eq=False)
class _Presubmission:
    """A job that is submitted before Snakemake requests it.

    Attributes:
        task: submits it; None when that is over.
        begun: whether its request to the site may have been made; then nothing interrupts `task`.
        attempt: the attempt that the site may know.
    """

    request: JobRequest
    task: asyncio.Task[None] | None = None
    begun: bool = False
    attempt: Attempt | None = None

    async def over(self) -> None:
        """Wait until `task` is over; unless it has begun, let it end."""
        if self.task is not None:
            if not self.begun:
                self.task.cancel()
            await asyncio.wait([self.task])


@dataclass(eq=False)
class _Maker:
    """What is known of a job whose outputs others wait for.

    Attributes:
        attempt: its last attempt, if others can be submitted behind it.
        made: whether it has succeeded.
        accepted: whether Snakemake has accepted its outputs and will not change them any more.
    """

    attempt: Attempt | None = None
    made: bool = False
    accepted: bool = False

    @property
    def ready(self) -> bool:
        return self.accepted or self.attempt is not None

    def forget_outputs(self) -> None:
        self.made = self.accepted = False


@dataclass(eq=False)
class _Segments:
    """The next segments of a requested job: the task that submits them, and how many wait."""

    task: asyncio.Task[None] | None = None
    waiting: int = 0
    stopped: bool = False


class Presubmitter(Worker):
    """The attempts of one site that wait there for others, and the jobs that are to be such.

    Jobs are submitted before Snakemake requests them (presubmitted); of a job that goes on past
    its walltime, the next segments.
    """

    def __init__(self, work: SiteWork, dispatcher: Dispatcher, room: Callable[[], int]) -> None:
        """Prepare; `room` returns how many attempts may wait at this site."""
        super().__init__(work)
        self._dispatcher = dispatcher
        self._most = room
        self._wanted: dict[str, JobRequest] = {}
        self._presubmitted: dict[str, _Presubmission] = {}
        self._makers: defaultdict[str, _Maker] = defaultdict(_Maker)
        self._segments: dict[str, _Segments] = {}
        self._own: set[str] = set()
        self._ending: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._named: dict[str, asyncio.Task[str]] = {}
        self._closed = False
        dispatcher.end_dependents = self.end_dependents

    @property
    def records(self) -> list[AttemptRecord]:
        """The attempts that were submitted and not requested by Snakemake since, oldest first."""
        sent = [s.attempt for s in self._presubmitted.values() if s.attempt is not None]
        found = self._journal.attempts(attempt.record.id for attempt in sent)
        return [record for record in found if not record.state.final]

    @property
    def left(self) -> list[AttemptRecord]:
        """All open attempts that this run has presubmitted, or was about to."""
        return [record for record in self._journal.open_presubmitted() if record.id in self._own]

    @property
    def number(self) -> int:
        """How many jobs are presubmitted, or about to be."""
        return len(self._presubmitted)

    def _room(self) -> int:
        return self._most() - self.number - sum(s.waiting for s in self._segments.values())

    def propose(self, request: JobRequest) -> None:
        """Submit a job as soon as the attempts that make its inputs are submitted."""
        if request.job not in self._presubmitted:
            self._wanted[request.job] = request
            self.look()

    def submitted(self, request: JobRequest, attempt: Attempt) -> None:
        """Note a requested attempt that the site knows: others can be submitted behind it.

        `request` is without an observer's additions, which are those of one attempt.
        """
        maker = self._makers[request.job]
        maker.forget_outputs()
        if not attempt.ids:
            return
        if request.continuation is None:  # else it is not the last attempt
            maker.attempt = attempt
            self.look()
        elif request.job not in self._segments:
            segments = self._segments[request.job] = _Segments()
            sending = self._send_segments(request, attempt, segments)
            segments.task = asyncio.create_task(sending)

    def ended(self, request: JobRequest, record: AttemptRecord, *, succeeded: bool) -> None:
        """Note the end of a requested attempt; unless it has succeeded, end those behind it."""
        maker = self._makers[request.job]
        maker.attempt = None
        if succeeded:
            maker.made = True
        else:
            maker.forget_outputs()
            self._withdraw([record.id])
        self.look()

    def accepted(self, request: JobRequest) -> None:
        """Note that Snakemake has accepted a job's outputs and will not change them any more."""
        self._makers[request.job].accepted = True
        self.look()

    def forget(self, request: JobRequest) -> None:
        """Note that a requested attempt is not followed any more, whatever its end."""
        self._makers[request.job].attempt = None

    def has(self, request: JobRequest) -> bool:
        """Return whether a job was presubmitted, or is about to be."""
        return request.job in self._presubmitted

    async def take(self, request: JobRequest) -> Attempt | None:
        """Return the attempt of a job that Snakemake requests now, if it was presubmitted.

        First wait until an attempt of it that is not wanted any more is over. No job is submitted
        behind it until it is `submitted`: it may be unwanted, too.
        """
        while (sending := self._presubmitted.get(request.job)) and sending.task is not None:
            await sending.over()
            self._sent(sending)
        self.forget(request)
        while tasks := [task for job, task in self._ending.values() if job == request.job]:
            await asyncio.wait(tasks)
        self._wanted.pop(request.job, None)
        sending = self._presubmitted.pop(request.job, None)
        return sending.attempt if sending is not None else None

    async def end_dependents(self, ids: Iterable[str]) -> None:
        """End the attempts that wait for some others, and those that wait for them."""
        if tasks := self._withdraw(ids):
            await asyncio.wait(tasks)

    def _withdraw(self, ids: Iterable[str]) -> list[asyncio.Task[None]]:
        """Begin to end the attempts that wait for others, directly or not, and return the tasks.

        Those of this run are submitted again if other attempts of the same jobs follow.
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

    def _take_back(self, record: AttemptRecord) -> None:
        maker, sending = self._makers[record.job], self._presubmitted.get(record.job)
        if maker.attempt is not None and maker.attempt.record.id == record.id:
            maker.attempt = None
        if sending is not None and sending.attempt and sending.attempt.record.id == record.id:
            del self._presubmitted[record.job]
            self._wanted[record.job] = sending.request

    async def _end(self, record: AttemptRecord) -> None:
        if (sending := self._presubmitted.get(record.job)) is not None:
            await sending.over()
            self._take_back(record)
        # Until then its state may have changed.
        left = [r for r in self._journal.attempts([record.id]) if not r.state.final]
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
        while tasks := [s.task for s in self._presubmitted.values() if s.task is not None]:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Submit no more jobs and segments."""
        self._closed = True
        sending = [one.task for one in self._presubmitted.values()]
        segments = [one.task for one in self._segments.values()]
        ending = [task for _, task in self._ending.values()]
        found = (*sending, *segments, *ending, *self._named.values())
        tasks = [task for task in found if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> None:
        """Start to submit the wanted jobs that can be submitted now."""
        for job, request in list(self._wanted.items()):
            if self._closed or self._room() <= 0:
                return
            if job in self._presubmitted:
                continue
            makers = [self._makers[maker] for maker in set(request.unmade.values())]
            if all(maker.accepted for maker in makers):
                del self._wanted[job]  # Snakemake is about to request it
            elif all(maker.ready for maker in makers):
                del self._wanted[job]
                sending = self._presubmitted[job] = _Presubmission(request)
                sending.task = asyncio.create_task(self._send(sending))
                sending.task.add_done_callback(lambda _, sending=sending: self._sent(sending))  # type: ignore[misc]

    def _sent(self, sending: _Presubmission) -> None:
        """Note that a job's submission is over, which may have failed."""
        sending.task, job = None, sending.request.job
        if sending.attempt is None and self._presubmitted.get(job) is sending:
            del self._presubmitted[job]
        self.look()

    async def _send(self, sending: _Presubmission) -> None:
        request, attempt = sending.request, None
        try:
            makers = self._current(request)
            files = await self._dispatcher.look_at_files(request, makers)
            if makers != self._current(request):
                self._wanted[request.job] = request
                return
            ids = {path: maker.record.id for path, maker in makers.items()}
            record = await self._dispatcher.choose_attempt(request, files, ids)
            self._own.add(record.id)
            attempt = Attempt.of(record, files)
            if not attempt.sent:
                await self._send_after(sending, attempt, makers)
        except asyncio.CancelledError:
            if not all(self._makers[job].ready for job in request.unmade.values()):
                self._wanted[request.job] = request  # for another attempt of what makes its inputs
            raise
        except MantikError as error:
            # The reason is reported when Snakemake requests the job, if it still exists then.
            if attempt is not None and not attempt.sent:
                await self._dispatcher.abandon_if_unsent(attempt, error)
        except Exception as error:  # noqa: BLE001 - the job's own request meets it, too
            self._retry.note(
                f"{request.name}: a bug in the executor kept it from being submitted ({error!r})"
            )
        if attempt is not None and attempt.sent:
            sending.attempt = attempt
            if attempt.ids and request.continuation is None:
                self._makers[request.job].attempt = attempt

    async def _send_after(
        self, sending: _Presubmission, attempt: Attempt, makers: Mapping[str, Attempt]
    ) -> None:
        request = sending.request
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
        sending.begun = True
        [record] = self._journal.attempts([attempt.record.id])
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
        segments: _Segments | None = None,
    ) -> None:
        """Submit an attempt behind others; one of `segments` again, until its own id is known.

        Raises:
            MantikError: the site refuses it, or a file cannot be read.
        """
        await self._dispatcher.observe(request, attempt, waits=segments is not None)

        async def submit() -> None:
            await self._dispatcher.submit(attempt, after=after, after_jobs=after_jobs)
            if segments is not None and not attempt.ids and not segments.stopped:
                # The segments behind it need its id. Submitted again, it still runs once.
                raise SiteUnreachable(
                    f"the answer to the submission of {attempt.record.part} was lost",
                    where=f"site {request.site}",
                )

        await (submit() if segments is None else self._retry(submit))
        with suppress(SiteError):
            # No controller may be there to do it when the server's default lifetime is over.
            await self._site.extend(attempt.ids, EXTEND_BY_S)

    def _may_follow(self, request: JobRequest, makers: Mapping[str, Attempt]) -> bool:
        """Return whether those that make a job's inputs are still wanted, or have succeeded."""
        current = self._current(request)
        return all(
            current.get(path) is maker or self._makers[request.unmade[path]].made
            for path, maker in makers.items()
        )

    def _current(self, request: JobRequest) -> dict[str, Attempt]:
        """Return the attempts that make the inputs of a job which do not exist yet, by path."""
        known = {path: self._makers[job].attempt for path, job in request.unmade.items()}
        return {path: attempt for path, attempt in known.items() if attempt is not None}

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
        if (segments := self._segments.get(request.job)) is not None and segments.task is not None:
            segments.stopped = True
            await asyncio.wait([segments.task])
            self._segments.pop(request.job, None)

    async def end_segments(self, request: JobRequest, record: AttemptRecord) -> None:
        """End the segments behind one after which the job does not go on.

        Call it before anything is recorded about the outputs, which these were to make, too.
        """
        if request.continuation is not None:
            await self.stop_segments(request)
            await self._give_up(self._journal.segments.waiting_after(record.id))

    async def _send_segments(
        self, request: JobRequest, before: Attempt, segments: _Segments
    ) -> None:
        assert request.continuation is not None
        files, waiting = before.files, self._journal.segments.waiting_after(before.record.id)
        segments.waiting = len(waiting)
        before = Attempt.of(waiting[-1]) if waiting else before
        try:
            while (
                before.record.segment + 1 < request.continuation.most
                and before.ids
                and not segments.stopped
                and self._facts.orders_jobs
                and self._room() > 0
            ):
                ids = await self._scheduler_ids(before.ids)
                attempt = Attempt.of(self._dispatcher.next_segment(before.record), files)
                after = Predecessor(before.record.paths, request.continuation.paths, GO_ON_CODE)
                await self._submit(request, attempt, [after], ids, segments=segments)
                before = attempt
                segments.waiting += 1
        except MantikError:
            pass  # it is submitted when the one before has ended, which reports the reason
        except Exception as error:  # noqa: BLE001 - the job goes on all the same
            self._retry.note(
                f"{request.name}: a bug in the executor kept its segments from"
                f" being submitted ({error!r})"
            )
