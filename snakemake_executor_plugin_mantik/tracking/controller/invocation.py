"""A workflow's own run in the controller: create it once, continue it, and end it correctly."""

import asyncio
import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.journal import TryRecord, TryState

from .. import workflow as values
from ..ledger import JobRow, Ledger
from ..outbox import EventKind, Outbox
from ..run import TrackingTarget
from ..store import try_directory
from ..workflow import TrackedWorkflow

_UPDATE_S = 60.0
"""The least seconds between two updates of a workflow's run (counts and pictures)."""
SNAKEFILE_BYTES: Final = 1 << 20
"""The largest Snakefile that becomes an artifact, in bytes."""

Ending = Literal["finished", "failed", "killed", "detached"]
"""How Snakemake ended; detached: its jobs continue, and the next Snakemake takes them up."""
_STATUS: Final[Mapping[str, str]] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "killed": "KILLED",
}
_NO_NEXT: Final = "it was to go on in a next segment, and did not"
_UNSENT: Final = "its Snakemake ended before the job was submitted"
_DEAD: Final = "its Snakemake had ended, and no job of it was open any more"


class Invocation:
    """The workflow that this process runs, in the outbox. Belongs to the outbox's thread.

    All methods raise `sqlite3.Error` if the outbox cannot be used.

    Attributes:
        key: the workflow's key in the outbox; empty until its first job.
        pipeline: its jobs and their dependencies; None if unknown.
    """

    def __init__(
        self,
        outbox: Outbox,
        workflow: TrackedWorkflow,
        target: TrackingTarget,
        workdir: Path,
        *,
        configs: Mapping[str, str],
        mask: Callable[[str], str],
    ) -> None:
        """Prepare; nothing is written before the first job.

        `configs` holds the text of each site's backend config; `mask` removes secrets from a text.
        """
        self.key = ""
        self.pipeline: Mapping[str, object] | None = None
        self._kept: Mapping[str, object] | None = None
        self._outbox = outbox
        self._ledger = Ledger(outbox)
        self._workflow = workflow
        self._target = target
        self._workdir = workdir
        self._configs = configs
        self._mask = mask
        self._identity = workflow.identity(target)
        self._making = asyncio.Lock()
        self._continued = False
        self._updated = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def record(self, request: JobRequest, record: TryRecord, *, waits: bool = False) -> JobRow:
        """Record a job that is about to be submitted or adopted, and return its row.

        A new job joins this workflow. One of an earlier workflow stays with that one, which is
        continued if it is the same workflow and has not ended. `waits` is set for a segment whose
        turn has not come (`Observer.prepare`).
        """
        job = self._ledger.job(record.id)
        if job is None:
            job = self._ledger.add(
                record.id, self._begin(), job=record.job, rule=record.rule, name=record.name,
                site=record.site, members=tuple(request.members), follows=record.follows,
                behind=waits,
            )  # fmt: skip
        elif job.over and record.state is TryState.PLANNED:
            job = self._ledger.revive(job)
        elif job.workflow == self._ledger.unended(self._identity):
            self._begin()
        return job

    def _begin(self) -> str:
        """Return the workflow's key: that of an open workflow to continue, or a new one."""
        if not self.key:
            self.key = self._ledger.unended(self._identity)
            self._continued = bool(self.key)
            if not self.key:
                self.key = str(uuid.uuid4())
                self._ledger.begin(self.key, self._identity)
        return self.key

    async def make(self) -> str:
        """Request the workflow's run, before those of its jobs, and return its key."""
        async with self._making:
            key = self._begin()
            if self._outbox.run(key) is None:
                data = await asyncio.to_thread(self._data, key)
                self._outbox.add_run(key, self._target.uri, data)
        return key

    def _data(self, key: str) -> dict[str, Any]:
        self._keep_files(self._workdir / try_directory(key))
        return {
            "workflow": True,
            "name": self._workflow.name(self._workdir),
            "tags": values.workflow_tags(
                self._workflow, key, self._target, self._workdir, self._mask
            ),
            "params": values.flatten_config(self._workflow.config, self._mask),
            "experiment_id": self._target.experiment_id,
            "experiment": self._target.experiment,
        }

    def _keep_files(self, directory: Path) -> None:
        """Write the files that become artifacts, without secrets."""
        texts = {f"backend-configs/{name}.yaml": text for name, text in self._configs.items()}
        snakefile = self._workdir / self._workflow.snakefile
        if snakefile.is_file() and snakefile.stat().st_size <= SNAKEFILE_BYTES:
            texts["Snakefile"] = snakefile.read_text(encoding="utf-8", errors="replace")
        for name, text in texts.items():
            path = directory / values.ARTIFACT_FOLDER / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._mask(text), encoding="utf-8")

    # While jobs run

    def changed(self, wake: Callable[[], None], broken: Callable[[Exception], None]) -> None:
        """Update the workflow's run after a change, now or `_UPDATE_S` after the last update.

        Call it in the thread of a running event loop.

        Args:
            wake: called when there is an event to publish.
            broken: called with an error of the outbox.
        """
        if self._timer is not None or not self.key:
            return

        def update() -> None:
            self._timer = None
            try:
                self._update()
                wake()
            except (OSError, sqlite3.Error) as error:
                broken(error)

        loop = asyncio.get_running_loop()
        wait = self._updated + _UPDATE_S - time.monotonic()
        self._timer = loop.call_later(max(0.0, wait), update)

    def _update(self, **facts: object) -> None:
        self._updated = time.monotonic()
        self._keep_pipeline()
        data = {"time": time.time(), "continued": self._continued, **facts}
        self._outbox.add(self.key, EventKind.UPDATE, data)

    def _keep_pipeline(self) -> None:
        if self.pipeline is not None and self.pipeline is not self._kept:
            self._kept = self.pipeline
            self._ledger.set_pipeline(self.key, json.dumps(self.pipeline))

    # The end

    def end(self, how: Ending, words: str = "") -> None:
        """Record how Snakemake ends. Call it when the engine has ended."""
        if not self.key:
            return
        self._keep_pipeline()
        if how == "detached":
            self._update(detached=datetime.now(UTC).isoformat(timespec="seconds"))
        else:
            status = "FAILED" if how == "failed" else "KILLED"
            end_unfinished(self._outbox, status, _NO_NEXT, workflow=self.key)
            _end(self._outbox, self.key, _STATUS[how], words, continued=self._continued)


