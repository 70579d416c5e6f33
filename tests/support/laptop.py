"""The near end of a simulated site: processes of the real engine, in virtual time, that may die.

What dies, dies for good: after `Session.die` nothing of it acts any more, neither at a site nor on
the journal nor on files.
"""

import asyncio
import errno
from collections.abc import Callable, Container, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_mantik.config.environment import find_pools
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.engine.request import JobRequest, Outcome
from snakemake_executor_plugin_mantik.journal import AttemptRecord, Journal
from snakemake_executor_plugin_mantik.sites.base import Site
from snakemake_executor_plugin_mantik.sites.pools import with_pools
from snakemake_executor_plugin_mantik.staging.project_files import ProjectFiles
from tests.support.simulated import SimulatedPlanner, SimulatedSite
from tests.support.virtualtime import VirtualLoop
from tests.support.world import World

WRITES = frozenset({"write", "write_bytes", "unpack", "settle", "_begin"})
"""What the engine has threads do that writes files."""


CHECKS = """
CREATE TEMP TRIGGER changed BEFORE UPDATE ON attempts BEGIN
    SELECT RAISE(ABORT, 'an attempt went back')
        WHERE instr(:order, OLD.state) > instr(:order, NEW.state);
    SELECT RAISE(ABORT, 'an attempt that is over changed its state')
        WHERE OLD.state IN ('done', 'abandoned') AND NEW.state <> OLD.state;
    SELECT RAISE(ABORT, 'an attempt that is not submitted has ended')
        WHERE NEW.state = 'ended' AND OLD.state NOT IN ('submitting', 'submitted', 'ended');
    SELECT RAISE(ABORT, 'an attempt is done that has not ended')
        WHERE NEW.state = 'done' AND OLD.state NOT IN ('ended', 'done');
    SELECT RAISE(ABORT, 'an attempt ended in no way')
        WHERE NEW.state IN ('ended', 'abandoned') AND NEW.outcome = '';
END;
CREATE TEMP TRIGGER logged BEFORE INSERT ON events WHEN NEW.kind = 'ended' BEGIN
    SELECT RAISE(ABORT, 'an attempt ended twice') WHERE 'ended' = (SELECT kind FROM events
        WHERE subject = NEW.subject AND kind IN ('tracked', 'ended') ORDER BY seq DESC LIMIT 1);
END;
""".replace(":order", "' planned submitting submitted ended done abandoned'")
"""What must hold of each step that the journal records."""
UPLOAD_BYTES = 2000
"""Most bytes that go up in one request: so few that many bundles go up in parts."""
FULL = 2
"""SQLite's number for the mode in which a commit is on disk when it returns."""


_SESSION: ContextVar["Session"] = ContextVar("session")
"""Whose task this is: some sessions may share a loop."""


def _around(work: object) -> None:
    _SESSION.get().around(work)


class Died(Exception):  # noqa: N818 - reads as what it says
    """The process was killed."""


class InPlace(Engine):
    """The engine, in the loop that it is given instead of a thread of its own."""

    def __init__(self, loop: VirtualLoop, *args: Any, **kwargs: Any) -> None:
        self._given = loop
        super().__init__(*args, **kwargs)

    def _begin(self) -> None:
        self._loop = self._given

    async def opened(self, project_files: ProjectFiles, *names: str) -> None:
        self._project_files_of = lambda _: project_files
        await self._open_all(names, ())

    async def job(self, request: JobRequest) -> Outcome:
        self._start(request)
        await asyncio.wait([self._jobs[request.number]])
        [outcome] = [o for o in self._outcomes if o.number == request.number]
        self._outcomes.remove(outcome)
        return outcome

    def proposed(self, request: JobRequest) -> None:
        self._propose(request)

    async def unneeded(self, jobs: Container[str]) -> None:
        await self._end_unneeded(lambda: jobs)

    async def committed(self, outcome: Outcome, *, taken: bool = True) -> None:
        await self._commit(outcome, taken)

    async def cancelled(self, wait_s: float) -> list[AttemptRecord]:
        return await self._cancel(wait_s)

    async def closed(self, *, tidy: bool) -> None:
        await self._close(tidy)


