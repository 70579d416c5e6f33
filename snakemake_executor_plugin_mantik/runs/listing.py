"""List and find runs, in MLflow and in their directories on this machine. Needs mlflow."""

import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Final

from ..common.errors import MantikError, UserError, find_alike
from ..config.units import parse_duration
from ..tracking.run import WAITING_REASON
from . import local_runs
from .controller import run_status, settle_run
from .directories import RunDirectory, runs_home
from .store import ENDED, SITE, RunStore, join_conditions, quote_filter, store_exists, tracking_uri
from .submit import remove_aborted

_OURS: Final = "mantik/"
"""The prefix of the metrics that tracking adds."""
DIRECTORY_OF: Final = "mantik.run"
"""The tag of the MLflow run of a later attempt: the run whose directory it belongs to."""
_ID: Final = re.compile(r"[0-9a-f]{4,32}")
_WAITS: Final = "SCHEDULED"
"""MLflow's status of a run whose job has not started."""
GONE: Final = "its controller is gone: smk-mantik runs continue"
STALE: Final = "as known on this machine: MLflow does not answer"
LATE: Final = "MLflow does not know this yet; publishing continues in the background"


@dataclass(frozen=True)
class RunRow:
    """A run; times are seconds since the epoch, durations seconds.

    Attributes:
        state: MLflow's status.
        waited, ran: time in the queue, and running; None if unknown.
        metrics: the latest values of the metrics that the code logged.
        note: what the user can do about the run, why it failed, or why it cannot start.
        here: whether its directory is on this machine, so that it can be continued or resubmitted.
        uri: its MLflow store.
        times: who tells how long it ran, if its job could not report that; else empty.
    """

    run_id: str
    name: str
    experiment: str
    state: str
    site: str
    entry_point: str
    started: float
    ended: float | None
    waited: float | None
    ran: float | None
    metrics: Mapping[str, float | str]
    note: str
    here: bool
    uri: str
    times: str = ""


@dataclass(frozen=True)
class RunFilter:
    """A filter for runs; an empty field matches all.

    Attributes:
        state: MLflow's status.
        since: seconds since the epoch.
    """

    experiment: str = ""
    state: str = ""
    site: str = ""
    since: float = 0.0
    limit: int = 50

    def matches(self, row: RunRow) -> bool:
        """Return whether the filter, but for its limit, matches a row."""
        return (
            self.experiment in {"", row.experiment}
            and self.state in {"", row.state}
            and self.site in {"", row.site}
            and row.started >= self.since
        )


def list_rows(wanted: RunFilter, say: Callable[[str], None]) -> list[RunRow]:
    """List the latest runs of the user's store and of all stores of runs on this machine.

    First ends aborted submissions, and reports ended runs to MLflow. Of a store that does not
    answer, lists the runs of this machine. `say` receives a line about each such store.

    Raises:
        UserError: MLflow cannot express the filter, or the experiment does not exist.
        MantikError: no store answers, and no run was submitted from this machine.
    """
    # By store, why it does not answer: each is asked once.
    away = remove_aborted()
    there = local_runs.list_local_runs()
    for each in there:
        if (uri := each.request.tracking_uri) not in away and each.end is not None:
            try:
                settle_run(each)
            except MantikError as error:
                away[uri] = error
    uris = dict.fromkeys([tracking_uri(os.environ), *(h.request.tracking_uri for h in there)])
    stores = [uri for uri in uris if store_exists(uri)]
    found: list[RunRow] = []
    for uri in stores:
        if uri not in away:
            try:
                found += _in_store(RunStore(uri), wanted, {h.request.run_id: h for h in there})
            except UserError:
                raise
            except MantikError as error:
                away[uri] = error
        if uri in away:
            rows = [make_local_row(h) for h in there if h.request.tracking_uri == uri]
            found += [row for row in rows if wanted.matches(row)]
    if away and len(away) == len(stores) and not there:
        raise next(iter(away.values()))
    if wanted.experiment and not found and not away:
        _see_that_it_is_there(wanted.experiment, stores)
    for why in away.values():
        say(str(why))
    return sorted(found, key=lambda row: row.started, reverse=True)[: wanted.limit]


def _see_that_it_is_there(experiment: str, uris: Sequence[str]) -> None:
    names = {name for uri in uris for name in RunStore(uri).experiments()}
    if experiment not in names:
        near = find_alike(experiment, names, 3)
        raise UserError(
            f"there is no experiment {experiment!r}", where="--experiment",
            do=f"Did you mean {near}?" if near else "Use one that MLflow shows",
        )  # fmt: skip


def _in_store(
    store: RunStore, wanted: RunFilter, there: Mapping[str, RunDirectory]
) -> list[RunRow]:
    condition = join_conditions(
        [
            f"tags.`{SITE}` = {quote_filter(wanted.site)}"
            if wanted.site
            else f"tags.`{SITE}` LIKE '%'",
            f"attributes.start_time >= {int(wanted.since * 1000)}" if wanted.since else "",
            f"attributes.status = {quote_filter(wanted.state)}" if wanted.state else "",
        ]
    )
    runs = store.search(condition, wanted.experiment, wanted.limit)
    names = {e: store.experiment_name(e) for e in {run.info.experiment_id for run in runs}}
    return [
        make_row(run, names[run.info.experiment_id], there.get(_owner(run)), store) for run in runs
    ]


def _owner(run: Any) -> str:
    """Return the run whose directory a run belongs to; other users may have written its tags."""
    owner = str(run.data.tags.get(DIRECTORY_OF, ""))
    return owner if _ID.fullmatch(owner) else str(run.info.run_id)


