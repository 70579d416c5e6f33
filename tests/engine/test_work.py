"""The life of a job at a simulated site: coming back, giving up, purges, refusals."""

import asyncio
import os
import re
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.engine.request import Outcome
from snakemake_executor_plugin_mantik.errors import SiteRejected
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.journal import Journal, TryState, history
from tests.support.controller import Controller, Killed, request, simulate
from tests.support.simulated import Fate, Fault, World

DAY_S = 86400.0


def killed_when(
    workdir: Path, world: World, dead: Callable[[Controller], bool], number: int = 1
) -> Controller:
    """Run a job until a condition comes true, then die."""

    async def play() -> Outcome:
        await controller.open()
        return await controller.job(request(number))

    def called() -> None:
        if dead(controller):
            controller.kill()

    controller = Controller(world, workdir)
    controller.site.called = called
    with pytest.raises(Killed):
        controller.run(play())
    controller.bury()
    return controller


def run(workdir: Path, world: World, number: int = 1, **values: object) -> Outcome:
    """A run of one job by a new controller."""
    job = replace(request(number), **values)  # type: ignore[arg-type]
    return simulate(workdir, world, lambda controller: controller.job(job))


def states(workdir: Path) -> list[TryState]:
    return [record.state for record in history(workdir / ".state")]


DEATHS: dict[TryState, Callable[[Controller], bool]] = {
    TryState.PLANNED: lambda c: c.site.calls["make_directory"] == 1,
    TryState.SUBMITTING: lambda c: bool(c.world.jobs),
    TryState.SUBMITTED: lambda c: bool(c.world.runs),
    TryState.ENDED: lambda c: any(r.state is TryState.ENDED for r in c.journal.all_open_tries()),
}


@pytest.mark.parametrize("state", [*DEATHS])
def test_taken_up_in_every_state(tmp_path: Path, state: TryState) -> None:
    world = World()
    if state is TryState.ENDED:
        # The first call of the site after its end is that of another job.
        other = asyncio.Event()

        async def play(controller: Controller) -> None:
            await controller.work.run(request(1))
            other.set()

        simulate(tmp_path, world, play)
        (tmp_path / "out/1").unlink()
    else:
        killed_when(tmp_path, world, DEATHS[state]).forget()
    assert states(tmp_path) == [state]

    assert run(tmp_path, world).succeeded

    assert [r.how for r in world.runs] == ["exit 0"]
    assert states(tmp_path) == [TryState.DONE]
    assert (tmp_path / "out/1").exists()


UPDATES = replace(request(1), outputs=(OutputFile("out/1", keep=True),))


def test_what_was_updated_is_not_updated_again(tmp_path: Path) -> None:
    """Killed when the new content was here, and before Snakemake could take it."""
    world = World()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/1").write_text("before")
    simulate(tmp_path, world, lambda controller: controller.work.run(UPDATES))
    assert (tmp_path / "out/1").read_text() != "before"

    assert simulate(tmp_path, world, lambda controller: controller.job(UPDATES)).succeeded

    assert len(world.runs) == 1
    assert states(tmp_path) == [TryState.DONE]


@pytest.mark.parametrize("changed", ["by somebody", None])
def test_what_somebody_else_has_changed_is_updated_anew(
    tmp_path: Path, changed: str | None
) -> None:
    world = World()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/1").write_text("before")
    simulate(tmp_path, world, lambda controller: controller.work.run(UPDATES))
    (tmp_path / "out/1").unlink()
    if changed is not None:
        (tmp_path / "out/1").write_text(changed)

    assert simulate(tmp_path, world, lambda controller: controller.job(UPDATES)).succeeded

    assert len(world.runs) == 2


def test_where_an_update_began_tells_one_try_from_another(tmp_path: Path) -> None:
    world = World(duration=lambda spec: 1000.0)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/1").write_text("before")

    async def play() -> Outcome:
        await controller.open()
        return await controller.job(UPDATES)

    controller = Controller(world, tmp_path)
    controller.site.called = lambda: controller.kill() if world.runs else None
    with pytest.raises(Killed):
        controller.run(play())
    controller.bury()
    controller.forget()
    (tmp_path / "out/1").write_text("by somebody")

    assert simulate(tmp_path, world, lambda controller: controller.job(UPDATES)).succeeded

    assert [r.how for r in world.runs] == ["exit 143", "exit 0"]


def test_changed_job_is_given_up_before_another_starts(tmp_path: Path) -> None:
    world = World(duration=lambda spec: 1000.0)
    killed_when(tmp_path, world, lambda c: bool(c.world.runs)).forget()

    assert run(tmp_path, world, command="another").succeeded

    assert [r.how for r in world.runs] == ["exit 143", "exit 0"]
    first, second = world.runs
    assert first.ended is not None
    assert first.ended <= second.begun


