"""End attempts for certain, and remove what finished ones leave at the site."""

import asyncio
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ..common.errors import JournalError, PlaceTaken, SiteError, SiteNotFound, SiteRejected
from ..common.humanize import humanize_duration
from ..jobs.markers import Marker
from ..jobs.paths import MAX_PATH_DEPTH
from ..jobs.reasons import Reason
from ..journal import UNTIMED, AttemptRecord, AttemptState, Times, turn_of
from ..sites.base import Phase, Site, is_rest_safe
from ..staging.transfers import OutputStaging
from .attempt import Attempt, used_of
from .evidence import Evidence, find_markers, read_owner, revoke_attempt
from .fetch import log_path
from .machine import Do, End, decide
from .observer import JobEnd
from .watch import Watched, Watcher
from .work import SiteWork, Worker

SALVAGE_WAIT_S = 60.0
"""Most seconds for the download: the report of the job's end waits for it."""
MAX_SALVAGED_BYTES = 4 << 30
"""Most bytes to download: a file at a site may be endless (a link to /dev/zero)."""
_SUFFIX = ".mantik-salvage"


async def salvage_files(site: Site, directory: str, workdir: Path) -> None:
    """Download `directory`, relative to the workspace and to `workdir`, as far as possible.

    Local entries of the same names are replaced after the whole download. A file whose download
    fails stays incomplete; after a timeout or a failed listing, nothing is replaced. Beyond
    `MAX_SALVAGED_BYTES` the rest is left out.
    """
    target = workdir / directory
    part = target.with_name(target.name + _SUFFIX)
    try:
        async with asyncio.timeout(SALVAGE_WAIT_S):
            await _fetch(site, directory, part)
        await asyncio.to_thread(_settle, part, target)
    except (TimeoutError, SiteError, OSError):
        pass  # keep the files that are here already
    finally:
        shutil.rmtree(part, ignore_errors=True)


