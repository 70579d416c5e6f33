"""No job lost, doubled or misreported, whatever comes: random schedules in virtual time.

Each seed is a run of some jobs at a simulated site, with faults, lost answers, late, repeated and
missing starts, jobs that are killed, and a controller that is killed in the middle and started
again. A failure names its seed: MANTIK_SEEDS=17-17 as environment variable repeats it.
"""

import asyncio
import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.engine.request import JobNumber, JobRequest, Outcome
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec
from tests.support.controller import Controller, Killed, request
from tests.support.seeds import seeds
from tests.support.simulated import Fate, Fault, World, result

DAY_S = 86400.0
SEEDS = seeds(80)
BLOCK = 40
RETRIES = 40

Jobs = list[tuple[JobRequest, list[int]]]
"""Jobs, each with the numbers of those that it needs."""


@dataclass
class Schedule:
    """All chance of one seed."""

    seed: int
    chance: random.Random = field(init=False)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        chance = self.chance
        self.faults = chance.choice([0.0, 0.02, 0.1, 0.3])
        self.kills = chance.choice([0, 0, 1, 2, 5])
        self.mishaps = chance.choice([0.0, 0.1, 0.3])
        self.slow = chance.choice([False, False, True])
        self.outage = (chance.uniform(0, 300), chance.choice([0.0, 600.0, 20000.0]))
        self.causes = 0

    def fate(self, spec: JobSpec) -> Fate:
        chance = self.chance
        delay = chance.choice([0.5, 3.0, 30.0, 400.0, *([DAY_S] if self.slow else [])])
        if chance.random() < self.mishaps:
            kinds = ["never", "thrice", "killed", "refused"]
            # The site ends after a day what it runs and cannot be told to keep.
            kind = chance.choice(kinds if self.slow else [*kinds, "denied"])
            if kind == "never":
                return Fate(starts=(), denied=True)
            if kind == "denied":
                return Fate(starts=(delay,), denied=True)
            if kind == "thrice":
                return Fate(starts=tuple(delay + chance.uniform(0, 200) for _ in range(3)))
            self.causes += 1
            if kind == "killed":
                reason = chance.choice([Reason.OUT_OF_MEMORY, Reason.NODE_FAILURE])
                return Fate(starts=(delay,), killed_after=chance.uniform(0, 90), reason=reason)
            return Fate(refused=True)
        return Fate(starts=(delay,))

    def duration(self, spec: JobSpec) -> float:
        return self.chance.choice([100.0, 130.0, 3000.0, *([2 * DAY_S] if self.slow else [])])

    def place(self, path: str) -> str:
        return self.chance.choice(["marker", "archive", "alone"])

    def fault(self, controller: Controller, method: str) -> Fault:
        if method == "open":
            return ""  # without an answer to that nothing begins
        begin, length = self.outage
        if begin <= controller.loop.time() < begin + length:
            return "unreachable"
        if self.chance.random() >= self.faults:
            return ""
        kinds: list[Fault] = ["unreachable", "lost", "busy", "unauthorized"]
        if method in ("states", "find", "submit"):
            kinds.append("not found")
        return self.chance.choice(kinds)


def requests_of(schedule: Schedule, workdir: Path) -> Jobs:
    """Some jobs, and the numbers of those that they need."""
    (workdir / "data").mkdir(parents=True)
    for name in "ab":
        (workdir / "data" / name).write_text(f"{name} {schedule.seed}")
    # One that is too large to travel in a script.
    (workdir / "data/large").write_bytes(schedule.chance.randbytes(300_000))
    jobs = []
    for number in range(schedule.chance.randint(1, 5)):
        needs = [n for n in range(number) if schedule.chance.random() < 0.3]
        inputs = schedule.chance.sample(["data/a", "data/b", "data/large"], 2)
        jobs.append((request(number, *inputs, *(f"out/{n}" for n in needs)), needs))
    return jobs


async def play(
    controller: Controller, schedule: Schedule, jobs: Jobs, done: set[JobNumber]
) -> None:
    """What Snakemake does: start what can start, report, retry what failed."""

    async def one(job: JobRequest, needs: list[int]) -> None:
        await asyncio.gather(*(finished[n].wait() for n in needs))
        for _ in range(RETRIES):
            outcome: Outcome = await controller.job(job)
            if outcome.succeeded:
                done.add(job.number)
                finished[job.number].set()
                return
            schedule.failed.append(f"{job.name}: {outcome.message}")
        raise AssertionError(f"it never succeeds: {schedule.failed}")

    finished = {job.number: asyncio.Event() for job, _ in jobs}
    for number in done:
        finished[number].set()
    await controller.open()
    await asyncio.gather(*(one(j, n) for j, n in jobs if j.number not in done))


def run_schedule(schedule: Schedule, workdir: Path) -> tuple[World, int]:
    """Play a schedule to its end; the world, and how often the controller was killed."""
    world = World(schedule.fate, schedule.duration, place=schedule.place)
    jobs = requests_of(schedule, workdir)
    done: set[JobNumber] = set()
    killed = 0
    with ExitStack() as graves:
        while True:
            controller = Controller(world, workdir)
            graves.callback(controller.forget)
            controller.site.fault = lambda method, _, c=controller: schedule.fault(c, method)  # type: ignore[misc]
            if killed < schedule.kills:
                controller.kill_at(schedule.chance.randint(1, 150))
            try:
                controller.run(play(controller, schedule, jobs, done))
            except Killed:
                killed += 1
                controller.bury()
                # It takes a while until somebody starts it again.
                world.advance(world.now + schedule.chance.choice([0.0, 10.0, 5000.0]))
            else:
                break
        check(world, schedule, jobs, workdir)
        return world, killed


def check(world: World, schedule: Schedule, jobs: Jobs, workdir: Path) -> None:
    """Each job ran exactly once unless it was killed, and its outputs are what it makes."""
    for job, _ in jobs:
        runs = [run for run in world.runs if run.job == job.name]
        assert [run.how for run in runs].count("exit 0") == 1, runs
        assert {run.how for run in runs} <= {"exit 0", "killed"}, runs
        ends = [run.ended for run in runs]
        for run, before in zip(runs[1:], ends, strict=False):
            assert (before or 1e99) <= run.begun, f"two at the same time: {runs}"
        inputs = {path: (workdir / path).read_bytes() for path in job.inputs}
        for output in job.outputs:
            expected = result(job.command, output.path, inputs)
            assert (workdir / output.path).read_bytes() == expected, output
    killed = [run for run in world.runs if run.how == "killed"]
    assert len(schedule.failed) <= schedule.causes, schedule.failed
    assert len(killed) <= schedule.causes, killed
    assert not list(workdir.rglob("*.mantik-part")), "nothing half is left"
    assert not list((workdir / ".state/transfers/sim").iterdir()), "nothing is left on its way"


@pytest.mark.parametrize("block", range(0, len(SEEDS), BLOCK))
def test_no_job_lost_doubled_or_misreported(block: int, tmp_path: Path) -> None:
    for seed in SEEDS[block : block + BLOCK]:
        try:
            run_schedule(Schedule(seed), tmp_path / str(seed))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
