"""A controller of a simulated site that a test can start, kill and start again."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pytest

from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.engine.place import Places
from snakemake_executor_plugin_mantik.engine.request import JobRequest, Outcome
from snakemake_executor_plugin_mantik.engine.site_runner import SiteRunner
from snakemake_executor_plugin_mantik.engine.workflow_context import WorkflowContext
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.journal import (
    AttemptRecord,
    AttemptState,
    Journal,
    read_history,
)
from tests.support.simulated import SimulatedPlanner, SimulatedSite, World
from tests.support.virtualtime import VirtualLoop

T = TypeVar("T")

CONFIG = BackendConfig.model_validate(
    {"UnicoreApiUrl": "https://sim.example/rest/core", "Resources": {"Queue": "batch"}}
)


def request(number: int, *inputs: str, outputs: Sequence[str] | None = None) -> JobRequest:
    """A job that makes `out/NUMBER` of its inputs."""
    made = outputs if outputs is not None else (f"out/{number}",)
    return JobRequest(
        number=number, job=f"job-{number}", rule="make", name=f"job-{number}", site="sim",
        command=f"make {number}", shell="bash", resources={}, threads=1, variables={},
        inputs=inputs, outputs=tuple(OutputFile(path) for path in made),
    )  # fmt: skip


@dataclass
class Controller:
    """One process: a loop in virtual time, a journal, and the work of one site."""

    world: World
    workdir: Path
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.site = SimulatedSite(self.world)
        self.journal = Journal(self.workdir / ".snakemake/mantik")
        self._running: list[asyncio.Task[Any]] = []
        self._killed = False

    @cached_property
    def loop(self) -> VirtualLoop:
        """The loop of a controller that no async test runs; it starts at the world's time."""
        return VirtualLoop(self.world.now)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`.

        Raises:
            Killed: if `kill` was called meanwhile.
        """
        task = self.loop.create_task(work)
        self._running.append(task)
        task.add_done_callback(lambda _: None if self._killed else self.loop.stop())
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            asyncio.set_event_loop(None)
        if self._killed:
            raise Killed
        return task.result()

    async def open(self) -> SiteRunner:
        facts = await self.site.open()
        state = self.workdir / ".snakemake/mantik"
        places = Places(
            WorkflowContext(self.journal, self.workdir, state, self.said.append, self._give_up)
        )
        while not hasattr(self, "place"):
            with suppress(TimeoutError):  # the user would start it again
                self.place = await places.at(self.site, facts, CONFIG.site, "url")
        self.journal.set_site("sim", "url", facts.workspace, self.place.id)
        planner = SimulatedPlanner(CONFIG, None, self.workdir, self.world)
        self.work = SiteRunner(self.site, facts, planner, self.place, places)
        return self.work

    async def _give_up(self, records: Sequence[AttemptRecord]) -> None:
        await self.work.canceller.give_up(records)

    async def job(self, asked: JobRequest) -> Outcome:
        """Run a job as Snakemake sees to it: old outputs go first, the outcome is committed."""
        for output in asked.outputs:
            if output.keep:
                continue
            (self.workdir / output.path).unlink(missing_ok=True)
        outcome = await self.work.run(asked)
        if outcome.attempt_id:
            await self.work.commit(outcome, asked)
        return outcome

    def kill(self) -> None:
        """Die as by kill -9; to be called from within what `run` runs."""
        self._killed = True
        self.loop.stop()

    def bury(self) -> None:
        """What the kernel does for a dead process; `forget` it when nobody looks any more."""
        self.journal.close()

    def forget(self) -> None:
        """Let go what it was doing; done earlier a dead one would tidy up, as no dead one can."""
        self.site.called, self._killed = None, True
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(_all(tasks))
        self.loop.close()
        self.journal.close()


async def _all(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


class Killed(Exception):  # noqa: N818 - reads as what it says
    """The controller was killed."""


def simulate(
    workdir: Path, world: World, play: Callable[[Controller], Coroutine[Any, Any, T]]
) -> T:
    """The result of `play` with a controller whose site is open."""

    async def opened() -> T:
        await controller.open()
        return await play(controller)

    controller = Controller(world, workdir)
    try:
        return controller.run(opened())
    finally:
        controller.forget()


def killed_when(
    workdir: Path, world: World, dead: Callable[[Controller], bool], job: JobRequest | None = None
) -> Controller:
    """Run a job until a condition comes true, then die."""

    async def play() -> Outcome:
        await controller.open()
        return await controller.job(job or request(1))

    def called() -> None:
        if dead(controller):
            controller.kill()

    controller = Controller(world, workdir)
    controller.site.called = called
    with pytest.raises(Killed):
        controller.run(play())
    controller.bury()
    return controller


def run_one(workdir: Path, world: World, **values: object) -> Outcome:
    """A run of one job by a new controller."""
    job = replace(request(1), **values)  # type: ignore[arg-type]
    return simulate(workdir, world, lambda controller: controller.job(job))


def states(workdir: Path) -> list[AttemptState]:
    """The states of all attempts that the journal knows."""
    return [record.state for record in read_history(workdir / ".snakemake/mantik")]
