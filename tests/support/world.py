"""What is there when a controller dies: a simulated site's files, its jobs, and what they ran.

Time is virtual; a world goes on by itself. A job does what `jobs/bash/main.sh` does: claim,
bundles, inputs, payload with heartbeats, marker.
"""

import gzip
import hashlib
import heapq
import io
import itertools
import math
import random
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from snakemake_executor_plugin_mantik.common.errors import (
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
)
from snakemake_executor_plugin_mantik.engine.leases import Lease
from snakemake_executor_plugin_mantik.jobs.markers import MarkerInvalid, read_marker
from snakemake_executor_plugin_mantik.jobs.paths import (
    ATTEMPTS,
    OURS,
    PLACE,
    AttemptPaths,
    bundle_done_path,
    bundle_path,
)
from snakemake_executor_plugin_mantik.jobs.pools import POOLS
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.script import CHECKPOINT, PREDECESSORS
from snakemake_executor_plugin_mantik.jobs.segments import GO_ON_CODE
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec, ScriptLimits
from snakemake_executor_plugin_mantik.sites.base import Entry, JobState, Phase, Submission
from tests.support.agents import Agent

DEPENDENCY_S = 10.0
"""Seconds between two looks of the scheduler at what a job waits for."""
EPOCH_S = 1e9
"""When outputs were made that a world at its beginning has: no file is older than 1970."""
MANY_LINES = 60
"""Lines of every other output, of 65 bytes each."""
LIFETIME_S = 86400.0
"""Seconds that the site keeps a job unless it is extended; then it ends it."""

KILL_WAIT_S = 30.0
"""Seconds between TERM and KILL of what a scheduler ends."""

_WITHOUT_FILES = (Reason.OUTPUTS, Reason.SET_UP, Reason.EXIT_CODE, Reason.UNKNOWN)
"""Why a job may truly fail whose files somebody removes or changes."""


STEPS = 3
"""How many segments a job needs that may go on, if nothing happens to them."""


@dataclass
class Fate:
    """What becomes of one submission.

    Attributes:
        starts: seconds after which the scheduler starts it, once for each.
        denied: whether the site says that it knows no such job.
        killed_after: seconds of running after which it is killed.
        reason: what the scheduler then says.
        warned: whether it is asked to end before it is killed, and so can write its marker.
        requeued: whether the scheduler starts it again under the same id after it was killed.
        refused: whether the scheduler refuses it, so that it ends without a start.
        full: whether it does so because there are too many jobs.
        at_once: whether the site says so when the job is submitted.
        stalled: after how many seconds of running its node hangs, and for how long.
        waits: the scheduler's word for why it does not start yet, and whether it never will.
        forgotten: whether the scheduler has forgotten the jobs that it is to start after.
        deaf: whether the site says that it is cancelled, when asked to, and lets it run on.
        saves: whether a segment writes another checkpoint before it is killed.
        step: at which of its steps the agent of a pool is killed that it is the allocation of.
        survives: for how many seconds the jobs of an allocation survive that was killed.
        unknown: from when to when the site denies it, after its start.
    """

    starts: tuple[float, ...] = (3.0,)
    denied: bool = False
    killed_after: float | None = None
    reason: Reason = Reason.OUT_OF_MEMORY
    warned: bool = False
    requeued: bool = False
    refused: bool = False
    full: bool = False
    at_once: bool = False
    stalled: tuple[float, float] = (0.0, 0.0)
    deaf: bool = False
    saves: bool = False
    forgotten: bool = False
    waits: tuple[str, bool] = ("", False)
    step: int | None = None
    survives: float = 0.0
    unknown: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Habits:
    """What a site is like all the time. Seconds.

    Attributes:
        late: after how long a file that a job wrote is seen through the API.
        half: whether it is seen half first.
        lag: how much later than it happens the scheduler tells that a job was killed.
        gap: how long a job that ended is missing from what the scheduler tells.
        remembers: how long the scheduler tells of a job that ended.
        clock: how far its clock is off.
        stale: at what intervals it looks again how large a file is: heartbeats are seen together.
    """

    late: float = 0.0
    half: bool = False
    lag: float = 0.0
    gap: float = 0.0
    remembers: float = math.inf
    clock: float = 0.0
    stale: float = 0.0


@dataclass
class PayloadRun:
    """One run of a job's command, of what it `found` when it began, and what it `made`.

    `steps` is the checkpoint that it left, if it is a segment.
    """

    job: str
    attempt_id: str
    begun: float
    site: str = ""
    found: bytes = b""
    ended: float | None = None
    how: str = ""
    made: Mapping[str, bytes] = field(default_factory=dict)
    steps: Mapping[str, bytes] = field(default_factory=dict)


