"""Merge a rule's resources with those of the backend config; turn them into options.

Names and meanings of a rule's resources are those of Snakemake and of its Slurm executor plugin,
so that workflows work unchanged. docs/resources.md has the table. The options are those of sbatch,
and those of qsub of PBS Professional and OpenPBS, not of Torque (OpenPBS' manual pages qsub(1B) and
pbs_resources(7B)); these were not tried on a real PBS.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeVar

from ..common.errors import UserError
from .spec import Resources

_T = TypeVar("_T")

_TEXTS: Final[Mapping[str, tuple[str, ...]]] = {
    "queue": ("slurm_partition", "partition", "queue"),
    "account": ("slurm_account", "account"),
    "qos": ("qos", "slurm_qos"),
    "constraint": ("constraint",),
    "reservation": ("reservation",),
    "gpu_model": ("gpu_model",),
    "nodelist": ("nodelist",),
    "exclude": ("exclude",),
}
"""Fields of `Resources`, and the names that a rule may use for each of them."""

_GPUS: Final = ("gpu", "gpus")

_REFUSED: Final[Mapping[str, str]] = {
    "gres": "Use `gpu=<number over all nodes>`, and `gpu_model` for their kind",
    "tasks_per_gpu": "Use `tasks=<number over all nodes>`",
    "cpus_per_gpu": "Use `cpus_per_task`",
}
"""Resources of the Slurm plugin that are not supported, and what to request instead."""

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
    "nodelist": ("nodelist", "w"),
    "exclude": ("exclude", "x"),
}
"""Options of sbatch that each resource replaces."""

_OURS: Final = frozenset(
    ("array", "chdir", "clusters", "dependency", "error", "export", "export-file", "input",
     "job-name", "kill-on-invalid-dep", "no-requeue", "output", "parsable", "requeue", "test-only",
     "wait", "wrap")
)  # fmt: skip
"""Options of sbatch that the executor sets itself, or that would change what it relies on."""

_OPTION: Final = re.compile(r"--([a-z][a-z-]*)(=.*)?")

_KNOWN: Final = frozenset(
    {"runtime", "nodes", "tasks", "tasks_per_node", "cpus_per_task", "mem_mb", "mem_mb_per_cpu"}
).union(_GPUS, _REFUSED, {_EXTRA}, *_TEXTS.values())
"""Resources of a rule that this module reads."""

_OF_SNAKEMAKE: Final = frozenset(
    {"mem", "mem_mib", "disk", "disk_mb", "disk_mib", "mpi", "tmpdir", "shell_exec"}
)
"""Resources that Snakemake itself reads, or other names of a size."""

_FOREIGN: Final[Mapping[str, str]] = {
    **dict.fromkeys(("walltime", "wall_time", "time", "time_min", "time_limit"), "runtime"),
    **dict.fromkeys(("timeout_min", "h_rt"), "runtime"),
    **dict.fromkeys(("mem_gb", "mem_kb", "memory", "memory_mb", "ram", "vmem"), "mem_mb"),
    "mem_per_cpu": "mem_mb_per_cpu",
    **dict.fromkeys(("cpus", "ncpus", "cores", "cpu", "cpus_per_node"), "cpus_per_task"),
    **dict.fromkeys(("ntasks", "mpi_tasks"), "tasks"),
    **dict.fromkeys(("ngpus", "num_gpus", "nvidia_gpu", "accelerator"), "gpu"),
    "gpus_per_node": "gpu, which counts those of all nodes",
    "gpu_type": "gpu_model",
    "partition_name": "slurm_partition",
}
"""Names of resources in other systems, and the name that is likely meant, with what differs."""

JOB_NAME_LENGTH: Final = 64
_PBS_NAME_LENGTH: Final = 15
"""Older servers refuse longer names of jobs; those behind firecREST accept 236 characters."""

_FEATURE = re.compile(r"[A-Za-z][A-Za-z0-9_]*(=[A-Za-z0-9_.+-]+)?")

_LEAST_MEMORY_MIB: Final = 64
"""Minimum memory to request on a node if a rule requests any: the job script needs some, too.

