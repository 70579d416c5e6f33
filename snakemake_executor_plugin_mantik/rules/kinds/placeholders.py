"""Find the files and values of a job that Snakemake has not evaluated yet.

Snakemake evaluates a job again when a checkpoint or a queue that it reads has ended. Until then it
has the checkpoint's first output as its input (flag `checkpoint_target`), `<TBD>` as a parameter,
0 as a resource, and no input from a queue. A job outside of groups waits for that. The members of a
group do not: Snakemake (9.27) starts the group as soon as its inputs from outside are there.
"""

from collections.abc import Iterator
from contextlib import suppress
from dis import get_instructions
from itertools import pairwise
from types import CodeType
from typing import Any

from snakemake.io import is_callable, is_flagged
from snakemake.resources import Resource

from snakemake_executor_plugin_mantik.common.errors import UserError

from .. import Job


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


def refuse_placeholders(job: Job) -> None:
    """Refuse a job whose inputs Snakemake has not evaluated yet.

    Raises:
        UserError: it has such an input.
    """
    for path in job.input:
        if is_flagged(path, "checkpoint_target"):
            raise UserError(
                f"its input {path} stands for the files of a checkpoint that has not ended",
                where=f"rule {job.rule.name}",
                do="Take the rule and the checkpoint out of their group",
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
