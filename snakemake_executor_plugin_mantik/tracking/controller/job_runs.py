"""Identify the runs of jobs, begin them in the outbox, or continue them with another segment."""

import asyncio
import hashlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

from snakemake_executor_plugin_mantik.journal import TryRecord

from .. import store
from ..ledger import GOES_ON, JobRow, Ledger
from ..outbox import EventKind, Outbox, RunRecord
from ..run import TrackedRun, TrackingTarget, run_tags
from ..store import RunIdentity
from ..workflow import TrackedWorkflow
from .invocation import Invocation, end_unfinished
from .worker_client import WorkerClient

_ANEW: Final = "it was to go on in a next segment, but began anew"


class JobRuns:
    """Adds tries to the outbox. Belongs to the outbox's thread."""

    def __init__(
        self,
        outbox: Outbox,
        invocation: Invocation,
        workflow: TrackedWorkflow,
        target: TrackingTarget,
        workdir: Path,
        *,
        configs: Mapping[str, str],
        mask: Callable[[str], str],
        direct: bool,
    ) -> None:
        """Prepare; the arguments are those of `Tracker`."""
        self._outbox = outbox
        self._invocation = invocation
        self._snakefile = workflow.snakefile
        self._target = target
        self._workdir = workdir
        self._configs = configs
        self._mask = mask
        self._direct = direct
        self._config_paths: dict[str, str] = {}
        # The projects whose git tags are cached already; None is the workflow's directory.
        self._asked: set[PurePosixPath | None] = set()

    async def add(self, run: TrackedRun, record: TryRecord, job: JobRow) -> str:
        """Track a try, unless it is tracked; return the key of a workflow's run made for that.

        Raises:
            OSError, sqlite3.Error: something cannot be written.
        """
        before = self._outbox.run(job.follows) if job.follows else None
        known = self._outbox.run(record.id)
        if before is None and known is None and run.one:
            before = self._try_before(record, job)
        if before is not None:
            self._continue(record, job, before)
        elif known is None:
            return await self._begin(run, record, job)
        return ""

    def _try_before(self, record: TryRecord, job: JobRow) -> RunRecord | None:
        """Return the try of the same workflow of which this one is a retry, in the same run."""
        before = Ledger(self._outbox).before(record.id, record.job)
        if before is None or before.workflow != job.workflow:
            return None
        found = self._outbox.run(before.try_id)
        return found if found is not None and found.data.get("one") else None

    async def _begin(self, run: TrackedRun, record: TryRecord, job: JobRow) -> str:
        # A job that begins anew does not go on from its last segment any more.
        end_unfinished(self._outbox, "KILLED", _ANEW, job=record.job, but=record.id)
        made = await self._tags(run, record)
        # A later try is a run of its own, in the directory of the requested one.
        requested = self._target.run_id
        adopted = requested if requested and not self._outbox.adopted(requested) else ""
        if requested and not adopted:
            made |= {"mantik.run": requested}
        # A requested run has no parent.
        parent = "" if requested else await self._invocation.make()
        before = Ledger(self._outbox).before(record.id, record.job)
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
            "direct": self._direct,
            "one": run.one,
        }
        if run.of_members:
            data["members"] = await self._members(run, record, job)
        self._outbox.add_run(record.id, self._target.uri, data)
        return parent

    async def _members(
        self, run: TrackedRun, record: TryRecord, job: JobRow
    ) -> dict[str, dict[str, Any]]:
        """Return the values to create the runs of a group's members with, by number."""
        found = {}
        for number, member in run.of_members.items():
            as_alone = replace(record, name=member.name, rule=member.rule)
            tags = await self._tags(member.run, as_alone)
            del tags["mantik.try"]  # that is the group's
            own = {"mantik.group": record.name, "mantik.attempt": str(job.attempt)}
            params = member.run.values(self._mask)
            found[str(number)] = {"name": member.name, "tags": tags | own, "params": params}
        return found

    def _continue(self, record: TryRecord, job: JobRow, before: RunRecord) -> None:
        """Track a segment, or a retry, in the run of the one before."""
        data = {
            "name": before.data["name"],
            "experiment_id": before.data["experiment_id"],
            "experiment": before.data["experiment"],
            "config": self._config(record.site),
            "direct": self._direct,
            "follows": before.try_id,
            "one": before.data.get("one", False),
        }
        if job.follows != before.try_id:
            data["retry"] = {"mantik.attempt": str(job.attempt), "mantik.site": record.site}
        self._outbox.continue_run(record.id, before, data)
        if not job.behind:
            self._end_earlier(before)

    def _end_earlier(self, last: RunRecord) -> None:
        """Add the ends of the segments up to `last` that no controller has written here."""
        ledger = Ledger(self._outbox)
        chain: list[RunRecord] = []
        each: RunRecord | None = last
        while each is not None:
            chain.append(each)
            each = self._outbox.run(str(each.data.get("follows", "")))
        end = {"status": "", "time": time.time(), "words": "", "exit_code": None, "log": ""}
        for run in reversed(chain):
            if not self._outbox.add(run.try_id, EventKind.END, end | {"goes_on": True}):
                continue
            row = ledger.job(run.try_id)
            if row is not None and row.behind:
                ledger.take_up(row)
            ledger.ended(run.try_id, GOES_ON)

    async def _tags(self, run: TrackedRun, record: TryRecord) -> dict[str, str]:
        make = partial(run_tags, run, record, self._workdir, self._snakefile)
        project = run.call.project if run.call is not None else None
        if project in self._asked:
            return make()
        found = await asyncio.to_thread(make)
        self._asked.add(project)
        return found

    def _config(self, site: str) -> str:
        """Return the relative local path of a site's backend config without secrets."""
        if site not in self._config_paths:
            text = self._mask(self._configs.get(site, ""))
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            path = f"{store.DIRECTORY}/configs/{digest}/backend-config.yaml"
            if not (self._workdir / path).exists():
                (self._workdir / path).parent.mkdir(parents=True, exist_ok=True)
                (self._workdir / path).write_text(text, encoding="utf-8")
            self._config_paths[site] = path
        return self._config_paths[site]


