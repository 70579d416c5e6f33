"""Gather what a report shows of a workflow from its journal."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import ConfigError
from snakemake_executor_plugin_mantik.common.secret_names import make_masker
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.config.reading import read_backend_config
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import (
    SiteRecord,
    SnakemakeRun,
    TryRecord,
    is_controlled,
    read_workflow,
)
from snakemake_executor_plugin_mantik.pictures import NodeState, Picture
from snakemake_executor_plugin_mantik.pictures.value import PicturedTry, make_picture

from .tries import ReportedTry, begun_since, report_tries
from .usage import RuleUsage, usage_by_rule

MOST_FAILURES: Final = 20
"""The most failed jobs that are shown, and the most tries that later ones have replaced."""

_TAIL_BYTES: Final = 4096
_TAIL_LINES: Final = 30
"""How much of the end of a failed job's output is shown."""


@dataclass(frozen=True)
class Failure:
    """A failed job.

    Attributes:
        number: of its tries.
        why: the kind of reason, and how it ended, as two texts.
        log: the path of its output here; empty if there is none.
        tail: the end of that.
    """

    name: str
    site: str
    number: int
    why: tuple[str, str]
    log: str = ""
    tail: str = ""


@dataclass(frozen=True)
class ReportFacts:
    """What a report shows.

    Attributes:
        now: when it was made, in seconds since the epoch.
        going_on: whether a Snakemake runs, or jobs may still run at a site.
        run: the run of Snakemake that it is about, or the last one of several; None if unknown.
        runs: how many runs of Snakemake it is about.
        submitted: how many tries were submitted to sites, segments that were not needed included.
        states: how many jobs are in which state.
        failures: some failed jobs; `failed` is how many there are, and `reasons` counts them by
            rule and reason, the most first.
        repeated: the first tries that failed and were repeated; `repeats` is how many there are.
        sites: by name; `queues` has the queues that were used there.
        first, last: from when to when jobs were at sites; None without any.
    """

    title: str
    now: float
    going_on: bool
    run: SnakemakeRun | None
    runs: int
    submitted: int
    picture: Picture
    states: Mapping[NodeState, int]
    rules: Sequence[RuleUsage]
    failures: Sequence[Failure]
    failed: int
    reasons: Sequence[tuple[str, str, int]]
    repeated: Sequence[Failure]
    repeats: int
    sites: Mapping[str, SiteRecord]
    queues: Mapping[str, Sequence[str]]
    first: float | None
    last: float | None


def gather_facts(
    workdir: Path, *, every: bool, secrets: Iterable[str], warn: Callable[[str], None]
) -> ReportFacts:
    """Read what a report shows of a workflow; works beside a running Snakemake.

    Args:
        workdir: the workflow's working directory.
        every: show all runs of Snakemake, not only the last one that had jobs at sites.
        secrets: what to mask in texts of jobs, besides secrets in the sites' backend configs.
        warn: writes a line to the user's terminal.

    Raises:
        JournalError: there is no journal, or it cannot be read.
    """
    state = workdir / STATE
    controlled = is_controlled(state)
    history = read_workflow(state)
    tries = report_tries(history, controlled=controlled)
    runs, shown = history.runs, tries
    if not every:
        for run in reversed(history.runs):
            if some := begun_since(tries, run.began):
                runs, shown = (run,), some
                break
    used = {one.record.site for one in shown}
    sites = {name: site for name, site in history.sites.items() if name in used}
    mask = make_masker([*secrets, *_secrets_of(sites.values(), warn)])
    now = time.time()
    pipeline = history.runs[-1].pipeline if runs[-1:] == history.runs[-1:] and runs else None
    name = runs[-1].about.get("name", "") if runs else ""
    going_on = controlled or any(one.record.may_run for one in shown)
    picture = make_picture(
        name or workdir.resolve().name,
        pipeline or None,
        (_pictured(one, mask) for one in shown),
        now,
        over=not going_on,
    )
    failed = [one for one in shown if one.last and one.node.state is NodeState.FAILED]
    repeated = [one for one in shown if not one.last and one.node.state is NodeState.FAILED]
    states: dict[NodeState, int] = {}
    for node in picture.nodes:
        states[node.state] = states.get(node.state, 0) + 1
    begins = [one.record.submitted for one in shown if one.record.submitted is not None]
    ends = [
        one.node.ended or one.record.finished or now
        for one in shown
        if one.record.submitted is not None
    ]
    return ReportFacts(
        title=picture.title,
        now=now,
        going_on=going_on,
        run=runs[-1] if runs else None,
        runs=len(runs),
        submitted=_count_submitted(history.tries, shown),
        picture=picture,
        states=states,
        rules=usage_by_rule(shown, now),
        failures=[_failure(one, workdir, mask, tail=True) for one in _varied(failed)],
        failed=len(failed),
        reasons=[(*kind, n) for kind, n in Counter(map(_kind, failed)).most_common()],
        repeated=[_failure(one, workdir, mask, tail=False) for one in repeated[:MOST_FAILURES]],
        repeats=len(repeated),
        sites=sites,
        queues={
            name: sorted(
                {o.record.queue for o in shown if o.record.site == name and o.record.queue}
            )
            for name in used
        },
        first=min(begins, default=None),
        last=max(ends, default=None),
    )


def _count_submitted(tries: Sequence[TryRecord], shown: Sequence[ReportedTry]) -> int:
    """Count the submitted tries that are shown, and the segments that waited behind these."""
    known = {one.record.id for one in shown}
    for record in tries:  # the oldest first
        if record.follows in known:
            known.add(record.id)
    return sum(record.id in known and record.submitted is not None for record in tries)


def _secrets_of(sites: Iterable[SiteRecord], warn: Callable[[str], None]) -> Iterator[str]:
    """Yield the secrets that sites' backend configs give to jobs."""
    for path in dict.fromkeys(site.config for site in sites if site.config):
        try:
            config, _ = read_backend_config(Path(path))
        except ConfigError:
            warn(f"Secrets in {path} are not masked: it cannot be read any more, or is invalid.")
        else:
            yield from config.secrets


def _pictured(one: ReportedTry, mask: Callable[[str], str]) -> PicturedTry:
    return PicturedTry(one.jobs, replace(one.node, note=mask(one.node.note)))


def _kind(one: ReportedTry) -> tuple[str, str]:
    reason = one.record.reason
    return one.record.rule, Reason(reason).words if reason else Reason.UNKNOWN.words


def _varied(failed: Sequence[ReportedTry]) -> Sequence[ReportedTry]:
    """Return some failed tries in their order, of each rule and reason about as many."""
    seen: Counter[tuple[str, str]] = Counter()
    ranks = []
    for position, one in enumerate(failed):
        ranks.append((seen[_kind(one)], position))
        seen[_kind(one)] += 1
    chosen = sorted(position for _, position in sorted(ranks)[:MOST_FAILURES])
    return [failed[position] for position in chosen]


def _failure(one: ReportedTry, workdir: Path, mask: Callable[[str], str], *, tail: bool) -> Failure:
    record = one.record
    reason = Reason(record.reason).words if record.reason else ""
    words = record.outcome.removeprefix("failed: ")
    return Failure(
        record.name,
        record.site,
        one.number,
        (reason, mask(words)),
        _shown(record.log, workdir),
        mask(_end_of(workdir / record.log)) if tail and record.log else "",
    )


def _shown(log: str, workdir: Path) -> str:
    path, here = Path(log), workdir.resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else log


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    lines = text.splitlines()
    whole = lines if path.stat().st_size <= _TAIL_BYTES else lines[1:]
    return "\n".join(whole[-_TAIL_LINES:])
