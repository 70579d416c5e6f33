"""The copies of what jobs log go on where they stopped; trouble is left to the jobs' ends."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteNotFound, SiteUnreachable
from snakemake_executor_plugin_mantik.engine import live_copies
from snakemake_executor_plugin_mantik.engine.live_copies import (
    LIVE_LATER,
    LIVE_TREE,
    REQUESTS,
    LiveCopies,
)
from snakemake_executor_plugin_mantik.engine.observer import JobExtras, LiveView, Observer
from snakemake_executor_plugin_mantik.jobs.packs import PIECE_BYTES
from snakemake_executor_plugin_mantik.journal import AttemptRecord, AttemptState
from snakemake_executor_plugin_mantik.sites.base import Site
from tests.support.trial import packed

RECORD = AttemptRecord(
    "11111111-2222-4333-8444-555555555555", "hpc1", 0, "job", "train", "train a=1", "f",
    AttemptState.SUBMITTED,
)  # fmt: skip
ADDITION = JobExtras("log", {"meta": b"from the start"}, live=LiveView("copy", "^metrics/"))


class Listener(Observer):
    def __init__(self) -> None:
        self.heard = 0

    def logged(self, record: AttemptRecord) -> None:
        assert record is RECORD
        self.heard += 1


class Pieces:
    """The part of a site that gives files: the pieces of one attempt."""

    def __init__(self) -> None:
        self.pieces: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.trouble: list[Exception] = []

    async def get(
        self, path: str, *, offset: int = 0, size: int | None = None
    ) -> AsyncIterator[bytes]:
        assert offset == 0
        self.requests.append(path.rpartition(".")[2])
        if self.trouble:
            raise self.trouble.pop(0)
        content = self.pieces.get(path)
        if content is None:
            raise SiteNotFound(path)
        for start in range(0, len(content), 1000):
            await asyncio.sleep(0)
            yield content[start : start + 1000]

    def add(self, pack: bytes, start: int = 0) -> int:
        """Another pack at the end of a piece; how much there is then."""
        path = RECORD.paths.piece(start)
        self.pieces[path] = self.pieces.get(path, b"") + pack
        return start + len(self.pieces[path])


class Bench:
    """A copy of what a job logs, and the site that it comes from."""

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self.site: Pieces = Pieces()
        self.said: list[str] = []
        self.listener = Listener()
        self.start()

    def start(self) -> None:
        """As a controller that starts does."""
        self.copies = LiveCopies(
            cast(Site, self.site), self.listener, self.workdir, self.said.append
        )
        self.copies.follow(RECORD, ADDITION)

    async def look(self, size: int) -> None:
        """A look that shows `size` bytes, and what comes of it."""
        self.copies.grown(RECORD, size)
        for _ in range(2000):
            await asyncio.sleep(0.005)
            task = self.copies._copies[RECORD.id].task
            if task is None or task.done():
                return
        raise AssertionError("it does not come to an end")

    @property
    def files(self) -> dict[str, bytes]:
        tree = self.workdir / "copy" / LIVE_TREE
        return {
            p.relative_to(tree).as_posix(): p.read_bytes() for p in tree.rglob("*") if p.is_file()
        }


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_a_copy_grows_and_is_gone_on_with(bench: Bench) -> None:
    bench.site.add(packed({"part/0/metrics/a": b"1 2\n3", "./p": b"x", "later": b"big\0"}))
    size = bench.site.add(packed({"part/5/metrics/a": b" 4\n"}))
    cut = bench.site.add(packed({"./p": b"yy", "./big": b"small"})[:-1])

    await bench.look(cut)
    # There is no use to ask again before there is more.
    await bench.look(cut)

    assert bench.files == {"meta": b"from the start", "metrics/a": b"1 2\n3 4\n", "p": b"x"}
    assert (bench.workdir / "copy" / LIVE_LATER).read_text() == "big"
    assert bench.site.requests == ["0", "0"]
    bench.start()
    whole = packed({"./p": b"yy", "./big": b"small"})
    bench.site.pieces = {RECORD.paths.piece(0): b"?" * size + whole}
    await bench.look(size + len(whole))
    assert bench.files["p"] == b"yy"
    assert (bench.workdir / "copy" / LIVE_LATER).read_text() == ""
    assert bench.listener.heard == 2
    assert bench.said == []


async def test_a_file_that_the_job_begins_anew_is_no_longer_than_there(bench: Bench) -> None:
    await bench.look(bench.site.add(packed({"part/0/metrics/a": b"1 2\n3 4\n"})))
    await bench.look(bench.site.add(packed({"part/0/metrics/a": b"5 6\n"})))
    assert bench.files["metrics/a"] == b"5 6\n"
    await bench.look(bench.site.add(packed({"part/4/metrics/a": b"7 8\n"})))
    assert bench.files["metrics/a"] == b"5 6\n7 8\n"
    assert bench.said == []


async def test_a_site_that_does_not_answer_is_asked_at_the_next_look(bench: Bench) -> None:
    bench.site.trouble = [SiteUnreachable("away"), SiteNotFound("not yet shown")]
    size = bench.site.add(packed({"./p": b"x"}))

    for _ in range(4):
        await bench.look(size)

    assert bench.files["p"] == b"x"
    assert len(bench.site.requests) == 3
    assert bench.listener.heard == 1


async def test_pieces_are_asked_for_one_after_the_other(bench: Bench) -> None:
    content = os.urandom(20_000)  # packing does not make it smaller
    size = 0
    while size < PIECE_BYTES:
        size = bench.site.add(packed({f"./{size}": content}))
    more = bench.site.add(packed({"./more": b"x"}), size)

    await bench.look(size)
    await bench.look(more)

    assert bench.files["more"] == b"x"
    assert bench.site.requests == ["0", str(size)]


@pytest.mark.parametrize(
    "pack",
    [b"nonsense", packed({"part/7/metrics/a": b"x"}), packed({"./meta/x": b"x"})],
    ids=["no pack", "gap", "below a file"],
)
async def test_what_makes_no_sense_is_told_once_and_left_to_the_end(
    bench: Bench, pack: bytes
) -> None:
    size = bench.site.add(pack)

    await bench.look(size)
    await bench.look(size + 1)

    assert len(bench.said) == 1
    assert "fetched when it is over" in bench.said[0]
    assert len(bench.site.requests) == 1
    assert bench.files["meta"] == b"from the start"


async def test_a_copy_that_somebody_has_removed_is_not_begun_anew(bench: Bench) -> None:
    await bench.look(bench.site.add(packed({"./a": b"x"})))
    shutil.rmtree(bench.workdir / "copy")

    await bench.look(bench.site.add(packed({"./b": b"x"})))

    assert len(bench.said) == 1
    assert bench.files == {}


async def test_a_copy_takes_no_more_room_than_it_may(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_copies, "MAX_LIVE_BYTES", 1000)

    await bench.look(bench.site.add(packed({"./a": bytes(600)})))
    await bench.look(bench.site.add(packed({"./a": bytes(600)})))
    await bench.look(bench.site.add(packed({"./a": bytes(600)})))

    assert len(bench.said) == 1
    assert len(bench.site.requests) == 2


async def test_a_file_that_does_not_end_is_read_as_far_as_was_told(bench: Bench) -> None:
    class Endless(Pieces):
        async def get(
            self, path: str, *, offset: int = 0, size: int | None = None
        ) -> AsyncIterator[bytes]:
            async for chunk in super().get(path, offset=offset, size=size):
                yield chunk
            while True:
                await asyncio.sleep(0)
                yield b"?"

    bench.site = Endless()
    bench.start()

    await bench.look(bench.site.add(packed({"./a": b"x"})))

    assert bench.files["a"] == b"x"


async def test_few_are_asked_for_at_the_same_time(bench: Bench) -> None:
    class Slow(Pieces):
        now = most = 0

        async def get(
            self, path: str, *, offset: int = 0, size: int | None = None
        ) -> AsyncIterator[bytes]:
            self.now += 1
            self.most = max(self.most, self.now)
            for _ in range(50):
                await asyncio.sleep(0)
            self.now -= 1
            raise SiteUnreachable("away")
            yield b""

    bench.site = Slow()
    bench.start()
    records = [replace(RECORD, id=f"{n}{RECORD.id[1:]}") for n in range(6)]
    for record in records:
        bench.copies.follow(record, ADDITION)
        bench.copies.grown(record, 1)

    while bench.site.now or not bench.site.most:
        await asyncio.sleep(0.001)

    assert bench.site.most == REQUESTS
    for record in records:
        await bench.copies.stop(record)


def test_nothing_is_written_after_it_was_stopped(bench: Bench) -> None:
    """Whatever a thread has begun to write: in real time, as virtual time has no threads."""

    async def work() -> None:
        for number in range(50):
            size = bench.site.add(packed({f"./{number}": bytes(5000)}))
        bench.copies.grown(RECORD, size)
        await asyncio.sleep(0.01)
        await bench.copies.stop(RECORD)
        before = bench.files
        bench.copies.grown(RECORD, size)
        await asyncio.sleep(0.1)
        assert bench.files == before

    asyncio.run(work())
