"""Plan attempts: turn a request and a site's config into a JobSpec.

No I/O, except that local Environment Definition Files and files of requirements are read.
"""

import math
import os
import posixpath
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import starmap
from pathlib import Path
from typing import Final

from ..common.errors import UserError, did_you_mean, find_alike
from ..common.humanize import humanize_duration, humanize_size
from ..config.environment import (
    ENVIRONMENT_RESOURCE,
    environment_uploads,
    find_pool,
    find_pools,
    job_environment,
    job_resources,
    local_edf,
    requirement_files,
    script_limits,
)
from ..config.known_sites import node_cores
from ..config.model import BackendConfig
from ..config.named_files import may_mount, read_edf
from ..jobs.paths import AttemptPaths, is_at, local_path, nearest, workspace_top
from ..jobs.pools import POOL_RESOURCE, Pool
from ..jobs.resources import (
    billed_cores,
    cpus_per_node,
    merge_resources,
    pbs_directives,
    refuse_slurms,
    resolve_total_cpus,
    slurm_directives,
    with_tasks_of,
)
from ..jobs.script import render_script
from ..jobs.segments import CONTINUE, SEGMENT_RESOURCES, Continuation
from ..jobs.spec import AUTO, InputFile, JobSpec, OutputFile, Predecessor, Resources, Segment
from ..journal import AttemptRecord, FileLedger, FileRecord, RemoteOutput, encode_identity
from ..sites.base import QueueLimits, SiteFacts, Submission
from ..staging.local import LocalFile
from .machine import overlaps
from .messages import lost_error
from .request import JobRequest
from .stage import Staged


@dataclass(frozen=True)
class Resumed:
    """What a segment goes on from.

    Attributes:
        files: the checkpoint, if its content is known.
        before: the paths of the previous segment, if the checkpoint must differ from what that one
            found.
    """

    files: tuple[FileRecord, ...] = ()
    before: AttemptPaths | None = None


NOTHING: Final = Resumed()
"""What a job finds that begins anew, or that has begun to change what it goes on from."""


