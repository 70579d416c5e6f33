"""Turn a group of Snakemake's jobs into one JobRequest. Its members run in one job on one node.

Snakemake groups jobs of rules with `group:`, and jobs connected by `pipe()`, a `service()` or
`temp(…, group_jobs=True)` files. Each member runs the same command as it would alone; a nested
Snakemake runs its own Snakemake. The group requests one site, and what its members need. One
program (`jobs/group.py`) runs all members.
"""

import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Final

from snakemake.common.tbdstring import TBDString
from snakemake.exceptions import ResourceInsufficiencyError
from snakemake.io import is_flagged
from snakemake.resources import GroupResources
from snakemake_interface_common.exceptions import WorkflowError

from ...common.errors import UserError
from ...config.model import BackendConfig
from ...engine.request import GroupJob, JobGroup, JobRequest, Upload
from ...jobs.group import TEMPORARY, GroupMember, GroupProgram, render_group
from ...jobs.paths import file_path
from ...jobs.resources import merge_resources
from ...jobs.segments import CONTINUE, Continuation
from ...jobs.spec import OutputFile, Resources
from .. import Job
from ..context import RuleContext
from ..make_request import make_request, message_name
from ..paths.storage import is_unstaged
from ..resources import SITE_RESOURCE, are_resources_known, choose_environment
from ..site_job import SiteJob
from ..units import job_display_name, list_layers, list_members, member_title, unit_name

ADDED: Final = ("runtime",)
"""Resources that add up over consecutive members, as in Snakemake's GroupJob."""


@dataclass(frozen=True)
class Asked:
    """The site and resources that a job or group requests.

    Attributes:
        site: the name of its site; None if that, or a single job's resources as a whole, depend on
            files that are not made yet.
        resources: the known resources; of a group as for a single rule.
        threads: maximum of CPUs that its members use at the same time.
        later: names of a single job's resources that depend on files not made yet.
        of_members: the resources of each member of a group; `_cores` are its CPUs.
    """

    site: str | None = None
    resources: Mapping[str, object] = field(default_factory=dict)
    threads: int = 0
    later: frozenset[str] = frozenset()
    of_members: tuple[Mapping[str, object], ...] = ()


class Unit:
    """A job or a group of jobs: what becomes one job at a site.

    Attributes:
        job: Snakemake's job or group.
        title: its title for messages, which names its rules.
        members: its jobs, in the same order in every run.
    """

    def __init__(self, job: Job, context: RuleContext, left: tuple[str, ...] = ()) -> None:
        """Prepare; `left` are the sites that it may still go to, in order; empty for all its."""
        self.job = job
        self.context = context
        self.title = member_title(job)
        self.members = [SiteJob(member, context, left) for member in list_members(job)]

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the sites that it may run at, in order."""
        return self.members[0].sites

    def elsewhere(self) -> Iterator["Unit"]:
        """Yield it as it would run at each of its other sites."""
        for turn in range(1, len(self.sites)):
            yield self.at(self.sites[turn:])

    def at(self, left: tuple[str, ...]) -> "Unit":
        """Return it as it would run at the first of those of its sites that are left."""
        return Unit(self.job, self.context, left)

    @property
    def anywhere(self) -> bool:
        """Whether it leaves the choice of its site to the executor."""
        return self.members[0].anywhere

    @property
    def is_known(self) -> bool:
        """Whether its resources can be evaluated before the jobs it depends on have run."""
        return all(are_resources_known(member.job) for member in self.members)

    @cached_property
    def asked(self) -> Asked:
        """What it requests.

        Raises:
            UserError: the members of a group do not fit into one job or have invalid resources, or
                a job names an unknown site.
        """
        if len(self.members) > 1:
            undecided = any(not member.has_site for member in self.members)
            return Asked(later=frozenset({SITE_RESOURCE})) if undecided else _ask(self)
        [one] = self.members
        if not are_resources_known(one.job):
            return Asked()
        site = one.site if one.has_site else None
        return Asked(site, one.known, one.job.threads, one.later)

    @property
    def site(self) -> str:
        """The name of its site.

        Raises:
            UserError: the site is not known yet, or `asked` raises.
        """
        if self.asked.site is not None:
            return self.asked.site
        names = (member.rule.name for member in self.members if not member.has_site)
        whose = "its own group makes" if len(self.members) > 1 else "is not there"
        raise UserError(
            f"its resource {SITE_RESOURCE} depends on a file that {whose}",
            where=f"rule {next(names, self.members[0].rule.name)}",
            do="Make the resource independent of the file, or take the rule out of its group",
        )

    @property
    def config(self) -> BackendConfig:
        return self.context.sites[self.site].config

    @property
    def environment(self) -> str:
        """The name of the config's environment that it runs in; empty for the default."""
        return choose_environment(self.asked.resources, self.config)

    @property
    def continuation(self) -> Continuation | None:
        """How it goes on past its walltime, if it may.

        Raises:
            UserError: its resources for that are invalid, or it is of a kind that cannot.
        """
        found = [(member, member.continuation) for member in self.members]
        if not self.job.is_group():
            return found[0][1]
        for member, asked in found:
            if asked is not None and member.given.get(CONTINUE) is not None:
                raise UserError(
                    f"rule {member.rule.name} has {CONTINUE}, but a job in a group cannot go on",
                    do="Take it out of its group",
                )
        return None


