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
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from snakemake_executor_plugin_mantik.engine.observe import Addition, Ended, How
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.jobs.script import render
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.tracking import store
from snakemake_executor_plugin_mantik.tracking.messenger import Messenger
from snakemake_executor_plugin_mantik.tracking.outbox import Kind, Outbox
from snakemake_executor_plugin_mantik.tracking.run import Target, TrackedRun, tags, user
from snakemake_executor_plugin_mantik.tracking.worker import OUTBOX

START_WAIT_S = 30.0
"""Seconds that jobs wait, at most, until the worker is there: to import MLflow takes six."""
CREATE_WAIT_S = 10.0
"""Seconds that a job then waits, at most, for MLflow to make its run."""
END_WAIT_S = 30.0
"""Seconds that the end of a workflow waits, at most, until MLflow knows everything."""
WORKERS = 3
"""Workers that are started in the place of one that died, the first one included."""
MISSING = (
    "MLproject runs are not tracked: MLflow is not installed here"
    " (pip install 'snakemake-executor-plugin-mantik[mlflow]')."
)
_STATUS: Final[Mapping[How, str]] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "killed": "KILLED",
}


class Tracker:
    """Makes each run of an MLproject's entry point an MLflow run. An `Observer` of the engine."""

    def __init__(
        self,
        workdir: Path,
        target: Target,
        configs: Mapping[str, str],
        *,
        mask: Callable[[str], str],
        tell: Callable[[str], None],
    ) -> None:
        """Prepare; nothing is started before there is something to track.

        Args:
            workdir: the workflow's directory.
            target: where the runs go.
            configs: the text of each site's backend config.
            mask: takes secrets out of a text.
            tell: writes a line to the user's log.
        """
        self._workdir = workdir
        self._directory = workdir / store.DIRECTORY
        self._target = target
        self._configs = configs
        self._mask = mask
        self._tell = tell
        self._off = False
        self._outbox: Outbox | None = None
        self._messenger: Messenger | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tracked: dict[str, str] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._up = asyncio.Event()
        self._workers = 0
        self._silent = False
        self._earlier_told = False
        self._ready = False
        self._writing: set[asyncio.Task[None]] = set()

    # Before and after the engine's life

    def start(self, *, tracked: bool) -> None:
        """Start the worker if runs will be tracked, or an earlier controller left some untold."""
        known = (self._directory / OUTBOX).exists()
        if not tracked and not known:
            return
        try:
            if self._open() and (tracked or self._box.pending()):
                self._wake()
        except (OSError, sqlite3.Error) as error:
            self._broken(error)

    def close(self, wait_s: float = END_WAIT_S) -> None:
        """The engine has ended: wait until MLflow knows everything, but not for ever."""
        if self._outbox is None:
            return
        try:
            if self._box.pending():
                self._wake()
            told = self._messenger is None or self._messenger.close(wait_s)
            left = self._outbox.pending()
            self._outbox.close()
        except (OSError, sqlite3.Error):
            return
        if left and wait_s:
            how = "" if told else "; that goes on in the background"
            self._tell(
                f"MLflow does not know all of {left} runs yet{how}. To tell it what is left, at any"
                f" time: smk-mantik track -d {shlex.quote(str(self._workdir))}"
            )

    def _open(self) -> bool:
        """Open the outbox; whether runs can be tracked."""
        if self._outbox is None and not self._off:
            if importlib.util.find_spec("mlflow") is None:
                self._off = True
                self._tell(MISSING)
                return False
            self._directory.mkdir(parents=True, exist_ok=True)
            self._outbox = Outbox(self._directory / OUTBOX)
        return not self._off

    @property
    def _box(self) -> Outbox:
        assert self._outbox is not None
        return self._outbox

    def _broken(self, error: Exception) -> None:
        self._off = True
        self._release()
        self._tell(f"Runs are not tracked from now on: {error} ({self._directory}).")

    # The worker

    def _wake(self) -> None:
        if self._messenger is None or (not self._messenger.alive and self._workers < WORKERS):
            log = self._directory / "worker.log"
            self._ready = False
            self._workers += 1
            self._messenger = Messenger(self._workdir, log, self._hear)
        self._messenger.wake()

    def _hear(self, answer: Mapping[str, Any]) -> None:
        """In the messenger's thread."""
        if "tell" in answer:
            self._tell(str(answer["tell"]))
        elif "ready" in answer:
            self._ready = True
        if self._loop is None or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._heard, answer)

    def _heard(self, answer: Mapping[str, Any]) -> None:
        """In the engine's thread."""
        if "try" in answer:
            self._silent = False
            future = self._waiting.pop(answer["try"], None)
            if future is not None and not future.done():
                future.set_result(None)
        elif "down" in answer:
            self._down(answer["down"], answer["tries"])
        elif "gone" in answer:
            self._release()
        elif "ready" in answer:
            self._up.set()

    def _down(self, why: str, tries: Sequence[str]) -> None:
        if self._tracked.keys().isdisjoint(tries):
            # Earlier runs went somewhere else: no job of this one has to do with that.
            if not self._earlier_told:
                self._earlier_told = True
                self._tell(f"MLflow cannot be told of {len(tries)} earlier runs. {why}")
            return
        if not self._silent:
            self._tell(f"MLflow cannot be told now; jobs go on, and it is told later. {why}")
        self._release()

    def _release(self) -> None:
        """Nobody waits any more, until MLflow answers again."""
        self._silent = True
        self._up.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    # What the engine tells

    async def prepare(
        self, request: JobRequest, record: TryRecord, workspace: str
    ) -> Addition | None:
        """The job's own store, and its run's id in the environment."""
        run = request.subject
        if not isinstance(run, TrackedRun):
            return None
        self._loop = asyncio.get_running_loop()
        try:
            if not self._open():
                return None
            await self._add(run, record)
            identity = await self._identity(record)
            await asyncio.to_thread(self._write, record, workspace, identity)
        except (OSError, sqlite3.Error) as error:
            self._broken(error)
            return None
        return Addition(
            store.store_directory(record.id), store.variables(workspace, record.id, identity)
        )

    async def _add(self, run: TrackedRun, record: TryRecord) -> None:
        if self._box.run(record.id) is None:
            made = await asyncio.to_thread(tags, run, record, self._workdir)
            # A later try is a run of its own, in the directory of the one that was asked for.
            asked = self._target.run_id
            adopted = asked if asked and not self._box.adopted(asked) else ""
            if asked and not adopted:
                made |= {"mantik.run": asked}
            config = await asyncio.to_thread(self._config, record.site)
            data = {
                "name": record.name,
                "tags": made,
                "params": dict(run.call.arguments),
                "experiment_id": self._target.experiment_id,
                "experiment": self._target.experiment,
                "config": config,
                "run_id": adopted,
            }
            self._box.add_run(record.id, self._target.uri, data)
        self._tracked[record.id] = record.name

    def _config(self, site: str) -> str:
        """The local path, relative, of a site's backend config without secrets."""
        text = self._mask(self._configs.get(site, ""))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = f"{store.DIRECTORY}/configs/{digest}/backend-config.yaml"
        if not (self._workdir / path).exists():
            (self._workdir / path).parent.mkdir(parents=True, exist_ok=True)
            (self._workdir / path).write_text(text, encoding="utf-8")
        return path

    async def _identity(self, record: TryRecord) -> store.Identity:
        """The run's id; one of ours if MLflow does not answer in time."""
        await self._made(record.id)
        known = self._box.run(record.id)
        assert known is not None
        if not known.run_id and not known.own_id:
            experiment = self._target.experiment or "Default"
            experiment_id = self._target.experiment_id or "0"
            self._box.give_own_id(record.id, uuid.uuid4().hex, experiment_id, experiment)
            known = self._box.run(record.id)
            assert known is not None
        return store.Identity(known.own_id or known.run_id, known.experiment_id, known.experiment)

    async def _made(self, try_id: str) -> None:
        """Wait until the run is made, within the limits."""
        known = self._box.run(try_id)
        assert known is not None
        assert self._loop is not None
        if known.run_id or known.own_id:
            return
        future = self._waiting[try_id] = self._loop.create_future()
        try:
            self._wake()
            if self._silent:
                return
            async with asyncio.timeout(START_WAIT_S):
                if self._ready:
                    self._up.set()
                await self._up.wait()
            async with asyncio.timeout(CREATE_WAIT_S):
                await future
        except TimeoutError:
            self._release()
        finally:
            self._waiting.pop(try_id, None)

    def _write(self, record: TryRecord, workspace: str, identity: store.Identity) -> None:
        root = self._workdir / store.store_directory(record.id)
        if root.exists():
            return
        new = root.with_name(f".{root.name}")
        shutil.rmtree(new, ignore_errors=True)
        store.write_skeleton(
            new, workspace, record.id, identity, name=record.name, user=user(), now=time.time()
        )
        new.rename(root)

    def submitting(self, record: TryRecord, spec: JobSpec) -> None:
        """Keep the script for the run's artifacts."""
        if record.id in self._tracked:
            task = asyncio.create_task(asyncio.to_thread(self._keep_script, record.id, spec))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    def _keep_script(self, try_id: str, spec: JobSpec) -> None:
        # What it carries is data of the job, and may be large.
        text = self._mask(render(replace(spec, inline=b"")))
        try:
            path = self._workdir / store.try_directory(try_id) / "script.sh"
            path.write_text(text, encoding="utf-8", errors="surrogateescape")
        except OSError as error:
            self._tell(f"The script of {spec.name} is not kept for MLflow ({error}).")

    def submitted(self, record: TryRecord, site_job: str, queue: str) -> None:
        """The run's tags tell where the job is."""
        self._note(record, Kind.SUBMITTED, {"job": site_job, "queue": queue})

    def started(self, record: TryRecord) -> None:
        """The run is running."""
        self._note(record, Kind.STARTED, {})

    def ended(self, record: TryRecord, end: Ended) -> None:
        """The run is over; what the job logged goes to MLflow."""
        self._note(
            record,
            Kind.END,
            {
                "status": _STATUS[end.how],
                "time": time.time(),
                "words": end.words,
                "exit_code": end.exit_code,
                "log": str(end.log) if end.log is not None else "",
            },
        )

    def _note(self, record: TryRecord, kind: Kind, data: Mapping[str, Any]) -> None:
        # Of tries of earlier runs only the end is told here, when they are given up.
        if self._off or self._outbox is None:
            return
        if kind is not Kind.END and record.id not in self._tracked:
            return
        try:
            if self._box.add(record.id, kind, data):
                self._wake()
            elif kind is Kind.END and self._box.settled(record.id) and self._is_tracked(record.id):
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
            return store.try_directory(record_id) if self._is_tracked(record_id) else None
        except sqlite3.Error:
            return None
