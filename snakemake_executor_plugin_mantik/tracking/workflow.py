"""What is told of a workflow as a whole: the run above those of its jobs. Values."""

import json
import platform
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from snakemake_executor_plugin_mantik.tracking.masking import MASK, is_secret
from snakemake_executor_plugin_mantik.tracking.run import (
    TAG_LENGTH,
    TrackingTarget,
    git_tags,
    user_name,
    without_user,
)

WORKFLOW: Final = "mantik.workflow"
"""The tag that a workflow's run is known by."""
PARENT_RUN_TAG: Final = "mlflow.parentRunId"
ARTIFACT_FOLDER: Final = "mantik"
"""Folder of a run's artifacts that holds what the executor adds: script, log, backend config."""
_VALUE_LENGTH: Final = 6000
"""Characters of a parameter's value that MLflow (3.17) takes."""
_NAME_LENGTH: Final = 250
"""Characters of a parameter's name."""
_MOST_PARAMS: Final = 500
"""Parameters that a run gets at most: a workflow's configuration may be a whole sample sheet."""
_STRANGE: Final = re.compile(r"[^\w./ :-]")
"""What MLflow does not allow in a parameter's name."""
_USUAL: Final = ("Snakefile", "snakefile", "workflow/Snakefile", "workflow/snakefile")


@dataclass(frozen=True)
class TrackedWorkflow:
    """A workflow as it was started.

    Attributes:
        snakefile: its main file; a path, or a URL of one that was read from elsewhere.
        command: the words of the command line.
        config: Snakemake's `config`.
        version: Snakemake's.
    """

    snakefile: str
    command: Sequence[str] = ()
    config: Mapping[str, object] = field(default_factory=dict)
    version: str = ""

    def identity(self, target: TrackingTarget) -> str:
        """What is the same when it is started again in the same directory: file and place."""
        return json.dumps([self.snakefile, target.uri, target.experiment_id, target.experiment])

    def name(self, workdir: Path) -> str:
        """The directory's name, and that of the Snakefile if it is an unusual one."""
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
    """The tags that a workflow's run has from its start. May ask git, once per directory."""
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
    """A command line without what its own words, or their names, say to be secret."""
    shown = []
    for word in words:
        name, equals, value = word.partition("=")
        hidden = f"{name}={MASK}" if equals and is_secret(name) and value else word
        shown.append(shlex.quote(mask(without_user(hidden))))
    return " ".join(shown)


def flatten_config(values: Mapping[str, object], mask: Callable[[str], str]) -> dict[str, str]:
    """Values as parameters: `a: {b: 1}` is `a.b`; secrets are masked, and what is too long is cut.

    Lists of plain values are one value, as JSON.
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
