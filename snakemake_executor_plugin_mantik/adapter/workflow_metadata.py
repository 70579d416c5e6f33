"""Describe a whole workflow for the journal and for MLflow, from Snakemake's objects."""

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import snakemake

from ..jobs.paths import at_or_above
from ..rules.units import job_display_name, job_identity
from ..storage.paths import storable_path, workspace_path
from ..tracking.run import TrackedWorkflow, mask_command, user_name, without_user
from ..views.picture import MAX_LISTED_JOBS


def describe_workflow(workflow: Any) -> TrackedWorkflow:
    """Describe how the workflow was started."""
    # The value of `--mantik-notify` may hold a secret.
    secret = workflow.executor_settings.notify
    words = [word.replace(secret, "…") if secret else word for word in sys.argv[1:]]
    return TrackedWorkflow(
        snakefile=str(workflow.main_snakefile),
        command=("snakemake", *words),
        config=dict(workflow.config),
        version=snakemake.__version__,
    )


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
    """Return a workflow's jobs and their dependencies, for `views.make_picture`.

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


@dataclass(frozen=True)
class GraphFiles:
    """The files of a workflow, without datasets. All paths are those in a workspace.

    Attributes:
        workdir: the workflow's working directory.
        targets: the inputs of a target rule without outputs, such as `all`, the outputs of another
            target rule, and target files.
        readers: the names of the rules that read a file, or files in a directory, by its path.
    """

    workdir: Path
    targets: tuple[str, ...]
    readers: Mapping[str, tuple[str, ...]]


def read_graph_files(workflow: Any) -> GraphFiles:
    """Read the files of a workflow, whose directory is the current one, from its complete DAG."""
    dag = workflow.dag
    readers: dict[str, set[str]] = {}
    for job in dag.jobs:
        for path in _paths(job.input):
            for each in at_or_above(path):
                readers.setdefault(each, set()).add(job.rule.name)
    targets = {path for job in dag.targetjobs for path in _paths(_wanted(job, dag))}
    return GraphFiles(
        Path.cwd(),
        tuple(sorted(targets)),
        {path: tuple(sorted(rules)) for path, rules in readers.items()},
    )


def _wanted(job: Any, dag: Any) -> Iterable[Any]:
    """Return the files for which a target job is in the graph."""
    if not job.output:
        return job.input  # type: ignore[no-any-return]
    files = [] if job.rule in dag.targetrules else [f for f in job.output if f in dag.targetfiles]
    return files or job.output


def _paths(files: Iterable[Any]) -> Iterator[str]:
    """Yield the paths in a workspace of those files that may lie there."""
    for file in files:
        stored = storable_path(file)
        if stored is not None:
            yield stored
        elif not getattr(file, "is_storage", False):
            yield workspace_path(str(file))
