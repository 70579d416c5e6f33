"""A report of a workflow as one HTML file that fetches nothing, and its jobs as CSV."""

import csv
import time
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from io import StringIO
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final

from ..common.errors import ConfigError
from ..common.humanize import humanize_count, humanize_duration, humanize_size
from ..common.secret_names import make_masker
from ..common.state_directory import STATE, read_end
from ..config.reading import read_backend_config
from ..jobs.reasons import Reason, same_cause
from ..journal import SiteRecord, SnakemakeRun, is_controlled, read_workflow
from .picture import (
    NodeState,
    Picture,
    count_states,
    format_timestamp,
    make_picture,
    render_template,
)
from .pipeline import render_pipeline
from .timeline import render_timeline
from .usage import (
    ENOUGH,
    PoolUsage,
    RuleUsage,
    format_hours,
    sum_known,
    usage_by_pool,
    usage_by_rule,
)
from .workflow import JobView, overview_jobs

GENERATOR: Final = "smk-mantik report"
"""Marks a file as a report, which the next one may replace."""

MOST_RULES: Final = 100
"""The most rules in a table; those with the most core hours come first."""

MOST_FAILURES: Final = 20
"""The most different failures that are shown, and the most attempts that later ones have
replaced."""
_MOST_NAMES: Final = 200
"""The most names of jobs that failed alike."""
MOST_JOBS: Final = 2000
"""The most attempts in the table of jobs; those of failed jobs come first."""

_BINS: Final = 20
"""The number of bars of a distribution."""

_TRACEBACK: Final = "Traceback (most recent call last)"

_CSV: Final = (
    *("job", "rule", "id", "attempt", "segment", "site", "queue", "state", "failure", "exit_code"),
    *("waited_for_jobs", "waited", "ran", "walltime", "cores", "memory", "memory_used"),
    *("waiting_since", "running_since", "finished", "log"),
)
"""The columns of CSV: keys of a job in JSON."""

_TAIL_BYTES: Final = 4096
_TAIL_LINES: Final = 30
"""How much of the end of a failed job's output is shown."""

_ENDINGS: Final[Mapping[str, str]] = {
    "failed": "ended with failures",
    "killed": "was interrupted",
    "detached": "left its jobs running",
}

_ABOUT: Final[Mapping[str, str]] = {
    "command": "Command",
    "snakefile": "Snakefile",
    "directory": "Directory",
    "host": "Started on",
    "user": "User",
    "snakemake": "Snakemake",
    "executor": "snakemake-executor-plugin-mantik",
    "python": "Python",
}
"""Titles of the facts of a run, in their order."""


@dataclass(frozen=True)
class Report:
    """What a report shows.

    Attributes:
        going_on: whether a Snakemake runs, or jobs may still run at a site.
        runs: the runs of Snakemake that it is about, the last one last.
        submitted: how many attempts were submitted to sites, segments that were not needed
            included.
        picture: at the time when the report was made.
        jobs: all attempts, the oldest first.
    """

    workdir: Path
    going_on: bool
    runs: Sequence[SnakemakeRun]
    submitted: int
    picture: Picture
    jobs: Sequence[JobView]
    rules: Sequence[RuleUsage]
    pools: Sequence[PoolUsage]
    sites: Mapping[str, SiteRecord]
    mask: Callable[[str], str]

    def failed(self, *, last: bool) -> Sequence[JobView]:
        """Return the failed jobs, or the attempts that failed and were repeated."""
        return [job for job in self.jobs if job.last is last and job.state is NodeState.FAILED]

    def log(self, job: JobView) -> str:
        """Return the path of a job's output here; empty if there is none."""
        path, here = Path(job.record.log), self.workdir.resolve()
        inside = job.record.log and path.is_relative_to(here)
        return str(path.relative_to(here)) if inside else job.record.log

    def tail(self, job: JobView) -> str:
        """Return the end of a job's output; empty if it is not here."""
        if not job.record.log:
            return ""
        end = read_end(self.workdir / job.record.log, _TAIL_BYTES)
        lines = end.decode(errors="replace").splitlines()
        # The first one may be a part of a line.
        return self.mask("\n".join(lines[len(end) == _TAIL_BYTES :][-_TAIL_LINES:]))

    def as_json(self) -> dict[str, Any]:
        """Return the numbers as a value for JSON; times are seconds, and those since the epoch."""
        run = self.runs[-1] if self.runs else None
        times = {"began": run.began, "ended": run.ended, "ending": run.ending} if run else {}
        return {
            "title": self.picture.title,
            "made": self.picture.now,
            "going_on": self.going_on,
            "run": times | dict(run.about) if run else None,
            "jobs": count_states(node.state for node in self.picture.nodes),
            "failed": len(self.failed(last=True)),
            "repeated": len(self.failed(last=False)),
            "rules": [asdict(usage) for usage in self.rules],
            "pools": [asdict(usage) for usage in self.pools],
        }


