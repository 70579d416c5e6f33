"""Read the `#SBATCH` lines of a batch script as sbatch does, or refuse it in sbatch's words.

The messages are those of Slurm 22.05 to 24.05.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .settings import Partition

_SHORT = {
    "p": "partition", "t": "time", "N": "nodes", "n": "ntasks", "c": "cpus-per-task",
    "J": "job-name", "o": "output", "e": "error", "i": "input", "A": "account", "D": "chdir",
    "C": "constraint", "q": "qos", "G": "gpus",
}  # fmt: skip
_FLAGS = {"no-requeue", "requeue", "exclusive", "hold", "overcommit", "parsable", "contiguous"}
_IGNORED = {
    "account", "comment", "constraint", "export", "get-user-env", "gres", "hint", "input",
    "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mem-bind", "mincpus", "nice",
    "nodelist", "open-mode", "priority", "qos", "reservation", "signal", "threads-per-core",
    "tmp", "exclude", "begin", "cpus-per-gpu", "mem-per-gpu", "gpu-bind", "gpus", "gpus-per-task",
    "switches", "distribution", "wckey",
}  # fmt: skip
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
_MEMORY = re.compile(r"(?P<number>\d+)(?P<unit>[KMGT]?)B?", re.IGNORECASE)
_PER_MIB = {"k": 1 / 1024, "": 1, "m": 1, "g": 1024, "t": 1024 * 1024}
_REFUSED = "sbatch: error: Batch job submission failed: "


TOO_MANY = (
    "sbatch: error: AssocMaxSubmitJobLimit\n"
    f"{_REFUSED}Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)
"""sbatch's message to a user who has as many jobs as allowed."""

MAX_SCRIPT = 4 << 20
"""Largest size of a batch script in bytes; Slurm's limit (measured)."""


class SbatchError(Exception):
    """sbatch refused a script; the message is its standard error.

    Attributes:
        name: the job's name if no node can run it, since Slurm may keep a record then; else None.
    """

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


def _refused(reason: str, name: str | None = None) -> SbatchError:
    return SbatchError(f"{_REFUSED}{reason}", name)


@dataclass(frozen=True)
class SlurmVariant:
    """Properties in which Slurm installations differ.

    Attributes:
        part_limits: refuse a walltime above the partition's (`EnforcePartLimits`); otherwise the
            job is accepted and waits for ever.
        accounts: the accounts that jobs may be charged to, the first is the default; None for any.
        records_refused: a refused job that no node can run leaves a FAILED record with its own id
            (seen).
        job_memory: seconds that the scheduler remembers an ended job (`MinJobAge`).
    """

    part_limits: bool = True
    accounts: tuple[str, ...] | None = None
    records_refused: bool = False
    job_memory: float = 300.0


@dataclass(frozen=True)
class BatchRequest:
    """The resources and options that a batch script requests.

    Attributes:
        tasks: tasks over all nodes.
        memory_mib: memory on each node in MiB, None for no limit.
        gpus: GPUs on each node.
        output, error: files, relative to the working directory; `error` None: as `output`.
        chdir: working directory, None: the directory that sbatch was called in.
        account: as requested, else the default account, if there is one.
        comment, qos, reservation: as requested, empty if absent.
        blocked: the reason why the job never starts, empty if it does.
        after: the ids of the jobs that have to end before it starts.
    """

    partition: str
    time_s: int
    nodes: int = 1
    tasks: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    memory_mib: int | None = None
    gpus: int = 0
    name: str = "sbatch"
    output: str = "slurm-%j.out"
    error: str | None = None
    chdir: str | None = None
    account: str = ""
    comment: str = ""
    qos: str = ""
    reservation: str = ""
    blocked: str = ""
    after: tuple[int, ...] = ()

    @property
    def cpus(self) -> int:
        return self.tasks * self.cpus_per_task


def parse_script(
    script: str,
    partitions: Sequence[Partition],
    options: Mapping[str, str] | None = None,
    rules: SlurmVariant | None = None,
) -> BatchRequest:
    """Return the request of `script`, checked against `partitions` (the first is the default).

    `options` are command line options by their long names; they override the script's. Raise
    SbatchError with sbatch's message if sbatch would refuse the script.
    """
    if not script.startswith("#!"):
        raise SbatchError(
            "sbatch: error: This does not look like a batch script.  The first\n"
            "sbatch: error: line must start with #! followed by the path to an interpreter.\n"
            "sbatch: error: For instance: #!/bin/sh"
        )
    if len(script.encode()) > MAX_SCRIPT:
        raise _refused("Pathname of a file, directory or other parameter too long")
    request = _request(_options(script) | dict(options or {}), partitions[0])
    return _checked(request, partitions, rules or SlurmVariant())


def _options(script: str) -> dict[str, str]:
    """Return the options of the `#SBATCH` lines before the first command; later ones override."""
    options: dict[str, str] = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            options.update(_line_options(words))
        elif line.strip() and not line.startswith("#"):
            break
    return options


