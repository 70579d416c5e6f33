"""A simulated site: everything that a site may do to a job, in virtual time.

It stands in for hours and days of real time that no test can wait for, and for misfortunes that no
server can be asked for. The real thing is tested in `tests/sites` and `tests/e2e`.

A `SimulatedSite` is one controller's access to a `World`, which goes on without it.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar, cast

from snakemake_executor_plugin_mantik.common.errors import (
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.engine.plan import NOTHING, Planner, Resumed
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.engine.stage import Staged
from snakemake_executor_plugin_mantik.jobs.pools import Allocation
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec, Predecessor
from snakemake_executor_plugin_mantik.journal import AttemptRecord
from snakemake_executor_plugin_mantik.sites.base import (
    Entry,
    JobState,
    Phase,
    SharedFile,
    SiteDetails,
    SiteFacts,
    Submission,
    is_rest_safe,
)
from tests.support.world import Fate, Habits, PayloadRun, World, make_marker, result, tarred

__all__ = [
    "Fate", "Fault", "Habits", "PayloadRun", "SimulatedPlanner", "SimulatedSite", "World",
    "make_marker", "result", "tarred",
]  # fmt: skip

T = TypeVar("T")

Fault = Literal[
    "", "unreachable", "lost", "hang", "late", "busy", "unauthorized", "empty", "not found",
    "rejected", "bug", "halved", "damaged", "slowly",
]  # fmt: skip
"""What a call meets.

