"""Describe a whole workflow for the journal and for MLflow, from Snakemake's objects."""

import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import snakemake

from snakemake_executor_plugin_mantik.pictures.assemble import MAX_LISTED_JOBS
from snakemake_executor_plugin_mantik.rules.units import job_display_name, job_identity
from snakemake_executor_plugin_mantik.tracking.run import user_name, without_user
from snakemake_executor_plugin_mantik.tracking.workflow import TrackedWorkflow, mask_command


def describe_workflow(workflow: Any) -> TrackedWorkflow:
    """Describe how the workflow was started."""
    return TrackedWorkflow(
        snakefile=str(workflow.main_snakefile),
        command=("snakemake", *_without_secret(workflow, sys.argv[1:])),
        config=dict(workflow.config),
        version=snakemake.__version__,
    )


def _without_secret(workflow: Any, arguments: Sequence[str]) -> list[str]:
    """Return arguments without the value of `--mantik-notify`, which may be a secret address."""
    given = workflow.executor_settings.notify
    return [word.replace(given, "…") if given else word for word in arguments]


def describe_run(
    workflow: TrackedWorkflow, workdir: Path, mask: Callable[[str], str]
) -> dict[str, str]:
    """Describe a run of Snakemake for the journal, without the secrets that `mask` replaces."""
    return {
        "name": workflow.name(workdir),
        "command": mask_command(workflow.command, mask),
        "snakefile": mask(without_user(workflow.snakefile)),
        "directory": str(workdir),
        "host": platform.node(),
        "user": user_name(),
        "snakemake": workflow.version,
        "executor": version("snakemake-executor-plugin-mantik"),
        "python": platform.python_version(),
    }


def describe_pipeline(dag: Any) -> dict[str, object]:
    """Return a workflow's jobs and their dependencies, for `pictures.assemble.make_picture`.

    Above `MAX_LISTED_JOBS` jobs, return the dependencies of rules only: describing a job takes some
    20 µs. Call it in Snakemake's main thread, which alone changes the DAG.
    """
    jobs = list(dag.jobs)
    needs = [(need, job) for job in jobs for need in dag.dependencies[job]]
    rules = dict.fromkeys((need.rule.name, job.rule.name) for need, job in needs)
    found: dict[str, object] = {"jobs": [], "edges": [], "rule_edges": list(rules)}
    if len(jobs) <= MAX_LISTED_JOBS:
        ids = {job: job_identity(job) for job in jobs}
        needed = set(dag.needrun_jobs(exclude_finished=False))
        found["jobs"] = [
            {
                "id": ids[job],
                "name": job_display_name(job),
                "rule": job.rule.name,
                "wildcards": {key: str(value) for key, value in job.wildcards_dict.items()},
                "needed": job in needed,
                "done": dag.finished(job),
            }
            for job in jobs
        ]
        found["edges"] = [(ids[a], ids[b]) for a, b in needs if a in ids]
    return found


def is_done(dag: Any) -> bool:
    """Return whether no job is left to run."""
    return not any(True for _ in dag.needrun_jobs())
