"""Publish the events of a try or a workflow to MLflow: needs mlflow.

Whatever was published before, by another process too, is not published twice.
"""

import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.journal import GOES_ON, Event, EventKind, TryState

from .cursor import Cursor, Log, LoggedRun, PublishedRun, open_log
from .overview import (
    begin_workflow_run,
    end_members,
    make_member_runs,
    set_member_status,
    update_workflow_run,
)
from .published import Destination, Published, Replay, link_file
from .replay import COPY_TREE, publish_store
from .requests import find_or_make, log_values, unless_refused
from .run import (
    ARTIFACT_FOLDER,
    NAME_LENGTH,
    PARENT_RUN_TAG,
    TAG_LENGTH,
    WAITING_REASON,
    WORKFLOW,
    without_user,
    without_users,
)
from .segments import SEGMENTS_TAG, describe_end, segments_tag
from .store import copy_directory, member_ends, store_directory, try_directory

_MOST_SAID = 20
"""The most lines that the user sees about a run: a job may write a million invalid values."""
_TRY = "mantik.try"
TIMES = "mantik.times"
"""The tag that says who tells how long the job ran, if it could not report that itself."""
_OF_THE_END = ("mantik.exit_code", "mantik.reason", "mantik.reason.kind", TIMES)
"""Tags of an end, which a retry in the same run removes."""
RETRY_OF = "mantik.retry_of"
"""The tag that names the run of the previous try, which did not finish."""
_OPEN = (TryState.PLANNED, TryState.SUBMITTING, TryState.SUBMITTED)
_ENDS = (EventKind.ENDED, EventKind.SETTLED, EventKind.CONCLUDED)


@dataclass(frozen=True)
class _At:
    """What is being published.

    Attributes:
        log: the journal's.
        client: for the run's server.
        run: the try or workflow.
        there: its run at MLflow.
        own: up to where the try is published; its run may be that of an earlier one.
    """

    log: Log
    client: MlflowClient
    run: LoggedRun
    there: PublishedRun
    own: PublishedRun


