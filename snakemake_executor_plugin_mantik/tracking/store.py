"""The job's own MLflow store: files in its workspace, in the layout of MLflow's file store.

The controller creates it without mlflow before it submits the job, and downloads it with the job's
logs. The layout is that of MLflow 1 to 3: one directory per experiment, with one per run in it,
each with a `meta.yaml`. MLflow does not recognise a run without the directories `metrics`, `params`
and `artifacts`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

DIRECTORY = ".snakemake/mantik/tracking"
"""The directory of all attempts' stores, relative to both the working directory and the
workspace."""
_STORE = "mlruns"
GROWING = "^[^/]+/(models/)?[^/]+/metrics/"
"""Matches the paths of metrics in a store, which grow by a line per value. Also valid in bash."""
_MEMBER_ENDS = "member-ends"
_MOST_ID_BYTES = 100_000
"""The most bytes of members' ids: Linux allows no variable of 128 KiB."""
_RUNNING = 1
_ACTIVE = "active"
_LOCAL = 4


def attempt_directory(attempt_id: str) -> str:
    """Return an attempt's directory, relative to both the working directory and the workspace."""
    return f"{DIRECTORY}/{attempt_id}"


def store_directory(attempt_id: str) -> str:
    """Return the directory of an attempt's store."""
    return f"{attempt_directory(attempt_id)}/{_STORE}"


def member_ends(attempt_id: str) -> str:
    """Return the file in which a group notes number, exit code and seconds of each ended member."""
    return f"{store_directory(attempt_id)}/{_MEMBER_ENDS}"


def member_variables(workspace: str, attempt_id: str, members: Mapping[int, str]) -> dict[str, str]:
    """Return the variables from which a group's script learns the runs of its members.

    `members` holds the ids of the runs by the members' numbers. If they are too many for a
    variable, what all members log goes to the group's run.
    """
    if not members:
        return {}
    ids = " ".join(members.get(number, "-") for number in range(max(members) + 1))
    runs = {"MANTIK_MEMBER_RUNS": ids} if len(ids) <= _MOST_ID_BYTES else {}
    return runs | {"MANTIK_MEMBER_ENDS": str(PurePosixPath(workspace, member_ends(attempt_id)))}


def copy_directory(attempt_id: str) -> str:
    """Return the directory for the copy of a running job's store, below the working directory."""
    return f"{attempt_directory(attempt_id)}/live"


@dataclass(frozen=True)
class RunIdentity:
    """A run as the job sees it.

    Attributes:
        run_id: MLflow's id of the run, or one of ours if MLflow had not created it in time.
        experiment_id, experiment: the id and name of the run's experiment.
    """

    run_id: str
    experiment_id: str
    experiment: str


def worker_variables(workspace: str, attempt_id: str, identity: RunIdentity) -> dict[str, str]:
    """Return the variables that make MLflow log into the job's store, and nowhere else.

    `workspace` is the absolute path of the workspace as the job sees it.
    """
    return {
        "MLFLOW_TRACKING_URI": _uri(workspace, store_directory(attempt_id)),
        "MLFLOW_RUN_ID": identity.run_id,
        "MLFLOW_EXPERIMENT_ID": identity.experiment_id,
        # MLflow 3.13 and later refuse file stores without it.
        "MLFLOW_ALLOW_FILE_STORE": "true",
        # Nodes have no internet access, and MLflow would try for some seconds.
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Without git MLflow would warn at each import.
        "GIT_PYTHON_REFRESH": "quiet",
    }


def run_variables(identity: RunIdentity) -> dict[str, str]:
    """Return the variables of a job that logs to the tracking server directly."""
    return {"MLFLOW_RUN_ID": identity.run_id, "MLFLOW_EXPERIMENT_ID": identity.experiment_id}


def store_skeleton(
    workspace: str,
    attempt_id: str,
    identity: RunIdentity,
    *,
    name: str,
    user: str,
    now: float,
    members: Mapping[str, str] | None = None,
) -> dict[str, bytes | None]:
    """Return the store that a job starts with: its experiment and its run, in state RUNNING.

    `workspace` is the absolute path of the workspace as the job sees it; `now` is in seconds since
    the epoch; `members` are the names of further runs by id, those of a group's members. The files
    are returned by path in the store; None stands for an empty directory.
    """
    place = f"{store_directory(attempt_id)}/{identity.experiment_id}"
    moment = int(now * 1000)
    experiment = _description(
        artifact_location=_uri(workspace, place),
        creation_time=moment,
        experiment_id=identity.experiment_id,
        last_update_time=moment,
        lifecycle_stage=_ACTIVE,
        name=identity.experiment,
    )
    found: dict[str, bytes | None] = {f"{identity.experiment_id}/meta.yaml": experiment}
    for run_id, run_name in {identity.run_id: name, **(members or {})}.items():
        own = f"{identity.experiment_id}/{run_id}"
        found[f"{own}/meta.yaml"] = _description(
            artifact_uri=_uri(workspace, f"{place}/{run_id}/artifacts"),
            end_time=None,
            entry_point_name="",
            experiment_id=identity.experiment_id,
            lifecycle_stage=_ACTIVE,
            run_id=run_id,
            run_name=run_name,
            run_uuid=run_id,
            source_name="",
            source_type=_LOCAL,
            source_version="",
            start_time=moment,
            status=_RUNNING,
            tags=[],
            user_id=user,
        )
        found |= dict.fromkeys(f"{own}/{kind}" for kind in ("metrics", "params", "artifacts"))
    return found


def metrics_directory(attempt_id: str, identity: RunIdentity) -> str:
    """Return the directory of the metrics of a run in an attempt's store."""
    return f"{store_directory(attempt_id)}/{identity.experiment_id}/{identity.run_id}/metrics"


def _description(**values: object) -> bytes:
    # JSON values are valid YAML.
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()]
    return "".join(lines).encode()


def _uri(workspace: str, path: str) -> str:
    return PurePosixPath(workspace, path).as_uri()