Play = Callable[[Controller], Coroutine[Any, Any, Outcome]]


def with_sources(sources: dict[str, str], **values: Any) -> Play:
    """A run of one job in a working directory with these sources."""

    async def play(controller: Controller) -> Outcome:
        controller.work.sources = sources
        return await controller.job(replace(request(1, "data/x"), **values))

    return play


def left_running(workdir: Path, world: World, play: Play) -> None:
    """Run a job until it runs at the site, then die."""

    async def opened() -> Outcome:
        await controller.open()
        return await play(controller)

    controller = Controller(world, workdir)
    controller.site.called = lambda: controller.kill() if world.runs else None
    with pytest.raises(Killed):
        controller.run(opened())
    controller.bury()
    controller.forget()


BEFORE = {"scripts/train.py": "a", "lib.py": "b", "README": "c"}
COMMAND = "python scripts/train.py"


@pytest.mark.parametrize(
    ("values", "sources", "told"),
    [
        ({"command": f"{COMMAND} --fast"}, {}, "its command"),
        ({"parameters": "alpha=2"}, {}, "its parameters"),
        ({"variables": {"A": "2"}}, {}, "its environment variables"),
        ({"outputs": (OutputFile("out/1"), OutputFile("out/2"))}, {}, "what it makes"),
        ({}, {"scripts/train.py": "new"}, "scripts/train.py"),
        ({}, {"data/x": "another content"}, "data/x"),
    ],
)
def test_what_changed_is_told_and_nothing_old_is_used(
    tmp_path: Path, values: dict[str, Any], sources: dict[str, str], told: str
) -> None:
    world = World(duration=lambda spec: 1000.0)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("1")
    left_running(tmp_path, world, with_sources(BEFORE, command=COMMAND))
    (tmp_path / "data/x").write_text(sources.pop("data/x", "1"))

    async def play(controller: Controller) -> list[str]:
        again = with_sources(BEFORE | sources, **{"command": COMMAND, **values})
        assert (await again(controller)).succeeded
        return controller.said

    said = simulate(tmp_path, world, play)

    [line] = [line for line in said if "earlier run" in line]
    assert f"its outputs are not used, since these changed: {told}." in line
    assert [r.how for r in world.runs] == ["exit 143", "exit 0"]


def test_other_resources_and_unnamed_sources_are_told(tmp_path: Path) -> None:
    world = World(duration=lambda spec: 1000.0)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("1")
    left_running(tmp_path, world, with_sources(BEFORE, resources={"mem_mb": 1000}))
    (sent,) = history(tmp_path / ".state")

    async def play(controller: Controller) -> list[str]:
        play = with_sources(BEFORE | {"lib.py": "new"}, resources={"mem_mb": 2000, "runtime": 5})
        assert (await play(controller)).succeeded
        return controller.said

    said = "\n".join(simulate(tmp_path, world, play))

    assert "memory per node in MiB" in said
    assert "walltime in s none instead of 300" in said
    assert f"smk-mantik cancel {sent.id}" in said
    assert "files of the working directory changed since" in said
    assert [r.how for r in world.runs] == ["exit 0"], "it was taken up"


def test_unchanged_job_is_taken_up_without_a_word(tmp_path: Path) -> None:
    world = World(duration=lambda spec: 1000.0)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("1")
    left_running(tmp_path, world, with_sources(BEFORE, command=COMMAND))

    async def play(controller: Controller) -> list[str]:
        assert (await with_sources(dict(BEFORE), command=COMMAND)(controller)).succeeded
        return controller.said

    assert simulate(tmp_path, world, play) == []
    assert [r.how for r in world.runs] == ["exit 0"]


@pytest.mark.parametrize("other", ["2", "1"])
def test_input_that_changes_while_the_job_runs_is_told(tmp_path: Path, other: str) -> None:
    world = World()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("1")

    async def play(controller: Controller) -> list[str]:
        job = asyncio.create_task(controller.job(request(1, "data/x")))
        while not world.runs:
            await asyncio.sleep(1)
        (tmp_path / "data/x").write_text(other)
        os.utime(tmp_path / "data/x", (1, 1))
        assert (await job).succeeded
        return controller.said

    said = simulate(tmp_path, world, play)

    assert ["data/x changed while the job ran" in line for line in said] == [True] * (other != "1")