def gather_report(
    workdir: Path, *, every: bool, secrets: Iterable[str], warn: Callable[[str], None]
) -> Report:
    """Read what a report shows of a workflow; works beside a running Snakemake.

    With `every` it shows all runs of Snakemake, not only the last one that had jobs at sites.
    `secrets` are masked in texts of jobs, like those in the sites' backend configs. `warn` writes a
    line to the user's terminal.

    Raises:
        JournalError: there is no journal, or it cannot be read.
    """
    controlled = is_controlled(workdir / STATE)
    history = read_workflow(workdir / STATE)
    attempts = overview_jobs(history.attempts, controlled=controlled, members=history.members)
    jobs, runs = [job for job in attempts if not job.upcoming], history.runs
    allocations = history.allocations
    if not every:
        for run in reversed(history.runs):
            # Those that were not over when it began.
            if some := [j for j in jobs if (j.record.finished or run.began) >= run.began]:
                jobs, runs = some, (run,)
                allocations = tuple(a for a in allocations if (a.ended or run.began) >= run.began)
                break
    sites = {name: site for name, site in history.sites.items() if name in {j.site for j in jobs}}
    mask = make_masker([*secrets, *_secrets_of(sites.values(), warn)])
    jobs = [
        replace(
            job, note=mask(job.remark), record=replace(job.record, outcome=mask(job.record.outcome))
        )
        for job in jobs
    ]
    now = time.time()
    latest = bool(runs) and runs[-1] == history.runs[-1]
    going_on = controlled or any(job.record.may_run for job in jobs)
    shown = {job.id for job in jobs}
    for job in attempts:  # the segments that waited behind the ones that are shown
        if job.record.follows in shown:
            shown.add(job.id)
    return Report(
        workdir,
        going_on,
        runs,
        sum(job.id in shown and job.record.submitted is not None for job in attempts),
        make_picture(
            (runs[-1].about.get("name") if runs else "") or workdir.resolve().name,
            runs[-1].pipeline if latest else None,
            jobs,
            now,
            over=not going_on,
        ),
        jobs,
        usage_by_rule(jobs, now),
        usage_by_pool(allocations, (job for job in jobs if job.present)),
        sites,
        mask,
    )


def _secrets_of(sites: Iterable[SiteRecord], warn: Callable[[str], None]) -> Iterator[str]:
    for path in dict.fromkeys(site.config for site in sites if site.config):
        try:
            config, _ = read_backend_config(Path(path))
        except ConfigError:
            warn(f"Secrets in {path} are not masked: it cannot be read any more, or is invalid.")
        else:
            yield from config.secrets


def render_report(report: Report) -> str:
    """Return the HTML of a report (UTF-8). All names and texts are escaped."""
    rules, failed = report.rules, report.failed(last=True)
    script = render_template("sort.js.j2")
    sites = sorted({site for usage in rules for site in usage.core_hours})
    return render_template(
        "report.html.j2",
        generator=GENERATOR,
        version=version("snakemake-executor-plugin-mantik"),
        report=report,
        picture=report.picture,
        about=_about(report),
        status=_status(report),
        tiles=_tiles(report),
        failed=failed,
        failures=_alike(report, failed),
        listed=sorted(report.jobs, key=lambda job: job.state is not NodeState.FAILED)[:MOST_JOBS],
        script=script,
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
        repeated=report.failed(last=False),
        most_failures=MOST_FAILURES,
        most_names=_MOST_NAMES,
        reason=lambda job: Reason(job.record.reason).words if job.record.reason else "",
        queues={
            name: sorted({j.record.queue for j in report.jobs if j.site == name and j.record.queue})
            for name in report.sites
        },
        rules=rules,
        shown=rules[:MOST_RULES],
        meters=lambda usage: _meters(usage, [j for j in report.jobs if j.rule == usage.rule]),
        hours=format_hours,
        sum_known=sum_known,
        site_hours={
            site: sum_known(
                [
                    *(usage.core_hours.get(site) for usage in rules),
                    *(pool.idle for pool in report.pools if pool.site == site),
                ]
            )
            for site in sites
        },
        pipeline=render_pipeline(report.picture),
        timeline=render_timeline(report.picture),
        enough=ENOUGH,
    )


