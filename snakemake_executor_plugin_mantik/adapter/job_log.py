"""Log each job's states and failures to Snakemake's log, for people and for logger plugins.

Snakemake has events for a job that was chosen (`JOB_STARTED`), finished (`JOB_FINISHED`) or failed
(`JOB_ERROR`), but none for a job that waits or runs at a site. So each line about a state is a log
record with attributes, and a logger plugin need not parse text. docs/further.md lists them.
Snakemake's own `log_error` claims that a command failed also if the job ended for another reason.
"""

from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

from snakemake.settings.enums import Quietness
from snakemake_interface_logger_plugins.common import LogEvent

from ..common.errors import MantikError, printable
from ..common.state_directory import read_end
from ..engine import messages
from ..engine.observer import JobEnd, JobExtras, Observer
from ..engine.request import JobNumber, JobRequest, Outcome
from ..jobs.paths import local_path
from ..jobs.reasons import Reason
from ..journal import AttemptRecord, AttemptState
from ..rules import Job
from ..rules.resources import RETRY_RESOURCE, job_retry_reasons
from ..rules.units import job_identity, list_members
from ..sites.slurm import explain_pending

_END_BYTES: Final = 4 << 10
"""How much of an output to read for its last line."""


class JobLog(Observer):
    """Logs a line for each state of each job. Its methods belong to the engine's thread."""

    def __init__(self, log: Callable[..., None], workdir: Path) -> None:
        """Log with `log`, `Logger.info` of Snakemake's logger; show paths relative to `workdir`."""
        self._log = log
        self._workdir = workdir
        self._requests: dict[str, JobRequest] = {}
        self._sent: dict[str, tuple[str, ...]] = {}
        self._names: dict[str, str] = {}
        self._waits: set[str] = set()
        self._news: deque[tuple[JobNumber, str]] = deque()

    def news(self) -> dict[JobNumber, str]:
        """Return the ids at their sites of jobs that got new ones since the last call.

        Earlier ids of the same attempt are included. Any thread may call this method.
        """
        found: dict[JobNumber, str] = {}
        while self._news:
            number, ids = self._news.popleft()
            found[number] = ids
        return found

    async def prepare(
        self,
        request: JobRequest,
        record: AttemptRecord,
        workspace: str,  # noqa: ARG002
        *,
        waits: bool = False,
    ) -> JobExtras | None:
        """Note which job an attempt belongs to, and log if it is reattached. Add nothing to it."""
        if waits:
            self._waits.add(record.id)
            return None
        self._waits.discard(record.id)
        presubmitted = self._requests.get(record.id)
        self._requests[record.id] = request
        self._names[request.job] = record.name
        # What this run submitted: before its inputs existed, or as a segment behind another one.
        if (presubmitted is not None and presubmitted.unmade) or record.id in self._sent:
            self._known(record, ())
        elif record.state is not AttemptState.PLANNED:
            self._known(record, record.site_jobs)
            text = f"{record.name}: reattached at {record.site}, not run twice."
            if record.waits:
                text += f" It cannot start: {explain_pending(record.waits)}."
            self._notify(record, "submitted", text, queue=record.queue)
        return None

    def submitted(self, record: AttemptRecord, site_job: str, queue: str) -> None:
        self._known(record, (site_job,))
        request = self._requests.get(record.id)
        if record.id in self._waits:
            name, before = f"{record.name}, {record.part}", f"segment {record.segment}"
            text = messages.waiting_message(name, record.site, site_job, [before])
        elif request is not None and request.unmade:
            makers = dict.fromkeys(self._names.get(job, "") for job in request.unmade.values())
            behind = [name for name in makers if name]
            text = messages.waiting_message(record.name, record.site, site_job, behind)
        else:
            name = f"{record.name}, {record.part}" if record.segment else record.name
            text = messages.submitted_message(name, record.site, site_job, queue or None)
        self._notify(record, "submitted", text, queue=queue)

    def started(self, record: AttemptRecord) -> None:
        self._notify(record, "running", messages.started_message(record.name, record.site))

    def ended(self, record: AttemptRecord, end: JobEnd) -> None:
        """Log the success or failure of a job; nothing if it will be submitted again."""
        facts = {"exit_code": end.exit_code, "waited": end.waited, "ran": end.ran}
        log = self._shown(end.log)
        if end.how == "finished":
            text = messages.finished_message(
                record.name, record.site, end.waited, end.ran or 0.0, log
            )
            self._notify(record, "succeeded", text, log=str(log or ""), **facts)
        elif end.reason is not None:
            # With --quiet rules this is the only line.
            written = [end.log, *(local_path(p, self._workdir) for p in record.log_files)]
            ends = ((path, read_end(path, _END_BYTES)) for path in written if path is not None)
            path, last = next(((path, e) for path, e in ends if e.strip()), (end.log, b""))
            text = messages.ended_message(
                record.name, record.site, end.reason, end.words, self._shown(path), end=last
            )
            self._notify(
                record, "failed", text, log=str(log or ""), reason=str(end.reason), **facts
            )
        self._requests.pop(record.id, None)
        self._sent.pop(record.id, None)

    def _known(self, record: AttemptRecord, ids: tuple[str, ...]) -> None:
        """Add ids of an attempt, and keep earlier ones: any may be the one that runs."""
        request = self._requests.get(record.id)
        self._sent[record.id] = ids = tuple(dict.fromkeys([*self._sent.get(record.id, ()), *ids]))
        if request is not None and ids:
            self._news.append((request.number, " ".join(ids)))

    def _notify(self, record: AttemptRecord, state: str, text: str, **facts: Any) -> None:
        request = self._requests.get(record.id)
        attributes = {
            "state": state,
            "jobid": request.number if request is not None else None,
            "rule_name": record.rule,
            "site": record.site,
            "external_jobid": " ".join(self._sent.get(record.id, ())),
            **facts,
            "quietness": Quietness.PROGRESS,
        }
        self._log(printable(text), extra=attributes)

    def _shown(self, path: Path | None) -> Path | None:
        if path is None or not path.is_relative_to(self._workdir):
            return path
        return path.relative_to(self._workdir)


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
    members = [member for member in group if job_identity(member) in failed] or list(group)
    infos = (member.get_log_error_info(indent=True, **kwargs) for member in members)
    logger.error(
        f"Error in group {group.groupid}: {msg}",
        extra={
            "event": LogEvent.GROUP_ERROR,
            "groupid": group.groupid,
            "aux_logs": aux_logs or [],
            "job_error_info": [_of_its_command(info, **kwargs) for info in infos],
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
            f"{job.name}: not tried again, since it failed for {reason.value}, which"
            f" {RETRY_RESOURCE} does not name."
        )
        # Snakemake has no other way to prevent a retry of a single job.
        job.attempt = job.restart_times + 1


def _of_its_command(info: dict[str, Any], reason: str = "", **_: Any) -> dict[str, Any]:
    """Remove the command from a failed job's report unless the command itself failed.

    Below each command, Snakemake writes that it exited with a non-zero exit code.
    """
    return info if reason == "exit_code" else {**info, "shellcmd": None}