def test_left_behind_and_come_back_to(tmp_path: Path) -> None:
    """Its site was not among those of a run in between, or had another workspace in it."""
    world = World(duration=lambda spec: 1000.0)
    killed_when(tmp_path, world, lambda c: bool(c.world.runs)).forget()
    with closing(Journal(tmp_path / ".state")) as journal:
        assert len(journal.set_site("sim", "url", "/another")) == 1
        journal.set_site("sim", "url", "/ws")

    assert run(tmp_path, world).succeeded

    first, second = world.runs
    assert [r.how for r in world.runs] == ["exit 143", "exit 0"]
    assert (first.ended or 0.0) <= second.begun, "the two never ran at the same time"
    assert not any(record.may_run for record in history(tmp_path / ".state"))


def test_leftover_of_a_claim_is_no_end(tmp_path: Path) -> None:
    """A start that was killed between making and removing its own file beside the claim."""
    world = World(duration=lambda spec: 1000.0)
    killed_when(tmp_path, world, lambda c: bool(c.world.runs)).forget()
    (record,) = history(tmp_path / ".state")
    world.write(f"{record.paths.claim}.by-node-17", b"owner=x\n")

    assert run(tmp_path, world, command="another").succeeded

    first, second = world.runs
    assert first.ended is not None
    assert first.ended <= second.begun


def test_changed_job_that_waits_is_revoked(tmp_path: Path) -> None:
    world = World(lambda spec: Fate(starts=(5000.0,)))
    killed_when(tmp_path, world, lambda c: c.site.calls["list"] > 3).forget()

    assert run(tmp_path, world, command="another").succeeded

    world.advance(world.now + DAY_S)
    assert len(world.runs) == 1, "the first one never ran, late as it might be"


def test_given_up_through_an_outage(tmp_path: Path) -> None:
    world = World(duration=lambda spec: 1000.0)
    killed_when(tmp_path, world, lambda c: bool(c.world.runs)).forget()

    async def play(controller: Controller) -> Outcome:
        begun = world.now

        def fault(method: str, about: str) -> Fault:
            return "unreachable" if world.now < begun + 3000 else ""

        controller.site.fault = fault
        return await controller.job(replace(request(1), command="another"))

    assert simulate(tmp_path, world, play).succeeded


def test_given_up_though_the_site_only_says_that_it_has_ended_it(tmp_path: Path) -> None:
    """A UNICORE server that runs jobs itself says so at once, and lets them run."""
    world = World(lambda spec: Fate(deaf=True), duration=lambda spec: 1000.0)
    killed_when(tmp_path, world, lambda c: bool(c.world.runs)).forget()
    asked = []

    async def play(controller: Controller) -> list[str]:
        assert (await controller.job(replace(request(1), command="another"))).succeeded
        asked.append(controller.site.calls["cancel"])
        return controller.said

    said = "\n".join(simulate(tmp_path, world, play))
    first, second = world.runs
    assert first.how == "exit 0"
    assert first.ended is not None
    assert first.ended <= second.begun
    assert "says that the job id-1000 has ended, but it goes on; it is told to end again" in said
    assert asked[0] > 2, "and it was"


def test_given_up_though_the_site_has_ended_it_and_denies_its_claim_once(tmp_path: Path) -> None:
    """After a time without an answer: nobody has seen that the job is silent."""
    world = World(lambda spec: Fate(deaf=True), duration=lambda spec: 1000.0)
    killed_when(tmp_path, world, lambda c: bool(c.world.runs)).forget()

    async def play(controller: Controller) -> Outcome:
        begun = world.now
        denied: list[str] = []

        def fault(method: str, about: str) -> Fault:
            if begun + 100 < world.now < begun + 300:
                return "unreachable"
            if method == "list" and world.now >= begun + 300 and not denied:
                denied.append(about)
                return "not found"
            return ""

        controller.site.fault = fault
        return await controller.job(replace(request(1), command="another"))

    assert simulate(tmp_path, world, play).succeeded
    first, second = world.runs
    assert first.how == "exit 0"
    assert first.ended is not None
    assert first.ended <= second.begun


def test_given_up_when_the_site_says_so_and_it_is_silent(tmp_path: Path) -> None:
    """Its node was killed with it: nobody waits for a marker, nor as long as for a lost job."""
    fates = [Fate(killed_after=30.0), Fate()]
    world = World(lambda spec: fates.pop(0), duration=lambda spec: 1000.0)
    killed_when(tmp_path, world, lambda c: bool(c.world.runs)).forget()
    world.advance(world.now + 60.0)
    begun = world.now

    assert run(tmp_path, world, command="another").succeeded
    assert world.runs[1].begun - begun < 200.0


