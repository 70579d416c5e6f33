"""The local scheduler ends and refuses jobs as the real Slurm does: the same jobs in both."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_sandbox.batch import BatchJob, BatchScheduler, CancelError
from hpc_sandbox.sbatch import SbatchError, SlurmVariant
from hpc_sandbox.scheduler import LocalScheduler
from hpc_sandbox.settings import SandboxSettings, Timing
from hpc_sandbox.slurm import SlurmScheduler
from tests.real.slurm import ACCOUNTS, Slurm

pytestmark = pytest.mark.software("Slurm")

SETTINGS = SandboxSettings(
    timing=Timing(kill_wait=5.0, memory_interval=0.2, status_interval=0.2), slots=8
)
Told = dict[str, object]


def script(body: str, *options: str) -> str:
    lines = "".join(f"#SBATCH {option}\n" for option in ("--time=5", *options))
    return f"#!/bin/bash\n{lines}{body}\n"


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.05)


def ending(job: BatchJob) -> tuple[str, str, str, int]:
    return job.state.value, job.reason, job.exit_text, job.starts


async def ends(scheduler: BatchScheduler, directory: Path) -> Told:
    told: Told = {}

    async def to_end(name: str, text: str, where: Path = directory) -> None:
        job = await scheduler.submit(text, where)
        await until(lambda: job.state.final)
        told[name] = ending(job)

    async def cancelled(name: str, before: str, body: str) -> None:
        mark = directory / name
        job = await scheduler.submit(script(f"{before}; touch {mark}; {body}"), directory)
        await until(mark.exists)
        await scheduler.cancel(job.id)
        await until(lambda: job.state.final)
        told[name] = ending(job)

    held = await scheduler.submit(script("true", "--hold"), directory)
    told["held"] = held.state.value, held.reason
    await scheduler.cancel(held.id)
    await until(lambda: held.state.final)
    told["cancelled-waiting"] = ending(held)
    await asyncio.gather(
        to_end("good", script("true")),
        to_end("bad", script("exit 7")),
        to_end("shot", script("kill -SEGV $$")),
        to_end("killed", script("kill -9 $$")),
        to_end("child-killed", script("bash -c 'kill -9 $$'")),
        to_end("no-output", script("true", "--output=/nowhere/at/all")),
        cancelled("cancelled", ":", "exec sleep 100"),
        # Its sleep may be told to end some time before it is.
        cancelled("cancelled-caught", "trap 'exit 3' TERM", "while :; do sleep 0.2; done"),
        to_end("time", script("exec sleep 200", "--time=1").replace("--time=5\n", "--time=1\n")),
    )
    with pytest.raises(CancelError) as caught:
        await scheduler.cancel(held.id)
    told["cancelled-again"] = str(caught.value).replace(str(held.id), "N")
    with pytest.raises(CancelError) as caught:
        await scheduler.cancel(999999)
    told["cancelled-nothing"] = str(caught.value)
    return told


REFUSED = {
    "partition": "--partition=none",
    "memory": "--mem=900G",
    "cpus": "--cpus-per-task=999",
    "gpus": "--gpus-per-node=9",
    "nodes": "--nodes=99",
    "time": "--time=9-0",
    "account": "--account=none",
    "reservation": "--reservation=none",
    "time-text": "--time=x",
    "memory-text": "--mem=x",
    "nodes-few": "--nodes=3",
    "nodes-text": "--nodes=x",
    "tasks-text": "--ntasks=x",
    "cpus-text": "--cpus-per-task=x",
    "per-node-text": "--ntasks-per-node=x",
    "gpus-text": "--gpus-per-node=x",
    "zero": "--cpus-per-task=0",
    "option": "--nonsense=1",
}


async def refusals(scheduler: BatchScheduler, directory: Path) -> Told:
    told: Told = {}
    for name, option in REFUSED.items():
        try:
            job = await scheduler.submit(f"#!/bin/bash\n#SBATCH {option}\ntrue\n", directory)
        except SbatchError as error:
            told[name] = str(error)
        else:
            told[name] = job.state.value, job.reason
    try:
        await scheduler.submit("true\n", directory)
    except SbatchError as error:
        told["no script"] = str(error)
    return told


async def play(
    scheduler: BatchScheduler, test: Callable[[BatchScheduler, Path], Awaitable[Told]], where: Path
) -> Told:
    where.mkdir()
    scheduler.start()
    try:
        return await test(scheduler, where)
    finally:
        await scheduler.stop()


@pytest.mark.parametrize("test", [pytest.param(ends, marks=pytest.mark.nightly), refusals])
def test_alike(
    test: Callable[[BatchScheduler, Path], Awaitable[Told]], real_slurm: Slurm, tmp_path: Path
) -> None:
    del real_slurm
    slurm = SlurmScheduler(SETTINGS, home=tmp_path, user="somebody")
    alike = replace(SETTINGS, partitions=slurm.partitions)
    local = LocalScheduler(
        tmp_path / "spool",
        alike,
        home=tmp_path,
        user="somebody",
        rules=SlurmVariant(accounts=ACCOUNTS),
    )

    async def both() -> tuple[Told, Told]:
        return await asyncio.gather(
            play(local, test, tmp_path / "local"), play(slurm, test, tmp_path / "slurm")
        )

    told, expected = asyncio.run(both())
    assert told == expected
