"""Turn a group of Snakemake's jobs into one JobRequest. Its members run in one job on one node.

Snakemake groups jobs of rules with `group:`, and jobs connected by `pipe()`, a `service()` or
`temp(…, group_jobs=True)` files. Each member runs the same command as it would alone; a full job
runs its own Snakemake. The group requests one site, and what its members need. One program
(`jobs/group.py`) runs all members.
"""

import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from snakemake.common.tbdstring import TBDString
from snakemake.exceptions import ResourceInsufficiencyError
from snakemake.io import is_flagged
from snakemake.resources import GroupResources
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.common.state_directory import read_umask
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.engine.request import GroupJob, JobGroup, JobRequest, Upload
from snakemake_executor_plugin_mantik.jobs.group import (
    TEMPORARY,
    GroupMember,
    GroupProgram,
    GroupTeam,
    TemporaryFile,
    render_group,
)
from snakemake_executor_plugin_mantik.jobs.paths import file_path
from snakemake_executor_plugin_mantik.jobs.resources import merge_resources
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile, Resources
from snakemake_executor_plugin_mantik.storage.paths import find_storage_link

from .. import Job
from ..context import Payload, RuleContext
from ..make_request import (
    ResolvedJob,
    find_runs,
    job_parameters,
    job_variables,
    list_datasets,
    list_outputs,
    list_storable,
    message_name,
    why_full_job,
)
from ..make_request import make_request as request_of_one
from ..paths.job_paths import JobPaths, find_job_paths
from ..paths.storage import is_unstaged
from ..resources import (
    SITE_RESOURCE,
    are_resources_known,
    choose_environment,
    choose_site,
    given_resources,
    split_undetermined,
)
from ..units import (
    job_display_name,
    job_identity,
    list_layers,
    list_members,
    member_title,
    unit_name,
)

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


_REPORTS = ".snakemake/mantik/groups"
"""Directory of reports on failed members of groups, here and at the site, until they are read."""


def group_obstacle(unit: Job, member: Job) -> str | None:
    """Return why a job cannot run in a group, as words that follow "rule NAME", or None."""
    if not unit.is_group() or len(unit) == 1:
        return None
    given = given_resources(member)
    for name in ("tasks", "tasks_per_node", "nodes"):
        if isinstance(number := given.get(name), int) and number > 1:
            return (
                f"requests {name}={number} in a group, whose members all run on one node (take it"
                " out of the group)"
            )
    if given.get("mpi"):
        return (
            "starts MPI in a group, whose members share one node without tasks of their own (take"
            " it out of the group)"
        )
    if member.pipe_group is not None and (directive := why_full_job(member)) is not None:
        return (
            f"has {directive} and shares a pipe or service, which the Snakemake that it needs at"
            " the site does not support (use a file instead)"
        )
    return None


def make_group_request(
    group: Job, context: RuleContext, *, secrets: Mapping[str, str], forced: bool
) -> JobRequest:
    """Make the engine's request for a group, after the old outputs of its members were removed.

    `secrets` are the environment variables that jobs get from this machine, by name. With `forced`,
    run the group even if an earlier run has finished a member (`--forceall`, `--forcerun`).

    Raises:
        UserError: the members do not fit into one job, or the request of a member cannot be made:
            see `group_request` and `find_runs`.
    """
    members = list_members(group)
    if len(members) == 1:
        one = request_of_one(members[0], context, secrets=secrets, forced=forced)
        return replace(one, number=group.jobid)
    _evaluate_anew(group, members)
    of_group = group_request(group, context.sites)
    runs = [_runs(group, member, context) for member in members]
    payloads = [payload for of_member in runs for payload in of_member.payloads]
    files = _Files(group, members, runs, find_job_paths(members[0], context))
    jobs = tuple(
        GroupJob(
            job_identity(member),
            job_display_name(member),
            tuple(output.path for output in run.outputs if output.kind == "log"),
            run.measured,
        )
        for member, run in zip(members, runs, strict=True)
    )
    known = hashlib.sha256(json.dumps(sorted(each.job for each in jobs)).encode()).hexdigest()
    report = f"{_REPORTS}/{known[:32]}"
    config = context.sites[of_group.site].config
    name = choose_environment(of_group.resources, config)
    environment = config.named_environment(name)
    image = bool(environment.apptainer or environment.container_engine or environment.pyxis)
    program = render_group(
        _program(
            group, members, runs,
            wanted=of_group, files=files, settled=frozenset(environment.variables),
            report=report,
        )
    ).encode("utf-8", "surrogateescape")  # fmt: skip
    path = file_path(program, "group.sh")
    uploads = {each.path: each for payload in payloads for each in payload.uploads}
    return JobRequest(  # noqa: S604 - a value, nothing runs here
        number=group.jobid,
        job=known,
        rule=", ".join(sorted(group.rules)),
        name=message_name(group, unit_name(group), context),
        site=of_group.site,
        command=f"exec bash {shlex.quote(path)}",
        shell="bash",
        resources=of_group.resources,
        threads=of_group.threads,
        variables={},
        inputs=files.from_outside,
        uploads=(Upload(path, content=program), *uploads.values()),
        outputs=(*files.outputs, OutputFile(report, "log")),
        umask=read_umask(),
        environment=name,
        own_environment=_own_environment(group, payloads, image=image),
        secrets=dict(secrets),
        parameters=json.dumps([job_parameters(member) for member in members]),
        forced=forced,
        full=any(payload.full for payload in payloads),
        incomplete=context.options.keep_incomplete,
        group=JobGroup(jobs, report),
        storable=frozenset(path for member in members for path in list_storable(member)),
        storage_link=next(filter(None, map(find_storage_link, members)), ""),
        datasets=tuple(dict.fromkeys(path for member in members for path in list_datasets(member))),
    )