Locally `mem_mb=5` limits nothing; a scheduler would end the job before its command starts.
"""


def merge_resources(base: Resources, rule: Mapping[str, object], threads: int) -> Resources:
    """Return a job's resources: those of its rule override those of the backend config.

    Args:
        base: resources of the backend config.
        rule: the rule's resources without Snakemake's built-in defaults; values are numbers or
            texts, None counts as absent; unknown names are ignored.
        threads: the rule's threads; more than one become the CPUs of a task, unless the rule sets
            `cpus_per_task`.

    Raises `UserError` that names the resource if a value has the wrong type, is too small,
    contradicts another one, or is not supported.
    """
    for name, instead in _REFUSED.items():
        if rule.get(name) is not None:
            raise refuse_resource(name, rule[name], "is not supported", instead)
    changes: dict[str, Any] = {}
    if (extra := _text(rule, (_EXTRA,))) is not None:
        changes["extra"] = _check_extra(extra)
    for field, names in _TEXTS.items():
        if (text := _text(rule, names)) is not None:
            changes[field] = text or None
    if (model := changes.get("gpu_model")) and not _MODEL.fullmatch(model):
        raise refuse_resource(
            "gpu_model", model, "has to be one kind of GPU", "Write it as Slurm does"
        )
    if (runtime := _number(rule, "runtime")) is not None:
        changes["runtime_s"] = runtime * 60 or None
    for name in ("nodes", "tasks"):
        if (number := _number(rule, name, lowest=1)) is not None:
            changes[name] = number
    result = _with_tasks(replace(base, **changes), rule)
    result = _with_cpus(result, rule, threads)
    return _with_gpus(_with_memory(result, rule), rule)


def with_tasks_of(variables: Mapping[str, str], resources: Resources) -> Resources:
    """Return the resources with the number of tasks that a config's variables set for `srun`.

    Slurm tells `srun` the number that the job requests, so it has to request this one. A task per
    node would win over `SLURM_NTASKS_PER_NODE`. Tasks that a rule requests win over variables.
    """
    per_node, tasks = (
        _natural(variables.get(name)) for name in ("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS")
    )
    nodes = resources.nodes or 1
    if resources.tasks is not None or not (per_node or tasks):
        return resources
    on_node = per_node or -(-(tasks or 1) // nodes)
    cpus = resources.cpus_per_task and max(1, resources.cpus_per_task // on_node)
    return replace(
        resources, tasks=tasks or on_node * nodes, tasks_per_node=per_node, cpus_per_task=cpus,
        total_cpus=None,
    )  # fmt: skip


def _natural(text: str | None) -> int | None:
    found = int(text) if text is not None and re.fullmatch(r"[0-9]{1,6}", text.strip()) else 0
    return found or None


def suggest_resource(name: str) -> str | None:
    """Return the resource of which a name is one slip away; None if there is none.

    A slip is a letter too many, too few or wrong, two letters in the wrong order, or the case.
    """
    if name in _KNOWN | _OF_SNAKEMAKE or foreign_resource(name):
        return None
    plain = name.lower().replace("-", "_")
    return next((known for known in sorted(_KNOWN) if _is_slip(plain, known)), None)


def foreign_resource(name: str) -> str | None:
    """Return the resource that means the same as another system's; None if the name is no such."""
    return None if name in _KNOWN else _FOREIGN.get(name.lower())


def _is_slip(name: str, meant: str) -> bool:
    same = (n for n, (a, b) in enumerate(zip(name, meant, strict=False)) if a != b)
    at = next(same, min(len(name), len(meant)))
    a, b = name[at:], meant[at:]
    swapped = a[:2] == b[1::-1] and a[2:] == b[2:]
    return swapped or a[1:] == b[1:] or a == b[1:] or a[1:] == b


def resolve_total_cpus(resources: Resources) -> Resources:
    """Derive `nodes` and `cpus_per_task` from `total_cpus`, as the job will have them.

    The total is divided among the nodes (one, if no number is given). If `cpus_per_task` is given,
    too, the total becomes its product with the nodes. Without a total, or with tasks, nothing
    changes.

    Raises `UserError` for CPUs that cannot be divided among the nodes.
    """
    if resources.total_cpus is None or resources.tasks is not None:
        return resources
    nodes, total = resources.nodes or 1, resources.total_cpus
    cpus = resources.cpus_per_task
    if cpus is None:
        advice = "Set CPUsPerNode instead of TotalCPUs"
        cpus = _share(total, nodes, f"{total} CPUs", advice)
    return replace(resources, nodes=nodes, cpus_per_task=cpus, total_cpus=nodes * cpus)


def total_cpus(resources: Resources) -> int | None:
    """Return the CPUs over all nodes: as given, or tasks times CPUs of a task; None if unknown.

    A job that requests no tasks has one on each node.
    """
    if resources.total_cpus is not None:
        return resources.total_cpus
    if resources.cpus_per_task is None:
        return None
    return (resources.tasks or resources.nodes or 1) * resources.cpus_per_task


