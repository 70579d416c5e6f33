"""Compare what the jobs of a rule requested with what they used, and advise. Pure functions."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from math import inf
from statistics import median
from typing import Final, NamedTuple, TypeVar

from ruamel.yaml import YAML

from ..common.humanize import humanize_count, humanize_duration, humanize_size
from ..jobs.pools import Allocation
from ..jobs.reasons import Reason
from .picture import NodeState, count_states
from .workflow import JobView

ENOUGH: Final = 3
"""The least number of jobs that have succeeded from which less is advised."""


class _Limits(NamedTuple):
    """What is advised: a multiple of the most that was used, the least, and how it is rounded.

    Amounts up to the limit of a step are rounded up to a multiple of the step.
    """

    reserve: float
    least: int
    steps: Sequence[tuple[float, int]]


_MEMORY_MIB: Final = _Limits(1.2, 256, ((1024, 128), (8192, 512), (65_536, 1024), (inf, 8192)))
_WALLTIME_S: Final = _Limits(1.25, 600, ((3600, 300), (6 * 3600, 900), (inf, 3600)))

_FAR: Final = 2.0
"""A request is far too high if it is more than this multiple of what would be advised."""

_NEAR: Final = 0.9
"""A request is too low if a job has used more than this share of it."""

_AFTER_FAILURE: Final = 1.5
"""What is advised after a job had too little, as a multiple of what it had."""

_IDLE_GPU: Final = 10.0
"""GPUs that are busy to no more percent on average are remarked."""

_BUSY_S: Final = 60.0
"""The shortest run, in seconds, that says something of how busy the cores were."""

_IDLE_HOURS: Final = 1.0
_IDLE_SHARE: Final = 0.5
"""The least core hours, and share, of a pool's allocations that are remarked if they were idle."""

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Advice:
    """A value to request next time.

    Attributes:
        resource: Snakemake's name of the resource, whose unit is MB or minutes.
        words: for people: the old value, the new one and why.
    """

    resource: str
    value: int
    words: str


@dataclass(frozen=True)
class RuleUsage:
    """What the jobs of a rule requested and used; None where unknown.

    Attributes:
        states: how many jobs are in which state, by their last attempts.
        attempts: number of all attempts, those that later ones have replaced included.
        cores, memory, walltime, gpus: the most that an attempt requested: cores, bytes on a node,
            seconds, GPUs.
        cores_used: the most cores that an attempt kept busy on average.
        cpu_share: how much of the requested CPU time all attempts together have used, from 0 to 1.
        memory_used, longest: the most bytes and seconds that an attempt used.
        typical: the median of their run times in seconds.
        queued: the median of their waiting times in seconds.
        gpu_busy: the percentage to which the GPUs of an attempt were busy on average, of the
            busiest.
        core_hours: of all attempts, by site; None at a site where no attempt's cores are known.
        estimated: how many attempts ran as long as the scheduler counts, or until the last
            heartbeat, because they could not report it.
        untimed: how many attempts are over of which nobody knows how long they ran.
    """

    rule: str
    states: Mapping[NodeState, int]
    attempts: int
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
        """The core hours of all attempts at all sites, as far as they are known."""
        return sum_known(self.core_hours.values())


@dataclass(frozen=True)
class PoolUsage:
    """What the allocations of a pool do, and have done.

    Attributes:
        queued, running: how many allocations do.
        jobs_waiting, jobs_running: how many jobs do.
        used, idle: core hours that jobs have had, and that no job has had.
    """

    site: str
    pool: str
    queued: int
    running: int
    jobs_waiting: int
    jobs_running: int
    used: float
    idle: float

    @property
    def words(self) -> str:
        """A line on it."""
        return (
            f"{self.site}, pool {self.pool}: {humanize_count(self.running, 'allocation')} running,"
            f" {self.queued} queued; {humanize_count(self.jobs_running, 'job')} running,"
            f" {self.jobs_waiting} waiting; {format_hours(self.used)} core hours used,"
            f" {format_hours(self.idle)} idle"
        )

    @property
    def advice(self) -> str:
        """What to change if its allocations were idle for long; empty if they were not."""
        hours = self.used + self.idle
        if self.idle < max(_IDLE_HOURS, _IDLE_SHARE * hours):
            return ""
        return (
            f"The allocations of the pool {self.pool} at {self.site} were idle for"
            f" {self.idle / hours:.0%} of their {format_hours(hours)} core hours: give the pool a"
            " shorter Idle or a smaller Count in the backend config, or more jobs at a time"
        )


