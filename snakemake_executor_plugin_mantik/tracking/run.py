"""Describe the runs of jobs and of their workflow: parameters, first tags and destination. Values.

Jobs may also log to the tracking server directly (`--mantik-track-direct`). The variables that they
need travel like secrets: in a file that only the user can read, which the job removes.
"""

import getpass
import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from ..common.errors import UserError
from ..common.secret_names import MASK, is_secret
from ..journal import AttemptRecord
from ..mlproject.entry import Call

NAME_LENGTH = 250
"""The longest name of a run that MLflow's databases accept, in characters."""
TAG_LENGTH = 5000
"""The longest value of a tag that all versions of MLflow accept, in characters."""
WAITING_REASON = "mantik.waiting_reason"
"""The tag that holds why a job cannot start, while it cannot."""
DESTINATION = ("uri", "experiment_id", "experiment")
"""The fields of `TrackingTarget` that each run has among its data."""
_GIT_WAIT_S = 10.0
"""The most seconds that git may take to read a project's commit."""


@dataclass(frozen=True)
class TrackedRun:
    """A job that has a run, of an entry point or of any other rule.

    Attributes:
        params: further parameters of the run.
        members: the names of a group's jobs.
        one: whether a retry goes on in the run of the attempt before.
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
    # The journal must hold no password; who publishes reads it from the environment.
    return TrackingTarget(
        without_user(uri),
        environ.get("MLFLOW_EXPERIMENT_ID", ""),
        environ.get("MLFLOW_EXPERIMENT_NAME", ""),
        above=environ.get("MLFLOW_RUN_ID", ""),
        run_id=environ.get("MANTIK_RUN_ID", ""),
    )


def run_tags(
    run: TrackedRun, record: AttemptRecord, workdir: Path, snakefile: str
) -> dict[str, str]:
    """Return the tags to create a run with: those of `mlflow run`, and ours.

    May run git, once per project.
    """
    found = {
        "mlflow.user": user_name(),
        "mlflow.runName": record.name,
        **(_of_project(run.call, workdir) if run.call else _of_rule(snakefile, workdir)),
        "mantik.site": record.site,
        "mantik.rule": record.rule,
        "mantik.wildcards": json.dumps(dict(run.wildcards), ensure_ascii=False, sort_keys=True),
        "mantik.members": json.dumps(run.members, ensure_ascii=False) if run.members else "",
        "mantik.attempt_id": record.id,
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


WORKFLOW: Final = "mantik.workflow"
"""The tag that identifies a workflow's run."""
PARENT_RUN_TAG: Final = "mlflow.parentRunId"
ARTIFACT_FOLDER: Final = "mantik"
"""The folder of a run's artifacts for the executor's files, such as script, log and pictures."""
_VALUE_LENGTH: Final = 6000
"""The longest value of a parameter that MLflow (3.17) accepts, in characters."""
_NAME_LENGTH: Final = 250
"""The longest name of a parameter, in characters."""
_MOST_PARAMS: Final = 500
"""The most parameters of a run: a workflow's configuration may be a whole sample sheet."""
_STRANGE: Final = re.compile(r"[^\w./ :-]")
"""Matches characters that MLflow does not allow in a parameter's name."""
_USUAL: Final = ("Snakefile", "snakefile", "workflow/Snakefile", "workflow/snakefile")


@dataclass(frozen=True)
class TrackedWorkflow:
    """A workflow as it was started.

    Attributes:
        snakefile: the path or URL of its main file.
    """

    snakefile: str
    command: Sequence[str] = ()
    config: Mapping[str, object] = field(default_factory=dict)
    version: str = ""

    def identity(self, target: TrackingTarget) -> str:
        """Return what identifies the workflow in its directory: its Snakefile and destination."""
        return json.dumps([self.snakefile, target.uri, target.experiment_id, target.experiment])

    def name(self, workdir: Path) -> str:
        """Return the directory's name, with the Snakefile's if that is unusual."""
        path = workdir / self.snakefile
        if not path.is_relative_to(workdir):
            return f"{workdir.name}: {path.name}"
        inside = path.relative_to(workdir)
        if inside.as_posix() in _USUAL:
            return workdir.name
        return f"{workdir.name}: {(inside.parent if inside.name in _USUAL else inside).name}"


