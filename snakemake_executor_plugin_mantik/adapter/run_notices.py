"""Notify the user of a run's first failure and of its end (`--mantik-notify`)."""

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import one_line
from snakemake_executor_plugin_mantik.engine.request import JobNumber, Outcome
from snakemake_executor_plugin_mantik.notices.courier import LONGEST_WAIT_S, Courier
from snakemake_executor_plugin_mantik.notices.notice import FailedJob, Notice, RunOutcome
from snakemake_executor_plugin_mantik.notices.targets import parse_target
from snakemake_executor_plugin_mantik.rules.units import job_display_name, list_members

_AT_ONCE_S: Final = 3.0
"""Most seconds that a user waits for a notice who ends a run at once."""


class RunNotices:
    """The notices of one run: one of the first failure, if the run goes on, and one of its end."""

    def __init__(self, workflow: Any, setting: str, logger: Any) -> None:
        """Prepare; `setting` is the value of the option.

        Raises:
            UserError: it names nothing that takes notices.
        """
        self._workflow = workflow
        self._logger = logger
        self._directory = Path.cwd()
        target = parse_target(setting, self._directory)
        self._courier = Courier(target, logger.warning)
        self._began = time.time()
        self._outcomes: dict[JobNumber, Outcome] = {}
        self._announced = False
        if target.secret and any(setting.strip() in word for word in sys.argv[1:]):
            logger.warning(
                "The address of --mantik-notify is on the command line, which Snakemake writes into"
                " its log. If it is secret, set SNAKEMAKE_MANTIK_NOTIFY or a profile's"
                " mantik-notify instead."
            )

    def note(self, outcome: Outcome) -> None:
        """Note how a job failed that ran at a site."""
        self._outcomes[outcome.number] = outcome

    def look(self, sites: Sequence[str]) -> None:
        """Announce the first failure, if the run goes on. Any thread may call this method."""
        scheduler = self._workflow.scheduler
        if self._announced or scheduler is None or not scheduler.failed or not scheduler.running:
            return
        self._send(None, sites)

    def end(self, outcome: RunOutcome, sites: Sequence[str]) -> None:
        """Announce the end of the run; `wait` waits until that is delivered."""
        self._send(outcome, sites)

    def _send(self, outcome: RunOutcome | None, sites: Sequence[str]) -> None:
        """Begin to deliver a notice.

        An error would make Snakemake cancel jobs, or end without closing the run: it is a warning.
        """
        self._announced = True
        try:
            self._courier.send(self._notice(outcome, sites))
        except Exception as error:  # noqa: BLE001 - such as a limit on the number of threads
            why = one_line(f"{type(error).__name__}: {error}")
            self._logger.warning(f"A notice could not be sent ({why}). Nothing else is affected.")

    def wait(self, *, at_once: bool) -> None:
        """Wait for notices to be delivered, some seconds at most; Ctrl-C ends that."""
        with suppress(KeyboardInterrupt):
            self._courier.wait(_AT_ONCE_S if at_once else LONGEST_WAIT_S)

    def _notice(self, outcome: RunOutcome | None, sites: Sequence[str]) -> Notice:
        scheduler = self._workflow.scheduler
        return Notice(
            outcome=outcome,
            directory=self._directory,
            sites=sites,
            total=len(self._workflow.dag),
            done=scheduler.finished_jobs,
            running=0 if outcome is not None else len(tuple(scheduler.running)),
            failed=list(self._failed(tuple(scheduler.failed))),
            began=self._began,
            seconds=time.time() - self._began,
        )

    def _failed(self, jobs: Iterable[Any]) -> Iterable[FailedJob]:
        for job in jobs:
            members = list_members(job)
            names = [job_display_name(member) for member in members]
            outcome = self._outcomes.get(job.jobid)
            rule = members[0].rule.name
            name = names[0] if len(names) == 1 else f"group of {', '.join(names)}"
            if outcome is None:
                yield FailedJob(name, rule)
                continue
            yield FailedJob(
                name, rule, outcome.site, outcome.site_job, outcome.reason,
                one_line(outcome.message.strip().partition("\n")[0]),
                str(outcome.log or ""),
            )  # fmt: skip