@dataclass
class _Start:
    number: int
    phase: Phase = Phase.WAITING
    reason: Reason | None = None
    run: PayloadRun | None = None
    ended: float = 0.0
    told_after: float = 0.0
    hangs: tuple[float, float] = (0.0, 0.0)
    agent: Agent | None = None

    @property
    def code(self) -> int:
        if self.run is not None:
            return 137 if self.run.how == "killed" else int(self.run.how.split()[1])
        return int(self.reason is not Reason.SUCCESS)


@dataclass
class _Job:
    id: str
    tag: str
    spec: JobSpec
    fate: Fate
    expires: float
    after: tuple[str, ...] = ()
    starts: list[_Start] = field(default_factory=list)
    promised: bool = False
    log: bytes = b""


class World:
    """A site and its jobs, whoever looks at it.

    Attributes:
        files: what lies there, by path; None for a directory.
        runs: what ran.
        excuses: by attempt, why it may truly be said to have failed.
        taken: what was removed by the executor, or by a job, while a job that reads it ran.
        full: whether there is no room for more files.
    """

    def __init__(
        self,
        fate: Callable[[JobSpec], Fate] = lambda spec: Fate(),
        duration: Callable[[JobSpec], float] = lambda spec: 100.0,
        code: Callable[[JobSpec], int] = lambda spec: 0,
        *,
        place: Callable[[str], str] = lambda path: "marker",
        habits: Habits = Habits(),
        name: str = "sim",
    ) -> None:
        """Make a world.

        Args:
            fate: what becomes of each submission.
            duration: how long a command takes, in seconds.
            code: a command's exit code.
            place: how an output travels: `marker`, `archive` or `alone`.
            habits: what it is like all the time.
            name: to tell it from another one.
        """
        self.fate, self.duration, self.code, self.place = fate, duration, code, place
        self.habits, self.name = habits, name
        self.full = False
        self.excuses: dict[str, set[Reason]] = defaultdict(set)
        self.taken: list[str] = []
        self._fresh: dict[str, float] = {}
        self._changed: dict[str, float] = {}
        self._beats: dict[str, float] = {}
        self._makers: dict[str, str] = {}
        self.files: dict[str, bytes | None] = {}
        self.closed: set[str] = set()
        """Directories of mode 0700."""
        self.exposed: list[str] = []
        """Private files that others could read while they were being written."""
        self.jobs: dict[str, _Job] = {}
        self.pooled: list[_Job] = []
        """What agents of pools have started, of which the scheduler knows nothing."""
        self.agents: list[Agent] = []
        self.sweeps = 0
        self.runs: list[PayloadRun] = []
        self.specs: dict[str, JobSpec] = {}
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count(1000)

    def advance(self, now: float) -> None:
        """Let everything happen that happens until `now`."""
        while self._events and self._events[0][0] <= now:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = max(self.now, now)

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def purge(self, *, claims: bool = True) -> None:
        """The centre's broom: all files go, those of running jobs too; or all but the `claims`."""
        kept = {} if claims else {p: c for p, c in self.files.items() if _is_of_attempts(p)}
        self.files = kept
        self.closed &= kept.keys()
        self.sweeps += 1
        for job in self._all_jobs:
            self.excuse(job, *_WITHOUT_FILES)
        for path in self._makers.keys() - kept.keys():  # a job must make it again
            self.excuses[self._makers.pop(path)].add(Reason.OUTPUTS)

    def tamper(self, chance: random.Random) -> bool:
        """Somebody removes or changes a file that is not of the executor's own; False if none is.

        The job that reads or makes it then may truly fail, and what was stored is made again.
        """
        files = [p for p, c in self.files.items() if c and not p.startswith(f"{OURS}/")]
        if not files:
            return False
        path = chance.choice(sorted(files))
        if chance.random() < 0.5:
            self.remove(path)
        else:
            self.write(path, chance.randbytes(chance.choice((7, len(self.files[path] or b"")))))
        for job in self._all_jobs:
            named = {i.path for i in job.spec.inputs} | {o.path for o in job.spec.outputs}
            named.update(*(one.makes for one in job.spec.after))
            if path in named:
                self.excuse(job, *_WITHOUT_FILES)
        if path in self._makers:
            self.excuses[self._makers.pop(path)].add(Reason.OUTPUTS)
        return True

    def excuse(self, job: "_Job", *reasons: Reason) -> None:
        """Something happens to a job that may truly make it fail for one of these reasons."""
        self.excuses[job.spec.paths.attempt_id].update(reasons)

    # Files

    def make_directory(self, path: str) -> None:
        parts = path.split("/")
        for i in range(len(parts)):
            at = "/".join(parts[: i + 1])
            if isinstance(self.files.setdefault(at, None), bytes):
                self._fresh.pop(at, None)  # who is told that a name exists has thereby seen it
                raise SiteRejected(f"{path}: file exists!", where="site sim")

    def write(self, path: str, content: bytes) -> None:
        if "/" in path:
            self.make_directory(path.rpartition("/")[0])
        self.files[path] = content
        self._changed.pop(path, None)
        if path.startswith(f"{POOLS}/"):
            self._beats[path] = self.now
            for agent in self.agents:
                agent.stir()

    def written(self, path: str, content: bytes) -> None:
        """A job writes a file: whoever is not on its node may see that later."""
        self.write(path, content)
        if self.habits.late:
            self._fresh[path] = self.now + self.habits.late

    def seen(self, path: str) -> bytes | None:
        """What the API sees at a path: a file's content, None for a directory.

        Raises:
            SiteNotFound: nothing is there, or nothing yet.
        """
        if path not in self.files:
            raise SiteNotFound(f"there is no file {path}", where="site sim")
        content = self.files[path]
        if content is None or self._fresh.get(path, 0.0) <= self.now:
            return content
        if self.habits.half and self._fresh[path] - self.now < self.habits.late / 2:
            return content[: len(content) // 2]
        raise SiteNotFound(f"there is no file {path} yet", where="site sim")

    def put(self, path: str, content: bytes) -> None:
        """A file comes through the API; where there is no room, its name alone does.

        Raises:
            SiteRejected: there is no room.
        """
        self.write(path, b"" if self.full else content)
        if self.full:
            raise SiteRejected(f"{path}: no space left on device", where="site sim")

    def move(self, path: str, to: str) -> None:
        content = self.files.pop(path)
        self.written(to, content or b"")

    def remove(self, path: str) -> None:
        for at in [p for p in self.files if p == path or p.startswith(f"{path}/")]:
            del self.files[at]

    def take(self, path: str, by: str) -> None:
        """The executor or a job removes something."""
        gone = {p for p in self.files if p == path or p.startswith(f"{path}/")}
        for job in self._all_jobs:
            if any(s.phase is Phase.RUNNING and s.run is not None for s in job.starts):
                read = {i.path for i in job.spec.inputs if not i.changed}
                read.update(p for one in job.spec.after if not one.code for p in one.makes)
                if found := sorted(gone & read):
                    self.taken.append(f"{found} of {job.spec.name} by {by} at {self.now:.0f}")
        self.remove(path)

    def below(self, path: str) -> dict[str, Entry]:
        if path and self.files.get(path, b"") is not None:
            raise SiteNotFound(f"there is no directory {path}", where="site sim")
        found = {}
        prefix = f"{path}/" if path else ""
        for at, content in self.files.items():
            if not at.startswith(prefix):
                continue
            name = at[len(prefix) :]
            if not name or "/" in name:
                continue
            if at in self._fresh:
                try:
                    content = self.seen(at)  # noqa: PLW2901
                except SiteNotFound:
                    continue
            size = len(content or b"") - self._unseen(at, content or b"")
            found[name] = Entry(name, size, content is None, self.modified(at))
        return found

    def _unseen(self, path: str, content: bytes) -> int:
        """How many heartbeats of a claim are not seen yet."""
        if not (self.habits.stale and path in self._beats and path.startswith(f"{ATTEMPTS}/")):
            return 0
        new = self._beats[path] - self.now + self.now % self.habits.stale
        beats = len(content) - len(content.rstrip(b"."))
        return min(beats, max(0, math.ceil(new / ScriptLimits.heartbeat_s)))

    def modified(self, path: str) -> float:
        """When an output was made, or a heartbeat; of everything else that it is new."""
        if path in self._beats:
            return self._clock(self._beats[path])
        made = self._changed.get(path)
        return self._clock(self.now) if made is None else EPOCH_S + self._clock(made)

    @property
    def clock(self) -> float:
        return self._clock(self.now)

    def _clock(self, now: float) -> float:
        return now + self.habits.clock

    # Jobs

    def submit(self, submission: Submission) -> str:
        """Take over a job; its fate is decided now."""
        spec = self.specs.get(submission.tag) or JobSpec(  # or else it is an allocation of a pool
            paths=AttemptPaths(0, submission.tag), workspace="", name=submission.name,
            command=submission.script,
        )  # fmt: skip
        job_id = f"id-{next(self._numbers)}"
        fate = self.fate(spec)
        if fate.at_once:
            error: type[SiteError] = SiteBusy if fate.full else SiteRejected
            raise error("AssocMaxSubmitJobLimit" if fate.full else "Invalid account")
        after = () if fate.forgotten else submission.after
        job = _Job(job_id, submission.tag, spec, fate, self.now + LIFETIME_S, after)
        self.jobs[job_id] = job
        if fate.refused:
            self.excuse(job, Reason.REJECTED)
        for delay in () if fate.refused else fate.starts:
            start = _Start(next(self._numbers))
            job.starts.append(start)
            self.after(delay, partial(self._start, job, start))
        self.after(LIFETIME_S, partial(self._expire, job))
        return job_id

    @property
    def _all_jobs(self) -> list[_Job]:
        return [*self.jobs.values(), *self.pooled]

    def start_in(self, allocation: _Start, job_id: str, tag: str) -> tuple[_Job, _Start]:
        """The agent in an allocation starts a job."""
        spec = self.specs[tag]
        fate = replace(self.fate(spec), denied=False, requeued=False, deaf=False)
        job, start = _Job(job_id, tag, spec, fate, math.inf), _Start(allocation.number)
        job.starts.append(start)
        self.pooled.append(job)
        if fate.killed_after is not None:  # nobody says who did it
            self.excuse(job, Reason.CANCELLED if fate.warned else Reason.EXIT_CODE)
        self._start(job, start)
        return job, start

    def ask_to_end(self, job: _Job, start: _Start) -> None:
        """A job gets the signal to end, which is no failure of its own."""
        self.after(1.0, partial(self._finish, job, start, Reason.CANCELLED))

    def since(self, path: str) -> float:
        """Seconds since a file in a pool's directory was written."""
        return self.now - self._beats.get(path, self.now)

    def lose(self, start: _Start) -> None:
        """A job is killed, which is no failure of its own."""
        if start.phase is not Phase.ENDED:
            self._end(start, Reason.NODE_FAILURE)
            if start.run is not None:
                start.run.ended, start.run.how = self.now, "killed"

    def _expire(self, job: _Job) -> None:
        if job.id in self.jobs and self.now < job.expires:
            self.after(job.expires - self.now, partial(self._expire, job))
        else:
            self.forget(job.id)

    def forget(self, job_id: str) -> None:
        """End a job and lose all record of it."""
        job = self.jobs.get(job_id)
        if job is None or job.fate.denied:
            return
        del self.jobs[job_id]
        for start in job.starts:
            if not (job.fate.deaf and start.phase is Phase.RUNNING):
                self._kill(job, start, Reason.CANCELLED)

    def cancel(self, job_id: str) -> None:
        """Ask a job to end: one that runs says so with its last breath."""
        job = self.jobs.get(job_id)
        if job is None or job.fate.denied:
            return
        for start in job.starts:
            if start.phase is Phase.WAITING:
                self._kill(job, start, Reason.CANCELLED)
            elif job.fate.deaf:
                self.excuse(job, Reason.CANCELLED)
                job.promised = True
            else:
                self._warn(job, start, Reason.CANCELLED)

    def _warn(self, job: _Job, start: _Start, reason: Reason) -> None:
        if start.agent is not None:
            start.agent.signalled()
            self.after(KILL_WAIT_S, partial(self._kill, job, start, reason))
        if start.run is not None and start.phase is Phase.RUNNING:
            self.excuse(job, reason)
            self.after(1.0, partial(self._finish, job, start, reason))

    def _kill(self, job: _Job, start: _Start, reason: Reason) -> None:
        if start.phase is Phase.ENDED:
            return
        # What somebody cancels, or what has not started, is not started again.
        again = (
            job.fate.requeued and start.phase is Phase.RUNNING and reason is not Reason.CANCELLED
        )
        self.excuse(job, reason, Reason.UNKNOWN)
        self._end(start, reason, told_after=self.habits.lag)
        if start.agent is not None:
            start.agent.die(job.fate.survives)
            start.agent = None
            job.fate = replace(job.fate, requeued=False, step=None, killed_after=None)
            if again:
                start.phase = Phase.WAITING
                self.after(120.0, partial(self._start, job, start))
            return
        if start.run is not None and start.run.ended is None:
            start.run.ended, start.run.how = self.now, "killed"
            if job.fate.saves and not self._hangs(start):
                start.run.steps = self._step(job)
        if again:
            start.phase = Phase.WAITING
            self.after(120.0, partial(self._start, job, start))

    def _end(self, start: _Start, reason: Reason, told_after: float = 0.0) -> None:
        self.agents = [agent for agent in self.agents if agent.alive]
        for agent in self.agents:
            agent.stir()
        start.phase, start.reason = Phase.ENDED, reason
        start.ended, start.told_after = self.now, told_after

    def restart(self, kept: Callable[[], bool]) -> None:
        """The server is started again and has forgotten the jobs that are not `kept`.

        The scheduler goes on with them; what it had not been given yet never starts.
        """
        for job in self.jobs.values():
            if not kept():
                job.fate = replace(job.fate, denied=True)
                for start in job.starts:
                    if start.phase is Phase.WAITING and not kept():
                        self._end(start, Reason.CANCELLED)

    def state(self, job_id: str, lag_s: float = 0.0) -> JobState:
        """What the site says: of several starts it knows the last one only.

        `lag_s` is how long after its scheduler it knows that a job has ended.
        """
        job = self.jobs.get(job_id)
        if job is None or job.fate.denied:
            return JobState(Phase.UNKNOWN)
        if job.fate.refused:
            full = job.fate.full
            said = "AssocMaxSubmitJobLimit" if full else "Invalid account"
            return JobState(Phase.ENDED, Reason.REJECTED, said, later=full)
        if job.promised:
            return JobState(Phase.ENDED, Reason.CANCELLED)
        state = self._last_state(job.starts[-1], lag_s) if job.starts else JobState(Phase.UNKNOWN)
        if state.phase is Phase.WAITING:
            why, never = job.fate.waits
            return replace(state, waits=why, never=never, pending=why or "Priority")
        return state

    def _last_state(self, start: _Start, lag_s: float) -> JobState:
        number = "" if start.phase is Phase.WAITING else str(start.number)
        if start.phase is Phase.ENDED:
            told = self.now - start.ended - start.told_after - lag_s
            if told < 0:
                return JobState(Phase.RUNNING, scheduler_id=number)
            if told < self.habits.gap or told > self.habits.remembers:
                return JobState(Phase.UNKNOWN)
        return JobState(start.phase, start.reason, scheduler_id=number)

    def lacks_marker(self, attempt_id: str) -> bool:
        """Whether an attempt's job has failed by itself and its marker is not there any more.

        An agent says no more of one than its exit code, whoever has ended it.
        """
        starts = [
            (job, one) for job in self._all_jobs if job.tag == attempt_id for one in job.starts
        ]
        failed = any(
            one.reason is Reason.EXIT_CODE or (job in self.pooled and one.code)
            for job, one in starts
        )
        return failed and all(
            job.spec.paths.marker(one.code) not in self.files for job, one in starts
        )

    # What the script does

    def _start(self, job: _Job, start: _Start) -> None:
        if start.phase is Phase.ENDED:
            return
        if job.tag not in self.specs:
            self._start_agent(job, start)
            return
        if any(self._goes_on(one) for one in job.after):
            self.after(DEPENDENCY_S, partial(self._start, job, start))
            return
        paths = job.spec.paths
        directory_there = self.files.get(paths.attempts, b"") is None
        if not directory_there or paths.claim in self.files or not self._is_known(job.spec):
            self._end(start, Reason.SUCCESS)
            return
        if self.full:
            self.excuse(job, Reason.EXIT_CODE, Reason.UNKNOWN)
            self.written(paths.claim, b"")
            self._end(start, Reason.EXIT_CODE)
            return
        start.phase = Phase.RUNNING
        after, seconds = job.fate.stalled
        start.hangs = (self.now + after, self.now + after + seconds)
        text = (
            f"owner=x{start.number}\nbegan={self.clock}\nsite_job={job.id}\n"
            f"scheduler_job={start.number}\nidentity={job.spec.identity}\nhost=n\n"
        )
        self.written(paths.claim, text.encode())
        self._beats[paths.claim] = self.now
        self.after(job.spec.limits.heartbeat_s, partial(self._beat, job, start))
        failed = self._stage(job.spec)
        if failed is not None:
            self._end(start, Reason.EXIT_CODE)
            step, missing = failed
            if job.spec.segment is not None:  # it does not find its checkpoint
                self.excuse(job, Reason.SET_UP)
            marker = make_marker(paths.attempt_id, 1, {}, step=step, missing=missing)
            self.written(paths.marker(1), marker)
            return
        found = result(job.spec.command, "", self._inputs(job.spec))
        start.run = PayloadRun(job.spec.name, paths.attempt_id, self.now, self.name, found)
        self.runs.append(start.run)
        if job.spec.segment is not None:
            self.written(f"{paths.work}/checkpoint", self._checkpoint(job.spec))
        for output in job.spec.outputs:
            if not output.keep:
                self.take(output.path, job.spec.name)
        fate = job.fate
        if fate.killed_after is not None:
            act = self._warn if fate.warned else self._kill
            self.after(fate.killed_after, partial(act, job, start, fate.reason))
        self.after(self.duration(job.spec), partial(self._finish, job, start, None))

    def _start_agent(self, job: _Job, start: _Start) -> None:
        start.phase, start.reason = Phase.RUNNING, None
        fate = job.fate

        def deny(denied: bool) -> None:
            job.fate = replace(job.fate, denied=denied)

        def over(*, killed: bool) -> None:
            start.agent = start.agent if killed else None
            (partial(self._kill, job, start, Reason.NODE_FAILURE) if killed else
             partial(self._end, start, Reason.SUCCESS))()  # fmt: skip

        start.agent = agent = Agent(self, start, job.spec.command, over, fate.step)
        self.agents.append(agent)
        if fate.killed_after is not None:
            act = self._warn if fate.warned else self._kill
            self.after(fate.killed_after, partial(act, job, start, fate.reason))
        self.after(agent.limit_s, partial(self._warn, job, start, Reason.TIME_LIMIT))
        for after, denied in zip(fate.unknown, (True, False), strict=True):
            if fate.unknown[1]:
                self.after(after, partial(deny, denied))
        agent.stir()

    def _goes_on(self, job_id: str) -> bool:
        """Whether the scheduler knows of a job that it has not ended."""
        job = self.jobs.get(job_id)
        return job is not None and any(start.phase is not Phase.ENDED for start in job.starts)

    def _is_known(self, spec: JobSpec) -> bool:
        """Whether the controller that sent it leads, or the one that does knows of it."""
        leases = [Lease.of(p.rpartition("/")[2]) for p in self.files if p.startswith(f"{PLACE}/")]
        term = max((lease.term for lease in leases if lease), default=0)
        known = (self.files.get(f"{PLACE}/known.{term}") or b"").decode().split()
        return not spec.term or term <= spec.term or spec.paths.attempt_id in known

    def _inputs(self, spec: JobSpec) -> dict[str, bytes]:
        own = spec.segment.checkpoint if spec.segment is not None else ()
        paths = [i.path for i in spec.inputs if not i.directory and i.path not in own]
        paths += [path for one in spec.after if not one.code for path in one.makes]
        return {path: self.files.get(path) or b"" for path in paths}

    def _beat(self, job: _Job, start: _Start) -> None:
        if start.phase is Phase.RUNNING:
            claim = self.files.get(job.spec.paths.claim)
            if claim is not None and not self._hangs(
                start
            ):  # its last block has room, even where nothing else has
                self.files[job.spec.paths.claim] = claim + b"."
                self._beats[job.spec.paths.claim] = self.now
            self.after(job.spec.limits.heartbeat_s, partial(self._beat, job, start))

    def _hangs(self, start: _Start) -> bool:
        return start.hangs[0] <= self.now < start.hangs[1]

    def _stage(self, spec: JobSpec) -> tuple[str, tuple[str, ...]] | None:
        """Unpack and check what a script does; the step that failed and the missing inputs."""
        made = self._made_before(spec)
        if made is None:
            return PREDECESSORS, ()
        if spec.segment is not None and spec.segment.before is not None:
            before = self.files.get(f"{spec.segment.before.work}/checkpoint")
            if before is None or before == self._checkpoint(spec):
                return CHECKPOINT, ()
        for bundle in spec.bundles:
            if bundle_done_path(bundle) in self.files:
                continue
            path = bundle_path(bundle)
            content = self._bundle(path)
            if content is None or not self._unpack(content, spec.numbers):
                return "bundles", ()
            self.write(bundle_done_path(bundle), b"")
            if self.files[path] is None:
                self.remove(path)
        if spec.inline:
            self._unpack(spec.inline, spec.numbers)
        missing = self._others(spec)
        missing += [path for path, sha256 in made.items() if self._sha256(path) != sha256]
        return ("inputs", tuple(missing)) if missing else None

    def _bundle(self, path: str) -> bytes | None:
        """The content of a bundle, one file or a directory of parts; None if it is not whole."""
        if self.files.get(path) is not None:
            return self.files[path]
        parts = sorted(at for at in self.files if at.startswith(f"{path}/"))
        if not parts or int(parts[0].rpartition("-")[2]) != len(parts):
            return None
        return b"".join(self.files[part] or b"" for part in parts)

    def _made_before(self, spec: JobSpec) -> dict[str, str] | None:
        """The checksums of what its predecessors have made, by path; None if one has not."""
        made: dict[str, str] = {}
        for one in spec.after:
            content = self.files.get(one.paths.marker(one.code))
            if content is None:
                return None
            try:
                marker = read_marker(content, attempt_id=one.paths.attempt_id, exit_code=one.code)
            except MarkerInvalid:
                return None
            there = {entry.path: entry.sha256 for entry in marker.files}
            if marker.bare or not (one.code or there.keys() >= set(one.makes)):
                return None
            made |= {path: there[path] for path in one.makes if path in there}
        return made

    def _sha256(self, path: str) -> str:
        return hashlib.sha256(self.files.get(path) or b"").hexdigest()

    def _others(self, spec: JobSpec, *, after: bool = False) -> list[str]:
        """The inputs that are missing or have another content than was sent."""
        missing = []
        for wanted in spec.inputs:
            there, found = wanted.path in self.files, self.files.get(wanted.path)
            if after and (wanted.changed or not there):
                continue
            content = found or b""
            right = there and (found is None) == wanted.directory
            right = right and wanted.size in (None, len(content))
            if wanted.sha256:
                right = right and hashlib.sha256(content).hexdigest() == wanted.sha256
            if not right:
                missing.append(wanted.path)
        return missing

    def _unpack(self, content: bytes, numbers: Mapping[str, int]) -> bool:
        try:
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                members = [(m, tar.extractfile(m) if m.isfile() else None) for m in tar]
                for member, file in members:
                    if file is None:
                        self.make_directory(member.name)
                        continue
                    mark, number = f".mantik/newer/{member.name}.n", numbers.get(member.name, 0)
                    there = int(self.files.get(mark) or b"0")
                    if number > there:
                        self.write(mark, b"%d" % number)
                    if number >= there:
                        self.write(member.name, file.read())
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error):
            return False
        return True

    def _finish(self, job: _Job, start: _Start, signalled: Reason | None) -> None:
        if start.phase is not Phase.RUNNING or start.run is None:
            return
        if self._hangs(start):
            self.after(start.hangs[1] - self.now, partial(self._finish, job, start, signalled))
            return
        spec = job.spec
        code = self.code(spec) if signalled is None else 143
        if self.full and code == 0:
            self.excuse(job, Reason.EXIT_CODE, Reason.OUTPUTS)
            code = 1
        read = [wanted.path for wanted in spec.inputs]
        read += [path for one in spec.after for path in one.makes]
        if any(path not in self.files for path in read):
            code = code or 1
        others = self._others(spec, after=True) if signalled is None else []
        if signalled is None:
            others_made = tuple(one for one in spec.after if not one.code)
            made = self._made_before(replace(spec, after=others_made)) or {}
            others += [p for p, sha in made.items() if p in self.files and self._sha256(p) != sha]
        code = 1 if others else code
        saves = signalled is not None and job.fate.saves
        steps = self._step(job) if code == 0 or saves else {}
        go_on = ""
        if signalled is None and any(int(step) < STEPS for step in steps.values()):
            code, go_on = GO_ON_CODE, "asked"
        elif signalled is Reason.TIME_LIMIT and steps:  # its own clock was first
            code, go_on = GO_ON_CODE, "time_limit"
        reason = Reason.SUCCESS if code == 0 else signalled or Reason.EXIT_CODE
        self._end(start, reason)
        start.run.ended, start.run.how = self.now, f"exit {code} {go_on}".strip()
        outputs = {}
        if code == 0:
            inputs = self._inputs(spec)
            for output in [one for one in spec.outputs if one.kind != "checkpoint"]:
                outputs[output.path] = result(spec.command, output.path, inputs)
                self.written(output.path, outputs[output.path])
                self._changed[output.path] = self.now
                if output.stored:
                    self._makers[output.path] = spec.paths.attempt_id
        start.run.made = outputs
        start.run.steps = steps
        if self.files.get(spec.paths.attempts, b"") is None:
            content = self.files.get(spec.paths.claim) or b""  # all that there is room for
            if not self.full:
                content = make_marker(
                    spec.paths.attempt_id, code, steps if code else outputs,
                    place=partial(self._place_of, spec),
                    go_on=go_on, changed=bool(steps),
                    world=self,
                    signal="TERM" if signalled is not None else "", archive=spec.paths.archive,
                    step="inputs" if others else "", missing=others,
                    times=(self._clock(start.run.begun), self._clock(self.now)),
                    modified=EPOCH_S + self._clock(self.now),
                )  # fmt: skip
            self.written(spec.paths.marker(code), content)

    def _step(self, job: "_Job") -> dict[str, bytes]:
        """Take one more step of those that a job in segments needs; return its checkpoint."""
        segment = job.spec.segment
        if segment is None:
            return {}
        [path] = segment.checkpoint
        found = self.files.get(path) or b""
        steps = int(found) + 1 if found.isdigit() else 1  # others may have changed it
        self.written(path, b"%d" % steps)
        if segment.number + 1 >= segment.most:
            self.excuse(job, Reason.EXIT_CODE)  # these were not enough
        return {path: b"%d" % steps}

    def _checkpoint(self, spec: JobSpec) -> bytes:
        """What a segment lists of its checkpoint."""
        assert spec.segment is not None
        [path] = spec.segment.checkpoint
        return self.files.get(path) or b"-"

    def _place_of(self, spec: JobSpec, path: str) -> str:
        if spec.segment is not None and path in spec.segment.checkpoint:
            return "stored"
        stays = any(output.stored and output.path == path for output in spec.outputs)
        return "stored" if stays else self.place(path)


