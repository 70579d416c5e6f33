"""Log failed jobs as Snakemake does, and prevent retries that their rules do not want.

Snakemake's own `log_error` claims that a command failed also if the job ended for another reason.
"""

from collections.abc import Collection
from typing import Any

from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.engine.request import Outcome
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.resources import RETRY_RESOURCE, job_retry_reasons
from snakemake_executor_plugin_mantik.rules.units import job_identity, list_members


def log_job_error(logger: Any, job: Job, msg: str | None, **kwargs: Any) -> None:
    """Log as a job's `log_error`, but claim that the command failed only if it did."""
    logger.error(
        f"Error in rule {job.rule.name}, jobid: {job.jobid}",
        extra=_of_its_command(job.get_log_error_info(msg, **kwargs), **kwargs),
    )


def log_group_error(
    logger: Any,
    group: Job,
    failed: Collection[str],
    msg: str,
    aux_logs: list[str] | None = None,
    **kwargs: Any,
) -> None:
    """Log as a group's `log_error`, which omits the message and lists all members.

    List only the members whose identities are in `failed`, if there are any.
    """
    from snakemake_interface_logger_plugins.common import LogEvent

    members = [member for member in group if job_identity(member) in failed] or list(group)
    infos = [
        _of_its_command(member.get_log_error_info(indent=True, **kwargs), **kwargs)
        for member in members
    ]
    logger.error(
        f"Error in group {group.groupid}: {msg}",
        extra={
            "event": LogEvent.GROUP_ERROR,
            "groupid": group.groupid,
            "aux_logs": aux_logs or [],
            "job_error_info": infos,
            **kwargs,
        },
    )


def veto_retry(logger: Any, job: Job, outcome: Outcome) -> None:
    """Prevent a retry if `mantik_retry_on` does not name the reason of failure.

    A group is retried if the value of one of its members names the reason.
    """
    if job.attempt > job.restart_times:
        return
    # A job that succeeded comes here if Snakemake rejected an output, or if its benchmark file or
    # its outputs in Snakemake's cache could not be written.
    reason = Reason.OUTPUTS if outcome.succeeded else outcome.reason
    try:
        wanted = any(reason in job_retry_reasons(member) for member in list_members(job))
    except MantikError:
        wanted = False  # the job was refused because of this error
    if not wanted:
        logger.info(
            f"{job.name}: not tried again, since it failed for {reason.words}, which"
            f" {RETRY_RESOURCE} does not name."
        )
        # Snakemake has no other way to prevent a retry of a single job.
        job.attempt = job.restart_times + 1


def _of_its_command(info: dict[str, Any], reason: str = "", **_: Any) -> dict[str, Any]:
    """Remove the command from a failed job's report unless the command itself failed.

    Below each command, Snakemake writes that it exited with a non-zero exit code.
    """
    return info if reason == "exit_code" else {**info, "shellcmd": None}
