"""Describe the run of a workflow, the parent of its jobs' runs. Values."""

import json
import platform
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from snakemake_executor_plugin_mantik.common.secret_names import MASK, is_secret

from .run import TAG_LENGTH, TrackingTarget, git_tags, user_name, without_user

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
        command: the words of the command line.
        config: Snakemake's `config`.
        version: Snakemake's version.
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
        "mlflow.source.name": workflow.snakefile,
        "mlflow.source.type": "LOCAL",
        **git_tags(workdir),
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