`slowly` acts after a minute and answers, `lost` acts and loses the answer, `hang` is `unreachable`
after two minutes, `late` acts long after it was given up, `empty` gives an empty list, `bug` raises
what no site may raise. Of a file that comes, `halved` gives its first half and `damaged` another
byte, once for each; of one that goes up, either says that it is there and loses it, once in a
process. No other call meets these two.
"""

_ERRORS: Mapping[str, Callable[[], Exception]] = {
    "unreachable": lambda: SiteUnreachable("no answer", where="site sim"),
    "hang": lambda: SiteUnreachable("no answer for long", where="site sim"),
    "late": lambda: SiteUnreachable("no answer yet", where="site sim"),
    "lost": lambda: SiteUnreachable("the answer was lost", where="site sim"),
    "busy": lambda: SiteBusy("come later", where="site sim", retry_after=7),
    "unauthorized": lambda: SiteUnauthorized("who are you", where="site sim"),
    "not found": lambda: SiteNotFound("there is no such thing", where="site sim"),
    "rejected": lambda: SiteRejected("no", where="site sim"),
    "bug": lambda: KeyError("a mistake of ours"),
}

LATENCY_S = 0.05
READS = frozenset({"list", "stat", "states", "find", "explain", "get"})
"""Their answers come at once: a cycle costs half as much, and nobody waits for them long."""
HANG_S = 120.0
LATE_S = 400.0
SLOW_S = 60.0
STATES_LAG_S = 133.0


def _whatever(act: Callable[[], object]) -> None:
    """Nobody hears any more how it ends."""
    with suppress(SiteError):
        act()


def _for_all(act: Callable[[str], None], ids: Sequence[str]) -> None:
    for job_id in ids:
        act(job_id)


class SimulatedSite:
    """One controller's access to a `World`; implements `Site`.

    Attributes:
        fault: asked before each call, with the method and the path or id it is about.
        called: told of each call, before and after it acts: a test may stop the world there.
        cut: whether a request that is given up on its way acts all the same.
        calls: how often each method was called.
        states_lag: whether `states` tells an end two minutes late and not why a job waits, as
            UNICORE does.
        upload_bytes: most bytes that go up in one request.
    """

    states_lag = False
    notify: Callable[[str], None] | None = None
    record: Callable[[Allocation], None] | None = None
    upload_bytes = 4 << 20

    def __init__(self, world: World, name: str = "sim", workspace: str = "/ws") -> None:
        self.name = name
        self.workspace = workspace
        self.world = world
        self.fault: Callable[[str, str], Fault] = lambda method, about: ""
        self.called: Callable[[], None] | None = None
        self.cut: Callable[[], bool] = lambda: False
        self._damaged: set[str] = set()
        self.calls: Counter[str] = Counter()

    async def _call(self, method: str, about: str, act: Callable[[], T]) -> T:
        try:
            await self._moment()
        except asyncio.CancelledError:
            if self.cut():
                self.world.after(LATENCY_S, partial(_whatever, act))
            raise
        self.calls[method] += 1
        fault = self.fault(method, about)
        if fault == "hang":
            await asyncio.sleep(HANG_S)
        if fault == "slowly":
            await asyncio.sleep(SLOW_S)
            self.world.advance(asyncio.get_running_loop().time())
        if fault == "late":
            self.world.after(LATE_S, partial(_whatever, act))
        if fault in _ERRORS and fault != "lost":
            raise _ERRORS[fault]()
        spoilt = about if method == "get" else method
        if fault in ("halved", "damaged") and spoilt not in self._damaged:
            self._damaged.add(spoilt)
            result = self._spoilt(fault, method, act)
        else:
            result = act() if fault != "empty" else cast(T, {})
        if method in READS:
            self._called()
        else:
            await self._moment()
        if fault == "lost":
            raise _ERRORS[fault]()
        return result

    @staticmethod
    def _spoilt(fault: Fault, method: str, act: Callable[[], T]) -> T:
        if method == "put":
            return cast(T, None)
        result = act()
        if method != "get" or not isinstance(result, bytes) or not result:
            return result
        if fault == "halved":
            return cast(T, result[: len(result) // 2])
        return cast(T, result[:-1] + bytes([result[-1] ^ 1]))

    async def _moment(self) -> None:
        self._called()
        await asyncio.sleep(LATENCY_S)
        self.world.advance(asyncio.get_running_loop().time())

    def _called(self) -> None:
        if self.called is not None:
            self.called()

    @property
    def clock(self) -> float:
        return self.world.clock

    async def open(self, *, make: bool = True) -> SiteFacts:
        """See `Site`; so have all that follow."""
        return await self._call(
            "open",
            "",
            lambda: SiteFacts(
                self.workspace, "Simulated 1", orders_jobs=True, upload_bytes=self.upload_bytes
            ),
        )

    async def free_nodes(self) -> None:
        pass

    async def describe(self) -> SiteDetails:
        return SiteDetails()

    async def close(self) -> None:
        pass

    async def submit(self, submission: Submission, begin: Callable[[], None] = lambda: None) -> str:
        begin()
        return await self._call("submit", submission.tag, lambda: self.world.submit(submission))

    async def find(self, names: Mapping[str, str]) -> dict[str, list[str]]:
        def act() -> dict[str, list[str]]:
            jobs = [job for job in self.world.jobs.values() if not job.fate.denied]
            return {tag: [job.id for job in jobs if job.tag == tag] for tag in names}

        return await self._call("find", " ".join(names), act)

    async def states(self, ids: Sequence[str]) -> dict[str, JobState]:
        lag_s = STATES_LAG_S if self.states_lag else 0.0

        def act() -> dict[str, JobState]:
            told = {i: self.world.state(i, lag_s) for i in ids}
            if self.states_lag:
                told = {i: replace(s, waits=None, never=False, pending="") for i, s in told.items()}
            return told

        return await self._call("states", " ".join(ids), act)

    async def glance(self, ids: Sequence[str]) -> dict[str, JobState] | None:
        return None if self.states_lag else await self.states(ids)

    async def scheduler_ids(self, ids: Sequence[str]) -> dict[str, str]:
        def act() -> dict[str, str]:
            return {i: i for i in ids if i in self.world.jobs}

        return await self._call("states", " ".join(ids), act)

    async def explain(self, job_id: str) -> JobState:
        return await self._call("explain", job_id, lambda: self.world.state(job_id))

    async def cancel(self, ids: Sequence[str]) -> None:
        await self._call("cancel", " ".join(ids), partial(_for_all, self.world.cancel, ids))

    async def forget(self, ids: Sequence[str], *, succeeded: bool = False) -> None:
        await self._call("forget", " ".join(ids), partial(_for_all, self.world.forget, ids))

    async def extend(self, ids: Sequence[str], seconds: float) -> None:
        def act() -> None:
            for job in (self.world.jobs[i] for i in ids if i in self.world.jobs):
                if not job.fate.denied:
                    job.expires = self.world.now + seconds

        await self._call("extend", " ".join(ids), act)

    async def put(self, path: str, content: bytes, *, private: bool = False) -> None:
        if private and path.rpartition("/")[0] not in self.world.closed:
            self.world.exposed.append(path)
        try:
            await self._call("put", path, lambda: self.world.put(path, content))
        except SiteUnreachable:
            self.world.write(path, content[: len(content) // 2])
            raise

    async def get(
        self, path: str, *, offset: int = 0, size: int | None = None
    ) -> AsyncIterator[bytes]:
        def act() -> bytes:
            content = self.world.seen(path)
            if content is None:
                raise SiteNotFound(f"{path} is a directory", where="site sim")
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

    async def share(self, path: str) -> SharedFile | None:
        return None

    async def start_import(self, source: SharedFile, path: str) -> str | None:
        return None

    async def import_state(self, import_id: str) -> JobState:
        return JobState(Phase.UNKNOWN)

    async def end_import(self, import_id: str) -> None:
        pass

    def can_carry(self, path: str) -> bool:
        return is_rest_safe(path)

    async def list(self, path: str) -> dict[str, Entry]:
        return await self._call("list", path, lambda: self.world.below("" if path == "." else path))

    async def stat(self, path: str) -> Entry | None:
        def act() -> Entry | None:
            try:
                content = self.world.seen(path)
            except SiteNotFound:
                return None
            name, size = path.rpartition("/")[2], len(content or b"")
            return Entry(name, size, content is None, self.world.modified(path))

        return await self._call("stat", path, act)

    async def make_directory(self, path: str, *, private: bool = False) -> None:
        def act() -> None:
            self.world.make_directory(path)
            if private:
                self.world.closed.add(path)

        await self._call("make_directory", path, act)

    async def remove(self, path: str) -> None:
        await self._call("remove", path, lambda: self.world.take(path, "the executor"))


@dataclass(frozen=True)
class SimulatedPlanner(Planner):
    """Hands the plan of each job to the world, which cannot read scripts."""

    world: World = field(default_factory=World)

    def spec(
        self,
        request: JobRequest,
        record: AttemptRecord,
        facts: SiteFacts,
        staged: Staged,
        *,
        term: int = 0,
        after: Sequence[Predecessor] = (),
        resumed: Resumed = NOTHING,
    ) -> JobSpec:
        spec = super().spec(request, record, facts, staged, term=term, after=after, resumed=resumed)
        self.world.specs[record.id] = spec
        return spec
