"""The engine's observer for tracking: it describes runs in the journal and waits for their ids.

What happens to an attempt is in the journal's log anyway, from which another process publishes it.
Nothing here may fail a job: a failure of tracking is reported once, and the job continues.
"""

import asyncio
import hashlib
import importlib.util
import shlex
import shutil
import sqlite3
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ..common.errors import JournalError, install_command
from ..common.humanize import humanize_count
from ..config.settings import Timing
from ..engine.observer import JobEnd, JobExtras, LiveView, Observer
from ..engine.request import JobRequest
from ..jobs.script import strip_inline
from ..jobs.spec import JobSpec
from ..journal import AttemptRecord, AttemptState, Journal, TrackedAttempt
from . import store
from .cursor import Cursor, count_unpublished
from .run import (
    ARTIFACT_FOLDER,
    DESTINATION,
    TrackedRun,
    TrackedWorkflow,
    TrackingTarget,
    flatten_config,
    run_tags,
    user_name,
    workflow_tags,
)
from .store import RunIdentity
from .worker_client import WorkerClient

_END_WAIT_S = 30.0
"""The most seconds to wait at the end of a workflow until all events are published."""
SNAKEFILE_BYTES: Final = 1 << 20
"""The largest Snakefile that becomes an artifact, in bytes."""
_MISSING = (
    f"MLproject runs are not tracked: MLflow is not installed here ({install_command('mlflow')})."
)
_Broken = (OSError, sqlite3.Error, JournalError)


