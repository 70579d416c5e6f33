"""A job is submitted while its file is on the way, if its queue takes longer, and runs once."""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import PlaceTaken, SiteRejected
from snakemake_executor_plugin_mantik.engine.messages import broken_off_message
from snakemake_executor_plugin_mantik.engine.queue_wait import lacked_time, longest_rest_s
from snakemake_executor_plugin_mantik.engine.request import Outcome
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec
from snakemake_executor_plugin_mantik.journal import (
    Journal,
    Times,
    TryRecord,
    TryState,
    read_history,
)
from tests.support import controller as controllers
from tests.support.controller import CONFIG, Controller, Killed, request
from tests.support.simulated import Fate, Fault, World

UPLOAD_BYTES = 2000
SIZE = 20 * UPLOAD_BYTES
PARTS = 22
"""Three go up at a time, in a minute: eight minutes."""
JOB = request(1, "large")
LONG_S = 3600.0
EARLY, WAITED = "jobs submitted during an upload", "jobs that waited for files"
IN_VAIN = "jobs that waited for files in vain"


def waited(journal: Journal, *seconds: float, queue: str = "batch", follows: str = "") -> None:
    """Earlier tries that have waited in a queue."""
    for number, each in enumerate(seconds):
        record = journal.new_try(
            site="sim",
            job=f"earlier {number}",
            rule="r",
            name="n",
            fingerprint="f",
            follows=follows,
        )
        journal.submitting(record.id, queue)
        journal.ended(record.id, "succeeded", waited=each, ran=1.0, log="")
        journal.done(record.id)


class Upload:
    """What the site does with the parts of a slow upload.

    Attributes:
        parts: the paths of those that were sent.
        fault: asked for each, with their number.
    """

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.fault: Callable[[int], Fault] = lambda number: "slowly"

    def __call__(self, method: str, about: str) -> Fault:
        if method != "put" or "-of-" not in about:
            return ""
        self.parts.append(about)
        return self.fault(len(self.parts))


def configure(monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    site = CONFIG.site.model_copy(update={"inline_limit_bytes": 1000, **settings})
    monkeypatch.setattr(controllers, "CONFIG", CONFIG.model_copy(update={"site": site}))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    configure(monkeypatch)
    (tmp_path / "large").write_bytes(os.urandom(SIZE))
    with closing(Journal(tmp_path / ".state")) as journal:
        waited(journal, LONG_S, 2 * LONG_S, 3 * LONG_S)
    return tmp_path


def prepared(controller: Controller, upload: Upload) -> Controller:
    controller.site.upload_bytes = UPLOAD_BYTES
    controller.site.fault = upload
    return controller


def run(project: Path, world: World, upload: Upload | None = None) -> Outcome:
    """A run of the job by a new controller."""

    async def opened() -> Outcome:
        await controller.open()
        return await controller.job(JOB)

    controller = prepared(Controller(world, project), upload or Upload())
    try:
        return controller.run(opened())
    finally:
        controller.forget()


def tries(project: Path) -> list[TryRecord]:
    return [record for record in read_history(project / ".state") if record.job == JOB.job]


def right(project: Path, world: World) -> bool:
    """Whether the job has made what it makes of the present file, in its only run."""
    [ran] = [one for one in world.runs if one.how == "exit 0"]
    assert len(world.runs) == 1
    content = (project / "out/1").read_bytes()
    return ran.made["out/1"] == content and content == expected(project)


def expected(project: Path) -> bytes:
    from tests.support.world import result

    return result(JOB.command, "out/1", {"large": (project / "large").read_bytes()})


# What the queue has to be like


def test_the_shortest_of_the_last_waits_counts(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        waited(journal, 5.0, *8 * [4000.0], 1000.0)
        assert longest_rest_s(journal, "sim", "batch") == 1000 / 2 - 30
        assert longest_rest_s(journal, "sim", "other") == 0.0
        assert longest_rest_s(journal, "elsewhere", "batch") == 0.0
        waited(journal, 20.0)
        assert longest_rest_s(journal, "sim", "batch") == 0.0


def test_few_or_old_waits_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Journal(tmp_path)) as journal:
        waited(journal, 4000.0, 4000.0)
        assert longest_rest_s(journal, "sim", "batch") == 0.0
        waited(journal, 4000.0)
        assert longest_rest_s(journal, "sim", "batch") > 0.0
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 8 * 86400.0)
        assert longest_rest_s(journal, "sim", "batch") == 0.0


