"""Publish the events of an attempt, a group's members or a workflow to MLflow: needs mlflow.

Whatever was published before, by another process too, is not published twice. If MLflow fails, its
client's exception comes through all of the process's modules: try again later.
"""

import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from ..journal import GOES_ON, Event, EventKind, read_allocations, read_members
from ..views import render_files
from ..views.picture import Picture, make_picture
from ..views.workflow import overview_jobs
from .cursor import Cursor, Log, LoggedRun, PublishedRun, open_log
from .published import Published, Replay, link_file
from .replay import COPY_TREE, publish_store
from .requests import find_or_make, log_values, unless_refused
from .run import (
    ARTIFACT_FOLDER,
    NAME_LENGTH,
    PARENT_RUN_TAG,
    WORKFLOW,
    without_user,
    without_users,
)
from .segments import (
    STATE_TAGS,
    RunState,
    end_figures,
    format_moment,
    list_segments,
    run_state,
    workflow_figures,
)
from .store import attempt_directory, copy_directory, member_ends, store_directory

_MOST_SAID = 20
"""The most lines that the user sees about a run: a job may write a million invalid values."""
_ATTEMPT_ID = "mantik.attempt_id"
RETRY_OF = "mantik.retry_of"
"""The tag that names the run of the previous attempt, which did not finish."""
DETACHED: Final = "mantik.detached"
"""The tag that holds since when the workflow's jobs continue without a controller."""
_MEMBER: Final = "mantik.group_member"
"""The tag that names the attempt of a group and the number of the member that a run belongs to."""
_LONGEST_ENDS: Final = 1 << 20
_ENDS = (EventKind.ENDED, EventKind.SETTLED, EventKind.CONCLUDED)


@dataclass(frozen=True)
class _At:
    """What is being published.

    Attributes:
        client: for the run's server.
        there: its run at MLflow.
        own: up to where the attempt is published; its run may be that of an earlier one.
        new: what has happened to it since.
    """

    log: Log
    client: MlflowClient
    run: LoggedRun
    there: PublishedRun
    own: PublishedRun
    new: Sequence[Event]

    @property
    def end(self) -> Event | None:
        """Its end, if that is new; the first one counts."""
        end = self.log.end(self.run.id)
        return end if end in self.new else None

    @property
    def over(self) -> bool:
        """Whether this publishes all that there is: one that was settled may have been revived."""
        end = self.log.end(self.run.id)
        return (
            any(event.kind in _ENDS for event in self.new)
            and (self.run.tracked is None or bool(self.run.tracked.status))
            and (end is None or end.seq <= self.new[-1].seq)
        )


