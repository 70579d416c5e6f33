"""UNICORE job descriptions of submissions. Pure functions, without I/O.

If the scheduler is Slurm or PBS, a job is submitted RAW, with its own directives: servers 9.3 to
11.1 drop or garble memory of 2 GiB and more and every GPU count, and all make tasks of CPUs
(measured). The description's Resources are then only checked against the queue's ranges.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, Literal

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.units import unicore_duration, unicore_memory
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites.base import Submission
from snakemake_executor_plugin_mantik.sites.unicore.batch import (
    BATCH_FILE,
    SCRIPT,
    batch_file,
    fits_description,
)
from snakemake_executor_plugin_mantik.sites.unicore.hooks import (
    HOOK_FILES,
    hook_file,
    hook_properties,
)

_COMMON_TAG = "mantik"
"""Tag of all our jobs, in addition to the try's own."""

_LOSSY: Final = (((9, 3, 0), (11, 1)), ((2, 5, 5), (3, 1)))
"""First and last versions whose own resources lose memory and GPUs on their way to the scheduler.

As the version of the whole release, which the server reports, and as that of its part UNICORE/X.
"""

_LOSSLESS_MIB: Final = 2047
"""The most memory that these versions pass on."""

_LONGEST_NAME = 120


def job_description(
    submission: Submission,
    scheduler: Literal["slurm", "pbs", "none"],
    known: Collection[str] | None = (),
    server: str = "",
) -> dict[str, Any]:
    """Make the UNICORE job description of `submission`.

    With the scheduler `none` the resources go into the description only. `known` has the names of
    the resources that the queue supports, because a server refuses others; None: all. `server` is
    the server's version, where known.

    Raises:
        UserError: the requested resources cannot reach the scheduler.
    """
    whole = scheduler != "none" and fits_description(submission.script)
    shell = ["-l"] if submission.login_shell and not whole else []
    description: dict[str, Any] = {
        "Name": _readable(submission.name),
        "Tags": [submission.tag, _COMMON_TAG],
        "Executable": "/bin/bash",
        "Arguments": [*shell, BATCH_FILE if whole else SCRIPT],
        "Imports": [],
    }
    imports = description["Imports"]
    if not whole:
        imports.append(_inline(SCRIPT, submission.script))
    for when, commands in _hooks(submission):
        description |= hook_properties(when)
        imports.append(_inline(HOOK_FILES[when], hook_file(commands)))
    if submission.resources.account:
        description["Project"] = submission.resources.account
    if scheduler != "none":
        description["Job type"] = "RAW"
        description["BSS file"] = BATCH_FILE
        imports.append(_inline(BATCH_FILE, batch_file(submission, scheduler, whole=whole)))
    elif lost := lost_resources(submission.resources, server):
        raise UserError(
            f"{server} loses {' and '.join(lost)} on the way to the scheduler",
            do="Set Site: Scheduler to slurm or pbs if the site has one, or do not request it",
        )
    if resources := _resources(submission.resources, known):
        description["Resources"] = resources
    return description


def lost_resources(resources: Resources, server: str) -> list[str]:
    """Return the requested resources that a server of this version loses.

    `server` is `11.0.0` or `UNICORE/X 11.0.0`. Measured with 11.0.0 (UNICORE/X 3.0.0); read in the
    source from 9.3.0 (2.5.5, 2023-08-22) to 11.1.0 (3.1.0): memory in bytes becomes a 32-bit
    number, which is sent as the GPUs, too (`TSIMessages.appendTSIResourceSpec`,
    `ResourceRequest.toInt`).
    """
    match = re.search(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", server)
    version = tuple(int(number or 0) for number in match.groups()) if match else ()
    if not any(first <= version and version[:2] <= last for first, last in _LOSSY):
        return []
    memory, gpus = resources.memory_mib_per_node or 0, resources.gpus_per_node or 0
    lost = [f"MemoryPerNode of {memory} MiB (2 GiB or more)"] if memory > _LOSSLESS_MIB else []
    return [*lost, f"GPUsPerNode of {gpus}"] if gpus else lost


def _hooks(submission: Submission) -> Iterator[tuple[Literal["pre", "post"], Sequence[str]]]:
    if submission.before_on_login:
        yield "pre", submission.before_on_login
    if submission.after_on_login:
        yield "post", submission.after_on_login


def _inline(name: str, data: str) -> dict[str, str]:
    return {"From": f"inline://{name}", "To": name, "Data": data}


def _readable(name: str) -> str:
    return "".join(c if c.isprintable() else " " for c in name)[:_LONGEST_NAME]


def _resources(resources: Resources, known: Collection[str] | None) -> dict[str, str]:
    """Return the resources in UNICORE's names and units, as far as the queue supports them.

    CPUsPerNode counts only together with Nodes, TotalCPUs only where it is consistent.
    """
    nodes, cpus = resources.nodes, resources.cpus_per_task
    if cpus is not None and resources.tasks is not None:
        cpus *= -(-resources.tasks // (nodes or 1))
    memory = resources.memory_mib_per_node
    if memory is None and resources.memory_mib_per_cpu is not None:
        memory = resources.memory_mib_per_cpu * (cpus or 1)
    total = resources.total_cpus
    if total is not None and cpus is not None and total != (nodes or 1) * cpus:
        total = None
    requested: dict[str, object] = {
        "Runtime": resources.runtime_s and unicore_duration(resources.runtime_s),
        "Nodes": 1 if nodes is None and cpus is not None else nodes,
        "TotalCPUs": total,
        "CPUsPerNode": cpus,
        "GPUsPerNode": resources.gpus_per_node,
        "MemoryPerNode": memory and unicore_memory(memory),
        "Reservation": resources.reservation,
        "NodeConstraints": resources.constraint,
        "QoS": resources.qos,
    }
    described = {
        name: str(value)
        for name, value in requested.items()
        if value and (known is None or name in known)
    }
    if resources.queue and (known is None or known):
        return {"Queue": resources.queue, **described}
    return described
