"""How long jobs wait for a worker that is silent, dies, or has trouble with others' runs."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.tracking import worker_client
from snakemake_executor_plugin_mantik.tracking.worker_client import WORKERS, WorkerClient

STUB = """
import json, pathlib, sys
with pathlib.Path("starts").open("a") as starts:
    print("x", file=starts)
for line in json.loads(pathlib.Path("says").read_text()):
    print(json.dumps(line), flush=True)
if not pathlib.Path("dies").exists():
    sys.stdin.read()
"""
"""A worker that only says what it was told to, whatever there is to be told."""
LONG_S = 600.0
"""Nothing here takes so long, unless it waits for what does not come."""
NEVER_S = 3600.0


class Workers:
    """Couriers whose workers say lines."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.said: list[str] = []

    def worker(self, *lines: dict[str, Any], wait_s: float = NEVER_S) -> WorkerClient:
        (self.directory / "says").write_text(json.dumps(lines))
        made = WorkerClient(self.directory, self.said.append, {"a"})
        made._wait_s = wait_s
        return made


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "stub.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "bin"))
    monkeypatch.setattr(worker_client, "WORKER", "stub")
    return Workers(tmp_path)


async def test_a_server_that_does_not_answer_is_waited_for_once(workers: Workers) -> None:
    each = workers.worker(wait_s=0.05)
    await asyncio.wait_for(each.made("a"), LONG_S)
    each._wait_s = NEVER_S
    await asyncio.wait_for(each.made("b"), LONG_S)
    assert each.close(LONG_S)

    told = "MLflow cannot be updated now; jobs continue, and updates follow later."
    assert workers.said == [f"{told} It has created no run for 0.05 s."]


async def test_a_server_that_is_slow_is_waited_for_again(workers: Workers) -> None:
    each = workers.worker(wait_s=0.05)
    one = asyncio.create_task(each.made("a"))
    await asyncio.sleep(0)
    each._heard({"attempt": "other", "run": "1"})
    await asyncio.wait_for(one, LONG_S)
    each._wait_s = NEVER_S
    next_one = asyncio.create_task(each.made("b"))
    await asyncio.sleep(0)
    assert not next_one.done()
    each._heard({"attempt": "b", "run": "2"})
    await asyncio.wait_for(next_one, LONG_S)
    assert each.close(LONG_S)

    assert workers.said == []


async def test_what_a_job_waits_for_in_any_case_does_not_count(workers: Workers) -> None:
    each = workers.worker(wait_s=0.01)
    job = asyncio.create_task(each.made("a", NEVER_S))
    await asyncio.sleep(0.05)
    assert not job.done()
    each.release()
    await asyncio.wait_for(job, LONG_S)
    assert each.close(LONG_S)


async def test_what_says_that_it_is_down_is_not_waited_for(workers: Workers) -> None:
    each = workers.worker({"down": "away", "attempts": ["a", "x"]})
    await asyncio.wait_for(each.made("a"), LONG_S)
    assert each.close(LONG_S)

    assert workers.said == [
        "MLflow cannot be updated now; jobs continue, and updates follow later. away"
    ]


async def test_earlier_runs_that_cannot_be_told_hold_up_no_job(workers: Workers) -> None:
    down = {"down": "gone", "attempts": ["x", "y"]}
    each = workers.worker(down, down)
    job = asyncio.create_task(each.made("a"))
    while not workers.said:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert not job.done()
    each.release()
    await job
    assert each.close(LONG_S)

    assert workers.said == ["MLflow cannot be updated for 2 earlier runs. gone"]


async def test_a_worker_that_dies_is_replaced_a_few_times(workers: Workers) -> None:
    (workers.directory / "dies").touch()
    each = workers.worker()
    for number in range(WORKERS + 2):
        await asyncio.wait_for(each.made(f"job {number}"), LONG_S)
        assert each._process is not None
        while each._process.poll() is None:
            await asyncio.sleep(0.01)
    assert each.close(LONG_S)

    assert (workers.directory / "starts").read_text().count("x") == WORKERS
