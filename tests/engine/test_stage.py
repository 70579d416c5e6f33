"""Each content goes up once, and nothing old over something new."""

import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.engine.compare import find_empty
from snakemake_executor_plugin_mantik.engine.leases import Lease
from snakemake_executor_plugin_mantik.engine.stage import UNSTEADY, Staged
from snakemake_executor_plugin_mantik.jobs.paths import bundle_done_path
from snakemake_executor_plugin_mantik.journal import FileRecord, Journal
from snakemake_executor_plugin_mantik.staging.local import LocalFile, LocalFiles
from tests.support import virtualtime
from tests.support.simulated import Fault, SimulatedSite, World
from tests.support.stagers import Bench
from tests.support.world import EPOCH_S

LIMIT = 2000


class Files(Bench):
    def write(self, path: str, content: bytes) -> str:
        place = self.workdir / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        return path

    async def look(self, *paths: str) -> list[LocalFile]:
        return await self.local.look_at([(path, None) for path in paths])

    async def stage(self, *paths: str) -> Staged:
        return await self.stager.stage(await self.look(*paths), paths, inline_limit=LIMIT)

    async def done(self, *paths: str) -> Staged:
        staged = await self.stage(*paths)
        assert self.job(staged) is None
        self.stager.confirm(staged)
        return staged


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Files]:
    bench = Files(tmp_path)
    yield bench
    bench.journal.close()


async def test_what_one_attempt_alone_needs_travels_each_time_and_is_not_remembered(
    bench: Files,
) -> None:
    own = [LocalFile.holding("store/meta", b"1"), LocalFile.holding("store/empty", None)]
    for size in (10, 2 * LIMIT):
        shared = await bench.look(bench.write(f"shared-{size}", os.urandom(size)))
        for files in (shared, shared, []):
            staged = await bench.stager.stage(files, (), (), own, inline_limit=LIMIT)
            # Another one that needs the same has nothing to do with it.
            beside = await bench.stager.stage(files, (), inline_limit=LIMIT)
            assert bench.job(beside) is None
            assert "store/meta" not in bench.world.files
            assert bench.job(staged) is None
            assert bench.world.files.pop("store/meta") == b"1"
            assert bench.world.files.pop("store/empty", b"") is None
            bench.stager.confirm(staged)
    known = {file.path for file in bench.journal.files.remote_files("sim")}
    assert known == {f"shared-{size}" for size in (10, 2 * LIMIT)}


async def test_manifest_is_compared_once_per_run_and_directory(bench: Files) -> None:
    await bench.done(*(bench.write(f"d/{n}", b"x") for n in range(20)))
    await bench.done(bench.write("e/1", b"x"))
    for _ in range(2):
        bench.begin()
        del bench.world.files["d/7"]
        bench.world.files["d/8"] = b"longer"
        staged = [await bench.done(f"d/{n}") for n in range(20)]
        assert [n for n in range(20) if staged[n].inline] == [7, 8]
        assert bench.site.calls["list"] == 1


@pytest.mark.parametrize(
    ("answers", "happens", "left"),
    [
        (["not found"], "", True),
        (["empty"], "", True),
        (["empty", "", "", "empty"], "", True),
        (["rejected"], "", True),
        ([], "removed", False),
        ([], "changed", False),
        ([], "purged", False),
        ([], "another file system", True),
    ],
)
async def test_stored_output_is_given_up_only_for_certain(
    bench: Files, answers: list[Fault], happens: str, left: bool
) -> None:
    record = FileRecord("d/out", 4, hashlib.sha256(b"made").hexdigest(), modified=EPOCH_S + 5)
    beside = replace(record, path="d/beside")
    for file in (record, beside):
        bench.world.write(file.path, b"made")
        bench.world._changed[file.path] = 5.0
    bench.journal.files.set_remote_files("sim", [record, beside])
    bench.begin()
    if happens == "removed":
        bench.world.remove(record.path)
    elif happens == "changed":  # to another content of the same size
        bench.world._changed[record.path] += 60.0
    elif happens:
        bench.world.purge()
    if happens == "another file system":
        bench.world.write(Lease(1, "a", "b", "c", 1).path, b"")
    listings = iter(answers)
    bench.site.fault = lambda method, _: next(listings, "") if method == "list" else ""
    await bench.stager.compare([LocalFile.at("sim", record)])
    assert (bench.journal.files.remote_file("sim", "d/out") == record) is left
    kept = left or happens in ("removed", "changed")
    assert (bench.journal.files.remote_file("sim", "d/beside") == beside) is kept


@pytest.mark.parametrize("round_", range(2))
async def test_edited_source_is_never_covered_by_its_old_version(bench: Files, round_: int) -> None:
    """Ctrl-C before any job started, an edit, and again; bundles have random names."""
    for name in ("train.py", "other.py"):
        bench.write(name, b"old")
    await bench.stager.send_project_files(["train.py", "other.py"])
    waiting = await bench.stage()
    bench.begin()
    bench.write("train.py", b"new")
    await bench.stager.send_project_files(["train.py", "other.py"])
    await bench.done()
    assert bench.world.files["train.py"] == b"new"
    assert bench.world.files["other.py"] == b"old"
    assert bench.job(waiting) == ("bundles", ()), "what waited is sent again"
    assert bench.world.files["train.py"] == b"new"


