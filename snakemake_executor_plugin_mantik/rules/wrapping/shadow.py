"""The `shadow:` directive: bash around a command that makes a shadow directory and removes it.

What the command makes there beside its outputs and logs is gone afterwards. Facts of Snakemake
(jobs.py `Job.prepare`, dag.py `unshadow_output`): links to inputs of `minimal` are relative, those
of `shallow` and `full` absolute; after a failure only logs are kept.
"""

import os
import shlex
from dataclasses import dataclass

from snakemake_executor_plugin_mantik.jobs.paths import SHADOWS
from snakemake_executor_plugin_mantik.jobs.templates import load_template
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.context import Payload, start_words
from snakemake_executor_plugin_mantik.rules.units import job_identity, plain_path


def shadow_payload(
    payload: Payload, job: Job, iteration: int | None, also: tuple[str, ...] = ()
) -> Payload:
    """The payload in its job's shadow directory, if the rule has a `shadow:`.

    Args:
        payload: what runs there.
        job: the Snakemake job.
        iteration: which run of a command that is measured it is; all of them share the directory.
        also: files of the workflow's directory that the command reads beside its inputs.
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
    """The paths that lie in the working directory; absolute ones are where they are."""
    return tuple(dict.fromkeys(plain_path(p) for p in paths if not os.path.isabs(p)))  # type: ignore[attr-defined] # Snakemake's Namedlist


@dataclass(frozen=True)
class Shadow:
    """A job's shadow directory; all paths are relative to the workspace.

    Attributes:
        place: where it is.
        depth: `minimal`, `copy-minimal`, `shallow` or `full`.
        inputs: what the rule reads.
        outputs: what is moved to its real place after a success.
        logs: what is moved in any case.
        also: what the command reads beside the inputs; linked where it is not there already.
    """

    place: str
    depth: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


def wrap_shadow(
    shadow: Shadow, start: str, *, rule: str, first: bool = True, last: bool = True
) -> str:
    """A text for bash that runs a program in a shadow directory.

    Args:
        shadow: the directory.
        start: the program and its arguments, quoted.
        rule: the rule's name, for messages.
        first: whether it is the first run there of a command that is measured: it makes the
            directory, others find what the one before left.
        last: whether it is the last one, unless one fails: it empties and removes the directory.
    """
    folders = {os.path.dirname(path) for path in (*shadow.inputs, *shadow.outputs, *shadow.logs)}
    return load_template("shadow.sh.j2").render(
        who=shlex.quote(f"rule {rule}"),
        shadow=shlex.quote(shadow.place),
        depth=shadow.depth,
        folders=[shlex.quote(folder) for folder in sorted(folders) if folder],
        inputs=[_linked(path, shadow.place) for path in shadow.inputs],
        also=[_linked(path, shadow.place) for path in shadow.also],
        outputs=[shlex.quote(path) for path in shadow.outputs],
        logs=[shlex.quote(path) for path in shadow.logs],
        start=start,
        first=first,
        last=last,
    )


def _linked(path: str, place: str) -> tuple[str, str]:
    """The path, and what a link there in the shadow directory says of it; both quoted."""
    back = os.path.relpath(path, os.path.dirname(os.path.join(place, path)))
    return shlex.quote(path), shlex.quote(back)
