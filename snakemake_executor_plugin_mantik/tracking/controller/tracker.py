"""Tracking as the engine sees it: an observer that writes to the outbox and waits for run ids.

Nothing here may fail a job: whatever goes wrong with tracking is told once, and the job goes on.
"""

import asyncio
import hashlib
import importlib.util
import shlex
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

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
from snakemake_executor_plugin_mantik.tracking import store
from snakemake_executor_plugin_mantik.tracking.controller.courier import MADE_WAIT_S, Courier
from snakemake_executor_plugin_mantik.tracking.controller.identities import Identities
from snakemake_executor_plugin_mantik.tracking.controller.invocation import (
    Ending,
    Invocation,
    settle_invocations,
)
from snakemake_executor_plugin_mantik.tracking.figures import job_figures
from snakemake_executor_plugin_mantik.tracking.ledger import JobRow, Ledger
from snakemake_executor_plugin_mantik.tracking.outbox import EventKind, Outbox, RunRecord
from snakemake_executor_plugin_mantik.tracking.run import (
    TrackedRun,
    TrackingTarget,
    run_tags,
    user_name,
)
from snakemake_executor_plugin_mantik.tracking.worker.process import OUTBOX
from snakemake_executor_plugin_mantik.tracking.workflow import ARTIFACT_FOLDER, TrackedWorkflow

_END_WAIT_S = 30.0
"""Seconds that the end of a workflow waits, at most, until MLflow knows everything."""
_MISSING = (
    "MLproject runs are not tracked: MLflow is not installed here"
    " (pip install 'snakemake-executor-plugin-mantik[mlflow]')."
)
_STATUS: Final[Mapping[How, str]] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "killed": "KILLED",
}