class Tracker(Observer):
    """Turns jobs and their workflow into MLflow runs; for the journal's thread."""

    def __init__(
        self,
        workdir: Path,
        journal: Journal,
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

        `configs` are the texts of the sites' backend configs. `mask` removes secrets from a text;
        `notify` writes a line to the user's log. Without a `workflow` to run, only earlier ones are
        ended. `direct` are variables for jobs that log to the server directly
        (`run.sent_variables`); if it is empty, this machine forwards what jobs log. `pace` is the
        most jobs per second that are submitted to a site.
        """
        self._direct = dict(direct or {})
        self._workdir = workdir
        self._runs = journal.tracked
        self._target = target
        self._configs = configs
        self._mask = mask
        self._notify = notify
        self._workflow = workflow
        self._pace = pace
        self._off = False
        self._cursor: Cursor | None = None
        self._recording = False
        self._key = ""
        self._making = asyncio.Lock()
        self._tracked: set[str] = set()
        self._waiting: Counter[str] = Counter()
        self._worker = WorkerClient(workdir, notify, self._tracked)
        self._writing: set[asyncio.Task[None]] = set()
        self._config_paths: dict[str, str] = {}

    # Before the engine starts and after it has ended

    def start(self, *, tracked: bool) -> None:
        """Start to publish if jobs will be tracked, or something of earlier runs is unpublished.

        `tracked` is whether known jobs will be tracked.
        """
        if not tracked and not self._runs.any():
            return
        try:
            if not self._open():
                return
            self._runs.settle(self._identity)
            # Continue a workflow that began with tracked jobs, even if no tracked job is left.
            unended = self._identity and self._runs.unended(self._identity)
            self._recording = tracked or bool(unended)
            if tracked or count_unpublished(self._workdir):
                self._worker.wake()
        except _Broken as error:
            self._broken(error)

    def settle(self) -> None:
        """End the workflows whose Snakemake is gone and that have no open attempt any more."""
        if self._cursor is not None:
            self._runs.settle()

    def close(self, wait_s: float = _END_WAIT_S) -> None:
        """Wait up to `wait_s` until all is published. Call it when the engine has ended."""
        if self._cursor is None:
            return
        self._cursor.close()
        self._cursor = None
        try:
            if count_unpublished(self._workdir):
                self._worker.wake()
            worker_ended = self._worker.close(wait_s)
            left = count_unpublished(self._workdir)
        except _Broken:
            return
        if left and wait_s:
            how = "" if worker_ended else "; publishing continues in the background"
            self._notify(
                f"MLflow does not know everything about {humanize_count(left, 'run')} yet{how}. To"
                " publish the rest at any time: smk-mantik track -d"
                f" {shlex.quote(str(self._workdir))}"
            )

    def _open(self) -> bool:
        """Return whether runs can be tracked."""
        if self._cursor is None and not self._off:
            if importlib.util.find_spec("mlflow") is None:
                self._off = True
                self._notify(_MISSING)
                return False
            self._cursor = Cursor(self._workdir)
        return not self._off

    @property
    def _identity(self) -> str:
        return self._workflow.identity(self._target) if self._workflow is not None else ""

    def _broken(self, error: Exception) -> None:
        self._off = True
        self._worker.release()
        self._notify(
            f"Runs are not tracked from now on: {error} ({self._workdir / store.DIRECTORY})."
        )

    # Events of the engine

    async def prepare(
        self, request: JobRequest, record: AttemptRecord, workspace: str, *, waits: bool = False
    ) -> JobExtras | None:
        """Return a tracked job's own store, and variables with its run's id.

        A job that logs to the server directly gets no store, but the variables to reach the server.
        None for a job without a run, or if tracking has failed.
        """
        run = request.subject if isinstance(request.subject, TrackedRun) else None
        if self._workflow is None or (run is None and not self._recording):
            return None
        try:
            if not self._open():
                return None
            self._recording = True
            job = self._join(record, waits=waits)
            if run is not None and not job.data:
                await self._describe(run, record, job)
            if not waits:
                self._runs.take_up(record.id)
            if run is None:
                self._worker.wake()
                return None
            head = str(self._known(record).data.get("head") or record.id)
            self._tracked |= {record.id, head, job.workflow}
            known = await self._given(record)
        except _Broken as error:
            self._broken(error)
            return None
        return self._extras(record, known, workspace)

    def _extras(self, record: AttemptRecord, known: TrackedAttempt, workspace: str) -> JobExtras:
        given = known.given
        identity = RunIdentity(given["run_id"], given["experiment_id"], given["experiment"])
        members = {int(number): run_id for number, run_id in given["members"].items()}
        of_members = store.member_variables(workspace, record.id, members)
        if not given["store"]:
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
                now=record.created,
                members={
                    run_id: known.data["members"][str(n)]["name"] for n, run_id in members.items()
                },
            ),
            store.worker_variables(workspace, record.id, identity) | of_members,
            live=LiveView(
                store.copy_directory(record.id),
                store.GROWING,
                store.metrics_directory(record.id, identity),
            ),
        )

    def _join(self, record: AttemptRecord, *, waits: bool) -> TrackedAttempt:
        """Return what is recorded of a job that is about to be submitted or adopted.

        A new job joins this workflow. One of an earlier workflow stays with that one, which is
        continued if it is the same workflow and has not ended.
        """
        job = self._runs.get(record.id)
        if job is None:
            return self._runs.join(record, self._begin(), behind=waits)
        if job.status and record.state is AttemptState.PLANNED:
            self._runs.revive(record.id)
        elif job.workflow == self._runs.unended(self._identity):
            self._begin()
        return job

    def _begin(self) -> str:
        """Return the id of this workflow."""
        if not self._key:
            self._key = self._runs.begin(self._identity)
        return self._key

    # What runs are created with

    async def _describe(self, run: TrackedRun, record: AttemptRecord, job: TrackedAttempt) -> None:
        """Have a run created for an attempt, or continue that of the attempt before it."""
        before = self._runs.get(job.follows) if job.follows else None
        if run.one and (before is None or not before.data):
            last = self._runs.before(record)
            same = last is not None and last.workflow == job.workflow and last.data.get("one")
            before = last if same else None
        if before is not None and before.data:
            data = {
                **{name: before.data[name] for name in ("name", *DESTINATION, "one")},
                "head": before.data.get("head") or before.attempt_id, "follows": before.attempt_id,
                "config": self._config(record.site), "direct": bool(self._direct),
            }  # fmt: skip
            if job.follows != before.attempt_id:
                data["retry"] = {"mantik.attempt": str(job.number), "mantik.site": record.site}
            self._runs.describe(record.id, data)
            self._runs.give(record.id, before.given)
            return
        # A job that begins anew does not go on from its last segment any more.
        self._runs.begin_anew(record)
        made = await self._tags(run, record)
        # A later attempt is a run of its own, in the directory of the requested one.
        requested = self._target.run_id
        adopted = requested if requested and not self._runs.adopted(requested) else ""
        if requested and not adopted:
            made |= {"mantik.run": requested}
        previous = self._runs.before(record)
        data = {
            "name": record.name,
            "tags": made | {"mantik.attempt": str(job.number)},
            "params": run.values(self._mask),
            **self._where,
            "config": self._config(record.site),
            # A requested run has no parent.
            "parent": "" if requested else await self._make_workflow(),
            "retry_of": previous.attempt_id if previous is not None else "",
            "run_id": adopted,
            "direct": bool(self._direct),
            "one": run.one,
            "members": await self._members(run, record, job),
        }
        self._runs.describe(record.id, data)

    @property
    def _where(self) -> dict[str, str]:
        return {name: getattr(self._target, name) for name in DESTINATION}

    async def _make_workflow(self) -> str:
        """Have the workflow's run created, before those of its jobs; return its id."""
        async with self._making:
            key = self._begin()
            if not self._runs.has_run(key) and self._workflow is not None:
                data = await asyncio.to_thread(self._workflow_data, key, self._workflow)
                self._runs.describe(key, data)
        return key

    def _workflow_data(self, key: str, workflow: TrackedWorkflow) -> dict[str, Any]:
        texts = {f"backend-configs/{name}.yaml": text for name, text in self._configs.items()}
        snakefile = self._workdir / workflow.snakefile
        if snakefile.is_file() and snakefile.stat().st_size <= SNAKEFILE_BYTES:
            texts["Snakefile"] = snakefile.read_text(encoding="utf-8", errors="replace")
        for name, text in texts.items():
            path = self._workdir / store.attempt_directory(key) / ARTIFACT_FOLDER / name
            _write(path, self._mask(text))
        return {
            "name": workflow.name(self._workdir),
            "tags": workflow_tags(workflow, key, self._target, self._workdir, self._mask),
            "params": flatten_config(workflow.config, self._mask),
            **self._where,
        }

    async def _members(
        self, run: TrackedRun, record: AttemptRecord, job: TrackedAttempt
    ) -> dict[str, dict[str, Any]]:
        """Return the values to create the runs of a group's members with, by number."""
        found = {}
        for number, member in run.of_members.items():
            as_alone = replace(record, name=member.name, rule=member.rule)
            tags = await self._tags(member.run, as_alone)
            del tags["mantik.attempt_id"]  # that is the group's
            own = {"mantik.group": record.name, "mantik.attempt": str(job.number)}
            params = member.run.values(self._mask)
            found[str(number)] = {"name": member.name, "tags": tags | own, "params": params}
        return found

    async def _tags(self, run: TrackedRun, record: AttemptRecord) -> dict[str, str]:
        snakefile = self._workflow.snakefile if self._workflow is not None else ""
        # It runs git, once per project.
        return await asyncio.to_thread(run_tags, run, record, self._workdir, snakefile)

    def _config(self, site: str) -> str:
        """Return the relative local path of a site's backend config without secrets."""
        if site not in self._config_paths:
            text = self._mask(self._configs.get(site, ""))
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            path = f"{store.DIRECTORY}/configs/{digest}/backend-config.yaml"
            if not (self._workdir / path).exists():
                _write(self._workdir / path, text)
            self._config_paths[site] = path
        return self._config_paths[site]

    # The ids that jobs are given

    async def _given(self, record: AttemptRecord) -> TrackedAttempt:
        """Return an attempt with the ids that it was given before, or give it some.

        Does not wait for a run that was created before the job, since its id is known. It waits if
        the job logs to the server directly, because the run must still exist there.
        """
        job = self._known(record)
        if job.given:
            self._worker.wake()
            return job
        assert self._cursor is not None
        head = str(job.data.get("head") or record.id)
        requested = "" if job.data["direct"] else str(job.data.get("run_id", ""))
        if requested:
            self._worker.wake()
        elif not self._cursor.run(head).run_id:
            await self._made(record)
        there = self._cursor.run(head)
        numbers = job.data.get("members", {})
        if there.run_id:
            experiment_id, experiment = there.experiment_id, there.experiment
            members = dict(there.members)
        else:
            experiment_id = self._target.experiment_id or "0"
            experiment = self._target.experiment or "Default"
            members = {number: uuid.uuid4().hex for number in numbers}
        self._runs.give(
            record.id,
            {
                "run_id": there.run_id or requested or uuid.uuid4().hex,
                "experiment_id": experiment_id, "experiment": experiment, "members": members,
                "store": not (job.data["direct"] and there.run_id),
            },
        )  # fmt: skip
        return self._known(record)

    def _known(self, record: AttemptRecord) -> TrackedAttempt:
        job = self._runs.get(record.id)
        assert job is not None
        return job

    async def _made(self, record: AttemptRecord) -> None:
        """Wait for a run, longer behind others that wait: the site's pace delays the job anyway."""
        turn_s = self._waiting[record.site] / self._pace
        self._waiting[record.site] += 1
        try:
            await self._worker.made(record.id, turn_s)
        finally:
            self._waiting[record.site] -= 1

    # Later

    def submitting(self, record: AttemptRecord, spec: JobSpec, script: str) -> None:
        """Write the script for the run's artifacts."""
        if record.id in self._tracked:
            task = asyncio.create_task(asyncio.to_thread(self._keep_script, spec, script))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    def _keep_script(self, spec: JobSpec, script: str) -> None:
        # The files inlined in a script are data of the job, and may be large.
        text = self._mask(strip_inline(script, spec))
        directory = self._workdir / store.attempt_directory(spec.paths.attempt_id) / ARTIFACT_FOLDER
        try:
            _write(directory / "script.sh", text)
        except OSError as error:
            self._notify(f"The script of {spec.name} is not kept for MLflow ({error}).")

    def submitted(self, record: AttemptRecord, site_job: str, queue: str) -> None:  # noqa: ARG002
        self._nudge()

    def started(self, record: AttemptRecord) -> None:  # noqa: ARG002
        self._nudge()

    def logged(self, record: AttemptRecord) -> None:  # noqa: ARG002
        self._nudge()

    def ended(self, record: AttemptRecord, end: JobEnd) -> None:  # noqa: ARG002
        """Drop the files of a segment that was given up while it waited; publish all others."""
        job = self._runs.get(record.id) if self._cursor is not None else None
        if job is not None and job.behind:
            directory = self._workdir / store.attempt_directory(record.id)
            shutil.rmtree(directory, ignore_errors=True)
        self._nudge()

    def _nudge(self) -> None:
        """Have what is new in the journal's log published."""
        if self._cursor is None or self._off or not self._recording:
            return
        try:
            self._worker.wake()
        except OSError as error:
            self._broken(error)

    def leftover(self, record_id: str) -> str | None:
        """Return the attempt's directory, if the attempt is tracked and has a store."""
        job = self._runs.get(record_id) if self._cursor is not None else None
        has_store = job is not None and job.data and job.given.get("store", True)
        return store.attempt_directory(record_id) if has_store else None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
