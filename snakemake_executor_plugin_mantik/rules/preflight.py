"""What rules would run, made once before any job is sent: a misspelt name in a command shows then.

Snakemake formats a command when its job is ready, which may be days after the first one was sent,
and ends the whole run if it cannot.
"""

import os
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Final

from snakemake.common.tbdstring import TBDString
from snakemake.exceptions import RuleException, format_exception_to_string
from snakemake.io import is_callable
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_mantik.common.errors import UserError, WorkflowNotRunnable
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.context import RuleContext
from snakemake_executor_plugin_mantik.rules.kinds.shell_command import (
    NODE_TMPDIR,
    format_resources,
    job_tmpdir,
)
from snakemake_executor_plugin_mantik.rules.paths.path_rewriting import replace_resources
from snakemake_executor_plugin_mantik.rules.payload import make_payload
from snakemake_executor_plugin_mantik.rules.resources import given_resources
from snakemake_executor_plugin_mantik.rules.units import list_members

_UNKNOWN: Final = str(TBDString())


def find_mistakes(
    dag: Any, units: Iterable[Job], context: RuleContext, linemaps: Any
) -> dict[str, str]:
    """Why what some rules run cannot be made, by rule; found with one job of each rule.

    Args:
        dag: Snakemake's graph of jobs: those that run here end the run as well.
        units: jobs and groups that run at sites.
        context: of the run.
        linemaps: Snakemake's, which lead from its code to lines of Snakefiles.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    here = (job for job in dag.needrun_jobs() if job.is_local)
    for job in chain(here, *map(list_members, units)):
        name = job.rule.name
        if name in seen or not _determined(job):
            continue
        seen.add(name)
        try:
            _make(job, context)
        except UserError as error:
            if not _may_change(job, error):
                found[name] = str(error)
        except (RuleException, WorkflowError) as error:
            if not _may_change(job, error):
                found[name] = format_exception_to_string(error, linemaps).strip()
    return found


def refuse_mistakes(found: Mapping[str, str]) -> None:
    """See to it that there are no mistakes.

    Raises:
        WorkflowNotRunnable: telling all of them.
    """
    if found:
        told = "\n".join(found[name] for name in sorted(found)).replace("\n", "\n  ")
        raise WorkflowNotRunnable(
            f"nothing submitted, since what these rules run cannot be made:\n  {told}",
            do="Correct them",
        )


def _make(job: Job, context: RuleContext) -> None:
    """Make what Snakemake tells of a job, and what runs."""
    # Both are formatted when they are read, the latter other than it will run.
    job.message, job.shellcmd  # noqa: B018
    if not job.is_local:
        make_payload(job, context, job_tmpdir(job), None if job.benchmark is None else 0)


def _determined(job: Job) -> bool:
    """Whether nothing of a job follows from files that are still to be made."""
    if not _waits(job):
        return True
    try:
        values = given_resources(job)
        params = job.params
        if _UNKNOWN in str(params):  # it may be the node's directory for temporary files alone
            params = replace_resources(job, format_resources(job, NODE_TMPDIR))
    except (RuleException, WorkflowError):
        return False
    return _UNKNOWN not in str((params, values, job.threads))


def _may_change(job: Job, error: Exception) -> bool:
    """Whether what went wrong may be for want of files that are still to be made."""
    why = error.__cause__ or error.__context__
    looks = isinstance(why, OSError) or any(map(is_callable, job.rule.params))
    return looks and isinstance(why, OSError | LookupError) and _waits(job)


def _waits(job: Job) -> bool:
    """Whether inputs of a job are still to be made."""
    return not all(map(os.path.lexists, job.input))
