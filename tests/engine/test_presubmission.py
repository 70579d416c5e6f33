"""Jobs that are submitted before their inputs exist, at a simulated site."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from snakemake_executor_plugin_mantik.engine.dispatch import Dispatcher
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.jobs.segments import Continuation
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec, OutputFile
from snakemake_executor_plugin_mantik.journal import AttemptState, read_history
from tests.support.controller import request
from tests.support.laptop import Session, no_project_files
from tests.support.schedules import config
from tests.support.simulated import Fault
from tests.support.world import STEPS, Fate, Habits, World

LAYERS, WIDTH = 5, 6


def behind(number: int, *makers: JobRequest) -> JobRequest:
    paths = [maker.outputs[0].path for maker in makers]
    unmade = {path: maker.job for path, maker in zip(paths, makers, strict=True)}
    return replace(request(number, *paths), unmade=unmade)


def scatter_and_gather() -> list[JobRequest]:
    """Layers of jobs that all need the one before, each layer followed by one that needs all."""
    jobs = [request(0)]
    for _ in range(LAYERS):
        first = len(jobs)
        jobs += [behind(number, jobs[-1]) for number in range(first, first + WIDTH)]
        jobs.append(behind(len(jobs), *jobs[first:]))
    return jobs


Scenario = Callable[[Session], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[World, Scenario], Session]:
    def run(world: World, scenario: Scenario) -> Session:
        workdir = tmp_path / "flow"
        workdir.mkdir()
        session = Session({"sim": world}, workdir, config(2, 60, 30, 10), presubmit=100)

        async def whole() -> None:
            await session.engine.opened(no_project_files(), "sim")
            await scenario(session)

        session.run(whole())
        return session

    return run


Player = Callable[[World, Scenario], Session]


def named(number: int) -> Callable[[JobSpec], bool]:
    return lambda spec: spec.name == request(number).name


def test_each_job_behind_a_failed_one_is_ended_once(play: Player) -> None:
    jobs = scatter_and_gather()
    # The journal does not take a clock for the site's that is off by more than a minute.
    world = World(
        code=lambda spec: int(named(0)(spec)), duration=lambda spec: 10.0,
        habits=Habits(clock=time.time()),
    )  # fmt: skip

    async def scenario(session: Session) -> None:
        for job in jobs[1:]:
            session.engine.proposed(job)
        outcome = await session.engine.job(jobs[0])
        assert not outcome.succeeded
        assert world.jobs, "they were submitted"
        await asyncio.sleep(600.0)
        assert session.journal.open_presubmitted() == [], "they end at once, not with the run"
        known = read_history(session.journal.path.parent)
        started = [record.times for record in known if record.before and record.waited is not None]
        assert started
        assert None not in [times.behind for times in started], "not all of it in the queue"
        await session.engine.closed(tidy=True)
        left = session.journal.all_open_attempts()
        assert [record.job for record in left] == [jobs[0].job], "Snakemake has not committed it"

    session = play(world, scenario)
    assert [run.job for run in world.runs] == [jobs[0].name]
    assert session.sites["sim"].calls["submit"] <= len(jobs)
    assert session.sites["sim"].calls["cancel"] <= len(jobs)


def test_a_job_behind_one_whose_second_submission_is_refused_is_ended(play: Player) -> None:
    jobs = [request(0), behind(1, request(0))]
    lost = Fate(starts=(), denied=True)
    world = World(lambda spec: lost if named(0)(spec) else Fate())

    async def scenario(session: Session) -> None:
        session.engine.proposed(jobs[1])
        job = asyncio.ensure_future(session.engine.job(jobs[0]))
        while len(world.jobs) < 2:
            await asyncio.sleep(1.0)
        world.full = True
        assert "no space left" in (await job).message
        world.full = False
        await asyncio.sleep(600.0)
        assert session.journal.open_presubmitted() == []

    session = play(world, scenario)
    assert "submitting it again" in "\n".join(session.said)


def test_those_that_were_not_requested_end_with_the_run(play: Player) -> None:
    jobs = [request(0), behind(1, request(0))]
    world = World(lambda spec: Fate(starts=(1000.0,)) if named(1)(spec) else Fate())

    async def scenario(session: Session) -> None:
        session.engine.proposed(jobs[1])
        assert (await session.engine.job(jobs[0])).succeeded
        [record] = session.journal.open_presubmitted()
        await session.engine.closed(tidy=True)
        assert session.journal.attempts([record.id])[0].state is AttemptState.ABANDONED

    said = "\n".join(play(world, scenario).said)
    assert f"not needed any more: {jobs[1].name}" in said
    assert "may still run" not in said
    assert len(world.runs) == 1


def test_a_cancelled_run_ends_them_once(play: Player) -> None:
    jobs = [request(0), behind(1, request(0))]
    world = World(duration=lambda spec: 10_000.0)

    async def scenario(session: Session) -> None:
        session.engine.proposed(jobs[1])
        session.engine._start(jobs[0])
        while len(world.jobs) < 2 or not world.runs:
            await asyncio.sleep(1.0)
        assert await session.engine.cancelled(300.0) == []
        calls = session.sites["sim"].calls["cancel"]
        await session.engine.closed(tidy=True)
        assert session.sites["sim"].calls["cancel"] == calls
        assert session.journal.all_open_attempts() == []

    assert "not needed any more" not in "\n".join(play(world, scenario).said)


@pytest.mark.parametrize(
    ("starts", "room", "withdrawn"),
    [(500.0, True, True), (500.0, False, False), (99.0, True, False)],
)
def test_a_job_that_has_not_started_in_time_is_withdrawn(
    play: Player, starts: float, room: bool, withdrawn: bool
) -> None:
    """Not if the site has no room to revoke it, nor if it has just started."""
    world = World(lambda spec: Fate(starts=(starts,)), duration=lambda spec: 3000.0)

    async def scenario(session: Session) -> None:
        site, began = session.sites["sim"], world.now
        site.fault = lambda method, about: (
            "rejected" if method == "make_directory" and world.now > began + 90 and not room else ""
        )
        outcome = await session.engine.job(replace(request(0), patience_s=100))
        assert (outcome.withdrawn, outcome.succeeded) == (withdrawn, not withdrawn)
        assert site.calls["cancel"] == withdrawn
        await session.engine.closed(tidy=True)

    play(world, scenario)
    assert [run.how for run in world.runs] == [] if withdrawn else ["exit 0"]


def test_a_job_behind_another_goes_on_in_the_segments_that_wait_for_it(play: Player) -> None:
    first = request(0)
    most = STEPS + 2
    job = behind(1, first)
    job = replace(
        job,
        outputs=(*job.outputs, OutputFile("out/1.log", "log")),
        continuation=Continuation(most, ("ckpt",)),
        resources={"runtime": 1440},
    )
    world = World(duration=lambda spec: 1000.0)

    async def scenario(session: Session) -> None:
        session.engine.proposed(job)
        assert (await session.engine.job(first)).succeeded
        outcome = await session.engine.job(replace(job, unmade={}))
        assert outcome.succeeded
        [last] = session.journal.attempts([outcome.attempt_id])
        assert (last.segment, last.log_files) == (STEPS - 1, ("out/1.log",))
        await session.engine.closed(tidy=True)

    session = play(world, scenario)
    assert not [line for line in session.said if "are not used" in line]
    assert [run.job for run in world.runs] == [first.name] + STEPS * [job.name], "it has gone on"
    assert session.sites["sim"].calls["submit"] == 1 + most


def test_no_job_is_submitted_behind_one_that_fails_meanwhile(
    play: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its outputs cannot be fetched: its attempt stays open, but this run does not follow it."""
    world = World(duration=lambda spec: 1.0, place=lambda path: "alone")

    async def scenario(session: Session) -> None:
        site, failed = session.sites["sim"], asyncio.Event()
        ids = site.scheduler_ids

        async def late(asked: Sequence[str]) -> dict[str, str]:
            await failed.wait()
            return await ids(asked)

        monkeypatch.setattr(site, "scheduler_ids", late)
        site.fault = lambda method, about: "rejected" if about == "out/0" else ""
        session.engine.proposed(behind(1, request(0)))
        outcome = await session.engine.job(request(0))
        assert (outcome.succeeded, outcome.attempt_id) == (False, "")
        failed.set()
        await asyncio.sleep(300.0)
        await session.engine.closed(tidy=True)

    session = play(world, scenario)
    assert session.sites["sim"].calls["submit"] == 1


