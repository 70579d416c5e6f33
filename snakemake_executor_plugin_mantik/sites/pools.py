"""A site whose jobs may also run in allocations of its own: pools.

To the engine a pool is a part of the site's scheduler. All that is known of it lies at the site, in
the names of the files of one directory (`jobs/bash/agent.sh`): nothing is lost with this process.
"""

import asyncio
import itertools
import math
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from ..common.errors import (
    MantikError,
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnreachable,
    UserError,
)
from ..jobs.paths import ATTEMPTS
from ..jobs.pools import (
    MARK_BYTES,
    Allocation,
    Pool,
    PooledJob,
    agent_script,
    allocation_of,
    job_id,
    pack_jobs,
    parse_job_id,
    split_jobs,
    unpack_marks,
)
from ..jobs.reasons import Reason
from .base import MISSING, Entry, JobState, Phase, Site, SiteFacts, Submission, do_nothing

_FULL_FIRST_S: Final = 30.0
_FULL_LONGEST_S: Final = 900.0
"""Least and most seconds between two requests for allocations that a site has no room for."""
_TOGETHER_S: Final = 0.1
"""Jobs that come closer to each other are sent in one file, for five times as long at most."""
_FOUND_S: Final = 120.0
"""Seconds in which the site must deny an allocation until it counts as none."""
_SHOWN_S: Final = 1.1
"""Seconds in which an agent shows the marker of a job that has ended; at once if no other runs."""
_LOOK_S: Final = 20.0
"""Seconds between two looks at allocations of which nothing else asks."""
_LAST_LOOK_S: Final = 3.0
"""Most seconds for a look at the end of a run."""
_HOWS: Final = {
    "time": Reason.TIME_LIMIT,
    "stop": Reason.CANCELLED,
    "pool": Reason.ALLOCATION_ENDED,
    "0": Reason.SUCCESS,
}
_ENDED: Final = JobState(Phase.ENDED)
_GONE: Final = JobState(
    Phase.ENDED, Reason.ALLOCATION_ENDED, "the allocation that had taken it has ended"
)


@dataclass
class _Look:
    """What a pool's directory shows.

    Attributes:
        states: of the jobs, by their tags.
        ready: the names of the files in which single jobs wait, by their tags.
        sent: whether there are jobs that no allocation has unpacked yet; their tags are not shown.
        wanted: how many allocations the jobs would fill; 0 if none waits.
        alive: how many allocations run or are about to.
    """

    states: dict[str, JobState] = field(default_factory=dict)
    ready: dict[str, str] = field(default_factory=dict)
    sent: bool = False
    wanted: int = 0
    alive: int = 0


@dataclass
class _Refusal:
    """That the site has refused an allocation of a pool.

    Attributes:
        why: the site's words.
        until: when to request one again, by the loop's clock.
        pause: seconds from the refusal until then.
    """

    why: str = ""
    until: float = 0.0
    pause: float = 0.0

    @property
    def final(self) -> bool:
        """Whether it ends the jobs that wait."""
        return self.until == math.inf


@dataclass
class _Gathered:
    jobs: list[PooledJob] = field(default_factory=list)
    task: "asyncio.Task[None] | None" = None


