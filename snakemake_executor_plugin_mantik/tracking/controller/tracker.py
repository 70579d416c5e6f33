"""The engine's observer for tracking: it writes events to the outbox and waits for run ids.

Nothing here may fail a job: a failure of tracking is reported once, and the job continues.
"""

import asyncio
import importlib.util
import shlex
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.humanize import humanize_count
from snakemake_executor_plugin_mantik.common.installing import install_command
from snakemake_executor_plugin_mantik.config.settings import Timing
from snakemake_executor_plugin_mantik.engine.observer import (
    How,
    JobEnd,
    JobExtras,
    LiveView,
    Observer,
)
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.jobs.script import strip_inline
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec
from snakemake_executor_plugin_mantik.journal import TryRecord

from .. import store
from ..ledger import GOES_ON, JobRow, Ledger
from ..outbox import EventKind, Outbox, RunRecord
from ..run import TrackedRun, TrackingTarget, user_name
from ..segments import job_figures, segment_entry, sum_figures
from ..worker.process import OUTBOX
from ..workflow import ARTIFACT_FOLDER, TrackedWorkflow
from .invocation import Ending, Invocation, settle_invocations
from .job_runs import Identities, JobRuns
from .worker_client import WorkerClient

_END_WAIT_S = 30.0
"""The most seconds to wait at the end of a workflow until all events are published."""
_MISSING = (
    f"MLproject runs are not tracked: MLflow is not installed here ({install_command('mlflow')})."
)
_STATUS: Final[Mapping[How, str]] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "killed": "KILLED",
}


