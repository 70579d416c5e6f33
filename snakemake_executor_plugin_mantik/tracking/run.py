"""Describe the run of a job: its parameters, its first tags and its destination. Values."""

import getpass
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.mlproject.entry import Call

NAME_LENGTH = 250
"""The longest name of a run that MLflow's databases accept, in characters."""
TAG_LENGTH = 5000
"""The longest value of a tag that all versions of MLflow accept, in characters."""
WAITING_REASON = "mantik.waiting_reason"
"""The tag that holds why a job cannot start, while it cannot."""
_GIT_WAIT_S = 10.0
"""The most seconds that git may take to read a project's commit."""


@dataclass(frozen=True)
class TrackedRun:
    """A job that has a run, of an entry point or of any other rule.

    Attributes:
        call: the entry point and its arguments.
        wildcards: of the Snakemake job.
        params: further parameters of the run.
        members: the names of a group's jobs.
        one: whether a retry goes on in the run of the try before.
        of_members: those of these jobs that have runs of their own below the group's, by number.
    """

    call: Call | None = None
    wildcards: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    one: bool = False
    of_members: Mapping[int, "TrackedMember"] = field(default_factory=dict)

    def values(self, mask: Callable[[str], str]) -> dict[str, str]:
        """Return the run's parameters: an entry point's as they are, others masked by `mask`."""
        others = {name: mask(value) for name, value in self.params.items()}
        return others | dict(self.call.arguments if self.call is not None else {})


@dataclass(frozen=True)
class TrackedMember:
    """A member of a group that has a run of its own."""

    name: str
    rule: str
    run: TrackedRun


@dataclass(frozen=True)
class TrackingTarget:
    """The destination of runs, from the user's environment; a field is empty if unset.

    Attributes:
        uri: MLFLOW_TRACKING_URI without user and password; relative SQLite files made absolute.
        experiment_id, experiment: MLFLOW_EXPERIMENT_ID and MLFLOW_EXPERIMENT_NAME.
        above: MLFLOW_RUN_ID: the run that Snakemake was started in; parent of the workflow's run.
        run_id: MANTIK_RUN_ID: the run that was created for the workflow's only job before Snakemake
            was started (`runs.controller`).
    """

    uri: str = ""
    experiment_id: str = ""
    experiment: str = ""
    above: str = ""
    run_id: str = ""


def tracking_target(environ: Mapping[str, str], workdir: Path) -> TrackingTarget:
    """Return the destination of the user's runs.

    Makes a relative SQLite URI absolute. MLflow passes it on as it is, so another working directory
    would mean another file.
    """
    uri = environ.get("MLFLOW_TRACKING_URI", "")
    relative = uri.removeprefix("sqlite:///")
    if relative != uri and relative and not relative.startswith(("/", ":memory:", "?")):
        uri = f"sqlite:///{workdir / relative}"
    # The outbox must hold no password; the worker reads it from its own environment.
    return TrackingTarget(
        without_user(uri),
        environ.get("MLFLOW_EXPERIMENT_ID", ""),
        environ.get("MLFLOW_EXPERIMENT_NAME", ""),
        above=environ.get("MLFLOW_RUN_ID", ""),
        run_id=environ.get("MANTIK_RUN_ID", ""),
    )


def run_tags(run: TrackedRun, record: TryRecord, workdir: Path, snakefile: str) -> dict[str, str]:
    """Return the tags to create a run with: those of `mlflow run`, and ours.

    May run git, once per project.
    """
    found = {
        "mlflow.user": user_name(),
        "mlflow.runName": record.name,
        **(_of_project(run.call, workdir) if run.call else _of_rule(snakefile, workdir)),
        "mantik.site": record.site,
        "mantik.rule": record.rule,
        "mantik.wildcards": _json(dict(run.wildcards)),
        "mantik.members": _json(run.members) if run.members else "",
        "mantik.try": record.id,
    }
    return {name: value[:TAG_LENGTH] for name, value in found.items() if value}


def _of_project(call: Call, workdir: Path) -> dict[str, str]:
    project = workdir / call.project
    return {
        "mlflow.source.name": str(project),
        "mlflow.source.type": "PROJECT",
        "mlflow.project.entryPoint": call.entry_point,
        "mlflow.project.backend": "mantik",
        **git_tags(project),
        "mantik.project": call.name,
        "mantik.definition": call.definition,
    }


def _of_rule(snakefile: str, workdir: Path) -> dict[str, str]:
    return {
        "mlflow.source.name": snakefile, "mlflow.source.type": "LOCAL", **git_tags(workdir),
    }  # fmt: skip


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


@cache
def user_name() -> str:
    """Return the user's login name, or the user id if it has no name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # an id without a name, as in a container
        return str(os.getuid())


@cache
def git_tags(project: Path) -> Mapping[str, str]:
    """Return tags of a project's commit, repository and local changes; none if it is not in git."""
    commit = _git(project, "rev-parse", "HEAD")
    if not commit:
        return {}
    url = _git(project, "config", "--get", "remote.origin.url")
    # `.snakemake` belongs to Snakemake and to this executor.
    changed = _git(project, "status", "--porcelain", "--", ".", ":(exclude,glob)**/.snakemake/**")
    found = {
        "mlflow.source.git.commit": commit,
        "mlflow.source.git.repoURL": without_user(url or ""),
        "mantik.git.dirty": "" if changed is None else str(bool(changed)).lower(),
    }
    return {name: value for name, value in found.items() if value}


def without_user(url: str) -> str:
    """Remove user and password from a URL, except an SSH URL, which holds no secret."""
    scheme, separator, rest = url.partition("://")
    if not separator or "ssh" in scheme:
        return url
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def without_users(text: str) -> str:
    """Remove users and passwords from the URLs in a text: MLflow's errors name its server."""
    return re.sub(r"(?<=://)[^/\s]+@", "", text)


def _git(project: Path, *arguments: str) -> str | None:
    """Return git's output; None if git fails or is not installed."""
    try:
        ended = subprocess.run(
            ["git", "-C", str(project), *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_GIT_WAIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None