def _is_of_attempts(path: str) -> bool:
    return path in (OURS, ATTEMPTS) or path.startswith(f"{ATTEMPTS}/")


def result(command: str, path: str, inputs: Mapping[str, bytes]) -> bytes:
    """What a command makes at `path` of its inputs: one line, or so many that they go in parts."""
    digest = hashlib.sha256(f"{command}\0{path}".encode())
    for name in sorted(inputs):
        digest.update(name.encode() + b"\0" + inputs[name])
    lines = []
    for number in range(MANY_LINES if path and digest.digest()[0] % 2 else 1):
        digest.update(b"%d" % number)
        lines.append(digest.hexdigest().encode() + b"\n")
    return b"".join(lines)


def make_marker(
    attempt_id: str,
    code: int,
    outputs: Mapping[str, bytes],
    *,
    place: Callable[[str], str] = lambda path: "marker",
    step: str = "",
    missing: Sequence[str] = (),
    lacking: Sequence[str] = (),
    signal: str = "",
    log: bytes = b"hello\n",
    world: World | None = None,
    archive: str = "",
    times: tuple[float, float] = (10.0, 20.0),
    modified: float = 30.0,
    go_on: str = "",
    changed: bool = False,
) -> bytes:
    """A marker as `jobs/bash/main.sh` writes it; with a `world`, the archive is written there."""
    small, larger, records = {}, {}, []
    for path, content in outputs.items():
        where = place(path)
        digest = hashlib.sha256(content).hexdigest()
        date = f"{modified:.9f}"
        records += [where, "f", str(len(content)), "644", digest, "", date, path]
        if where == "marker":
            small[f"./{path}"] = content
        elif where == "archive":
            larger[path] = content
    packed = tarred(larger, "w") if larger else b""
    if world is not None and larger:
        world.written(archive, packed)
    meta = {
        "version": 1, "attempt": attempt_id, "exit_code": code, "failed_step": step,
        "signal": signal, "started": times[0], "ended": times[1], "host": "n",
        "files": len(outputs), "lacking": len(lacking), "archive_size": len(packed),
        "archive_sha256": hashlib.sha256(packed).hexdigest() if packed else "",
        "log_bytes": len(log), "go_on": go_on, "changed": "yes" if changed else "no",
    }  # fmt: skip
    lists = {"missing": missing, "lacking": lacking, "files": records}
    members = {"meta": "".join(f"{k}={v}\n" for k, v in meta.items()).encode()}
    members |= {name: "".join(f"{x}\0" for x in of).encode() for name, of in lists.items()}
    return tarred(members | {"log": log} | small, "w:gz")


def tarred(files: Mapping[str, bytes], mode: Literal["w", "w:gz"]) -> bytes:
    """A tar of `files`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=tarfile.GNU_FORMAT) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
