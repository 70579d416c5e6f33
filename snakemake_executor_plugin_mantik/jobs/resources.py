"""What a job asks the scheduler for: a rule's resources on top of the backend config's.

Names and meanings of a rule's resources are those of Snakemake and of its Slurm executor plugin,
so that a workflow need not be changed. docs/resources.md has the table.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.spec import Resources

_TEXTS: Final[Mapping[str, tuple[str, ...]]] = {
    "queue": ("slurm_partition", "partition", "queue"),
    "account": ("slurm_account", "account"),
    "qos": ("qos", "slurm_qos"),
    "constraint": ("constraint",),
    "reservation": ("reservation",),
    "gpu_model": ("gpu_model",),
}
"""Fields of `Resources`, and the names that a rule may use for each of them."""

_GPUS: Final = ("gpu", "gpus")

_REFUSED: Final[Mapping[str, str]] = {
    "gres": "ask for `gpu=<number over all nodes>`, and for their kind with `gpu_model`",
    "tasks_per_gpu": "ask for `tasks=<number over all nodes>`",
    "cpus_per_gpu": "ask for `cpus_per_task`",
}
"""Resources of the Slurm plugin that would change what a job gets, and what to ask for instead."""

_MODEL: Final = re.compile(r"[A-Za-z0-9_.+-]+")

_EXTRA: Final = "slurm_extra"

_INSTEAD: Final[Mapping[str, tuple[str, ...]]] = {
    "slurm_partition": ("partition", "p"),
    "slurm_account": ("account", "A"),
    "runtime": ("time", "t"),
    "nodes": ("nodes", "N"),
    "tasks": ("ntasks", "n"),
    "tasks_per_node": ("ntasks-per-node",),
    "cpus_per_task": ("cpus-per-task", "c"),
    "gpu": ("gpus", "G", "gpus-per-node", "gres"),
    "mem_mb": ("mem",),
    "mem_mb_per_cpu": ("mem-per-cpu",),
    "constraint": ("constraint", "C"),
    "reservation": ("reservation",),
    "qos": ("qos", "q"),
}
"""Resources, and the options of sbatch that they stand for."""

_KNOWN: Final = frozenset(
    {"runtime", "nodes", "tasks", "tasks_per_node", "cpus_per_task", "mem_mb", "mem_mb_per_cpu"}
).union(_GPUS, _REFUSED, {_EXTRA}, *_TEXTS.values())
"""Resources of a rule that mean something to a scheduler."""

_OF_SNAKEMAKE: Final = frozenset(
    {"mem", "mem_mib", "disk", "disk_mb", "disk_mib", "mpi", "tmpdir", "shell_exec"}
)
"""What means something to Snakemake, or is another name of a size."""

_FOREIGN: Final[Mapping[str, str]] = {
    **dict.fromkeys(("walltime", "wall_time", "time", "time_min", "time_limit"), "runtime"),
    **dict.fromkeys(("mem_gb", "memory", "memory_mb", "ram", "vmem"), "mem_mb"),
    **dict.fromkeys(("cpus", "ncpus", "cores", "cpu"), "cpus_per_task"),
    **dict.fromkeys(("ntasks", "mpi_tasks"), "tasks"),
    **dict.fromkeys(("ngpus", "num_gpus", "nvidia_gpu"), "gpu"),
}
"""Names that others have for resources, and which of ours is likely meant."""

JOB_NAME_LENGTH: Final = 64

_LEAST_MEMORY_MIB: Final = 64
"""What is asked of a node at least, where a rule asks for memory: the job script runs in it, too.