class Publisher:
    """Publishes attempts and workflows; several threads may, each another one."""

    def __init__(
        self, workdir: Path, cursor: Cursor, answer: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Prepare; `cursor` holds what was published, `answer` is called with each answer."""
        self._workdir = workdir
        self._cursor = cursor
        self._answer = answer
        self._told: dict[str, Published] = {}
        self._shown: dict[str, RunState] = {}
        self._making: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._here = threading.local()
        self._said: dict[str, set[str]] = defaultdict(set)
        self._experiments: dict[tuple[str, str, str], tuple[str, str]] = {}

    def make(self, run_of: str) -> None:
        """Create the run of an attempt or workflow, if needed: a job waits for its id."""
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
        self._answer({"attempt": run.id})
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
            key = WORKFLOW if run.tracked is None else _ATTEMPT_ID
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
        members = _make_member_runs(client, run, run_id, experiment_id, again=again)
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
        """Use the run that was created before the attempt; return None if it no longer exists.

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
        """Publish what is new of a workflow, or of all attempts that share a run with an attempt.

        Creates the run first, if needed. With `live` also what running jobs have logged.
        """
        with open_log(self._workdir) as log:
            asked = log.run(run_of)
            if asked is None:
                return
            ids = log.sharing(asked.head) or [run_of]
            # Before the states: what is written in between is new the next time.
            own = {each: self._cursor.run(each) for each in ids}
            new = {each: log.events(own[each].seq, of=each) for each in ids}
            run = log.run(asked.head) or asked
            there = self._make(log, run)
            client = self._client(there.uri)
            found = [
                _At(log, client, each, there, own[each.id], new[each.id])
                for each in (log.attempts(run.id) if run.tracked else [run])
                if each.id in own  # a retry may have joined since
            ]
            for at in found:
                if at.new:
                    self._cursor.set(at.run.id, begun=at.new[-1].seq)
            if not there.described:
                whole = _At(log, client, run, there, own[run.id], new[run.id])
                self._accepted(whole, lambda: self._complete(whole))
                self._cursor.set(run.id, described=True)
            if run.tracked is None:
                update = partial(_update_workflow_run, client, log, run, there.run_id)
                self._accepted(found[0], partial(update, new[run.id]))
            else:
                self._attempts(found, live=live)
            for at in found:
                if at.new:
                    self._cursor.set(at.run.id, seq=at.new[-1].seq)
                if at.over:
                    self._told.pop(at.run.id, None)
                    shutil.rmtree(self._workdir / attempt_directory(at.run.id), ignore_errors=True)

    def _attempts(self, found: Sequence[_At], *, live: bool) -> None:
        """Publish the ends of attempts, what running ones have logged, and the last one's state."""
        try:
            for number, at in enumerate(found, 1):
                if at.end is not None:
                    self._end(at, [each.run for each in found[:number]], at.end)
                elif live and at.run.tracked and not at.run.tracked.status:
                    self._cursor.set(at.run.id, live=True)
                    copy = f"{copy_directory(at.run.id)}/{COPY_TREE}"
                    self._accepted(at, partial(self._store, at, copy))
        except Exception:
            # Publish the state even if the rest fails.
            with suppress(Exception):
                self._show(found)
            raise
        if found:
            self._accepted(found[-1], partial(self._show, found))

    def _show(self, found: Sequence[_At]) -> None:
        """Let the run show the state of the last of its attempts."""
        at, head = found[-1], found[0].run.head
        state = run_state(at.log, [each.run for each in found])
        tags, before = dict(state.tags), self._shown.get(head)
        given = _given(at)["run_id"]
        if state.time and given != at.there.run_id:
            tags["mantik.own_run_id"] = given
        known = before.tags if before is not None else {}
        if before is None and found[0].there.described:  # by another process, perhaps
            known = at.client.get_run(at.there.run_id).data.tags
        self._shown.pop(head, None)
        for name in known.keys() & STATE_TAGS - tags.keys():
            unless_refused(partial(at.client.delete_tag, at.there.run_id, name))  # it may be gone
        _set_tags(
            at.client, at.there.run_id,
            {name: value for name, value in tags.items() if known.get(name) != value},
        )  # fmt: skip
        if state.time:
            moment = int(state.time * 1000)
            if at.log.end(at.run.id) is None:  # it was settled
                self._end_members(at, moment)
            at.client.set_terminated(at.there.run_id, state.status, moment)
            return
        # A job that logs directly may itself have ended its run.
        if before is None or before.status != state.status or any(each.end for each in found):
            for run_id in at.there.members.values():
                unless_refused(partial(at.client.update_run, run_id, status=state.status))
            at.client.update_run(at.there.run_id, status=state.status)
        self._shown[head] = replace(state, tags=tags)

    def _store(self, at: _At, directory: str, status: str = "", *, doubt: bool = False) -> None:
        """Publish what is new in a job's store; another process may have published more of it."""
        if at.run.head != at.run.id and at.own.steps is None:
            # Up to which step earlier segments have logged each metric.
            known = at.client.get_run(at.there.run_id).to_proto().data.metrics
            self._cursor.set(at.run.id, steps={metric.key: metric.step for metric in known})
        published = self._told.setdefault(at.run.id, Published(doubt=at.own.live))
        published.doubt = published.doubt or doubt
        given, own_ids = _given(at), _given(at).get("members", {})
        replay = Replay(
            at.client, self._workdir / directory, published, partial(self._say, at), at.run.id,
            at.there.run_id, at.there.experiment_id, given["run_id"], given["experiment_id"],
            name=at.run.data["name"], steps=self._cursor.run(at.run.id).steps or {},
            members={own_ids[n]: run_id for n, run_id in at.there.members.items() if n in own_ids},
        )  # fmt: skip
        publish_store(replay, status)

    def _client(self, uri: str) -> MlflowClient:
        clients: dict[str, MlflowClient] = self._here.__dict__
        if uri not in clients:
            real = mlflow.get_tracking_uri()
            clients[uri] = MlflowClient(real if without_user(real) == uri else uri)
        return clients[uri]

    # The start of a run

    def _complete(self, at: _At) -> None:
        """Set what a run has from its start but cannot be created with."""
        if at.there.run_id != at.run.data.get("run_id"):
            self._params(at, at.there.run_id, at.run.data["params"])
        for number, member_run in at.there.members.items():
            self._params(at, member_run, at.run.data["members"][number]["params"])
        if at.run.tracked is None:
            files = self._workdir / attempt_directory(at.run.id) / ARTIFACT_FOLDER
            if files.is_dir():  # the Snakefile and the backend configs
                at.client.log_artifacts(at.there.run_id, str(files), ARTIFACT_FOLDER)

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

    # The end

    def _end(self, at: _At, attempts: Sequence[LoggedRun], end: Event) -> None:
        """Publish the end of the last of these attempts, and what its job has left."""
        assert at.run.record is not None
        assert at.run.tracked is not None
        status = at.run.tracked.status
        # Where the site's clock is known to the second only, one may seem to end before another
        # that it goes on after; MLflow sorts by time.
        before = [
            each.record.times.ended or 0.0 for each in attempts[:-1] if each.record is not None
        ]
        moment = int(max([at.run.record.times.ended or end.time, *before]) * 1000)
        figures, step = end_figures(at.log, attempts, end)
        metrics = [Metric(name, value, moment, step) for name, value in figures.items()]
        self._accepted(at, partial(at.client.log_batch, at.there.run_id, metrics=metrics))
        what = "the rest of what the job logged is left out"
        directory, doubt = store_directory(at.run.id), at.own.begun >= end.seq
        left = status if status != GOES_ON else "KILLED"
        self._accepted(at, lambda: self._store(at, directory, left, doubt=doubt), what)
        self._end_members(at, moment, finished=status == "FINISHED")
        self._accepted(at, lambda: self._files(at, attempts, end), what)

    def _end_members(self, at: _At, moment: int, *, finished: bool = False) -> None:
        """End the runs of a group's members; `finished` is whether the group has, `moment` in ms.

        A member whose end the group has not noted did not start, or was ended with the group.
        """
        known = dict(_read_ends(self._workdir / member_ends(at.run.id)))
        own_ids = _given(at).get("members", {})
        for number, run_id in at.there.members.items():
            own_id = own_ids.get(number, run_id)
            ended = "FINISHED" if finished else "KILLED"
            tags = [RunTag("mantik.own_run_id", own_id)] if own_id != run_id else []
            metrics = []
            if int(number) in known:
                code, seconds = known[int(number)]
                ended = "FINISHED" if code == 0 else "FAILED"
                tags.append(RunTag("mantik.exit_code", str(code)))
                metrics.append(Metric("mantik/running_seconds", float(seconds), moment, 0))
            unless_refused(partial(at.client.log_batch, run_id, metrics=metrics, tags=tags))
            unless_refused(partial(at.client.set_terminated, run_id, ended, moment))

    def _files(self, at: _At, attempts: Sequence[LoggedRun], end: Event) -> None:
        """Upload script, log and backend config, unless the segment is submitted again."""
        assert at.run.tracked is not None
        status, folders = at.run.tracked.status, [ARTIFACT_FOLDER]
        if segments := list_segments(at.log, attempts):
            own = segments[-1]["attempt"] == at.run.id
            if status == GOES_ON:
                if not own:
                    return
                # Those of the run are the last one's.
                folders = [f"{ARTIFACT_FOLDER}/segment-{segments[-1]['segment']}"]
            elif at.run.one and own and status != "FINISHED":
                # A retry may replace the others.
                folders.append(f"{ARTIFACT_FOLDER}/attempt-{segments[-1]['segment']}")
        directory = self._workdir / attempt_directory(at.run.id) / ARTIFACT_FOLDER
        for name, path in (
            ("backend-config.yaml", at.run.data["config"]),
            ("log.txt", end.data["log"]),
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


def _given(at: _At) -> Mapping[str, Any]:
    """Return the ids that the job knows, MLflow's if it knows none."""
    assert at.run.tracked is not None
    return at.run.tracked.given or {
        "run_id": at.there.run_id, "experiment_id": at.there.experiment_id,
        "members": at.there.members,
    }  # fmt: skip


def _set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    if tags:
        client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])