def test_no_job_is_submitted_behind_one_that_ended_before_it_was_known(
    play: Player, tmp_path: Path
) -> None:
    """What it made was not recorded for the other: its attempt could not be adopted."""
    [first, job] = jobs = [request(0), behind(1, request(0))]
    old = replace(request(1, "data"), command="make 1 of something else", number=9)
    world = World(duration=lambda spec: 1000.0 if spec.command == old.command else 1.0)

    async def scenario(session: Session) -> None:
        (tmp_path / "flow/data").write_bytes(b"old")
        session.engine._start(old)
        while not world.runs:
            await asyncio.sleep(1.0)
        [task] = session.engine._jobs.values()
        task.cancel()
        await asyncio.wait([task])
        slow = iter(["slowly"])
        session.sites["sim"].fault = lambda method, about: cast(
            "Fault", next(slow, "") if method == "cancel" else ""
        )
        session.engine.proposed(job)  # it has to wait for the end of the old attempt
        outcome = await session.engine.job(first)
        await asyncio.sleep(300.0)
        await session.engine.committed(outcome)
        outcome = await session.engine.job(replace(job, unmade={}))
        assert outcome.succeeded
        await session.engine.closed(tidy=True)

    session = play(world, scenario)
    assert session.sites["sim"].calls["submit"] == 1 + len(jobs)
    assert not [line for line in session.said if "not used" in line and "command" not in line]


