"""Render the command of a `shell:` rule for another machine.

Snakemake runs a shell command through `snakemake.shell` in its own process. The command rendered
here differs from `job.shellcmd` (all of this was tested): rules of a module see the globals of
their module, `{resources.tmpdir}` is the node's, and the shell's prefix, suffix and name belong to
the command. Values that are not determined yet are refused.

Snakemake evaluates a job again when a checkpoint or a queue that it reads has ended. Until then it
has the checkpoint's first output as its input (flag `checkpoint_target`), `<TBD>` as a parameter,
0 as a resource, and no input from a queue. A job outside of groups waits for that. The members of a
group do not: Snakemake (9.27) starts the group as soon as its inputs from outside are there.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dis import get_instructions
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

from snakemake.io import is_callable, is_flagged
from snakemake.iocontainers import ResourceList
from snakemake.resources import Resource, Resources
from snakemake.shell import shell

from ...common.errors import UserError
from ...jobs.script import PART_BYTES
from .. import Job
from ..paths.job_paths import UNKNOWN, JobPaths
from ..paths.path_rewriting import rewrite_paths


def placeholder_in_group(unit: Job, member: Job) -> str | None:
    """Return why a value of a group's member would never be evaluated, as words after "rule NAME".

    None if there is no such value, or `unit` is no group.
    """
    if not unit.is_group():
        return None
    if member.has_unfinished_queue_input():
        return (
            "reads files from a queue (from_queue) in a group, which starts before the queue has"
            " ended (take it out of the group)"
        )
    waits = {maker.rule for path, maker in _awaited(member) if maker in unit.jobs}
    inside = {job.rule for job in member.dag.dependencies[member] if job in unit.jobs}
    waits |= {rule for rule in _named_checkpoints(member) if rule in inside}
    if not waits and any(_awaited(member)):
        # It will be evaluated, and may then ask for another checkpoint.
        group = member.rule.group
        waits = {r for r in _named_checkpoints(member) if group is not None and r.group == group}
    if not waits:
        return None
    names = ", ".join(sorted(rule.name for rule in waits))
    return (
        f"asks for the files of checkpoint {names}, which is in its own group {unit.groupid}: it"
        " would run before Snakemake knows them (take the rule or the checkpoint out of the group)"
    )


def _awaited(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield the inputs of a job that stand for files of a checkpoint, and the job that makes it."""
    for maker, files in job.dag.dependencies[job].items():
        for path in job.input:
            if path in files and is_flagged(path, "checkpoint_target"):
                yield path, maker


def _named_checkpoints(job: Job) -> Iterator[Any]:
    """Yield the rules of the checkpoints that functions in a rule name, and those they call."""
    rule = job.rule
    known = vars(rule.module_globals.get("checkpoints", object)).items()
    rules = {name: found.rule for name, found in known if hasattr(found, "rule")}
    if not rules:
        return
    todo: list[Any] = [*rule.input, *rule.params, *rule.resources.values()]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) in seen or not (is_callable(value) or isinstance(value, Resource)):
            continue
        seen.add(id(value))
        todo += [getattr(value, inner, None) for inner in _WRAPPED]
        for cell in getattr(value, "__closure__", None) or ():
            with suppress(ValueError):  # it is empty
                todo.append(cell.cell_contents)
        called = getattr(value, "__globals__", {})
        for code in _codes(getattr(value, "__code__", None)):
            todo += [called.get(name) for name in code.co_names]
            for variable, attribute in pairwise(step.argval for step in get_instructions(code)):
                if variable == "checkpoints" and attribute in rules:
                    yield rules[attribute]


_WRAPPED = "_file", "callable", "_evaluator", "func", "__wrapped__"
"""Attributes of Snakemake's and Python's objects that hold a function."""


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    """Yield a function's code and that of the functions in it."""
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _codes(constant)


NODE_TMPDIR = "@mantik tmpdir@"
"""Stands for the node's temporary directory. Its blank makes `{…:q}` quote it, in any language."""

_RULE_NAMES = frozenset(
    {"input", "output", "params", "wildcards", "threads", "resources", "log", "rule", "jobid"}
)
"""Names in a command that refer to the job, not to globals of the workflow."""


def shell_command(job: Job, places: JobPaths, iteration: int | None = None) -> str:
    """Return the shell's text after `-c`: as Snakemake's for a local job, but with mapped paths.

    Raises:
        UserError: the expression in `shell:` cannot be evaluated, a value in the command is not
            determined before the job runs, or the meaning of a path is uncertain.
    """
    rule = job.rule
    names = {name: value for name, value in rule.module_globals.items() if name not in _RULE_NAMES}
    resources = format_resources(job)
    here = rewrite_paths(job, places, resources)
    own = {"input": here.input, "output": here.output, "log": here.log, "params": here.params}
    own |= {"resources": resources, "bench_iteration": iteration}
    others = {"wildcards": job.wildcards, "threads": job.threads, "rule": rule.name}
    # A member of a group may have no command. Its outputs are touched.
    given = {**own, **others, "jobid": job.jobid}
    declared = ":" if rule.shellcmd is None else _declared(job, given)
    text: str = job.format_wildcards(declared, **(names | own))
    if UNKNOWN in text and UNKNOWN not in declared:
        raise UserError(
            "a value in the shell command is still to be determined (<TBD>)",
            where=f"rule {rule.name}",
            do="Make the parameter or resource independent of values that only the job knows",
        )
    return here.text(wrap_shell(job, text))


