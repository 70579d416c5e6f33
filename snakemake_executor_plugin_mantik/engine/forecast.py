"""Forecast a run: its uploads, the requested resources, and their sums.

The forecast uses only the journal and local files. It contacts no site.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

from ..config.model import BackendConfig
from ..jobs.paths import WORKSPACE, local_path, nearest, workspace_below
from ..jobs.resources import cpus_per_node
from ..jobs.spec import InputFile, JobSpec, Resources
from ..journal import AttemptRecord, AttemptState, FileLedger, JournalCopy
from ..sites.base import SiteFacts, Submission
from ..sites.firecrest.script import job_body, scheduler_script
from ..sites.unicore.description import batch_directives, job_description
from ..staging.local import Key, LocalFile, LocalFiles
from .plan import Planner, make_submission
from .request import JobRequest
from .stage import Holdings, Staged
from .upload import may_import

ATTEMPT: Final = "00000000-0000-4000-8000-000000000000"
"""Placeholder for the UUID of an attempt."""

_ENVIRONMENTS: Final = ("apptainer", "container_engine", "pyxis", "uenv", "python")
"""What a command may run in, by the name of the backend config's key."""


@dataclass(frozen=True)
class Preview:
    """A preview of a submission; the fields are the keys of `smk-mantik render --json`.

    Attributes:
        job: its name; `render` for a plain command.
        resources: the requested resources, normalised.
        environment: the key of what the command runs in, in lower case, or `none`.
        image_type: where the image is; None without one.
        variables: the variables that are set for the command, as its process sees them.
        submission: UNICORE's job description, or the body of firecREST's `POST …/jobs`.
        script: the job script, with the scheduler's directives, if any, after its first line.
        uploads: files to upload, as paths in the workspace, which mirrors the project folder.
        warnings: settings that are allowed but probably unintended.
    """

    job: str
    site: str
    api: Literal["unicore", "firecrest"]
    resources: Mapping[str, str | int | None]
    environment: str
    image_type: Literal["local", "remote"] | None
    variables: Mapping[str, str]
    submission: Mapping[str, Any]
    script: str
    uploads: tuple[str, ...]
    warnings: tuple[str, ...]


def plain_request(site: str, command: str, environment: str = "") -> JobRequest:
    """Return the request of a rule that has only a command.

    `environment` is the name of the config's environment; empty for its default.
    """
    name = "render"
    return JobRequest(  # noqa: S604 - the shell of the job
        number=0, job=name, rule=name, name=name, site=site, command=command,
        shell="bash",
        resources={}, threads=1, variables={}, inputs=(), outputs=(), environment=environment,
    )  # fmt: skip


def make_preview(
    planner: Planner,
    request: JobRequest,
    *,
    uploads: Collection[str] = (),
    image_size: int | None = None,
    warnings: Collection[str] = (),
    unicore_version: str = "",
) -> Preview:
    """Return the preview of a job.

    `uploads` are the project files that would be uploaded, and `image_size` is the size of the
    local image in bytes, if one is in use. `unicore_version` is that of the server, where known.

    Raises:
        UserError: something cannot be submitted.
        SiteRejected: the site's API cannot express it.
    """
    config = planner.config
    spec = _spec(planner, request, image_size)
    submission, script = _submission(config, make_submission(spec), spec.workspace, unicore_version)
    of_config = config.all_environments[request.environment]
    kind = next((k for k in _ENVIRONMENTS if getattr(of_config, k) is not None), "none")
    files = [path for _, path in planner.environment_files(request.environment)]
    here = [path for path in request.inputs if local_path(path, planner.project).exists()]
    return Preview(
        job=request.name,
        site=request.site,
        api=config.api,
        resources=_resources(spec),
        environment=kind.replace("_", ""),
        image_type=of_config.apptainer.type if of_config.apptainer else None,
        variables={**spec.variables, **spec.environment.variables},
        submission=submission,
        script=script,
        uploads=tuple(sorted({*uploads, *files, *here})),
        warnings=tuple(warnings),
    )


