"""Publish the run of a workflow, and of a group's members. Part of the worker."""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from mlflow.entities import Metric, RunTag
from mlflow.tracking import MlflowClient

from ..journal import Event, EventKind, read_allocations, read_members
from ..views import render_files
from ..views.picture import Picture, make_picture
from ..views.workflow import overview_jobs
from . import segments
from .cursor import Log, LoggedRun
from .requests import unless_refused
from .run import ARTIFACT_FOLDER, NAME_LENGTH, PARENT_RUN_TAG

DETACHED: Final = "mantik.detached"
"""The tag that holds since when the workflow's jobs continue without a controller."""


def update_workflow_run(
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
    figures = segments.workflow_figures(jobs, allocations).items()
    metrics = [Metric(name, value, moment, step) for name, value in figures]
    said = {"mantik.reason": end.data["words"]} if end is not None else {}
    begun = [e for e in events if e.kind in (EventKind.BEGUN, EventKind.DETACHED)]
    if begun and begun[-1].kind is EventKind.DETACHED:
        said[DETACHED] = segments.format_moment(begun[-1].time)
    tags = [RunTag(name, value) for name, value in said.items() if value]
    client.log_batch(run_id, metrics=metrics, tags=tags)
    if DETACHED not in said and (begun or end is not None):
        unless_refused(lambda: client.delete_tag(run_id, DETACHED))  # maybe it was not detached
    pipeline = log.pipeline(run.id)
    if pipeline is not None:
        members = read_members(log.db)
        ahead = {tracked.try_id for tracked, _ in jobs if tracked.behind}
        found = overview_jobs([record for _, record in jobs], controlled=True, members=members)
        tries = [replace(job, note=job.remark) for job in found if job.id not in ahead]
        over = end is not None
        picture = make_picture(run.data["name"], pipeline, tries, now, over=over)
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


_MEMBER: Final = "mantik.group_member"
"""The tag that names the try of a group and the number of the member that a run belongs to."""
_LONGEST_ENDS: Final = 1 << 20


def make_member_runs(
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


def read_ends(path: Path) -> Iterator[tuple[int, tuple[int, int]]]:
    """Read exit code and seconds of each member that a group has noted, by number."""
    if not path.is_file() or path.stat().st_size > _LONGEST_ENDS:
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):  # half written
            number, code, seconds = map(int, line.split())
            yield number, (code, seconds)