def usage_by_pool(allocations: Iterable[Allocation], jobs: Iterable[JobView]) -> list[PoolUsage]:
    """Return the usage of each pool that has had an allocation; `jobs` are the present ones."""
    pools: dict[tuple[str, str], list[Allocation]] = {}
    for each in allocations:
        pools.setdefault((each.site, each.pool), []).append(each)
    states = Counter((job.site, job.pool, job.state) for job in jobs if job.pool)
    found = []
    for pool, of_pool in sorted(pools.items()):
        waiting, running = states[*pool, NodeState.QUEUED], states[*pool, NodeState.RUNNING]
        # Without jobs, nobody looks whether they have ended.
        open_ = [each for each in of_pool if each.ended is None] if waiting + running else []
        started = sum(each.started is not None for each in open_)
        used, idle = sum(each.used for each in of_pool), sum(each.idle for each in of_pool)
        found.append(
            PoolUsage(
                *pool, len(open_) - started, started, waiting, running, used / 3600, idle / 3600
            )
        )
    return found


def format_hours(hours: float | None) -> str:
    """Format a number of core hours, which may be unknown."""
    if not hours:
        return "0" if hours is not None else "–"
    if hours < 0.01:
        return "< 0.01"
    return f"{hours:,.2f}" if hours < 10 else f"{hours:,.0f}"


def sum_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def usage_by_rule(jobs: Iterable[JobView], now: float) -> list[RuleUsage]:
    """Return the usage of each rule by all attempts, the most core hours first.

    `now` is seconds since the epoch.
    """
    by_rule: dict[str, list[JobView]] = {}
    for job in jobs:
        by_rule.setdefault(job.rule, []).append(job)
    found = [_usage(rule, of_rule, now) for rule, of_rule in by_rule.items()]
    return sorted(found, key=lambda usage: (-(usage.all_core_hours or 0.0), usage.rule))


def _usage(rule: str, jobs: Sequence[JobView], now: float) -> RuleUsage:
    sites = sorted({job.site for job in jobs})
    ran = [job.record.ran for job in jobs if job.record.ran]
    busy = [(cpu, seconds, job.asked.cores) for job, cpu, seconds in _measured(jobs)]
    asked = [(cpu, cores * seconds) for cpu, seconds, cores in busy if cores]
    waited = [job.record.waited for job in jobs if job.record.waited is not None]
    memory = _most(job.asked.memory_mib for job in jobs)
    over = [job.record for job in jobs if job.record.outcome and job.record.started is not None]
    return RuleUsage(
        rule,
        count_states(job.state for job in jobs if job.last),
        len(jobs),
        tuple(sites),
        cores=_most(job.asked.cores for job in jobs),
        cores_used=max((cpu / seconds for cpu, seconds, _ in busy), default=None),
        cpu_share=sum(cpu for cpu, _ in asked) / sum(of for _, of in asked) if asked else None,
        memory=memory << 20 if memory else None,
        memory_used=_most(job.used.memory_bytes for job in jobs),
        walltime=_most(job.record.runtime for job in jobs),
        longest=max(ran, default=None),
        typical=median(ran) if ran else None,
        queued=median(waited) if waited else None,
        gpus=_most(job.asked.gpus for job in jobs),
        gpu_busy=_most(job.used.gpu_busy for job in jobs),
        core_hours={
            site: sum_known(job.core_hours(now) for job in jobs if job.site == site)
            for site in sites
        },
        estimated=sum(bool(job.used.told_by) for job in jobs),
        untimed=sum(record.ran is None for record in over),
        advice=tuple(filter(None, [_memory(jobs), _walltime(jobs)])),
        remarks=tuple(filter(None, [_cores(jobs), _gpus(jobs)])),
    )


def _most(values: Iterable[_Number | None]) -> _Number | None:
    return max((value for value in values if value is not None), default=None)


def _measured(jobs: Iterable[JobView]) -> list[tuple[JobView, float, float]]:
    """Return those jobs whose CPU time is known, with it and their running time, in seconds."""
    return [
        (job, job.used.cpu_s, job.record.ran)
        for job in jobs
        if job.used.cpu_s is not None and job.record.ran
    ]


