"""The command of a `shell:` rule, as it runs on another machine.

Snakemake runs a shell command through `snakemake.shell` in its own process; here the same command
is rendered for another machine. It differs from `job.shellcmd` (all of this was tried): rules of a
module see their module's globals, `{resources.tmpdir}` is the node's, and the shell's prefix,
suffix and name belong to the command. A value that is still to be determined is refused.
"""

import re
import shlex
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from snakemake.common.tbdstring import TBDString
from snakemake.iocontainers import ResourceList
from snakemake.resources import Resources
from snakemake.shell import shell

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.script import COMMAND_BYTES
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.paths.job_paths import JobPaths
from snakemake_executor_plugin_mantik.rules.paths.path_rewriting import rewrite_paths

NODE_TMPDIR = "@mantik_tmpdir@"
"""Stands in a command for the node's directory for temporary files: see `use_node_tmpdir`."""

_RULE_NAMES = frozenset(
    {"input", "output", "params", "wildcards", "threads", "resources", "log", "rule", "jobid"}
)
"""Names in a command that mean the job's own things and no global of the workflow."""


def shell_command(
    job: Job, places: JobPaths, tmpdir: str = NODE_TMPDIR, iteration: int | None = None
) -> str:
    """The text that the shell gets after `-c`: Snakemake's own for a local job, paths mapped.

    Args:
        job: the Snakemake job.
        places: where its paths are at its site.
        tmpdir: its directory for temporary files.
        iteration: which run of a command that is measured it is, from 0.

    Raises:
        UserError: a value in the command is not determined before the job runs, or it is not
            certain which path is meant.
    """
    rule = job.rule
    names = {name: value for name, value in rule.module_globals.items() if name not in _RULE_NAMES}
    resources = format_resources(job, tmpdir)
    here = rewrite_paths(job, places, resources)
    own = {"input": here.input, "output": here.output, "log": here.log, "params": here.params}
    own |= {"resources": resources, "bench_iteration": iteration}
    others = {"wildcards": job.wildcards, "threads": job.threads, "rule": rule.name}
    # A member of a group may have no command: its outputs are touched.
    given = {**own, **others, "jobid": job.jobid}
    declared = ":" if rule.shellcmd is None else _declared(job, given)
    text: str = job.format_wildcards(declared, **(names | own))
    if str(TBDString()) in text and str(TBDString()) not in declared:
        raise UserError(
            "a value in the shell command is still to be determined (<TBD>)",
            where=f"rule {rule.name}",
            do="Make the parameter or resource independent of what is only known inside the job",
        )
    return here.text(wrap_shell(job, text))


def format_resources(job: Job, tmpdir: str) -> Any:
    """The job's resources with its directory for temporary files, which is the node's to know."""
    return ResourceList(fromdict={**dict(job.resources.items()), "tmpdir": tmpdir})


def _declared(job: Job, own: Mapping[str, object]) -> str:
    """The command as the rule declares it for this job, before it is formatted.

    Snakemake evaluates what stands in `shell:` when it reads the Snakefile, which gives
    `rule.shellcmd`, and in each job again: f-strings and conditions see the job's things there.

    Args:
        job: the Snakemake job.
        own: the job's own things by their names.

    Raises:
        UserError: it cannot be evaluated.
    """
    run = job.rule.run_func
    said: list[str] = []

    def take(command: str, **_: object) -> None:
        said.append(command)

    in_job = FunctionType(run.__code__, {**run.__globals__, "shell": take}, closure=run.__closure__)
    try:
        in_job(*map(own.get, run.__code__.co_varnames[: run.__code__.co_argcount]))
    except Exception as error:  # noqa: BLE001 - it is code of the Snakefile
        raise UserError(
            f"what stands in shell: cannot be evaluated: {type(error).__name__}: {error}",
            where=f"rule {job.rule.name}",
            do="Correct the expression",
        ) from None
    return said[0]


def wrap_shell(job: Job, text: str) -> str:
    """A text as the rule's shell gets it: with what the workflow puts before and after each."""
    # Snakemake keeps prefix and suffix in private fields only; there is no other way to them.
    prefix = shell._get_process_prefix(shell_executable(job))
    return " ".join((prefix, text, shell._process_suffix)).strip()


def use_node_tmpdir(text: str, shell: str) -> tuple[str, str]:
    """A command and its shell, with the directory for temporary files that the node has.

    Snakemake puts its path into the text. A variable does the same, but where a shell does not
    expand it: between single quotes, in a here-document, in another language. There the text is
    changed by the node.
    """
    if NODE_TMPDIR not in text:
        return text, shell
    expands = _EXPANDS.fullmatch(shell) and not _UNEXPANDED.search(text)
    if expands or len(text) > COMMAND_BYTES:  # more is no word of a command line
        return text.replace(NODE_TMPDIR, "$TMPDIR"), shell
    change = f"mantik_text=${{mantik_text//{NODE_TMPDIR}/$TMPDIR}}"
    started = f'exec {shlex.quote(shell)} -c "$mantik_text"'
    return f"mantik_text={shlex.quote(text)}\n{change}\n{started}", "bash"


_EXPANDS = re.compile(r"(ba|da|k|z|a)?sh")
_UNEXPANDED = re.compile(r"'|<<")


def shell_executable(job: Job) -> str | None:
    """The path of the rule's own shell on this machine, or of the workflow's; None for bash."""
    chosen: str | None = job.resources.get("shell_exec") or shell.get_executable()
    return chosen


def job_tmpdir(job: Job) -> str:
    """The rule's own temporary directory, or the placeholder for the node's."""
    declared = job.rule.resources.get("tmpdir")
    raw = getattr(declared, "raw", declared)
    if raw is None or raw == Resources.DEFAULTS["bare"]["tmpdir"]:
        return NODE_TMPDIR
    expanded = job.rule.expand_resources(job.wildcards_dict, job.input, job.attempt)
    return str(expanded.tmpdir)
