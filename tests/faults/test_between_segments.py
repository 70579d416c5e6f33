"""Faults and deaths between the segments of a job: each of its steps is taken once."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SiteOption
from tests.faults.cell import RUN_S, SITE, Cell, cell_in, settings
from tests.faults.faults import FAULTS, calling, lost
from tests.support.proxy import Act, Exchange, Rule, pass_on
from tests.support.turns import FIRECREST_FIRST, UNICORE_FIRST
from tests.support.workflows import Ran, Running, until

STEPS = ("list", "marker", "make", "submit", "status", "find")
"""What a controller asks for between two segments."""
NEEDED = ("list", "marker", "submit")
MET = [
    fault for fault in FAULTS
    if fault.name in {
        "401", "404", "500-after-acting", "503", "reset", "cut", "lost-after-acting", "half-json",
    }
]  # fmt: skip
"""Faults of each kind. The job has one segment more than there are."""
DEATHS = [(kind, after) for kind in NEEDED for after in (False, True)]

SNAKEFILE = r"""
    OUTSIDE = config["outside"]

    rule train:
        output: "model.txt"
        resources: runtime=60, mantik_continue=config["segments"], mantik_checkpoint="ckpt/"
        shell:
            "n=$(cat ckpt/n || echo 0); echo begin $n >> {OUTSIDE}/ran;"
            # A test that was killed opens no gate.
            " until [ -e {OUTSIDE}/gate-$n ] || [ ! -e {config[test]} ]; do sleep 0.1; done;"
            " echo $((n + 1)) > ckpt/new; mv ckpt/new ckpt/n; echo end $n >> {OUTSIDE}/ran;"
            " (( n + 1 == {config[segments]} )) || exit 85;"
            " cp ckpt/n {output}"
"""


@contextmanager
def segments_cell(api: str, directory: Path, segments: int, *options: str) -> Iterator[Cell]:
    """A job of so many segments, each of which waits for its gate."""
    with (
        Sandbox(directory / "sandbox", [SiteOption(SITE, api)], settings(2)) as box,
        cell_in(box, SITE, api, directory, snakefile=SNAKEFILE) as cell,
    ):
        cell.options = (f"segments={segments}", *options)
        yield cell


def begun(cell: Cell, running: Running, number: int) -> None:
    """Wait until a segment computes."""
    until(
        lambda: cell.noted("begin")[f"{number}"] or running.process.poll() is not None,
        f"segment {number}",
        RUN_S,
    )
    assert cell.noted("begin")[f"{number}"], running.output


def open_gate(cell: Cell, number: int) -> None:
    (cell.outside / f"gate-{number}").touch()


def is_right(cell: Cell, ran: Ran, segments: int) -> None:
    """Each segment has run once, and the journal says so."""
    once = Counter(f"{number}" for number in range(segments))
    assert (cell.noted("begin"), cell.noted("end")) == (once, once), ran.output
    assert ran.code == 0, ran.output
    assert cell.project.read("model.txt") == f"{segments}\n"
    tries = [record for record in cell.project.tries if record.outcome != "cancelled"]
    assert [record.segment for record in tries] == list(range(segments)), ran.output
    assert tries[-1].outcome == "succeeded", ran.output
    assert not [record for record in cell.project.tries if not record.state.final], ran.output
    assert cell.all_quiet(), cell.alive()


@pytest.mark.parametrize("api", UNICORE_FIRST)
def test_faults(api: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Another fault after each segment, at each step until the next one computes."""
    segments = len(MET) + 1
    with segments_cell(api, tmp_path, segments, "--mantik-ahead", "0") as cell:
        running = cell.start()
        for number, fault in enumerate(MET):
            begun(cell, running, number)
            times = fault.times and min(fault.times, 2)
            rules = [
                cell.proxy.add(Rule(fault.name, {kind}, fault.act(api), times)) for kind in STEPS
            ]
            open_gate(cell, number)
            begun(cell, running, number + 1)
            cell.proxy.heal()
            taken = [kind for rule in rules for kind in rule.taken]
            assert set(NEEDED) <= set(taken), f"{fault.name}: {taken}"
        open_gate(cell, segments - 1)
        ran = cell.end(running)
        is_right(cell, ran, segments)
        record_property("cell", (segments, 0, 0, 0))


@pytest.mark.parametrize("api", FIRECREST_FIRST)
def test_controller_killed(
    api: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """After each segment at another step, before or after the site acts."""
    segments = len(DEATHS) + 1
    with segments_cell(api, tmp_path, segments, "--mantik-ahead", "0") as cell:
        running = cell.start()
        for number, (kind, after) in enumerate(DEATHS):
            begun(cell, running, number)
            cell.proxy.add(Rule("kill", {kind}, _when_ended(cell, number, running, after), None))
            open_gate(cell, number)
            ended = cell.end(running)
            assert ended.code == -signal.SIGKILL, f"{kind}: {ended.output}"
            cell.proxy.heal()
            running = cell.start()
        begun(cell, running, segments - 1)
        open_gate(cell, segments - 1)
        is_right(cell, cell.end(running), segments)
        record_property("cell", (segments, 0, 0, 0))


def _when_ended(cell: Cell, number: int, running: Running, after: bool) -> Act:
    """Kill the controller at a request that follows the end of a segment."""
    kill = calling(lambda: os.kill(running.process.pid, signal.SIGKILL), after=after)

    async def act(exchange: Exchange) -> None:
        markers = list(cell.project.workspace.glob(".mantik/tries/*/*.85"))
        await (kill if len(markers) > number else pass_on)(exchange)

    return act


@pytest.mark.parametrize("api", UNICORE_FIRST)
def test_faults_ahead(
    api: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """One submission ahead has no answer, and the controller dies at a later one."""
    segments = 5
    with segments_cell(api, tmp_path, segments) as cell:
        pid: Future[int] = Future()
        deadly = calling(lambda: os.kill(pid.result(), signal.SIGKILL), after=True)
        answerless = cell.proxy.add(Rule("lost", {"submit"}, lost, skip=1))
        # One more for the segment whose answer was lost.
        cell.proxy.add(Rule("kill", {"submit"}, deadly, skip=2))
        running = cell.start()
        pid.set_result(running.process.pid)
        assert cell.end(running).code == -signal.SIGKILL, running.output
        assert answerless.taken, cell.proxy.counted()
        cell.proxy.heal()
        for number in range(segments):
            open_gate(cell, number)
        until(lambda: cell.noted("end")["2"], "segments without a controller")
        is_right(cell, cell.end(cell.start()), segments)
        record_property("cell", (segments, 0, 0, 0))