def test_no_job_is_submitted_behind_one_that_is_being_ended(play: Player) -> None:
    """Nothing ended it, and what is requested instead of that one waited for it for ever."""
    old = behind(1, request(0))
    new = replace(old, command="make 1 of something else", unmade={})
    world = World(duration=lambda spec: 1000.0 if spec.command == old.command else 1.0)

    async def scenario(session: Session) -> None:
        session.engine.proposed(old)
        await session.engine.committed(await session.engine.job(request(0)))
        while len(world.runs) < 2:
            await asyncio.sleep(1.0)
        session.sites["sim"].fault = lambda method, about: "slowly" if method == "cancel" else ""
        job = asyncio.ensure_future(session.engine.job(new))
        session.engine.proposed(behind(2, new))
        assert (await job).succeeded
        assert [record.name for record in session.journal.open_presubmitted()] == [request(2).name]
        await session.engine.closed(tidy=True)

    session = play(world, scenario)
    assert session.sites["sim"].calls["submit"] == 4


def test_no_attempt_is_made_behind_one_that_fails_while_its_files_are_looked_at(
    play: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(duration=lambda spec: 1.0, place=lambda path: "alone")
    look_at_files = Dispatcher.look_at_files

    async def scenario(session: Session) -> None:
        failed = asyncio.Event()

        async def late(self: Any, request: JobRequest, makers: Any = ()) -> Any:
            if request.unmade:
                await failed.wait()
            return await look_at_files(self, request, makers)

        monkeypatch.setattr(Dispatcher, "look_at_files", late)
        session.sites["sim"].fault = lambda method, about: "rejected" if about == "out/0" else ""
        session.engine.proposed(behind(1, request(0)))
        outcome = await session.engine.job(request(0))
        assert (outcome.succeeded, outcome.attempt_id) == (False, "")
        failed.set()
        await asyncio.sleep(300.0)
        assert [record.job for record in session.journal._attempts("", ())] == [request(0).job]
        await session.engine.closed(tidy=True)

    session = play(world, scenario)
    assert session.sites["sim"].calls["submit"] == 1


def test_no_job_is_submitted_behind_one_that_is_requested_otherwise_while_it_is_sent(
    play: Player,
) -> None:
    old = behind(1, request(0))
    new = replace(old, command="make 1 of something else", unmade={})
    world = World(duration=lambda spec: 1000.0 if spec.command == old.command else 1.0)

    async def scenario(session: Session) -> None:
        def fault(method: str, about: str) -> Fault:
            second = (method, len(world.jobs)) == ("submit", 1)
            return "slowly" if second or method == "cancel" else ""

        session.sites["sim"].fault = fault
        session.engine.proposed(old)
        session.engine.proposed(behind(2, new))
        await session.engine.committed(await session.engine.job(request(0)))
        assert (await session.engine.job(new)).succeeded
        assert [record.name for record in session.journal.open_presubmitted()] == [request(2).name]
        await session.engine.closed(tidy=True)

    session = play(world, scenario)
    assert session.sites["sim"].calls["submit"] == 4


def test_a_job_runs_again_only_when_one_behind_its_former_attempt_has_ended(play: Player) -> None:
    """That one was just about to be submitted when Snakemake did not take what it reads."""
    late = replace(behind(1, request(0)), secrets={"TOKEN": "x"})
    submitted: list[tuple[str, list[str]]] = []

    async def scenario(session: Session) -> None:
        def note(spec: JobSpec) -> Fate:
            submitted.append((spec.name, [r.name for r in session.journal.open_presubmitted()]))
            return Fate()

        world.fate = note
        session.sites["sim"].fault = lambda method, about: "slowly" if "secrets" in about else ""
        session.engine.proposed(late)
        outcome = await session.engine.job(request(0))
        await session.engine.committed(outcome, taken=False)
        assert (await session.engine.job(request(0))).succeeded
        await session.engine.closed(tidy=True)

    world = World(duration=lambda spec: 1.0)
    play(world, scenario)
    first, behind_it, again = [name for name, _ in submitted[:3]]
    assert (first, behind_it, again) == (request(0).name, late.name, request(0).name)
    assert submitted[2][1] == []


def test_a_presubmitted_job_is_watched_although_no_slot_is_free(play: Player) -> None:
    """The others hold all slots for a long time: `MaxJobs` is 4."""
    jobs = [request(0), behind(1, request(0))]
    long = [request(number) for number in range(2, 6)]
    world = World(duration=lambda spec: 10.0 if named(0)(spec) or named(1)(spec) else 10_000.0)

    async def scenario(session: Session) -> None:
        session.engine.proposed(jobs[1])
        assert (await session.engine.job(jobs[0])).succeeded
        while not any(run.job == jobs[1].name for run in world.runs):
            await asyncio.sleep(1.0)
        for job in long:
            session.engine._start(job)
        while len(world.jobs) < 2 + len(long):
            await asyncio.sleep(1.0)
        assert (await session.engine.job(replace(jobs[1], unmade={}))).succeeded
        assert world.now < 1000.0
        await session.engine.cancelled(300.0)
        await session.engine.closed(tidy=True)

    play(world, scenario)
