"""Name a job's files as its rule does, where Snakemake names stored ones by their local copies.

With a default storage provider, Snakemake calls `results/a.txt` by the path of a local copy,
`.snakemake/storage/mantik/results/a.txt`, in lists, parameters and texts alike. Programs use the
text of their paths: as the name of a sample, as a column, as a parameter of a run in MLflow. So
all that a job and its observers get is made plain here, and only here.
"""

import filecmp
import os
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import zip_longest
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any, Final

from snakemake.common.tbdstring import TBDString
from snakemake.exceptions import RuleException
from snakemake.iocontainers import Namedlist
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.storage.paths import (
    find_local_prefix,
    plain_local_path,
    storable_path,
)

from .. import Job
from .job_paths import command_text

UNKNOWN: Final = str(TBDString())
"""The text of a value that Snakemake has not evaluated yet."""

_BEFORE: Final = r"(?:(?<![\w.~/@%+\-)}\]*?])|(?<=\s-[A-Za-z])|(?<=file://))"
_WORD: Final = r"[^\s'\";|&<>()`]*"


def expand_params(job: Job, lists: tuple[Any, Any], resources: Any = None) -> Any:
    """Evaluate a job's parameters again, with other inputs and outputs, or other resources."""
    # Snakemake's `expand_params` reads only the resources of the job that it gets.
    source = job if resources is None else SimpleNamespace(resources=resources)
    made, _ = job.rule.expand_params(job.wildcards_dict, *lists, source)
    return made


def plain_params(job: Job, resources: Any = None) -> Any:
    """Return a job's parameters as if no file was stored.

    With `resources`, evaluate parameters again that are not determined.

    Raises:
        UserError: a parameter may be computed from an outdated file of this machine.
    """
    params, lists = job.params, (job.input, job.output)
    if resources is not None and UNKNOWN in str(params):
        params = expand_params(job, lists, resources)
    plain = make_plain(job)
    if plain is None:
        return params
    now = again = params
    stored = [path for path in (*job.input, *job.output) if storable_path(path) is not None]
    if stored:
        inputs, outputs = (type(each)(toclone=each, custom_map=command_text) for each in lists)
        with suppress(WorkflowError, RuleException):
            # Snakemake keeps those of the first attempt: not all that differs is due to names.
            now = expand_params(job, lists, resources)
            again = expand_params(job, (inputs, outputs), resources)

    def choose(value: Any, at_present: Any, named: Any) -> Any:
        text = map_texts(value, plain)
        # Without the local copy, a function that reads the file cannot be evaluated, either.
        if UNKNOWN in f"{value}{named}" or repr(named) == repr(map_texts(at_present, plain)):
            return text
        _refuse_outdated(job, stored)
        return map_texts(named, plain)

    values = iter([choose(*each) for each in zip_longest(params, now, again)])
    return type(params)(toclone=params, custom_map=lambda _: next(values))


def _refuse_outdated(job: Job, stored: list[Any]) -> None:
    """Refuse a job if a function may have read another file under a plain path than is stored."""
    for path in stored:
        home = command_text(path)
        if not (os.path.lexists(path) and os.path.lexists(home)) or os.path.samefile(path, home):
            continue
        if os.path.isdir(path) or os.path.isdir(home) or not filecmp.cmp(path, home, shallow=False):
            raise UserError(
                f"a parameter depends on {home}, of which another version lies on this machine",
                where=f"rule {job.rule.name}",
                do=f"Move {home} away",
            )


def make_plain(job: Job) -> Callable[[str], str] | None:
    """Return a function that names files plainly in a text; None if the workflow stores none."""
    prefix = find_local_prefix(job.rule.workflow)
    if prefix is None:
        return None
    workdir, below = os.getcwd(), re.escape(os.path.relpath(prefix))
    copies = rf"(?P<above>{re.escape(workdir)}/|{_BEFORE}(?:\.{{1,2}}/)*){below}"
    if os.path.isabs(prefix):
        copies = rf"{_BEFORE}(?P<above>){re.escape(str(prefix))}"
    pattern = re.compile(rf"{copies}(?:/(?P<rest>{_WORD})|(?![\w.~@%+\-]))")

    def plain(match: re.Match[str]) -> str:
        path = plain_local_path(match["rest"] or "")
        return path if os.path.isabs(path) else (match["above"] + path) or "."

    return lambda text: pattern.sub(plain, text)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with `change` applied to all strings in it."""
    if isinstance(value, str) and not isinstance(value, TBDString):
        changed = change(value)
        return changed if changed != value else value
    if isinstance(value, PurePath):
        return type(value)(change(str(value)))
    if isinstance(value, Namedlist):
        return type(value)(toclone=value, custom_map=lambda item: map_texts(item, change))
    if type(value) in (list, tuple, set):
        return type(value)(map_texts(item, change) for item in value)
    if type(value) is dict:
        return {key: map_texts(item, change) for key, item in value.items()}
    return value
