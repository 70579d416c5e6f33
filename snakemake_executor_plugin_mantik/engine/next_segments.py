"""Submit the segments of a job before the ones before them have ended.

So a job goes on past its walltime while no controller runs. The scheduler starts a segment when the
one before has ended, and its script runs the command only if that one asks for it
(`jobs/bash/predecessors.sh.j2`). Nothing watches it until then.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from snakemake_executor_plugin_mantik.common.errors import MantikError, SiteError, SiteUnreachable
from snakemake_executor_plugin_mantik.jobs.segments import GO_ON_CODE
from snakemake_executor_plugin_mantik.jobs.spec import Predecessor
from snakemake_executor_plugin_mantik.journal import Journal, TryRecord
from snakemake_executor_plugin_mantik.sites.base import Site
from snakemake_executor_plugin_mantik.staging.local import LocalFile

from .ahead import AheadJobs
from .attempt import Attempt
from .dispatch import Dispatcher
from .request import JobRequest
from .site_retry import SiteRetry
from .watch import EXTEND_BY_S


class NextSegments:
    """The segments at one site that wait for others. Call all methods from the loop's thread."""

    def __init__(
        self,
        site: Site,
        dispatcher: Dispatcher,
        journal: Journal,
        give_up: Callable[[Sequence[TryRecord]], Awaitable[None]],
        ahead: AheadJobs,
        *,
        retry: SiteRetry,
        room: Callable[[], int],
    ) -> None:
        """Prepare; `room` returns how many more segments may wait at this site."""
        self._site = site
        self._dispatcher = dispatcher
        self._journal = journal
        self._give_up = give_up
        self._ahead = ahead
        self._retry = retry
        self._room = room
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._stopped: set[str] = set()
        self._waiting: dict[str, int] = {}

    @property
    def number(self) -> int:
        """How many segments wait for others."""
        return sum(self._waiting.values())

    def submitted(self, request: JobRequest, attempt: Attempt, files: list[LocalFile]) -> None:
        """Submit the segments behind a try that the site knows.

        `request` is without an observer's additions, which are those of one try.
        """
        if request.continuation is None or not attempt.ids:
            return
        if request.job not in self._sending:
            self._stopped.discard(request.job)
            self._sending[request.job] = asyncio.create_task(self._send(request, attempt, files))

    async def stop(self, request: JobRequest) -> None:
        """Submit no more segments behind the present one, which has ended."""
        self._stopped.add(request.job)
        if (task := self._sending.pop(request.job, None)) is not None:
            await asyncio.wait([task])
        self._waiting.pop(request.job, None)

    async def end_behind(self, request: JobRequest, record: TryRecord) -> None:
        """End the segments behind one after which the job does not go on.

        Call it before anything is recorded about the outputs, which these were to make, too.
        """
        if request.continuation is not None:
            await self.stop(request)
            await self._give_up(self._journal.segments.waiting_after(record.id))

    async def close(self) -> None:
        """Submit no more segments."""
        for task in self._sending.values():
            task.cancel()
        await asyncio.gather(*self._sending.values(), return_exceptions=True)

    async def _send(self, request: JobRequest, attempt: Attempt, files: list[LocalFile]) -> None:
        waiting = self._journal.segments.waiting_after(attempt.record.id)
        self._waiting[request.job] = len(waiting)
        before = Attempt.of(waiting[-1]) if waiting else attempt
        try:
            while self._may_send(request, before):
                before = await self._send_one(request, before, files)
                self._waiting[request.job] += 1
        except MantikError:
            pass  # it is submitted when the one before has ended, which reports the reason
        except Exception as error:  # noqa: BLE001 - the job goes on all the same
            self._retry.note(
                f"{request.name}: a bug in the executor kept segments here ({error!r})"
            )

    def _may_send(self, request: JobRequest, before: Attempt) -> bool:
        assert request.continuation is not None
        more = before.record.segment + 1 < request.continuation.most
        return more and bool(before.ids) and request.job not in self._stopped and self._room() > 0

    async def _send_one(
        self, request: JobRequest, before: Attempt, files: list[LocalFile]
    ) -> Attempt:
        """Submit the segment after `before`, and return it.

        Raises:
            MantikError: the site refuses it, or a file cannot be read.
        """
        assert request.continuation is not None
        ids = [await self._ahead.scheduler_id(job_id) for job_id in before.ids]
        attempt = Attempt.of(self._dispatcher.next_segment(before.record))
        whole, own = await self._dispatcher.observe(request, attempt, waits=True)
        makes = tuple(path.rstrip("/") for path in request.continuation.checkpoint)

        async def submit() -> None:
            await self._dispatcher.submit(
                whole, attempt, files, own,
                after=[Predecessor(before.record.paths, makes, GO_ON_CODE)], after_jobs=ids,
            )  # fmt: skip
            if not attempt.ids and request.job not in self._stopped:
                # The segments behind it need its id. Submitted again, it still runs once.
                raise SiteUnreachable(
                    f"the answer to the submission of {attempt.record.part} was lost",
                    where=f"site {request.site}",
                )

        await self._retry(submit)
        with suppress(SiteError):
            # No controller may be there to do it when the server's default lifetime is over.
            await self._site.extend(attempt.ids, EXTEND_BY_S)
        return attempt