def make_row(run: Any, experiment: str, here: RunDirectory | None, store: RunStore) -> RunRow:
    """Make the row of an MLflow run; `here` is None if its directory is not on this machine."""
    info, tags = run.info, run.data.tags
    state, note = info.status, str(tags.get("mantik.reason", "")).partition("\n")[0]
    why = str(tags.get(WAITING_REASON, "")) if state == _WAITS else ""
    waited = run.data.metrics.get(f"{_OURS}queued_seconds")
    ran = run.data.metrics.get(f"{_OURS}running_seconds")
    if here is not None and (attempts := here.attempts):
        of_run = [t for t in attempts if t.id == tags.get("mantik.attempt_id")] or attempts[:1]
        if of_run[0].segments:  # MLflow has the sums
            of_run = [t for t in attempts if t.site_jobs and not t.state.final] or of_run
        else:
            waited, ran = of_run[0].waited or waited, of_run[0].ran or ran
        why = of_run[0].hindrance
    if why and not note:
        note = f"cannot start: {why}"
    if here is not None and here.request.run_id == info.run_id:
        if here.gone:
            note = GONE
        elif here.end is not None and state not in ENDED:
            state, note = run_status(here), LATE
    return RunRow(
        run_id=info.run_id, name=info.run_name, experiment=experiment, state=state,
        site=tags.get(SITE, ""), entry_point=tags.get("mlflow.project.entryPoint", ""),
        started=info.start_time / 1000,
        ended=info.end_time / 1000 if info.end_time else None,
        waited=waited, ran=ran,
        metrics=finite_metrics(
            {k: v for k, v in run.data.metrics.items() if not k.startswith(_OURS)}
        ),
        note=note, here=here is not None, uri=store.uri, times=tags.get("mantik.times", ""),
    )  # fmt: skip


def make_local_row(here: RunDirectory) -> RunRow:
    """Make the row of a run of this machine from what is known here, without MLflow."""
    request, attempts = here.request, here.attempts
    last = attempts[-1] if attempts else None
    state = _WAITS if last is None or last.started is None else "RUNNING"
    return RunRow(
        run_id=request.run_id, name=request.name, experiment=request.experiment,
        state=run_status(here) if here.end is not None else state,
        site=request.site, entry_point=request.entry_point, started=request.created,
        ended=here.end["time"] if here.end is not None else None,
        waited=last.waited if last else None, ran=last.ran if last else None, metrics={},
        note=GONE if here.gone else STALE, here=True, uri=request.tracking_uri,
        times=last.times.words if last else "",
    )  # fmt: skip


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Turn infinities and NaN, which JSON does not have, into texts."""
    return {name: v if math.isfinite(v) else str(v) for name, v in metrics.items()}


@dataclass(frozen=True)
class FoundRun:
    """A run that was found.

    Attributes:
        run: MLflow's run; None if MLflow does not have it any more, was not asked, or does not
            answer.
        uri: its MLflow store.
        here: None if its directory is not on this machine.
        away: why MLflow does not answer.
    """

    run_id: str
    run: Any
    uri: str
    here: RunDirectory | None
    away: MantikError | None = None

    @cached_property
    def store(self) -> RunStore:
        return RunStore(self.uri)


def find_run(word: str) -> FoundRun:
    """Find a run by its id, the beginning of its id, or its name.

    Asks MLflow only about runs that were not submitted from this machine.

    Raises:
        UserError: no run or several match.
        MantikError: a request to MLflow fails.
    """
    there = local_runs.find_local_run(word)
    if there is not None:
        return FoundRun(there.request.run_id, None, there.request.tracking_uri, there)
    uri = tracking_uri(os.environ)
    uris = dict.fromkeys([uri, *(h.request.tracking_uri for h in local_runs.list_local_runs())])
    for each in filter(store_exists, uris):
        store = RunStore(each)
        ours = f"tags.`{SITE}` LIKE '%'"
        by_id = f"attributes.run_id LIKE '{word}%'" if _ID.fullmatch(word) else ""
        runs = store.search(join_conditions([by_id, ours]), limit=5) if by_id else []
        runs = runs or store.search(
            join_conditions([f"attributes.run_name = {quote_filter(word)}", ours])
        )
        if len(runs) > 1:
            raise local_runs.ambiguous_run(word, [run.info.run_id for run in runs])
        if runs:
            directory = RunDirectory(runs_home() / _owner(runs[0]))
            found = directory if directory.request_file.exists() else None
            return FoundRun(runs[0].info.run_id, runs[0], each, found)
    raise UserError(
        f"there is no run {word!r} here or in {uri}",
        do="See the existing runs: smk-mantik runs list",
    )


def refresh(found: FoundRun) -> FoundRun:
    """Read a run from its directory and from MLflow, and report its end to MLflow if need be.

    A run whose directory is not on this machine is returned as it was found.

    Raises:
        MantikError: the run's request cannot be read.
    """
    if found.here is None:
        return found
    try:
        run = found.store.run(found.run_id)
        if found.here.end is not None and run is not None and run.info.status not in ENDED:
            settle_run(found.here)
            run = found.store.run(found.run_id)
    except MantikError as error:
        return replace(found, run=None, away=error)
    return replace(found, run=run, away=None)


def parse_since(text: str) -> float:
    """Parse a date such as 2027-03-31, or an age such as 12h or 7d, to seconds since the epoch.

    Raises:
        UserError: the text is neither.
    """
    with suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    try:
        return time.time() - parse_duration(text)
    except ValueError as error:
        raise UserError(
            f"{text!r} is not a time ({error})", where="--since",
            do="Use a date such as 2027-03-31, or an age such as 12h or 7d",
        ) from None  # fmt: skip
