"""The runs of a group's members, below the group's run. Part of the worker: needs mlflow."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from mlflow.entities import Metric, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.tracking.outbox import RunRecord
from snakemake_executor_plugin_mantik.tracking.run import NAME_LENGTH
from snakemake_executor_plugin_mantik.tracking.store import member_ends
from snakemake_executor_plugin_mantik.tracking.worker.experiments import is_refusal
from snakemake_executor_plugin_mantik.tracking.workflow import PARENT_RUN_TAG

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
