"""Fault by step by API: no job lost, doubled or misreported.

CI tries each fault at one step of one API, and `make nightly` all of the product: the random
schedules have it in virtual time. A full disk is not tried while jobs are cancelled: that writes a
few bytes to the journal here, and makes a directory at the site, which is tried at `stage`.
"""

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.cell import JOBS, RUN_S, Cell, Count, make_cell
from tests.faults.faults import FAULTS, ODD, Fault, calling, lost, then
from tests.faults.steps import KINDS, STEPS
from tests.support.proxy import Act, Exchange, Rule, pass_on
from tests.support.turns import in_turn
from tests.support.workflows import Ran, Running, until

APIS = ("unicore", "firecrest")
MET_AT = ("stage", "submit", "watch", "fetch", "cancel")
"""Steps of a job's life, each of which meets each fault."""

Prove = Callable[[Cell, Ran, Count], None]
"""Fails if what a cell has to show is not as it has to be."""


@pytest.fixture
def prove() -> Prove:
    def prove(cell: Cell, ran: Ran, count: Count) -> None:
        assert not count.wrong, f"{count.wrong}\n{cell.proxy.counted()}\n{ran.output}"

    return prove


@pytest.mark.parametrize(
    ("fault", "step", "api"),
    in_turn([(fault, step, api) for step in MET_AT for api in APIS] for fault in FAULTS),
)
def test_fault(fault: Fault, step: str, api: str, tmp_path: Path, prove: Prove) -> None:
    if step == "watch":
        fault_while_watching(fault, api, tmp_path, prove)
    elif step == "cancel":
        fault_while_cancelling(fault, api, tmp_path, prove)
    else:
        fault_on_the_way(fault, step, api, tmp_path, prove)


@pytest.mark.parametrize(
    ("step", "fault", "api"),
    in_turn(
        [(step, fault, api) for fault in FAULTS for api in APIS]
        for step in ("submit", "watch", "fetch", "cancel")
    ),
)
def test_fault_in_a_pool(fault: Fault, step: str, api: str, tmp_path: Path, prove: Prove) -> None:
    if step == "cancel":
        fault_while_cancelling(fault, api, tmp_path, prove, pool=True)
    else:
        fault_on_the_way(fault, step, api, tmp_path, prove, pool=True)


def fault_on_the_way(
    fault: Fault, step: str, api: str, tmp_path: Path, prove: Prove, *, pool: bool = False
) -> None:
    with make_cell(api, tmp_path, pool=pool) as cell:
        cell.open_gate()
        rules = cell.meet(fault, step)
        ran = cell.end(cell.start())
        prove(cell, ran, cell.count(ran))
        taken = [rule for rule in rules if rule.taken]
        assert taken, f"nothing met the fault: {cell.proxy.counted()}"


@pytest.mark.parametrize(("fault", "api"), in_turn([(fault, api) for api in APIS] for fault in ODD))
def test_odd_answers_while_fetching(fault: Fault, api: str, tmp_path: Path, prove: Prove) -> None:
    """A job that succeeded has succeeded, whatever is said of its files."""
    fault_on_the_way(fault, "fetch", api, tmp_path, prove)


def fault_while_watching(fault: Fault, api: str, tmp_path: Path, prove: Prove) -> None:
    """With room for one job: the scheduler is asked about those that wait.

    The answer to one submission is lost, so that it is looked for.
    """
    with make_cell(api, tmp_path, slots=1) as cell:
        cell.proxy.add(Rule("lost", {"submit"}, lost))
        rules = cell.meet(fault, "watch")
        running = cell.start()
        # One API asks for each job, the other for all of them at once.
        until(lambda: rules[0].taken and (rules[1].taken or rules[2].taken), "looks at jobs", RUN_S)
        cell.open_gate()
        ran = cell.end(running)
        prove(cell, ran, cell.count(ran))


def busy(cell: Cell) -> Running:
    """A run whose jobs are at the site: two run at least, of three."""
    running = cell.start()
    until(
        lambda: running.output.count(": submitted to ") >= 3 and cell.noted("begin").total() >= 2,
        "jobs that run",
        RUN_S,
    )
    return running


def interrupted(running: Running) -> Running:
    with suppress(ProcessLookupError):  # it was killed this moment
        running.process.send_signal(signal.SIGINT)
    return running


def cancelled(cell: Cell, running: Running) -> Ran:
    """Press Ctrl-C; what is said to be over must be."""
    ran = cell.end(interrupted(running))
    if "confirmed that no job" in ran.output:
        assert cell.all_quiet(), f"{cell.alive()}\n{ran.output}"
    return ran


def finished(cell: Cell, runs: int) -> Ran:
    """Let nothing happen any more and start again, until the workflow is through."""
    cell.proxy.heal()
    cell.open_gate()
    for _ in range(runs):
        ran = cell.end(cell.start())
        # A job may note its end and be cancelled, or find the disk full, before its script ends.
        if cell.noted("end").keys() == set(JOBS) and not cell.any_stopped():
            break
    return ran