def format_resources(job: Job) -> Any:
    """Return the job's resources with the placeholder for the node's `tmpdir`."""
    return ResourceList(fromdict={**dict(job.resources.items()), "tmpdir": NODE_TMPDIR})


def _declared(job: Job, own: Mapping[str, object]) -> str:
    """Evaluate the rule's `shell:` expression for this job, before it is formatted.

    Snakemake evaluates the expression when it reads the Snakefile, which gives `rule.shellcmd`, and
    again in each job, where f-strings and conditions see that job's values (here `own`).
    """
    run = job.rule.run_func
    commands: list[str] = []

    def take(command: str, **_: object) -> None:
        commands.append(command)

    in_job = FunctionType(run.__code__, {**run.__globals__, "shell": take}, closure=run.__closure__)
    try:
        in_job(*map(own.get, run.__code__.co_varnames[: run.__code__.co_argcount]))
    except Exception as error:  # noqa: BLE001 - it is code of the Snakefile
        raise UserError(
            f"the expression in shell: cannot be evaluated: {type(error).__name__}: {error}",
            where=f"rule {job.rule.name}",
            do="Correct the expression",
        ) from None
    return commands[0]


def wrap_shell(job: Job, text: str) -> str:
    """Add the workflow's prefix and suffix for shell commands (`shell.prefix()`) to a text."""
    # Snakemake keeps prefix and suffix in private fields only.
    prefix = shell._get_process_prefix(shell_executable(job))
    return " ".join((prefix, text, shell._process_suffix)).strip()


def use_node_tmpdir(text: str, shell: str) -> tuple[str, str]:
    """Replace `NODE_TMPDIR` in a command, and return the command and its shell.

    Snakemake writes the directory's path into the text. A variable has the same effect unless the
    shell does not expand it: in single quotes, in a here-document, in another language. In these
    cases, bash on the node replaces the placeholder before the command runs, unless the command is
    too long for that.
    """
    if NODE_TMPDIR not in text:
        return text, shell
    variable = text.replace(f"'{NODE_TMPDIR}'", '"$TMPDIR"').replace(NODE_TMPDIR, "$TMPDIR")
    expands = _EXPANDS.fullmatch(shell) and not _UNEXPANDED.search(variable)
    if expands or len(text) > PART_BYTES:  # a longer text cannot be a word of a command line
        return variable, shell
    change = f'mantik_text=${{mantik_text//"{NODE_TMPDIR}"/"$TMPDIR"}}'
    started = f'exec {shlex.quote(shell)} -c "$mantik_text"'
    return f"mantik_text={shlex.quote(text)}\n{change}\n{started}", "bash"


_EXPANDS = re.compile(r"(ba|da|k|z|a)?sh")
_UNEXPANDED = re.compile(r"'|<<")


def shell_executable(job: Job) -> str | None:
    """Return the path of the rule's or the workflow's shell on this machine; None for bash."""
    chosen: str | None = job.resources.get("shell_exec") or shell.get_executable()
    return chosen


def own_tmpdir(job: Job) -> str | None:
    """Return the rule's own temporary directory, or None if it leaves it to the node.

    It may hold variables and `~` of the node, and be relative to the workspace.
    """
    declared = job.rule.resources.get("tmpdir")
    raw = getattr(declared, "raw", declared)
    if raw is None and not declared.is_evaluable():
        return None
    if raw == Resources.DEFAULTS["bare"]["tmpdir"]:
        return None
    if not isinstance(raw, str) or not declared.is_evaluable():
        return str(job.rule.expand_resources(job.wildcards_dict, job.input, job.attempt).tmpdir)
    # An option: Snakemake would expand variables with the values of this machine.
    value = Resource.cli_evaluator(
        "tmpdir",
        re.sub(r"\bsystem_tmpdir\b", "'$TMPDIR'", raw).replace("$", _DOLLAR).replace("~", _TILDE),
        wildcards=job.wildcards,
        input=job.input,
        attempt=job.attempt,
        threads=job.threads,
        async_run=job.rule.workflow.async_run,
    )
    return str(value).replace(_DOLLAR, "$").replace(_TILDE, "~")


_DOLLAR, _TILDE = "mantik_dollar_", "mantik_tilde_"
