"""Faults while a file that stays at one site is brought to another one, in parts."""

import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SiteOption
from tests.faults.cell import SITE, Cell, cell_in, settings
from tests.faults.disk import small_disk
from tests.faults.faults import FAULTS, calling, then
from tests.faults.test_stored import sum_of
from tests.support.proxy import Rule
from tests.support.turns import FIRECREST_FIRST, UNICORE_FIRST
from tests.support.workflows import FILES_STAY, Place, place_in

SOURCE = "source"
SIZES = {"unicore": 16_700_000, "firecrest": 560_000}
"""Bytes of the file, by what the target speaks: five parts, and too few for the servers to move it
without this machine (`engine.upload.IMPORT_BYTES`)."""
PARTS = 5
DISK = "48m"
"""Size of the target's disk if it is small: for the larger file, and its parts beside it."""
ON_THE_WAY = 3
"""Parts that may be on their way at once."""
MET = {"403", "404", "429", "503", "cut", "refused", "reset", "lost-after-acting"}
"""Faults that the upload of a part meets, one of each kind."""

SNAKEFILE = r"""
    OUTSIDE = config["outside"]

    rule read:
        input: "big.bin"
        output: "sum.txt"
        shell: "echo begin read >> {OUTSIDE}/ran; sha256sum < {input} > {output}"

    rule make:
        output: "big.bin"
        resources: mantik_site="source"
        shell:
            "echo begin make >> {OUTSIDE}/ran;"
            " until [ -e {OUTSIDE}/gate ] || [ ! -e {config[test]} ]; do sleep 0.1; done;"
            " head -c SIZE /dev/urandom > {output}"
"""


class Move:
    """A file that moves from a site to the one behind the proxy.

    Attributes:
        cell: the workflow; its site is the target.
        source: the site that makes the file.
    """

    def __init__(self, cell: Cell, source: Place) -> None:
        self.cell, self.source = cell, source

    @property
    def made(self) -> Path:
        """The file, where it was made."""
        return self.cell.project.workspace_at(self.source) / "big.bin"

    def parts(self) -> list[Path]:
        """The parts that lie at the target."""
        return sorted(self.cell.project.workspace.glob(".mantik/bundles/*/*/*-of-*"))

    def acknowledged(self) -> int:
        """How many parts the journal knows to be there."""
        journal = self.cell.project.directory / ".snakemake/mantik/journal.sqlite"
        with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as db:
            return int(db.execute("SELECT sum(sent) FROM uploads").fetchone()[0] or 0)

    def killed(self, kind: str, *, skip: int = 0) -> None:
        """Run until a request of a kind, of which some pass before, and kill it there."""
        pid: Future[int] = Future()

        def kill() -> None:
            os.kill(pid.result(), signal.SIGKILL)

        proxy = self.cell.proxy
        rule = proxy.add(Rule("kill", {kind}, calling(kill, after=False), 1, skip))
        running = self.cell.start()
        pid.set_result(running.process.pid)
        ran = self.cell.end(running)
        assert rule.taken, f"{proxy.counted()}\n{ran.output}"
        assert ran.code == -signal.SIGKILL, ran.output
        proxy.heal()

    def end(self, **begun: int) -> str:
        """Run to the end; what was said. Jobs have begun so often, and the result is right."""
        ran = self.cell.end(self.cell.start())
        assert ran.code == 0, f"{self.cell.proxy.counted()}\n{ran.output}"
        assert self.cell.noted("begin") == Counter(begun), ran.output
        result = (self.cell.project.workspace / "sum.txt").read_bytes()
        assert result == sum_of(self.made.read_bytes()), ran.output
        there = self.cell.project.workspace / "big.bin"
        assert there.read_bytes() == self.made.read_bytes()
        assert not self.parts(), "they would cost quota"
        assert not self.cell.project.exists("big.bin")
        return ran.output


@contextmanager
def moving(api: str, directory: Path, *, small: bool = False) -> Iterator[Move]:
    """A file that is to move to a site that speaks `api`, which may have a small disk."""
    source_api = next(each for each in SIZES if each != api)
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(directory / "target", DISK)) if small else None
        source = stack.enter_context(
            Sandbox(directory / "made", [SiteOption(SOURCE, source_api)], settings(1))
        )
        target = stack.enter_context(
            Sandbox(directory / "target", [SiteOption(SITE, api)], settings(1))
        )
        text = SNAKEFILE.replace("SIZE", str(SIZES[api]))
        cell = stack.enter_context(cell_in(target, SITE, api, directory, disk=disk, snakefile=text))
        place = place_in(source, SOURCE)
        config = directory / "source.yaml"
        config.write_text(place.config)
        cell.project.sites = [str(config)]
        cell.project.extra |= {**place.environment, **cell.project.place.environment}
        cell.options = FILES_STAY
        yield Move(cell, place)


@pytest.mark.parametrize("api", UNICORE_FIRST)
def test_killed_at_each_step(api: str, tmp_path: Path) -> None:
    """Before the first part, between two, and before the job; and then a part is purged."""
    with moving(api, tmp_path) as move:
        move.cell.open_gate()
        move.killed("part")
        assert len(move.parts()) < ON_THE_WAY
        move.killed("part", skip=PARTS - 1)
        known = move.parts()[: move.acknowledged()]
        there, purged = known[:-1], known[-1:]
        before = [part.stat().st_mtime_ns for part in there]
        for part in purged:
            part.unlink()
        move.killed("submit")
        again = "what was there was sent again"
        assert [part.stat().st_mtime_ns for part in there] == before, again
        assert len(move.parts()) == PARTS
        sent = move.cell.proxy.counted()["part"]
        move.end(make=1, read=1)
        assert move.cell.proxy.counted()["part"] == sent, again


@pytest.mark.parametrize("api", FIRECREST_FIRST)
def test_source_purged_on_the_way(api: str, tmp_path: Path) -> None:
    """Parts of the old content are not mixed with the new one."""
    with moving(api, tmp_path) as move:
        move.cell.open_gate()
        move.killed("part", skip=PARTS - 1)
        assert move.parts()
        move.made.unlink()
        assert "submitted again" not in move.end(make=2, read=1)


@pytest.mark.parametrize("api", FIRECREST_FIRST)
def test_faults_on_the_way(api: str, tmp_path: Path) -> None:
    """One fault after another."""
    with moving(api, tmp_path) as move:
        move.cell.open_gate()
        faults = [fault for fault in FAULTS if fault.name in MET]
        rules = [
            move.cell.proxy.add(Rule(fault.name, {"part"}, fault.act(api), 1)) for fault in faults
        ]
        move.end(make=1, read=1)
        assert all(rule.taken for rule in rules), move.cell.proxy.counted()


@pytest.mark.parametrize("api", UNICORE_FIRST)
def test_target_full(api: str, tmp_path: Path) -> None:
    with moving(api, tmp_path, small=True) as move:
        assert move.cell.disk is not None
        fill = move.cell.proxy.add(Rule("full", {"part"}, then(move.cell.disk.fill), 1, 1))
        move.cell.open_gate()
        first = move.cell.end_of_full(move.cell.start(), fill)
        assert move.cell.noted("begin") == Counter(make=1), first.output
        move.cell.disk.free()
        move.end(make=1, read=1)
