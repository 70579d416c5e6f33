"""The batch file of a RAW job: what sbatch or qsub is given. Pure functions, without I/O.

UNICORE's TSI appends a line that runs its own script, which runs the job's. Each file that UNICORE
is to import costs five commands of the TSI (measured: UNICORE/X 11.0.0), so the batch file holds
the job's script, too, where it can carry it: it is both what the scheduler runs and what UNICORE's
script runs. A server in embedded mode, which has no scheduler, runs only the latter.
"""

from typing import Final, Literal

from snakemake_executor_plugin_mantik.jobs.pbs import pbs_directives
from snakemake_executor_plugin_mantik.jobs.resources import slurm_directives
from snakemake_executor_plugin_mantik.sites.base import Submission

BATCH_FILE: Final = "bss.sh"
SCRIPT: Final = "job.sh"
"""Their names in the directory that a job has at the server."""

_LARGEST_BATCH_FILE: Final = 1 << 20
"""Bytes of script that a batch file carries at most. Slurm takes 4 MiB by default
(`max_script_size`), and its controller keeps them."""

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
"""A TSI sets PYTHONPATH for itself, and all that it starts inherits it. Its directory is told by
its main module; where that is not visible, nothing can be imported from it either. Plain sh."""

_HOLD: Final = (
    "# TERM ends the server's own shell below, too, perhaps before this one: wait for the rest.",
    "if mkfifo hold; then",
    "  (trap '' TERM; exec cat hold > /dev/null) & _m_holder=$!",
    "  exec 9> hold",
    "  trap _m_term=1 TERM",
    '  trap \'[ $? -lt 128 ] && [ -z "$_m_term" ] ||'
    ' { trap "" TERM; exec 9>&-; wait "$_m_holder"; }\' EXIT',
    "fi",
)
"""Slurm tells all processes of a job to end, and when its batch script has ended it kills the rest
at once: our script could neither let the command end nor write its marker. So the batch script
waits until nothing holds the writing end of a pipe any more. Plain sh: servers without a scheduler
run it so.
"""


def batch_file(submission: Submission, scheduler: Literal["slurm", "pbs"], *, whole: bool) -> str:
    """The file that UNICORE appends its own script to and gives to sbatch or qsub.

    Args:
        submission: the job.
        scheduler: which reads the first lines.
        whole: whether it holds the job's script, and runs it where UNICORE's script runs the file.
    """
    directory = _PBS_DIRECTORY if scheduler == "pbs" else ()
    script = _script(submission) if whole else ()
    lines = [*batch_directives(submission, scheduler), *OWN_PATH, *script, *directory, *_HOLD]
    return "\n".join([*lines, ""])


def _script(submission: Submission) -> list[str]:
    """The part that UNICORE's script runs, under the file's own name; a scheduler has another."""
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
    """Whether a batch file can carry `script` unchanged.

    A TSI reads the file as a text in its own locale, with universal ends of lines.
    """
    return script.isascii() and "\r" not in script and len(script) <= _LARGEST_BATCH_FILE


def batch_directives(submission: Submission, scheduler: Literal["slurm", "pbs"]) -> list[str]:
    """The first lines of the batch file: what the scheduler reads."""
    # UNICORE's own Stdout and Stderr do not count for RAW jobs.
    if scheduler == "pbs":
        mark, lines = "#PBS", pbs_directives(submission.resources, submission.name)
        lines = (*lines, "-o stdout", "-e stderr")
    else:
        mark, lines = "#SBATCH", slurm_directives(submission.resources, submission.name)
        lines = (*lines, "--output=stdout", "--error=stderr")
    return ["#!/bin/bash", *(f"{mark} {line}" for line in lines)]
