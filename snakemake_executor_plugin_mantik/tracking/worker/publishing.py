"""Publish the events of a try to MLflow. Part of the worker: needs mlflow."""

import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from ..ledger import Ledger
from ..outbox import LATE, Event, EventKind, Lane, Outbox, RunRecord
from ..run import NAME_LENGTH, TAG_LENGTH, WAITING_REASON, without_user, without_users
from ..segments import SEGMENTS_TAG, segments_tag
from ..store import copy_directory, store_directory, try_directory
from ..workflow import ARTIFACT_FOLDER, PARENT_RUN_TAG, WORKFLOW
from . import overview
from .live_replay import LiveReplay
from .overview import end_members, find_or_make, is_refusal, make_member_runs, set_member_status
from .published import Destination, Published
from .replay import BATCH, Replay

_MOST_SAID = 20
"""The most lines that the user sees about a run: a job may write a million invalid values."""
_TRY = "mantik.try"
_STATES = (EventKind.SUBMITTED, EventKind.WAITING, EventKind.STARTED)
TIMES = "mantik.times"
"""The tag that says who tells how long the job ran, if it could not report that itself."""
_OF_THE_END = ("mantik.exit_code", "mantik.reason", "mantik.reason.kind", TIMES)
"""Tags of an end, which a retry in the same run removes."""
RETRY_OF = "mantik.retry_of"
"""The tag that names the run of the previous try, which did not finish."""