def cpus_per_node(resources: Resources) -> int | None:
    """Return the CPUs that all tasks of a node request together; None if unknown."""
    cpus, tasks = resources.cpus_per_task, resources.tasks
    if cpus is None:
        return None
    return cpus * -(-tasks // (resources.nodes or 1)) if tasks else cpus


def memory_per_node(resources: Resources) -> int | None:
    """Return the requested memory of a node in MiB; None if the site's default applies."""
    if resources.memory_mib_per_cpu is None:
        return resources.memory_mib_per_node
    cpus = cpus_per_node(resources)
    if cpus is None:
        cpus = -(-(resources.total_cpus or resources.tasks or 1) // (resources.nodes or 1))
    return resources.memory_mib_per_cpu * cpus


def billed_cores(resources: Resources, of_node: int | None = None) -> int | None:
    """Return the cores that a site bills for a job; None if unknown.

    `of_node` is the number of cores of a node, at sites where a job always gets whole nodes.
    """
    cpus = total_cpus(resources) or resources.tasks
    if of_node is None:
        return cpus  # None: the site's default for a job that requests no CPUs is not known
    if resources.nodes is not None:
        return resources.nodes * of_node
    return -(-(cpus or 1) // of_node) * of_node


def slurm_directives(resources: Resources, name: str) -> tuple[str, ...]:
    """Return the options of sbatch for a job, in the form `--option=value`, without `#SBATCH `.

    Unless the rule requests tasks, one task per node gets all CPUs of the node's request, so that
    `srun` starts its command once per node.

    Raises `UserError` for a value that sbatch would not read as one word, for CPUs that cannot be
    divided among the nodes, and for a kind of GPUs without a number of GPUs.
    """
    resources = resolve_total_cpus(resources)
    gpus: str | int | None = resources.gpus_per_node or None
    if resources.gpu_model is not None:
        if gpus is None:
            raise UserError(
                f"the resource gpu_model={resources.gpu_model} names a kind of GPU, but the job"
                " requests no GPUs",
                do="Add gpu=<number over all nodes>, or remove gpu_model",
            )
        gpus = f"{resources.gpu_model}:{gpus}"
    name = re.sub(r"[^A-Za-z0-9_.=:+-]+", "_", name).strip("_")
    options: list[tuple[str, str | int | None]] = [
        ("job-name", name[:JOB_NAME_LENGTH] or "mantik"),
        ("partition", resources.queue),
        ("account", resources.account),
        ("qos", resources.qos),
        ("reservation", resources.reservation),
        ("constraint", resources.constraint),
        ("time", _clock(resources.runtime_s, days=True)),
        ("nodes", resources.nodes),
        ("ntasks", resources.tasks),
        ("ntasks-per-node", 1 if resources.tasks is None else resources.tasks_per_node),
        ("cpus-per-task", resources.cpus_per_task),
        ("gpus-per-node", gpus),
        ("mem", resources.memory_mib_per_node and f"{resources.memory_mib_per_node}M"),
        ("mem-per-cpu", resources.memory_mib_per_cpu and f"{resources.memory_mib_per_cpu}M"),
        ("nodelist", resources.nodelist),
        ("exclude", resources.exclude),
    ]
    words = _words((f"--{option}=", value) for option, value in options)
    return (*words, *(resources.extra or "").split(), "--no-requeue")


def refuse_slurms(resources: Resources, where: str) -> None:
    """Refuse resources that only Slurm has; `where` says what has them not.

    Raises:
        UserError: one of them is requested.
    """
    for name in ("gpu_model", "nodelist", "exclude", "extra"):
        if (value := getattr(resources, name)) is not None:
            of_rule = _EXTRA if name == "extra" else name
            raise UserError(
                f"{where} cannot express the resource {of_rule}={value}",
                do="Remove it, or set Site: Scheduler to slurm, if the site runs Slurm",
            )


def pbs_directives(
    resources: Resources, name: str, *, longest_name: int = _PBS_NAME_LENGTH
) -> tuple[str, ...]:
    """Return the options of qsub for a job, without `#PBS `.

    A job gets one chunk per node, with one MPI process that has all its CPUs, unless the rule
    requests tasks. A reservation is a queue of PBS, so it overrides the queue. The account becomes
    the project (-P), as in firecREST. Names are cut to `longest_name`.

    Raises:
        UserError: PBS has no option for a value or would not read it as one word, or tasks or CPUs
            cannot be divided among the nodes.
    """
    if resources.qos is not None:
        raise UserError(
            f"PBS has no quality of service, so {resources.qos!r} cannot be requested",
            do="Remove QoS, and use the queue that stands for it",
        )
    if len(resources.queues) > 1:
        raise UserError(f"PBS takes one queue, not {resources.queue}", do="Name one of them")
    if resources.gpu_model is not None:
        raise UserError(
            "PBS has no common name for kinds of GPUs, so"
            f" gpu_model={resources.gpu_model} cannot be requested",
            do="Remove it, and use the queue that has them, or a `constraint` as name=value",
        )
    refuse_slurms(resources, "PBS")
    options = [
        ("-N ", re.sub(r"[^A-Za-z0-9_.+-]+", "_", name).strip("_.")[:longest_name] or "mantik"),
        ("-q ", resources.reservation or resources.queue),
        ("-P ", resources.account),
        ("-l select=", _chunks(resources)),
        ("-l place=", "scatter" if (resources.nodes or 1) > 1 else None),
        ("-l walltime=", _clock(resources.runtime_s)),
    ]
    # Without -S the user's login shell runs the script, whatever its first line says.
    return ("-S /bin/bash", *_words(options), "-r n")


def _chunks(resources: Resources) -> str | None:
    """Return the chunks of a job, one for each node; None if it requests nothing of them."""
    nodes = resources.nodes or 1
    tasks = resources.tasks or nodes
    tasks = _share(tasks, nodes, f"{tasks} tasks")
    cpus = resources.cpus_per_task and resources.cpus_per_task * tasks
    if cpus is None and resources.tasks is not None:
        cpus = tasks
    if cpus is None and resources.total_cpus is not None:
        cpus = _share(resources.total_cpus, nodes, f"{resources.total_cpus} CPUs")
    memory = memory_per_node(resources)
    parts = [
        f"ncpus={cpus}" if cpus else "",
        f"mpiprocs={tasks}" if cpus else "",
        f"ngpus={resources.gpus_per_node}" if resources.gpus_per_node else "",
        f"mem={memory}mb" if memory else "",  # 1024-based, whatever it is called
        *pbs_features(resources.constraint or ""),
    ]
    requested = [part for part in parts if part]
    return ":".join([str(nodes), *requested]) if requested or resources.nodes else None


def pbs_features(constraint: str) -> list[str]:
    """Return required features of nodes as resources of a chunk: `a100` becomes `a100=True`.

    Raises:
        UserError: `constraint` is not a list of name or name=value.
    """
    wanted = re.split("[&:]", constraint) if constraint else []
    if not all(map(_FEATURE.fullmatch, wanted)):
        raise UserError(
            f"{constraint!r} cannot be requested as resources of a chunk of PBS",
            do="Write NodeConstraints as name or name=value, and join several with &",
        )
    return [feature if "=" in feature else f"{feature}=True" for feature in wanted]


def _share(
    number: int, nodes: int, what: str, do: str = "Use a multiple of the number of nodes"
) -> int:
    share, rest = divmod(number, nodes)
    if rest:
        raise UserError(f"{what} cannot be divided among {nodes} nodes", do=do)
    return share


def after_directive(scheduler: Literal["slurm", "pbs"], after: Sequence[str]) -> tuple[str, ...]:
    """Return the option that lets a job start only once the jobs `after` have ended; none for none.

    `after` are the scheduler's ids. Slurm takes a dependency on a job that it has forgotten for
    fulfilled.
    """
    option = "--dependency=" if scheduler == "slurm" else "-W depend="
    return (f"{option}afterany:{':'.join(after)}",) if after else ()


def is_single_word(text: str) -> bool:
    """Return whether sbatch would read a text, such as an account, unchanged as one word."""
    return bool(text) and text.isprintable() and not set(text) & set(" '\"\\#")


def _check_extra(extra: str) -> str | None:
    """Return further options of sbatch, one blank between them; refuse others."""
    try:
        # Many write quotes within quotes, which a value of Snakemake's command line needs.
        words = [word for part in shlex.split(extra) for word in shlex.split(part)]
    except ValueError as error:
        raise refuse_resource(_EXTRA, extra, f"cannot be split ({error})", "Correct it") from None
    instead = {option: f"`{name}`" for name, options in _INSTEAD.items() for option in options}
    known = sorted({*instead, *_OURS})
    used = [re.split("[= ]", word.lstrip("-"), maxsplit=1)[0] for word in words if word[0] == "-"]
    # sbatch takes the beginning of a long option for the whole.
    used = [next((o for o in known if u[1:] and o.startswith(u)), u) for u in used]
    if better := dict.fromkeys(instead[option] for option in used if option in instead):
        advice = f"Use {', '.join(better)} instead"
        raise refuse_resource(_EXTRA, extra, "has options for which there are resources", advice)
    if ours := [option for option in used if option in _OURS]:
        advice = f"Remove {', '.join(f'--{option}' for option in ours)}"
        raise refuse_resource(_EXTRA, extra, "has options that the executor sets itself", advice)
    for word in words:
        if not _OPTION.fullmatch(word) or not is_single_word(word):
            advice = f"Write {word!r} as --name or --name=value, in full and without blanks"
            raise refuse_resource(_EXTRA, extra, "has to be a list of options of sbatch", advice)
    return " ".join(words) or None


def _with_tasks(base: Resources, rule: Mapping[str, object]) -> Resources:
    per_node = _number(rule, "tasks_per_node", lowest=1)
    if per_node is None:
        return base
    if base.tasks is not None:
        raise _conflict({"tasks": base.tasks, "tasks_per_node": per_node})
    return replace(base, tasks=per_node * (base.nodes or 1), tasks_per_node=per_node)


def _with_cpus(base: Resources, rule: Mapping[str, object], threads: int) -> Resources:
    cpus = _number(rule, "cpus_per_task", lowest=1)
    if cpus is None and (threads > 1 or base.tasks is not None):
        # The config's CPUs are for one task per node, so they do not apply to more tasks.
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
        raise _conflict({"mem_mb": per_node, "mem_mb_per_cpu": per_cpu})
    per_node = per_node and max(per_node, _LEAST_MEMORY_MIB)
    return replace(base, memory_mib_per_node=per_node or None, memory_mib_per_cpu=per_cpu or None)


def _with_gpus(base: Resources, rule: Mapping[str, object]) -> Resources:
    given = {name: number for name in _GPUS if (number := _number(rule, name)) is not None}
    if not given:
        return base
    gpus, what = _agreed(given), f"the resource {next(iter(given))}={next(iter(given.values()))}"
    advice = "It counts the GPUs of the whole job: make it a multiple of the nodes"
    return replace(base, gpus_per_node=_share(gpus, base.nodes or 1, what, advice) or None)


def _text(rule: Mapping[str, object], names: tuple[str, ...]) -> str | None:
    found: dict[str, str] = {}
    for name in names:
        value = rule.get(name)
        if value is None:
            continue
        # Snakemake turns an account or a partition that looks like a number into one.
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise refuse_resource(name, value, "has to be a text", "Put it in quotes")
        found[name] = str(value).strip()
    return _agreed(found) if found else None


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
        raise refuse_resource(
            name, value, f"has to be a whole number{unit.get(name, '')}", "Correct it"
        )
    if number < lowest:
        raise refuse_resource(name, value, f"has to be {lowest} or more", "Correct it")
    return number


def _agreed(values: Mapping[str, _T]) -> _T:
    """Return the one value of several names that mean the same."""
    if len(set(values.values())) > 1:
        raise _conflict(values, "mean the same and differ")
    return next(iter(values.values()))


def _conflict(values: Mapping[str, object], how: str = "contradict each other") -> UserError:
    text = " and ".join(f"{name}={value}" for name, value in values.items())
    return UserError(f"the resources {text} {how}", do="Keep one of them")


def refuse_resource(name: str, value: object, why: str, do: str) -> UserError:
    """Return the error for a resource of a rule that has this value."""
    return UserError(f"the resource {name}={value!r} {why}", do=do)


def _clock(seconds: int | None, *, days: bool = False) -> str | None:
    if seconds is None:
        return None
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    day, hour = divmod(hours, 24) if days else ("", hours)
    return f"{day}{'-' if days else ''}{hour:02}:{minute:02}:{second:02}"


def _words(options: Iterable[tuple[str, str | int | None]]) -> Iterator[str]:
    """Yield the options that have a value, which sbatch and qsub split and unquote like a shell."""
    for option, value in options:
        if value is not None and not is_single_word(str(value)):
            raise UserError(
                f"{str(value)!r} is not a valid value for {option.strip(' =')}",
                do="Use no blanks, quotes, backslashes, # or control characters",
            )
        if value is not None:
            yield f"{option}{value}"