def _line_options(words: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        elif word.startswith("-") and word[1:2] in _SHORT:
            name, value = _SHORT[word[1]], word[2:].removeprefix("=")
            equals = "=" if value else ""
        else:
            raise _unrecognized(word)
        if name in _FLAGS:
            options[name] = value or "yes"
        else:
            options[name] = value if equals else next(rest, "")
    return options


def _request(options: dict[str, str], default: Partition) -> BatchRequest:
    taken = dict(options)

    def text(name: str, otherwise: str = "") -> str:
        return taken.pop(name, otherwise)

    def count(name: str) -> int | None:
        value = taken.pop(name, None)
        if value is None:
            return None
        if not value.isdigit() or int(value) < 1:
            if name == "nodes":
                raise SbatchError(f'sbatch: error: "{value}" is not a valid node count')
            raise SbatchError(f'sbatch: error: Invalid numeric value "{value}" for --{name}.')
        return int(value)

    nodes, tasks, per_node = count("nodes") or 1, count("ntasks"), count("ntasks-per-node")
    cpus = count("cpus-per-task") or 1
    tasks = tasks or nodes * (per_node or 1)
    per_node = per_node or -(-tasks // nodes)
    gpus = text("gpus-per-node", "0").rpartition(":")[2]
    after = _dependency(text("dependency"))
    time_s = parse_sbatch_time(text("time")) if "time" in taken else 0
    memory = None
    if "mem" in taken:
        memory = parse_sbatch_memory(text("mem"), "mem")
    elif "mem-per-cpu" in taken:
        each = parse_sbatch_memory(text("mem-per-cpu"), "mem-per-cpu")
        memory = (each or 0) * per_node * cpus or None
    request = BatchRequest(
        partition=text("partition", default.name), time_s=time_s, nodes=nodes, tasks=tasks,
        tasks_per_node=per_node, cpus_per_task=cpus, memory_mib=memory,
        gpus=int(gpus) if gpus.isdigit() else -1, name=text("job-name", "sbatch"),
        output=text("output", "slurm-%j.out"), error=text("error") or None,
        chdir=text("chdir") or None, account=options.get("account", ""),
        comment=options.get("comment", ""), qos=options.get("qos", ""),
        reservation=options.get("reservation", ""),
        blocked="JobHeldUser" if "hold" in options else "", after=after,
    )  # fmt: skip
    for name in taken:
        if name not in _IGNORED | _FLAGS:
            raise _unrecognized(f"--{name}={options[name]}")
    return request


def _dependency(text: str) -> tuple[int, ...]:
    """Return the job ids of `afterany:ID:ID…`, the only kind of dependency that is simulated."""
    kind, *ids = text.split(":")
    if text and (kind != "afterany" or not all(map(str.isdigit, ids))):
        raise _refused("Job dependency problem")
    return tuple(map(int, ids))


def _unrecognized(word: str) -> SbatchError:
    return SbatchError(
        f"sbatch: unrecognized option '{word}'\nTry \"sbatch --help\" for more information"
    )


def parse_sbatch_time(text: str) -> int:
    """Return the seconds of a walltime: minutes, m:s, h:m:s, d-h, d-h:m, d-h:m:s.

    Slurm rounds up to minutes; the sandbox keeps the seconds, so that tests need not wait.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise SbatchError("sbatch: error: Invalid --time specification")
    parts = [int(part) for part in match["rest"].split(":")]
    whole = match["days"] is not None or len(parts) == 3
    hours, minutes, seconds = ([*parts, 0, 0] if whole else [0, *parts, 0])[:3]
    return int(match["days"] or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def parse_sbatch_memory(text: str, option: str) -> int | None:
    """Return the MiB of a memory size, or None for 0, which means all memory of a node to Slurm."""
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise SbatchError(f"sbatch: error: Invalid --{option} specification")
    mib = int(match["number"]) * _PER_MIB[match["unit"].lower()]
    return max(1, round(mib)) if mib else None


def _checked(
    request: BatchRequest, partitions: Sequence[Partition], rules: SlurmVariant
) -> BatchRequest:
    names = request.partition.split(",")
    found = {p.name: p for p in partitions if p.name in names}
    # The first one that is up stands for whichever would start the job first.
    able = [p for p in found.values() if p.up and request.time_s <= p.max_time]
    partition = next(iter([*able, *found.values()]), None)
    if partition is None or len(found) < len(set(names)):
        raise SbatchError(
            f"sbatch: error: invalid partition specified: {request.partition}\n"
            f"{_REFUSED}Invalid partition name specified"
        )
    account = request.account or (rules.accounts or ("",))[0]
    if rules.accounts is not None:
        if account not in rules.accounts:
            raise _refused("Invalid account or account/partition combination specified")
        if request.reservation:
            raise _refused("Requested reservation is invalid")
    too_long = request.time_s > partition.max_time
    if too_long and rules.part_limits:
        raise _refused("Requested time limit is invalid (missing or exceeds some limit)")
    if max(request.cpus, request.nodes) > partition.nodes * partition.cpus:
        raise _refused("More processors requested than permitted")
    if request.nodes > partition.nodes:
        raise _refused("Node count specification invalid")
    unavailable = _refused("Requested node configuration is not available", request.name)
    on_node = request.tasks_per_node * request.cpus_per_task
    if on_node > partition.cpus or not 0 <= request.gpus <= partition.gpus:
        raise unavailable
    if (request.memory_mib or 0) > partition.memory_mib:
        text = f"sbatch: error: Memory specification can not be satisfied\n{unavailable}"
        raise SbatchError(text, request.name)
    blocked = request.blocked if partition.up else "PartitionDown"
    return replace(
        request,
        partition=partition.name,
        time_s=request.time_s or partition.default_time,
        account=account,
        blocked="PartitionTimeLimit" if too_long else blocked,
    )
