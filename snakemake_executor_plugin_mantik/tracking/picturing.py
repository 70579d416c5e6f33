"""Make the `Picture` of a workflow from its jobs and from Snakemake's pipeline."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from snakemake_executor_plugin_mantik.tracking.ledger import GOES_ON, JobRow
from snakemake_executor_plugin_mantik.tracking.pictures import Node, NodeState, Picture

MAX_LISTED_JOBS: Final = 1000
"""The most jobs that a pipeline lists; of more it holds only the edges between rules."""

_STATES: Final[Mapping[str, NodeState]] = {
    "SCHEDULED": NodeState.QUEUED,
    "RUNNING": NodeState.RUNNING,
    "FINISHED": NodeState.FINISHED,
    "FAILED": NodeState.FAILED,
    "KILLED": NodeState.KILLED,
    GOES_ON: NodeState.FINISHED,
}


def make_picture(title: str, pipeline: Any, jobs: Sequence[JobRow], now: float) -> Picture:
    """Make the picture of a workflow.

    Args:
        title: the workflow's name.
        pipeline: None, or what `adapter.workflow_metadata` describes: `jobs`, each with `id`,
            `name`, `rule`, `wildcards`, `needed` (whether it is to run) and `done`; `edges` between
            them; and `rule_edges`. Without `jobs`, the picture shows the submitted ones.
        jobs: all tries of the submitted jobs.
        now: seconds since the epoch.
    """
    known = pipeline or {"jobs": [], "edges": [], "rule_edges": []}
    tries: dict[str, list[JobRow]] = {}
    for job in jobs:
        if job.behind:
            continue
        for each in job.members or (job.job,):
            tries.setdefault(each, []).append(job)
    declared = {each["id"]: each for each in known["jobs"]}
    nodes = [
        _node(each, tries.get(name, []))
        for name, each in declared.items()
        if each["needed"] or name in tries
    ]
    nodes += [_sent(name, of[-1]) for name, of in tries.items() if name not in declared]
    shown = {node.id for node in nodes}
    return Picture(
        title,
        tuple(nodes),
        now,
        tuple((a, b) for a, b in known["edges"] if a in shown and b in shown),
        tuple((a, b) for a, b in known["rule_edges"]),
        tuple(_earlier(tries.values())),
    )


def _node(declared: Mapping[str, Any], tries: Sequence[JobRow]) -> Node:
    of = {
        "id": declared["id"], "name": declared["name"], "rule": declared["rule"],
        "wildcards": declared["wildcards"],
    }  # fmt: skip
    if not tries:
        return Node(**of, state=NodeState.FINISHED if declared["done"] else NodeState.WAITING)
    return Node(**of, **_of_try(tries[-1]))


def _sent(name: str, job: JobRow) -> Node:
    return Node(id=name, name=job.name, rule=job.rule, **_of_try(job))


def _earlier(tries: Iterable[Sequence[JobRow]]) -> Iterable[Node]:
    for of_job in tries:
        for job in of_job[:-1]:
            yield _sent(job.try_id, job)


def _of_try(job: JobRow) -> dict[str, Any]:
    return {
        "state": _STATES[job.state],
        "site": job.site,
        "queued": job.queued,
        "started": job.started,
        "ended": job.ended,
        "note": job.note,
    }
