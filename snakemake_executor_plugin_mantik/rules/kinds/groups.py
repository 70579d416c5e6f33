"""Turn a group of Snakemake's jobs into one JobRequest. Its members run in one job on one node.

Snakemake groups jobs of rules with `group:`, and jobs connected by `pipe()`, a `service()` or
`temp(…, group_jobs=True)` files. Each member runs the same command as it would alone; a full job
runs its own Snakemake. One program (`jobs/group.py`) runs all members.
"""

import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from snakemake.io import is_flagged

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.common.state_directory import read_umask
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
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
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
)
from ..make_request import make_request as request_of_one
from ..paths.job_paths import JobPaths, find_job_paths
from ..paths.storage import is_unstaged
from ..payload import why_full_job
from ..resources import choose_environment, given_resources
from ..units import job_display_name, job_identity, list_members, member_title, unit_name
from .group_resources import ADDED, GroupRequest, group_request

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
