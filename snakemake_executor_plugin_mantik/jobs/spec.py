"""What a job is, before any site has heard of it: values without I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from snakemake_executor_plugin_mantik.jobs.paths import TryPaths


@dataclass(frozen=True)
class Resources:
    """The resources that a job asks for, normalised; None means that nothing is asked.

    Attributes:
        queue: queue or partition.
        runtime_s: walltime in seconds.
        nodes: number of nodes.
        tasks: number of tasks of an MPI-like job, over all nodes; None: one task per node.
        tasks_per_node: tasks on each node, where that is asked for; `tasks` are then all of them.
        cpus_per_task: CPUs of each task.
        total_cpus: CPUs over all nodes.
        gpus_per_node: GPUs on each node.
        gpu_model: their kind, as the scheduler calls it.
        memory_mib_per_node: memory on each node in MiB.
        memory_mib_per_cpu: memory for each CPU in MiB; excludes `memory_mib_per_node`.
        account: the compute budget account.
        reservation, constraint, qos: as the scheduler knows them.
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


@dataclass(frozen=True)
class Apptainer:
    """An Apptainer image that the command runs in.

    Attributes:
        image: path of the image, relative to the workspace or absolute at the site.
        options: words of `apptainer run` with bash's quotes; outside of single ones the job's
            variables (`$NAME`, `${NAME}`) are expanded on the node.
    """

    image: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """Where a command runs in, and what is done around it.

    At most one of `apptainer` and `python` is set. `python` is a virtual environment's directory,
    relative to the workspace or absolute at the site. The commands are bash, run in the order of
    the fields: before on the login node, before on the compute node, (the job's command), after on
    the compute node, after on the login node; those on the login node are the site's to run.
    """

    apptainer: Apptainer | None = None
    python: str | None = None
    modules: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    before_on_login: tuple[str, ...] = ()
    before_on_compute: tuple[str, ...] = ()
    after_on_compute: tuple[str, ...] = ()
    after_on_login: tuple[str, ...] = ()


@dataclass(frozen=True)
class InputFile:
    """A file that must lie in the workspace when the command starts.

    Attributes:
        path: relative to the workspace.
        size: size in bytes that it must have; None for a directory or where it is not known.
        directory: whether it is a directory.
        sha256: checksum that its content must have, hexadecimal; empty where it is not known.
        changed: whether the job itself changes it (`update()`).
    """

    path: str
    size: int | None = None
    directory: bool = False
    sha256: str = ""
    changed: bool = False


@dataclass(frozen=True)
class OutputFile:
    """A path that the job makes, relative to the workspace.

    Attributes:
        path: relative to the workspace.
        kind: an `output` must be there in the end, a `log` may be; a `touched` output is made by
            Snakemake itself and neither required nor fetched when the job did not make it.
        directory: whether a directory is expected: all that is below it belongs to it.
        keep: whether a version that lies there is kept when the job starts (`update()`, logs no).
    """

    path: str
    kind: Literal["output", "log", "touched"] = "output"
    directory: bool = False
    keep: bool = False


@dataclass(frozen=True)
class Benchmark:
    """Measurements of a command, as Snakemake's `benchmark:` asks for them.

    Attributes:
        path: where they go, relative to the workspace: a line for each run of the command
            (`jobs/benchmark.sh.j2` says what is in it).
        commands: the command of each run; they differ where it names its iteration.
    """

    path: str
    commands: tuple[str, ...]


@dataclass(frozen=True)
class LiveDirectory:
    """A directory of which is told what the job writes to it, while it runs (`jobs/live.sh.j2`).

    Attributes:
        path: relative to the workspace; nothing is told before it is there.
        growing: an extended regular expression: it matches the paths below the directory of those
            files that are only added to, and of which only what is added is told.
    """

    path: str
    growing: str


@dataclass(frozen=True)
class ScriptLimits:
    """Sizes and times that a job script keeps to; defaults are those of the backend config.

    Attributes:
        heartbeat_s: seconds between two growths of the claim.
        grace_s: seconds that the command has after TERM before it is killed and the marker written;
            schedulers kill what is left after 30 s or so.
        visible_s: seconds to wait for an input or output that is not there: network file systems
            show what another node wrote with a delay.
        marker_bytes: outputs up to this size together travel in the marker.
        archive_file_bytes: single outputs up to this size travel in the archive.
        log_tail_bytes: how much of the log's end the marker holds.
        live_s: seconds between two looks at what the job has written to a `LiveDirectory`.
        live_file_bytes: files up to this size are told of while the job runs.
        live_bytes: so much is told of a job while it runs, packed.
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


@dataclass(frozen=True)
class JobSpec:
    """One try of a job, complete: all that the script and the submission are made of.

    Attributes:
        paths: where the try's own things lie.
        workspace: absolute path of the workspace at the site.
        name: readable name (rule and wildcards), any text; each site cuts it to what it takes.
        command: what the shell is given after `-c`, prefix and suffix included.
        shell: base name of the shell, `bash` unless the rule says otherwise.
        resources: what the scheduler is asked for.
        launches: whether the command starts its tasks itself, with `srun` or `mpiexec`: it runs
            once then, whatever the environment.
        environment: what the command runs in.
        variables: environment variables that belong to the rule (thread counts and the like);
            the environment's own variables win over them.
        inputs: checked before the command starts.
        outputs: made by the command; old ones are removed first, their directories made.
        bundles: uploaded bundles that must be unpacked before the command starts, in this order.
        inline: a gzipped tar that travels in the script, unpacked after `bundles`; empty for none.
        numbers: by path, the number of the content that `bundles` or `inline` bring, where it has
            one: an older content never replaces a newer one.
        term: that of the controller that sends the try (`engine.leases`); 0 for none.
        secrets: names of the variables that the file of secrets sets.
        benchmark: how the command is measured, if it is; `command` is then the first run's.
        umask: file mode mask that the command runs with; None for the site's own.
        cores: how many it occupies, where that is known; nothing of the script depends on it.
        shared: whether the workspace's group may read what is ours in it, secrets excepted.
        incomplete: whether the outputs of a command that failed come back.
        live: a directory of which is told what the job writes to it, while it runs.
        limits: sizes and times.
    """

    paths: TryPaths
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
    secrets: tuple[str, ...] = ()
    benchmark: Benchmark | None = None
    umask: int | None = None
    shared: bool = False
    launches: bool = False
    incomplete: bool = False
    live: LiveDirectory | None = None
    cores: int | None = None
    limits: ScriptLimits = ScriptLimits()
