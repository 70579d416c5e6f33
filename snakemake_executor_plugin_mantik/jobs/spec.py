"""Values that describe a job, independent of any site and without I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from .paths import AttemptPaths

AUTO: Final = "auto"
"""The queue that leaves the choice to the executor."""


@dataclass(frozen=True)
class Resources:
    """The resources that a job requests, normalised; None means not requested.

    Attributes:
        queue: queue or partition; several of Slurm, separated by commas: whichever starts it first;
            `AUTO`: the first of the site's that allows the rest.
        runtime_s: walltime in seconds.
        nodes: number of nodes.
        tasks: number of tasks of an MPI-like job, over all nodes; None: one task per node.
        tasks_per_node: tasks on each node, if requested; `tasks` is then the total.
        cpus_per_task: CPUs of each task.
        total_cpus: CPUs over all nodes.
        gpus_per_node: GPUs on each node.
        gpu_model: the scheduler's name for the kind of GPU.
        memory_mib_per_node: memory on each node in MiB.
        memory_mib_per_cpu: memory for each CPU in MiB; excludes `memory_mib_per_node`.
        account: the compute budget account.
        reservation, constraint, qos: as the scheduler knows them.
        nodelist, exclude: nodes that it has to have, or must not have, as Slurm lists them.
        extra: further options of sbatch, as `--option=value`, separated by blanks.
        pool: the pool in whose allocations it runs (`Pools` in the backend config).
    """

    queue: str | None = None
    runtime_s: int | None = None
    nodes: int | None = None
    tasks: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    total_cpus: int | None = None
    gpus_per_node: int | None = None
    gpu_model: str | None = None
    memory_mib_per_node: int | None = None
    memory_mib_per_cpu: int | None = None
    account: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    qos: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    extra: str | None = None
    pool: str | None = None

    @property
    def queues(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.queue or "").split(",")))


@dataclass(frozen=True)
class Apptainer:
    """An Apptainer image that the command runs in.

    Attributes:
        image: path of the image, relative to the workspace or absolute at the site.
        options: options of `apptainer run`, with bash's quotes; the job's variables (`$NAME`,
            `${NAME}`) are expanded on the node, except in single quotes.
    """

    image: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Container:
    """A container that `srun` starts, by a plugin of Slurm.

    Attributes:
        plugin: the key of the backend config that stands for the plugin: `ContainerEngine` takes
            an Environment Definition File, `Pyxis` an image.
        source: name of what the plugin starts, or a path, relative to the workspace or absolute.
        is_file: whether `source` is a path.
        mounts: mounts of pyxis, as `SOURCE:DESTINATION[:FLAGS]`; variables are expanded on the
            node. An Environment Definition File has its own.
        options: further options of `srun`, as those of `Apptainer`.
    """

    plugin: Literal["ContainerEngine", "Pyxis"]
    source: str
    is_file: bool = False
    mounts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """The environment that a command runs in, and the commands to run before and after it.

    At most one of `apptainer` and `container` is set, and only one of `apptainer` and `python`.
    `python` is a virtual environment's directory, relative to the workspace or absolute at the
    site. The commands are bash and run in the order of the fields, with the job's command in the
    middle. The site itself runs the commands on the login node. `slurm_options` are options of
    sbatch that mount software for the whole job. With `expand`, bash expands the values of
    `variables`, the paths of `apptainer` and `python`, and all options, as in double quotes. If
    there are `requirements`, the first job makes the virtual environment of them, below `python`:
    the file that pip reads, then others that it names.
    """

    apptainer: Apptainer | None = None
    python: str | None = None
    modules: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    before_on_login: tuple[str, ...] = ()
    before_on_compute: tuple[str, ...] = ()
    after_on_compute: tuple[str, ...] = ()
    after_on_login: tuple[str, ...] = ()
    container: Container | None = None
    slurm_options: tuple[str, ...] = ()
    expand: bool = False
    requirements: tuple[str, ...] = ()


@dataclass(frozen=True)
class InputFile:
    """A file or directory that must be in the workspace when the command starts.

    Attributes:
        path: relative to the workspace.
        size: expected size in bytes; None for a directory or if unknown.
        directory: whether it is a directory.
        sha256: expected checksum of the content, hexadecimal; empty if unknown.
        changed: whether the job itself changes it (`update()`).
        moved: whether it comes from another place, by a transfer that its checksum has to prove.
    """

    path: str
    size: int | None = None
    directory: bool = False
    sha256: str = ""
    changed: bool = False
    moved: bool = False


@dataclass(frozen=True)
class OutputFile:
    """A file or directory that the job makes.

    Attributes:
        path: relative to the workspace.
        kind: an `output` is required, a `log` is optional; a `touched` output is made by Snakemake
            itself, and is neither required nor fetched if the job did not make it. A `checkpoint`
            stays at the site, and is listed only if the job may go on from it (`Segment`).
        directory: whether it is a directory, which includes everything below it.
        keep: whether an existing version is kept when the job starts: that of an `update()` output,
            or an observer's directory, but not that of a log.
        stored: whether it stays at the site.
    """

    path: str
    kind: Literal["output", "log", "touched", "checkpoint"] = "output"
    directory: bool = False
    keep: bool = False
    stored: bool = False


@dataclass(frozen=True)
class Benchmark:
    """Measurements of a command, for Snakemake's `benchmark:`.

    Attributes:
        path: file of the measurements, relative to the workspace, with one line for each run of the
            command (`jobs/bash/benchmark.sh` describes the columns).
        file: the benchmark file, relative to the workspace. It is for later commands at the site;
            the user's is written on this machine.
        commands: the command of each run; they differ if the command names its iteration.
    """

    path: str
    file: str
    commands: tuple[str, ...]


@dataclass(frozen=True)
class Predecessor:
    """An attempt that has to succeed before another one runs, because it makes some of its inputs.

    Attributes:
        paths: its own paths.
        makes: the inputs that it makes, files or directories, relative to the workspace.
        code: the exit code of its success; if that of a segment that asks for another one, which
            is the job itself, it makes at least some of `makes`.
    """

    paths: AttemptPaths
    makes: tuple[str, ...]
    code: int = 0


@dataclass(frozen=True)
class LiveDirectory:
    """A directory whose new content is reported while the job runs (`jobs/bash/live.sh`).

    Attributes:
        path: relative to the workspace; reports begin when it exists.
        growing: an extended regular expression for paths below the directory: files that match are
            only appended to, and only the appended part is reported.
        metrics: a directory below it for the metric of the job's GPUs, relative to the workspace,
            in the format of MLflow's file store; empty for none.
    """

    path: str
    growing: str
    metrics: str = ""


@dataclass(frozen=True)
class Segment:
    """One of several attempts in a row that continue a job past its walltime (`segment.sh`).

    Attributes:
        number: counts from 0.
        most: how many segments there may be.
        checkpoint: the files and directories that the next segment goes on from, relative to the
            workspace; with a slash at the end, a directory that is made for the job.
        runtime_s: the walltime in seconds.
        warn_s: seconds before its end at which the job is warned.
        before: paths of the segment before, if that left no marker: this one then goes on only if
            the checkpoint has changed since that one began.
    """

    number: int
    most: int
    checkpoint: tuple[str, ...]
    runtime_s: int
    warn_s: float
    before: AttemptPaths | None = None


@dataclass(frozen=True)
class ScriptLimits:
    """Limits of a job script.

    Attributes:
        heartbeat_s: seconds between two heartbeats, which are appended to the claim.
        grace_s: seconds that the command has after TERM before it is killed and the marker written;
            schedulers kill what is left after about 30 s.
        visible_s: seconds to wait for a missing input or output: network file systems show what
            another node wrote with a delay.
        marker_bytes: outputs up to this total size are put into the marker.
        archive_file_bytes: single outputs up to this size are put into the archive, and larger ones
            whose names a file API cannot carry.
        log_tail_bytes: maximum size of the log's end in the marker.
        live_s: seconds between two checks of a `LiveDirectory`.
        live_file_bytes: files up to this size are reported while the job runs; of a growing file,
            at most this much at each check.
        live_bytes: maximum packed size of all reports while the job runs.
        upload_bytes: largest file that the site takes with one request.
    """

    heartbeat_s: int = 10
    grace_s: int = 20
    visible_s: int = 5
    marker_bytes: int = 1 << 20
    archive_file_bytes: int = 8 << 20
    log_tail_bytes: int = 1 << 18
    live_s: int = 10
    live_file_bytes: int = 1 << 20
    live_bytes: int = 64 << 20
    upload_bytes: int = 4 << 20


@dataclass(frozen=True)
class JobSpec:
    """Everything that the script and the submission of one attempt are made from.

    Attributes:
        paths: the attempt's own paths.
        workspace: absolute path of the workspace at the site.
        name: readable name (rule and wildcards), any text; each site shortens it as needed.
        command: argument of the shell's `-c`, prefix and suffix included.
        shell: base name of the shell.
        launches: whether the command starts its tasks itself, with `srun` or `mpiexec`: then it
            runs once, whatever the environment.
        variables: environment variables of the rule (thread counts and the like); the variables of
            `environment` override them.
        inputs: checked before the command starts.
        outputs: made by the command; the script first removes old ones and makes directories.
        bundles: uploaded bundles to unpack before the command starts, in this order.
        inline: a gzipped tar inside the script, unpacked after `bundles`; empty for none.
        numbers: by path, the number of the content in `bundles` or `inline`, if it has one: an
            older content never replaces a newer one.
        term: term of the controller that submits the attempt (`engine.leases`); 0 for none.
        identity: a line that tells which job it is (`journal.encode_identity`), for its claim.
        secrets: names of the variables that the file of secrets sets.
        benchmark: how to measure the command, if at all; `command` is then that of the first run.
        umask: file mode mask of the command; None for the site's own.
        cores: number of cores that the job occupies, if known; the script does not depend on it.
        shared: whether the workspace's group may read the executor's files in it, except secrets.
        incomplete: whether the outputs of a failed command are fetched.
        live: a directory whose new content is reported while the job runs.
        storage_link: path of the directory by which commands name remote outputs: the script makes
            it a link to the workspace itself; empty if there is none.
        datasets: absolute paths of files and directories at the site that the command reads:
            containers see them, read-only.
        after: the attempts that make inputs which did not exist when the attempt was submitted. The
            command starts only if all of them have succeeded.
        segment: how the job goes on past its walltime, if it may.
    """

    paths: AttemptPaths
    workspace: str
    name: str
    command: str
    shell: str = "bash"
    resources: Resources = Resources()
    environment: Environment = Environment()
    variables: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[InputFile, ...] = ()
    outputs: tuple[OutputFile, ...] = ()
    bundles: tuple[str, ...] = ()
    inline: bytes = b""
    numbers: Mapping[str, int] = field(default_factory=dict)
    term: int = 0
    identity: str = ""
    secrets: tuple[str, ...] = ()
    benchmark: Benchmark | None = None
    umask: int | None = None
    shared: bool = False
    launches: bool = False
    incomplete: bool = False
    live: LiveDirectory | None = None
    storage_link: str = ""
    datasets: tuple[str, ...] = ()
    after: tuple[Predecessor, ...] = ()
    segment: Segment | None = None
    cores: int | None = None
    limits: ScriptLimits = ScriptLimits()