def _spec(planner: Planner, request: JobRequest, image_size: int | None) -> JobSpec:
    record = AttemptRecord(
        id=ATTEMPT, site=request.site, bucket=0, job=request.job, rule=request.rule,
        name=request.name,
        fingerprint="", state=AttemptState.PLANNED,
    )  # fmt: skip
    files = planner.environment_files(request.environment, own=request.own_environment)
    inputs = tuple(
        InputFile(path, image_size if number == 0 else None)
        for number, path in enumerate([*(path for _, path in files), *request.inputs])
    )
    configured = planner.config.site.workspace or ""
    workspace = workspace_below(configured) if configured.startswith("/") else WORKSPACE
    facts = SiteFacts(workspace, server="")
    spec = planner.spec(request, record, facts, Staged((), b"", (), inputs))
    return replace(spec, identity="")  # no job that a journal knows


def _resources(spec: JobSpec) -> dict[str, str | int | None]:
    resources = spec.resources
    return {
        "queue": resources.queue,
        "runtime_s": resources.runtime_s,
        "nodes": resources.nodes,
        "total_cpus": resources.total_cpus,
        "cpus_per_node": cpus_per_node(resources),
        "gpus_per_node": resources.gpus_per_node,
        "memory_mib_per_node": resources.memory_mib_per_node,
        "reservation": resources.reservation,
        "node_constraints": resources.constraint,
        "qos": resources.qos,
    }


def _submission(
    config: BackendConfig, submission: Submission, workspace: str, unicore_version: str
) -> tuple[dict[str, Any], str]:
    """Return the submission, and the script with the scheduler's directives after its first line.

    UNICORE gets a batch file that begins with the directives and writes the script, or the script
    alone without a scheduler; firecREST gets both in one.
    """
    scheduler = config.site.scheduler
    if config.api == "firecrest":
        script = scheduler_script(submission, "pbs" if scheduler == "pbs" else "slurm", workspace)
        return job_body(script, workspace), script
    description = job_description(submission, scheduler, None, unicore_version)
    if scheduler == "none":
        return description, submission.script
    head = "\n".join([*batch_directives(submission, scheduler), ""])
    return description, head + submission.script.partition("\n")[2]


LOCAL = ""
"""Stands for this machine in place of a site's name."""


@dataclass(frozen=True)
class UploadForecast:
    """Numbers of files that are needed at a site.

    Attributes:
        files: files to upload.
        bytes: total size of these.
        at_site: files that are there already, or in an uploaded bundle.
        later: files that are still to be made elsewhere and are uploaded then.
        made_there: files that are still to be made at the same site.
        moved: files that stay at another site, and move through this machine.
        moved_bytes: total size of these.
        imported: files that stay at another site, and that the site's server fetches from there if
            the two servers allow it; otherwise they move through this machine.
        imported_bytes: total size of these.
    """

    files: int = 0
    bytes: int = 0
    at_site: int = 0
    later: int = 0
    made_there: int = 0
    moved: int = 0
    moved_bytes: int = 0
    imported: int = 0
    imported_bytes: int = 0

    @property
    def size(self) -> int:
        """Total size of what has to come to the site."""
        return self.bytes + self.moved_bytes + self.imported_bytes


@dataclass(frozen=True)
class Forecast:
    """One job as it would be submitted; the fields are the keys of `smk-mantik plan --json`.

    Attributes:
        job: its rule and wildcards.
        rule: its rule; for a group the rules.
        site: name of its site; None if that depends on files that are still to be made.
        elsewhere: the sites that it goes to if it does not start there in time, in order.
        anywhere: whether it goes to whichever of these is expected to start it first.
        stays: whether it goes to that one of them where its inputs stay, if they do.
        resources: the requested resources; None while unknown.
        cores: number of cores that it occupies; None if unknown.
        cores_alone: the same of a pool's job, if it were a job of its own.
        segments: how many times it may use its walltime (`mantik_continue`).
        nested: whether it runs a Snakemake at the site.
        command: the shell command; None if it depends on files that are still to be made.
        environment: the environment of the command.
        later: names of resources that depend on files that are still to be made.
        sent: whether an earlier run submitted it and did not see its end; if it is still the same
            job, it is adopted and not submitted again.
        mistake: why it cannot be submitted; empty if it can.
    """

    job: str
    rule: str
    site: str | None
    elsewhere: tuple[str, ...] = ()
    anywhere: bool = False
    stays: bool = False
    resources: Resources | None = None
    cores: int | None = None
    cores_alone: int | None = None
    segments: int = 1
    nested: bool = False
    command: str | None = None
    environment: str = ""
    inputs: UploadForecast = UploadForecast()
    outputs: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    sent: bool = False
    mistake: str = ""