class Tracker(Observer):
    """Makes jobs, and the workflow that they belong to, MLflow runs.

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
        wait_s: float = MADE_WAIT_S,
        paces: Mapping[str, float] | None = None,
    ) -> None:
        """Prepare; nothing is started before there is something to track.

        Args:
            workdir: the workflow's directory.
            target: where the runs go.
            configs: the text of each site's backend config.
            mask: takes secrets out of a text.
            notify: writes a line to the user's log.
            workflow: the one whose jobs are run; None if there are only earlier ones' to be ended.
            direct: what jobs are given that log to the server themselves (`tracking.direct`);
                nothing: what they log is carried over.
            wait_s: seconds that a job is submitted later, at most, because it waits for its run.
            paces: how many jobs a second are submitted to each site, at most.
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
        self._courier = Courier(workdir, log, notify, self._tracked, wait_s)
        self._identities = Identities(target, self._courier, paces or {})
        self._writing: set[asyncio.Task[None]] = set()
        self._config_paths: dict[str, str] = {}
        # The projects of which git has been asked already; None is the workflow's directory.
        self._asked: set[PurePosixPath | None] = set()

    # Before and after the engine's life

    def start(self, *, tracked: bool, open_tries: Collection[str]) -> None:
        """Start the worker if runs will be tracked, or an earlier controller left some untold.

        Args:
            tracked: whether jobs are known that will be.
            open_tries: tries of earlier runs that a site may know, or has the results of.
        """
        known = (self._directory / OUTBOX).exists()
        if not tracked and not known:
            return
        try:
            if not self._open():
                return
            settle_invocations(self._box, open_tries, self._identity)
            # What an earlier run began with tracked jobs is gone on with, whatever is left of it.
            unended = self._identity and Ledger(self._box).unended(self._identity)
            self._recording = tracked or bool(unended)
            if tracked or self._box.pending():
                self._courier.wake()
        except (OSError, sqlite3.Error) as error:
            self._broken(error)

    def set_pipeline(self, pipeline: Mapping[str, object]) -> None:
        """What jobs the workflow has, and which needs which (`picturing.picture`). For any thread.

        What it is at last counts.
        """
        if self._invocation is not None:
            self._invocation.pipeline = pipeline

    @property
    def shows_pipeline(self) -> bool:
        """Whether it was told, and so is to be told at last."""
        return self._invocation is not None and self._invocation.pipeline is not None

    @property
    def wants_pipeline(self) -> bool:
        """Whether there is a run that would show it, and it is not known yet. For any thread."""
        return self._invocation is not None and self._invocation.pipeline is None and not self._off

    def end(self, how: Ending, words: str = "") -> None:
        """How this run of Snakemake ends; to be called between the engine's end and `close`."""
        if self._invocation is None or self._off:
            return
        try:
            self._invocation.end(how, words)
        except (OSError, sqlite3.Error) as error:
            self._broken(error)

    def close(
        self, wait_s: float = _END_WAIT_S, *, open_tries: Collection[str] | None = None
    ) -> None:
        """The engine has ended: wait until MLflow knows everything, but not for ever.

        Args:
            wait_s: seconds to wait at most.
            open_tries: those that a site may know, where workflows without any are over.
        """
        if self._outbox is None:
            return
        try:
            if open_tries is not None:
                settle_invocations(self._box, open_tries)
            if self._box.pending():
                self._courier.wake()
            told = self._courier.close(wait_s)
            left = self._outbox.pending()
            self._outbox.close()
        except (OSError, sqlite3.Error):
            return
        if left and wait_s:
            how = "" if told else "; that goes on in the background"
            self._notify(
                f"MLflow does not know all of {left} runs yet{how}. To tell it what is left, at any"
                f" time: smk-mantik track -d {shlex.quote(str(self._workdir))}"
            )

    def _open(self) -> bool:
        """Open the outbox; whether runs can be tracked."""
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
        self._courier.release()
        self._notify(f"Runs are not tracked from now on: {error} ({self._directory}).")

    # What the engine tells

    async def prepare(
        self, request: JobRequest, record: TryRecord, workspace: str
    ) -> JobExtras | None:
        """The job's own store, and its run's id in the environment."""
        run = request.subject if isinstance(request.subject, TrackedRun) else None
        if run is None and not self._recording:
            return None
        try:
            if not self._open() or self._invocation is None:
                return None
            self._recording = True
            job = self._invocation.record(request, record)
            self._changed()
            if run is None:
                return None
            await self._add(run, record, job)
            identity = await self._identities.of(record, self._box)
            known = self._box.run(record.id)
            assert known is not None
        except (OSError, sqlite3.Error) as error:
            self._broken(error)
            return None
        if _is_direct(known):
            found = store.run_variables(identity)
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
            ),
            store.worker_variables(workspace, record.id, identity),
            live=LiveView(store.copy_directory(record.id), store.GROWING),
        )

    async def _add(self, run: TrackedRun, record: TryRecord, job: JobRow) -> None:
        assert self._invocation is not None
        if self._box.run(record.id) is None:
            made = await self._tags(run, record)
            # A later try is a run of its own, in the directory of the one that was asked for.
            asked = self._target.run_id
            adopted = asked if asked and not self._box.adopted(asked) else ""
            if asked and not adopted:
                made |= {"mantik.run": asked}
            # Where somebody asked for one run, there is none above it.
            parent = "" if asked else await self._invocation.make()
            self._tracked |= {parent} - {""}
            before = Ledger(self._box).before(record.id, record.job)
            data = {
                "name": record.name,
                "tags": made | {"mantik.attempt": str(job.attempt)},
                "params": run.values(self._mask),
                "experiment_id": self._target.experiment_id,
                "experiment": self._target.experiment,
                "config": self._config(record.site),
                "parent": parent,
                "retry_of": before.try_id if before is not None else "",
                "run_id": adopted,
                "direct": bool(self._direct),
            }
            self._box.add_run(record.id, self._target.uri, data)
        self._tracked.add(record.id)

    async def _tags(self, run: TrackedRun, record: TryRecord) -> dict[str, str]:
        assert self._workflow is not None
        make = partial(run_tags, run, record, self._workdir, self._workflow.snakefile)
        project = run.call.project if run.call is not None else None
        if project in self._asked:
            return make()
        found = await asyncio.to_thread(make)
        self._asked.add(project)
        return found

    def _config(self, site: str) -> str:
        """The local path, relative, of a site's backend config without secrets."""
        if site not in self._config_paths:
            text = self._mask(self._configs.get(site, ""))
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            path = f"{store.DIRECTORY}/configs/{digest}/backend-config.yaml"
            if not (self._workdir / path).exists():
                (self._workdir / path).parent.mkdir(parents=True, exist_ok=True)
                (self._workdir / path).write_text(text, encoding="utf-8")
            self._config_paths[site] = path
        return self._config_paths[site]

    def submitting(self, record: TryRecord, spec: JobSpec, script: str) -> None:
        """Keep what it asks for, and the script for the run's artifacts."""
        if self._recording:
            self._record(lambda ledger: ledger.asked(record.id, spec.cores))
        if record.id in self._tracked:
            task = asyncio.create_task(asyncio.to_thread(self._keep_script, spec, script))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    def _keep_script(self, spec: JobSpec, script: str) -> None:
        # What it carries is data of the job, and may be large.
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
        """The run's tags tell where the job is."""
        self._record(lambda ledger: ledger.queued(record.id))
        self._note(record, EventKind.SUBMITTED, {"job": site_job, "queue": queue})

    def waiting(self, record: TryRecord, why: str) -> None:
        """A tag tells why the job cannot start."""
        self._note(record, EventKind.WAITING, {"why": why})

    def started(self, record: TryRecord) -> None:
        """The run is running."""
        self._record(lambda ledger: ledger.started(record.id))
        self._note(record, EventKind.STARTED, {})

    def logged(self, record: TryRecord) -> None:
        """What the job has logged so far goes to MLflow."""
        self._note(record, EventKind.LIVE, {})

    def ended(self, record: TryRecord, end: JobEnd) -> None:
        """The run is over; what the job logged goes to MLflow."""
        data = {
            "status": _STATUS[end.how],
            "time": time.time(),
            "words": end.words,
            "reason": str(end.reason or ""),
            "exit_code": end.exit_code,
            "log": str(end.log) if end.log is not None else "",
        }

        def write(ledger: Ledger) -> None:
            ledger.ended(record.id, _STATUS[end.how], ran=end.ran, cpu=end.cpu, note=end.words)
            data["metrics"] = job_figures(end, ledger.job(record.id))

        self._record(write)
        self._note(record, EventKind.END, data)

    def _record(self, write: Callable[[Ledger], None]) -> None:
        """Note among the workflow's jobs what became of one."""
        if self._off or self._outbox is None:
            return
        try:
            write(Ledger(self._outbox))
            self._changed()
        except (OSError, sqlite3.Error) as error:
            self._broken(error)

    def _changed(self) -> None:
        if self._invocation is not None:
            self._invocation.changed(self._courier.wake, self._broken)

    def _note(self, record: TryRecord, kind: EventKind, data: Mapping[str, Any]) -> None:
        # Of tries of earlier runs only the end is told here, when they are given up.
        if self._off or self._outbox is None:
            return
        if kind is not EventKind.END and record.id not in self._tracked:
            return
        try:
            if self._box.add(record.id, kind, data):
                self._courier.wake()
            elif (
                kind is EventKind.END
                and self._box.settled(record.id)
                and self._is_tracked(record.id)
            ):
                # Told by an earlier controller already; fetched again.
                shutil.rmtree(self._workdir / store.try_directory(record.id), ignore_errors=True)
        except (OSError, sqlite3.Error) as error:
            self._broken(error)

    def _is_tracked(self, try_id: str) -> bool:
        return try_id in self._tracked or self._box.run(try_id) is not None

    def leftover(self, record_id: str) -> str | None:
        """The try's directory, if it is tracked."""
        if self._outbox is None:
            return None
        try:
            run = self._box.run(record_id)
            has_store = run is not None and not _is_direct(run)
            return store.try_directory(record_id) if has_store else None
        except sqlite3.Error:
            return None


def _is_direct(run: RunRecord) -> bool:
    """Whether a job logs to the server itself: as it was sent, and if its run was known there."""
    return bool(run.data.get("direct")) and not run.own_id
