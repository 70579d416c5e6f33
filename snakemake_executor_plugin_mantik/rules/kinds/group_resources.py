"""Compute the resources that a group of jobs requests: one site, and its members' needs."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from snakemake.common.tbdstring import TBDString
from snakemake.exceptions import ResourceInsufficiencyError
from snakemake.resources import GroupResources
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.jobs.resources import merge_resources
from snakemake_executor_plugin_mantik.jobs.spec import Resources

from .. import Job
from ..resources import (
    SITE_RESOURCE,
    are_resources_known,
    choose_site,
    given_resources,
    split_undetermined,
)
from ..units import list_layers, list_members, member_title

ADDED: Final = ("runtime",)
"""Resources that add up over consecutive members, as in Snakemake's GroupJob."""


class HasConfig(Protocol):
    """Something that has a site's backend config."""

    @property
    def config(self) -> BackendConfig: ...


@dataclass(frozen=True)
class GroupRequest:
    """The site and resources that a group requests.

    Attributes:
        site: the name of its site.
        resources: the resources of the whole group, as for a single rule.
        threads: maximum of CPUs that its members use at the same time.
        of_members: the resources of each member, by its number; `_cores` are its CPUs.
    """

    site: str
    resources: dict[str, object]
    threads: int
    of_members: tuple[Mapping[str, object], ...]


def group_request(group: Job, sites: Mapping[str, HasConfig]) -> GroupRequest:
    """Combine the resources of a group's members as Snakemake's GroupJob does.

    Three things differ, so that a group gets as much as its members would get alone. Snakemake's
    built-in defaults do not count. CPUs and memory of a member are counted under one name each. If
    a member sets no time, memory or GPUs, the group requests at least the backend config's value.
    The group runs on one node, even if the backend config requests several.

    Raises:
        UserError: the members do not fit into one job, a member names an unknown site, or its
            resources are invalid.
    """
    layers = [[_asking(member, sites) for member in layer] for layer in list_layers(group)]
    asking = [each for layer in layers for each in layer]
    site = _one_site(group, asking, sites)
    try:
        # First with all of Snakemake's resources: it combines them itself when the group is ready,
        # and ends the whole run if that fails.
        for gathered in ([[_Raw(m) for m in layer] for layer in list_layers(group)], layers):
            found = GroupResources.basic_layered(
                toposorted_jobs=gathered, constraints=group.global_resources, run_local=False,
                additive_resources=list(ADDED), sortby=list(ADDED),
            )  # fmt: skip
    except (WorkflowError, ResourceInsufficiencyError) as error:
        raise _unlike(group, error) from None
    resources = {
        name: value
        for name, value in found.items()
        if not name.startswith("_") and name not in ("mem", "disk")
    }
    base = sites[site].config.resources
    floors = {
        "runtime": math.ceil(base.runtime_s / 60) if base.runtime_s else None,
        "mem_mb": base.memory_mib_per_node,
        "gpu": base.gpus_per_node,
    }
    for name, floor in floors.items():
        value = resources.get(name)
        if floor and isinstance(value, int) and any(name not in each.resources for each in asking):
            resources[name] = max(value, floor)
    if (base.nodes or 1) > 1:
        resources["nodes"] = 1
    return GroupRequest(site, resources, found["_cores"], tuple(each.resources for each in asking))


def unit_request(
    unit: Job, sites: Mapping[str, HasConfig]
) -> tuple[str | None, Mapping[str, object], int, frozenset[str]]:
    """Return a job's or group's site, resources, threads, and the names of unknown resources.

    The site is None if it, or a single job's resources as a whole, depend on files that are not
    made yet. Of a group, no other resource than the site is reported as unknown.

    Raises:
        UserError: the members of a group do not fit into one job or have invalid resources, or a
            job names an unknown site.
    """
    members = list_members(unit)
    if len(members) > 1:
        if any(isinstance(m.resources.get(SITE_RESOURCE), TBDString) for m in members):
            return None, {}, 0, frozenset({SITE_RESOURCE})
        of_group = group_request(unit, sites)
        return of_group.site, of_group.resources, of_group.threads, frozenset()
    if not are_resources_known(members[0]):
        return None, {}, 0, frozenset()
    given, later = split_undetermined(given_resources(members[0]))
    site = None if SITE_RESOURCE in later else choose_site(given, sites)
    return site, given, members[0].threads, later


@dataclass(frozen=True)
class _Asking:
    """A job as `GroupResources` reads it."""

    resources: Mapping[str, object]
    pipe_group: object
    site: str
    rule: str


class _Raw:
    """The same, with all resources that Snakemake itself counts."""

    def __init__(self, job: Job) -> None:
        self.resources = dict(job.resources.items())
        self.pipe_group = job.pipe_group


def _asking(member: Job, sites: Mapping[str, object]) -> _Asking:
    given, later = split_undetermined(given_resources(member))
    if SITE_RESOURCE in later:
        raise UserError(
            f"its resource {SITE_RESOURCE} depends on a file that its own group makes",
            where=f"rule {member.rule.name}",
            do="Take the rule out of the group, or make the resource independent of the file",
        )
    site = choose_site(given, sites)
    try:
        merge_resources(Resources(), given, member.threads)
    except UserError as error:
        raise UserError(error.what, where=f"rule {member.rule.name}", do=error.do) from None
    cores = given.pop("cpus_per_task", None)
    given["_cores"] = cores = cores if isinstance(cores, int) else member.threads
    per_cpu = given.pop("mem_mb_per_cpu", None)
    if isinstance(per_cpu, int) and per_cpu:
        given["mem_mb"] = per_cpu * cores
    if "gpus" in given:
        given.setdefault("gpu", given.pop("gpus"))
    for name in ("mem_mib", "disk_mib", "nodes", "tasks", "tasks_per_node", "mpi"):
        given.pop(name, None)
    return _Asking(given, member.pipe_group, site, member.rule.name)


def _one_site(group: Job, asking: Iterable[_Asking], sites: Mapping[str, object]) -> str:
    rules: dict[str, dict[str, None]] = {}
    for each in asking:
        rules.setdefault(each.site, {})[each.rule] = None
    if len(rules) > 1:
        places = "; ".join(f"{', '.join(names)} at {site}" for site, names in rules.items())
        raise UserError(
            f"its members are to run at different sites: {places}",
            where=member_title(group),
            do=f"Set the same {SITE_RESOURCE} for all members (the default is"
            f" {next(iter(sites))}), or put them into different groups: a group is one job at one"
            " site",
        )
    return next(iter(rules))


def _unlike(group: Job, error: Exception) -> UserError:
    """Return the error for a group whose resources Snakemake cannot combine."""
    values: dict[str, dict[object, dict[str, None]]] = {}
    members = list_members(group)
    names = {name for m in members for name, value in m.resources.items() if _is_text(name, value)}
    for member in members:
        for name in names:
            value = member.resources.get(name)
            values.setdefault(name, {}).setdefault(value, {})[member.rule.name] = None
    unlike = [
        f"{name} is "
        + ", ".join(
            f"{'not set' if value is None else repr(str(value))} for {', '.join(rules)}"
            for value, rules in of_name.items()
        )
        for name, of_name in sorted(values.items())
        if len(of_name) > 1
    ]
    return UserError(
        "; ".join(unlike) or str(error),
        where=member_title(group),
        do="Set the same value for all its rules: a group is one job"
        if unlike
        else "Request less, or raise the limit in --resources",
    )


def _is_text(name: str, value: object) -> bool:
    own = ("tmpdir", "shell_exec", "mem", "disk")
    return isinstance(value, str) and not isinstance(value, TBDString) and name not in own