def _memory(jobs: Sequence[JobView]) -> Advice | None:
    """Advise on memory; nothing for groups, and for jobs on several nodes, of which one is seen."""
    jobs = [job for job in jobs if len(job.jobs) == 1 and (job.asked.nodes or 1) == 1]
    asked = _most(job.asked.memory_mib for job in _first(jobs))
    used = [job.used.memory_bytes / (1 << 20) for job in jobs if job.used.memory_bytes]
    lacked = [job.asked.memory_mib for job in jobs if job.record.reason == Reason.OUT_OF_MEMORY]
    number = sum(bool(job.used.memory_bytes) for job in _succeeded(jobs))
    # A job that had too little memory had not used its most.
    found = _judge(asked, used, lacked, _MEMORY_MIB, number=number, fate="ran out of memory")
    if found is None or asked is None:
        return None
    want, why = found
    size = f"{humanize_size(asked << 20)} → {humanize_size(want << 20)}"
    if per_cpu := _most(job.asked.memory_mib_per_cpu for job in jobs):
        cpus = max(1, asked // per_cpu)
        return Advice("mem_mb_per_cpu", -(-want // cpus), f"memory {size} for {cpus} CPUs: {why}")
    return Advice("mem_mb", want, f"memory {size}: {why}")


def _walltime(jobs: Sequence[JobView]) -> Advice | None:
    """Advise on the walltime; nothing for groups, and for jobs that go on past it by design."""
    jobs = [job for job in jobs if len(job.jobs) == 1 and not job.record.segments]
    asked = _most(job.record.runtime for job in _first(jobs))
    used = [job.record.ran for job in jobs if job.record.ran]
    lacked = [job.record.runtime for job in jobs if job.record.reason == Reason.TIME_LIMIT]
    number = len(_succeeded(jobs))
    found = _judge(asked, used, lacked, _WALLTIME_S, number=number, fate="reached its walltime")
    if found is None or asked is None:
        return None
    want, why = found
    words = f"walltime {humanize_duration(asked)} → {humanize_duration(want)}: {why}"
    return Advice("runtime", want // 60, words)


def _judge(
    asked: float | None,
    used: Sequence[float],
    lacked: Sequence[float | None],
    limits: _Limits,
    *,
    number: int,
    fate: str,
) -> tuple[int, str] | None:
    """Return how much to request, and why; None if what was requested is fine.

    `used` has what jobs have used, `lacked` what those requested that had too little, which is
    their `fate`; `number` jobs have succeeded.
    """
    if asked is None or not (used or lacked):
        return None
    most, wants = max(used, default=0.0), [_AFTER_FAILURE * (value or asked) for value in lacked]
    amount = max(limits.least, limits.reserve * most, *wants)
    step = next(step for limit, step in limits.steps if amount <= limit)
    want = int(-(-amount // step)) * step
    share = f"{max(1.0, 100 * most / asked):.0f} %"
    if lacked and want > asked:
        return want, f"a job {fate}"
    if most > _NEAR * asked and want > asked:
        return want, f"a job used {share} of it"
    if asked > _FAR * want and number >= ENOUGH:
        return want, f"{humanize_count(number, 'job')} used at most {share} of it"
    return None


def _cores(jobs: Sequence[JobView]) -> str:
    seen = [
        (cpu / seconds, job.asked.cores)
        for job, cpu, seconds in _measured(_succeeded(jobs))
        if job.asked.cores and cpu and seconds >= _BUSY_S and (job.asked.nodes or 1) == 1
    ]
    cores = max((of for _, of in seen), default=0)
    most = max((used for used, _ in seen), default=0.0)
    if len(seen) < ENOUGH or cores < 2 or most > cores / 2:
        return ""
    return (
        f"{humanize_count(len(seen), 'job')} kept at most {most:.1f} of {cores} cores busy: request"
        " fewer threads, or let the command use them"
    )


def _gpus(jobs: Sequence[JobView]) -> str:
    long = [job for job in _succeeded(jobs) if (job.record.ran or 0) >= _BUSY_S]
    busy = [job.used.gpu_busy for job in long if job.used.gpu_busy is not None]
    if len(busy) < ENOUGH or max(busy) > _IDLE_GPU:
        return ""
    return (
        f"the GPUs of {humanize_count(len(busy), 'job')} were busy for at most {max(busy):.0f} % of"
        " the time: let the command use them, or request none"
    )


def _first(jobs: Iterable[JobView]) -> Iterable[JobView]:
    """Return the first attempt of each job: a later one may have requested more."""
    found: dict[str, JobView] = {}
    for job in jobs:
        found.setdefault(job.record.job, job)
    return found.values()


def _succeeded(jobs: Iterable[JobView]) -> list[JobView]:
    return [job for job in jobs if job.record.outcome == "succeeded" and job.record.ran]


_HEAD = """\
# What to request next time, by what jobs have used: smk-mantik report --profile wrote it.
#   snakemake --profile DIRECTORY-OF-THIS-FILE ...
# or copy it to a profile of yours. Memory is in MB, runtime in minutes. These values replace those
# of the rules, also where a rule computes them: a retry does not get more.
"""


def render_profile(rules: Sequence[RuleUsage]) -> str:
    """Return the text of a profile (`config.yaml`) that sets what is advised."""
    advised = sorted((usage for usage in rules if usage.advice), key=lambda usage: usage.rule)
    if not advised:  # Snakemake refuses an empty set-resources
        return f"{_HEAD}# There is nothing to change.\n{{}}\n"
    words = [f"# {usage.rule}: {a.words}\n" for usage in advised for a in usage.advice]
    values = {usage.rule: {a.resource: a.value for a in usage.advice} for usage in advised}
    text = StringIO()
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.dump({"set-resources": values}, text)
    return f"{_HEAD}{''.join(words)}{text.getvalue()}"
