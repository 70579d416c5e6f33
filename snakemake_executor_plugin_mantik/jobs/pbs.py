"""Turn resources into options of qsub.

The options are those of PBS Professional and OpenPBS, not of Torque (OpenPBS' manual pages qsub(1B)
and pbs_resources(7B)). Not tried on a real PBS.
"""

import re
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import UserError

from .spec import Resources

_NAME_LENGTH: Final = 15
"""Older servers refuse longer names of jobs; those behind firecREST accept 236 characters."""

_FEATURE = re.compile(r"[A-Za-z][A-Za-z0-9_]*(=[A-Za-z0-9_.+-]+)?")


def pbs_directives(
    resources: Resources,
    name: str,
    *,
    account: str | None = None,
    longest_name: int = _NAME_LENGTH,
) -> tuple[str, ...]:
    """Return the options of qsub for a job, without `#PBS `.

    A job gets one chunk per node, with one MPI process that has all its CPUs, unless the rule
    requests tasks. A reservation is a queue of PBS, so it overrides the queue. `account` overrides
    that of `resources`; it becomes the project (-P), as in firecREST. Names are cut to
    `longest_name`.

    Raises:
        UserError: PBS has no option for a value or would not read it as one word, or tasks or CPUs
            cannot be divided among the nodes.
    """
    if resources.qos is not None:
        raise UserError(
            f"PBS has no quality of service, so {resources.qos!r} cannot be requested",
            do="Remove QoS, and use the queue that stands for it",
        )
    if resources.gpu_model is not None:
        raise UserError(
            "PBS has no common name for kinds of GPUs, so"
            f" gpu_model={resources.gpu_model} cannot be requested",
            do="Remove it, and use the queue that has them, or a `constraint` as name=value",
        )
    options: list[tuple[str, str | None]] = [
        ("-N ", re.sub(r"[^A-Za-z0-9_.+-]+", "_", name).strip("_.")[:longest_name] or "mantik"),
        ("-q ", resources.reservation or resources.queue),
        ("-P ", resources.account if account is None else account),
        ("-l select=", _chunks(resources)),
        ("-l place=", "scatter" if (resources.nodes or 1) > 1 else None),
        ("-l walltime=", None if resources.runtime_s is None else _clock(resources.runtime_s)),
    ]
    words = [f"{option}{_word(option, value)}" for option, value in options if value is not None]
    # Without -S the user's login shell runs the script, whatever its first line says.
    return ("-S /bin/bash", *words, "-r n")


def _chunks(resources: Resources) -> str | None:
    """Return the chunks of a job, one for each node; None if it requests nothing of them."""
    nodes = resources.nodes or 1
    tasks = _share(resources.tasks, nodes, "tasks") if resources.tasks else 1
    cpus = resources.cpus_per_task and resources.cpus_per_task * tasks
    if cpus is None and resources.tasks is not None:
        cpus = tasks
    if cpus is None and resources.total_cpus is not None:
        cpus = _share(resources.total_cpus, nodes, "CPUs")
    memory = resources.memory_mib_per_node
    if memory is None and resources.memory_mib_per_cpu is not None:
        memory = resources.memory_mib_per_cpu * (cpus or 1)
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
    for feature in wanted:
        if not _FEATURE.fullmatch(feature):
            raise UserError(
                f"{constraint!r} cannot be requested as resources of a chunk of PBS",
                do="Write NodeConstraints as name or name=value, and join several with &",
            )
    return [feature if "=" in feature else f"{feature}=True" for feature in wanted]


def _share(number: int, nodes: int, what: str) -> int:
    share, rest = divmod(number, nodes)
    if rest:
        raise UserError(
            f"{number} {what} cannot be divided among {nodes} nodes",
            do="Use a multiple of the number of nodes",
        )
    return share


def _clock(seconds: int) -> str:
    minutes, second = divmod(seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}"


def _word(option: str, value: str) -> str:
    if not value.isprintable() or set(value) & set(" '\"\\#"):
        raise UserError(
            f"{value!r} is not a valid value for {option.strip()}",
            do="Use no blanks, quotes, backslashes, # or control characters",
        )
    return value
