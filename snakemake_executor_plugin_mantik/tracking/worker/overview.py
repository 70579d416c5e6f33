"""Publish the run of a workflow: counts, pictures, its end. Part of the worker."""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlflow.entities import Metric, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik import pictures
from snakemake_executor_plugin_mantik.pictures import Node, NodeState, Picture
from snakemake_executor_plugin_mantik.pictures.assemble import PicturedTry, make_picture
from snakemake_executor_plugin_mantik.tracking import figures
from snakemake_executor_plugin_mantik.tracking.ledger import GOES_ON, JobRow, Ledger
from snakemake_executor_plugin_mantik.tracking.outbox import RunRecord
from snakemake_executor_plugin_mantik.tracking.store import try_directory
from snakemake_executor_plugin_mantik.tracking.worker.experiments import is_refusal
from snakemake_executor_plugin_mantik.tracking.workflow import ARTIFACT_FOLDER

DETACHED: Final = "mantik.detached"
"""The tag that holds since when the workflow's jobs continue without a controller."""

_STATES: Final[Mapping[str, NodeState]] = {
    "SCHEDULED": NodeState.QUEUED,
    "RUNNING": NodeState.RUNNING,
    "FINISHED": NodeState.FINISHED,
    "FAILED": NodeState.FAILED,
    "KILLED": NodeState.KILLED,
    GOES_ON: NodeState.FINISHED,
}


def begin_workflow_run(client: MlflowClient, run: RunRecord, workdir: Path) -> None:
    """Upload the Snakefile and the backend configs as artifacts."""
    files = workdir / try_directory(run.try_id) / ARTIFACT_FOLDER
    if files.is_dir():
        client.log_artifacts(run.run_id, str(files), ARTIFACT_FOLDER)


def update_workflow_run(
    client: MlflowClient,
    ledger: Ledger,
    run: RunRecord,
    data: Mapping[str, Any],
) -> None:
    """Publish the counts of jobs by state, what they used, and the pictures.

    `data` is the event's: `time`, `continued`, `detached` (a time, or nothing) and `words`.

    Raises:
        Exception: MLflow fails; try again later.
    """
    jobs = ledger.jobs(run.try_id)
    now, step = int(data["time"] * 1000), int(data["time"] - run.created)
    metrics = [Metric(n, value, now, step) for n, value in figures.workflow_figures(jobs).items()]
    said = {DETACHED: data.get("detached", ""), "mantik.reason": data.get("words", "")}
    tags = [RunTag(name, value) for name, value in said.items() if value]
    client.log_batch(run.run_id, metrics=metrics, tags=tags)
    if data.get("continued") and not data.get("detached"):
        try:
            client.delete_tag(run.run_id, DETACHED)
        except MlflowException as error:  # it was not detached, but killed
            if not is_refusal(error):
                raise
    pipeline = ledger.pipeline(run.try_id)
    tries = [_pictured(job) for job in jobs if not job.behind]
    shown = make_picture(run.data["name"], pipeline, tries, data["time"])
    _draw(client, run, shown)


def _pictured(job: JobRow) -> PicturedTry:
    node = Node(
        id=job.try_id,
        name=job.name,
        rule=job.rule,
        state=_STATES[job.state],
        site=job.site,
        prepared=job.created,
        queued=job.queued,
        started=job.started,
        ended=job.ended,
        note=job.note,
    )
    return PicturedTry(job.members or (job.job,), node)


def _draw(client: MlflowClient, run: RunRecord, shown: Picture) -> None:
    try:
        drawn = pictures.render_files(shown)
    except Exception as error:  # noqa: BLE001 - an error in drawing must not block other runs
        sys.stderr.write(f"{run.try_id}: the pictures cannot be drawn: {error!r}\n")
        return
    with tempfile.TemporaryDirectory() as directory:
        for name, text in drawn.items():
            Path(directory, name).write_text(text, encoding="utf-8")
        client.log_artifacts(run.run_id, directory, ARTIFACT_FOLDER)


def end_workflow_run(client: MlflowClient, run: RunRecord, data: Mapping[str, Any]) -> None:
    """Set the final status of a workflow's run."""
    client.set_terminated(run.run_id, data["status"], int(data["time"] * 1000))