class _Pools:
    """A site, and the pools there. Whatever does not concern jobs is the site's own."""

    notify: Callable[[str], None] | None = None
    record: Callable[[Allocation], None] | None = None

    def __init__(self, site: Site, pools: Iterable[Pool]) -> None:
        self._site = site
        self._pools = {pool.name: pool for pool in pools}
        self._open: SiteFacts
        self._gathered: defaultdict[str, _Gathered] = defaultdict(_Gathered)
        self._sending: set[asyncio.Task[None]] = set()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._marks_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._ids: dict[str, str] = {}
        self._ended: set[str] = set()
        self._denied: dict[str, float] = {}
        self._allocations: dict[str, Allocation] = {}
        self._watching: asyncio.Task[None] | None = None
        self._sent: dict[str, Pool] = {}
        self._marks: dict[str, bytes] = {}
        self._read: set[str] = set()
        self._marks_read = 0.0
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._refusals: defaultdict[str, _Refusal] = defaultdict(_Refusal)
        self._requested: set[str] = set()
        self._starting: set[str] = set()
        self._began: set[str] = set()
        self._rejected: dict[str, JobState] = {}
        self._files: dict[str, str] = {}
        self._orders = itertools.count(time.time_ns() // 1_000_000)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site, name)

    async def open(self, *, make: bool = True) -> SiteFacts:
        self._open = await self._site.open(make=make)
        return self._open

    async def close(self) -> None:
        tasks = [*self._sending, *self._requests.values(), *filter(None, [self._watching])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        requested, self.notify = self.notify is not None, None  # nothing is requested any more
        with suppress(SiteError, TimeoutError):
            async with asyncio.timeout(_LAST_LOOK_S):
                if requested:
                    await self._withdraw()
                await self._look_again()
        await self._site.close()

    async def submit(self, submission: Submission, begin: Callable[[], None] = do_nothing) -> str:
        if (name := submission.resources.pool) is None:
            if any(map(parse_job_id, submission.after)):
                raise SiteRejected("a job of the scheduler's cannot wait for one of a pool")
            return await self._site.submit(submission, begin)
        begin()
        self._sent[submission.tag] = self._pools[name]
        gathered = self._gathered[name]
        gathered.jobs.append(
            PooledJob(
                submission.tag, submission.script.encode(), submission.resources,
                submission.login_shell, next(self._orders), submission.bucket, submission.behind,
            )
        )  # fmt: skip
        if gathered.task is None:
            gathered.task = asyncio.create_task(self._send(name))
            self._sending.add(gathered.task)
            gathered.task.add_done_callback(self._was_sent)
        await asyncio.shield(gathered.task)
        return job_id(name, submission.tag)

    def _was_sent(self, task: "asyncio.Task[None]") -> None:
        self._sending.discard(task)
        if not task.cancelled():
            task.exception()  # those who wait for it have it, unless they were cancelled

    async def _send(self, name: str) -> None:
        """Send the jobs that gather for a pool, and see to it that it has allocations."""
        pool, jobs, number = self._pools[name], self._gathered[name].jobs, 0
        for _ in range(5):
            if number == len(jobs):
                break
            number = len(jobs)
            await asyncio.sleep(_TOGETHER_S)
        for part in split_jobs(self._gathered.pop(name).jobs, self._open.upload_bytes):
            file, content = pack_jobs(part)
            path = f"{pool.directory}/{file}"
            self._files |= dict.fromkeys((job.tag for job in part), path)
            await self._site.put(path, content)
        if self._refusals[name].final:  # the site is asked again for these
            del self._refusals[name]
        with suppress(SiteBusy, SiteUnreachable):  # the next look at the jobs tries again
            await self._look(pool)

    async def find(self, names: Mapping[str, str]) -> dict[str, list[str]]:
        found = await self._site.find(names)
        for pool in self._pools.values():
            states = (await self._look(pool)).states
            for tag in names.keys() & states.keys():
                found[tag] = [*found.get(tag, []), job_id(pool.name, tag)]
        return found

    async def states(self, ids: Sequence[str]) -> dict[str, JobState]:
        own, found, failed = self._own(ids), dict[str, JobState](), list[SiteError]()
        if others := [job for job in ids if parse_job_id(job) is None]:
            try:
                found |= await self._site.states(others)
            except SiteError as error:
                failed.append(error)
        for pool, tags in own.items():
            try:
                look = await self._look(pool)
            except SiteError as error:
                failed.append(error)
                continue
            for tag in tags:
                found[job_id(pool.name, tag)] = self._state(pool, look, tag)
        if failed and not found:
            raise failed[0]
        lost = JobState(Phase.UNKNOWN, detail=failed[0].what) if failed else MISSING
        return {job: found.get(job, lost) for job in ids}

    async def glance(self, ids: Sequence[str]) -> dict[str, JobState] | None:
        others = [job for job in ids if parse_job_id(job) is None]
        found = await self._site.glance(others) if others or not ids else {}
        if found is not None and len(others) < len(ids):
            own = await self.states([job for job in ids if parse_job_id(job) is not None])
            found |= {job: state for job, state in own.items() if state.phase is not Phase.UNKNOWN}
        return found

    async def scheduler_ids(self, ids: Sequence[str]) -> dict[str, str]:
        own = {job: job for job in ids if parse_job_id(job)}
        others = [job for job in ids if job not in own]
        return own | (await self._site.scheduler_ids(others) if others else {})

    async def explain(self, job_id: str) -> JobState:
        if parse_job_id(job_id) is None:
            return await self._site.explain(job_id)
        return (await self.states([job_id]))[job_id]

    async def cancel(self, ids: Sequence[str]) -> None:
        if others := [job for job in ids if parse_job_id(job) is None]:
            await self._site.cancel(others)
        for pool, tags in self._own(ids).items():
            for tag in tags:
                await self._site.put(f"{pool.directory}/stop.{tag}", b"stop\n")
            await self._drop(tag for tag in tags if "/in." in self._files.get(tag, ""))

    async def _drop(self, tags: Iterable[str]) -> None:
        """Remove the files in which jobs wait that are over; one with others stays for these."""
        files = dict.fromkeys(self._files.pop(tag) for tag in list(tags) if tag in self._files)
        kept = set(self._files.values())
        for file in [file for file in files if file not in kept]:
            await self._site.remove(file)

    async def forget(self, ids: Sequence[str], *, succeeded: bool = False) -> None:
        if others := [job for job in ids if parse_job_id(job) is None]:
            await self._site.forget(others, succeeded=succeeded)
        if not succeeded:
            await self._drop(tag for tags in self._own(ids).values() for tag in tags)

    async def extend(self, ids: Sequence[str], seconds: float) -> None:
        others = [job for job in ids if parse_job_id(job) is None]
        if self._own(ids):
            others += [job for tag, job in self._ids.items() if tag not in self._ended]
        if others:
            await self._site.extend(others, seconds)

    async def get(
        self, path: str, *, offset: int = 0, size: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """See `Site.get`; markers of a pool's jobs come together."""
        folder, _, name = path.partition(f"{ATTEMPTS}/")
        if name and not folder and not offset and size is not None and size <= MARK_BYTES:
            content = await self._mark(name)
            if content is not None and len(content) == size:
                yield content
                return
        chunks = cast("AsyncGenerator[bytes, None]", self._site.get(path, offset=offset, size=size))
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def _mark(self, name: str) -> bytes | None:
        """Return a marker if it is among those that a pool shows together by now."""
        pool = self._sent.get(name.rpartition("/")[2].partition(".")[0])
        if pool is None:
            return None
        clock = asyncio.get_running_loop().time
        now = clock()
        async with self._marks_locks[pool.name]:
            for due in (now + _SHOWN_S / 2, now + _SHOWN_S):
                if name not in self._marks and self._marks_read < due:
                    await asyncio.sleep(max(0.0, due - clock()))
                    self._marks_read = clock()
                    await self._read_marks(pool)
            return self._marks.pop(name, None)

    async def _read_marks(self, pool: Pool) -> None:
        with suppress(SiteNotFound):
            entries = await self._site.list(pool.directory)
            for name in sorted(entries):
                if name.startswith("marks.") and name not in self._read:
                    size = entries[name].size
                    chunks = self._site.get(f"{pool.directory}/{name}", size=size)
                    content = b"".join([chunk async for chunk in chunks])
                    self._read.add(name)
                    self._marks |= unpack_marks(content)

    def _own(self, ids: Iterable[str]) -> dict[Pool, list[str]]:
        """Return the tags of the jobs among `ids` that are in pools; other pools are not known."""
        found: dict[Pool, list[str]] = {}
        for parsed in filter(None, map(parse_job_id, ids)):
            if pool := self._pools.get(parsed[0]):
                found.setdefault(pool, []).append(parsed[1])
        return found

    def _state(self, pool: Pool, look: _Look, tag: str) -> JobState:
        state = look.states.get(tag, JobState(Phase.WAITING) if look.sent else MISSING)
        if state.phase is not Phase.WAITING:
            return state
        refusal = self._refusals[pool.name]
        if refusal.final:
            return JobState(Phase.ENDED, Reason.REJECTED, refusal.why)
        refused = refusal.why if asyncio.get_running_loop().time() < refusal.until else ""
        return replace(
            state, scheduler_id="", never=False, waits=refused or state.waits or "",
            pending=refused or state.pending,
        )  # fmt: skip

    async def _look(self, pool: Pool) -> _Look:
        """List a pool's directory, and request allocations if it has too few for what waits."""
        begun = self._requests.get(pool.name)
        async with self._locks[pool.name]:
            try:
                entries = await self._site.list(pool.directory)
            except SiteNotFound:
                entries = {}
            look = _read(pool, entries, await self._follow(pool, entries))
            self._sent.update(dict.fromkeys(look.states, pool))  # an earlier run's, too
            for tag in look.states.keys() & self._files.keys():
                del self._files[tag]
            self._files |= {tag: f"{pool.directory}/{name}" for tag, name in look.ready.items()}
            if state := self._rejected.pop(pool.name, None):
                self._refuse(pool, state.detail, final=not (state.later or look.alive))
            lacking = min(pool.count, look.wanted) - look.alive
            # The list has to show what the last requests have made.
            listed = begun is self._requests.get(pool.name) and (begun is None or begun.done())
            now = asyncio.get_running_loop().time()
            if self.notify and listed and lacking > 0 and now >= self._refusals[pool.name].until:
                requests = self._request(pool, lacking, alone=not look.alive)
                self._requests[pool.name] = asyncio.create_task(requests)
            return look

    async def _request(self, pool: Pool, number: int, *, alone: bool) -> None:
        """Request allocations, while others look at the jobs."""
        try:
            for _ in range(number):
                await self._start(pool)
                alone = False
        except (SiteRejected, UserError) as error:
            self._refuse(pool, error.what, final=alone)
        except SiteError as error:
            self._refuse(pool, error.what, seconds=error.retry_after)

    def _refuse(
        self, pool: Pool, why: str, *, final: bool = False, seconds: float | None = None
    ) -> None:
        """Request no allocation for a while, each time for longer; or until more jobs are sent.

        A refusal is not final if the pool has another allocation: it may be for the number of them.
        """
        now, before = asyncio.get_running_loop().time(), self._refusals[pool.name]
        again = 2 * before.pause if now < before.until + _FULL_LONGEST_S else 0.0
        pause = min(max(again, seconds or 0.0, _FULL_FIRST_S), _FULL_LONGEST_S)
        until = math.inf if final else now + pause
        why = f"the site refuses the pool's allocation: {why}"
        self._refusals[pool.name] = _Refusal(why, until, pause)

    async def _withdraw(self) -> None:
        """Cancel the allocations that have not started yet and for which no jobs wait any more."""
        for pool in dict.fromkeys(self._sent.values()):
            entries = await self._site.list(pool.directory)
            states = await self._follow(pool, entries)
            # Some sites say long after its start that one waits.
            began = {allocation_of(name) for name in entries if name.startswith(("run.", "used."))}
            waiting = [t for t, s in states.items() if s.phase is Phase.WAITING and t not in began]
            if not _read(pool, entries, states).wanted:
                await self._site.cancel([self._ids[tag] for tag in waiting])

    async def _start(self, pool: Pool) -> None:
        """Request an allocation. The file that names it is there before it is submitted."""
        tag = f"{time.time_ns():x}-{uuid.uuid4().hex[:16]}"  # the first of two in a second is first
        self._requested.add(tag)
        self._starting.add(tag)
        try:
            await self._submit(pool, tag)
        finally:
            self._starting.discard(tag)

    async def _submit(self, pool: Pool, tag: str) -> None:
        try:
            await self._site.put(f"{pool.directory}/pool.{tag}", b"requested\n")
        except SiteRejected as error:  # a full disk refuses no allocation
            raise SiteBusy(error.what, where=error.where) from error
        # Another controller may have requested one at the same time.
        entries = (await self._site.list(pool.directory)).values()
        alive = sorted(
            (entry.modified, entry.name) for entry in entries
            if entry.name.startswith("pool.") and entry.name[5:] not in self._ended
        )  # fmt: skip
        if f"pool.{tag}" in [name for _, name in alive[pool.count :]]:
            await self._site.remove(f"{pool.directory}/pool.{tag}")
            return
        script = agent_script(pool, self._open.workspace, tag)
        submission = Submission(tag, f"pool {pool.name}", script, pool.resources)
        try:
            self._ids[tag] = await self._site.submit(submission)
        except SiteUnreachable:
            raise
        except MantikError:
            with suppress(SiteError):
                await self._site.remove(f"{pool.directory}/pool.{tag}")
            raise
        self._record(pool, tag, Phase.WAITING)
        if self.notify is not None:
            queue = pool.resources.queue or "default"
            self.notify(
                f"Pool {pool.name} at {self._site.name}: an allocation was submitted, queue"
                f" {queue}, as {self._ids[tag]}."
            )

    async def _follow(self, pool: Pool, entries: Mapping[str, Entry]) -> dict[str, JobState]:
        """Return the states of a pool's allocations; remove the files of those that have ended.

        That one has ended counts only if the scheduler says so: its jobs run again then.
        """
        files = defaultdict[str, dict[str, Entry]](dict)
        for name, entry in entries.items():
            if name.startswith(("pool.", "used.")):
                files[allocation_of(name)][name] = entry
        here = {allocation_of(name) for name in entries if name.startswith(("pool.", "run."))}
        tags = sorted(here | files.keys())
        if unknown := {t: f"pool {pool.name}" for t in tags if t not in self._ids}:
            found = await self._site.find(unknown)
            self._ids |= {tag: ids[-1] for tag, ids in found.items() if ids}
        states = await self._ask(pool, tags)
        now = self._site.clock
        for tag, own in files.items():
            phase = states[tag].phase
            if phase is not Phase.UNKNOWN or now is None:
                self._denied.pop(tag, None)
                lost = False
            else:  # never submitted, or forgotten: it ended while nobody looked
                since = max(self._denied.setdefault(tag, now), *(e.modified for e in own.values()))
                lost = now - since > _FOUND_S and tag not in self._starting
            over = lost or tag in self._ended
            self._record(pool, tag, Phase.ENDED if over else phase, own)
            if self.notify is not None and over:
                for name in own:
                    await self._site.remove(f"{pool.directory}/{name}")
                with suppress(SiteError):
                    await self._site.forget([self._ids[tag]] if tag in self._ids else [])
                if lost and tag not in self._ended:
                    self._ids.pop(tag, None)
        # Of one that nobody knows any more only jobs are left.
        known = [t for t in tags if t in here]
        return {t: states[t] for t in known if t in files or states[t].phase is not Phase.UNKNOWN}

    async def _ask(self, pool: Pool, tags: Iterable[str]) -> dict[str, JobState]:
        """Return the scheduler's states of allocations; note those that have begun or ended."""
        open_ = [self._ids[tag] for tag in tags if tag in self._ids and tag not in self._ended]
        states, found = await self._site.states(open_) if open_ else {}, dict[str, JobState]()
        for tag in tags:
            state = states.get(self._ids.get(tag, ""), MISSING)
            if state.phase is Phase.ENDED:
                self._ended.add(tag)
            if state.reason is Reason.REJECTED and tag in self._requested:
                self._rejected[pool.name] = state
            if state.phase is Phase.RUNNING:
                self._began.add(tag)
            elif state.phase is Phase.WAITING and tag in self._began:
                state = replace(state, reason=Reason.PREEMPTED)  # it was put back
            found[tag] = _ENDED if tag in self._ended else state
        return found

    def _record(self, pool: Pool, tag: str, phase: Phase, files: Iterable[str] = ()) -> None:
        """Record what is known of an allocation, from the names of its own files, if it is new."""
        if self.record is None:
            return
        seconds = used = 0
        for name in files:
            match name.split("."):
                case ["used", _, _, there, of_jobs] if (there + of_jobs).isdecimal():
                    seconds, used = seconds + int(there), used + int(of_jobs)
        now, cores = time.time(), pool.node_cores or pool.resources.cpus_per_task or 1
        before = self._allocations.get(tag)
        known = before or Allocation(tag, self._site.name, pool.name, "", cores, now)
        started, over = phase is Phase.RUNNING or seconds > 0, phase is Phase.ENDED
        known = self._allocations[tag] = replace(
            known, site_job=self._ids.get(tag, known.site_job), seconds=seconds, used=used,
            started=known.started or (now if started else None),
            ended=known.ended or (now if over else None),
        )  # fmt: skip
        if known != before:
            self.record(known)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Look at the allocations while all jobs run, too."""
        while True:
            await asyncio.sleep(_LOOK_S)
            with suppress(SiteError):
                await self._look_again()

    async def _look_again(self) -> None:
        for name in {known.pool for known in self._allocations.values() if known.ended is None}:
            await self._look(self._pools[name])


def _read(pool: Pool, entries: Mapping[str, Entry], allocations: Mapping[str, JobState]) -> _Look:
    look, cpus, gpus, waiting = _Look(), 0, 0, False
    alive = [state for state in allocations.values() if state.phase is not Phase.ENDED]
    look.alive = len(alive)
    started = any(state.phase is Phase.RUNNING for state in alive)
    queued = next((state for state in alive if state.phase is Phase.WAITING), None)
    # A running allocation has no room for what waits, so it waits its turn.
    waits = JobState(Phase.WAITING) if started or queued is None else queued
    second, gone, done, ready, run = (dict[str, JobState]() for _ in range(5))
    stopped = {name.removeprefix("stop.") for name in entries}
    for name in entries:
        match name.split("."):
            case ["in", number, _, _]:
                look.sent = waiting = True
                cpus += int(number)
            case ["ready" | "behind" as how, _, number, _, more, seconds, _, _, tag]:
                look.ready[tag] = name
                # What was sent when allocations were larger is never taken: it is sent again.
                if tag not in stopped and pool.takes(int(number), int(more), int(seconds)):
                    ready[tag], waiting = waits, True
                    if how == "ready":
                        cpus, gpus = cpus + int(number), gpus + int(more)
            case ["run", _, tag]:
                allocation = allocation_of(name)
                holder = allocations.get(allocation, MISSING)
                if allocation in allocations and holder is not _ENDED:  # files of ended ones stay
                    cpus += 1
                if holder is _ENDED or holder.reason is Reason.PREEMPTED:
                    gone[tag] = _GONE
                else:  # some sites say long after its start that an allocation waits
                    phase = Phase.RUNNING if holder.phase is Phase.WAITING else holder.phase
                    run[tag] = JobState(phase)
            case ["done", how, tag]:
                code = int(how) if how.isdecimal() else None
                reason = _HOWS.get(how, Reason.EXIT_CODE)
                ended = JobState(Phase.ENDED, reason, f"in the pool {pool.name}")
                (second if code == 0 else done)[tag] = ended
    # A job may have been sent again: what is alive of it counts first, but a marker may be there of
    # the one that has ended. One that returned 0 and left no marker is a second start of it.
    ready |= {tag: replace(ready[tag], reason=done[tag].reason) for tag in ready.keys() & done}
    look.states = {**second, **gone, **done, **ready, **run}
    # Of jobs that wait for others, what they wait for is here; or it has ended, and they can start.
    look.wanted = math.ceil(pool.share(max(cpus, 1), gpus)) if waiting else 0
    return look


def with_pools(site: Site, pools: Iterable[Pool]) -> Site:
    """Return the site with its pools."""
    return cast("Site", _Pools(site, pools))
