"""Submissions as UNICORE job descriptions: pure functions, without I/O.

Where the scheduler is Slurm a job is sent RAW, with #SBATCH lines of its own: servers 2.7 to 3.1
drop or garble memory of 2 GiB and more and every GPU count, and make tasks of CPUs (measured).
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal

from snakemake_executor_plugin_mantik.jobs.resources import slurm_directives
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites.base import Submission

COMMON_TAG = "mantik"
"""Tag of all our jobs, beside the try's own."""

_LONGEST_NAME = 120
_SCRIPT = "job.sh"
_BATCH_FILE = "bss.sh"

_HOLD = (
    "# TERM reaches the server's own shell below, too, and ends it: wait until all has ended.",
    "if mkfifo hold; then",
    "  (trap '' TERM; exec cat hold > /dev/null) & _m_holder=$!",
    "  exec 9> hold",
    "  trap _m_term=1 TERM",
    '  trap \'[ -z "$_m_term" ] || { trap "" TERM; exec 9>&-; wait "$_m_holder"; }\' EXIT',
    "fi",
)
"""Slurm tells all processes of a job to end, and when its batch script has ended it kills the rest
at once: our script could neither let the command end nor write its marker. So the batch script
waits until nothing holds the writing end of a pipe any more. Plain sh: servers without a scheduler
run it so.
"""


def job_description(
    submission: Submission,
    scheduler: Literal["slurm", "none"],
    known: Collection[str] = (),
) -> dict[str, Any]:
    """The UNICORE job description of `submission`.

    Args:
        submission: the job.
        scheduler: what the site has; with `none` the resources go into the description.
        known: names of the resources that the queue knows, for `none`; a server refuses others.
    """
    description: dict[str, Any] = {
        "Name": _readable(submission.name),
        "Tags": [submission.tag, COMMON_TAG],
        "Executable": "/bin/bash",
        "Arguments": [_SCRIPT],
        "Imports": [_inline(_SCRIPT, submission.script)],
        **_login_hook("pre", submission.before_on_login),
        **_login_hook("post", submission.after_on_login),
    }
    if submission.resources.account:
        description["Project"] = submission.resources.account
    if scheduler == "slurm":
        description["Job type"] = "RAW"
        description["BSS file"] = _BATCH_FILE
        description["Imports"].append(_inline(_BATCH_FILE, batch_file(submission)))
    elif resources := _resources(submission.resources, known):
        description["Resources"] = resources
    return description


def batch_file(submission: Submission) -> str:
    """The file that UNICORE appends its own script to and gives to sbatch."""
    lines = [
        *slurm_directives(submission.resources, submission.name),
        # UNICORE's own Stdout and Stderr do not count for RAW jobs.
        "--output=stdout",
        "--error=stderr",
    ]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), *_HOLD, ""])


def _inline(name: str, data: str) -> dict[str, str]:
    return {"From": f"inline://{name}", "To": name, "Data": data}


def _login_hook(when: Literal["pre", "post"], commands: Sequence[str]) -> dict[str, str]:
    """One command of several, each run if the ones before it succeeded.

    In a subshell, so that an `exit` in a command ends the hook and not UNICORE's own script (the
    job would stay QUEUED); without a newline at the end, which would hide a failure (measured).
    """
    if not commands:
        return {}
    stripped = [command.strip() for command in commands]
    if any("\n" in command or "#" in command for command in stripped):
        hook = "(\n" + " &&\n".join(stripped) + "\n)"  # a comment would swallow what follows
    else:
        hook = "( " + " && ".join(stripped) + " )"
    return {f"User {when}command": hook, f"RunUser{when.title()}commandOnLoginNode": "true"}


def _readable(name: str) -> str:
    return "".join(c if c.isprintable() else " " for c in name)[:_LONGEST_NAME]


def _resources(resources: Resources, known: Collection[str]) -> dict[str, str]:
    """The resources in UNICORE's names and units, as far as the queue knows them."""
    cpus = resources.cpus_per_task
    memory = resources.memory_mib_per_node
    if memory is None and resources.memory_mib_per_cpu is not None:
        memory = resources.memory_mib_per_cpu * (cpus or 1)
    asked: dict[str, object] = {
        "Runtime": resources.runtime_s,
        "Nodes": resources.nodes,
        "CPUsPerNode": cpus,
        "TotalCPUs": resources.total_cpus if cpus is None else None,
        "GPUsPerNode": resources.gpus_per_node,
        "MemoryPerNode": None if memory is None else f"{memory}M",
        "Reservation": resources.reservation,
        "NodeConstraints": resources.constraint,
        "QoS": resources.qos,
    }
    described = {name: str(value) for name, value in asked.items() if value and name in known}
    return {"Queue": resources.queue, **described} if resources.queue and known else described