def test_uploads_that_an_earlier_run_lost_cost_one_more_try(tmp_path: Path) -> None:
    """What the script of a try that is taken up names is not known: all that is on its way goes."""
    (tmp_path / "large").write_bytes(os.urandom(600_000))
    (tmp_path / "larger").write_bytes(os.urandom(700_000))
    world = World()

    def job(controller: Controller) -> Coroutine[Any, Any, Outcome]:
        return controller.job(request(1, "large", "larger"))

    async def play() -> Outcome:
        await controller.open()
        controller.site.fault = lambda method, _: "damaged" if method == "put" else ""
        return await job(controller)

    controller = Controller(world, tmp_path)
    controller.site.called = lambda: controller.kill() if controller.world.jobs else None
    with pytest.raises(Killed):
        controller.run(play())
    controller.bury()
    controller.forget()

    assert simulate(tmp_path, world, job).succeeded
    assert len(history(tmp_path / ".state")) == 2


def test_given_up_though_the_site_denies_it_and_it_never_ends(tmp_path: Path) -> None:
    """Its node died and the server forgot it: that must not hang the next run for ever."""
    world = World(duration=lambda spec: 1000.0)
    dead = killed_when(tmp_path, world, lambda c: bool(c.world.runs))
    dead.forget()
    for job_id in list(world.jobs):
        world.forget(job_id)

    assert run(tmp_path, world, command="another").succeeded
    assert world.now < DAY_S


def test_failed_try_of_a_killed_run_is_not_waited_for(tmp_path: Path) -> None:
    """Its end was written down, then the controller died; the site knows nothing of it now."""
    world = World(lambda spec: fates.pop(0))
    fates = [Fate(killed_after=5.0), Fate()]

    async def play(controller: Controller) -> None:
        assert not (await controller.work.run(request(1))).succeeded

    simulate(tmp_path, world, play)
    for job_id in list(world.jobs):
        world.forget(job_id)
    begun = world.now

    assert run(tmp_path, world).succeeded
    assert world.now < begun + 200


def test_results_that_are_gone_are_made_again(tmp_path: Path) -> None:
    world = World()

    async def play(controller: Controller) -> None:
        assert (await controller.work.run(request(1))).succeeded

    simulate(tmp_path, world, play)
    assert states(tmp_path) == [TryState.ENDED]
    world.purge()

    assert run(tmp_path, world).succeeded
    assert [r.how for r in world.runs] == ["exit 0", "exit 0"]


def test_revoked_but_not_written_down(tmp_path: Path) -> None:
    """A second Ctrl-C in the middle of the first: nobody wants the revoked try any more."""
    world = World(lambda spec: Fate(starts=(5000.0,)))
    killed_when(tmp_path, world, lambda c: c.site.calls["list"] > 3).forget()
    (record,) = history(tmp_path / ".state")
    world.make_directory(record.paths.claim)

    assert run(tmp_path, world).succeeded
    assert len(world.runs) == 1


