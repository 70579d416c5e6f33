"""The `shadow:` directive: the command runs in a directory of its own."""

import os
import shlex

from snakemake_executor_plugin_mantik.jobs.paths import SHADOWS
from snakemake_executor_plugin_mantik.jobs.shadow import Shadow, wrap_shadow
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.context import Payload
from snakemake_executor_plugin_mantik.rules.identity import job_identity, plain_path
from snakemake_executor_plugin_mantik.rules.wrapping.start import start_words


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