class Identities:
    """Assigns run ids to jobs. Belongs to the engine's thread."""

    def __init__(self, target: TrackingTarget, worker: WorkerClient, pace: float) -> None:
        """Prepare.

        Args:
            target: the destination of the runs.
            worker: has MLflow create the runs.
            pace: the most jobs per second that are submitted to a site.
        """
        self._target = target
        self._worker = worker
        self._pace = pace
        self._waiting: Counter[str] = Counter()

    async def of(self, record: TryRecord, outbox: Outbox) -> RunIdentity:
        """Return the identity that a try was given before, or give it one.

        Does not wait for a run that was created before the job, since its id is known. It waits if
        the job logs to the server directly, because the run must still exist there.

        The try's run must be in the outbox, which must be an object of this thread.

        Raises:
            OSError: the worker cannot be started.
            sqlite3.Error: the outbox cannot be used.
        """
        known = _known(outbox, record)
        own_id = "" if known.data.get("direct") else str(known.data.get("run_id", ""))
        if own_id:
            self._worker.wake()
        elif not known.run_id and not known.own_id:
            await self._made(record)
            known = _known(outbox, record)
        if not known.run_id and not known.own_id:
            experiment = self._target.experiment or "Default"
            experiment_id = self._target.experiment_id or "0"
            own_id = own_id or uuid.uuid4().hex
            outbox.give_own_id(record.id, own_id, experiment_id, experiment)
            known = _known(outbox, record)
        return RunIdentity(*known.given, known.experiment)

    async def _made(self, record: TryRecord) -> None:
        """Wait for a run, longer behind others that wait: the site's pace delays the job anyway."""
        turn_s = self._waiting[record.site] / self._pace
        self._waiting[record.site] += 1
        try:
            await self._worker.made(record.id, turn_s)
        finally:
            self._waiting[record.site] -= 1


def _known(outbox: Outbox, record: TryRecord) -> RunRecord:
    run = outbox.run(record.id)
    assert run is not None
    return run