def test_workspace_purged_while_jobs_wait(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x" * 10)
    world = World(lambda spec: Fate(starts=(1000.0,)))

    async def play(controller: Controller) -> Outcome:
        world.after(500, world.purge)
        outcome = await controller.job(request(1, "data"))
        assert any("lost files" in line for line in controller.said)
        return outcome

    assert simulate(tmp_path, world, play).succeeded
    assert [r.how for r in world.runs] == ["exit 0"]


def test_purged_again_and_again_is_told(tmp_path: Path) -> None:
    world = World(lambda spec: Fate(starts=(1000.0,)))

    def purge() -> None:
        world.purge()
        world.after(700, purge)

    world.after(500, purge)
    with pytest.raises(Exception, match="keep disappearing"):
        run(tmp_path, world)


def test_refused_submission_fails_at_once(tmp_path: Path) -> None:
    async def play(controller: Controller) -> None:
        controller.site.fault = lambda method, about: "rejected" if method == "submit" else ""
        await controller.job(request(1))

    with pytest.raises(SiteRejected):
        simulate(tmp_path, World(), play)
    assert states(tmp_path) == [TryState.ABANDONED]


@pytest.mark.parametrize("runs_after_all", [True, False])
def test_repeated_submission_is_refused(tmp_path: Path, runs_after_all: bool) -> None:
    """The first one's answer was lost; the account is out of budget when it is sent again."""
    # It starts between the last look for it and the refusal.
    world = World(lambda spec: Fate(starts=(121.0,) if runs_after_all else (), denied=True))

    async def play(controller: Controller) -> Outcome:
        def fault(method: str, about: str) -> Fault:
            if method != "submit":
                return ""
            if controller.site.calls["submit"] == 1:
                return "lost"
            world.advance(world.now + 100)
            return "rejected"

        controller.site.fault = fault
        return await controller.job(request(1))

    if runs_after_all:
        assert simulate(tmp_path, world, play).succeeded
    else:
        with pytest.raises(SiteRejected):
            simulate(tmp_path, world, play)
        (record,) = history(tmp_path / ".state")
        assert world.files[record.paths.claim] is None, "it is revoked"
    assert len(world.runs) == int(runs_after_all)


@pytest.mark.parametrize("fault", ["busy", "unauthorized", "not found"])
def test_submission_waits_and_says_why(tmp_path: Path, fault: Fault) -> None:
    async def play(controller: Controller) -> Outcome:
        def trouble(method: str, about: str) -> Fault:
            return fault if method == "submit" and controller.world.now < 3000 else ""

        controller.site.fault = trouble
        # Another one runs, so that the site does answer meanwhile.
        running = asyncio.ensure_future(controller.job(request(2)))
        outcome = await controller.job(request(1))
        await running
        told = "has not (done what it was asked|answered|accepted the credentials) for"
        assert any(re.search(told, line) for line in controller.said)
        assert len(controller.said) < 40, "no chatter"
        return outcome

    assert simulate(tmp_path, World(), play).succeeded


def test_marker_that_stays_damaged_fails_the_try_and_not_the_next_one(tmp_path: Path) -> None:
    world = World()

    async def play(controller: Controller) -> None:
        def damage() -> None:
            for path in [p for p in world.files if p.endswith(".0") and "tries" in p]:
                world.files[path] = b"damaged"

        controller.site.called = damage
        first = await controller.job(request(1))
        assert not first.succeeded
        assert "exit code 0" in first.message
        controller.site.called = None
        assert (await controller.job(request(1))).succeeded

    simulate(tmp_path, world, play)


def test_failed_job_stays_failed_whatever_becomes_of_its_log(tmp_path: Path) -> None:
    world = World(code=lambda spec: 3)

    async def play(controller: Controller) -> Outcome:
        controller.site.fault = lambda m, about: "rejected" if about.endswith("/log") else ""
        return await controller.job(request(1))

    outcome = simulate(tmp_path, world, play)

    assert "exit code 3" in outcome.message


def test_full_queue_is_waited_for(tmp_path: Path) -> None:
    """UNICORE takes every job; the scheduler behind it refuses what is one too many."""
    world = World(lambda spec: Fate(refused=world.now < 5000, full=True))

    async def play(controller: Controller) -> Outcome:
        outcome = await controller.job(request(1))
        told = [line for line in controller.said if "no more jobs just now" in line]
        assert len(told) == 1, "once"
        assert "AssocMaxSubmitJobLimit" in told[0]
        assert controller.site.calls["submit"] < 20, "ever more seldom"
        return outcome

    assert simulate(tmp_path, world, play).succeeded
    assert len(world.runs) == 1
    assert [record.state for record in history(tmp_path / ".state")][-1] is TryState.DONE


def test_refusal_that_stays_is_told(tmp_path: Path) -> None:
    """An account out of budget: no waiting helps."""
    world = World(lambda spec: Fate(refused=True))
    outcome = simulate(tmp_path, world, lambda controller: controller.job(request(1)))
    assert not outcome.succeeded
    assert outcome.reason is Reason.REJECTED
    assert "Invalid account" in outcome.message


def test_full_local_disk_keeps_the_results_at_the_site(tmp_path: Path) -> None:
    world = World()
    (tmp_path / "out").write_text("a file where the directory of outputs should be")

    outcome = simulate(tmp_path, world, lambda controller: controller.work.run(request(1)))

    assert not outcome.succeeded
    assert "still at the site" in outcome.message
    (tmp_path / "out").unlink()
    assert run(tmp_path, world).succeeded
    assert len(world.runs) == 1


def test_cost_of_a_job_does_not_grow_with_their_number(tmp_path: Path) -> None:
    def requests(count: int) -> float:
        world = World(lambda spec: Fate(starts=(1.0,)), lambda spec: 10.0)

        async def play(controller: Controller) -> float:
            await asyncio.gather(*(controller.job(request(n)) for n in range(count)))
            calls = controller.site.calls
            return (sum(calls.values()) - calls["list"]) / count

        return simulate(tmp_path / str(count), world, play)

    for count in (5, 90):
        (tmp_path / str(count)).mkdir()
    assert requests(90) <= requests(5) <= 4, "submit, marker, forget"
