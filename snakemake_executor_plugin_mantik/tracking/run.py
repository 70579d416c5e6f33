"""What is tracked: a run of an entry point, and what MLflow is told of it at first. Values."""

import getpass
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.mlproject.call import Call

GIT_WAIT_S = 10.0
"""Seconds that git may take to tell the commit of a project."""


@dataclass(frozen=True)
class TrackedRun:
    """A job that runs an entry point.

    Attributes:
        call: the entry point and its arguments.
        wildcards: of the Snakemake job.
    """

    call: Call
    wildcards: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """Where runs go, as the user's environment says; empty where it does not.

    Attributes:
        uri: MLFLOW_TRACKING_URI, relative SQLite files made absolute, without user and password.
        experiment_id, experiment: MLFLOW_EXPERIMENT_ID and MLFLOW_EXPERIMENT_NAME.
        run_id: MANTIK_RUN_ID: the run that was made for the workflow's only job by whoever started
            Snakemake (`runs.controller`).
    """

    uri: str = ""
    experiment_id: str = ""
    experiment: str = ""
    run_id: str = ""


def target(environ: Mapping[str, str], workdir: Path) -> Target:
    """Where the user's runs go.

    MLflow hands a relative SQLite URI on as it is, so that another working directory would mean
    another file.
    """
    uri = environ.get("MLFLOW_TRACKING_URI", "")
    relative = uri.removeprefix("sqlite:///")
    if relative != uri and relative and not relative.startswith(("/", ":memory:", "?")):
        uri = f"sqlite:///{workdir / relative}"
    # What the outbox keeps holds no password; the worker has it from its own environment.
    return Target(
        without_user(uri),
        environ.get("MLFLOW_EXPERIMENT_ID", ""),
        environ.get("MLFLOW_EXPERIMENT_NAME", ""),
        run_id=environ.get("MANTIK_RUN_ID", ""),
    )


def tags(run: TrackedRun, record: TryRecord, workdir: Path) -> dict[str, str]:
    """The tags that a run has from its start: those of `mlflow run`, and ours.

    May ask git, once per project.
    """
    project = workdir / run.call.project
    found = {
        "mlflow.user": user(),
        "mlflow.runName": record.name,
        "mlflow.source.name": str(project),
        "mlflow.source.type": "PROJECT",
        "mlflow.project.entryPoint": run.call.entry_point,
        "mlflow.project.backend": "mantik",
        **git_tags(project),
        "mantik.project": run.call.name,
        "mantik.definition": run.call.definition,
        "mantik.site": record.site,
        "mantik.rule": record.rule,
        "mantik.wildcards": json.dumps(dict(run.wildcards), ensure_ascii=False, sort_keys=True),
        "mantik.try": record.id,
    }
    return {name: value for name, value in found.items() if value}


@cache
def user() -> str:
    """The user's login name, as far as it can be found out."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # an id without a name, in a container
        return str(os.getuid())


@cache
def git_tags(project: Path) -> Mapping[str, str]:
    """Commit and repository of a project that is in git, else nothing."""
    commit = _git(project, "rev-parse", "HEAD")
    if not commit:
        return {}
    url = _git(project, "config", "--get", "remote.origin.url")
    found = {"mlflow.source.git.commit": commit, "mlflow.source.git.repoURL": without_user(url)}
    return {name: value for name, value in found.items() if value}


def without_user(url: str) -> str:
    """A URL without user name and password; those of SSH name no secret."""
    scheme, separator, rest = url.partition("://")
    if not separator or "ssh" in scheme:
        return url
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def _git(project: Path, *arguments: str) -> str:
    try:
        ended = subprocess.run(
            ["git", "-C", str(project), *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=GIT_WAIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""