def settle_invocations(outbox: Outbox, open_tries: Collection[str], but: str = "") -> int:
    """End the runs of workflows whose Snakemake is gone and whose jobs are over.

    Call it only while no other Snakemake can run in the directory.

    Args:
        outbox: the outbox of the directory.
        open_tries: tries that may be known at a site, or have results there.
        but: the identity of a workflow that may be continued, and is left out.

    Returns:
        The number of workflows ended.
    """
    ledger = Ledger(outbox)
    over = ledger.over(open_tries, but)
    for key in over:
        now = time.time()
        for try_id in ledger.open_jobs(key):
            ledger.ended(try_id, "KILLED")
            if (job := ledger.job(try_id)) is not None and job.behind:
                outbox.drop(try_id)
                continue
            data = {"status": "KILLED", "time": now, "words": _UNSENT, "exit_code": None, "log": ""}
            outbox.add(try_id, EventKind.END, data)
        end_unfinished(outbox, "KILLED", _NO_NEXT, workflow=key)
        _end(outbox, key, "KILLED", _DEAD, continued=True)
    return len(over)


def end_unfinished(
    outbox: Outbox, status: str, words: str, *, workflow: str = "", job: str = "", but: str = ""
) -> None:
    """End the runs of jobs that were to go on in a next segment and did not.

    The arguments after `words` choose the jobs, as those of `Ledger.unfinished`.
    """
    ledger = Ledger(outbox)
    for try_id in ledger.unfinished(workflow=workflow, job=job, but=but):
        ledger.conclude(try_id, status, words)
        outbox.conclude(try_id, {"status": status, "words": words})


def _end(outbox: Outbox, key: str, status: str, words: str, *, continued: bool) -> None:
    data = {"status": status, "time": time.time(), "words": words, "continued": continued}
    outbox.add(key, EventKind.END, data)
    Ledger(outbox).end(key)
