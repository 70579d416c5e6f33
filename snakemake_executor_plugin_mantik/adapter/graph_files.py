"""What Snakemake's graph of jobs says of a workflow's files: the targets, and which rules read."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_mantik.jobs.paths import at_or_above
from snakemake_executor_plugin_mantik.storage.paths import storable_path, workspace_path


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