def _update_workflow_run(
    client: MlflowClient, log: Log, run: LoggedRun, run_id: str, events: Sequence[Event]
) -> None:
    """Publish the counts of jobs by state, what they used, and the pictures; and its end.

    `events` are those of the workflow that are not published yet.
    """
    last = {event.kind: event for event in events}
    end = last.get(EventKind.ENDED)
    now = end.time if end is not None else time.time()
    jobs = log.jobs(run.id)
    moment, step = int(now * 1000), int(now - run.created)
    allocations = read_allocations(log.db, run.created)
    figures = workflow_figures(jobs, allocations).items()
    metrics = [Metric(name, value, moment, step) for name, value in figures]
    said = {"mantik.reason": end.data["words"]} if end is not None else {}
    begun = [e for e in events if e.kind in (EventKind.BEGUN, EventKind.DETACHED)]
    if begun and begun[-1].kind is EventKind.DETACHED:
        said[DETACHED] = format_moment(begun[-1].time)
    tags = [RunTag(name, value) for name, value in said.items() if value]
    client.log_batch(run_id, metrics=metrics, tags=tags)
    if DETACHED not in said and (begun or end is not None):
        unless_refused(lambda: client.delete_tag(run_id, DETACHED))  # maybe it was not detached
    pipeline = log.pipeline(run.id)
    if pipeline is not None:
        members = read_members(log.db)
        waiting = {tracked.attempt_id for tracked, _ in jobs if tracked.behind}
        found = overview_jobs([record for _, record in jobs], controlled=True, members=members)
        attempts = [replace(job, note=job.remark) for job in found if job.id not in waiting]
        over = end is not None
        picture = make_picture(run.data["name"], pipeline, attempts, now, over=over)
        _draw(client, run.id, run_id, picture)
    if end is not None:
        client.set_terminated(run_id, end.data["status"], int(end.time * 1000))