def render_csv(report: Report) -> str:
    """Return all attempts as CSV, a line each; times are seconds, memory is bytes."""
    text = StringIO()
    writer = csv.DictWriter(text, _CSV, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(job.as_json(report.picture.now) for job in report.jobs)
    return text.getvalue()


def _status(report: Report) -> str:
    if report.going_on:
        return "It is still going on: this is a snapshot."
    if not report.runs:
        return ""
    run = report.runs[-1]
    if not run.ended:
        return "Its Snakemake did not report its end."
    return f"Snakemake {_ENDINGS.get(run.ending, run.ending)} at {format_timestamp(run.ended)}."


def _about(report: Report) -> Sequence[tuple[str, str]]:
    found = []
    for run in report.runs[-1:]:
        found.append(("Begun", format_timestamp(run.began)))
        if run.ended:
            found.append(("Ended", f"{format_timestamp(run.ended)} ({run.ending})"))
        found += [(words, run.about[n]) for n, words in _ABOUT.items() if run.about.get(n)]
    return found


def _tiles(report: Report) -> Sequence[tuple[str, str, str]]:
    """Return the summary: a value, what it is, and a line below."""
    rules, number = report.rules, len(report.picture.nodes)
    hours = sum_known(usage.all_core_hours for usage in rules)
    idle = sum(pool.idle for pool in report.pools)
    submitted = f"{report.submitted:,} submitted to sites"
    tiles = [(f"{number:,}", "jobs" if number != 1 else "job", submitted)]
    if sent := [job for job in report.jobs if job.record.submitted is not None]:
        first = min(job.record.submitted or 0.0 for job in sent)
        last = max(job.ended or job.record.finished or report.picture.now for job in sent)
        since = f"since {format_timestamp(first)}"
        tiles.append((humanize_duration(last - first), "from first to last", since))
    sites = humanize_count(len({job.site for job in report.jobs}), "site")
    below = f"{format_hours(idle)} of them idle in pools" if report.pools else f"at {sites}"
    tiles.append((format_hours(sum_known([hours, idle or None])), "core hours", below))
    # The share of the requested CPU time that was used, by the rules' core hours.
    known = [(u.cpu_share, u.all_core_hours or 0.0) for u in rules if u.cpu_share is not None]
    if whole := sum(of for _, of in known):
        share = sum(share * of for share, of in known) / whole
        tiles.append((f"{100 * share:.0f} %", "of CPU time used", "of the cores requested"))
    if queued := [usage.queued for usage in rules if usage.queued is not None]:
        median = humanize_duration(max(queued))
        tiles.append((median, "in the queue", "median of the rule that waits most"))
    repeated = len(report.failed(last=False))
    repeats = humanize_count(repeated, "attempt") if repeated else "none"
    tiles.append((f"{len(report.failed(last=True)):,}", "failed", f"{repeats} repeated"))
    return tiles


def _alike(report: Report, failed: Sequence[JobView]) -> Sequence[Sequence[JobView]]:
    """Return the failed jobs by equal ends: one end of each rule and reason first, then the others.

    Ends are equal if the last tracebacks are, or without one all of the output that is shown; the
    jobs' own paths may differ.
    """
    ends = [(job.cause, report.tail(job).rpartition(_TRACEBACK)[2]) for job in failed]
    number = Counter(ends)
    found = defaultdict[tuple[str, ...], list[JobView]](list)
    for job, end in zip(failed, ends, strict=True):
        # A path of all jobs may hold what is the value of a wildcard of one.
        equal = end if number[end] > 1 else (same_cause(text, job.name) for text in end)
        found[job.record.reason, *equal].append(job)
    turns = defaultdict[tuple[str, str], Iterator[int]](count)
    most_first = sorted(found.values(), key=len, reverse=True)
    return sorted(most_first, key=lambda jobs: next(turns[jobs[0].rule, jobs[0].record.reason]))


_Spread = tuple[str, str] | None
_Meter = tuple[str, str, str, float | None, bool, _Spread]


def _meters(usage: RuleUsage, jobs: Iterable[JobView]) -> Iterator[_Meter]:
    """Yield what was used of what was requested: its name, both in words, and the share, to draw.

    Whether that is near or above what was requested. And how what `jobs` used is distributed.
    """
    cores, busy = usage.cores_used, usage.gpu_busy
    memory = [job.used.memory_bytes for job in jobs if job.used.memory_bytes]
    runs = [job.record.ran for job in jobs if job.record.ran]
    yield _meter("CPU cores", cores, usage.cores, _cores, near=9.0)
    yield _meter("Memory", usage.memory_used, usage.memory, humanize_size, memory)
    yield _meter("Walltime", usage.longest, usage.walltime, humanize_duration, runs)
    if usage.gpus:
        gpus = humanize_count(usage.gpus, "GPU")
        words = "–" if busy is None else f"{busy:.0f} %"
        yield "GPUs", words, gpus, None if busy is None else busy / 100, False, None


def _spread(values: Sequence[float], write: Callable[[float], str]) -> _Spread:
    """Return a histogram as a path, and the least, the median and the most in words."""
    if len(values) < ENOUGH:
        return None
    low, high = min(values), max(values)
    width = (high - low) / _BINS or 1.0
    bins = Counter(min(_BINS - 1, int((value - low) / width)) for value in values)
    most = max(bins.values())
    bars = (f"M{at} 10V{10 - 10 * number / most:.1f}h.9V10z" for at, number in sorted(bins.items()))
    return "".join(bars), " · ".join(map(write, (low, median(values), high)))


def _cores(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.1f}"


def _meter(
    name: str,
    used: float | None,
    asked: float | None,
    write: Callable[[float], str],
    every: Sequence[float] = (),
    *,
    near: float = 0.9,
) -> _Meter:
    share = used / asked if used is not None and asked else None
    return (
        name,
        "–" if used is None else write(used),
        "" if asked is None else write(asked),
        None if share is None else min(1.0, share),
        share is not None and share > near,
        _spread(every, write),
    )
