"""Translate Snakemake's calls into calls of the engine. No I/O with a site happens here."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from snakemake.exceptions import RuleException, format_exception_to_string
from snakemake_interface_common.exceptions import ApiError, WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor

from .. import retry
from ..common.errors import JournalError, MantikError, of_one_job, printable
from ..common.state_directory import STATE
from ..engine.messages import describe_os_error, presubmitted_message
from ..engine.request import JobNumber, JobRequest, Outcome
from ..engine.transfer_meter import TransferMeter
from ..jobs.reasons import Reason
from ..journal import read_last_allocations
from ..rules import Job
from ..rules.context import RuleContext
from ..rules.kinds.groups import Unit
from ..rules.make_request import workflow_variables
from ..rules.paths import storage
from ..rules.preflight import OBSTACLES
from ..rules.units import keep_groups_current, list_members
from ..storage.catalog import catalog_of
from ..storage.paths import storable_path, uses_provider
from ..views.usage import usage_by_pool
from . import job_files, job_log
from .progress_line import BottomLine, open_progress_line
from .run_notices import RunNotices, describe_failures, sum_up_failures
from .signals import DETACHED, FAILED_HERE, NO_SPACE, Interruption, is_disk_full
from .startup import ActiveRun, Ending, start_run

_CHECK_S = 0.2
"""Seconds between two checks for jobs that the engine has finished. A check costs no request."""


class SiteExecutor(RemoteExecutor):
    """Runs each job at the site that its rule names.

    Snakemake's waiting thread starts calling `check_active_jobs` before `__post_init__` ends. A job
    that `check_active_jobs` neither yields nor reports would be lost for ever.
    """

    _run: ActiveRun | None = None
    _line: BottomLine | None = None
    _notices: RunNotices | None = None
    _ending: Ending | None = None

    def __post_init__(self) -> None:
        """Check the workflow and open the sites, if any job of it runs at a site.

        Raises:
            ApiError: the configuration, the credentials or the workflow have mistakes, or a site
                cannot be used. Nothing has been submitted.
        """
        self._finished: dict[JobNumber, Outcome] = {}
        self._uncommitted: dict[JobNumber, Outcome] = {}
        self._failures: dict[JobNumber, Outcome] = {}
        self._named: dict[JobNumber, str] = {}
        self._variables: dict[str, str] | None = None
        self._interruption = Interruption(self.workflow.executor_settings.on_interrupt)
        if (setting := self.workflow.executor_settings.notify) is not None:
            with self._refusing():
                self._notices = RunNotices(self.workflow, setting, self.logger, self._failures)
        keep_groups_current(self.dag)
        units = (self.dag.get_job_group(job) or job for job in self.dag.needrun_jobs())
        if not len(self.dag):  # nothing to be done: Snakemake does not call `shutdown`
            self._end_waiting()
        elif any(not unit.is_local for unit in units):
            self._start()
        elif uses_provider(self.workflow):
            context = RuleContext({}, Path.cwd())
            with self._refusing():
                OBSTACLES.refuse(Unit(job, context) for job in self.dag.needrun_jobs())

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Report a mistake and end the run.

        Raises:
            ApiError: for a `MantikError`. For a WorkflowError Snakemake would show the lines of our
                code that raised it.
        """
        try:
            yield
        except MantikError as error:
            self._close_line()
            self._end_waiting()
            raise ApiError(str(error)) from None
        except BaseException:
            self._close_line()
            raise

    def _end_waiting(self) -> None:
        """End the waiting thread, which may otherwise fail while the interpreter shuts down."""
        with self.lock:
            self.wait = False
        self.wait_thread.join(5 * _CHECK_S)

    def _used_sites(self) -> list[str]:
        return list(self._run.checked.used) if self._run is not None else []

    def _start(self) -> ActiveRun:
        def count() -> Mapping[str, int]:
            return self._run.engine.count_jobs() if self._run is not None else {}

        retry.executor_runs()
        meter = TransferMeter()
        self._line = open_progress_line(self.workflow, self.logger, count, meter)
        if self._line is not None:
            self._interruption.undisturbed = self._line.paused
        with self._refusing():
            self._run = start_run(self.workflow, self.dag, self.logger, meter)
        return self._run

    def _close_line(self) -> None:
        if self._line is not None:
            self._line.close()

    def run_job(self, job: Job) -> None:
        """Pass a job to the engine, unless its outputs are in Snakemake's cache.

        First remove its old outputs, as Snakemake does locally. A job that cannot be run is
        reported as failed, with the reason.
        """
        self._interruption.handle()
        # After a local checkpoint, this may be the first job that is not local.
        run = self._run or self._start()
        self.report_job_submission(SubmittedJobInfo(job))
        self._submit(run, job)

    def _submit(self, run: ActiveRun, job: Job) -> None:
        try:
            if storage.jobs_use_storage(self.workflow):
                # The job's own Snakemake prepares it, in the storage.
                request = run.request(job, self.envvars())
                read = self.workflow.async_run(storage.storage_versions(list_members(job)))
                request = replace(request, parameters=f"{request.parameters} {read}")
            else:
                self.workflow.async_run(job_files.prepare_files(self.workflow, job))
                request = self._request(run, job)
            cached = self.workflow.async_run(job_files.fetch_cached(self.workflow, job))
        except MantikError as error:
            self._refuse(job, of_one_job(error))
        except (RuleException, WorkflowError) as error:
            # For example an unknown name in the command: fails this job only, as it does locally.
            self._refuse(job, format_exception_to_string(error, self.workflow.linemaps))
        except OSError as error:
            if is_disk_full(error):
                raise
            # Raised further, it would end Snakemake, which would cancel all jobs.
            self._refuse(
                job,
                "not submitted: the files for its outputs and logs cannot be prepared on this"
                f" machine ({describe_os_error(error)}). Correct that and start again",
            )
        else:
            if cached:
                run.requested.discard(job.jobid)
                self._finished[job.jobid] = Outcome(job.jobid, "", True)
            else:
                run.engine.submit(request)
                run.propose(job, self.envvars())

    def _request(self, run: ActiveRun, job: Job) -> JobRequest:
        """Make the engine's request for a job.

        If its values cannot be computed, functions of its rule may read inputs that stay at a site:
        fetch these and try again.
        """
        try:
            return run.request(job, self.envvars())
        except (MantikError, WorkflowError):
            if not uses_provider(self.workflow):
                raise
            catalog, stored = catalog_of(Path.cwd()), False
            for member in list_members(job):
                member.attempt = member.attempt  # its resources are computed again
                member._params = member._non_derived_params = None  # there is no public method
                for given in member.input:
                    path = storable_path(given)
                    output = catalog.find(path) if path is not None else None
                    if output is not None and not output.here:
                        stored = True
                        if not os.path.lexists(given):  # an older copy is gone: Catalog.drop_older
                            catalog.bring(output, Path(given))
            if not stored:
                raise
        return run.request(job, self.envvars())

    def envvars(self) -> dict[str, str]:
        """Return the environment variables that jobs get from this machine.

        These are the workflow's own, and those of the storage plugins if jobs use the storage.
        """
        if self._variables is None:
            self._variables = {
                **workflow_variables(self.workflow, os.environ),
                **storage.storage_secrets(self.workflow),
            }
        return self._variables

    def _refuse(self, job: Job, message: str) -> None:
        if self._run is not None:
            self._run.requested.discard(job.jobid)
        self._finished[job.jobid] = Outcome(
            job.jobid, "", False, f"{message}\n", reason=Reason.REJECTED
        )

    async def check_active_jobs(
        self, active_jobs: list[SubmittedJobInfo]
    ) -> AsyncGenerator[SubmittedJobInfo, None]:
        """Yield the jobs that are still active, and report all others."""
        try:
            async for info in self._check_active_jobs(active_jobs):
                yield info
        except Exception as error:  # Snakemake ends: nobody calls `cancel_jobs` in this case
            self._leave_running(error)
            raise

    async def _check_active_jobs(
        self, active_jobs: list[SubmittedJobInfo]
    ) -> AsyncGenerator[SubmittedJobInfo, None]:
        self.next_seconds_between_status_checks = _CHECK_S
        if self._notices is not None:
            self._notices.look(self._used_sites())
        if self._run is not None:
            self._named |= self._run.states.news()
            self._register(active_jobs)
            self._finished |= {o.number: o for o in self._run.engine.collect()}
        for info in active_jobs:
            outcome = self._finished.get(info.job.jobid) if self._run is not None else None
            if outcome is not None and outcome.withdrawn and self._run is not None:
                del self._finished[outcome.number]
                self._run.withdrawn(info.job)
                # In a thread without an event loop, as Snakemake expects it.
                await asyncio.to_thread(self._submit, self._run, info.job)
                outcome = None
            if outcome is None or (outcome.succeeded and job_files.is_ahead_of_time(info.job)):
                yield info  # Snakemake would refuse its outputs now, and not in a moment
            else:
                del self._finished[outcome.number]
                await self._report(info, outcome)

    def _register(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """Add the ids that jobs got at their sites to Snakemake's metadata."""
        for info in active_jobs:
            if (ids := self._named.pop(info.job.jobid, None)) is not None:
                info.external_jobid = ids
                with suppress(OSError):  # reported when the job was registered without the ids
                    info.job.register(external_jobid=ids)

    async def _report(self, info: SubmittedJobInfo, outcome: Outcome) -> None:
        self._uncommitted[outcome.number] = outcome
        if self._run is not None:
            self._run.ended(outcome)
        info.external_jobid = outcome.site_job or None
        info.aux = {"site": outcome.site} if outcome.site else {}
        if not outcome.succeeded:
            info.aux["reason"] = str(outcome.reason)
        trouble = self._benchmark(info.job) if outcome.succeeded else ""
        if outcome.succeeded and not trouble:
            trouble = await job_files.note_outputs(
                self.dag, info.job, outcome
            ) or await job_files.store_cached(self.workflow, info.job)
        if outcome.succeeded and trouble:
            self.report_job_error(info, msg=trouble)
        elif outcome.succeeded:
            if storage.jobs_use_storage(self.workflow):
                storage.refresh_storage(list_members(info.job))
            self.report_job_success(info)
        else:
            self._failures[outcome.number] = outcome
            logs = [str(outcome.log)] if outcome.log is not None else []
            missed = self._run.missed(info.job, outcome) if self._run is not None else ""
            message = printable(f"{outcome.message}{missed}")
            self.report_job_error(info, msg=message, aux_logs=logs)

    def _benchmark(self, job: Job) -> str:
        """Write the benchmark files that the job declares. Return an error, or ''."""
        if self._run is None or not (measured := self._run.measured.get(job.jobid)):
            return ""
        extended = self.workflow.output_settings.benchmark_extended
        try:
            for member, path in measured:
                job_files.write_benchmark(member, path, extended=extended)
        except MantikError as error:
            return f"{error}\n"
        return ""

    def print_job_error(
        self, job_info: SubmittedJobInfo, msg: str | None = None, **kwargs: Any
    ) -> None:
        """Log what happened. The base class would point to a cluster's log instead."""
        if job_info.external_jobid is not None:
            kwargs["external_jobid"] = job_info.external_jobid
        kwargs |= job_info.aux or {}
        if job_info.job.is_group():
            failed = self._uncommitted[job_info.job.jobid].failed
            job_log.log_group_error(self.logger, job_info.job, failed, msg or "", **kwargs)
        else:
            job_log.log_job_error(self.logger, job_info.job, msg, **kwargs)

    def handle_job_success(self, job: Job) -> None:
        """Commit the job once Snakemake has accepted its outputs, so that it is not repeated."""
        super().handle_job_success(job)
        self._commit(job)

    def handle_job_error(self, job: Job) -> None:
        super().handle_job_error(job)
        if (outcome := self._uncommitted.get(job.jobid)) is not None:
            job_log.veto_retry(self.logger, job, outcome)
        if self._run is not None:
            self._run.proposals.failed(job)
            self._run.left.pop(job.jobid, None)
        self._commit(job, failed=True)

    def _commit(self, job: Job, *, failed: bool = False) -> None:
        outcome = self._uncommitted.pop(job.jobid, None)
        if outcome is not None and self._run is not None and outcome.number in self._run.requested:
            try:
                self._run.engine.commit(outcome, taken=not (failed and outcome.succeeded))
            except JournalError as error:
                # Raising here would make Snakemake cancel the other jobs.
                self.logger.warning(
                    f"{job.name}: its end could not be written to the journal. {error}"
                )
            for _, measured in self._run.measured.pop(job.jobid, ()):
                measured.unlink(missing_ok=True)

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:  # noqa: ARG002
        """Cancel all jobs of this run, unless they are to be left running.

        Snakemake calls this also for an error of one job on this machine: an input function behind
        a checkpoint that raises, or metadata that cannot be written. Nobody has asked to cancel the
        others then. The journal knows them: Snakemake's own list is empty while a cycle runs.
        """
        # If the user did not end the run, an error of Snakemake or of this plugin did.
        error = sys.exception()
        self._ending = "failed" if isinstance(error, Exception) else "killed"
        if self._run is None or self._run.closed:
            return
        if self._interruption.detached:
            self.logger.info(DETACHED)
            return
        if isinstance(error, Exception):
            self._leave_running(error)
            return
        self.logger.info("Cancelling the jobs at the sites.")
        try:
            left = self._run.engine.cancel(at_once=self._interruption.at_once)
        except KeyboardInterrupt:
            left = self._run.engine.cancel(at_once=True)
        if not left:
            self.logger.info("The sites have confirmed that no job of this run still runs.")
        for record in left:
            self.logger.warning(
                f"{record.name}: its job {', '.join(record.site_jobs) or record.id} at"
                f" {record.site} did not confirm that it was cancelled and may still run."
                " The next run in this directory reattaches it."
            )

    def _leave_running(self, error: Exception) -> None:
        self._interruption.detached = True
        self.logger.error(NO_SPACE if is_disk_full(error) else FAILED_HERE)

    def _close_run(self, how: Ending) -> None:
        if self._run is None:
            return
        detached, at_once = self._interruption.detached, self._interruption.at_once
        if detached and not at_once and (records := self._run.engine.presubmit()):
            self.logger.info(presubmitted_message(records))
        self._run.close("detached" if detached else how, tidy=not (detached or at_once))

    def _remark_idle_pools(self) -> None:
        with suppress(JournalError):
            for pool in usage_by_pool(read_last_allocations(Path.cwd() / STATE), ()):
                if pool.advice:
                    self.logger.warning(f"{pool.advice}.")

    def shutdown(self) -> None:
        super().shutdown()
        self._close_line()
        how = self._ending or (
            "failed" if any(True for _ in self.dag.needrun_jobs()) else "finished"
        )
        words = {"finished": "succeeded", "killed": "cancelled"}.get(how, "failed")
        try:
            try:
                if self._notices is not None:
                    outcome = "detached" if self._interruption.detached else words
                    self._notices.end(outcome, self._used_sites())
            finally:
                self._close_run(how)
                self._interruption.over()
        finally:
            if self._notices is not None:
                self._notices.wait(at_once=self._interruption.at_once)
        if self._run is not None:
            self._remark_idle_pools()
        if failed := describe_failures(self.workflow, self._failures):
            self.logger.error(printable(sum_up_failures(failed)))
        if self._interruption.detached and isinstance(sys.exception(), SystemExit):
            # Otherwise Snakemake would report that a job did not complete successfully, and run
            # the workflow's onerror.
            raise SystemExit(1)