def _ask(group: Unit) -> Asked:
    """Combine the resources of a group's members as Snakemake's GroupJob does.

    Three things differ, so that a group gets as much as its members would get alone. Snakemake's
    built-in defaults do not count. CPUs and memory of a member are counted under one name each. If
    a member sets no time, memory or GPUs, the group requests at least the backend config's value.
    The group runs on one node, even if the backend config requests several.
    """
    of_members = tuple(map(_asking, group.members))
    site = _one_site(group)
    layers, each = list_layers(group.job), iter(of_members)
    counted = [[_counted(job) for job in layer] for layer in layers]
    ours = [[_counted(job, next(each)) for job in layer] for layer in layers]
    try:
        # First with all of Snakemake's resources: it combines them itself when the group is ready,
        # and ends the whole run if that fails.
        for gathered in (counted, ours):
            found = GroupResources.basic_layered(
                toposorted_jobs=gathered,
                constraints=group.job.global_resources, run_local=False,
                additive_resources=list(ADDED), sortby=list(ADDED),
            )  # fmt: skip
    except (WorkflowError, ResourceInsufficiencyError) as error:
        raise _unlike(group, error) from None
    resources = {
        name: value
        for name, value in found.items()
        if not name.startswith("_") and name not in ("mem", "disk")
    }
    base = group.context.sites[site].config.resources
    floors = {
        "runtime": math.ceil(base.runtime_s / 60) if base.runtime_s else None,
        "mem_mb": base.memory_mib_per_node,
        "gpu": base.gpus_per_node,
    }
    for name, floor in floors.items():
        value = resources.get(name)
        if floor and isinstance(value, int) and any(name not in each for each in of_members):
            resources[name] = max(value, floor)
    if any("cpus_per_task" in member.known for member in group.members):
        resources["cpus_per_task"] = found["_cores"]
    if (base.nodes or 1) > 1:
        resources["nodes"] = 1
    return Asked(site, resources, found["_cores"], of_members=of_members)


def _counted(job: Job, resources: Mapping[str, object] | None = None) -> SimpleNamespace:
    """Return a job as `GroupResources` reads it, with all resources that Snakemake counts."""
    counted = dict(job.resources.items()) if resources is None else resources
    return SimpleNamespace(resources=counted, pipe_group=job.pipe_group)


