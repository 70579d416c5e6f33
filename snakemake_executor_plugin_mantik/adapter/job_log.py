"""What Snakemake's log is told of each job's states, for people and for its logger plugins.

Snakemake's own events say that a job was chosen (`JOB_STARTED`), finished (`JOB_FINISHED`) or has
failed (`JOB_ERROR`); that it waits or runs at a site none says. So each line on a state is a log
record with attributes, which docs/further.md lists, and a logger plugin need read no text.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snakemake.settings.enums import Quietness

from snakemake_executor_plugin_mantik.common.errors import printable
from snakemake_executor_plugin_mantik.engine import messages
from snakemake_executor_plugin_mantik.engine.observer import JobEnd, JobExtras, Observer
from snakemake_executor_plugin_mantik.engine.request import JobNumber, JobRequest
from snakemake_executor_plugin_mantik.journal import TryRecord, TryState


class JobLog(Observer):
    """Writes a line on each state of each job. Its methods belong to the engine's thread."""

    def __init__(self, log: Callable[..., None], workdir: Path) -> None:
        """Make a log of states.

        Args:
            log: writes a line, `Logger.info` of Snakemake's logger.
            workdir: the workflow's directory, which paths are shown relative to.
        """
        self._log = log
        self._workdir = workdir
        self._requests: dict[str, JobRequest] = {}
        self._sent: dict[str, tuple[str, ...]] = {}
        self._news: deque[tuple[JobNumber, str]] = deque()

    def news(self) -> dict[JobNumber, str]:
        """The ids at their sites of the jobs that got some since the last call. For any thread."""
        found: dict[JobNumber, str] = {}
        while self._news:
            number, ids = self._news.popleft()
            found[number] = ids
        return found

    async def prepare(
        self,
        request: JobRequest,
        record: TryRecord,
        workspace: str,  # noqa: ARG002
    ) -> JobExtras | None:
        """Note which job a try is one of; nothing is added to it."""
        self._requests[record.id] = request
        if record.state is not TryState.PLANNED:
            self._known(record, record.site_jobs)
            text = f"{record.name}: taken up again at {record.site}, not run twice."
            if record.waits:
                text += f" It cannot start: {record.waits}."
            self._notify(record, "submitted", text, queue=record.queue)
        return None

    def submitted(self, record: TryRecord, site_job: str, queue: str) -> None:
        """A job waits at a site now."""
        self._known(record, (site_job,))
        text = messages.submitted_message(record.name, record.site, site_job, queue or None)
        self._notify(record, "submitted", text, queue=queue)

    def started(self, record: TryRecord) -> None:
        """A job runs."""
        self._notify(record, "running", messages.started_message(record.name, record.site))

    def logged(self, record: TryRecord) -> None:
        """What it logs is no state."""

    def ended(self, record: TryRecord, end: JobEnd) -> None:
        """A job has succeeded, or failed for a reason; what is only tried again has no line."""
        facts = {"exit_code": end.exit_code, "waited": end.waited, "ran": end.ran}
        log = self._shown(end.log)
        if end.how == "finished":
            text = messages.finished_message(
                record.name, record.site, end.waited, end.ran or 0.0, log
            )
            self._notify(record, "succeeded", text, log=str(log or ""), **facts)
        elif end.reason is not None:
            # The only line that is left with --quiet rules.
            text = messages.ended_message(record.name, record.site, end.reason, end.words, log)
            self._notify(
                record, "failed", text, log=str(log or ""), reason=str(end.reason), **facts
            )
        self._requests.pop(record.id, None)
        self._sent.pop(record.id, None)

    def _known(self, record: TryRecord, ids: tuple[str, ...]) -> None:
        """Note ids of a try; earlier ones stay, since any may be the one that runs."""
        request = self._requests.get(record.id)
        self._sent[record.id] = ids = tuple(dict.fromkeys([*self._sent.get(record.id, ()), *ids]))
        if request is not None and ids:
            self._news.append((request.number, " ".join(ids)))

    def _notify(self, record: TryRecord, state: str, text: str, **facts: Any) -> None:
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
        """A path as the user reads it."""
        if path is None or not path.is_relative_to(self._workdir):
            return path
        return path.relative_to(self._workdir)
