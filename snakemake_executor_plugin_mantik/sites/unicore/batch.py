"""The batch file of a RAW job for sbatch or qsub. Pure functions, without I/O.

UNICORE's TSI appends a line that runs its own script, which runs the job's. Each file that UNICORE
imports costs five commands of the TSI (measured: UNICORE/X 11.0.0), so the batch file also holds
the job's script if it can carry it: the scheduler runs the batch file, and UNICORE's script runs it
again for the job's script. A server in embedded mode, which has no scheduler, does only the latter.
"""

from typing import Final, Literal

from snakemake_executor_plugin_mantik.jobs.pbs import pbs_directives
from snakemake_executor_plugin_mantik.jobs.resources import after_directive, slurm_directives
from snakemake_executor_plugin_mantik.sites.base import Submission

BATCH_FILE: Final = "bss.sh"
SCRIPT: Final = "job.sh"
"""Names in the job's directory at the server."""

_LARGEST_BATCH_FILE: Final = 1 << 20
"""Maximum bytes of script in a batch file. Slurm accepts 4 MiB by default (`max_script_size`), and
its controller keeps them."""

_PBS_DIRECTORY: Final = ('cd "$PBS_O_WORKDIR" || exit',)
"""PBS starts jobs in the home directory."""

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
    directory = _PBS_DIRECTORY if scheduler == "pbs" else ()
    script = _script(submission) if whole else ()
    lines = [*batch_directives(submission, scheduler), *OWN_PATH, *script, *directory, *_HOLD]
    return "\n".join([*lines, ""])


def _script(submission: Submission) -> list[str]:
    """Make the part that UNICORE's script runs, by the file's own name; a scheduler renames it."""
    end = f"mantik-{submission.tag}"
    shell = "/bin/bash -l" if submission.login_shell else "/bin/bash"
    return [
        f'if [ "$0" = {BATCH_FILE} ]; then',
        # Under another name until it is complete: half a script must not run.
        f"cat > {SCRIPT}.new <<'{end}' && mv {SCRIPT}.new {SCRIPT} && exec {shell} {SCRIPT}",
        submission.script.removesuffix("\n"),
        end,
        "exit 1",
        "fi",
    ]


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