class Publisher:
    """Publishes tries and workflows; several threads may, each another one."""

    def __init__(
        self, workdir: Path, cursor: Cursor, answer: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Prepare; `cursor` holds what was published, `answer` is called with each answer."""
        self._workdir = workdir
        self._cursor = cursor
        self._answer = answer
        self._told: dict[str, Published] = {}
        self._making: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._here = threading.local()
        self._said: dict[str, set[str]] = defaultdict(set)
        self._experiments: dict[tuple[str, str, str], tuple[str, str]] = {}

    def make(self, run_of: str) -> None:
        """Create the run of a try or workflow, if needed: a job waits for its id.

        Raises:
            Exception: MLflow fails; try again later.
        """
        with open_log(self._workdir) as log:
            if (run := log.run(run_of)) is not None:
                self._make(log, run)

    def _make(self, log: Log, run: LoggedRun) -> PublishedRun:
        """Return a run at MLflow, created if needed; a segment's is the first one's."""
        there = self._cursor.run(run.head)
        if there.run_id:
            return there
        if run.head != run.id:
            first = log.run(run.head)
            return self._make(log, first) if first is not None else there
        # Linked runs are older, so no two threads wait for each other.
        with self._making[run.id]:
            there = self._cursor.run(run.id)
            if there.run_id:
                return there
            links = {
                PARENT_RUN_TAG: self._linked(log, run, "parent"),
                RETRY_OF: self._linked(log, run, "retry_of"),
            }
            # Before the request: if this process is killed after it, the mark remains.
            self._cursor.set(run.id, making=True)
            uri = _uri(run)
            client = self._client(uri)
            values = self._adopt(client, run) if run.data.get("run_id") else None
            if values is None:
                values = self._create(client, uri, run, links, again=there.making)
            self._cursor.set(run.id, uri=uri, **values)
        self._answer({"try": run.id})
        return self._cursor.run(run.id)

    def _create(
        self,
        client: MlflowClient,
        uri: str,
        run: LoggedRun,
        links: Mapping[str, str],
        *,
        again: bool,
    ) -> dict[str, object]:
        experiment_id, experiment = self._experiment(client, uri, run.data)
        found = []
        if again:
            key = WORKFLOW if run.tracked is None else _TRY
            found = client.search_runs([experiment_id], f"tags.`{key}` = '{run.id}'")
        if not found:
            tags = {**run.data["tags"], **{name: value for name, value in links.items() if value}}
            found = [
                client.create_run(
                    experiment_id, start_time=int(run.created * 1000), tags=tags,
                    run_name=run.data["name"][:NAME_LENGTH],
                )
            ]  # fmt: skip
        run_id = found[0].info.run_id
        members = make_member_runs(client, run, run_id, experiment_id, again=again)
        return {
            "run_id": run_id, "experiment_id": experiment_id, "experiment": experiment,
            "members": members,
        }  # fmt: skip

    def _linked(self, log: Log, run: LoggedRun, which: str) -> str:
        """Return the run that `run` is linked to, created if needed; empty if there is none.

        A run at another destination does not count.
        """
        other = log.run(str(run.data.get(which, "")))
        if other is None or other.data["experiment"] != run.data["experiment"]:
            return ""
        there = self._cursor.run(other.head)
        if not there.run_id and _uri(other) == _uri(run):
            there = self._make(log, other)
        return there.run_id if there.uri == _uri(run) else ""

    def _adopt(self, client: MlflowClient, run: LoggedRun) -> dict[str, object] | None:
        """Use the run that was created before the try; return None if it no longer exists.

        Keeps the tags that it already has (its name, the source of its project).
        """
        there = unless_refused(partial(client.get_run, run.data["run_id"]))
        if there is None or there.info.lifecycle_stage != "active":
            return None
        known = there.data.tags
        _set_tags(
            client, there.info.run_id,
            {name: value for name, value in run.data["tags"].items() if name not in known},
        )  # fmt: skip
        experiment = client.get_experiment(there.info.experiment_id)
        return {
            "run_id": there.info.run_id, "experiment_id": experiment.experiment_id,
            "experiment": experiment.name,
        }  # fmt: skip

    def publish(self, run_of: str, *, live: bool = False) -> None:
        """Publish what is new of a try or workflow; create its run first, if needed.

        With `live` also what its running job has logged.

        Raises:
            Exception: MLflow fails; try again later.
        """
        with open_log(self._workdir) as log:
            # Before the state: what is written in between is new the next time.
            events = log.events(self._cursor.run(run_of).seq, of=run_of)
            run = log.run(run_of)
            if run is None:
                return
            there = self._make(log, run)
            at = _At(log, self._client(there.uri), run, there, own=self._cursor.run(run_of))
            if events:
                self._cursor.set(run_of, begun=events[-1].seq)
            if not at.own.described and run.head == run_of:
                begun = _is_over(run) or any(e.kind is EventKind.STARTED for e in events)
                self._accepted(at, lambda: self._complete(at, begun=begun))
                self._cursor.set(run_of, described=True)
            if run.tracked is None:
                update = partial(update_workflow_run, at.client, log, run, there.run_id)
                self._accepted(at, partial(update, events))
                over = any(event.kind is EventKind.ENDED for event in events)
            else:
                over = self._try(at, events, live=live)
            if over:
                self._told.pop(run_of, None)
                shutil.rmtree(self._workdir / try_directory(run_of), ignore_errors=True)
            if events:
                self._cursor.set(run_of, seq=events[-1].seq)

    def _try(self, at: _At, events: Sequence[Event], *, live: bool) -> bool:
        """Publish what is new of a try; return whether it has ended."""
        retried = at.run.one and at.log.is_continued(at.run.id)
        last = {event.kind: event for event in events}
        ended = [event for event in events if event.kind in _ENDS]
        if ended and _is_over(at.run):
            last.pop(EventKind.STARTED, None)  # its end says more
        if not retried:  # then the run shows the state of the retry
            for event in sorted(last.values(), key=lambda event: event.seq):
                self._accepted(at, partial(_state, at, event))
        if ended and at.run.tracked is not None and at.run.tracked.status:
            self._end(at, ended, retried=retried)
            return True
        if live:
            self._cursor.set(at.run.id, live=True)
            self._accepted(at, lambda: self._store(at, f"{copy_directory(at.run.id)}/{COPY_TREE}"))
        return False

    def _store(self, at: _At, directory: str, status: str = "", *, doubt: bool = False) -> None:
        """Publish what is new in a job's store; another process may have published more of it."""
        if at.run.head != at.run.id and at.own.steps is None:
            # Up to which step earlier segments have logged each metric.
            known = at.client.get_run(at.there.run_id).to_proto().data.metrics
            self._cursor.set(at.run.id, steps={metric.key: metric.step for metric in known})
        published = self._told.setdefault(at.run.id, Published(doubt=at.own.live))
        published.doubt = published.doubt or doubt
        publish_store(
            Replay(
                at.client, self._workdir / directory, self._destination(at), published,
                lambda text: self._say(at, text),
            ),
            status,
        )  # fmt: skip

    def _client(self, uri: str) -> MlflowClient:
        clients: dict[str, MlflowClient] = self._here.__dict__
        if uri not in clients:
            real = mlflow.get_tracking_uri()
            clients[uri] = MlflowClient(real if without_user(real) == uri else uri)
        return clients[uri]

    # The start of a run

    def _complete(self, at: _At, *, begun: bool) -> None:
        """Set what a run has from its start but cannot be created with.

        One that has `begun` gets its state afterwards.
        """
        if at.there.run_id != at.run.data.get("run_id"):
            self._params(at, at.there.run_id, at.run.data["params"])
        for number, member_run in at.there.members.items():
            params = at.run.data["members"][number]["params"]
            self._params(at, member_run, params)
        if at.run.tracked is None:
            begin_workflow_run(at.client, at.run.id, at.there.run_id, self._workdir)
        elif not begun:
            set_member_status(at.client, at.there.members.values(), "SCHEDULED")
            at.client.update_run(at.there.run_id, status="SCHEDULED")

    def _params(self, at: _At, run_id: str, values: Mapping[str, str]) -> None:
        params = [Param(name, value) for name, value in values.items()]
        log_values(
            at.client, run_id, "params", params,
            lambda param, why: self._say(at, f"the parameter {param.key} is left out: {why}"),
        )  # fmt: skip

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

    def _destination(self, at: _At) -> Destination:
        given = _given(at)
        own_ids = given.get("members", {})
        return Destination(
            at.run.id, at.there.run_id, at.there.experiment_id, given["run_id"],
            source_experiment_id=given["experiment_id"], name=at.run.data["name"],
            steps=self._cursor.run(at.run.id).steps or {},
            members={own_ids[n]: run_id for n, run_id in at.there.members.items() if n in own_ids},
        )  # fmt: skip

    # The end

    def _end(self, at: _At, events: Sequence[Event], *, retried: bool) -> None:
        end = at.log.end(at.run.id)
        if end is None and events[-1].kind is EventKind.SETTLED:
            end = events[-1]
        if end is None:
            return
        data = describe_end(at.log, at.run, end)
        if end.seq <= at.own.seq:  # it is published, and the store was downloaded again at most
            if any(event.kind is EventKind.CONCLUDED for event in events):
                data["metrics"] = {}
                self._accepted(at, lambda: self._ended(at, data, retried=retried))
            return
        doubt = at.own.begun >= end.seq
        what = "the rest of what the job logged is left out"
        try:
            directory, status = store_directory(at.run.id), data["status"] or "KILLED"
            self._accepted(at, lambda: self._store(at, directory, status, doubt=doubt), what)
            self._accepted(at, lambda: self._files(at, data), what)
        except Exception:
            # Publish the end even if the rest fails.
            with suppress(Exception):
                self._ended(at, data, retried=retried)
            raise
        self._accepted(at, lambda: self._ended(at, data, retried=retried))

    def _ended(self, at: _At, data: Mapping[str, Any], *, retried: bool) -> None:
        given = _given(at)
        own_id = given["run_id"]
        tags = {
            "mantik.exit_code": "" if data["exit_code"] is None else str(data["exit_code"]),
            "mantik.reason": data["words"],
            "mantik.reason.kind": data["reason"],
            TIMES: data["times"],
            "mantik.own_run_id": own_id if own_id != at.there.run_id else "",
        }
        goes_on = not data["status"] or retried
        if goes_on:
            tags = {}
        tags[SEGMENTS_TAG] = segments_tag(data["segments"])
        moment = int(data["time"] * 1000)
        metrics = [Metric(n, v, moment, data["step"]) for n, v in data["metrics"].items()]
        end_members(
            at.client, at.there.members, given.get("members", {}),
            ends=self._workdir / member_ends(at.run.id), status=data["status"], moment=moment,
        )  # fmt: skip
        at.client.log_batch(at.there.run_id, metrics=metrics, tags=_run_tags(tags))
        if not goes_on:
            at.client.set_terminated(at.there.run_id, data["status"], moment)
        elif at.run.data.get("direct"):  # the job itself may have ended it
            at.client.update_run(at.there.run_id, status="RUNNING")

    def _files(self, at: _At, data: Mapping[str, Any]) -> None:
        """Upload script, log and backend config, unless the segment is submitted again."""
        folders = [ARTIFACT_FOLDER]
        if segments := data["segments"]:
            own = segments[-1]["try"] == at.run.id
            if not data["status"]:
                if not own:
                    return
                # Those of the run are the last one's.
                folders = [f"{ARTIFACT_FOLDER}/segment-{segments[-1]['segment']}"]
            elif at.run.one and own and data["status"] != "FINISHED":
                # A retry may replace the others.
                folders.append(f"{ARTIFACT_FOLDER}/try-{segments[-1]['segment']}")
        directory = self._workdir / try_directory(at.run.id) / ARTIFACT_FOLDER
        for name, path in (
            ("backend-config.yaml", at.run.data["config"]),
            ("log.txt", data["log"]),
        ):
            origin, place = self._workdir / path, directory / name
            if path and origin.is_file():
                place.unlink(missing_ok=True)
                link_file(origin, place)
        if directory.is_dir() and any(directory.iterdir()):
            for folder in folders:
                at.client.log_artifacts(at.there.run_id, str(directory), folder)

    def _accepted(
        self, at: _At, act: Callable[[], object], what: str = "MLflow refused an update"
    ) -> None:
        """Call `act`; if MLflow refuses, report that and continue."""
        unless_refused(act, lambda why: self._say(at, f"{what}: {why}"))

    def _say(self, at: _At, text: str) -> None:
        """Tell the user something about a run, once."""
        said = self._said[at.run.id]
        if text in said or len(said) >= _MOST_SAID:
            return
        said.add(text)
        line = " ".join(without_users(text).split())[:400]
        self._answer({"tell": f"{at.run.data['name']}: MLflow run {at.there.run_id}: {line}"})
        if len(said) == _MOST_SAID:
            more = f"{at.run.data['name']}: further lines about this run are not shown."
            self._answer({"tell": more})


def _uri(run: LoggedRun) -> str:
    """Return a run's destination: the one that was requested, or MLflow's default."""
    return str(run.data["uri"]) or without_user(mlflow.get_tracking_uri())


def _is_over(run: LoggedRun) -> bool:
    return run.tracked is not None and run.tracked.status not in ("", GOES_ON)


def _given(at: _At) -> Mapping[str, Any]:
    """Return the ids that the job knows, MLflow's if it knows none."""
    assert at.run.tracked is not None
    return at.run.tracked.given or {
        "run_id": at.there.run_id, "experiment_id": at.there.experiment_id,
        "members": at.there.members,
    }  # fmt: skip


def _state(at: _At, event: Event) -> None:
    """Publish the state of a job that has not ended."""
    if event.kind is EventKind.SUBMITTED:
        _submitted(at, event.data["job"])
    elif event.kind is EventKind.WAITING:
        _set_tag(at.client, at.there.run_id, WAITING_REASON, event.data["why"])
    elif event.kind is EventKind.STARTED:
        at.client.update_run(at.there.run_id, status="RUNNING")
        set_member_status(at.client, at.there.members.values(), "RUNNING")


def _submitted(at: _At, job: str) -> None:
    record = at.run.record
    assert record is not None
    before = at.log.tries(tuple(record.makers.values()))
    names = dict.fromkeys(maker.name for maker in before if maker.state in _OPEN)
    tags = {
        "mantik.job_id": job, "mantik.queue": record.queue,
        WAITING_REASON: f"queued behind {', '.join(names)}" if names else "",
    }  # fmt: skip
    if retry := at.run.data.get("retry"):
        tags |= retry
        for name in _OF_THE_END:
            _set_tag(at.client, at.there.run_id, name, "")
        at.client.update_run(at.there.run_id, status="SCHEDULED")
    _set_tags(at.client, at.there.run_id, tags)


def _set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    if found := _run_tags(tags):
        client.log_batch(run_id, tags=found)


def _set_tag(client: MlflowClient, run_id: str, name: str, value: str) -> None:
    """Set a tag, or remove it if the value is empty."""
    if value:
        _set_tags(client, run_id, {name: value})
    else:  # it may not exist
        unless_refused(partial(client.delete_tag, run_id, name))


def _run_tags(tags: Mapping[str, str]) -> list[RunTag]:
    return [RunTag(name, value[:TAG_LENGTH]) for name, value in tags.items() if value]
