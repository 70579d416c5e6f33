"""Bundles go up in parts, from this machine and from other places, and are never sent twice."""

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import OutputsLost, SiteRejected
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.engine.stage import Staged
from snakemake_executor_plugin_mantik.engine.transfer_meter import (
    Direction,
    TransferMeter,
    TransferView,
)
from snakemake_executor_plugin_mantik.jobs.paths import bundle_path
from snakemake_executor_plugin_mantik.journal import FileRecord
from snakemake_executor_plugin_mantik.staging.bundle import Fetch, FileChanged
from snakemake_executor_plugin_mantik.staging.local import LocalFile
from snakemake_executor_plugin_mantik.staging.transfers import stream_file
from tests.support.simulated import Fault, SimulatedSite, World
from tests.support.stagers import UPLOAD_BYTES, Bench

SIZE = 10 * UPLOAD_BYTES
PARTS = 11
IN_FLIGHT = 2
"""Parts whose upload the refusal of another one ended."""
NASTY = "a b'\"\n#%*$HOME`ü;-"


class Run(Bench):
    """One run of a workflow with a place that jobs are sent to, and another with stored files.

    Attributes:
        elsewhere: the other place.
        puts: the uploads to the former.
        reads: by number of the read, the offset from which a file of the other place was read.
    """

    def __init__(self, workdir: Path) -> None:
        self.elsewhere = World()
        super().__init__(workdir)

    def begin(self, fetch: Fetch | None = None) -> None:
        super().begin(fetch or self.fetch)
        self.other = SimulatedSite(self.elsewhere, "other", "/other")
        self.puts: list[str] = []
        self.reads: list[int] = []
        self.fails: Callable[[int], bool] = lambda number: False
        self.slow = False
        self.site.fault = self._fault
        clock = asyncio.get_running_loop().time
        self.other_retry = SiteRetry("other", self.said.append, clock)

    def _fault(self, method: str, about: str) -> Fault:
        if method == "put":
            self.puts.append(about)
            if self.fails(len(self.puts)):
                return "rejected"
            return "slowly" if self.slow else ""
        return ""

    async def fetch(self, file: LocalFile, offset: int) -> AsyncGenerator[bytes, None]:
        self.reads.append(offset)
        async for chunk in stream_file(
            self.other, str(file.local), size=file.size, offset=offset,
            repeat=self.other_retry.insist,
        ):  # fmt: skip
            yield chunk

    def stored(self, path: str, content: bytes) -> LocalFile:
        self.elsewhere.write(path, content)
        digest = hashlib.sha256(content).hexdigest()
        return LocalFile.at("elsewhere", FileRecord(path, len(content), digest, mode=0o755))

    async def look(self, path: str, content: bytes) -> list[LocalFile]:
        (self.workdir / path).write_bytes(content)
        return await self.local.look_at([(path, None)])

    async def stage(self, files: list[LocalFile]) -> Staged:
        named = [file.path for file in files]
        return await self.stager.stage(files, named, inline_limit=1000)

    async def keep(self, files: list[LocalFile]) -> None:
        """As `smk-mantik put` does."""
        await self.stager.keep(files, lambda share: None)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path)
    yield run
    run.journal.close()


async def stopped_after(
    run: Run, files: list[LocalFile], parts: int, *, keep: bool = False
) -> None:
    """An upload of which the site has taken some parts when it ends; `keep`: of a kept bundle."""
    run.fails = lambda number: number > parts
    with pytest.raises(SiteRejected):
        await (run.keep(files) if keep else run.stage(files))
    run.fails = lambda number: False
    run.puts.clear()


def in_turn(*faults: Fault) -> Callable[[str, str], Fault]:
    """What the calls of a site meet, one after another; then nothing."""
    left = iter(faults)
    return lambda method, about: next(left, "")


async def test_a_large_one_goes_up_in_parts_and_comes_out_whole(run: Run) -> None:
    content = os.urandom(SIZE)
    staged = await run.stage(await run.look(NASTY, content))
    assert len(run.puts) == PARTS
    parts = [path for path in run.world.files if "-of-" in path]
    assert all(len(run.world.files[path] or b"") <= UPLOAD_BYTES for path in parts)
    assert run.job(staged) is None
    assert run.world.files[NASTY] == content
    assert not [path for path in run.world.files if "-of-" in path], "they would cost quota"


