"""Compare what the jobs of a rule requested with what they used, and advise. Pure functions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, TypeVar

from snakemake_executor_plugin_mantik.common.humanize import (
    humanize_count,
    humanize_duration,
    humanize_size,
)
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.pictures import NodeState

from .tries import ReportedTry

ENOUGH: Final = 3
"""The least number of jobs that have succeeded from which less is advised."""

_MEMORY_RESERVE: Final = 1.2
_WALLTIME_RESERVE: Final = 1.25
"""What is advised, as a multiple of the most that was used."""

_FAR: Final = 2.0
"""A request is far too high if it is more than this multiple of what would be advised."""

_NEAR: Final = 0.9
"""A request is too low if a job has used more than this share of it."""

_AFTER_FAILURE: Final = 1.5
"""What is advised after a job had too little, as a multiple of what it had."""

_LEAST_MEMORY_MIB: Final = 512
_LEAST_WALLTIME_S: Final = 600

_MEMORY_STEPS_MIB: Final = ((1024, 128), (8192, 512), (65_536, 1024), (None, 8192))
_WALLTIME_STEPS_S: Final = ((3600, 300), (6 * 3600, 900), (None, 3600))
"""To what multiple amounts up to a limit are rounded up."""

_IDLE_GPU: Final = 10.0
"""GPUs that are busy to no more percent on average are remarked."""

_BUSY_S: Final = 60.0
"""The shortest run, in seconds, that says something of how busy the cores were."""


_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Advice:
    """A value to request next time.

    Attributes:
        resource: Snakemake's name of the resource, whose unit is MB or minutes.
        value: the value for `set-resources`.
        words: for people: the old value, the new one and why.
    """

    resource: str
    value: int
    words: str


@dataclass(frozen=True)
class RuleUsage:
    """What the jobs of a rule requested and used; None where unknown.

    Attributes:
        states: how many jobs are in which state, by their last tries.
        tries: number of all tries, those that later ones have replaced included.
        sites: where they ran.
        cores, memory, walltime, gpus: the most that a try requested: cores, bytes on a node,
            seconds, GPUs.
        cores_used: the most cores that a try kept busy on average.
        cpu_share: how much of the requested CPU time all tries together have used, from 0 to 1.
        memory_used, longest: the most bytes and seconds that a try used.
        typical: the median of their run times in seconds.
        queued: the median of their waiting times in seconds.
        gpu_busy: the percentage to which the GPUs of a try were busy on average, of the busiest.
        core_hours: of all tries, by site; None at a site where no try's cores are known.
        estimated: how many tries ran as long as the scheduler counts, or until the last heartbeat,
            because they could not report it.
        untimed: how many tries are over of which nobody knows how long they ran.
        advice: what to request next time.
        remarks: other advice.
    """

    rule: str
    states: Mapping[NodeState, int]
    tries: int
    sites: tuple[str, ...]
    cores: int | None
    cores_used: float | None
    cpu_share: float | None
    memory: int | None
    memory_used: int | None
    walltime: float | None
    longest: float | None
    typical: float | None
    queued: float | None
    gpus: int | None
    gpu_busy: float | None
    core_hours: Mapping[str, float | None]
    estimated: int
    untimed: int
    advice: tuple[Advice, ...]
    remarks: tuple[str, ...]

    @property
    def all_core_hours(self) -> float | None:
        """The core hours of all tries at all sites, as far as they are known."""
        return sum_known(self.core_hours.values())


def sum_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def usage_by_rule(tries: Iterable[ReportedTry], now: float) -> list[RuleUsage]:
    """Return the usage of each rule, the most core hours first.

    `now` is seconds since the epoch.
    """
    by_rule: dict[str, list[ReportedTry]] = {}
    for one in tries:
        by_rule.setdefault(one.record.rule, []).append(one)
    found = [_usage(rule, of_rule, now) for rule, of_rule in by_rule.items()]
    return sorted(found, key=lambda usage: (-(usage.all_core_hours or 0.0), usage.rule))


def _usage(rule: str, tries: Sequence[ReportedTry], now: float) -> RuleUsage:
    states: dict[NodeState, int] = {}
    for one in tries:
        if one.last:
            states[one.node.state] = states.get(one.node.state, 0) + 1
    hours: dict[str, float | None] = {}
    for one in tries:
        site = one.record.site
        hours[site] = sum_known([hours.get(site), one.core_hours(now)])
    over = [one for one in tries if one.record.ran]
    ran = [one.record.ran for one in over if one.record.ran]
    busy = [one.used.cpu_s / one.record.ran for one in over if one.used.cpu_s and one.record.ran]
    given = [
        (one.used.cpu_s, one.asked.cores * one.record.ran)
        for one in over
        if one.used.cpu_s is not None and one.asked.cores and one.record.ran
    ]
    waited = [one.record.waited for one in tries if one.record.waited is not None]
    memory = _most(one.asked.memory_mib for one in tries)
    return RuleUsage(
        rule,
        states,
        len(tries),
        tuple(sorted(hours)),
        cores=_most(one.asked.cores for one in tries),
        cores_used=max(busy, default=None),
        cpu_share=sum(u for u, _ in given) / sum(of for _, of in given) if given else None,
        memory=memory << 20 if memory else None,
        memory_used=_most(one.used.memory_bytes for one in tries),
        walltime=_most(one.record.runtime for one in tries),
        longest=max(ran, default=None),
        typical=median(ran) if ran else None,
        queued=median(waited) if waited else None,
        gpus=_most(one.asked.gpus for one in tries),
        gpu_busy=_most(one.used.gpu_busy for one in tries),
        core_hours=hours,
        estimated=sum(bool(one.record.times.told_by) for one in tries),
        untimed=sum(one.untimed for one in tries),
        advice=tuple(filter(None, [_memory(tries), _walltime(tries)])),
        remarks=tuple(filter(None, [_cores(tries), _gpus(tries)])),
    )


def _most(values: Iterable[_Number | None]) -> _Number | None:
    return max((value for value in values if value is not None), default=None)


def _memory(tries: Sequence[ReportedTry]) -> Advice | None:
    """Advise on memory; nothing for groups, and for jobs on several nodes, of which one is seen."""
    tries = [one for one in tries if not one.group and (one.asked.nodes or 1) == 1]
    asked = _most(one.asked.memory_mib for one in _first(tries))
    if asked is None:
        return None
    used = [one.used.memory_bytes / (1 << 20) for one in tries if one.used.memory_bytes]
    lacked = [
        one.asked.memory_mib or asked for one in tries if one.record.reason == Reason.OUT_OF_MEMORY
    ]
    # A job that had too little memory had not used its most.
    wants = [_MEMORY_RESERVE * value for value in used]
    wants += [_AFTER_FAILURE * value for value in lacked]
    if not wants:
        return None
    want = _rounded(max(*wants, _LEAST_MEMORY_MIB), _MEMORY_STEPS_MIB)
    measured = [one for one in _succeeded(tries) if one.used.memory_bytes]
    why = _why(
        asked, want, max(used, default=0.0), number=len(measured),
        lacked="ran out of memory" if lacked else "",
    )  # fmt: skip
    if not why:
        return None
    size = f"{humanize_size(asked << 20)} → {humanize_size(want << 20)}"
    per_cpu = _most(one.asked.memory_mib_per_cpu for one in tries)
    if per_cpu:
        cpus = max(1, asked // per_cpu)
        return Advice("mem_mb_per_cpu", -(-want // cpus), f"memory {size} for {cpus} CPUs: {why}")
    return Advice("mem_mb", want, f"memory {size}: {why}")


def _walltime(tries: Sequence[ReportedTry]) -> Advice | None:
    """Advise on the walltime; nothing for groups, and for jobs that go on past it by design."""
    tries = [one for one in tries if not one.group and not one.record.segments]
    asked = _most(one.record.runtime for one in _first(tries))
    if asked is None:
        return None
    ran = [one.record.ran for one in tries if one.record.ran]
    lacked = [
        one.record.runtime or asked for one in tries if one.record.reason == Reason.TIME_LIMIT
    ]
    wants = [_WALLTIME_RESERVE * value for value in ran]
    wants += [_AFTER_FAILURE * value for value in lacked]
    if not wants:
        return None
    want = _rounded(max(*wants, _LEAST_WALLTIME_S), _WALLTIME_STEPS_S)
    why = _why(
        asked, want, max(ran, default=0.0), number=len(_succeeded(tries)),
        lacked="reached its walltime" if lacked else "",
    )  # fmt: skip
    if not why:
        return None
    words = f"walltime {humanize_duration(asked)} → {humanize_duration(want)}: {why}"
    return Advice("runtime", want // 60, words)


def _why(asked: float, want: float, used: float, *, number: int, lacked: str) -> str:
    """Return why a request should change; empty if it should not.

    `number` jobs have succeeded; `lacked` says what befell a job that had too little.
    """
    if lacked and want > asked:
        return f"a job {lacked}"
    if used > _NEAR * asked and want > asked:
        return f"a job used {_percent(used, asked)} of it"
    if asked > _FAR * want and number >= ENOUGH:
        return f"{humanize_count(number, 'job')} used at most {_percent(used, asked)} of it"
    return ""


def _cores(tries: Sequence[ReportedTry]) -> str:
    """Return a remark if most of the requested cores were idle."""
    seen = [
        (one.used.cpu_s / one.record.ran, one.asked.cores)
        for one in _succeeded(tries)
        if one.used.cpu_s and one.asked.cores and (one.record.ran or 0) >= _BUSY_S
        and one.record.ran and (one.asked.nodes or 1) == 1
    ]  # fmt: skip
    cores = max((of for _, of in seen), default=0)
    most = max((used for used, _ in seen), default=0.0)
    if len(seen) < ENOUGH or cores < 2 or most > cores / 2:
        return ""
    return (
        f"{humanize_count(len(seen), 'job')} kept at most {most:.1f} of {cores} cores busy: request"
        " fewer threads, or let the command use them"
    )


def _gpus(tries: Sequence[ReportedTry]) -> str:
    """Return a remark if the requested GPUs were idle."""
    busy = [
        one.used.gpu_busy
        for one in _succeeded(tries)
        if one.used.gpu_busy is not None and (one.record.ran or 0) >= _BUSY_S
    ]
    if len(busy) < ENOUGH or max(busy) > _IDLE_GPU:
        return ""
    return (
        f"the GPUs of {humanize_count(len(busy), 'job')} were busy for at most {max(busy):.0f} % of"
        " the time: let the command use them, or request none"
    )


def _first(tries: Iterable[ReportedTry]) -> list[ReportedTry]:
    """Return the first try of each job: a later one may have requested more."""
    found: dict[str, ReportedTry] = {}
    for one in tries:
        found.setdefault(one.record.job, one)
    return list(found.values())


def _succeeded(tries: Iterable[ReportedTry]) -> list[ReportedTry]:
    return [one for one in tries if one.record.outcome == "succeeded" and one.record.ran]


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 1 else "1 %"


def _rounded(amount: float, steps: Sequence[tuple[int | None, int]]) -> int:
    step = next(step for limit, step in steps if limit is None or amount <= limit)
    return int(-(-amount // step)) * step
