"""Explain what Snakemake reports, and stop what is in vain, before it creates the executor.

A stale lock: print the right command.

`kill -9` leaves Snakemake's lock behind, and Snakemake refuses to start before it creates the
executor. Its error advises `--unlock`, which leads to the next refusal. If an earlier run left jobs
at the sites, a filter of its log adds the command that works.

A missing script: Snakemake (9.27, `dag.ScriptProcessor`) shows a traceback of its own code. The
filter replaces that text, and so it does with that of a resource that an option makes a function.

Environments on this machine: with `--software-deployment-method` Snakemake (9.27,
`Workflow.execute`) looks for conda or apptainer, and makes all jobs' environments, before anything
of an executor runs. Its log tells when it begins: the filter refuses the workflow then, if the
executor would refuse it afterwards.

A Snakemake that is missing or too old is refused before modules are imported that need it.
"""

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

from snakemake_interface_common.exceptions import ApiError, WorkflowError

from ..common.errors import SeveralMistakes, UserError, printable
from ..common.locks import is_locked
from ..common.state_directory import STATE

_OPTIONS = ("--nolock", "--rerun-incomplete")
_DIRECTORY = ("-d", "--directory")
_REFUSALS = ("LockException", "IncompleteFilesException")
_MAKING = (("conda", "create"), ("singularity", "pull"))
"""Modules and functions of Snakemake that log that they begin to make an environment or image."""
_ALL_MADE_BY = ("create_conda_envs", "pull_container_imgs")
"""Methods of Snakemake's DAG that call these for all jobs."""


def _advice() -> str:
    """Return what to type if an earlier run left jobs at the sites, else ''."""
    arguments = sys.argv[1:]
    named = [word for option, word in itertools.pairwise(arguments) if option in _DIRECTORY]
    states = [Path(directory) / STATE for directory in ("", *named)]
    state = next((state for state in states if state.is_dir()), None)
    if state is None or is_locked(state / "lock"):
        return ""
    # Imported here because Snakemake imports this module for each of its commands.
    from ..common.errors import JournalError
    from ..journal import read_history

    try:
        left = sum(record.may_run for record in read_history(state))
    except JournalError:
        return ""
    if not left:
        return ""
    options = [option for option in _OPTIONS if option not in arguments]
    return (
        f"\nAn earlier run here was killed or detached; {left} of its jobs may be at the sites. To"
        f" reattach them type:\n\n    {shlex.join(['snakemake', *arguments, *options])}\n\n"
        "A profile that smk-mantik init writes has both options. smk-mantik jobs lists the jobs."
    )


class _Filter(logging.Filter):
    options: Any = None
    """The executor's settings: with a dry run, Snakemake's workflow does not have them."""

    def filter(self, record: logging.LogRecord) -> bool:
        exception = getattr(record, "exception", "")
        if exception in _REFUSALS:
            record.msg, record.args = f"{record.getMessage()}\n{_advice()}", ()
        elif exception not in ("", ApiError.__name__):
            if (found := _explain(sys.exc_info()[1])) is not None:
                record.msg, record.args = printable(str(found)), ()
        elif (record.module, record.funcName) in _MAKING:
            _refuse_before_making()
        return True


_FILTER = _Filter()


def register_filter(options: Any) -> None:
    """Explain what Snakemake reports from now on, however often this is called.

    `options` are the executor's settings.
    """
    _FILTER.options = options
    logging.getLogger("snakemake.logging").addFilter(_FILTER)


def _refuse_before_making() -> None:
    """Refuse a workflow with mistakes before Snakemake makes an environment for it here.

    Raises:
        ApiError: lists the mistakes.
    """
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_name in _ALL_MADE_BY:
            dag = frame.f_locals["self"]
            if not dag.workflow.dryrun and (error := _find_mistakes(dag)):
                # For other errors Snakemake would show the lines of code that raised them.
                raise ApiError(str(error))


def _explain(error: BaseException | None) -> UserError | None:
    """Return the user's mistake, if an error is about a script, an environment or a resource."""
    for frame, _ in traceback.walk_tb(error.__traceback__ if error is not None else None):
        rule: Any = getattr(frame.f_locals.get("job"), "rule", None)
        within = frame.f_code.co_name
        if within in _ALL_MADE_BY:
            return _find_mistakes(frame.f_locals["self"])
        if within == "expand_resources" and isinstance(error, ValueError):
            from ..rules.resources import function_mistake

            return function_mistake(frame.f_locals["self"], error)
        if within == "process_job" and isinstance(error, FileNotFoundError) and rule is not None:
            kind, path = ("script", rule.script) if rule.is_script else ("notebook", rule.notebook)
            others = _find_mistakes(frame.f_locals["self"].dag)
            # One alone may be a consequence of what is missing.
            return (others if isinstance(others, SeveralMistakes) else None) or UserError(
                f"{kind}: {path} does not exist ({error.filename})",
                where=f"rule {rule.name}",
                do="Correct the path, which is relative to the directory of the Snakefile; nothing"
                " was submitted",
            )
    return None


def _find_mistakes(dag: Any) -> UserError | None:
    """Return the mistakes of the workflow, as far as they can be found now."""
    # Imported here because this module is imported for every command of Snakemake.
    from .checks import check_workflow

    workflow, quiet = dag.workflow, logging.Logger("mantik", logging.CRITICAL)
    if workflow.execution_settings is None or workflow.scheduler is not None:
        return None  # no job is to run, as with --conda-create-envs-only, or some do already
    try:
        check_workflow(workflow, dag, _FILTER.options, quiet)
    except UserError as error:
        return error
    except (WorkflowError, OSError):
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