async def test_sources_whose_bundle_is_gone_are_sent_again(bench: Files) -> None:
    await bench.stager.send_project_files([bench.write("train.py", b"x")])
    bench.stager.gone((await bench.stage()).bundles)
    await bench.done()
    assert bench.world.files["train.py"] == b"x"


async def test_what_a_job_may_have_unpacked_meanwhile_is_sent_again(bench: Files) -> None:
    await bench.done(bench.write("a", b"1"))
    assert bench.job(await bench.stage(bench.write("a", os.urandom(9000)))) is None
    assert (await bench.stage(bench.write("a", b"1"))).inline


async def test_what_a_job_changes_comes_in_no_bundle_that_it_unpacks(bench: Files) -> None:
    staged = await bench.stage(bench.write("a", os.urandom(9000)))
    bench.stager.lost(["a"])
    assert (await bench.stage("a")).bundles != staged.bundles


async def test_empty_directory(bench: Files) -> None:
    (bench.workdir / "empty").mkdir()
    await bench.done("empty")
    assert bench.world.files["empty"] is None
    assert not (await bench.stage("empty")).inline


async def test_outputs_of_jobs_are_there(bench: Files) -> None:
    path = bench.write("out", b"made")
    (file,) = await bench.look(path)
    odd = FileRecord("not-\udcff-text", 1, "x")
    bench.journal.files.set_remote_files("sim", [file.record, odd])
    bench.world.write(path, b"made")
    assert not (await bench.done(path)).inline
    bench.stager.lost([path])
    assert (await bench.stage(path)).inline


async def test_cost_of_confirming_does_not_grow_with_what_is_on_its_way(bench: Files) -> None:
    staged = [await bench.stage(bench.write(f"l{n}", os.urandom(9000))) for n in range(200)]
    steps = []
    for one in (staged[0], staged[100], staged[199]):
        count = [0]

        def tick(count: list[int] = count) -> None:
            count[0] += 1

        bench.journal.db.set_progress_handler(tick, 1)
        bench.stager.confirm(one)
        bench.journal.db.set_progress_handler(None, 0)
        steps.append(count[0])
    assert max(steps) < 2 * min(steps), steps
    assert bundle_done_path(staged[0].bundles[0]) not in bench.world.files


async def test_what_lay_in_a_directory_is_not_known_once_a_job_may_have_changed_it(
    bench: Files,
) -> None:
    await bench.done(bench.write("d/e/a", b"x"), bench.write("d0", b"x"))
    bench.stager.lost(["d"])
    assert [f.path for f in (await bench.stage("d/e/a", "d0")).carried] == ["d/e/a"]


# What a look at a directory may conclude.


@pytest.mark.parametrize("wrong", ["empty", "not found"])
def test_a_directory_is_empty_only_for_certain(wrong: Fault) -> None:
    """It is removed then, with what is in it."""
    world = World()
    world.make_directory("out/a/b")
    world.write("kept/file", b"x")
    site = SimulatedSite(world)
    answers: list[Fault] = [wrong]
    site.fault = lambda _, about: answers.pop() if about == "kept" and answers else ""

    found = virtualtime.run(find_empty(site, ["out", "kept", "out/a", "out/a/b", "gone"]))

    assert found == ["out/a/b", "out/a", "out"]


# Project files that somebody writes to while they are sent.


class Busy(LocalFiles):
    """Files to which somebody does something each time when they have just been looked at."""

    def __init__(self, workdir: Path, journal: Journal, act: Callable[[], None]) -> None:
        super().__init__(workdir, journal.files)
        self._act = act

    async def look_at(
        self, wanted: Iterable[tuple[str, Path | None]], *, project: bool = False
    ) -> list[LocalFile]:
        """See `LocalFiles`."""
        found = await super().look_at(wanted, project=project)
        self._act()
        return found


Sent = Callable[[Callable[[], None]], tuple[dict[str, str], list[str]]]


@pytest.fixture
def sent(tmp_path: Path) -> Sent:
    """What is sent of two files, and what is said, when something is done to them meanwhile."""

    def send(act: Callable[[], None]) -> tuple[dict[str, str], list[str]]:
        said: list[str] = []

        async def work() -> dict[str, str]:
            bench = Bench(tmp_path)
            stager = bench.make_stager(Busy(tmp_path, bench.journal, act))
            with closing(bench.journal):
                await stager.send_project_files(["code.py", "notes"])
            said.extend(bench.said)
            return {path: file.sha256 for path, file in stager.project_files.items()}

        for name in ("code.py", "notes"):
            (tmp_path / name).write_text("x")
        return virtualtime.run(work()), said

    return send


def test_what_is_saved_just_now_is_sent_as_it_is_then(sent: Sent, tmp_path: Path) -> None:
    saves = iter(range(UNSTEADY - 1))

    def save() -> None:
        if (number := next(saves, None)) is not None:
            (tmp_path / "code.py").write_text(f"version {number}")

    found, said = sent(save)

    assert sorted(found) == ["code.py", "notes"]
    assert said == []


def test_what_is_written_all_the_time_stays_here(sent: Sent, tmp_path: Path) -> None:
    def grow() -> None:
        with (tmp_path / "notes").open("a") as file:
            file.write("x")

    found, said = sent(grow)

    assert list(found) == ["code.py"]
    [line] = said
    assert "Not uploading notes" in line


def test_what_goes_is_not_missed(sent: Sent, tmp_path: Path) -> None:
    found, said = sent(lambda: (tmp_path / "notes").unlink(missing_ok=True))

    assert list(found) == ["code.py"]
    assert said == []
