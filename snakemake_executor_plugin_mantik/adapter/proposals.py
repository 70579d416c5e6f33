"""Find the jobs that can be submitted before Snakemake requests them.

Such a job needs only files that exist, or that jobs at the same site are about to make, and its
command and resources do not depend on the contents of these (`engine/presubmit`).
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final

from snakemake.exceptions import RuleException
from snakemake.io import is_callable, is_flagged
from snakemake_interface_common.exceptions import WorkflowError

from ..common.errors import MantikError
from ..engine.request import JobRequest
from ..journal import is_utf8
from ..rules import Job, preflight
from ..rules.kinds.groups import Unit
from ..rules.paths.storage import jobs_use_storage
from ..rules.units import job_identity, list_members, member_title
from . import job_files
from .checks import CheckedWorkflow

_MOST_MAKERS: Final = 100
"""Most jobs that one job may wait for at a site: each is a word of the scheduler's option."""
_OWN_LIMITS: Final = ("_cores", "_nodes", "_job_count")
"""Snakemake's own limited resources. Its jobs at sites do not count for `_cores`."""


@dataclass
class Proposals:
    """Walks along the jobs of a run, from those that were requested to those that follow.

    Attributes:
        limit: the most jobs to propose that Snakemake has not requested yet.
    """

    workflow: Any
    checked: CheckedWorkflow
    limit: int
    _there: set[Job] = field(default_factory=set)
    _proposed: set[Job] = field(default_factory=set)
    _todo: dict[Job, Iterator[Job]] = field(default_factory=dict)
    _blocked: dict[Job, Job] = field(default_factory=dict)

    def following(
        self, requested: Job, secrets: Mapping[str, str]
    ) -> Iterator[tuple[Unit, JobRequest]]:
        """Yield the jobs that can be submitted now that `requested` is, and their requests.

        A job comes after the jobs that it waits for. Each is yielded once.
        """
        self._there.add(requested)
        self._proposed.discard(requested)
        if self.limit and not requested.is_group():
            self._todo[requested] = self._following(requested)
        # At the limit, the next call continues here.
        while self._todo and len(self._proposed) < self.limit:
            last = next(iter(self._todo))
            job = next(self._todo[last], None)
            if job is None:
                del self._todo[last]
            elif (found := self._request(job, secrets)) is not None:
                self._there.add(job)
                self._proposed.add(job)
                self._todo[job] = self._following(job)
                yield found

    def failed(self, job: Job) -> None:
        """Note that Snakemake will not request the jobs behind a failed one, for now."""
        todo = [job]
        while todo and self._proposed:
            behind = [
                one for one in self.workflow.dag.depending[todo.pop()] if one in self._proposed
            ]
            self._proposed.difference_update(behind)
            todo += behind

    def _following(self, job: Job) -> Iterator[Job]:
        dag = self.workflow.dag
        jobs = [following for following in dag.depending[job] if dag.needrun(following)]
        jobs.sort(key=lambda job: (-dag.priority(job), job.rule.name, str(job.wildcards)))
        return iter(jobs)

    def _request(self, job: Job, secrets: Mapping[str, str]) -> tuple[Unit, JobRequest] | None:
        """Make the request of a job whose inputs do not all exist; None if it has to wait."""
        if job in self._there or self.workflow.dag.finished(job):
            return None
        makers = self._makers(job)
        if not makers:
            return None
        try:
            unit = Unit(job, self.checked.context)
            if why_not_presubmitted(self.checked, unit, makers):
                return None
            self.checked.refuse(unit)
            request = self.checked.request(unit, secrets)
            places = unit.members[0].paths()
            unmade = {
                place: job_identity(maker)
                for maker, files in makers.items()
                for file in files
                if (place := places.place(file)) is not None
            }
        except Exception:  # noqa: BLE001 - reported when the job is requested
            return None
        # The journal could not record who has made the others.
        return (unit, replace(request, unmade=unmade)) if all(map(is_utf8, unmade)) else None

    def _makers(self, job: Job) -> dict[Job, set[str]]:
        """Return the jobs that are still to make inputs of a job.

        None if one of them is neither requested nor proposed, or if they are too many. That one is
        remembered, so that a job with thousands of inputs is not examined for each.
        """
        dag, makers = self.workflow.dag, dict[Job, set[str]]()
        blocked = self._blocked.get(job)
        if blocked is not None and blocked not in self._there and not dag.finished(blocked):
            return {}
        for maker, files in find_makers(dag, job).items():
            if maker not in self._there or len(makers) == _MOST_MAKERS:
                self._blocked[job] = maker
                return {}
            makers[maker] = files
        return makers