@dataclass
class Total:
    """The sums of all jobs at one site.

    Attributes:
        jobs: number of jobs.
        core_hours, gpu_hours: of the jobs with a known walltime, if each uses all of it.
        without_cores: number of jobs with a known walltime whose cores are unknown.
        without_runtime: number of jobs that request no walltime, or an unknown one.
        uploads: files to upload, each once: inputs, images and project files.
        unchecked: names of requested resources for which the site reports no limits, if the site
            was contacted.
    """

    jobs: int = 0
    core_hours: float = 0.0
    gpu_hours: float = 0.0
    without_cores: int = 0
    without_runtime: int = 0
    uploads: UploadForecast = field(default_factory=UploadForecast)
    unchecked: list[str] = field(default_factory=list)

    def add(self, resources: Resources | None, cores: int | None, segments: int = 1) -> None:
        """Add a job that uses all of its walltime `segments` times."""
        self.jobs += 1
        if resources is None or resources.runtime_s is None:
            self.without_runtime += 1
            return
        hours = segments * resources.runtime_s / 3600
        nodes = resources.nodes or 1
        self.core_hours += hours * (cores or 0)
        self.without_cores += cores is None
        self.gpu_hours += hours * (resources.gpus_per_node or 0) * nodes


@dataclass
class JobPlan:
    """The forecast of a run.

    Attributes:
        jobs: in an order in which they could run.
        sites: sums of the jobs at each site.
        project_files: files of the working directory that no rule names, to upload to each site.
        project_file_sizes: their paths and sizes in bytes, by site, if requested.
        left_out: other files and directories of the working directory, with the reason why they
            stay here, by site, if requested.
        here: number of jobs that run on this machine.
        more: whether checkpoints may lead to further jobs.
        alone: number of jobs at sites that go on without this machine once the first are submitted.
        stops: why the next ones wait for this machine, by the titles of their rules.
    """

    jobs: list[Forecast] = field(default_factory=list)
    sites: dict[str, Total] = field(default_factory=dict)
    project_files: dict[str, UploadForecast] = field(default_factory=dict)
    project_file_sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    here: int = 0
    more: bool = False
    alone: int = 0
    stops: Mapping[str, str] = field(default_factory=dict)

    @property
    def mistakes(self) -> list[str]:
        """Return the jobs that cannot be submitted, each with the reason."""
        return [f"{job.job}: {job.mistake}" for job in self.jobs if job.mistake]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return asdict(self) | {"mistakes": self.mistakes}