def fault_while_cancelling(
    fault: Fault, api: str, tmp_path: Path, prove: Prove, *, pool: bool = False
) -> None:
    with make_cell(api, tmp_path, pool=pool) as cell:
        running = busy(cell)
        rules = cell.meet(fault, "cancel")
        first = cancelled(cell, running)
        assert "Traceback" not in first.output, first.output
        assert {r.outcome for r in cell.project.attempts} == {"cancelled"}, first.output
        assert any(rule.taken for rule in rules), f"no fault: {cell.proxy.counted()}"
        ran = finished(cell, 1)
        prove(cell, Ran(ran.code, first.output + ran.output), cell.count(ran, stopped=True))


def in_cancelling(cell: Cell, act: Act) -> Act:
    """Do it to requests that follow the first one of its kind to end a job: others list as well."""

    async def acting(exchange: Exchange) -> None:
        begun = cell.proxy.counted()["revoke"]
        await (act if begun else pass_on)(exchange)

    return acting


KILLED_AT = [
    (step, kind) for step in STEPS for kind in STEPS[step] if (step, kind) != ("cancel", "status")
]
"""Kinds of requests at which a controller dies."""


def kills(step: str, kind: str) -> list[tuple[str, str, str, str]]:
    """The deaths at a kind of request: before the site acts and after it, at each API that has it.

    firecREST is asked for all jobs at once, and a job that was cancelled only if it does not end.
    """
    other = {"unicore": "find", "firecrest": "status"}
    having = [api for api in APIS if kind in dict(KINDS[api]) and kind != other[api]]
    return [(step, kind, when, api) for api in having for when in ("before", "after")]


@pytest.mark.parametrize(
    ("step", "kind", "when", "api"), in_turn(kills(step, kind) for step, kind in KILLED_AT)
)
def test_controller_killed(
    step: str, kind: str, when: str, api: str, tmp_path: Path, prove: Prove
) -> None:
    controller_killed(step, kind, when == "after", api, tmp_path, prove, pool=False)


@pytest.mark.parametrize(
    ("step", "kind", "when", "api"),
    in_turn(
        [(step, kind, when, api) for when in ("before", "after") for api in APIS]
        for step, kind in (
            ("submit", "submit"), ("watch", "list"), ("fetch", "marker"), ("cancel", "list"),
        )
    ),
)  # fmt: skip
def test_controller_killed_while_a_pool_works(
    step: str, kind: str, when: str, api: str, tmp_path: Path, prove: Prove
) -> None:
    controller_killed(step, kind, when == "after", api, tmp_path, prove, pool=True)


def controller_killed(
    step: str, kind: str, after: bool, api: str, tmp_path: Path, prove: Prove, *, pool: bool
) -> None:
    slots = 1 if step == "watch" and not pool else 2
    with make_cell(api, tmp_path, slots=slots, pool=pool) as cell:
        pid: Future[int] = Future()
        victims = [pid]

        def kill() -> None:
            while victims:  # only once: its id may be another process's later
                os.kill(victims.pop().result(), signal.SIGKILL)

        deadly = calling(kill, after=after)
        # One job alone is asked about by its id. Not only the first request: a busy server may
        # answer that too late, and it is given up.
        rule = Rule("kill", {kind, "status"} if kind == "find" else {kind}, deadly, None)
        if step == "cancel":
            running = busy(cell)
            pid.set_result(running.process.pid)
            cell.proxy.add(replace(rule, act=in_cancelling(cell, deadly)))
            interrupted(running)
        else:
            cell.proxy.add(rule)
            if step != "watch":
                cell.open_gate()
            running = cell.start()
            pid.set_result(running.process.pid)
        first = cell.end(running)
        assert first.code == -signal.SIGKILL, f"{cell.proxy.counted()}\n{first.output}"
        # What was cancelled is told as that first.
        ran = finished(cell, 2 if step == "cancel" else 1)
        count = cell.count(ran, runs=2, stopped=step == "cancel")
        prove(cell, Ran(ran.code, first.output + ran.output), count)


@pytest.mark.parametrize(
    ("whose", "step", "api"),
    in_turn(
        [(whose, step, api) for whose in ("here", "there") for api in APIS]
        for step in ("stage", "submit", "watch", "fetch")
    ),
)
def test_disk_full(whose: str, step: str, api: str, tmp_path: Path, prove: Prove) -> None:
    with make_cell(api, tmp_path, small="project" if whose == "here" else "sandbox") as cell:
        assert cell.disk is not None
        cell.open_gate()
        fill = cell.proxy.add(Rule("full", {STEPS[step][0]}, then(cell.disk.fill)))
        running = cell.start()
        first = cell.end_of_full(running, fill)
        cell.disk.free()
        # The next run may be the first to hear that a job failed for want of space.
        ran = finished(cell, 2)
        count = cell.count(ran, runs=3, stopped=whose == "there")
        prove(cell, Ran(ran.code, first.output + ran.output), count)