class Publisher:
    """Publishes events of tries. Belongs to one thread, like its `outbox`."""

    def __init__(
        self,
        outbox: Outbox,
        workdir: Path,
        answer: Callable[[Mapping[str, Any]], None],
        notify: Callable[[str], None],
        told: dict[str, Published],
        *,
        making: Mapping[str, Lock] | None = None,
        experiments: dict[tuple[str, str, str], tuple[str, str]] | None = None,
    ) -> None:
        """Prepare.

        Args:
            outbox: an object of this thread.
            workdir: the workflow's directory.
            answer: called with answers to the controller.
            notify: called with lines for the user.
            told: what was published of jobs' stores, by try; shared between publishers, of which
                only one at a time works on a try.
            making: a lock for each try whose run is being created; shared, too.
            experiments: ids and names of known experiments; shared, too.
        """
        self.outbox = self._outbox = outbox
        self._told = told
        self._making = defaultdict(Lock) if making is None else making
        self._ledger = Ledger(outbox)
        self._workdir = workdir
        self._answer = answer
        self._notify = notify
        self._clients: dict[str, MlflowClient] = {}
        self._said: Counter[str] = Counter()
        self._experiments = {} if experiments is None else experiments

    def make(self, try_id: str) -> None:
        """Create the run of a try, if needed: a job waits for its id.

        Raises:
            Exception: MLflow fails; try again later.
        """
        # Linked runs are older, so no two publishers wait for each other.
        with self._making[try_id]:
            self._make(try_id)

    def _make(self, try_id: str) -> None:
        run = self._outbox.run(try_id)
        if run is None or run.run_id:
            return
        if run.head:  # this segment's run is the first one's
            self.make(run.head)
            return
        events = [e for e in self._outbox.events(try_id) if e.kind is EventKind.CREATE]
        if not events:
            return
        links = {PARENT_RUN_TAG: self._made(run, "parent"), RETRY_OF: self._made(run, "retry_of")}
        # Before the request: if the worker is killed after it, the mark remains.
        self._outbox.begin(events[0])
        uri = run.uri or without_user(mlflow.get_tracking_uri())
        client = self._client(uri)
        if run.data.get("run_id") and (adopted := self._adopt(client, run)):
            self._outbox.made(try_id, uri, *adopted)
            self._answer({"try": try_id, "run": adopted[0]})
            return
        experiment_id, experiment = self._experiment(client, uri, run.data)
        run_id = ""
        if events[0].attempts:
            key = WORKFLOW if _is_workflow(run) else _TRY
            found = client.search_runs([experiment_id], f"tags.`{key}` = '{try_id}'")
            run_id = found[0].info.run_id if found else ""
        if not run_id:
            tags = {**run.data["tags"], **{name: value for name, value in links.items() if value}}
            made = client.create_run(
                experiment_id, start_time=int(run.created * 1000), tags=tags,
                run_name=run.data["name"][:NAME_LENGTH],
            )  # fmt: skip
            run_id = made.info.run_id
        members = make_member_runs(
            client, run, run_id, experiment_id, again=events[0].attempts > 0
        )  # fmt: skip
        if members:
            self._outbox.keep_members(try_id, members)
        self._outbox.made(try_id, uri, run_id, experiment_id, experiment)
        self._answer({"try": try_id, "run": run_id})

    def _made(self, run: RunRecord, which: str) -> str:
        """Return the run that `run` is linked to, created if needed; empty if there is none.

        A run at another destination does not count.
        """
        other = self._outbox.run(str(run.data.get(which, "")))
        if other is None or other.data["experiment"] != run.data["experiment"]:
            return ""
        if not other.run_id and other.uri == run.uri:
            self.make(other.try_id)
            other = self._outbox.run(other.try_id)
            assert other is not None
        here = run.uri or without_user(mlflow.get_tracking_uri())
        return other.run_id if other.uri == here else ""

    def _adopt(self, client: MlflowClient, run: RunRecord) -> tuple[str, str, str] | None:
        """Use the run that was created before the try; return None if it no longer exists.

        Keeps the tags that it already has (its name, the source of its project).
        """
        try:
            there = client.get_run(run.data["run_id"])
        except MlflowException as error:
            if not is_refusal(error):
                raise
            return None
        if there.info.lifecycle_stage != "active":
            return None
        known = there.data.tags
        _set_tags(
            client, there.info.run_id,
            {name: value for name, value in run.data["tags"].items() if name not in known},
        )  # fmt: skip
        experiment = client.get_experiment(there.info.experiment_id)
        return there.info.run_id, experiment.experiment_id, experiment.name

    def notify(self, try_id: str, lane: Lane) -> bool:
        """Publish the events of a try that belong to a lane; create its run first, if needed.

        Returns:
            Whether none of them has to wait for the end of the segment before.

        Raises:
            Exception: MLflow fails; try again later.
        """
        self.make(try_id)
        if lane is Lane.MAKING:
            return True
        events = self._outbox.events(try_id)
        making = any(event.kind is EventKind.CREATE for event in events)
        run = self._outbox.run(try_id)
        assert run is not None
        # What the segment before has logged comes first.
        early = run.head and not self._outbox.settled(run.data["follows"])
        complete = True
        for event in events:
            if making and event.kind in LATE:
                return complete
            if lane is not Lane.ENDING and (event.kind is EventKind.LIVE) != (lane is Lane.LIVE):
                continue
            if early and event.kind in LATE:
                return False
            if early and event.kind is EventKind.LIVE:
                complete = False
                continue
            if event.kind in (EventKind.LIVE, EventKind.END) and try_id not in self._told:
                run = self._with_steps(run)
                # Another process may have published it.
                self._told[try_id] = Published(doubt=self._outbox.begun(try_id, EventKind.LIVE))
            self._outbox.begin(event)
            self._go_on(run, event)
            self._outbox.done(event)
            if event.kind is EventKind.END:
                self._told.pop(try_id, None)
                shutil.rmtree(self._workdir / try_directory(try_id), ignore_errors=True)
        return complete

    def _with_steps(self, run: RunRecord) -> RunRecord:
        """Find out, once, up to which step earlier segments have logged each metric."""
        if not run.head or "steps" in run.data:
            return run
        there = self._client(run.uri).get_run(run.run_id)
        steps = {metric.key: metric.step for metric in there.to_proto().data.metrics}
        self._outbox.keep_steps(run.try_id, steps)
        return replace(run, data={**run.data, "steps": steps})

    def _client(self, uri: str) -> MlflowClient:
        if uri not in self._clients:
            real = mlflow.get_tracking_uri()
            self._clients[uri] = MlflowClient(real if without_user(real) == uri else uri)
        return self._clients[uri]

    # The start of a run

    def _complete(self, client: MlflowClient, run: RunRecord) -> None:
        """Set what a run has from its start but cannot be created with."""
        if run.run_id != run.data.get("run_id"):
            self._params(client, run, run.run_id, run.data["params"])
        for number, (_, member_run) in run.members.items():
            self._params(client, run, member_run, run.data["members"][str(number)]["params"])
        set_member_status(client, run, "SCHEDULED")
        if _is_workflow(run):
            overview.begin_workflow_run(client, run, self._workdir)
        else:
            client.update_run(run.run_id, status="SCHEDULED")

    def _params(
        self, client: MlflowClient, run: RunRecord, run_id: str, values: Mapping[str, str]
    ) -> None:
        params = [Param(name, value) for name, value in values.items()]
        for start in range(0, len(params), BATCH):
            some = params[start : start + BATCH]
            try:
                client.log_batch(run_id, params=some)
            except MlflowException as error:
                if not is_refusal(error):
                    raise
                for param in some:
                    self._param(client, run, run_id, param)

    def _param(self, client: MlflowClient, run: RunRecord, run_id: str, param: Param) -> None:
        try:
            client.log_batch(run_id, params=[param])
        except MlflowException as error:
            if not is_refusal(error):
                raise
            self._say(run, f"the parameter {param.key} is left out: {error}")

    def _experiment(
        self, client: MlflowClient, uri: str, data: Mapping[str, Any]
    ) -> tuple[str, str]:
        """Return the id and name of the experiment that the user's environment names."""
        name, wanted = str(data["experiment"]), str(data["experiment_id"])
        key = (uri, wanted, name)
        if key not in self._experiments:
            found = find_or_make(client, name, wanted)
            self._experiments[key] = (found.experiment_id, found.name)
        return self._experiments[key]

    # Later events

    def _go_on(self, run: RunRecord, event: Event) -> None:
        """Publish an event of an existing run; if MLflow refuses, report that and drop it."""
        client = self._client(run.uri)
        try:
            if event.kind is EventKind.CREATE:
                self._complete(client, run)
            elif event.kind in _STATES and self._is_retried(run):
                pass  # the run shows the state of the retry
            elif event.kind is EventKind.SUBMITTED:
                _submitted(client, run, event.data)
            elif event.kind is EventKind.WAITING:
                _set_tag(client, run.run_id, WAITING_REASON, event.data["why"])
            elif event.kind is EventKind.STARTED:
                client.update_run(run.run_id, status="RUNNING")
                set_member_status(client, run, "RUNNING")
            elif event.kind is EventKind.LIVE:
                self._live(client, run)
            elif _is_workflow(run):
                overview.update_workflow_run(client, self._ledger, run, event.data)
                if event.kind is EventKind.END:
                    overview.end_workflow_run(client, run, event.data)
            elif event.kind is EventKind.END:
                self._end(client, run, event)
        except MlflowException as error:
            if not is_refusal(error):
                raise
            self._say(run, f"MLflow refused an update: {error}")

    def _live(self, client: MlflowClient, run: RunRecord) -> None:
        copy = self._workdir / copy_directory(run.try_id)
        told = self._told[run.try_id]
        LiveReplay(
            client, copy, self._destination(run), told, lambda text: self._say(run, text)
        ).run()

    def _destination(self, run: RunRecord) -> Destination:
        own_id, own_experiment_id = run.given
        return Destination(
            run.try_id, run.run_id, run.experiment_id, own_id,
            source_experiment_id=own_experiment_id, name=run.data["name"],
            steps=run.data.get("steps", {}), members=dict(run.members.values()),
        )  # fmt: skip

    def _end(self, client: MlflowClient, run: RunRecord, event: Event) -> None:
        try:
            self._accepted(run, lambda: self._logged(client, run, event))
            self._accepted(run, lambda: self._files(client, run, event.data))
        except Exception:
            # Publish the end even if the rest fails.
            with suppress(Exception):
                self._ended(client, run, event.data)
            raise
        self._ended(client, run, event.data)

    def _accepted(self, run: RunRecord, notify: Callable[[], None]) -> None:
        """Call `notify`; if MLflow refuses, report that and continue."""
        try:
            notify()
        except MlflowException as error:
            if not is_refusal(error):
                raise
            self._say(run, f"the rest of what the job logged is left out: {error}")

    def _logged(self, client: MlflowClient, run: RunRecord, event: Event) -> None:
        store = self._workdir / store_directory(run.try_id)
        if store.is_dir():
            told = self._told[run.try_id]
            told.doubt = told.doubt or event.attempts > 0
            replay = Replay(
                client,
                store,
                self._destination(run),
                told,
                notify=lambda text: self._say(run, text),
            )
            replay.whole(event.data["status"] or "KILLED")

    def _ended(self, client: MlflowClient, run: RunRecord, data: Mapping[str, Any]) -> None:
        tags = {
            "mantik.exit_code": "" if data["exit_code"] is None else str(data["exit_code"]),
            "mantik.reason": data["words"],
            "mantik.reason.kind": data.get("reason", ""),
            TIMES: data.get("times", ""),
            "mantik.own_run_id": run.own_id if run.own_id != run.run_id else "",
        }
        goes_on = data.get("goes_on", False) or self._is_retried(run)
        if goes_on:
            tags = {}
        tags[SEGMENTS_TAG] = segments_tag(data.get("segments", []))
        moment, step = int(data["time"] * 1000), data.get("step", 0)
        metrics = [Metric(n, value, moment, step) for n, value in data.get("metrics", {}).items()]
        end_members(client, run, self._workdir, data["status"], moment)
        client.log_batch(run.run_id, metrics=metrics, tags=_run_tags(tags))
        if not goes_on:
            client.set_terminated(run.run_id, data["status"], moment)
        elif run.data.get("direct"):  # the job itself may have ended it
            client.update_run(run.run_id, status="RUNNING")

    def _is_retried(self, run: RunRecord) -> bool:
        """Return whether a retry goes on in the run of this try."""
        return bool(run.data.get("one")) and self._outbox.is_continued(run.try_id)

    def _files(self, client: MlflowClient, run: RunRecord, data: Mapping[str, Any]) -> None:
        """Upload script, log and backend config, unless the segment is submitted again."""
        folders = [ARTIFACT_FOLDER]
        if segments := data.get("segments"):
            own = segments[-1]["try_id"] == run.try_id
            if data.get("goes_on"):
                if not own:
                    return
                # Those of the run are the last one's.
                folders = [f"{ARTIFACT_FOLDER}/segment-{segments[-1]['segment']}"]
            elif run.data.get("one") and own and data["status"] != "FINISHED":
                # A retry may replace the others.
                folders.append(f"{ARTIFACT_FOLDER}/try-{segments[-1]['segment']}")
        directory = self._workdir / try_directory(run.try_id) / ARTIFACT_FOLDER
        directory.mkdir(parents=True, exist_ok=True)
        for name, path in (("backend-config.yaml", run.data["config"]), ("log.txt", data["log"])):
            origin, place = self._workdir / path, directory / name
            if path and origin.is_file():
                place.unlink(missing_ok=True)
                try:
                    os.link(origin, place)
                except OSError:
                    shutil.copyfile(origin, place)
        if any(directory.iterdir()):
            for folder in folders:
                client.log_artifacts(run.run_id, str(directory), folder)

    def _say(self, run: RunRecord, text: str) -> None:
        self._said[run.try_id] += 1
        if self._said[run.try_id] > _MOST_SAID:
            return
        line = " ".join(without_users(text).split())[:400]
        self._notify(f"{run.data['name']}: MLflow run {run.run_id}: {line}")
        if self._said[run.try_id] == _MOST_SAID:
            self._notify(f"{run.data['name']}: further lines about this run are not shown.")


def _submitted(client: MlflowClient, run: RunRecord, data: Mapping[str, Any]) -> None:
    tags = {"mantik.job_id": data["job"], "mantik.queue": data["queue"]}
    if retry := run.data.get("retry"):
        tags |= retry
        for name in _OF_THE_END:
            _set_tag(client, run.run_id, name, "")
        client.update_run(run.run_id, status="SCHEDULED")
    _set_tags(client, run.run_id, tags)


def _set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    if found := _run_tags(tags):
        client.log_batch(run_id, tags=found)


def _set_tag(client: MlflowClient, run_id: str, name: str, value: str) -> None:
    """Set a tag, or remove it if the value is empty."""
    if value:
        _set_tags(client, run_id, {name: value})
        return
    try:
        client.delete_tag(run_id, name)
    except MlflowException as error:
        if not is_refusal(error):  # the tag does not exist
            raise


def _run_tags(tags: Mapping[str, str]) -> list[RunTag]:
    return [RunTag(name, value[:TAG_LENGTH]) for name, value in tags.items() if value]


def _is_workflow(run: RunRecord) -> bool:
    return bool(run.data.get("workflow"))
