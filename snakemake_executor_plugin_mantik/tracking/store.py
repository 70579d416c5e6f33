"""The job's own MLflow store: files in its workspace, in the layout of MLflow's file store.

Made here without mlflow, before the job; what the job adds to it comes back with its logs. The
layout is that of MLflow 1 to 3: a directory per experiment, in it one per run, each with a
`meta.yaml`; a run without the directories `metrics`, `params` and `artifacts` is not recognised.
"""

import json
from dataclasses import dataclass
from pathlib import PurePosixPath

DIRECTORY = ".snakemake/mantik/tracking"
"""Where the stores of all tries lie, relative to the working directory and the workspace alike."""
_STORE = "mlruns"
GROWING = "^[^/]+/(models/)?[^/]+/metrics/"
"""Matches the paths of metrics in a store: a line is added with each value. For bash, too."""
_RUNNING = 1
_ACTIVE = "active"
_LOCAL = 4


def try_directory(try_id: str) -> str:
    """The directory of a try, relative to the working directory and the workspace alike."""
    return f"{DIRECTORY}/{try_id}"


def store_directory(try_id: str) -> str:
    """The store of a try, in its directory."""
    return f"{try_directory(try_id)}/{_STORE}"


def copy_directory(try_id: str) -> str:
    """What a job has logged so far, while it runs; relative to the working directory."""
    return f"{try_directory(try_id)}/live"


@dataclass(frozen=True)
class RunIdentity:
    """A run as the job sees it.

    Attributes:
        run_id: MLflow's id of it, or one of ours if MLflow did not answer in time.
        experiment_id, experiment: of the experiment that it belongs to.
    """

    run_id: str
    experiment_id: str
    experiment: str


def worker_variables(workspace: str, try_id: str, identity: RunIdentity) -> dict[str, str]:
    """What a job's environment has to say so that MLflow logs into its store, and nowhere else.

    Args:
        workspace: absolute path of the workspace as the job sees it.
        try_id: the job's try.
        identity: its run.
    """
    return {
        "MLFLOW_TRACKING_URI": _uri(workspace, store_directory(try_id)),
        "MLFLOW_RUN_ID": identity.run_id,
        "MLFLOW_EXPERIMENT_ID": identity.experiment_id,
        # MLflow 3.13 and later refuse file stores without it.
        "MLFLOW_ALLOW_FILE_STORE": "true",
        # Nodes have no way out, and MLflow would try for some seconds.
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Where there is no git MLflow would complain at each import.
        "GIT_PYTHON_REFRESH": "quiet",
    }


def run_variables(identity: RunIdentity) -> dict[str, str]:
    """What the environment of a job says that logs to the tracking server itself."""
    return {"MLFLOW_RUN_ID": identity.run_id, "MLFLOW_EXPERIMENT_ID": identity.experiment_id}


def store_skeleton(
    workspace: str, try_id: str, identity: RunIdentity, *, name: str, user: str, now: float
) -> dict[str, bytes | None]:
    """The store that the job starts with: its experiment and its run, which is running.

    Args:
        workspace: absolute path of the workspace as the job sees it.
        try_id: the job's try.
        identity: its run.
        name: the run's name.
        user: the user's name.
        now: seconds since the epoch.

    Returns:
        Its files by their paths; None is an empty directory.
    """
    place = f"{store_directory(try_id)}/{identity.experiment_id}"
    moment = int(now * 1000)
    experiment = _description(
        artifact_location=_uri(workspace, place),
        creation_time=moment,
        experiment_id=identity.experiment_id,
        last_update_time=moment,
        lifecycle_stage=_ACTIVE,
        name=identity.experiment,
    )
    run = _description(
        artifact_uri=_uri(workspace, f"{place}/{identity.run_id}/artifacts"),
        end_time=None,
        entry_point_name="",
        experiment_id=identity.experiment_id,
        lifecycle_stage=_ACTIVE,
        run_id=identity.run_id,
        run_name=name,
        run_uuid=identity.run_id,
        source_name="",
        source_type=_LOCAL,
        source_version="",
        start_time=moment,
        status=_RUNNING,
        tags=[],
        user_id=user,
    )
    own = f"{identity.experiment_id}/{identity.run_id}"
    empty = dict.fromkeys((f"{own}/{name}" for name in ("metrics", "params", "artifacts")), None)
    return {
        f"{identity.experiment_id}/meta.yaml": experiment, f"{own}/meta.yaml": run, **empty,
    }  # fmt: skip


def _description(**values: object) -> bytes:
    # JSON's values are YAML's.
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items()]
    return "".join(lines).encode()


def _uri(workspace: str, path: str) -> str:
    return PurePosixPath(workspace, path).as_uri()