Locally `mem_mb=5` limits nothing; a scheduler would end the job before its command starts.
"""


def merge_resources(base: Resources, rule: Mapping[str, object], threads: int) -> Resources:
    """The resources of a job: those of its rule where it has any, else the backend config's.

    Args:
        base: what the backend config asks for.
        rule: the rule's resources, Snakemake's built-in defaults removed; values are numbers or
            texts, None counts as absent; names without a meaning here are left alone.
        threads: the rule's threads; more than one are the CPUs of a task.

    Raises `UserError` that names the resource for a value of the wrong kind, a negative one, two
    that contradict each other, and one that cannot be carried.
    """
    for name, instead in _REFUSED.items():
        if rule.get(name) is not None:
            raise _refuse(name, rule[name], "is not sent to the site", instead)
    if (extra := rule.get(_EXTRA)) is not None:
        raise _refuse(_EXTRA, extra, "is not sent to the site", _instead_of(str(extra)))
    changes: dict[str, Any] = {}
    for field, names in _TEXTS.items():
        if (text := _text(rule, names)) is not None:
            changes[field] = text or None
    if (model := changes.get("gpu_model")) and not _MODEL.fullmatch(model):
        raise _refuse("gpu_model", model, "has to be one kind of GPUs", "write it as Slurm does")
    if (runtime := _number(rule, "runtime")) is not None:
        changes["runtime_s"] = runtime * 60 or None
    for name in ("nodes", "tasks"):
        if (number := _number(rule, name, lowest=1)) is not None:
            changes[name] = number
    result = _with_tasks(replace(base, **changes), rule)
    result = _with_cpus(result, rule, threads)
    return _with_gpus(_with_memory(result, rule), rule)


def suggest_resource(name: str) -> str | None:
    """The resource that a name without a meaning here is likely to stand for, if there is one."""
    if name in _KNOWN | _OF_SNAKEMAKE:
        return None
    close = difflib.get_close_matches(name.lower(), _KNOWN, n=1, cutoff=0.85)
    return _FOREIGN.get(name.lower()) or next(iter(close), None)


def resolve_total_cpus(resources: Resources) -> Resources:
    """The resources with `TotalCPUs` told in the other two as well, as the job will have them.

    Without CPUs of a node they are the total's share, and one node where no number of nodes is
    said. Where all three disagree the total is what the other two make.

    Raises `UserError` for CPUs that cannot be divided among the nodes.
    """
    if resources.total_cpus is None or resources.tasks is not None:
        return resources
    nodes, cpus = resources.nodes or 1, resources.cpus_per_task
    if cpus is None:
        cpus, rest = divmod(resources.total_cpus, nodes)
        if rest:
            raise UserError(
                f"{resources.total_cpus} CPUs cannot be divided among {nodes} nodes",
                do="Ask for the CPUs of each node instead",
            )
    return replace(resources, nodes=nodes, cpus_per_task=cpus, total_cpus=nodes * cpus)


def total_cpus(resources: Resources) -> int | None:
    """CPUs over all nodes: as asked, else tasks (one per node) times CPUs of a task; None: open."""
    if resources.total_cpus is not None:
        return resources.total_cpus
    if resources.cpus_per_task is None:
        return None
    return (resources.tasks or resources.nodes or 1) * resources.cpus_per_task


def billed_cores(resources: Resources, of_node: int | None = None) -> int | None:
    """The cores that a job occupies and that a site bills; None where that is not known.

    Args:
        resources: what it asks for.
        of_node: the cores of a node, where a job gets whole nodes whatever it asks for.
    """
    cpus = total_cpus(resources) or resources.tasks
    if of_node is None:
        return cpus  # what a scheduler gives a job that asks for none is the site's default
    if resources.nodes is not None:
        return resources.nodes * of_node
    return -(-(cpus or 1) // of_node) * of_node


def slurm_directives(
    resources: Resources, name: str, *, account: str | None = None
) -> tuple[str, ...]:
    """The options of sbatch for a job, in the form `--option=value`, without `#SBATCH `.

    One task per node gets all the CPUs that are asked of it, so that `srun` starts its command
    once per node, unless the rule asks for tasks. `account` wins over that of `resources`.

    Raises `UserError` for a value that sbatch would not read as one word, for CPUs that cannot be
    divided among the nodes, and for a kind of GPUs without their number.
    """
    resources = resolve_total_cpus(resources)
    gpus: str | int | None = resources.gpus_per_node or None
    if resources.gpu_model is not None:
        if gpus is None:
            raise UserError(
                f"the resource gpu_model={resources.gpu_model} names a kind of GPUs, and none are"
                " asked for",
                do="Ask for gpu=<number over all nodes> as well, or leave it out",
            )
        gpus = f"{resources.gpu_model}:{gpus}"
    options: list[tuple[str, str | int | None]] = [
        ("job-name", _job_name(name)),
        ("partition", resources.queue),
        ("account", resources.account if account is None else account),
        ("qos", resources.qos),
        ("reservation", resources.reservation),
        ("constraint", resources.constraint),
        ("time", None if resources.runtime_s is None else _clock(resources.runtime_s)),
        ("nodes", resources.nodes),
        ("ntasks", resources.tasks),
        ("ntasks-per-node", 1 if resources.tasks is None else resources.tasks_per_node),
        ("cpus-per-task", resources.cpus_per_task),
        ("gpus-per-node", gpus),
        ("mem", _mebibytes(resources.memory_mib_per_node)),
        ("mem-per-cpu", _mebibytes(resources.memory_mib_per_cpu)),
    ]
    words = [f"--{option}={_word(option, value)}" for option, value in options if value is not None]
    return (*words, "--no-requeue")


def is_single_word(text: str) -> bool:
    """Whether a scheduler can be told a text, such as an account: sbatch would read it as it is."""
    return bool(text) and text.isprintable() and not set(text) & set(" '\"\\#")


def _instead_of(extra: str) -> str:
    """What to ask for in place of options of sbatch."""
    used = re.findall(r"(?:^|[\s'\"])--?([A-Za-z][A-Za-z-]*)", extra)
    instead = {option: name for name, options in _INSTEAD.items() for option in options}
    known = {f"`{instead[option]}`": None for option in used if option in instead}
    others = {
        f"{'--' if option[1:] else '-'}{option}": None for option in used if option not in instead
    }
    told = [f"ask for {', '.join(known)} instead"] if known else []
    if others:
        told.append(f"leave {', '.join(others)} out, for which there is no resource")
    return "; ".join(told) or "use the resources that docs/resources.md lists"


def _with_tasks(base: Resources, rule: Mapping[str, object]) -> Resources:
    per_node = _number(rule, "tasks_per_node", lowest=1)
    if per_node is None:
        return base
    if base.tasks is not None:
        raise UserError(
            f"the resources tasks={base.tasks} and tasks_per_node={per_node} contradict each other",
            do="Ask for one of them",
        )
    return replace(base, tasks=per_node * (base.nodes or 1), tasks_per_node=per_node)


def _with_cpus(base: Resources, rule: Mapping[str, object], threads: int) -> Resources:
    cpus = _number(rule, "cpus_per_task", lowest=1)
    if cpus is None and (threads > 1 or base.tasks is not None):
        # The config's CPUs are those of a node with one task: they say nothing about more tasks.
        cpus = max(threads, 1)
    if cpus is not None:
        return replace(base, cpus_per_task=cpus, total_cpus=None)
    if rule.get("nodes") is not None:
        return replace(base, total_cpus=None)
    return base


def _with_memory(base: Resources, rule: Mapping[str, object]) -> Resources:
    per_node, per_cpu = _number(rule, "mem_mb"), _number(rule, "mem_mb_per_cpu")
    if per_node is None and per_cpu is None:
        return base
    if per_node and per_cpu:
        raise UserError(
            f"the resources mem_mb={per_node} and mem_mb_per_cpu={per_cpu} contradict each other",
            do="Ask for one of them",
        )
    per_node = per_node and max(per_node, _LEAST_MEMORY_MIB)
    return replace(base, memory_mib_per_node=per_node or None, memory_mib_per_cpu=per_cpu or None)


def _with_gpus(base: Resources, rule: Mapping[str, object]) -> Resources:
    asked = {name: number for name in _GPUS if (number := _number(rule, name)) is not None}
    if not asked:
        return base
    _agree(asked)
    gpus, nodes = next(iter(asked.values())), base.nodes or 1
    per_node, rest = divmod(gpus, nodes)
    if rest:
        raise UserError(
            f"the resource {next(iter(asked))}={gpus} cannot be divided among {nodes} nodes",
            do="It counts the GPUs of the whole job: make it a multiple of the nodes",
        )
    return replace(base, gpus_per_node=per_node or None)


def _text(rule: Mapping[str, object], names: tuple[str, ...]) -> str | None:
    found: dict[str, object] = {}
    for name in names:
        value = rule.get(name)
        if value is None:
            continue
        # Snakemake makes a number of an account or a partition that looks like one.
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise _refuse(name, value, "has to be a text", "Put it in quotes")
        found[name] = str(value).strip()
    if not found:
        return None
    _agree(found)
    return str(next(iter(found.values())))


def _number(rule: Mapping[str, object], name: str, lowest: int = 0) -> int | None:
    value = rule.get(name)
    if value is None:
        return None
    number: int | None = None
    if isinstance(value, str):
        number = int(value) if re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", value) else None
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = int(value) if isinstance(value, int) or value.is_integer() else None
    if number is None:
        unit = {"runtime": " of minutes", "mem_mb": " of MB", "mem_mb_per_cpu": " of MB"}
        raise _refuse(name, value, f"has to be a whole number{unit.get(name, '')}", "Correct it")
    if number < lowest:
        raise _refuse(name, value, f"has to be {lowest} or more", "Correct it")
    return number


def _agree(values: Mapping[str, object]) -> None:
    if len(set(values.values())) > 1:
        text = " and ".join(f"{name}={value}" for name, value in values.items())
        raise UserError(f"the resources {text} mean the same and differ", do="Keep one of them")


def _refuse(name: str, value: object, why: str, do: str) -> UserError:
    return UserError(f"the resource {name}={value!r} {why}", do=do[0].upper() + do[1:])


def _job_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.=:+-]+", "_", name).strip("_")[:JOB_NAME_LENGTH] or "mantik"


def _clock(seconds: int) -> str:
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    day, hour = divmod(hours, 24)
    return f"{day}-{hour:02}:{minute:02}:{second:02}"


def _mebibytes(number: int | None) -> str | None:
    return None if number is None else f"{number}M"


def _word(option: str, value: str | int) -> str:
    """The value as it stands in an #SBATCH line, which sbatch splits and unquotes like a shell."""
    text = str(value)
    if not is_single_word(text):
        raise UserError(
            f"{text!r} cannot be sent as --{option}",
            do="Use no blanks, quotes, backslashes, # or control characters",
        )
    return text