def _asking(member: SiteJob) -> dict[str, object]:
    """Return what a member asks for, by the names that are counted."""
    given = dict(member.known)
    try:
        merge_resources(Resources(), given, member.job.threads)
    except UserError as error:
        raise UserError(error.what, where=f"rule {member.rule.name}", do=error.do) from None
    cores = given.pop("cpus_per_task", None)
    given["_cores"] = cores = cores if isinstance(cores, int) else member.job.threads
    per_cpu = given.pop("mem_mb_per_cpu", None)
    if isinstance(per_cpu, int) and per_cpu:
        given["mem_mb"] = per_cpu * cores
    if "gpus" in given:
        given.setdefault("gpu", given.pop("gpus"))
    for name in ("mem_mib", "disk_mib", "nodes", "tasks", "tasks_per_node", "mpi"):
        given.pop(name, None)
    return given


def _one_site(group: Unit) -> str:
    rules: dict[str, dict[str, None]] = {}
    for member in group.members:
        rules.setdefault(member.site, {})[member.rule.name] = None
    if len(rules) > 1:
        places = "; ".join(f"{', '.join(names)} at {site}" for site, names in rules.items())
        raise UserError(
            f"its members are to run at different sites: {places}",
            where=group.title,
            do=f"Set the same {SITE_RESOURCE} for all members (the default is"
            f" {next(iter(group.context.sites))}), or put them into different groups: a group is"
            " one job at one site",
        )
    return next(iter(rules))


def _unlike(group: Unit, error: Exception) -> UserError:
    """Return the error for a group whose resources Snakemake cannot combine."""
    unlike = []
    given = [item for member in group.members for item in member.job.resources.items()]
    texts = {n for n, value in given if isinstance(value, str) and not isinstance(value, TBDString)}
    for name in sorted(texts - {"tmpdir", "shell_exec", "mem", "disk"}):
        rules: dict[object, dict[str, None]] = {}
        for member in group.members:
            rules.setdefault(member.job.resources.get(name), {})[member.rule.name] = None
        shown = (
            f"{'not set' if value is None else repr(str(value))} for {', '.join(of)}"
            for value, of in rules.items()
        )
        if len(rules) > 1:
            unlike.append(f"{name} is {', '.join(shown)}")
    return UserError(
        "; ".join(unlike) or str(error),
        where=group.title,
        do="Set the same value for all its rules: a group is one job"
        if unlike
        else "Request less, or raise the limit in --resources",
    )


_REPORTS = ".snakemake/mantik/groups"
"""Directory of reports on failed members of groups, here and at the site, until they are read."""


def group_obstacle(unit: Unit, member: SiteJob) -> str | None:
    """Return why a job cannot run in a group, as words that follow "rule NAME", or None."""
    if len(unit.members) == 1:
        return None
    for name in ("tasks", "tasks_per_node", "nodes"):
        if isinstance(number := member.given.get(name), int) and number > 1:
            where = "whose members all run on one node (take it out of the group)"
            return f"requests {name}={number} in a group, {where}"
    if member.given.get("mpi"):
        return (
            "starts MPI in a group, whose members share one node without tasks of their own (take"
            " it out of the group)"
        )
    if member.job.pipe_group is not None and member.nested is not None:
        return (
            f"has {member.nested} and shares a pipe or service, which the Snakemake that it needs"
            " at the site does not support (use a file instead)"
        )
    return None