class Session:
    """One process of the engine.

    Attributes:
        sites: the process's access to each of the worlds.
        said: what it wrote to the log.
        full: whether there is no room here for files.
        died: whether it was killed.
    """

    def __init__(
        self,
        worlds: Mapping[str, World],
        workdir: Path,
        config: BackendConfig,
        *,
        one_client: bool = False,
        beside: "Session | None" = None,
        presubmit: int = 0,
    ) -> None:
        """Start a process at the worlds' time.

        Args:
            worlds: the sites, by name.
            workdir: the workflow's directory.
            config: of each site.
            one_client: whether names of one world share a client.
            beside: another process that goes on at the same time.
            presubmit: the most jobs at a site that are submitted before they are requested.
        """
        now = max(world.now for world in worlds.values())
        self.loop: VirtualLoop = VirtualLoop(now) if beside is None else beside.loop
        self.loop.around = _around
        self.sites = {name: SimulatedSite(world, name) for name, world in worlds.items()}
        self.said: list[str] = []
        self.full: Callable[[], bool] = lambda: False
        self._state = workdir / ".snakemake/mantik"
        self._synced: dict[str, bytes] = {}
        self._left: float = float("inf")
        self._dead = self.died = False
        self.journal = Journal(workdir / ".snakemake/mantik")
        self.journal.db.executescript(CHECKS)
        self._write = self.journal.write
        self.journal.write = self._written  # type: ignore[method-assign]
        self._sync()
        sites: dict[str, tuple[Site, Planner]] = {}
        shared: dict[int, tuple[SimulatedSite, Site]] = {}
        pools = find_pools(config, None)
        for name, site in self.sites.items():
            site.called = self.point
            site.upload_bytes = UPLOAD_BYTES
            client = (site, with_pools(site, pools))
            if one_client:
                client = shared.setdefault(id(worlds[name]), client)
                self.sites[name] = client[0]
            own = config.model_copy(update={"unicore_api_url": f"https://{client[0].name}.example"})
            sites[name] = (client[1], SimulatedPlanner(own, None, workdir, worlds[name]))
        self.engine = InPlace(
            self.loop, sites, journal=self.journal, workdir=workdir, state=self._state,
            notify=self.said.append, presubmit=presubmit,
        )  # fmt: skip

    def die_at(self, point: int) -> None:
        """Die at the given one of the points from now on: see `point`."""
        self._left = point

    def point(self) -> None:
        """A moment between two things that are seen from outside, at which the process may die."""
        self._left -= 1
        if self._left == 0:
            self.die()
        if self._dead:
            raise asyncio.CancelledError

    def die(self) -> None:
        self._dead = True
        self._over()

    def _sync(self) -> None:
        files = (path for path in self._state.glob("journal*") if path.is_file())
        self._synced = {path.name: path.read_bytes() for path in files}

    def lose_power(self) -> None:
        """What the disk holds after a power cut: of the journal what was synced."""
        for path in self._state.glob("journal*"):
            if path.is_file():
                path.unlink()
        for name, content in self._synced.items():
            if not name.endswith("-shm"):  # it is in memory, and made anew
                (self._state / name).write_bytes(content)

    def around(self, work: object) -> None:
        """Before a thread does some work, and after it (None)."""
        self.point()
        if getattr(work, "__name__", "") in WRITES and self.full():
            raise OSError(errno.ENOSPC, "No space left on device")

    @contextmanager
    def _written(self) -> Iterator[Any]:
        self.point()
        with self._write() as db:
            yield db
        # SQLite has synced its log where `synchronous` is FULL.
        if db.execute("PRAGMA synchronous").fetchone()[0] == FULL:
            self._sync()
        self.point()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` and end.

        Raises:
            Died: before that.
        """
        run_all({self: work})
        self.result()

    def begin(self, work: Coroutine[Any, Any, None], over: Callable[[], None]) -> None:
        """Begin with `work`; `over` is called when that has ended, or this process."""
        self._over = over
        token = _SESSION.set(self)
        self._task = self.loop.create_task(work)
        _SESSION.reset(token)

        def done(task: asyncio.Task[None]) -> None:
            if not self._dead:
                over()
            elif not task.cancelled():
                task.exception()  # nobody asks for what a dead one says

        self._task.add_done_callback(done)

    def end(self) -> None:
        """Nothing acts any more; the journal is closed by `bury`."""
        self.died, self._dead = self._dead, True

    def bury(self) -> None:
        """What the kernel does for a dead process."""
        self.journal.close()

    def result(self) -> None:
        """Raise what the work raised, if it did.

        Raises:
            Died: the process did before.
        """
        if self.died:
            raise Died
        self._task.result()


def run_all(works: Mapping[Session, Coroutine[Any, Any, None]]) -> None:
    """Let processes that share a loop do their work side by side until each has ended, or died."""
    loop = next(iter(works)).loop
    going = set(works)

    def over(session: Session) -> None:
        going.discard(session)
        if not going:
            loop.stop()

    for session, work in works.items():
        session.begin(work, partial(over, session))
    lost = list[str]()
    loop.set_exception_handler(
        lambda _, context: lost.append(f"{context['message']}: {context.get('future')}")
    )
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        for session in works:
            session.end()
        # A seed plays the same each time: by number, since a set has no order.
        left = sorted(asyncio.all_tasks(loop), key=lambda task: int(task.get_name()[5:]))
        for one in left:
            one.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
        for session in works:
            session.bury()
    assert not lost or any(session.died for session in works), f"nobody takes errors: {lost}"


def no_project_files() -> ProjectFiles:
    return ProjectFiles((), 0, ())