def _own_environment(group: Job, payloads: Iterable[Payload], *, image: bool) -> bool:
    """Return whether the group runs without the backend config's image: all members, or none.

    Raises:
        UserError: the config has an image, and only some members have environments of their own.
    """
    found = {payload.own_environment for payload in payloads}
    if image and len(found) > 1:
        raise UserError(
            "some of its rules run in environments of their own, the others in the image of the"
            " backend config",
            where=member_title(group),
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

    def __init__(
        self, group: Job, members: Sequence[Job], runs: Sequence[ResolvedJob], places: JobPaths
    ) -> None:
        dag = group.dag
        notemp = dag.workflow.storage_settings.notemp
        unneeded = set() if notemp else set(dag.get_unneeded_temp_files(group))
        number = {member: i for i, member in enumerate(members)}
        outputs: dict[str, OutputFile] = {}
        made: set[str] = set()
        temporary = []
        self.place = places.place
        self.pipes: list[str] = []
        self.services: set[str] = set()
        for member, run in zip(members, runs, strict=True):
            for output in run.outputs:
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
                    temporary.append(TemporaryFile(place, tuple(numbers)))
                    self.services |= {place} if service else set()
        for place in [*self.pipes, *(each.path for each in temporary)]:
            outputs.pop(place, None)
        self.outputs = tuple(outputs.values())
        self.temporary = tuple(temporary)
        read = dict.fromkeys(place for run in runs for place in run.inputs)
        self.from_outside = tuple(place for place in read if place not in made)


def _evaluate_anew(group: Job, members: Sequence[Job]) -> None:
    """Discard values that may come from old versions of files that the group itself makes.

    Snakemake evaluates parameters and resources before the old outputs are removed. Now a function
    that opens such a file finds none, and its value is not determined yet.
    """
    for member in members:
        if any(path in group.all_products for path in member.input):
            member.attempt = member.attempt
            member._params = member._non_derived_params = None  # there is no public method


def _runs(group: Job, member: Job, context: RuleContext) -> ResolvedJob:
    if member.is_norun:
        # Its inputs need no upload. Other members may read the files that it touches.
        return ResolvedJob((), outputs=tuple(list_outputs(member, find_job_paths(member, context))))
    try:
        return find_runs(member, context)
    except UserError as error:
        raise UserError(
            error.what,
            where=f"{error.where}, in {member_title(group)}",
            do="Make the parameter or resource independent of files that the group itself makes,"
            " or take the rule out of the group",
        ) from None


def _program(
    group: Job,
    members: Sequence[Job],
    runs: Sequence[ResolvedJob],
    *,
    wanted: GroupRequest,
    files: _Files,
    settled: frozenset[str],
    report: str,
) -> GroupProgram:
    """Make the program that runs the members, in the order of their numbers.

    `settled` names the variables that the backend config sets, which take precedence over those of
    rules. `report` is the path of the report on failed members.
    """
    numbers = {member: i for i, member in enumerate(members)}
    teams: dict[object, list[Job]] = {}
    for member in members:
        teams.setdefault(member.pipe_group or member, []).append(member)
    team_of = {member: n for n, team in enumerate(teams.values()) for member in team}
    limits = _limits(teams.values(), numbers, wanted)
    settings = group.dag.workflow.execution_settings
    return GroupProgram(
        members=[
            _member(member, team_of[member], of_member, files, settled)
            for member, of_member in zip(members, runs, strict=True)
        ],
        teams=[
            GroupTeam(
                needs=tuple(sorted({numbers[dep] for member in team
                                    for dep in group.dag.dependencies[member]
                                    if dep in numbers and dep not in team})),
                takes=tuple(_takes(team, numbers, wanted, name) for name in limits),
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
    member: Job, team: int, runs: ResolvedJob, files: _Files, settled: frozenset[str]
) -> GroupMember:
    variables = job_variables(member) if runs.payloads else {}
    made = [output for output in runs.outputs if output.kind == "output"]
    touched = [output for output in runs.outputs if output.kind == "touched"]
    others = {*files.pipes, *files.services, runs.measured}
    return GroupMember(
        name=job_display_name(member),
        commands=tuple(payload.command for payload in runs.payloads),
        team=team,
        shell=next((payload.shell for payload in runs.payloads), "bash"),
        variables={k: v for k, v in variables.items() if k not in settled},
        settled=tuple(name for name in TEMPORARY if name in settled),
        service=member.is_service,
        waits=tuple(place for place in runs.inputs if place in files.services),
        outputs=tuple(output.path for output in made if output.path not in others),
        touches=tuple(
            # As Snakemake touches a directory.
            f"{output.path}/.snakemake_timestamp" if output.directory else output.path
            for output in touched
        ),
        measured=runs.measured,
        benchmark=runs.benchmark,
    )


def _limits(
    teams: Iterable[Sequence[Job]], numbers: Mapping[Job, int], wanted: GroupRequest
) -> dict[str, int]:
    """Return the group's CPUs, and its resources that all teams together would exceed."""
    return {
        "_cores": wanted.threads,
        **{
            name: limit
            for name, limit in wanted.resources.items()
            if isinstance(limit, int)
            and name not in (*ADDED, "nodes")
            and sum(_takes(team, numbers, wanted, name) for team in teams) > limit
        },
    }


def _takes(team: Sequence[Job], numbers: Mapping[Job, int], wanted: GroupRequest, name: str) -> int:
    amounts = [wanted.of_members[numbers[member]].get(name) for member in team]
    return sum(amount for amount in amounts if isinstance(amount, int))