def make_group_request(unit: Unit, *, secrets: Mapping[str, str], forced: bool) -> JobRequest:
    """Make the engine's request for a job or group, after its old outputs were removed.

    `secrets` are the environment variables that jobs get from this machine, by name. With `forced`,
    run it even if an earlier run has finished a member (`--forceall`, `--forcerun`).

    Raises:
        UserError: the members of a group do not fit into one job, or the request of a member cannot
            be made: see `make_request`.
    """
    group, members, asked, context = unit.job, unit.members, unit.asked, unit.context
    site = unit.site
    if len(members) == 1:
        return replace(make_request(members[0], secrets=secrets, forced=forced), number=group.jobid)
    parts = [_part(unit, member) for member in members]
    files = _Files(unit, parts)
    jobs = tuple(
        GroupJob(
            part.job,
            job_display_name(member.job),
            tuple(output.path for output in part.outputs if output.kind == "log"),
            part.measured[0],
        )
        for member, part in zip(members, parts, strict=True)
    )
    known = hashlib.sha256(json.dumps(sorted(each.job for each in jobs)).encode()).hexdigest()
    report = f"{_REPORTS}/{known[:32]}"
    environment = unit.config.all_environments[unit.environment]
    image = bool(environment.apptainer or environment.container_engine or environment.pyxis)
    program = render_group(
        _program(unit, parts, files, frozenset(environment.variables), report)
    ).encode("utf-8", "surrogateescape")
    path = file_path(program, "group.sh")
    uploads = {upload.path: upload for part in parts for upload in part.uploads}
    return replace(  # noqa: S604 - a value, nothing runs here
        parts[0],
        number=group.jobid,
        job=known,
        rule=", ".join(sorted(group.rules)),
        name=message_name(group, unit_name(group), context),
        site=site,
        command=f"exec bash {shlex.quote(path)}",
        shell="bash",
        benchmark=None,
        resources=asked.resources,
        threads=asked.threads,
        variables={},
        inputs=files.from_outside,
        uploads=(Upload(path, content=program), *uploads.values()),
        outputs=(*files.outputs, OutputFile(report, "log")),
        project="",
        environment=unit.environment,
        own_environment=_own_environment(unit, parts, image=image),
        secrets=dict(secrets),
        parameters=json.dumps([part.parameters for part in parts]),
        forced=forced,
        launches=False,
        nested=any(part.nested for part in parts),
        group=JobGroup(jobs, report),
        storable=frozenset().union(*(part.storable for part in parts)),
        storage_link=next((part.storage_link for part in parts if part.storage_link), ""),
        datasets=tuple(dict.fromkeys(path for part in parts for path in part.datasets)),
        continuation=None,
    )


def _own_environment(group: Unit, parts: Iterable[JobRequest], *, image: bool) -> bool:
    """Return whether the group runs without the backend config's image: all members, or none."""
    found = {part.own_environment for part in parts if part.command}
    if image and len(found) > 1:
        raise UserError(
            "some of its rules run in environments of their own, the others in the image of the"
            " backend config",
            where=group.title,
            do="Add an environment to all its rules, or put them into different groups: a group is"
            " one job, in the image or not",
        )
    return True in found


class _Files:
    """Files of a group, as paths in the workspace.

    Attributes:
        outputs: files to download.
        from_outside: inputs that no member makes.
        temporary: files that are deleted before the group ends, outputs of services among them.
        pipes: named pipes between members.
        services: outputs of services.
    """

    def __init__(self, group: Unit, parts: Sequence[JobRequest]) -> None:
        dag = group.job.dag
        notemp = dag.workflow.storage_settings.notemp
        unneeded = set() if notemp else set(dag.get_unneeded_temp_files(group.job))
        members = [member.job for member in group.members]
        number = {member: i for i, member in enumerate(members)}
        outputs: dict[str, OutputFile] = {}
        made: set[str] = set()
        temporary = []
        self.place = group.members[0].paths().place
        self.pipes: list[str] = []
        self.services: set[str] = set()
        for member, part in zip(members, parts, strict=True):
            for output in part.outputs:
                # If a later member updates an earlier one's output, the earlier declaration counts.
                outputs.setdefault(output.path, output)
            for path in member.output:
                place, service = self.place(path) or str(path), is_flagged(path, "service")
                made.add(place)
                if is_flagged(path, "pipe"):
                    self.pipes.append(place)
                elif (
                    service
                    or is_flagged(path, "nodelocal")
                    or (path in unneeded and not is_unstaged(member, path))
                ):
                    readers = [j for j, files in dag.depending[member].items() if path in files]
                    numbers = sorted(number[j] for j in [member, *readers] if j in number)
                    temporary.append((place, tuple(numbers)))
                    self.services |= {place} if service else set()
        for place in [*self.pipes, *(place for place, _ in temporary)]:
            outputs.pop(place, None)
        self.outputs = tuple(outputs.values())
        self.temporary = tuple(temporary)
        read = dict.fromkeys(place for part in parts for place in part.inputs)
        self.from_outside = tuple(place for place in read if place not in made)