def forecast_presubmitted(
    checked: CheckedWorkflow, jobs: Iterable[Job]
) -> tuple[int, dict[str, str]]:
    """Forecast how far a run goes on without this machine once its first jobs are submitted.

    `jobs` are the jobs and groups to run, in an order that respects dependencies. Return the number
    of jobs at sites that go on, and why each of the next ones waits, by the title of its rule.
    """
    dag, limit = checked.workflow.dag, checked.options.presubmit
    going: set[Job] = set()
    alone, stops = Counter[str](), dict[str, str]()
    for job in jobs:
        members = list_members(job)
        makers = {
            maker: files
            for member in members
            for maker, files in find_makers(dag, member).items()
            if maker not in members
        }
        if not makers.keys() <= going or all(member.rule.norun for member in members):
            continue
        if not makers:
            why = "" if not job.is_local else "runs on this machine"
        elif job.is_group():
            why = "is in a group"
        else:
            unit = Unit(job, checked.context) if job.is_local else checked.units[job]
            why = _why_not_at_site(checked, unit, makers)
            site = "" if why else unit.sites[0]
            alone[site] += 1
            if not why and alone[site] > limit:
                why = f"is beyond --mantik-presubmit {limit}"
        if why:
            stops.setdefault(member_title(job), why)
        else:
            going.update(members)
    return sum(not job.is_local for job in going), stops


def _why_not_at_site(checked: CheckedWorkflow, unit: Unit, makers: Mapping[Job, set[str]]) -> str:
    if len(makers) > _MOST_MAKERS:
        return f"waits for more than {_MOST_MAKERS} jobs"
    try:
        why = why_not_presubmitted(checked, unit, makers)
        if not why and unit.config.api == "unicore" and unit.config.site.scheduler == "none":
            return "runs at a site without a scheduler (Site: Scheduler is none)"
    except (MantikError, RuleException, WorkflowError):
        return "has values that cannot be evaluated yet"
    return why


def find_makers(dag: Any, job: Job) -> dict[Job, set[str]]:
    """Return the jobs that are still to make inputs of a job, and these inputs."""
    return {
        maker: files
        for maker, files in dag.dependencies[job].items()
        if dag.needrun(maker) and not dag.finished(maker)
    }


def why_not_presubmitted(
    checked: CheckedWorkflow, unit: Unit, makers: Mapping[Job, set[str]]
) -> str:
    """Return why a job cannot be submitted before its inputs exist, or '' if it can.

    `makers` are the jobs that are still to make its inputs, and these inputs. The words follow the
    job's name.

    Raises:
        UserError: the resources of a job are wrong.
    """
    return next(chain(_reasons(checked, unit), _reasons_of_makers(checked, unit, makers)), "")


def _pool(checked: CheckedWorkflow, unit: Unit) -> str | None:
    asked = unit.asked
    return checked.planners[unit.sites[0]].resources(asked.resources, asked.threads).pool


def _reasons(checked: CheckedWorkflow, unit: Unit) -> Iterator[str]:
    workflow, job, [at] = checked.workflow, unit.job, unit.members
    if job.is_local:
        yield "runs on this machine"
    if jobs_use_storage(workflow):
        yield "is in a workflow whose jobs reach the storage themselves"
    if workflow.dag.get_job_group(job) is not None:
        yield "is in a group"
    if at.nested is not None:
        yield f"has {at.nested} and runs in a Snakemake of its own"
    if any(is_flagged(path, "update") for path in job.output):
        yield "updates an output"
    if job_files.is_cached(workflow, job):
        yield "may be in Snakemake's cache"
    for name, limit in workflow.global_resources.items():
        if name not in _OWN_LIMITS and limit.value is not None and job.resources.get(name):
            yield f"uses the resource {name}, which --resources limits"
    if job.has_unfinished_queue_input():
        yield "reads files from a queue"
    if at.anywhere and len(at.sites) > 1:
        yield "may run at any site, which is chosen when its inputs exist"
    if not preflight.is_determined(at):
        yield "has values that depend on files which do not exist yet"


def _reasons_of_makers(
    checked: CheckedWorkflow, unit: Unit, makers: Mapping[Job, set[str]]
) -> Iterator[str]:
    rule = unit.job.rule
    computed = any(map(is_callable, rule.params)) or any(
        value.is_evaluable() for key, value in rule.resources.items() if key != "tmpdir"
    )
    if computed and any(os.path.lexists(file) for files in makers.values() for file in files):
        yield "has values that may depend on files which are to be made again"
    for maker, files in makers.items():
        name = maker.rule.name
        if maker.is_checkpoint:
            yield f"needs the checkpoint {name}"
        if maker.is_local:
            yield f"needs an output of {name}, which runs on this machine"
        if checked.workflow.dag.get_job_group(maker) is not None:
            yield f"needs an output of {name}, which is in a group"
        there = Unit(maker, unit.context)
        if there.anywhere and len(there.sites) > 1:
            yield f"needs an output of {name}, which may run at any site"
        elif there.sites[0] != unit.sites[0]:
            yield f"needs an output of {name}, which runs at another site"
        elif not maker.is_local and _pool(checked, there) != _pool(checked, unit):
            yield f"needs an output of {name}, which does not run in the same pool"
        if any(is_flagged(file, "touch") for file in maker.output if file in files):
            yield f"needs a touch() output of {name}, which Snakemake makes on this machine"
        if maker.benchmark is not None and maker.benchmark in files:
            yield f"needs the benchmark file of {name}, which is written on this machine"