@dataclass(frozen=True)
class Planner:
    """Plan the jobs of one site.

    Attributes:
        config: the site's backend config.
        account: the compute budget account, or None.
        project: the workflow's working directory.
    """

    config: BackendConfig
    account: str | None
    project: Path
    _resources: dict[object, Resources] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _read: dict[str, tuple[tuple[tuple[Path, str], ...], tuple[str, ...] | None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def resources(self, rule: Mapping[str, object], threads: int) -> Resources:
        """Return the resources that a job of a rule requests, computed once for equal requests.

        Raises:
            UserError: a resource of the rule is wrong, contradicts another, or cannot be passed to
                the site's scheduler.
        """
        key = (threads, *((name, type(value), repr(value)) for name, value in rule.items()))
        if key not in self._resources:
            self._resources[key] = self._computed(rule, threads)
        return self._resources[key]

    def _computed(self, rule: Mapping[str, object], threads: int) -> Resources:
        base = replace(job_resources(self.config), account=self.account)
        resources = resolve_total_cpus(merge_resources(base, rule, threads))
        pooled = self._pooled(rule, threads, resources)
        self._refuse_auto(pooled or resources)
        if pooled is not None:
            return pooled
        scheduler = self.config.site.scheduler
        if scheduler == "pbs":
            pbs_directives(resources, "")
        elif scheduler == "slurm":
            slurm_directives(resources, "")
        else:
            refuse_slurms(resources, "a job description")
        return resources

    def _refuse_auto(self, resources: Resources) -> None:
        """Refuse to choose a queue where the API reports no walltimes of queues."""
        queue = (self._pool(resources.pool).resources if resources.pool else resources).queue
        if queue == AUTO and self.config.api == "firecrest":
            raise UserError(_NO_WALLTIMES, do="Name one, or several of Slurm's")

    def _pooled(
        self, rule: Mapping[str, object], threads: int, asked: Resources
    ) -> Resources | None:
        """Return the resources of a job that runs in a pool; None if it does not."""
        name = rule.get(POOL_RESOURCE)
        if name in (False, "") or (name is None and not self.config.pools):
            return None
        own = merge_resources(Resources(), rule, threads)
        if name is not None:
            return self._pool(str(name)).job_resources(own, asked)
        going_on = self.config.resources.segments or rule.keys() & set(SEGMENT_RESOURCES)
        for pool in find_pools(self.config, self.account):
            short = pool.takes_s is not None and (asked.runtime_s or math.inf) <= pool.takes_s
            if short and not going_on:
                with suppress(UserError):  # it needs an allocation of its own
                    found = pool.job_resources(own, asked)
                    self.pool_suits(found, str(rule.get(ENVIRONMENT_RESOURCE) or ""), None)
                    return found
        return None

    def _pool(self, name: str) -> Pool:
        pools = self.config.pools
        if name not in pools:
            likely = did_you_mean(find_alike(name, pools))
            has = (
                f"the site's config has {', '.join(pools)}" if pools else "its config has no Pools"
            )
            raise UserError(
                f"there is no pool {name!r}{likely}; {has}",
                where=f"the resource {POOL_RESOURCE}",
                do="Correct the name, or add it to Pools in the backend config",
            )
        return find_pool(self.config, name, self.account)

    def pool_suits(
        self, resources: Resources, environment: str, continuation: Continuation | None
    ) -> None:
        """Check that a job with these resources can run in the pool that it names, if any.

        Raises:
            UserError: it needs an allocation of its own.
        """
        if resources.pool is None:
            return
        found = job_environment(self.config, self.project, name=environment)
        software = "run the rule in another environment (mantik_environment)"
        for needs, why, do in (
            (
                continuation is not None,
                f"goes on past its walltime ({CONTINUE})",
                f"set {CONTINUE}=0",
            ),
            (found.container is not None, "has a container that srun starts", software),
            (
                bool(found.slurm_options),
                "has a uenv, which is mounted for a whole allocation",
                software,
            ),
            (
                bool(found.before_on_login or found.after_on_login),
                "has commands that run on the login node",
                software,
            ),
        ):
            if needs:
                raise UserError(
                    f"a job that {why} needs an allocation of its own",
                    where=f"the resource {POOL_RESOURCE}={resources.pool!r}",
                    do=f"Leave out {POOL_RESOURCE}, or {do}",
                )

    def fits(self, resources: Resources, facts: SiteFacts) -> list[str]:
        """Check that the queue allows the resources, as far as the site reports its limits.

        Return warnings: a site may have queues that it does not list.

        Raises:
            UserError: it does not, or the user has no such account.
        """
        if resources.pool is not None:
            resources = self._pool(resources.pool).resources
        misfits = list(find_misfits(choose_queue(resources, facts), facts))
        if certain := [misfit for misfit in misfits if misfit.certain]:
            advice = dict.fromkeys(misfit.do for misfit in certain)
            raise UserError(". ".join(misfit.what for misfit in certain), do=". ".join(advice))
        return [f"{misfit.what}. {misfit.do}." for misfit in misfits]

    def mounts_fit(self, environment: str, facts: SiteFacts) -> None:
        """Check that the container of an environment sees the workspace, as far as is known here.

        Raises:
            UserError: it does not.
        """
        mounts = self._software(environment)[1]
        if mounts is None or may_mount(mounts, workspace_top(facts.workspace), facts.user):
            return
        path = local_edf(self.config.all_environments[environment])
        raise UserError(
            f"the container would not see the workspace {facts.workspace}: none of the mounts"
            f" contains it ({', '.join(mounts)})",
            where=str(path),
            do="Add its file system to mounts in this file, as SOURCE:SOURCE",
        )

    def environment(self, name: str = "") -> str:
        """Return an environment as text: a job whose environment changed is another job."""
        return repr(job_environment(self.config, self.project, name=name))

    def environment_files(
        self, name: str = "", *, own: bool = False
    ) -> tuple[tuple[Path, str], ...]:
        """Return the files of an environment to upload: local paths and paths in the workspace.

        `own` is for a job with an environment of its own, which replaces the config's container.

        Raises:
            UserError: a local Environment Definition File, or a file of requirements, is invalid.
        """
        files = self._software(name)[0]
        if not own:
            return files
        needed = requirement_files(self.config.all_environments[name], self.project)
        return tuple(file for file in files if file[1] in needed)

    def _software(self, name: str) -> tuple[tuple[tuple[Path, str], ...], tuple[str, ...] | None]:
        """Return the files of an environment and its mounts, read once.

        The mounts are those of a local Environment Definition File, or None if not all are known.
        """
        if name not in self._read:
            environment = self.config.all_environments[name]
            path = local_edf(environment)
            edf = read_edf(path, self.project) if path is not None else None
            files = environment_uploads(environment, self.project)
            self._read[name] = files, edf.mounts if edf is not None and edf.whole else None
        return self._read[name]

    def needed_files(
        self, request: JobRequest, ledger: FileLedger, place: str, unmade: Container[str] = ()
    ) -> tuple[list[tuple[str, Path | None]], list[LocalFile]]:
        """Return the files that a job at a place needs, except its inputs that are `unmade`.

        First those on this machine, for `LocalFiles.look_at`, then the others.

        Raises:
            UserError: a file is missing.
        """
        kept = [o.path for o in request.updated if local_path(o.path, self.project).exists()]
        inputs = [path for path in request.inputs if path not in unmade]
        wanted: list[tuple[str, Path | None]] = []
        others: list[LocalFile] = []
        for path in dict.fromkeys([*inputs, *kept]):
            output = ledger.stored(path) if path in request.storable else None
            if output is not None and not output.here:
                others += _stored_files(output, place)
                continue
            if path in request.storable:
                if output is None and ledger.has_row(path):
                    raise lost_error(path, self.project)
                if not os.path.lexists(local_path(path, self.project)):
                    raise lost_error(
                        path, self.project, "is neither on this machine nor at a site any more"
                    )
            wanted.append((path, None))
        files = self.environment_files(request.environment, own=request.own_environment)
        wanted += [(path, local) for local, path in files]
        wanted += [(u.path, u.local) for u in request.uploads if u.content is None]
        made = [(u.path, u.content) for u in request.uploads if u.content is not None]
        return wanted, [*others, *starmap(LocalFile.holding, made)]

    def cores(self, resources: Resources, *, alone: bool = False) -> int | None:
        """Return the cores that a job occupies and that its site bills; None if unknown.

        `alone` is for those that a pool's job would have as a job of its own.
        """
        if resources.pool is not None and not alone:
            return billed_cores(resources)
        queue = self._pool(resources.pool).resources.queue if resources.pool else resources.queue
        return billed_cores(resources, node_cores(self.config, queue))

    def spec(
        self,
        request: JobRequest,
        record: AttemptRecord,
        facts: SiteFacts,
        staged: Staged,
        *,
        term: int = 0,
        after: Sequence[Predecessor] = (),
        resumed: Resumed = NOTHING,
    ) -> JobSpec:
        """Return the spec of an attempt, for a controller that leads the place in the term `term`.

        `after` are the attempts that make those of its inputs that do not exist yet, `resumed` is
        what it goes on from.
        """
        resources = choose_queue(self.resources(request.resources, request.threads), facts)
        given = self.config.all_environments[request.environment].variables
        if self.config.site.scheduler == "slurm":
            resources = with_tasks_of(given, resources)
        environment = job_environment(
            self.config, self.project, resources.cpus_per_task, request.environment
        )
        if request.own_environment:
            environment = replace(environment, apptainer=None, container=None)
        of_project = {}
        if request.project:  # as mantik's own backend does
            directory = posixpath.normpath(f"{facts.workspace}/{request.project}")
            of_project = {"MANTIK_WORKING_DIRECTORY": directory}
        self.pool_suits(resources, request.environment, request.continuation)
        segment, outputs, kept = plan_segment(request, record, resources.runtime_s, resumed)
        return JobSpec(
            paths=record.paths,
            workspace=facts.workspace,
            name=request.name,
            command=request.command,
            shell=request.shell,
            resources=resources,
            cores=self.cores(resources),
            environment=environment,
            variables={**request.variables, **of_project},
            inputs=(*staged.inputs, *kept),
            outputs=outputs,
            segment=segment,
            bundles=staged.bundles,
            inline=staged.inline,
            numbers=staged.numbers,
            term=term,
            identity=encode_identity(record, request.members),
            after=tuple(after),
            storage_link=request.storage_link,
            datasets=request.datasets,
            secrets=tuple(request.secrets),
            benchmark=request.benchmark,
            umask=request.umask,
            shared=self.config.site.sharing == "group",
            launches=request.launches,
            incomplete=request.incomplete,
            limits=replace(script_limits(self.config), upload_bytes=facts.upload_bytes),
        )


def plan_segment(
    request: JobRequest, record: AttemptRecord, runtime_s: int | None, resumed: Resumed
) -> tuple[Segment | None, tuple[OutputFile, ...], tuple[InputFile, ...]]:
    """Return an attempt's segment, its outputs, and the inputs that are its checkpoint.

    A job that begins anew finds no checkpoint, except what it updates. One that goes on finds
    its logs as well, and outputs that hold a part of the checkpoint.

    Raises:
        UserError: the job has no walltime that is long enough.
    """
    continuation = request.continuation
    if continuation is None:
        return None, request.outputs, ()
    runtime_s = continuation.check_walltime(runtime_s)
    paths = continuation.paths
    updated = {output.path for output in request.updated}
    outputs = [
        replace(o, keep=True)
        if record.follows and (o.kind == "log" or overlaps(o.path, paths))
        else o
        for o in request.outputs
    ]
    outputs += [
        OutputFile(path, "checkpoint", directory=True, keep=bool(record.follows) or path in updated)
        for path in paths
    ]
    segment = Segment(
        record.segment, continuation.most, continuation.checkpoint, runtime_s,
        continuation.warning_s(runtime_s), resumed.before,
    )  # fmt: skip
    files = [InputFile(f.path, f.size, sha256=f.sha256, changed=True) for f in resumed.files]
    return segment, tuple(outputs), tuple(files)


def _stored_files(output: RemoteOutput, place: str) -> list[LocalFile]:
    """Return the files and empty directories of a remote output for a job at `place`.

    Links go to no other place: the files that they lead to go there under their paths, too.
    """
    files = [LocalFile.at(output.place, file) for file in output.files]
    if output.place == place:
        return files
    by_path = {file.path: file for file in files}
    linked = through_links(by_path, dict(output.links))
    return [*files, *(replace(by_path[path], path=at) for at, path in linked)]


_MOST_LINKS = 40
"""Links that a path leads through, at most: the kernel's limit."""


def through_links(files: Collection[str], links: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the further paths that files have through links (path to target), and their own."""
    for link in links:
        leads_to = link
        for _ in range(_MOST_LINKS):
            if (at := nearest(leads_to, links)) is None:
                break
            target = posixpath.join(posixpath.dirname(at), links[at])
            leads_to = posixpath.normpath(f"{target}{leads_to.removeprefix(at)}")
        for path in files:
            if is_at(path, leads_to) and not is_at(link, leads_to):
                yield f"{link}{path.removeprefix(leads_to)}", path


ACCOUNT: Final = "account"
"""The `Misfit.key` of an account, which is none of the config's Resources."""


def make_submission(spec: JobSpec) -> Submission:
    """Return the submission of an attempt: its script and resources.

    Raises:
        UserError: no script can contain some part of it.
    """
    script = render_script(spec)
    return Submission(
        tag=spec.paths.attempt_id,
        name=spec.name,
        script=script.text,
        beside=script.beside,
        bucket=spec.paths.bucket,
        resources=spec.resources,
        before_on_login=spec.environment.before_on_login,
        after_on_login=spec.environment.after_on_login,
        login_shell=bool(spec.environment.modules),
        slurm_options=spec.environment.slurm_options,
        behind=tuple(f"{one.paths.bucket}/{one.paths.attempt_id}" for one in spec.after),
    )


@dataclass(frozen=True)
class Misfit:
    """A requested resource that the site does not have or allow.

    Attributes:
        key: the key of the config's Resources that requests it, or `ACCOUNT`.
        what: the request and what the site allows, for messages.
        do: advice, for messages.
        certain: whether the site would refuse it, as far as it shows all that it has.
    """

    key: str
    what: str
    do: str
    certain: bool = True


def choose_queue(resources: Resources, facts: SiteFacts) -> Resources:
    """Return the resources with the first queue that allows them, if the choice is free (`AUTO`).

    Queues with GPUs come last for a job without any. If none allows them they stay as they are,
    which `find_misfits` reports.
    """
    if resources.queue != AUTO:
        return resources
    gpus = resources.gpus_per_node or 0

    def is_dear(name: str) -> bool:
        return not gpus and (facts.queues[name].gpus_per_node or (0, 0))[1] > 0

    fitting = (
        name
        for name in sorted(facts.queues, key=is_dear)
        if facts.queues[name].runtime_s is not None
        and not any(misfit for *_, misfit in _compare(resources, name, facts.queues[name]))
    )
    return replace(resources, queue=next(fitting, AUTO))


_NO_WALLTIMES: Final = (
    f"the site does not report which walltimes its queues allow, as Queue: {AUTO} needs"
)


def _none_chosen(resources: Resources, facts: SiteFacts) -> Misfit:
    """Return why `choose_queue` chose none."""
    if not any(limits.runtime_s for limits in facts.queues.values()):
        return Misfit(
            "Queue",
            _NO_WALLTIMES,
            f"Name one, or several of Slurm's ({', '.join(facts.queues) or 'it lists none'})",
        )
    why = [
        next(misfit.what for *_, misfit in _compare(resources, name, limits) if misfit)
        for name, limits in facts.queues.items()
        if limits.runtime_s is not None
    ]
    return Misfit("Queue", f"no queue allows this job: {'; '.join(why)}", "Request less")


_MOST_EXCLUDED: Final = 4
"""Most failed nodes that a job avoids: if the fault is in the jobs, they must not end up with none.
"""


def nodes_to_exclude(
    resources: Resources, facts: SiteFacts, failed: Sequence[str]
) -> tuple[str, ...]:
    """Return those of the nodes that failed in this run, given oldest first, that a job avoids.

    Slurm holds or refuses a job for which too few nodes are left. Where it is unknown how many it
    can choose from, it avoids the last one only.
    """
    if resources.nodelist is not None:
        return ()
    limits = [facts.queues[q].nodes if q in facts.queues else None for q in resources.queues]
    asked = resources.constraint, resources.reservation, resources.gpu_model, resources.exclude
    known = limits and None not in limits and not any(asked)
    spare = (limit[1] - (resources.nodes or 1) for limit in limits if limit is not None)
    most = min([_MOST_EXCLUDED if known else 1, *spare])
    return tuple(failed[-most:]) if most > 0 else ()


def find_misfits(resources: Resources, facts: SiteFacts) -> Iterator[Misfit]:
    """Yield the requests that do not fit what the site reports of its accounts and queues."""
    account = resources.account
    # Slurm ignores case in names of accounts.
    if account and facts.accounts and account.lower() not in map(str.lower, facts.accounts):
        yield Misfit(
            ACCOUNT,
            f"you have no account {account!r} there, only {', '.join(facts.accounts)}",
            "Correct MANTIK_COMPUTE_BUDGET_ACCOUNT or the rule's resource slurm_account",
        )
    if resources.queue == AUTO:
        yield _none_chosen(resources, facts)
        return
    if not facts.queues:
        return
    unknown = [queue for queue in resources.queues if queue not in facts.queues]
    if unknown:
        yield Misfit(
            "Queue",
            f"the site lists no queue {', '.join(map(repr, unknown))}, only"
            f" {', '.join(facts.queues)}",
            "Correct Resources: Queue or the rule's resource, unless it is a queue that the site"
            " does not show",
            certain=False,
        )
    # Slurm starts a job in any of its queues that allows it.
    misfits = [
        [misfit for *_, misfit in _compare(resources, queue, facts.queues[queue]) if misfit]
        for queue in resources.queues
        if queue in facts.queues
    ]
    if misfits and all(misfits):
        yield from (replace(misfit, certain=not unknown) for misfit in misfits[0])


def unchecked_resources(resources: Resources, limits: QueueLimits) -> list[str]:
    """Return the names of requested resources for which the site reports no limit."""
    return [name for name, reported, _ in _compare(resources, "", limits) if not reported]


def _compare(
    resources: Resources, queue: str, limits: QueueLimits
) -> Iterator[tuple[str, bool, Misfit | None]]:
    """Yield each request: its name, whether the queue reports a limit, and how it does not fit."""
    cpus, memory = cpus_per_node(resources), resources.memory_mib_per_node
    for key, name, number, allowed, words in (
        ("Runtime", "runtime", resources.runtime_s, limits.runtime_s, humanize_duration),
        ("Nodes", "nodes", resources.nodes, limits.nodes, str),
        ("CPUsPerNode", "CPUs per node", cpus, limits.cpus_per_node, str),
        ("MemoryPerNode", "memory", memory, limits.memory_mib_per_node, _memory),
        ("GPUsPerNode", "GPUs per node", resources.gpus_per_node, limits.gpus_per_node, str),
    ):
        if number is None:
            continue
        low, high = allowed or (number, number)
        too_much = number > high
        limit = f"most {words(high)}" if too_much else f"least {words(low)}"
        misfit = Misfit(
            key,
            f"{name}: {words(number)} requested; queue {queue} allows at {limit}",
            f"Request {'less' if too_much else 'more'}, or choose another queue",
        )
        yield name, allowed is not None, None if low <= number <= high else misfit
    for key, name, attribute in (
        ("QoS", "QoS", "qos"),
        ("NodeConstraints", "constraint", "constraint"),
        ("Reservation", "reservation", "reservation"),
    ):
        if value := getattr(resources, attribute):
            choices = limits.choices.get(attribute)
            allows = ", ".join(choices or ())
            misfit = Misfit(
                key,
                f"{name} {value!r} requested; queue {queue} allows {allows}",
                "Request one of these, or choose another queue",
            )
            fits = choices is None or value in choices
            yield name, choices is not None, None if fits else misfit


def _memory(mib: int) -> str:
    return humanize_size(mib << 20)