async def _fetch(site: Site, directory: str, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    folders, size = [PurePosixPath()], 0
    while folders:
        folder = folders.pop()
        for name, entry in (await site.list(str(directory / folder))).items():
            below = folder / name
            if len(below.parts) != len(folder.parts) + 1 or len(below.parts) > MAX_PATH_DEPTH:
                continue
            if name == ".." or not is_rest_safe(str(directory / below)):
                continue
            if entry.directory:
                (target / below).mkdir()
                folders.append(below)
                continue
            with (target / below).open("wb") as file, suppress(SiteError):
                async for part in site.get(str(directory / below), size=entry.size):
                    size += len(part)
                    if size > MAX_SALVAGED_BYTES:
                        return
                    file.write(part)


def _settle(part: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in part.iterdir():
        place = target / path.name
        if place.is_dir():
            shutil.rmtree(place)
        path.rename(place)


CANCEL_WAIT_S = 180.0
"""Seconds to wait for cancelled jobs to be confirmed as ended before a message to the user. A job
without a marker takes longest: the site's report of its end counts only after some missed
heartbeats. A UNICORE server that runs jobs itself reports each aborted job as ended, and lets it
run."""
_CANCELLED_IN_WAIT = 500
"""Least number of jobs that can be cancelled at a site in that time, with two requests for each."""
ENDED_AT_ONCE = 16
"""Most jobs to cancel at the same time: if all were cancelled at once, none would be over before
nearly all are."""
_CANCEL_AGAIN_S = 5.0
"""Seconds after the grace of a cancelled job (TermGrace) before it is cancelled again."""
_CONFIRM_EVERY_S = 1.0
_CONFIRM_LONGEST_S = 15.0
"""Shortest and longest seconds between two looks at a cancelled job."""
_SETTLE_WAIT_S = 20.0
"""Most seconds for a site to forget finished jobs at the end of a run."""


class Canceller(Worker):
    """End attempts at one site."""

    def __init__(self, work: SiteWork, watcher: Watcher) -> None:
        super().__init__(work)
        # A job that runs on after its grace has not received the signal.
        self._again_s = self._settings.term_grace_s + _CANCEL_AGAIN_S
        self._watcher = watcher
        self._stopping: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._lanes = asyncio.Semaphore(ENDED_AT_ONCE)
        self._tidying: set[asyncio.Task[None]] = set()

    async def record_end(
        self,
        record: AttemptRecord,
        end: End,
        why: str,
        *,
        words: str = "",
        ids: Sequence[str] = (),
        times: Times = UNTIMED,
        marker: Marker | None = None,
        log: Path | None = None,
        reason: Reason | None = None,
        failed_node: str = "",
        deadline: float | None = None,
    ) -> None:
        """Record how an attempt has ended, and tell the observer.

        `why` is a line for its outcome, `words` one for the observer if that differs. The site may
        forget its jobs `ids`. Nothing waits for the site after `deadline`, by the loop's clock.
        """
        if end is not End.SUCCEEDED:  # nobody goes on with what a killed run has downloaded in part
            OutputStaging(self._workdir, record.id, record.basis.get("makes", ())).clear()
        then = decide(end, reason)
        if Do.SECRETS in then.todo:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self.remove_secrets(record)
        outcome, used = then.outcome.format(why), used_of(marker, times, failed_node)
        told = JobEnd(
            then.how, words or why, log=log, waited=times.waited, ran=times.ran, reason=reason,
            exit_code=marker.exit_code if marker is not None and not then.successor else None,
            nodes=(marker.nodes or marker.host) if marker is not None else "",
            successor=then.successor,
        )  # fmt: skip
        if then.state is AttemptState.ENDED:
            self._journal.ended(
                record.id, outcome, waited=times.waited, ran=times.ran, log=str(log or ""),
                reason=reason or "", used=used, end=told.facts,
            )  # fmt: skip
        else:
            self._journal.abandoned(record.id, outcome, times=times, end=told.facts)
        self._observer.ended(record, told)
        if Do.CLOSE in then.todo:
            if then.state is AttemptState.ENDED:
                self._journal.done(record.id)
            self._clean(record.id, ids)

    def done(
        self, attempt_id: str, ids: Sequence[str], *, let_end: bool = False, succeeded: bool = False
    ) -> None:
        """Close an attempt whose outcome Snakemake has, and let the site forget its jobs `ids`.

        With `let_end` the site still runs a command after the job's end, which forgetting the job
        would end. `succeeded` says whether the attempt's job succeeded.
        """
        self._journal.done(attempt_id)
        self._clean(attempt_id, ids, let_end=let_end, succeeded=succeeded)

    def _clean(
        self, attempt_id: str, ids: Sequence[str], *, let_end: bool = False, succeeded: bool = False
    ) -> None:
        if ids:
            # Of several jobs only one has run; the others ended without a report.
            alone = succeeded and len(ids) == 1
            task = asyncio.create_task(self._forget(ids, let_end, succeeded=alone))
            self._tidying.add(task)
            task.add_done_callback(self._tidying.discard)
        # Removed at the end of the run, where one request can remove those of all attempts.
        if leftover := self._observer.leftover(attempt_id):
            self._place.leftovers.add(leftover)

    async def remove_secrets(self, record: AttemptRecord) -> None:
        """Remove the secrets of a finished attempt that did not remove them itself.

        If the site does not remove them now, `settle` tries again at the end of a run.
        """
        if self._journal.has_secrets(record.id):
            with suppress(SiteError, JournalError):
                await self._site.remove(record.paths.secrets)
                self._journal.secrets_gone(record.id)

    async def _rescue_log(self, record: AttemptRecord, target: Path) -> None:
        if record.state is AttemptState.PLANNED or self._observer.leftover(record.id) is None:
            return
        with suppress(TimeoutError, SiteError, OSError):
            async with asyncio.timeout(SALVAGE_WAIT_S):
                await self._fetcher.log(record, None, target)

    async def rescue(self, attempt_id: str) -> None:
        """Fetch an observer's files of an attempt that could not return them itself."""
        if leftover := self._observer.leftover(attempt_id):
            await salvage_files(self._site, leftover, self._workdir)

    async def _forget(self, ids: Sequence[str], let_end: bool, *, succeeded: bool) -> None:
        # Records that stay behind do no harm: they expire at the site.
        with suppress(SiteError):
            while let_end:
                states = await self._site.states(ids)
                let_end = any(s.phase in (Phase.WAITING, Phase.RUNNING) for s in states.values())
                await asyncio.sleep(_CONFIRM_EVERY_S if let_end else 0)
            await self._site.forget(ids, succeeded=succeeded)

    async def give_up(self, records: Iterable[AttemptRecord]) -> None:
        """End attempts and discard their results; wait as long as it takes.

        Raises:
            SiteRejected: the site does not allow making certain that an attempt never runs.
        """
        for record in records:
            _, times = await self._stop(record) if record.may_run else (None, record.times)
            outcome = "" if record.left_behind else record.outcome
            await self._stopped(
                record, outcome or "cancelled", times, words=outcome or "given up",
                ids=record.site_jobs,
            )  # fmt: skip

    async def _stopped(
        self,
        record: AttemptRecord,
        why: str,
        times: Times,
        *,
        words: str = "",
        ids: Sequence[str] = (),
        deadline: float | None = None,
    ) -> None:
        """Fetch what a stopped attempt has left for the observer, and close it."""
        log = log_path(self._logs, record)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await asyncio.gather(self.rescue(record.id), self._rescue_log(record, log))
        await self.record_end(
            record, End.STOPPED, why, words=words, ids=ids, times=times, deadline=deadline,
            log=log if log.exists() else None,
        )  # fmt: skip

    async def cancel(
        self, records: Sequence[AttemptRecord], wait_s: float = CANCEL_WAIT_S
    ) -> list[AttemptRecord]:
        """Cancel attempts at the end of a run; return those that did not confirm their end in time.

        The time is `wait_s` seconds, plus the time that the requests take for many attempts.
        Attempts that were never submitted are over at once. The others are cancelled a few at a
        time, so that as many as possible are known to have ended when the time is over. Attempts
        that have succeeded stay as they are: the next run adopts them.
        """

        async def one(record: AttemptRecord) -> AttemptRecord | None:
            code, times = None, UNTIMED
            try:
                async with asyncio.timeout_at(deadline):
                    if record.state is not AttemptState.PLANNED:
                        code, times = await self._stop(record)
            except (TimeoutError, SiteError, JournalError, PlaceTaken):
                return record
            if code != 0:
                try:
                    await self._stopped(record, "cancelled", times, deadline=deadline)
                except JournalError as error:  # the others must be cancelled all the same
                    self._notify(f"{record.name}: it is cancelled. {error}")
            return None

        succeeded = set[str]()
        sent = [record for record in records if record.state is not AttemptState.PLANNED]
        now = asyncio.get_running_loop().time()
        deadline = now + wait_s * (1 + len(sent) / _CANCELLED_IN_WAIT)
        await asyncio.gather(*(one(r) for r in records if r.state is AttemptState.PLANNED))
        with suppress(TimeoutError, SiteError):
            async with asyncio.timeout_at(deadline):
                succeeded = await self._succeeded(sent)
        left = await asyncio.gather(*(one(r) for r in sent if r.id not in succeeded))
        return [record for record in left if record is not None]

    async def _succeeded(self, records: Sequence[AttemptRecord]) -> set[str]:
        """Return the ids of attempts whose markers report success."""
        found = set[str]()
        for directory in {record.paths.attempts for record in records}:
            with suppress(SiteNotFound):
                markers = find_markers(await self._site.list(directory))
                found |= {attempt_id for attempt_id, (code, _) in markers.items() if code == 0}
        return found

    async def _stop(self, record: AttemptRecord) -> tuple[int | None, Times]:
        """Revoke and cancel an attempt; if it has started, wait until it is over.

        Returns the exit code from its marker, None without a marker, and how long it ran.

        Raises:
            SiteRejected: the site does not allow making certain that the attempt never runs.
        """
        async with self._stopping[record.id]:
            runs = self._watcher.forget(record.id)
            async with self._lanes:
                stays = await self._retry.found(lambda: revoke_attempt(self._site, record))
                ids = list(record.site_jobs) or await self._find(record)
                await self._cancel_at_site(ids)
            if stays and not runs:
                return None, UNTIMED
            # A claim that was seen and has disappeared was purged: its job runs on.
            watched = self._watcher.stop(record, ids, revoked=stays)
            try:
                await self._insist(record, watched)
            finally:
                self._watcher.drop(watched)
            return watched.exit_code, await self._times(record, watched)

    async def withdraw(self, record: AttemptRecord) -> bool:
        """Make certain that an attempt never runs; return False, and do nothing, if it has started.

        Raises:
            SiteRejected: neither is certain.
        """
        stays = await self._retry.found(lambda: revoke_attempt(self._site, record))
        if stays:
            await self._cancel_at_site(list(record.site_jobs) or await self._find(record))
        return stays

    async def _insist(self, record: AttemptRecord, watched: Watched) -> None:
        """Wait until an attempt is over that the site was asked to end; ask again if it runs on."""
        clock = asyncio.get_running_loop().time
        begun = reported = cancelled = clock()
        while True:
            pause = min(max(_CONFIRM_EVERY_S, (clock() - begun) / 20), _CONFIRM_LONGEST_S)
            if (await asyncio.wait([watched.future], timeout=pause))[0]:
                break
            ids = ", ".join(watched.ids)
            if clock() - reported > CANCEL_WAIT_S:
                reported = clock()
                self._notify(
                    f"{record.name}: the job {ids or record.id} at {record.site} was"
                    f" cancelled {humanize_duration(reported - begun)} ago, but its end is not"
                    " confirmed yet; waiting for it."
                )
            if watched.revived:
                self._notify(
                    f"{record.name}: {record.site} reports that the job {ids} has ended,"
                    " but it still runs; cancelling it again."
                )
            if watched.revived or clock() - cancelled > self._again_s:
                watched.revived, cancelled = False, clock()
                # The running job may be one whose id is still unknown.
                watched.ids += [i for i in await self._find(record) if i not in watched.ids]
                await self._cancel_at_site(watched.ids)
        await watched.future

    async def _times(self, record: AttemptRecord, end: Evidence) -> Times:
        """Return how long a stopped attempt ran: up to its marker, or to its last heartbeat."""
        with suppress(SiteError):
            end.owner = end.owner or await read_owner(self._site, record)
            attempt, before = Attempt.of(record), self._journal.attempts(record.before)
            attempt.end = end
            attempt.turn = turn_of(before) or time.time() if before else None
            return attempt.times(None)
        return UNTIMED

    async def _find(self, record: AttemptRecord) -> list[str]:
        with suppress(SiteNotFound):
            names = {record.id: record.name}
            found = await self._retry.found(lambda: self._site.find(names), at_once=True)
            return found.get(record.id, [])
        return []

    async def _cancel_at_site(self, ids: Sequence[str]) -> None:
        if ids:
            # Wait all the same for a job that the site refuses to cancel.
            with suppress(SiteRejected, SiteNotFound):
                await self._retry(lambda: self._site.cancel(ids))

    async def settle(self) -> None:
        """Wait until the site has forgotten finished attempts; remove secrets that are left there.

        Called at the end of a run; gives up after `_SETTLE_WAIT_S`, or if the site does not answer.
        """
        with suppress(TimeoutError, SiteError):
            async with asyncio.timeout(_SETTLE_WAIT_S):
                await asyncio.gather(*self._tidying, return_exceptions=True)
                for record in self._journal.forgotten_secrets(self._site.name):
                    await self.remove_secrets(record)

    async def close(self) -> None:
        """Stop watching, and letting the site forget attempts; its own expiry removes the rest."""
        self._watcher.close()
        for task in self._tidying:
            task.cancel()
        await asyncio.gather(*self._tidying, return_exceptions=True)