def test_tries_that_waited_for_others_say_nothing(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        waited(journal, 4000.0, 4000.0)
        waited(journal, 4000.0, follows="another")
        assert longest_rest_s(journal, "sim", "batch") == 0.0


def test_a_wait_in_vain_counts_as_a_wait(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        waited(journal, 4000.0, 4000.0, 4000.0)
        record = journal.new_try(site="sim", job="j", rule="r", name="n", fingerprint="f")
        journal.submitting(record.id, "batch")
        journal.abandoned(record.id, "failed: its files had not arrived", times=Times(waited=100.0))
        assert longest_rest_s(journal, "sim", "batch") == 100 / 2 - 30


def test_many_tries_cost_nothing(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        plan = journal._database.db.execute(
            "EXPLAIN QUERY PLAN SELECT created, waited FROM tries WHERE site = 'a' AND queue = 'b'"
            " AND waited IS NOT NULL AND after = '' AND follows = '' ORDER BY rowid DESC LIMIT 8"
        ).fetchall()
        told = " ".join(row["detail"] for row in plan)
        assert "tries_waited" in told
        assert "TEMP B-TREE" not in told, "it would read all of them"


# What a job does


def test_it_is_submitted_during_the_upload_and_runs_once(project: Path) -> None:
    world, upload = World(), Upload()
    assert run(project, world, upload).succeeded
    assert world.waits == {EARLY: 1, WAITED: 1}
    assert len(upload.parts) == PARTS
    assert right(project, world)
    assert [record.state for record in tries(project)] == [TryState.DONE]
    with closing(Journal(project / ".state")) as journal:
        [record] = tries(project)
        assert journal.arrivals.awaited_by(record.id) == []
        assert journal.arrivals.waiting() == []


def test_a_quick_queue_gets_it_afterwards(project: Path) -> None:
    with closing(Journal(project / ".state")) as journal:
        waited(journal, 60.0)
    world = World()
    assert run(project, world).succeeded
    assert not world.waits[EARLY]
    assert not [path for path in world.files if path.endswith("/complete")]


def test_where_it_is_switched_off_the_upload_comes_first(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CONFIG.site.submit_during_upload
    configure(monkeypatch, submit_during_upload=False)
    world = World()
    assert run(project, world).succeeded
    assert not world.waits[EARLY]


@pytest.mark.parametrize("starts", [3.0, 2000.0])
def test_a_new_run_goes_on_with_the_upload(project: Path, starts: float) -> None:
    """Killed when the job waits for its file, or before it has started."""
    world, before, after = World(lambda spec: Fate((starts,))), Upload(), Upload()
    controller = prepared(Controller(world, project), before)

    async def opened() -> Outcome:
        await controller.open()
        return await controller.job(JOB)

    controller.site.called = lambda: controller.kill() if len(before.parts) > 8 else None
    with pytest.raises(Killed):
        controller.run(opened())
    controller.bury()
    controller.forget()
    assert world.waits[EARLY] == 1
    with closing(Journal(project / ".state")) as journal:
        [record] = journal.arrivals.waiting()
        assert JOB.name in broken_off_message([record])

    assert run(project, world, after).succeeded

    assert len(after.parts) < PARTS - 2
    assert len(tries(project)) == 1
    assert right(project, world)


def test_one_that_waits_in_vain_is_submitted_again_when_all_is_there(project: Path) -> None:
    world, upload = World(), Upload()

    def slow(number: int) -> Fault:
        return "slowly" if number < 4 else "hang" if number < 60 else ""

    upload.fault = slow
    assert run(project, world, upload).succeeded
    assert world.waits == {EARLY: 1, WAITED: 1, IN_VAIN: 1}
    assert right(project, world)
    first, second = tries(project)
    assert first.outcome == "failed: its files had not arrived when it started"
    assert second.outcome == "succeeded"


@pytest.mark.parametrize("starts", [3.0, 50_000.0])
def test_an_upload_that_fails_ends_it(project: Path, starts: float) -> None:
    """One that has started ends by itself, and the next try meets the same refusal."""
    world, upload = World(lambda spec: Fate((starts,))), Upload()
    upload.fault = lambda number: "slowly" if number < 7 else "rejected"
    with pytest.raises(SiteRejected):
        run(project, world, upload)
    assert world.waits[EARLY] == 1
    assert world.waits[IN_VAIN] == (starts < 100)
    world.advance(world.now + 100_000)
    assert not world.runs


def test_files_that_are_there_after_all_end_nothing(project: Path) -> None:
    """Another process of the workflow may have sent the rest."""
    world, upload = World(lambda spec: Fate((700.0,))), Upload()

    def refused(number: int) -> Fault:
        if number < 7:
            return "slowly"
        path = upload.parts[-1].rpartition("/")[0].removesuffix(".tar.gz")
        world.write(f"{path}.done", b"")
        world.write("large", (project / "large").read_bytes())
        return "rejected"

    upload.fault = refused
    assert run(project, world, upload).succeeded
    assert right(project, world)


def test_another_controller_that_leads_keeps_the_try(project: Path) -> None:
    world, upload = World(lambda spec: Fate((50_000.0,))), Upload()
    upload.fault = lambda number: "slowly" if number < 7 else "rejected"
    controller = prepared(Controller(world, project), upload)
    taken = PlaceTaken("another one leads")

    async def deposed() -> None:
        raise taken

    async def opened() -> None:
        work = await controller.open()
        work._awaited._assure = deposed
        with pytest.raises(PlaceTaken):
            await controller.job(JOB)

    controller.run(opened())
    [record] = tries(project)
    assert record.state is TryState.SUBMITTED
    assert not isinstance(world.files.get(record.paths.claim, b""), type(None)), "not revoked"
    controller.forget()


def test_newer_content_submits_it_again_at_once(project: Path) -> None:
    world, upload = World(lambda spec: Fate((1000.0,))), Upload()

    def edited(number: int) -> Fault:
        if number == 9:
            (project / "large").write_bytes(os.urandom(SIZE))
        return "slowly"

    upload.fault = edited
    assert run(project, world, upload).succeeded
    assert right(project, world)
    assert world.now < 3600.0


def test_newer_content_for_another_job_withdraws_what_is_on_the_way(project: Path) -> None:
    world, upload = World(lambda spec: Fate((1000.0,))), Upload()
    controller = prepared(Controller(world, project), upload)

    async def both() -> list[Outcome]:
        await controller.open()
        first = asyncio.create_task(controller.job(JOB))
        async with asyncio.timeout(LONG_S):
            while not world.waits[EARLY]:
                await asyncio.sleep(1)
        new = project / "new"
        new.write_bytes(os.urandom(SIZE))
        new.replace(project / "large")
        second = asyncio.create_task(controller.job(request(2, "large")))
        return list(await asyncio.gather(first, second))

    outcomes = controller.run(both())
    controller.forget()
    assert all(outcome.succeeded for outcome in outcomes)
    assert (project / "out/1").read_bytes() == expected(project)
    assert len(world.runs) == 2


def test_what_is_purged_on_its_way_is_sent_again(project: Path) -> None:
    world, upload = World(lambda spec: Fate((1000.0,))), Upload()

    def swept(number: int) -> Fault:
        if number == 15:
            world.remove(min(path for path in world.files if "-of-" in path))
        return "slowly"

    upload.fault = swept
    assert run(project, world, upload).succeeded
    assert len(upload.parts) > PARTS
    assert right(project, world)


def test_no_word_stands_while_parts_are_sent_again(project: Path) -> None:
    """A journal that has lost its last lines knows nothing of it."""
    world, before = World(lambda spec: Fate((9000.0,))), Upload()
    controller = prepared(Controller(world, project), before)

    async def opened() -> Outcome:
        await controller.open()
        return await controller.job(JOB)

    controller.site.called = lambda: controller.kill() if len(before.parts) > 12 else None
    with pytest.raises(Killed):
        controller.run(opened())
    controller.bury()
    controller.forget()
    [bundle] = {path.partition(".tar.gz")[0] for path in world.files if "-of-" in path}
    word = f"{bundle}.tar.gz/complete"
    world.write(word, b"1 1\n")
    seen: list[bool] = []
    after = Upload()

    def told(number: int) -> Fault:
        seen.append(word in world.files)
        return "slowly"

    after.fault = told
    assert run(project, world, after).succeeded
    assert seen
    assert not any(seen)
    assert right(project, world)


def test_a_time_limit_after_a_wait_is_no_failure(project: Path) -> None:
    """The wait was part of its walltime; the next one is submitted when all is there."""

    def fate(spec: JobSpec) -> Fate:
        return Fate((3.0,), False, 50.0, Reason.TIME_LIMIT, False) if spec.arriving else Fate()

    world = World(fate)
    assert run(project, world).succeeded
    assert [one.how for one in world.runs] == ["killed", "exit 0"]
    first, second = tries(project)
    assert first.outcome == "failed: its time was over after a wait for its files"
    assert second.outcome == "succeeded"


@pytest.mark.parametrize(
    ("awaited_s", "runtime_s", "lacked"),
    [(600, 3600, True), (180, 3600, True), (600, 86400, False), (0, 60, False), (5, None, True)],
)
def test_a_wait_of_minutes_is_not_why_a_day_was_too_short(
    awaited_s: float, runtime_s: int | None, lacked: bool
) -> None:
    assert lacked_time(awaited_s, runtime_s) is lacked


def test_two_jobs_wait_for_one_upload(project: Path) -> None:
    world, upload = World(), Upload()
    controller = prepared(Controller(world, project), upload)

    async def both() -> list[Outcome]:
        await controller.open()
        jobs = (controller.job(request(number, "large")) for number in (1, 2))
        return list(await asyncio.gather(*jobs))

    outcomes = controller.run(both())
    controller.forget()
    assert all(outcome.succeeded for outcome in outcomes)
    assert (world.waits[EARLY], len(upload.parts), len(world.runs)) == (2, PARTS, 2)