def _draw(client: MlflowClient, run_of: str, run_id: str, shown: Picture) -> None:
    try:
        drawn = render_files(shown)
    except Exception as error:  # noqa: BLE001 - an error in drawing must not block other runs
        sys.stderr.write(f"{run_of}: the pictures cannot be drawn: {error!r}\n")
        return
    with tempfile.TemporaryDirectory() as directory:
        for name, text in drawn.items():
            Path(directory, name).write_text(text, encoding="utf-8")
        client.log_artifacts(run_id, directory, ARTIFACT_FOLDER)


def _make_member_runs(
    client: MlflowClient, run: LoggedRun, group_run: str, experiment_id: str, *, again: bool
) -> dict[str, str]:
    """Create the runs of a group's members, and return their ids by number.

    `again` is whether some may have been created before.
    """
    made = {}
    for number, member in run.data.get("members", {}).items():
        mark = f"{run.id}/{number}"
        found = client.search_runs([experiment_id], f"tags.`{_MEMBER}` = '{mark}'") if again else ()
        made[number] = (
            found[0].info.run_id
            if found
            else client.create_run(
                experiment_id, start_time=int(run.created * 1000),
                tags={**member["tags"], _MEMBER: mark, PARENT_RUN_TAG: group_run},
                run_name=member["name"][:NAME_LENGTH],
            ).info.run_id
        )  # fmt: skip
    return made


def _read_ends(path: Path) -> Iterator[tuple[int, tuple[int, int]]]:
    """Read exit code and seconds of each member that a group has noted, by number."""
    if not path.is_file() or path.stat().st_size > _LONGEST_ENDS:
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):  # half written
            number, code, seconds = map(int, line.split())
            yield number, (code, seconds)