def workflow_tags(
    workflow: TrackedWorkflow,
    key: str,
    target: TrackingTarget,
    workdir: Path,
    mask: Callable[[str], str],
) -> dict[str, str]:
    """Return the tags to create a workflow's run with. May run git, once per directory."""
    found = {
        "mlflow.user": user_name(),
        **_of_rule(workflow.snakefile, workdir),
        PARENT_RUN_TAG: target.above,
        WORKFLOW: key,
        "mantik.command": mask_command(workflow.command, mask),
        "mantik.directory": str(workdir),
        "mantik.host": platform.node(),
        "mantik.snakemake": workflow.version,
    }
    return {name: value[:TAG_LENGTH] for name, value in found.items() if value}


def mask_command(words: Sequence[str], mask: Callable[[str], str]) -> str:
    """Format a command line; mask known secrets, and the value of NAME=VALUE with a secret NAME."""
    shown = []
    for word in words:
        name, equals, value = word.partition("=")
        hidden = f"{name}={MASK}" if equals and is_secret(name) and value else word
        shown.append(shlex.quote(mask(without_user(hidden))))
    return " ".join(shown)


def flatten_config(values: Mapping[str, object], mask: Callable[[str], str]) -> dict[str, str]:
    """Flatten values to parameters: `a: {b: 1}` becomes `a.b`, and a list becomes JSON.

    Masks secrets and cuts what is too long.
    """
    found: dict[str, str] = {}
    for name, value in _flat(values, ""):
        if len(found) == _MOST_PARAMS:
            break
        text = MASK if is_secret(name) and value not in ("", None) else mask(_text(value))
        found[_STRANGE.sub("_", name)[:_NAME_LENGTH]] = text[:_VALUE_LENGTH]
    return found


def _flat(values: Mapping[str, object], above: str) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


_OPTION: Final = "--mantik-track-direct"
_URI: Final = "MLFLOW_TRACKING_URI"
_CREDENTIALS: Final = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
_SETTINGS: Final = ("MLFLOW_TRACKING_INSECURE_TLS", "MLFLOW_WORKSPACE")
"""Further settings of MLflow's client, except those that name files of this machine."""


def sent_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the user's environment to pass to a job.

    Raises:
        UserError: the tracking URI is none that a site's nodes could reach.
    """
    uri = environ.get(_URI, "")
    _check(uri)
    names = (*_CREDENTIALS, *_SETTINGS)
    return {_URI: uri} | {name: environ[name] for name in names if environ.get(name)}


def direct_remark(environ: Mapping[str, str]) -> str:
    """Return the note to show before credentials leave the machine."""
    uri = environ.get(_URI, "")
    held = [name for name in _CREDENTIALS if environ.get(name)]
    held += [f"the password in {_URI}"] if without_user(uri) != uri else []
    what = f"so these credentials go to the sites: {', '.join(held)}" if held else "without any"
    what += "" if held else " credential: none is set"
    return f"{_OPTION}: jobs log to {without_user(uri)} directly, {what}."


def _check(uri: str) -> None:
    url = urlsplit(uri)
    if url.scheme not in ("http", "https") or not url.hostname:
        what = f"{_URI} is {without_user(uri)}" if uri else f"{_URI} is not set"
        raise UserError(
            f"{_OPTION} needs a tracking server that the sites' nodes can reach, but {what}",
            do=f"Set {_URI} to the URL of one (https://…), or leave the option out: then this"
            " machine forwards what jobs log",
        )
    if _is_here(url.hostname):
        raise UserError(
            f"{_OPTION}: for a job, {url.hostname} means the node that it runs on",
            where=f"{_URI}={without_user(uri)}",
            do="Use an address at which nodes can reach the server, or leave the option out: then"
            " this machine forwards what jobs log",
        )


def _is_here(host: str) -> bool:
    """Return whether a name or address refers to the machine that uses it."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified
