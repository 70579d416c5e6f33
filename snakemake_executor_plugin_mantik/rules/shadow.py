"""Wrap a command of a rule with `shadow:` in bash that makes and removes a shadow directory.

All files except outputs and logs are deleted with the directory. As in Snakemake (jobs.py
`Job.prepare`, dag.py `unshadow_output`), links to inputs of `minimal` are relative, those of
`shallow` and `full` absolute, and after a failure only logs are kept.
"""

import os
import shlex
from dataclasses import dataclass

from snakemake_executor_plugin_mantik.jobs.library import use_library
from snakemake_executor_plugin_mantik.jobs.paths import SHADOWS
from snakemake_executor_plugin_mantik.jobs.script import link_lines
from snakemake_executor_plugin_mantik.storage.paths import find_dataset, find_storage_link

from . import Job
from .context import Payload, start_words
from .paths.job_paths import command_text
from .units import job_identity, plain_path


def shadow_payload(
    payload: Payload, job: Job, iteration: int | None, also: tuple[str, ...] = ()
) -> Payload:
    """Wrap the payload in its job's shadow directory, if the rule has a `shadow:`.

    All repetitions (`iteration`) of a benchmark share the directory. `also` lists files of the
    workflow's directory that the command reads in addition to its inputs.
    """
    depth = job.rule.shadow_depth
    if depth is None:
        return payload
    shadow = Shadow(
        place=f"{SHADOWS}/{job_identity(job)[:16]}",
        depth=depth,
        inputs=_relative(job.input),
        outputs=_relative(job.output),
        logs=_relative(job.log),
        also=also,
        storage_link=find_storage_link(job),
    )
    start, uploads = start_words(payload)
    text = wrap_shadow(
        shadow,
        shlex.join(start),
        rule=job.rule.name,
        first=not iteration,
        last=iteration is None or iteration + 1 == job.benchmark_repeats,
    )
    return payload.around(text, uploads)


def _relative(paths: object) -> tuple[str, ...]:
    """Return the relative paths. Absolute ones are not moved to the shadow directory."""
    return tuple(
        dict.fromkeys(
            plain_path(command_text(p))
            for p in paths  # type: ignore[attr-defined] # Snakemake's Namedlist
            if find_dataset(p) is None and not os.path.isabs(command_text(p))
        )
    )


@dataclass(frozen=True)
class Shadow:
    """A job's shadow directory. All paths are relative to the workspace.

    Attributes:
        place: its path.
        depth: `minimal`, `copy-minimal`, `shallow` or `full`.
        inputs: the rule's inputs.
        outputs: files that are moved out of it after a success.
        logs: files that are moved out of it in any case.
        also: further files that the command reads; linked unless they are there already.
        storage_link: see `jobs.spec.JobSpec`.
    """

    place: str
    depth: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    storage_link: str = ""


def wrap_shadow(
    shadow: Shadow, start: str, *, rule: str, first: bool = True, last: bool = True
) -> str:
    """Return a text for bash that runs a program in a shadow directory.

    `start` is the program and its arguments, quoted. The `first` repetition of a benchmark makes
    the directory, which later ones reuse. The `last` one, or one that fails, removes it.
    """
    folders = {os.path.dirname(path) for path in (*shadow.inputs, *shadow.outputs, *shadow.logs)}
    arrays = {
        "folders": sorted(filter(None, folders)),
        "shadow_inputs": [word for path in shadow.inputs for word in (path, _back(path, shadow))],
        "also": [word for path in shadow.also for word in (path, _back(path, shadow))],
        "shadow_outputs": shadow.outputs,
        "shadow_logs": shadow.logs,
    }
    return "\n".join(
        [
            f"{use_library()} || exit 1",
            f"_m_who={shlex.quote(f'rule {rule}')}",
            f"_m_shadow={shlex.quote(shadow.place)} _m_depth={shadow.depth}",
            f"_m_first={'yes' if first else ''} _m_last={'yes' if last else ''}",
            *(link_lines(shadow.storage_link) if shadow.storage_link else ()),
            *(f"_m_{name}=({shlex.join(words)})" for name, words in arrays.items() if words),
            f"_m_run_in_shadow {start}",
            "",
        ]
    )


def _back(path: str, shadow: Shadow) -> str:
    """Return the target of a link at the path in the shadow directory."""
    return os.path.relpath(path, os.path.dirname(os.path.join(shadow.place, path)))