def evaluate_anew(group: Job) -> None:
    """Discard values that may come from old versions of files that the group itself makes.

    Snakemake evaluates parameters and resources before the old outputs are removed. Now a function
    that opens such a file finds none, and its value is not determined yet.
    """
    for member in list_members(group):
        if any(path in group.all_products for path in member.input):
            member.attempt = member.attempt
            member._params = member._non_derived_params = None  # there is no public method


def _part(group: Unit, member: SiteJob) -> JobRequest:
    try:
        return make_request(member, secrets={}, forced=False)
    except UserError as error:
        raise UserError(
            error.what,
            where=f"{error.where}, in {group.title}",
            do="Make the parameter or resource independent of files that the group itself makes,"
            " or take the rule out of the group",
        ) from None


def _program(
    unit: Unit, parts: Sequence[JobRequest], files: _Files, settled: frozenset[str], report: str
) -> GroupProgram:
    """Make the program that runs the members, in the order of their numbers.

    `settled` names the variables that the backend config sets, which take precedence over those of
    rules. `report` is the path of the report on failed members.
    """
    group, wanted = unit.job, unit.asked
    members = [member.job for member in unit.members]
    numbers = {member: i for i, member in enumerate(members)}
    teams: dict[object, list[Job]] = {}
    for member in members:
        teams.setdefault(member.pipe_group or member, []).append(member)
    team_of = {member: n for n, team in enumerate(teams.values()) for member in team}

    def takes(team: Sequence[Job], name: str) -> int:
        amounts = [wanted.of_members[numbers[member]].get(name) for member in team]
        return sum(amount for amount in amounts if isinstance(amount, int))

    # Its CPUs, and those of its resources that all teams together would exceed.
    limits = {"_cores": wanted.threads} | {
        name: limit
        for name, limit in wanted.resources.items()
        if isinstance(limit, int)
        and name not in (*ADDED, "nodes")
        and sum(takes(team, name) for team in teams.values()) > limit
    }
    settings = group.dag.workflow.execution_settings
    return GroupProgram(
        members=[
            _member(member, team_of[member], part, files, settled)
            for member, part in zip(members, parts, strict=True)
        ],
        teams=[
            (
                tuple(sorted({numbers[dep] for member in team
                              for dep in group.dag.dependencies[member]
                              if dep in numbers and dep not in team})),
                tuple(takes(team, name) for name in limits),
            )
            for team in teams.values()
        ],
        limits=tuple(limits.values()),
        report=report,
        pipes=tuple(files.pipes),
        temporary=files.temporary,
        keep_going=bool(settings.keep_going),
        service_wait_s=math.ceil(settings.latency_wait),
    )  # fmt: skip


def _member(
    member: Job, team: int, part: JobRequest, files: _Files, settled: frozenset[str]
) -> GroupMember:
    made = [output for output in part.outputs if output.kind == "output"]
    touched = [output for output in part.outputs if output.kind == "touched"]
    [measured] = part.measured
    others = {*files.pipes, *files.services, measured}
    commands = part.benchmark.commands if part.benchmark else (part.command,)
    return GroupMember(
        name=job_display_name(member),
        commands=commands if part.command else (),
        team=team,
        shell=part.shell,
        variables={k: v for k, v in part.variables.items() if part.command and k not in settled},
        settled=tuple(name for name in TEMPORARY if name in settled),
        service=member.is_service,
        waits=tuple(place for place in part.inputs if place in files.services),
        outputs=tuple(output.path for output in made if output.path not in others),
        touches=tuple(
            # As Snakemake touches a directory.
            f"{output.path}/.snakemake_timestamp" if output.directory else output.path
            for output in touched
        ),
        measured=measured,
        benchmark=part.benchmark.file if part.benchmark else "",
    )
