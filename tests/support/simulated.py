"""A simulated site: everything that a site may do to a job, in virtual time.

It stands in for hours and days of real time that no test can wait for, and for misfortunes that no
server can be asked for. The real thing is tested in `tests/sites` and `tests/e2e`.

A `World` is what is left when a controller dies: files, jobs, and what they ran. It goes on by
itself; a `SimulatedSite` is one controller's access to it. A job does what `script.sh.j2` does:
claim, bundles, inputs, payload with heartbeats, marker.
"""

import asyncio
import hashlib
import heapq
import io
import itertools
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.engine.stage import Staged
from snakemake_executor_plugin_mantik.errors import (
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.jobs.paths import bundle_done, bundle_path
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.sites.base import (
    Entry,
    JobState,
    Phase,
    SiteDetails,
    SiteFacts,
    Submission,
)

T = TypeVar("T")

Fault = Literal["unreachable", "lost", "busy", "unauthorized", "not found", "rejected", "", "bug"]
"""What a call meets: `lost` acts and loses the answer, `bug` raises what no site may raise."""

_ERRORS: Mapping[str, Callable[[], Exception]] = {
    "unreachable": lambda: SiteUnreachable("no answer", where="site sim"),
    "lost": lambda: SiteUnreachable("the answer was lost", where="site sim"),
    "busy": lambda: SiteBusy("come later", where="site sim", retry_after=7),
    "unauthorized": lambda: SiteUnauthorized("who are you", where="site sim"),
    "not found": lambda: SiteNotFound("there is no such thing", where="site sim"),
    "rejected": lambda: SiteRejected("no", where="site sim"),
    "bug": lambda: KeyError("a mistake of ours"),
}

LATENCY_S = 0.05
LIFETIME_S = 86400.0
"""Seconds that the site keeps a job unless it is extended; then it ends it."""


@dataclass
class Fate:
    """What becomes of one submission.

    Attributes:
        starts: seconds after which the scheduler starts it, once for each.
        denied: whether the site says that it knows no such job.
        killed_after: seconds of running after which it is killed without a word.
        reason: what the scheduler then says.
        refused: whether the scheduler refuses it, so that it ends without a start.
        full: whether it does so because there are too many jobs.
    """

    starts: tuple[float, ...] = (3.0,)
    denied: bool = False
    killed_after: float | None = None
    reason: Reason = Reason.OUT_OF_MEMORY
    refused: bool = False
    full: bool = False


@dataclass
class PayloadRun:
    """One run of a job's command."""

    job: str
    try_id: str
    begun: float
    ended: float | None = None
    how: str = ""


@dataclass
class _Start:
    number: int
    phase: Phase = Phase.WAITING
    reason: Reason | None = None
    run: PayloadRun | None = None


@dataclass
class _Job:
    id: str
    tag: str
    spec: JobSpec
    fate: Fate
    expires: float
    starts: list[_Start] = field(default_factory=list)
    log: bytes = b""


class World:
    """A site and its jobs, whoever looks at it."""

    def __init__(
        self,
        fate: Callable[[JobSpec], Fate] = lambda spec: Fate(),
        duration: Callable[[JobSpec], float] = lambda spec: 100.0,
        code: Callable[[JobSpec], int] = lambda spec: 0,
        place: Callable[[str], str] = lambda path: "marker",
    ) -> None:
        """Make a world.

        Args:
            fate: what becomes of each submission.
            duration: how long a command takes, in seconds.
            code: a command's exit code.
            place: how an output travels: `marker`, `archive` or `alone`.
        """
        self.fate, self.duration, self.code, self.place = fate, duration, code, place
        self.files: dict[str, bytes | None] = {}
        self.jobs: dict[str, _Job] = {}
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
        """Let something happen later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def purge(self) -> None:
        """The centre's broom: all files go, those of running jobs too."""
        self.files.clear()

    # Files

    def make_directory(self, path: str) -> None:
        """A directory and its parents."""
        parts = path.split("/")
        for i in range(len(parts)):
            if isinstance(self.files.setdefault("/".join(parts[: i + 1]), None), bytes):
                raise SiteRejected(f"{path}: file exists!", where="site sim")

    def write(self, path: str, content: bytes) -> None:
        """A file, its parents made."""
        if "/" in path:
            self.make_directory(path.rpartition("/")[0])
        self.files[path] = content

    def remove(self, path: str) -> None:
        """A file, or a directory with all below it."""
        for at in [p for p in self.files if p == path or p.startswith(f"{path}/")]:
            del self.files[at]

    def below(self, path: str) -> dict[str, Entry]:
        """A directory's entries."""
        if path and self.files.get(path, b"") is not None:
            raise SiteNotFound(f"there is no directory {path}", where="site sim")
        found = {}
        prefix = f"{path}/" if path else ""
        for at, content in self.files.items():
            name = at.removeprefix(prefix)
            if at.startswith(prefix) and name and "/" not in name:
                found[name] = Entry(name, len(content or b""), content is None)
        return found

    # Jobs

    def submit(self, submission: Submission) -> str:
        """Take over a job; its fate is decided now."""
        spec = self.specs[submission.tag]
        job_id = f"id-{next(self._numbers)}"
        fate = self.fate(spec)
        job = _Job(job_id, submission.tag, spec, fate, self.now + LIFETIME_S)
        self.jobs[job_id] = job
        for delay in () if fate.refused else fate.starts:
            start = _Start(next(self._numbers))
            job.starts.append(start)
            self.after(delay, partial(self._start, job, start))
        self.after(LIFETIME_S, partial(self._expire, job))
        return job_id

    def _expire(self, job: _Job) -> None:
        if job.id in self.jobs and self.now < job.expires:
            self.after(job.expires - self.now, partial(self._expire, job))
        elif job.id in self.jobs:
            self.forget(job.id)

    def forget(self, job_id: str) -> None:
        """End a job and lose all record of it."""
        job = self.jobs.pop(job_id, None)
        for start in job.starts if job else ():
            self._kill(start, Reason.CANCELLED)

    def cancel(self, job_id: str) -> None:
        """Ask a job to end: one that runs says so with its last breath."""
        for start in self.jobs[job_id].starts if job_id in self.jobs else ():
            if start.run is not None and start.phase is Phase.RUNNING:
                self.after(1.0, partial(self._finish, self.jobs[job_id], start, 143))
            elif start.phase is Phase.WAITING:
                self._kill(start, Reason.CANCELLED)

    def _kill(self, start: _Start, reason: Reason) -> None:
        if start.phase is Phase.ENDED:
            return
        start.phase, start.reason = Phase.ENDED, reason
        if start.run is not None and start.run.ended is None:
            start.run.ended, start.run.how = self.now, "killed"

    def state(self, job_id: str) -> JobState:
        """What the site says: of several starts it knows the last one only."""
        job = self.jobs.get(job_id)
        if job is None or job.fate.denied:
            return JobState(Phase.UNKNOWN)
        if job.fate.refused:
            full = job.fate.full
            said = "AssocMaxSubmitJobLimit" if full else "Invalid account"
            return JobState(Phase.ENDED, Reason.REJECTED, said, later=full)
        if not job.starts:
            return JobState(Phase.UNKNOWN)
        start = job.starts[-1]
        number = "" if start.phase is Phase.WAITING else str(start.number)
        return JobState(start.phase, start.reason, scheduler_id=number)

    # What the script does

    def _start(self, job: _Job, start: _Start) -> None:
        if start.phase is Phase.ENDED:
            return
        paths = job.spec.paths
        directory_there = self.files.get(paths.tries, b"") is None
        if not directory_there or paths.claim in self.files:
            start.phase, start.reason = Phase.ENDED, Reason.SUCCESS
            return
        start.phase = Phase.RUNNING
        text = f"owner=x{start.number}\nsite_job={job.id}\nscheduler_job={start.number}\nhost=n\n"
        self.write(paths.claim, text.encode())
        failed = self._stage(job.spec)
        if failed is not None:
            start.phase, start.reason = Phase.ENDED, Reason.EXIT_CODE
            step, missing = failed
            marker = make_marker(paths.try_id, 1, {}, step=step, missing=missing)
            self.write(paths.marker(1), marker)
            return
        start.run = PayloadRun(job.spec.name, paths.try_id, self.now)
        self.runs.append(start.run)
        for output in job.spec.outputs:
            if not output.keep:
                self.remove(output.path)
        self.after(job.spec.limits.heartbeat_s, partial(self._beat, job, start))
        if job.fate.killed_after is not None:
            self.after(job.fate.killed_after, partial(self._kill, start, job.fate.reason))
        self.after(self.duration(job.spec), partial(self._finish, job, start, None))

    def _beat(self, job: _Job, start: _Start) -> None:
        if start.phase is Phase.RUNNING:
            claim = self.files.get(job.spec.paths.claim)
            if claim is not None:
                self.files[job.spec.paths.claim] = claim + b"."
            self.after(job.spec.limits.heartbeat_s, partial(self._beat, job, start))

    def _stage(self, spec: JobSpec) -> tuple[str, tuple[str, ...]] | None:
        """Unpack and check what a script does; the step that failed and the missing inputs."""
        for bundle in spec.bundles:
            if bundle_done(bundle) in self.files:
                continue
            content = self.files.get(bundle_path(bundle))
            if content is None or not self._unpack(content):
                return "bundles", ()
            self.write(bundle_done(bundle), b"")
        if spec.inline:
            self._unpack(spec.inline)
        missing = []
        for wanted in spec.inputs:
            there, found = wanted.path in self.files, self.files.get(wanted.path)
            right = there and (found is None) == wanted.directory
            if not right or (wanted.size is not None and len(found or b"") != wanted.size):
                missing.append(wanted.path)
        return ("inputs", tuple(missing)) if missing else None

    def _unpack(self, content: bytes) -> bool:
        try:
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                members = [(m, tar.extractfile(m) if m.isfile() else None) for m in tar]
                for member, file in members:
                    if file is None:
                        self.make_directory(member.name)
                    else:
                        self.write(member.name, file.read())
        except (tarfile.TarError, EOFError):
            return False
        return True

    def _finish(self, job: _Job, start: _Start, signalled: int | None) -> None:
        if start.phase is not Phase.RUNNING or start.run is None:
            return
        spec = job.spec
        code = signalled if signalled is not None else self.code(spec)
        start.phase = Phase.ENDED
        start.reason = Reason.SUCCESS if code == 0 else Reason.EXIT_CODE
        start.run.ended, start.run.how = self.now, f"exit {code}"
        outputs = {}
        if code == 0:
            inputs = {i.path: self.files.get(i.path) or b"" for i in spec.inputs if not i.directory}
            for output in spec.outputs:
                outputs[output.path] = result(spec.command, output.path, inputs)
                self.write(output.path, outputs[output.path])
        if self.files.get(spec.paths.tries, b"") is None:
            signal = "TERM" if signalled is not None else ""
            content = make_marker(
                spec.paths.try_id, code, outputs, place=self.place, signal=signal, world=self,
                archive=spec.paths.archive,
            )  # fmt: skip
            self.write(spec.paths.marker(code), content)


def result(command: str, path: str, inputs: Mapping[str, bytes]) -> bytes:
    """What a command makes at `path` of its inputs."""
    digest = hashlib.sha256(f"{command}\0{path}".encode())
    for name in sorted(inputs):
        digest.update(name.encode() + b"\0" + inputs[name])
    return digest.hexdigest().encode() + b"\n"


def make_marker(
    try_id: str,
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
) -> bytes:
    """A marker as `script.sh.j2` writes it; with a `world`, the archive is written there."""
    small, larger, records = {}, {}, []
    for path, content in outputs.items():
        where = place(path)
        digest = hashlib.sha256(content).hexdigest()
        records += [where, "f", str(len(content)), "644", digest, "", path]
        if where == "marker":
            small[f"./{path}"] = content
        elif where == "archive":
            larger[path] = content
    packed = tarred(larger, "w") if larger else b""
    if world is not None and larger:
        world.write(archive, packed)
    meta = {
        "version": 1, "try": try_id, "exit_code": code, "failed_step": step, "signal": signal,
        "started": 10.0, "ended": 20.0, "host": "n", "files": len(outputs),
        "lacking": len(lacking), "archive_size": len(packed),
        "archive_sha256": hashlib.sha256(packed).hexdigest() if packed else "",
        "log_bytes": len(log),
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


def _for_all(act: Callable[[str], None], ids: Sequence[str]) -> None:
    for job_id in ids:
        act(job_id)


class SimulatedSite:
    """One controller's access to a `World`; implements `Site`.

    Attributes:
        fault: asked before each call, with the method and the path or id it is about.
        called: told of each call, before and after it acts: a test may stop the world there.
        calls: how often each method was called.
    """

    def __init__(self, world: World, name: str = "sim", workspace: str = "/ws") -> None:
        self.name = name
        self.workspace = workspace
        self.world = world
        self.fault: Callable[[str, str], Fault] = lambda method, about: ""
        self.called: Callable[[], None] | None = None
        self.calls: Counter[str] = Counter()

    async def _call(self, method: str, about: str, act: Callable[[], T]) -> T:
        await self._moment()
        self.calls[method] += 1
        fault = self.fault(method, about)
        if fault and fault != "lost":
            raise _ERRORS[fault]()
        result = act()
        await self._moment()
        if fault == "lost":
            raise _ERRORS[fault]()
        return result

    async def _moment(self) -> None:
        if self.called is not None:
            self.called()
        await asyncio.sleep(LATENCY_S)
        self.world.advance(asyncio.get_running_loop().time())

    async def open(self) -> SiteFacts:
        """See `Site`; so have all that follow."""
        return await self._call("open", "", lambda: SiteFacts(self.workspace, "Simulated 1"))

    async def describe(self) -> SiteDetails:
        return SiteDetails()

    async def close(self) -> None:
        pass

    async def submit(self, submission: Submission) -> str:
        return await self._call("submit", submission.tag, lambda: self.world.submit(submission))

    async def find(self, tag: str) -> list[str]:
        jobs = self.world.jobs
        return await self._call(
            "find", tag, lambda: [j.id for j in jobs.values() if j.tag == tag and not j.fate.denied]
        )

    async def states(self, ids: Sequence[str]) -> dict[str, JobState]:
        return await self._call(
            "states", " ".join(ids), lambda: {i: self.world.state(i) for i in ids}
        )

    async def explain(self, job_id: str) -> JobState:
        return await self._call("explain", job_id, lambda: self.world.state(job_id))

    async def cancel(self, ids: Sequence[str]) -> None:
        await self._call("cancel", " ".join(ids), partial(_for_all, self.world.cancel, ids))

    async def forget(self, ids: Sequence[str]) -> None:
        await self._call("forget", " ".join(ids), partial(_for_all, self.world.forget, ids))

    async def extend(self, ids: Sequence[str], seconds: float) -> None:
        def act() -> None:
            for job in (self.world.jobs[i] for i in ids if i in self.world.jobs):
                job.expires = self.world.now + seconds

        await self._call("extend", " ".join(ids), act)

    async def put(self, path: str, content: bytes | Path, *, private: bool = False) -> None:
        data = content if isinstance(content, bytes) else content.read_bytes()
        try:
            await self._call("put", path, lambda: self.world.write(path, data))
        except SiteUnreachable:
            self.world.write(path, data[: len(data) // 2])
            raise

    async def get(self, path: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        def act() -> bytes:
            content = self.world.files.get(path)
            if content is None:
                raise SiteNotFound(f"there is no file {path}", where="site sim")
            return content[offset:]

        broken: SiteError | None = None
        try:
            content = await self._call("get", path, act)
        except SiteUnreachable as error:
            broken, content = error, act()
            content = content[: len(content) // 2]
        for i in range(0, len(content), 1000):
            yield content[i : i + 1000]
        if broken is not None:
            raise broken

    async def list(self, path: str) -> dict[str, Entry]:
        return await self._call("list", path, lambda: self.world.below("" if path == "." else path))

    async def stat(self, path: str) -> Entry | None:
        def act() -> Entry | None:
            if path not in self.world.files:
                return None
            content = self.world.files[path]
            return Entry(path.rpartition("/")[2], len(content or b""), content is None)

        return await self._call("stat", path, act)

    async def make_directory(self, path: str) -> None:
        await self._call("make_directory", path, lambda: self.world.make_directory(path))

    async def remove(self, path: str) -> None:
        await self._call("remove", path, lambda: self.world.remove(path))


@dataclass(frozen=True)
class SimulatedPlanner(Planner):
    """Hands the plan of each job to the world, which cannot read scripts."""

    world: World = field(default_factory=World)

    def spec(
        self, request: JobRequest, record: TryRecord, facts: SiteFacts, staged: Staged
    ) -> JobSpec:
        """See `Planner.spec`."""
        spec = super().spec(request, record, facts, staged)
        self.world.specs[record.id] = spec
        return spec