class Tracker(Observer):
    """Turns jobs and their workflow into MLflow runs.

    Between the engine's start and its end the outbox belongs to the engine's thread.
    """

    def __init__(
        self,
        workdir: Path,
        target: TrackingTarget,
        configs: Mapping[str, str],
        *,
        mask: Callable[[str], str],
        notify: Callable[[str], None],
        workflow: TrackedWorkflow | None = None,
        direct: Mapping[str, str] | None = None,
        pace: float = Timing.submissions_per_second,
    ) -> None:
        """Prepare; nothing starts before there is something to track.

        Args:
            workdir: the workflow's directory.
            target: the destination of the runs.
            configs: the text of each site's backend config.
            mask: removes secrets from a text.
            notify: writes a line to the user's log.
            workflow: the workflow to run; None to end only earlier workflows.
            direct: variables for jobs that log to the server directly (`controller.direct`); empty:
                this machine forwards what jobs log.
            pace: the most jobs per second that are submitted to a site.
        """
        self._direct = dict(direct or {})
        self._workdir = workdir
        self._directory = workdir / store.DIRECTORY
        self._target = target
        self._configs = configs
        self._mask = mask
        self._notify = notify
        self._workflow = workflow
        self._off = False
        self._outbox: Outbox | None = None
        self._invocation: Invocation | None = None
        self._recording = False
        self._tracked: set[str] = set()
        log = self._directory / "worker.log"
        self._worker = WorkerClient(workdir, log, notify, self._tracked)
        self._identities = Identities(target, self._worker, pace)
        self._writing: set[asyncio.Task[None]] = set()
        self._runs: JobRuns | None = None
        self._job_ids: dict[str, str] = {}

    # Before the engine starts and after it has ended

    def start(self, *, tracked: bool, open_tries: Collection[str]) -> None:
        """Start the worker if jobs will be tracked, or earlier events are unpublished.

        `tracked` is whether known jobs will be tracked. `open_tries` are tries of earlier runs that
        may be known at a site, or have results there.
        """
        known = (self._directory / OUTBOX).exists()
        if not tracked and not known:
            return
        try:
            if not self._open():
                return
            settle_invocations(self._box, open_tries, self._identity)
            # Continue a workflow that began with tracked jobs, even if no tracked job is left.
            unended = self._identity and Ledger(self._box).unended(self._identity)
            self._recording = tracked or bool(unended)
            if tracked or self._box.pending():
                self._worker.wake()
        except (OSError, sqlite3.Error) as error:
            self._broken(error)

    def set_pipeline(self, pipeline: Mapping[str, object]) -> None:
        """Set the workflow's jobs and their dependencies (see `pictures.assemble`).

        May be called again, and from any thread; the last call counts. Has no effect before there
        is something to track.
        """
        if self._invocation is not None:
            self._invocation.pipeline = pipeline

    @property
    def shows_pipeline(self) -> bool:
        """Whether a pipeline was set, so that its final state should be set too."""
        return self._invocation is not None and self._invocation.pipeline is not None

    @property
    def wants_pipeline(self) -> bool:
        """Whether a run could show the pipeline, but none is set yet. For any thread."""
        return self._invocation is not None and self._invocation.pipeline is None and not self._off

    def end(self, how: Ending, words: str = "") -> None:
        """Record how Snakemake ends. Call it between the engine's end and `close`."""
        if self._invocation is None or self._off:
            return
        try:
            self._invocation.end(how, words)
        except (OSError, sqlite3.Error) as error:
            self._broken(error)

    def close(
        self, wait_s: float = _END_WAIT_S, *, open_tries: Collection[str] | None = None
    ) -> None:
        """Wait for all events to be published, up to `wait_s`. Call it when the engine has ended.

        If `open_tries` is given (tries that may be known at a site, or have results there), also
        end the workflows without any.
        """
        if self._outbox is None:
            return
        try:
            if open_tries is not None:
                settle_invocations(self._box, open_tries)
            if self._box.pending():
                self._worker.wake()
            worker_ended = self._worker.close(wait_s)
            left = self._outbox.pending()
            self._outbox.close()
        except (OSError, sqlite3.Error):
            return
        if left and wait_s:
            how = "" if worker_ended else "; publishing continues in the background"
            self._notify(
                f"MLflow does not know everything about {humanize_count(left, 'run')} yet{how}. To"
                " publish the rest at any time: smk-mantik track -d"
                f" {shlex.quote(str(self._workdir))}"
            )

    def _open(self) -> bool:
        """Open the outbox; return whether runs can be tracked."""
        if self._outbox is None and not self._off:
            if importlib.util.find_spec("mlflow") is None:
                self._off = True
                self._notify(_MISSING)
                return False
            self._directory.mkdir(parents=True, exist_ok=True)
            self._outbox = Outbox(self._directory / OUTBOX)
            if self._workflow is not None:
                self._invocation = Invocation(
                    self._outbox, self._workflow, self._target, self._workdir,
                    configs=self._configs, mask=self._mask,
                )  # fmt: skip
                self._runs = JobRuns(
                    self._outbox, self._invocation, self._workflow, self._target, self._workdir,
                    configs=self._configs, mask=self._mask, direct=bool(self._direct),
                )  # fmt: skip
        return not self._off

    @property
    def _identity(self) -> str:
        return self._workflow.identity(self._target) if self._workflow is not None else ""

    @property
    def _box(self) -> Outbox:
        assert self._outbox is not None
        return self._outbox

    def _broken(self, error: Exception) -> None:
        self._off = True
        self._worker.release()
        self._notify(f"Runs are not tracked from now on: {error} ({self._directory}).")

    # Events of the engine

    async def prepare(
        self, request: JobRequest, record: TryRecord, workspace: str, *, waits: bool = False
    ) -> JobExtras | None:
        """Return a tracked job's own store, and variables with its run's id.

        A job that logs to the server directly gets no store, but the variables to reach the server.
        None for a job without a run, or if tracking has failed.
        """
        run = request.subject if isinstance(request.subject, TrackedRun) else None
        if run is None and not self._recording:
            return None
        try:
            if not self._open() or self._invocation is None:
                return None
            self._recording = True
            job = self._invocation.record(request, record, waits=waits)
            taken_up = job.behind and not waits
            if record.after and record.site_jobs:  # the jobs that make its inputs have ended
                self._record(lambda ledger: ledger.queued(record.id))
            if taken_up:
                job = Ledger(self._box).take_up(job)
            self._changed()
            if run is not None and self._runs is not None:
                self._tracked |= {await self._runs.add(run, record, job), record.id} - {""}
            if taken_up and record.site_jobs:  # it was submitted while the one before ran
                self.submitted(record, record.site_jobs[-1], record.queue)
            if run is None:
                return None
            identity = await self._identities.of(record, self._box)
            known = self._box.run(record.id)
            assert known is not None
        except (OSError, sqlite3.Error) as error:
            self._broken(error)
            return None
        members = {number: given for number, (given, _) in known.members.items()}
        of_members = store.member_variables(workspace, record.id, members)
        if _is_direct(known):
            found = store.run_variables(identity) | of_members
            found.pop("MANTIK_MEMBER_ENDS", None)  # there is no store
            return JobExtras("", variables=found, secrets=self._direct)
        return JobExtras(
            store.store_directory(record.id),
            store.store_skeleton(
                workspace,
                record.id,
                identity,
                name=record.name,
                user=user_name(),
                now=known.created,
                members={
                    given: known.data["members"][str(n)]["name"] for n, given in members.items()
                },
            ),
            store.worker_variables(workspace, record.id, identity) | of_members,
            live=LiveView(
                store.copy_directory(record.id),
                store.GROWING,
                store.metrics_directory(record.id, identity),
            ),
        )

    def submitting(self, record: TryRecord, spec: JobSpec, script: str) -> None:
        """Record the requested cores, and write the script for the run's artifacts."""
        if self._recording:
            self._record(lambda ledger: ledger.asked(record.id, spec.cores))
        if record.id in self._tracked:
            task = asyncio.create_task(asyncio.to_thread(self._keep_script, spec, script))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    def _keep_script(self, spec: JobSpec, script: str) -> None:
        # The files inlined in a script are data of the job, and may be large.
        text = self._mask(strip_inline(script, spec))
        try:
            path = (
                self._workdir
                / store.try_directory(spec.paths.try_id)
                / ARTIFACT_FOLDER
                / "script.sh"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            self._notify(f"The script of {spec.name} is not kept for MLflow ({error}).")

    def submitted(self, record: TryRecord, site_job: str, queue: str) -> None:
        """Tag the run with the job's id and queue."""
        if self._is_behind(record):
            return
        self._job_ids[record.id] = site_job
        waits = bool(record.after) and not record.site_jobs
        self._record(lambda ledger: ledger.submitted(record.id, record.submitted, waits=waits))
        self._note(record, EventKind.SUBMITTED, {"job": site_job, "queue": queue})

    def waiting(self, record: TryRecord, why: str) -> None:
        """Tag the run with the reason why the job cannot start."""
        self._note(record, EventKind.WAITING, {"why": why})

    def started(self, record: TryRecord) -> None:
        self._record(lambda ledger: ledger.started(record.id))
        self._note(record, EventKind.STARTED, {})

    def logged(self, record: TryRecord) -> None:
        """Publish what the job has logged so far."""
        self._note(record, EventKind.LIVE, {})

    def ended(self, record: TryRecord, end: JobEnd) -> None:
        """Publish everything that the job logged, and end the run unless the job goes on."""
        if self._is_behind(record):
            self._drop(record)
            return
        job = self._ledger_row(record.id)
        goes_on = end.successor == "next segment" or (
            end.successor == "same segment" and job is not None and bool(job.follows)
        )
        status = GOES_ON if goes_on else _STATUS[end.how]
        data = {
            "status": "" if goes_on else status,
            "goes_on": goes_on,
            "time": end.ended or time.time(),
            "words": end.words,
            "times": end.times.words,
            "reason": str(end.reason or ""),
            "exit_code": end.exit_code,
            "log": str(end.log) if end.log is not None else "",
        }

        def write(ledger: Ledger) -> None:
            told = f"ran {end.times.words}" if end.times.words else ""
            ledger.ended(
                record.id, status, ended=end.ended, ran=end.ran, waited=end.waited, cpu=end.cpu,
                note=", ".join(filter(None, [end.words, told])),
            )  # fmt: skip
            row = ledger.job(record.id)
            known = self._box.run(record.id)
            one = known is not None and known.data.get("one", False)
            if not record.segments and not one:
                data["metrics"] = job_figures(end, row)
                return
            follows = known.data.get("follows", "") if known is not None else ""
            before = self._box.end_of(follows).get("segments", [])
            same = end.successor == "same segment"
            if not same:
                site_job = self._job_ids.get(record.id) or " ".join(record.site_jobs[-1:])
                last = before[-1] if before else None
                number = len(before) + 1 if one else record.segment + 1
                entry = segment_entry(record, end, row, last, number=number, job=site_job)
                before = [*before, entry]
            data["segments"] = before
            if not same or not goes_on:
                data["metrics"] = sum_figures(before, None if goes_on else end.exit_code)
                data["step"] = len(before) - 1

        self._record(write)
        self._note(record, EventKind.END, data)

    def _ledger_row(self, try_id: str) -> JobRow | None:
        if self._off or self._outbox is None:
            return None
        try:
            return Ledger(self._outbox).job(try_id)
        except sqlite3.Error as error:
            self._broken(error)
            return None

    def _is_behind(self, record: TryRecord) -> bool:
        """Return whether a try is a segment that waits for the end of the one before."""
        job = self._ledger_row(record.id) if record.follows else None
        return job is not None and job.behind

    def _drop(self, record: TryRecord) -> None:
        """Forget a segment that was given up while it waited."""

        def write(ledger: Ledger) -> None:
            ledger.ended(record.id, "KILLED")
            if self._box.run(record.id) is not None:
                self._box.drop(record.id)

        self._record(write)
        shutil.rmtree(self._workdir / store.try_directory(record.id), ignore_errors=True)

    def _record(self, write: Callable[[Ledger], None]) -> None:
        """Update a job's row in the ledger."""
        if self._off or self._outbox is None:
            return
        try:
            write(Ledger(self._outbox))
            self._changed()
        except (OSError, sqlite3.Error) as error:
            self._broken(error)

    def _changed(self) -> None:
        if self._invocation is not None:
            self._invocation.changed(self._worker.wake, self._broken)

    def _note(self, record: TryRecord, kind: EventKind, data: Mapping[str, Any]) -> None:
        # Tries of earlier runs report only their end here, when they are given up.
        if self._off or self._outbox is None:
            return
        if kind is not EventKind.END and record.id not in self._tracked:
            return
        try:
            if self._box.add(record.id, kind, data):
                self._worker.wake()
            elif (
                kind is EventKind.END
                and self._box.settled(record.id)
                and self._is_tracked(record.id)
            ):
                # An earlier controller has published it, and the store was downloaded again.
                shutil.rmtree(self._workdir / store.try_directory(record.id), ignore_errors=True)
        except (OSError, sqlite3.Error) as error:
            self._broken(error)

    def _is_tracked(self, try_id: str) -> bool:
        return try_id in self._tracked or self._box.run(try_id) is not None

    def leftover(self, record_id: str) -> str | None:
        """Return the try's directory, if the try is tracked and has a store."""
        if self._outbox is None:
            return None
        try:
            run = self._box.run(record_id)
            has_store = run is not None and not _is_direct(run)
            return store.try_directory(record_id) if has_store else None
        except sqlite3.Error:
            return None


def _is_direct(run: RunRecord) -> bool:
    """Return whether a job logs to the server directly: as requested, and its run exists there."""
    return bool(run.data.get("direct")) and not run.own_id