class Forecaster:
    """Forecast the uploads of a run to its sites. A context manager."""

    def __init__(
        self,
        workdir: Path,
        state: Path,
        planners: Mapping[str, Planner],
        made: Mapping[str, str],
    ) -> None:
        """Make a forecaster.

        `state` is our own local directory, with the journal if there is one. `made` maps the paths
        of outputs to the sites at which they are made, or to `LOCAL` for this machine.

        Raises:
            JournalError: the journal cannot be read.
        """
        self._copy = copy = JournalCopy(state)
        self._ledger = FileLedger(copy)
        self._places = _places(copy, planners)
        self._planners = planners
        self._made = made
        self._holdings = {p: Holdings(p, self._ledger) for p in self._places.values()}
        sizes = {
            file.size
            for place in self._holdings
            for files in (
                self._ledger.remote_files(place),
                *self._ledger.uploaded_bundles(place).values(),
            )
            for file in files
        }
        self._local = _Looking(workdir, self._ledger, sizes)
        self._runner = asyncio.Runner()
        # By place and path: each file is uploaded once.
        self._all: dict[tuple[str, str], tuple[str, int]] = {}

    def __enter__(self) -> Self:
        self._runner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.close()

    def needed(self, request: JobRequest) -> UploadForecast:
        """Forecast the files of one job.

        Raises:
            UserError: a file cannot be read.
        """
        place, planner = self._places[request.site], self._planners[request.site]
        makers = {path: nearest(path, self._made) for path in request.inputs}
        unmade = {
            path: "made_there" if self._places.get(self._made[maker]) == place else "later"
            for path, maker in makers.items()
            if maker is not None
        }
        here, others = planner.needed_files(request, self._ledger, place, unmade)
        files = [*self._runner.run(self._local.look_at(here)), *others]
        return self._add(request.site, files, unmade)

    def sent(self, request: JobRequest) -> bool:
        """Check whether the journal has an open, submitted attempt of a job."""
        rows = self._copy.db.execute(
            "SELECT 1 FROM attempts WHERE job = ?"
            " AND state NOT IN ('planned', 'done', 'abandoned')",
            (request.job,),
        )
        return rows.fetchone() is not None

    def project_files(self, site: str, paths: Sequence[str]) -> UploadForecast:
        """Forecast the project files."""
        wanted = [(path, None) for path in paths]
        return self._add(site, self._runner.run(self._local.look_at(wanted, project=True)), {})

    def all(self, site: str) -> UploadForecast:
        """Sum up all files so far for a site and other names of its place, each file once."""
        place = self._places[site]
        return _sum(kind for (at, _), kind in self._all.items() if at == place)

    def _add(
        self, site: str, files: Iterable[LocalFile], unmade: Mapping[str, str]
    ) -> UploadForecast:
        """Sum up how files come to a site; `unmade` says so of those that do not exist yet."""
        place = self._places[site]
        found = {path: (way, 0) for path, way in unmade.items()}
        found |= {file.path: ("at_site", 0) for file in files}
        lacking = self._holdings[place].lacking(files)
        found |= {file.path: (self._way(site, file), file.size) for file in lacking}
        self._all |= {(place, path): way for path, way in found.items()}
        return _sum(found.values())

    def _way(self, site: str, file: LocalFile) -> str:
        """Return how a file that a site lacks comes there, by the name of its count."""
        if not file.stored:
            return "files"
        api = self._planners[site].config.api
        holders = [name for name, place in self._places.items() if place == file.stored]
        importable = any(may_import(file, self._planners[name].config.api, api) for name in holders)
        return "imported" if importable else "moved"


class _Looking(LocalFiles):
    """Look at files, but read only those that a site might have."""

    def __init__(self, workdir: Path, ledger: FileLedger, sizes: set[int]) -> None:
        super().__init__(workdir, ledger)
        self._sizes = sizes

    async def _read(self, keys: list[Key]) -> dict[Key, str | OSError]:
        alike = [key for key in keys if key[1] in self._sizes]
        new: dict[Key, str | OSError] = dict.fromkeys((k for k in keys if k not in alike), "new")
        return {**new, **(await super()._read(alike) if alike else {})}


def _places(copy: JournalCopy, planners: Mapping[str, Planner]) -> dict[str, str]:
    """Return the place of each site by name, from the config for sites that no run has opened."""
    known = {
        row["site"]: row["place"] or row["site"]
        for row in copy.db.execute("SELECT site, place FROM sites")
    }
    of_config: dict[str, str] = {}
    for name, planner in planners.items():
        of_config.setdefault(_workspace(planner), known.get(name, f"new {name}"))
    return {name: known.get(name, of_config[_workspace(p)]) for name, p in planners.items()}


def _workspace(planner: Planner) -> str:
    config = planner.config
    return f"{config.server} {config.site.workspace} {config.site.storage}"


def _sum(kinds: Iterable[tuple[str, int]]) -> UploadForecast:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for kind, size in kinds:
        counts[kind] += 1
        sizes[kind] += size
    return UploadForecast(
        bytes=sizes["files"],
        moved_bytes=sizes["moved"],
        imported_bytes=sizes["imported"],
        **counts,
    )
