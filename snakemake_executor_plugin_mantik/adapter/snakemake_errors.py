"""Explain what Snakemake reports before it creates the executor.

A stale lock: print the right command.

`kill -9` leaves Snakemake's lock behind, and Snakemake refuses to start before it creates the
executor. Its error advises `--unlock`, which leads to the next refusal. So if this process ends
without an executor, and an earlier run left jobs at the sites, print the command that works.

A missing script: Snakemake (9.27, `dag.ScriptProcessor`) shows a traceback of its own code. A
filter of its log replaces that text.

A Snakemake that is missing or too old is refused before modules are imported that need it.
"""

import atexit
import importlib.util
import itertools
import logging
import re
import shlex
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import SeveralMistakes, UserError, printable
from snakemake_executor_plugin_mantik.common.locks import is_locked

_STATE = Path(".snakemake")
_OPTIONS = ("--nolock", "--rerun-incomplete")

_started = False
_registered = False


def register_hint() -> None:
    """Print the hint at exit, if needed. Called when Snakemake is started with this executor."""
    global _registered  # noqa: PLW0603 - one process, one end
    if not _registered:
        _registered = True
        atexit.register(_say, Path.cwd())


def cancel_hint() -> None:
    """Print no hint. Called once Snakemake has created the executor, which reports the rest."""
    global _started  # noqa: PLW0603
    _started = True


def _say(begun_in: Path) -> None:
    if _started:
        return
    arguments = sys.argv[1:]
    pairs = itertools.pairwise(arguments)
    named = [word for option, word in pairs if option in ("-d", "--directory")]
    try:
        for directory in dict.fromkeys([Path.cwd(), begun_in, *(begun_in / d for d in named)]):
            if advice := _advice(directory, arguments):
                sys.stderr.write(f"{advice}\n")
                return
    except OSError:
        return  # this is a hint


def _advice(directory: Path, arguments: list[str]) -> str:
    """Return the hint if a run in `directory` was killed and left jobs, else ''.

    `arguments` are those of the `snakemake` that refused to start. If they contain both options
    already, return ''.
    """
    state = directory / _STATE
    refusing = [path for part in ("locks", "incomplete") for path in (state / part).glob("*")]
    if not refusing or set(_OPTIONS) <= set(arguments) or not (state / "mantik").is_dir():
        return ""
    if is_locked(state / "mantik" / "lock"):
        return ""
    # Imported here because Snakemake imports this module for each of its commands.
    from snakemake_executor_plugin_mantik.common.errors import JournalError
    from snakemake_executor_plugin_mantik.journal import read_history

    try:
        left = sum(record.may_run for record in read_history(state / "mantik"))
    except JournalError:
        return ""
    if not left:
        return ""
    options = [option for option in _OPTIONS if option not in arguments]
    return (
        f"\nAn earlier run here was killed; {left} of its jobs may be at the sites. To take them up"
        f" type:\n\n    {shlex.join(['snakemake', *arguments, *options])}\n\n"
        "A profile that smk-mantik init writes has both options. smk-mantik jobs lists the jobs."
    )


class _Filter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "exception", "") == FileNotFoundError.__name__:
            found = _explain(sys.exc_info()[1])
            if found is not None:
                record.msg, record.args = printable(str(found)), ()
        return True


_FILTER = _Filter()


def register_filter() -> None:
    """Explain missing scripts from now on, however often this is called."""
    logging.getLogger("snakemake.logging").addFilter(_FILTER)


def _explain(error: BaseException | None) -> UserError | None:
    """Return the user's mistake, if an error is about the script or notebook of a rule."""
    if not isinstance(error, FileNotFoundError):
        return None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        rule: Any = getattr(frame.f_locals.get("job"), "rule", None)
        if frame.f_code.co_name == "process_job" and rule is not None:
            kind, path = ("script", rule.script) if rule.is_script else ("notebook", rule.notebook)
            return _find_others(frame.f_locals["self"].dag) or UserError(
                f"{kind}: {path} does not exist ({error.filename})",
                where=f"rule {rule.name}",
                do="Correct the path, which is relative to the directory of the Snakefile; nothing"
                " was submitted",
            )
    return None


def _find_others(dag: Any) -> UserError | None:
    """Return the mistakes of the workflow, that one among them; None if it is the only one."""
    # Imported here because this module is imported for every command of Snakemake.
    from snakemake_interface_common.exceptions import WorkflowError

    from .checks import check_workflow

    workflow, quiet = dag.workflow, logging.Logger("mantik", logging.CRITICAL)
    try:
        check_workflow(workflow, dag, workflow.executor_settings, quiet)
    except SeveralMistakes as error:
        return error
    except (UserError, WorkflowError, OSError):
        pass  # nothing more can be found out while a script is missing
    return None


MINIMUM: Final = (9, 18)
"""The first version with `snakemake.iocontainers`."""


def check_snakemake_version() -> None:
    """Check that a Snakemake is installed beside this package, and that it is new enough.

    Raises:
        UserError: it is missing or too old.
    """
    least = ".".join(map(str, MINIMUM))
    try:
        found = version("snakemake")
    except PackageNotFoundError:
        if importlib.util.find_spec("snakemake") is not None:
            return  # it runs from its sources
        raise UserError(
            "Snakemake is not installed beside the mantik executor",
            do=f'Type: pip install "snakemake>={least},<10"',
        ) from None
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if numbers < MINIMUM:
        raise UserError(
            f"Snakemake {found} is too old for the mantik executor, which needs {least} or newer",
            do=f'Type: pip install --upgrade "snakemake>={least},<10"',
        )
