"""Make the `Picture` of a workflow from the tries of its jobs and from Snakemake's pipeline."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from snakemake_executor_plugin_mantik.pictures.value import Node, NodeState, Picture

MAX_LISTED_JOBS: Final = 1000
"""The most jobs that a pipeline lists; of more it holds only the edges between rules."""


@dataclass(frozen=True)
class PicturedTry:
    """A try of a job, or of a group.

    Attributes:
        jobs: the identities of its job, or of the members of its group, as the pipeline has them.
        node: what it looks like; its id is that of the try.
    """

    jobs: tuple[str, ...]
    node: Node


def make_picture(
    title: str, pipeline: Any, tries: Iterable[PicturedTry], now: float, *, over: bool = False
) -> Picture:
    """Make the picture of a workflow.

    Args:
        title: the workflow's name.
        pipeline: None, or what `adapter.workflow_metadata` describes: `jobs`, each with `id`,
            `name`, `rule`, `wildcards`, `needed` (whether it is to run) and `done`; `edges` between
            them; and `rule_edges`. Without `jobs`, the picture shows the submitted ones.
        tries: all tries of the submitted jobs, the oldest first.
        now: seconds since the epoch.
        over: whether no Snakemake is to run the jobs that have no try.
    """
    known = pipeline or {"jobs": [], "edges": [], "rule_edges": []}
    by_job: dict[str, list[PicturedTry]] = {}
    for each in tries:
        for job in each.jobs:
            by_job.setdefault(job, []).append(each)
    declared = {each["id"]: each for each in known["jobs"]}
    nodes = [
        _node(each, by_job.get(name, []), over=over)
        for name, each in declared.items()
        if each["needed"] or name in by_job
    ]
    nodes += [replace(of[-1].node, id=name) for name, of in by_job.items() if name not in declared]
    shown = {node.id for node in nodes}
    return Picture(
        title,
        tuple(nodes),
        now,
        tuple((a, b) for a, b in known["edges"] if a in shown and b in shown),
        tuple((a, b) for a, b in known["rule_edges"]),
        tuple(each.node for of in by_job.values() for each in of[:-1]),
    )


def _node(declared: Mapping[str, Any], tries: Sequence[PicturedTry], *, over: bool) -> Node:
    of = {
        "id": declared["id"], "name": declared["name"], "rule": declared["rule"],
        "wildcards": declared["wildcards"],
    }  # fmt: skip
    if not tries:
        left = NodeState.SKIPPED if over else NodeState.WAITING
        return Node(**of, state=NodeState.FINISHED if declared["done"] else left)
    return replace(tries[-1].node, **of)
