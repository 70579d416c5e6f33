"""Whose run a job belongs to, whoever began it: workflows in the outbox, without MLflow."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.secret_names import make_masker
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.journal import TryRecord, TryState
from snakemake_executor_plugin_mantik.tracking.controller.invocation import (
    SNAKEFILE_BYTES,
    Invocation,
    settle_invocations,
)
from snakemake_executor_plugin_mantik.tracking.ledger import Ledger
from snakemake_executor_plugin_mantik.tracking.outbox import EventKind, Outbox
from snakemake_executor_plugin_mantik.tracking.run import TrackingTarget
from snakemake_executor_plugin_mantik.tracking.store import try_directory
from snakemake_executor_plugin_mantik.tracking.workflow import TrackedWorkflow

RECORD = TryRecord("t1", "hpc1", 0, "job", "train", "train", "f", TryState.PLANNED)
REQUEST = JobRequest(
    number=1, job="job", rule="train", name="train", site="hpc1", command="true", shell="bash",
    resources={}, threads=1, variables={}, inputs=(), outputs=(),
)  # fmt: skip
WORKFLOW = TrackedWorkflow("Snakefile")


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    made = Outbox(tmp_path / "outbox.sqlite")
    yield made
    made.close()


def invocation(
    outbox: Outbox,
    workdir: Path,
    workflow: TrackedWorkflow = WORKFLOW,
    uri: str = "",
    *,
    configs: Mapping[str, str] | None = None,
    mask: Callable[[str], str] = str,
) -> Invocation:
    return Invocation(
        outbox, workflow, TrackingTarget(uri), workdir, configs=configs or {}, mask=mask
    )


def status(outbox: Outbox, key: str) -> str:
    """The status with which a run is to end; empty if it is not."""
    ends = [event.data["status"] for event in outbox.events(key) if event.kind is EventKind.END]
    return "".join(ends)


def test_what_is_gone_on_with(outbox: Outbox, tmp_path: Path) -> None:
    first = invocation(outbox, tmp_path)
    first.record(REQUEST, RECORD)
    key = asyncio.run(first.make())

    # Killed; the same again, another Snakefile, another server.
    again = invocation(outbox, tmp_path)
    again.record(REQUEST, RECORD)
    others = [
        invocation(outbox, tmp_path, TrackedWorkflow("other.smk")),
        invocation(outbox, tmp_path, uri="http://elsewhere"),
    ]
    keys = {asyncio.run(each.make()) for each in others}

    assert asyncio.run(again.make()) == key
    assert len(keys) == 2
    assert key not in keys
    again.end("finished")
    assert status(outbox, key) == "FINISHED"
    third = invocation(outbox, tmp_path)
    assert asyncio.run(third.make()) != key


def test_a_job_stays_with_the_workflow_that_sent_it(outbox: Outbox, tmp_path: Path) -> None:
    first = invocation(outbox, tmp_path)
    first.record(REQUEST, RECORD)
    key = asyncio.run(first.make())
    first.end("killed")  # and the job did not confirm it

    second = invocation(outbox, tmp_path)
    job = second.record(REQUEST, replace(RECORD, state=TryState.SUBMITTED))

    assert job.workflow == key
    assert not second.key
    second.end("finished")
    assert status(outbox, key) == "KILLED"


def test_what_was_taken_for_over_and_is_sent_after_all(outbox: Outbox, tmp_path: Path) -> None:
    first = invocation(outbox, tmp_path)
    first.record(REQUEST, RECORD)
    key = asyncio.run(first.make())
    outbox.add_run(RECORD.id, "", {})

    assert settle_invocations(outbox, [RECORD.id]) == 0
    assert settle_invocations(outbox, [], WORKFLOW.identity(TrackingTarget())) == 0
    assert settle_invocations(outbox, []) == 1
    assert (status(outbox, key), status(outbox, RECORD.id)) == ("KILLED", "KILLED")

    second = invocation(outbox, tmp_path)
    job = second.record(REQUEST, RECORD)

    assert status(outbox, RECORD.id) == ""
    assert Ledger(outbox).open_jobs(key) == [RECORD.id]
    assert not job.over
    assert outbox.add(RECORD.id, EventKind.STARTED, {})


def test_a_detached_one_is_told_again_and_again(outbox: Outbox, tmp_path: Path) -> None:
    for how in ("detached", "detached", "failed"):
        each = invocation(outbox, tmp_path)
        each.record(REQUEST, RECORD)
        key = asyncio.run(each.make())
        each.end(how)
        assert status(outbox, key) == ("FAILED" if how == "failed" else "")

    (update,) = (event for event in outbox.events(key) if event.kind is EventKind.UPDATE)
    assert update.data["detached"]
    assert update.data["continued"]
    assert len(Ledger(outbox).jobs(key)) == 1


def test_no_secret_is_in_a_workflow_s_run(outbox: Outbox, tmp_path: Path) -> None:
    secret = "hunter2-hunter2"
    (tmp_path / "Snakefile").write_text(f"PASSWORD = '{secret}'  # ours\n")
    config = {"server": f"ftp.org?key={secret}", "depth": 3}
    workflow = TrackedWorkflow("Snakefile", ("snakemake", f"--x={secret}"), config)
    made = invocation(
        outbox, tmp_path, workflow, configs={"hpc1": f"X: {secret}\n"}, mask=make_masker([secret])
    )

    key = asyncio.run(made.make())

    run = outbox.run(key)
    assert run is not None
    assert secret not in json.dumps(dict(run.data))
    assert run.data["params"] == {"server": "ftp.org?key=***", "depth": "3"}
    files = tmp_path / try_directory(key) / "mantik"
    assert (files / "Snakefile").read_text() == "PASSWORD = '***'  # ours\n"
    assert (files / "backend-configs" / "hpc1.yaml").read_text() == "X: ***\n"


def test_a_snakefile_of_any_size_is_no_artifact(outbox: Outbox, tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_bytes(b"#" * (SNAKEFILE_BYTES + 1))

    key = asyncio.run(invocation(outbox, tmp_path).make())

    assert not (tmp_path / try_directory(key) / "mantik" / "Snakefile").exists()


def test_a_workflow_s_run_is_told_of_changes_once_in_a_while(
    outbox: Outbox, tmp_path: Path
) -> None:
    woken: list[int] = []

    def broken(error: Exception) -> None:
        raise error

    async def work() -> None:
        made = invocation(outbox, tmp_path)
        made.record(REQUEST, RECORD)
        await made.make()
        made.changed(lambda: woken.append(1), broken)
        while not woken:
            await asyncio.sleep(0.001)
        for _ in range(20):
            made.changed(lambda: woken.append(2), broken)
            await asyncio.sleep(0.001)

    asyncio.run(work())

    assert woken == [1]
