"""Format runs for `smk-mantik runs`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from ..common.errors import MantikError
from ..common.humanize import humanize_count, humanize_duration, humanize_size
from ..mlproject.single_rule import RESULTS
from . import shared

if TYPE_CHECKING:
    from ..runs.listing import FoundRun, RunRow

_SHORT: Final = 8
"""Characters of a run's id in a table."""

_METRICS: Final = 4
"""Maximum number of a run's metrics in a table."""


def runs_table(rows: "Sequence[RunRow]") -> Table:
    """Return a table with one row per run."""
    titles = (
        "run", "name", "state", "site", "entry point", "experiment", "submitted", "waited", "ran",
        "metrics", "",
    )  # fmt: skip
    shown = shared.new_table(titles, right=("waited", "ran"))
    for row in rows:
        times = [humanize_duration(t) if t is not None else "" for t in (row.waited, row.ran)]
        shared.add_row(
            shown,
            [
                row.run_id[:_SHORT], row.name, row.state, row.site, row.entry_point, row.experiment,
                _moment(row.started), *times, _metrics(row.metrics), row.note,
            ],
        )  # fmt: skip
    return shown


def run_details(found: "FoundRun") -> dict[str, Any]:
    """Return everything that is known about a run, for JSON."""
    from ..runs.listing import finite_metrics, make_local_row, make_row
    from ..runs.store import versions_of_run

    here = found.here
    made: dict[str, Any] = {"run_id": found.run_id, "state": "deleted in MLflow", "note": ""}
    if found.run is not None:
        experiment = found.store.experiment_name(found.run.info.experiment_id)
        made |= asdict(make_row(found.run, experiment, here, found.store))
        made["metrics"] = finite_metrics(found.run.data.metrics)
        made["parameters"] = dict(found.run.data.params)
        made["tags"] = {k: v for k, v in found.run.data.tags.items() if k.startswith("mantik.")}
        with suppress(MantikError):  # a server without a registry
            models, registered = versions_of_run(found.store, found.run)
            made["models"] = models
            made["registered"] = [
                {"name": v.name, "version": v.number, "aliases": list(v.aliases)}
                for v in registered
            ]
    if found.away is not None and here is not None:
        made |= asdict(make_local_row(here))
        made["mlflow"] = str(found.away)
    if here is not None:
        results = here.workdir / RESULTS
        made |= {
            "request": asdict(here.request),
            "directory": str(here.path),
            "results": str(results) if results.is_dir() else "",
            "controller": "there" if here.alive else "gone" if here.gone else "ended",
            "jobs": [
                {
                    "id": ", ".join(t.site_jobs),
                    "queue": t.queue,
                    "segment": t.segment + 1 if t.segments else None,
                    "segments": t.segments or None,
                    "outcome": t.outcome,
                    "waiting_reason": t.hindrance,
                }
                for t in here.tries
            ],
        }
    return made


def run_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Format the result of `run_details` for people."""
    request: Mapping[str, Any] = found.get("request", {})
    yield f"Run {found['run_id']}"
    shown = {
        "name": found.get("name") or request.get("name", ""),
        "state": f"{found['state']}{_in_brackets(found['note'])}",
        "experiment": found.get("experiment") or request.get("experiment", ""),
        "store": found.get("uri") or request.get("tracking_uri", ""),
        "project": f"{request.get('uri', '')}{_in_brackets(_version(request))}",
        "entry point": found.get("entry_point") or request.get("entry_point", ""),
        "site": found.get("site") or request.get("site", ""),
        "account": request.get("account", ""),
        "backend config": request.get("config_source", ""),
        "again of": request.get("again_of", ""),
        "submitted": _moment(request.get("created") or found.get("started") or 0.0),
        "waited": _duration(found.get("waited")),
        "ran": f"{_duration(found.get('ran'))}{_in_brackets(found.get('times', ''))}",
        "directory": found.get("directory", ""),
        "results": found.get("results", ""),
        "MLflow": found.get("mlflow", ""),
        "models": ", ".join(found.get("models", ())),
        "registered as": ", ".join(
            f"{v['name']}, version {v['version']}{_in_brackets(', '.join(v['aliases']))}"
            for v in found.get("registered", ())
        ),
    }
    jobs = [_job_line(job) for job in found.get("jobs", ())]
    in_turn = any(job["segment"] for job in found.get("jobs", ()))
    if not in_turn:
        shown["job" if len(jobs) == 1 else "jobs"] = "; ".join(jobs)
    yield from (f"  {name}: {value}" for name, value in shown.items() if value)
    if in_turn:
        yield "  jobs:"
        yield from (f"    {job}" for job in jobs)
    given = {**request.get("parameters", {}), **request.get("extra", {})}
    for title, values in (
        ("parameters", found.get("parameters") or given),
        ("metrics", found.get("metrics", {})),
    ):
        if values:
            yield f"  {title}:"
            yield from (f"    {name} = {value}" for name, value in sorted(values.items()))


def _job_line(job: Mapping[str, Any]) -> str:
    part = f"segment {job['segment']} of {job['segments']}" if job["segment"] else ""
    return ", ".join(word for word in (part, job["id"], job["queue"], job["outcome"]) if word)


def deletion_lines(found: "FoundRun", *, site: bool) -> Iterator[str]:
    """Describe what is deleted with a run, with `site` also its workspace at the site."""
    if found.run is not None:
        info = found.run.info
        yield f"MLflow: run {found.run_id} ({info.run_name}, {info.status}) in {found.store.uri}"
    here = found.here
    if here is not None and here.request.run_id == found.run_id:
        files = [path for path in here.path.rglob("*") if path.is_file()]
        size = humanize_size(sum(path.lstat().st_size for path in files))
        yield f"here: {here.path} ({humanize_count(len(files), 'file')}, {size})"
        if site:
            yield f"at {here.request.site}: its workspace"


def _version(request: Mapping[str, Any]) -> str:
    return ", ".join(filter(None, [request.get("version"), request.get("commit", "")[:12]]))


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _duration(seconds: float | None) -> str:
    return humanize_duration(seconds) if seconds is not None else ""


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""


def _metrics(metrics: Mapping[str, float | str]) -> str:
    some = [
        f"{name}={value if isinstance(value, str) else f'{value:.4g}'}"
        for name, value in sorted(metrics.items())[:_METRICS]
    ]
    more = [f"and {len(metrics) - _METRICS} more"] if len(metrics) > _METRICS else []
    return ", ".join([*some, *more])