async def test_what_shrinks_is_compressed(run: Run) -> None:
    await run.stage(await run.look("text", b"a line of text\n" * (SIZE // 15)))
    sent = sum(len(c or b"") for path, c in run.world.files.items() if "-of-" in path)
    assert sent < SIZE / 20


@pytest.mark.parametrize(("parts", "keep"), [(2, False), (4, False), (10, False), (6, True)])
async def test_an_upload_that_ended_goes_on_in_the_next_run(
    run: Run, parts: int, keep: bool
) -> None:
    content = os.urandom(SIZE)
    await stopped_after(run, await run.look("large", content), parts, keep=keep)
    run.begin()
    files = await run.look("large", content)
    if keep:
        await run.keep(files)
    staged = await run.stage(files)
    assert 0 <= len(run.puts) - (PARTS - parts) <= IN_FLIGHT
    assert run.job(staged) is None
    assert run.world.files["large"] == content


async def test_parts_that_a_centre_has_purged_are_sent_again(run: Run) -> None:
    content = os.urandom(SIZE)
    files = await run.look("large", content)
    await stopped_after(run, files, 8)
    third = sorted(path for path in run.world.files if "-of-" in path)[2]
    run.world.remove(third)
    staged = await run.stage(files)
    assert len(run.puts) == PARTS - 2
    assert run.job(staged) is None
    assert run.world.files["large"] == content


async def test_parts_of_an_attempt_that_imported_other_files_are_removed(run: Run) -> None:
    """Their number in all is another: with them the bundle could not be read."""
    file = run.stored("large", os.urandom(SIZE))
    await stopped_after(run, [file], 3)
    [bundle] = run.journal.files.bundles("sim")
    run.journal.files.set_sent(bundle, 99 * UPLOAD_BYTES, 3)
    for path in [path for path in run.world.files if "-of-" in path]:
        for number in (PARTS, 99):
            run.world.write(f"{path[:-7]}{number:07}", b"of another attempt")
    assert run.job(await run.stage([file])) is None


async def test_what_is_left_of_a_kept_bundle_is_removed(run: Run) -> None:
    """A centre has purged a part of it, or a job could not unpack it."""
    await run.keep(await run.look("large", os.urandom(SIZE)))
    [kept] = run.journal.files.uploaded_bundles("sim")
    run.stager.purged()
    assert run.journal.files.bundles("sim") == {kept: "unpacked"}


async def test_another_content_begins_anew(run: Run) -> None:
    await stopped_after(run, await run.look("large", os.urandom(SIZE)), 5)
    content = os.urandom(SIZE)
    staged = await run.stage(await run.look("large", content))
    assert len(run.puts) == PARTS
    assert run.job(staged) is None
    assert run.world.files["large"] == content


async def test_a_bundle_without_one_of_its_parts_is_not_unpacked(run: Run) -> None:
    files = await run.look("large", os.urandom(SIZE))
    staged = await run.stage(files)
    run.world.remove(f"{bundle_path(staged.bundles[0])}/{1:07}-of-{PARTS:07}")
    assert run.job(staged) == ("bundles", ())
    run.stager.gone(staged.bundles)
    assert run.job(await run.stage(files)) is None


async def test_a_file_that_changes_meanwhile_is_told(run: Run) -> None:
    files = await run.look("large", os.urandom(SIZE))

    def edited(number: int) -> bool:
        if number == 3:
            (run.workdir / "large").write_bytes(os.urandom(SIZE))
        return False

    run.fails = edited
    with pytest.raises(FileChanged, match="changed while it was being uploaded"):
        await run.stage(files)


async def test_what_is_on_its_way_never_covers_what_is_newer(run: Run) -> None:
    old = await run.look("file", os.urandom(5000))
    run.slow = True
    first = asyncio.create_task(run.stage(old))
    while not run.puts:
        await asyncio.sleep(1)
    content = os.urandom(5000)
    staged = await run.stage(await run.look("file", content))
    assert run.job(staged) is None
    assert run.job(await first) == ("bundles", ())
    assert run.world.files["file"] == content


class TestFromAnotherPlace:
    async def test_nothing_is_written_here(self, run: Run, tmp_path: Path) -> None:
        content = os.urandom(SIZE)
        before = {path for path in tmp_path.rglob("*") if ".snakemake/mantik" not in path.parts}
        staged = await run.stage([run.stored(NASTY, content), run.stored("small", b"1")])
        after = {path for path in tmp_path.rglob("*") if ".snakemake/mantik" not in path.parts}
        assert after == before
        assert run.job(staged) is None
        assert run.world.files[NASTY] == content
        assert run.world.files["small"] == b"1"
        assert "and 1 more file (976.6 KiB) to site sim, through this machine." in run.said[0]

    async def test_broken_connections_at_both_ends_cost_nothing(self, run: Run) -> None:
        content = os.urandom(SIZE)
        run.other.fault = in_turn("unreachable", "busy", "halved", "halved", "", "halved")
        run.site.fault = in_turn("", "lost", "", "unreachable", "busy")
        staged = await run.stage([run.stored("large", content)])
        assert run.job(staged) is None
        assert run.world.files["large"] == content
        assert run.reads == [0], "the stream goes on where it broke"

    async def test_it_goes_on_in_the_next_run_and_the_job_compares_it(self, run: Run) -> None:
        content = os.urandom(SIZE)
        await stopped_after(run, [run.stored("large", content)], 6)
        run.begin()
        staged = await run.stage([run.stored("large", content)])
        assert 0 <= len(run.puts) - (PARTS - 6) <= IN_FLIGHT
        assert run.reads[0] > SIZE / 2
        assert [file.moved for file in staged.inputs] == [True]
        assert run.job(staged) is None
        assert run.world.files["large"] == content

    async def test_changed_between_two_runs_is_found_by_the_job(self, run: Run) -> None:
        """What was sent of it before is not read again, so its checksum is not known here."""
        content = os.urandom(SIZE)
        await stopped_after(run, [run.stored("large", content)], 6)
        run.begin()
        file = run.stored("large", content)
        run.elsewhere.write("large", os.urandom(SIZE))
        assert run.job(await run.stage([file])) == ("inputs", ("large",))

    @pytest.mark.parametrize("size", [1000, SIZE])
    async def test_damaged_once_is_read_again(self, run: Run, size: int) -> None:
        content = os.urandom(size)
        run.other.fault = in_turn("damaged")
        staged = await run.stage([run.stored("large", content)])
        assert run.reads == [0, 0]
        assert run.job(staged) is None
        assert run.world.files["large"] == content

    async def test_each_file_may_be_damaged_once(self, run: Run) -> None:
        contents = {name: os.urandom(1000) for name in ("a", "b", "c")}
        run.other.fault = lambda method, about: "damaged"  # a simulated site does so once
        staged = await run.stage([run.stored(*each) for each in contents.items()])
        assert run.job(staged) is None
        assert {name: run.world.files[name] for name in contents} == contents

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            (os.urandom(SIZE), "large is not what the job made"),
            (b"1", "the file has 1 bytes at the site"),
        ],
        ids=["changed", "shorter"],
    )
    async def test_changed_there_is_told_before_anything_is_submitted(
        self, run: Run, content: bytes, told: str
    ) -> None:
        file = run.stored("large", os.urandom(SIZE))
        run.elsewhere.write("large", content)
        with pytest.raises(OutputsLost, match=told):
            await run.stage([file])

    async def test_jobs_that_need_it_at_the_same_time_move_it_once(self, run: Run) -> None:
        file = run.stored("large", os.urandom(SIZE))
        staged = await asyncio.gather(*(run.stage([file]) for _ in range(4)))
        assert len({one.bundles for one in staged}) == 1
        assert len(run.puts) == PARTS

    async def test_a_place_that_is_away_holds_up_no_other_upload(self, run: Run) -> None:
        away = True
        run.other.fault = lambda method, about: "unreachable" if away else ""
        content = os.urandom(SIZE)
        moved = asyncio.create_task(run.stage([run.stored("moved", content)]))
        await asyncio.sleep(100)
        await run.stage(await run.look("large", os.urandom(SIZE)))
        assert not moved.done()
        away = False
        assert run.job(await moved) is None
        assert run.world.files["moved"] == content


async def test_a_long_upload_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "snakemake_executor_plugin_mantik.engine.transfer_meter._REPORTED_BYTES", SIZE
    )
    files = await run.look("large", os.urandom(SIZE))
    run.slow = True
    await run.stage(files)
    assert run.said[0] == "Sending large (976.6 KiB) to site sim."
    assert run.said[1].startswith("Sending large to site sim: ")
    assert run.said[1].endswith(" left.")


# Rates of transfers that are under way.


def test_a_rate_is_that_of_late_and_an_end_removes_the_transfer() -> None:
    now = 0.0
    meter = TransferMeter(lambda: now)
    with meter.measure(Direction.DOWNLOAD, "hpc", "a.bin", 5000, moved=1000) as transfer:
        # What an earlier attempt has brought is no rate.
        assert meter.views() == [TransferView(Direction.DOWNLOAD, "hpc", "a.bin", 5000, 1000, None)]
        for second in range(1, 31):
            now = float(second)
            transfer.arrived(1000 + (100 * second if second <= 10 else 1000 + 10 * second))
        [view] = meter.views()
        assert view.rate == pytest.approx(10, rel=0.2)
        now = 60.0  # it stalls
        [view] = meter.views()
        assert view.rate is not None
        assert view.rate < 5
    assert meter.views() == []
