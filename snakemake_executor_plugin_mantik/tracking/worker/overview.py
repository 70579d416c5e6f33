"""Publish the run of a workflow, and of a group's members. Part of the worker."""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from mlflow.entities import Experiment, Metric, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik import views
from snakemake_executor_plugin_mantik.views import Node, NodeState, Picture

from .. import segments
from ..ledger import GOES_ON, JobRow, Ledger
from ..outbox import RunRecord
from ..run import NAME_LENGTH
from ..store import member_ends, try_directory
from ..workflow import ARTIFACT_FOLDER, PARENT_RUN_TAG

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

    `data` is the event's: `time`, `continued`, `detached` (a time, or nothing) and `words`; and
    `status` once the run has ended.

    Raises:
        Exception: MLflow fails; try again later.
    """
    jobs = ledger.jobs(run.try_id)
    now, step = int(data["time"] * 1000), int(data["time"] - run.created)
    metrics = [Metric(n, value, now, step) for n, value in segments.workflow_figures(jobs).items()]
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
    shown = views.make_picture(
        run.data["name"], pipeline, tries, data["time"], over="status" in data
    )
    _draw(client, run, shown)


def _pictured(job: JobRow) -> Node:
    return Node(
        id=job.try_id,
        name=job.name,
        rule=job.rule,
        state=_STATES[job.state],
        site=job.site,
        prepared=job.created,
        submitted=job.submitted,
        queued=job.queued,
        started=job.started,
        ended=job.ended,
        note=job.note,
        jobs=job.members or (job.job,),
    )


def _draw(client: MlflowClient, run: RunRecord, shown: Picture) -> None:
    try:
        drawn = views.render_files(shown)
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


_DEFAULT: Final = "Default"
"""MLflow's name of the experiment for runs without one."""


def find_or_make(client: MlflowClient, name: str, experiment_id: str) -> Experiment:
    """Return the experiment with an id or a name, which may have been deleted in MLflow.

    Args:
        client: for the server.
        name: created if it does not exist; empty: `_DEFAULT`.
        experiment_id: takes precedence over the name; empty: use the name.

    Raises:
        MlflowException: no experiment has this id, or the server refuses or does not answer.
    """
    if experiment_id:
        return client.get_experiment(experiment_id)
    name = name or _DEFAULT
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            found = client.get_experiment(client.create_experiment(name))
        except MlflowException as error:
            # Another process may have created it at the same time.
            found = client.get_experiment_by_name(name)
            if found is None:
                raise error from None
    return found


_REFUSALS: Final = frozenset(
    (
        "ALREADY_EXISTS",
        "BAD_REQUEST",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "NOT_FOUND",
        "NOT_IMPLEMENTED",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_CONFLICT",
        "RESOURCE_DOES_NOT_EXIST",
    )
)
"""Error codes of requests that would fail again. Without those of permissions and tokens, which the
user can fix, and ENDPOINT_NOT_FOUND, with which a proxy answers for a server that is down."""


def is_refusal(error: Exception) -> bool:
    """Return whether MLflow has understood a request and refused it."""
    return isinstance(error, MlflowException) and error.error_code in _REFUSALS


_MEMBER: Final = "mantik.group_member"
"""The tag that names the try of a group and the number of the member that a run belongs to."""
_LONGEST_ENDS: Final = 1 << 20


def make_member_runs(
    client: MlflowClient, run: RunRecord, group_run: str, experiment_id: str, *, again: bool
) -> dict[str, str]:
    """Create the runs of a group's members, and return their ids by number.

    `again` is whether some may have been created before.

    Raises:
        Exception: MLflow fails; try again later.
    """
    made = {}
    for number, member in run.data.get("members", {}).items():
        mark = f"{run.try_id}/{number}"
        found = client.search_runs([experiment_id], f"tags.`{_MEMBER}` = '{mark}'") if again else ()
        made[number] = (
            found[0].info.run_id
            if found
            else client.create_run(
                experiment_id, start_time=int(run.created * 1000),
                tags={**member["tags"], _MEMBER: mark, PARENT_RUN_TAG: group_run},
                run_name=member["name"][:NAME_LENGTH],
            ).info.run_id
        )  # fmt: skip
    return made


def set_member_status(client: MlflowClient, run: RunRecord, status: str) -> None:
    """Set the status of the runs of a group's members."""
    for _, run_id in run.members.values():
        with _unless_refused():
            client.update_run(run_id, status=status)


def end_members(
    client: MlflowClient, run: RunRecord, workdir: Path, status: str, moment: int
) -> None:
    """End the runs of a group's members; `status` is the group's, `moment` in ms.

    A member whose end the group has not noted did not start, or was ended with the group.
    """
    ends = dict(_read_ends(workdir / member_ends(run.try_id)))
    for number, (own_id, run_id) in run.members.items():
        ended = "FINISHED" if status == "FINISHED" else "KILLED"
        tags = [RunTag("mantik.own_run_id", own_id)] if own_id != run_id else []
        metrics = []
        if number in ends:
            code, seconds = ends[number]
            ended = "FINISHED" if code == 0 else "FAILED"
            tags.append(RunTag("mantik.exit_code", str(code)))
            metrics.append(Metric("mantik/running_seconds", float(seconds), moment, 0))
        with _unless_refused():
            client.log_batch(run_id, metrics=metrics, tags=tags)
            client.set_terminated(run_id, ended, moment)


def _read_ends(path: Path) -> Iterator[tuple[int, tuple[int, int]]]:
    """Read exit code and seconds of each member that a group has noted, by number."""
    if not path.is_file() or path.stat().st_size > _LONGEST_ENDS:
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):  # half written
            number, code, seconds = map(int, line.split())
            yield number, (code, seconds)


@contextmanager
def _unless_refused() -> Iterator[None]:
    """Go on with the next member if MLflow refuses: somebody has deleted the run."""
    try:
        yield
    except MlflowException as error:
        if not is_refusal(error):
            raise
