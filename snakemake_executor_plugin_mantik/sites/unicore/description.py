"""UNICORE job descriptions of submissions, with batch directives and hooks. Pure functions.

If the scheduler is Slurm or PBS, a job is submitted RAW, with its own directives: servers 9.3 to
11.1 drop or garble memory of 2 GiB and more and every GPU count, and all make tasks of CPUs
(measured). The description's Resources are then only checked against the queue's ranges.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any, Final, Literal

from ...common.errors import UserError
from ...config.units import format_duration, format_size
from ...jobs.resources import (
    after_directive,
    cpus_per_node,
    memory_per_node,
    pbs_directives,
    slurm_directives,
)
from ...jobs.spec import Resources
from ..base import Submission

BATCH_FILE: Final = "bss.sh"
SCRIPT: Final = "job.sh"
"""Names in the job's directory at the server."""

_LARGEST_BATCH_FILE: Final = 1 << 20
"""Maximum bytes of script in a batch file. Slurm accepts 4 MiB by default (`max_script_size`), and
its controller keeps them."""

OWN_PATH: Final = (
    "# The TSI's Python modules (Log, Server, Utils, ...) are none of the job's.",
    'if [ -n "${PYTHONPATH-}" ]; then',
    "  _m_kept= _m_left=$PYTHONPATH:",
    '  while [ -n "$_m_left" ]; do',
    "    _m_one=${_m_left%%:*} _m_left=${_m_left#*:}",
    '    [ -e "${_m_one:-.}/TSI.py" ] || _m_kept=$_m_kept:$_m_one',
    "  done",
    "  PYTHONPATH=${_m_kept#:}",
    '  [ -n "$PYTHONPATH" ] || unset PYTHONPATH',
    "fi",
)
"""A TSI sets PYTHONPATH for itself, and all its child processes inherit it. Its main module
identifies its directory; where that is not visible, nothing can be imported from it either. Plain
sh."""

_HOLD: Final = (
    "# TERM ends the server's own shell below, too, perhaps before this one: wait for the rest.",
    "# Both ends are open before: a shell that is killed here leaves nobody who waits for one.",
    "if mkfifo hold; then",
    "  exec 9<> hold 8< hold",
    "  (trap '' TERM; exec 9>&-; exec cat <&8 > /dev/null) & _m_holder=$!",
    "  exec 8<&-",
    "  trap _m_term=1 TERM",
    '  trap \'[ $? -lt 128 ] && [ -z "$_m_term" ] ||'
    ' { trap "" TERM; exec 9>&-; wait "$_m_holder"; }\' EXIT',
    "fi",
)
"""Slurm signals all processes of a job to end, and kills the rest as soon as the batch script has
ended: our script could neither let the command end nor write its marker. So the batch script waits
until no process holds the writing end of a pipe any more. Plain sh: servers without a scheduler run
it that way.
"""


def batch_file(submission: Submission, scheduler: Literal["slurm", "pbs"], *, whole: bool) -> str:
    """Make the file that UNICORE appends its own script to and passes to sbatch or qsub.

    With `whole` the file also holds the job's script, for when UNICORE's script runs it.
    """
    lines = [*batch_directives(submission, scheduler), *OWN_PATH]
    if whole:
        end = f"mantik-{submission.tag}"
        shell = "/bin/bash -l" if submission.login_shell else "/bin/bash"
        lines += [
            # UNICORE's script runs this by the file's own name; a scheduler renames it.
            f'if [ "$0" = {BATCH_FILE} ]; then',
            # Under another name until it is complete: half a script must not run.
            f"cat > {SCRIPT}.new <<'{end}' && mv {SCRIPT}.new {SCRIPT} && exec {shell} {SCRIPT}",
            submission.script.removesuffix("\n"),
            end,
            "exit 1",
            "fi",
        ]
    if scheduler == "pbs":
        lines.append('cd "$PBS_O_WORKDIR" || exit')  # PBS starts jobs in the home directory
    return "\n".join([*lines, *_HOLD, ""])


def fits_description(script: str) -> bool:
    """Check whether a batch file can carry `script` unchanged.

    A TSI reads the file as text in its own locale, with universal newlines.
    """
    return script.isascii() and "\r" not in script and len(script) <= _LARGEST_BATCH_FILE


def batch_directives(submission: Submission, scheduler: Literal["slurm", "pbs"]) -> list[str]:
    """Make the first lines of the batch file, the scheduler's directives."""
    # UNICORE's own Stdout and Stderr have no effect on RAW jobs.
    if scheduler == "pbs":
        mark, lines = "#PBS", pbs_directives(submission.resources, submission.name)
        lines = (*lines, "-o stdout", "-e stderr")
    else:
        mark, lines = "#SBATCH", slurm_directives(submission.resources, submission.name)
        lines = (*lines, *submission.slurm_options, "--output=stdout", "--error=stderr")
    lines = (*lines, *after_directive(scheduler, submission.after))
    return ["#!/bin/bash", *(f"{mark} {line}" for line in lines)]


HOOK_FILES: Final = {"pre": "before.sh", "post": "after.sh"}
"""Names of the files in the job's directory at the server."""


def hook_file(commands: Sequence[str]) -> str:
    """Make the bash script of several commands, each run if the ones before it succeeded.

    They share a shell: each sees the settings of those before it, and an `exit` ends all.
    """
    # Each between braces: a comment would swallow the next command, `||` would go on after a
    # failure of the command before, `;` and `&` would end the chain. `:` serves commands that are
    # only a comment.
    groups = (f"{{ :\n{command.strip()}\n}}" for command in commands)
    return "\n".join([*OWN_PATH, " &&\n".join(groups), ""])


_COMMON_TAG = "mantik"
"""Tag of all our jobs, in addition to the attempt's own."""

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
        "Name": "".join(c if c.isprintable() else " " for c in submission.name)[:_LONGEST_NAME],
        "Tags": [submission.tag, _COMMON_TAG],
        "Executable": "/bin/bash",
        "Arguments": [*shell, BATCH_FILE if whole else SCRIPT],
        "Imports": [],
    }
    imports = description["Imports"]
    if not whole:
        imports.append(_inline(SCRIPT, submission.script))
    hooks = {"pre": submission.before_on_login, "post": submission.after_on_login}
    for when, commands in hooks.items():
        if not commands:
            continue
        description[f"User {when}command"] = f"/bin/bash -l {HOOK_FILES[when]}"
        description[f"RunUser{when.title()}commandOnLoginNode"] = "true"
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


def _inline(name: str, data: str) -> dict[str, str]:
    return {"From": f"inline://{name}", "To": name, "Data": data}


def _resources(resources: Resources, known: Collection[str] | None) -> dict[str, str]:
    """Return the resources in UNICORE's names and units, as far as the queue supports them.

    CPUsPerNode counts only together with Nodes, TotalCPUs only where it is consistent. A server
    matches units of time by prefix, so `m` is minutes there, too, and refuses `GiB` and `GB` (its
    `UnitParser`: "No conversion for unit").
    """
    nodes, cpus = resources.nodes, cpus_per_node(resources)
    memory = memory_per_node(resources)
    total = resources.total_cpus
    if total is not None and cpus is not None and total != (nodes or 1) * cpus:
        total = None
    requested: dict[str, object] = {
        "Runtime": resources.runtime_s and format_duration(resources.runtime_s),
        "Nodes": 1 if nodes is None and cpus is not None else nodes,
        "TotalCPUs": total,
        "CPUsPerNode": cpus,
        "GPUsPerNode": resources.gpus_per_node,
        "MemoryPerNode": memory and format_size(memory << 20),
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
