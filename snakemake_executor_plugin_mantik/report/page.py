"""Render a report as one HTML file, without scripts and without anything that is fetched."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from snakemake_executor_plugin_mantik.common.humanize import (
    humanize_count,
    humanize_duration,
    humanize_size,
)
from snakemake_executor_plugin_mantik.pictures import NodeState, render_pipeline, render_timeline
from snakemake_executor_plugin_mantik.pictures.value import (
    GLYPHS,
    format_timestamp,
    template_environment,
    text_line,
)

from .facts import ReportFacts
from .usage import ENOUGH, RuleUsage, sum_known

GENERATOR: Final = "smk-mantik report"
"""Marks a file as a report, which the next one may replace."""

MOST_RULES: Final = 100
"""The most rules in a table; those with the most core hours come first."""

_UNKNOWN: Final = "–"

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
class Meter:
    """An amount that was used of one that was requested.

    Attributes:
        share: used by requested, from 0 to 1, to draw; None if either is unknown.
        near: whether it is near or above what was requested.
    """

    used: str
    asked: str
    share: float | None
    near: bool = False


@dataclass(frozen=True)
class UsageRow:
    """A row of the table of rules."""

    usage: RuleUsage
    states: Sequence[tuple[NodeState, int]]
    meters: Sequence[tuple[str, Meter]]
    typical: str
    queued: str
    hours: str


def render_report(facts: ReportFacts) -> str:
    """Return the HTML of a report (UTF-8). All names and texts are escaped."""
    shown = facts.rules[:MOST_RULES]
    sites = sorted({site for usage in facts.rules for site in usage.core_hours})
    environment = template_environment(__package__, "snakemake_executor_plugin_mantik.pictures")
    return environment.get_template("report.html.j2").render(
        generator=GENERATOR,
        version=version("snakemake-executor-plugin-mantik"),
        facts=facts,
        count=humanize_count,
        title=text_line(facts.title),
        about=_about(facts),
        status=_status(facts),
        states=_ordered(facts.states),
        tiles=_tiles(facts),
        rows=[_row(usage) for usage in shown],
        advised=[usage for usage in facts.rules if usage.advice or usage.remarks],
        left_out=len(facts.rules) - len(shown),
        sites=sites,
        hours=[
            (
                u.rule,
                [_hours(u.core_hours[s]) if s in u.core_hours else "" for s in sites],
                _hours(u.all_core_hours),
            )
            for u in shown
        ],
        site_hours=[
            _hours(sum_known(u.core_hours.get(site) for u in facts.rules)) for site in sites
        ],
        all_hours=_hours(sum_known(u.all_core_hours for u in facts.rules)),
        estimated=sum(usage.estimated for usage in facts.rules),
        untimed=sum(usage.untimed for usage in facts.rules),
        gpus=any(usage.gpus for usage in shown),
        pipeline=render_pipeline(facts.picture),
        timeline=render_timeline(facts.picture),
        glyphs=GLYPHS,
        enough=ENOUGH,
        made=format_timestamp(facts.now),
    )


def _status(facts: ReportFacts) -> str:
    run = facts.run
    if facts.going_on:
        return "It is still going on: this is a snapshot."
    if run is None or not run.ended:
        return "Its Snakemake did not report its end." if run is not None else ""
    return f"Snakemake {_ENDINGS.get(run.ending, run.ending)} at {format_timestamp(run.ended)}."


def _about(facts: ReportFacts) -> Sequence[tuple[str, str]]:
    run = facts.run
    if run is None:
        return []
    found = [("Begun", format_timestamp(run.began))]
    if run.ended:
        found.append(("Ended", f"{format_timestamp(run.ended)} ({run.ending})"))
    return found + [
        (words, run.about[name]) for name, words in _ABOUT.items() if run.about.get(name)
    ]


def _ordered(states: Mapping[NodeState, int]) -> Sequence[tuple[NodeState, int]]:
    return [(state, states[state]) for state in GLYPHS if states.get(state)]


def _tiles(facts: ReportFacts) -> Sequence[tuple[str, str, str]]:
    """Return the summary: a value, what it is, and a line below."""
    hours = sum_known(usage.all_core_hours for usage in facts.rules)
    jobs = sum(facts.states.values())
    tiles = [
        (f"{jobs:,}", "jobs" if jobs != 1 else "job", f"{facts.submitted:,} submitted to sites")
    ]
    if facts.first is not None and facts.last is not None:
        span = humanize_duration(facts.last - facts.first)
        tiles.append((span, "from first to last", f"since {format_timestamp(facts.first)}"))
    tiles.append((_hours(hours), "core hours", f"at {humanize_count(len(facts.queues), 'site')}"))
    if (share := _cpu_share(facts.rules)) is not None:
        tiles.append((f"{100 * share:.0f} %", "of CPU time used", "of the cores requested"))
    if (queued := _typical_queue(facts.rules)) is not None:
        tiles.append(
            (humanize_duration(queued), "in the queue", "median of the rule that waits most")
        )
    repeats = humanize_count(facts.repeats, "try", "tries") if facts.repeats else "none"
    tiles.append((f"{facts.failed:,}", "failed", f"{repeats} repeated"))
    return tiles


def _cpu_share(rules: Iterable[RuleUsage]) -> float | None:
    """Return the share of the requested CPU time that was used, by the rules' core hours."""
    known = [(u.cpu_share, u.all_core_hours or 0.0) for u in rules if u.cpu_share is not None]
    whole = sum(hours for _, hours in known)
    return sum(share * hours for share, hours in known) / whole if whole else None


def _typical_queue(rules: Iterable[RuleUsage]) -> float | None:
    return max((u.queued for u in rules if u.queued is not None), default=None)


def _row(usage: RuleUsage) -> UsageRow:
    cores = f"{usage.cores_used:.1f}" if usage.cores_used is not None else ""
    meters = [
        ("CPU cores", _meter(usage.cores_used, usage.cores, cores, str(usage.cores or ""), near=9)),
        ("Memory", _meter(
            usage.memory_used, usage.memory, _size(usage.memory_used), _size(usage.memory))),
        ("Walltime", _meter(
            usage.longest, usage.walltime, _time(usage.longest), _time(usage.walltime))),
    ]  # fmt: skip
    if usage.gpus:
        meters.append(("GPUs", _gpus(usage)))
    return UsageRow(
        usage,
        _ordered(usage.states),
        meters,
        _time(usage.typical) or _UNKNOWN,
        _time(usage.queued) or _UNKNOWN,
        _hours(usage.all_core_hours),
    )


def _gpus(usage: RuleUsage) -> Meter:
    busy = usage.gpu_busy
    count = humanize_count(usage.gpus or 0, "GPU")
    if busy is None:
        return Meter(_UNKNOWN, count, None)
    return Meter(f"{busy:.0f} %", count, busy / 100)


def _meter(
    used: float | None, asked: float | None, used_words: str, asked_words: str, near: float = 0.9
) -> Meter:
    share = used / asked if used is not None and asked else None
    return Meter(
        used_words or _UNKNOWN,
        asked_words,
        min(1.0, share) if share is not None else None,
        share is not None and share > near,
    )


def _size(number: float | None) -> str:
    return humanize_size(number) if number is not None else ""


def _time(seconds: float | None) -> str:
    return humanize_duration(seconds) if seconds is not None else ""


def _hours(hours: float | None) -> str:
    if not hours:
        return "0" if hours is not None else _UNKNOWN
    if hours < 0.01:
        return "< 0.01"
    return f"{hours:,.2f}" if hours < 10 else f"{hours:,.0f}"
