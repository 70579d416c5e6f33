"""Random schedules: what a seed lets happen to a workflow, its sites, its user and this machine.

Each kind of misfortune draws from a stream of its own, so that it can be left out without changing
the others: `fewest` finds the kinds that a failure takes.
"""

import random
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

from snakemake_executor_plugin_mantik.config.model import BackendConfig, PoolConfig
from snakemake_executor_plugin_mantik.config.settings import SiteSettings, Timing
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.segments import Continuation
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec
from tests.support.simulated import Fault
from tests.support.world import Fate, Habits, World

HOUR_S, DAY_S = 3600.0, 86400.0

KINDS: Final = (
    "answers",  # single requests fail, or act and lose their answer, or act late
    "odd",  # the site refuses to give a file, once in a while, for no reason
    "slow posts",  # submissions take a minute
    "outages",  # a site is away for a while, or refuses the credentials
    "strays",  # one submission is started several times, some of them late
    "lost",  # a submission is acknowledged and never started, or the site denies it
    "killed",  # jobs end by memory, node, time, an outsider's cancellation, a refusal
    "restarts",  # a site forgets jobs
    "purges",  # a centre removes the files of the workspace
    "full",  # no room at the site
    "full here",  # no room on this machine
    "late",  # files, states and ends are seen late, or half
    "slow",  # queues and jobs of hours and days
    "damage",  # files come cut or altered, and go up into nothing
    "stalls",  # nodes hang for a while
    "deaf",  # jobs go on that the site has cancelled
    "clock",  # the site's clock is hours off
    "deaths",  # kill -9 here
    "power",  # what was not synced when it dies is gone
    "interrupts",  # Ctrl-C, once or twice
    "detaches",  # a hang-up
    "changes",  # the user changes a command, input, project file or a job's site between two runs
    "unwanted",  # Snakemake does not take the outputs
    "edits",  # the user changes inputs while jobs wait and run
    "same times",  # what the user changes keeps its modification time
    "one place",  # two servers see the same directory
    "two names",  # a server has two names
    "copies",  # the project is copied with its journal, and another controller runs there
    "two workflows",  # another workflow is led to the same workspace
    "forgetful",  # a scheduler starts jobs although those that they wait for go on
    "tampers",  # others remove or change single files of a workspace
    "wrong listings",  # a directory is listed as empty or as not there, for a moment
    "journals",  # the journal is removed, emptied or replaced by an older copy between two runs
    "targets",  # each run asks for another target, and removes what no job of it needs any more
)

OF_POOLS: Final = (
    "lost allocations",  # allocations and agents are killed, cancelled, cut short or started again
    "denied allocations",  # a site says for a while that it does not know an allocation
    "refused allocations",  # a scheduler, or the site, does not take an allocation
)
"""What happens to pools, in schedules that have some."""

REPEATING: Final = frozenset(
    {"answers", "outages", "strays", "lost", "restarts", "deaf", "copies", "journals"}
)
"""What makes several starts of one attempt, or of one job. Nobody removes the claims then: what is
changed each minute is not old, and without them there is no promise (see docs/architecture.md)."""

OTHERS: Final = frozenset({"copies", "two workflows"})
"""Other controllers. Outputs come here then: each would have to know of those of the other's."""

LONGEST_STALL_S: Final = 1500.0
"""Half an hour without a sign of life, and with the site denying the job, is its end: LOST_S."""

_KILLS = (
    (Reason.OUT_OF_MEMORY, False), (Reason.NODE_FAILURE, False), (Reason.TIME_LIMIT, True),
    (Reason.TIME_LIMIT, False), (Reason.CANCELLED, True), (Reason.CANCELLED, False),
    (Reason.PREEMPTED, True),
)  # fmt: skip


@cache
def config(poll_min_s: int, poll_max_s: int, unknown_wait_s: int, grace_s: int) -> BackendConfig:
    """A site's config, with small limits so that small files travel in all ways."""
    timing = Timing(
        poll_min_s=poll_min_s,
        unknown_wait_s=unknown_wait_s,
        marker_grace_s=grace_s,
        inline_limit_bytes=1 << 10,
    )
    site = SiteSettings.model_validate({"Poll": f"{poll_max_s}s", "MaxJobs": 4})
    return BackendConfig.model_validate(
        {
            "UnicoreApiUrl": "https://sim.example",
            "Resources": {"Queue": "batch"},
            "Site": site.model_copy(update={"timing": timing}),
        }
    )


def with_pool(
    config: BackendConfig, runtime: str, cpus: int, idle: str, count: int
) -> BackendConfig:
    """The config with a pool."""
    pool = PoolConfig.model_validate(
        {"Runtime": runtime, "CPUsPerNode": cpus, "Idle": idle, "Count": count}
    )
    return config.model_copy(update={"pools": {"small": pool}})


class Schedule:
    """All chance of one seed.

    Attributes:
        names: the sites.
        jobs: how many the workflow has, at least and at most.
        needs: how likely a job needs an earlier one.
        presubmit: the most jobs at a site that are submitted before their inputs exist.
        patience_s: how long a job may wait to start before it goes to another site; None for ever.
        sessions: how often the run may be ended from here on before everything is well.
        healed: whether everything is well from now on.
        happened: how often some kinds of misfortune did.
    """

    def __init__(
        self,
        seed: int,
        without: Collection[str] = (),
        *,
        moving: bool = False,
        pools: bool = False,
    ) -> None:
        """Make it, without some kinds of misfortune.

        With `moving` there are two places, where most outputs stay, and most jobs need others'.
        With `pools` most jobs run in allocations of a pool.
        """
        self.seed = seed
        self.healed = False
        self.happened: Counter[str] = Counter()
        self._streams = {
            kind: random.Random(f"{seed} {kind}") for kind in (*KINDS, *OF_POOLS, "plan")
        }
        self._names = random.Random(seed)
        plan = self.stream("plan")
        some = [kind for kind in KINDS[:-5] if plan.random() < plan.choice((0.2, 0.5))]
        some += [kind for kind in KINDS[-5:] if self.stream(kind).random() < 0.3]
        self.kinds = frozenset(some) - frozenset(without)
        if moving:
            self.kinds -= OTHERS | {"one place", "two names"}
        self.jobs, self.needs = ((2, 5), 0.7) if moving else ((1, 4), 0.3)
        self._pools = random.Random(f"{seed} pools")
        self._pooled = self._pools.choice((0.5, 1.0, 1.0)) if pools else 0.0
        if pools:
            self.jobs = (2, 6)
            some = [kind for kind in OF_POOLS if self.stream(kind).random() < 0.5]
            self.kinds |= frozenset(some) - frozenset(without)
        if "targets" in self.kinds:
            self.jobs = (3, 6)
        # Not a misfortune: jobs are submitted before their inputs exist.
        self.presubmit = random.Random(f"{seed} ahead").choice((0, 0, 1, 3, 100))
        # Nor that: jobs that have not started after so many seconds go to another site.
        self.patience_s = random.Random(f"{seed} patience").choice((None, None, 10, 100, 3000))
        # Nor that: jobs need several segments.
        self._segments = random.Random(f"{seed} segments")
        self._going_on = self._segments.choice((0.0, 0.0, 0.5, 1.0))
        self._stays = random.Random(f"{seed} stays")
        self._staying = 0.8 if moving else self._stays.choice((0.0, 0.0, 0.5, 1.0))
        if self.kinds & OTHERS:
            self._staying = self._going_on = 0.0
        self.names = ("sim", "other")[: plan.choice((1, 1, 2))]
        if moving or self.kinds & {"one place", "two names"}:
            self.names = ("sim", "other")
        self.slow = "slow" in self.kinds
        grace = plan.choice((10, 30, 120))
        # Few looks: they are what most of the time goes into.
        self.config = config(
            plan.choice((2, 30, 60)),
            600 if self.slow else plan.choice((60, 300)),
            plan.choice((30, 120, 600)),
            grace,
        )
        if pools:
            self.config = with_pool(
                self.config, self._pools.choice(("4h", "12h")), self._pools.choice((1, 2)),
                self._pools.choice(("20s", "5m", "2h")), self._pools.choice((1, 2)),
            )  # fmt: skip
        self.habits = self._habits(grace)
        if pools and "deaf" not in self.kinds:  # a later run believes what the site says of those
            self.habits = replace(self.habits, stale=self._pools.choice((0.0, 60.0)))
        rate = self.stream("answers").choice((0.02, 0.1, 0.3))
        self._rate = rate if "answers" in self.kinds else 0.0
        self._outages = list(self._windows("outages"))
        self._full = list(self._windows("full"))
        self._full_here = list(self._windows("full here"))

    def pooled(self) -> bool:
        return self._pools.random() < self._pooled

    def stays(self) -> bool:
        return self._stays.random() < self._staying

    def continuation(self, number: int) -> Continuation | None:
        """How a job goes on past its walltime."""
        chance = self._segments
        if chance.random() >= self._going_on:
            return None
        on = chance.choice(((), (Reason.NODE_FAILURE, Reason.PREEMPTED)))
        return Continuation(5, (f"steps/{number}",), frozenset((Reason.TIME_LIMIT, *on)))

    def stream(self, kind: str) -> random.Random:
        """The chance of one kind of misfortune, or of the `plan`."""
        return self._streams[kind]

    def uuid(self) -> uuid.UUID:
        """Random names that are the same each time."""
        return uuid.UUID(int=self._names.getrandbits(128), version=4)

    def has(self, kind: str, chance: float = 1.0) -> bool:
        """Whether a misfortune of a kind happens now."""
        return kind in self.kinds and not self.healed and self.stream(kind).random() < chance

    def _habits(self, grace: float) -> Habits:
        late, clock = self.stream("late"), self.stream("clock")
        if "late" not in self.kinds:
            return Habits(clock=clock.choice((-5, 9)) * HOUR_S if "clock" in self.kinds else 0.0)
        return Habits(
            late=late.choice((0.0, 2.0, 0.8 * grace)),
            half=late.random() < 0.5,
            lag=late.choice((0.0, 134.0)),
            gap=late.choice((0.0, 4.0)),
            remembers=late.choice((300.0, DAY_S)),
            clock=clock.choice((-5, 9)) * HOUR_S if "clock" in self.kinds else 0.0,
        )

    def _windows(self, kind: str) -> Iterator[tuple[float, float, str]]:
        """From when to when something is out of order, and how."""
        if kind not in self.kinds:
            return
        chance, now = self.stream(kind), 0.0
        for _ in range(chance.randint(1, 3)):
            now += 10 ** chance.uniform(0, 3.5)
            end = now + 10 ** chance.uniform(0.5, 4)
            yield now, end, chance.choice(("unreachable", "unreachable", "unauthorized", "hang"))
            now = end

    @staticmethod
    def _within(windows: list[tuple[float, float, str]], now: float) -> str:
        return next((what for begin, end, what in windows if begin <= now < end), "")

    # At a site

    def world(self, name: str) -> World:
        world = World(self.fate, self.duration, place=self.place, habits=self.habits, name=name)

        def purge() -> None:
            self.happened["sweeps of a place"] += 1
            world.purge(claims=not (self.kinds & REPEATING or self._pooled))

        def tamper() -> None:
            self.happened["files changed by others"] += world.tamper(self.stream("tampers"))

        for kind, act in (
            ("purges", purge),
            ("tampers", tamper),
            ("restarts", lambda: world.restart(lambda: self.stream("restarts").random() < 0.4)),
        ):
            if kind in self.kinds:
                for _ in range(self.stream(kind).randint(1, 3)):
                    self._plan(world, 10 ** self.stream(kind).uniform(0.5, 4), act)
        for begin, end, _ in self._full:
            self._plan(world, begin, lambda: setattr(world, "full", True))
            world.after(end, lambda: setattr(world, "full", False))
        return world

    def _plan(self, world: World, when: float, act: Callable[[], Any]) -> None:
        world.after(when, lambda: None if self.healed else act())

    def heal(self, *worlds: World) -> None:
        """From now on everything is well."""
        self.healed = True
        for world in worlds:
            world.full = False

    def fate(self, spec: JobSpec) -> Fate:
        """What becomes of a submission."""
        if spec.name.startswith("pool "):
            return self._fate_of_allocation()
        plan = self.stream("plan")
        delay = plan.choice((0.5, 3.0, 30.0, 400.0, *((DAY_S,) if self.slow else ())))
        fate = Fate(starts=(delay,))
        if self.has("killed", 0.3):
            chance = self.stream("killed")
            reason, warned = chance.choice(_KILLS)
            after = chance.uniform(0, 150)
            requeued = reason is Reason.NODE_FAILURE and chance.random() < 0.5
            fate = Fate((delay,), False, after, reason, warned, requeued)
            if chance.random() < 0.2:
                fate = Fate(refused=True)
        if self.has("strays", 0.4):
            chance = self.stream("strays")
            more = [delay + 10 ** chance.uniform(0, 5) for _ in range(chance.randint(1, 2))]
            fate = Fate((delay, *more), False, fate.killed_after, fate.reason, fate.warned)
        if self.has("lost", 0.3):
            never = self.stream("lost").random() < 0.5
            fate = Fate(starts=() if never else fate.starts, denied=True)
        if spec.segment is not None and not self.healed:
            fate = replace(fate, saves=self._segments.random() < 0.7)
        if self.has("forgetful", 0.5):
            fate = replace(fate, forgotten=True)
        if self.has("stalls", 0.5):
            chance = self.stream("stalls")
            stalled = chance.uniform(0, 600), chance.uniform(0, LONGEST_STALL_S)
            fate = replace(fate, stalled=stalled)
        elif self.has("deaf", 0.5):
            fate = replace(fate, deaf=True)
        return fate

    def _fate_of_allocation(self) -> Fate:
        fate = Fate((self._pools.choice((0.5, 3.0, 30.0, 400.0, 4000.0)),))
        if self.has("lost allocations", 0.5):
            chance = self.stream("lost allocations")
            reason, warned = chance.choice(_KILLS)
            step, after = chance.choice((None, chance.randint(0, 25))), 10 ** chance.uniform(0, 3.7)
            fate = replace(
                fate, reason=reason, warned=warned, requeued=chance.random() < 0.3, step=step,
                killed_after=after if step is None else None,
            )  # fmt: skip
            twice = fate.starts[0] + 10 ** chance.uniform(0, 4)
            survives = chance.choice((0.0, 0.0, 5.0, 60.0, 1e6))
            if "stalls" not in self.kinds:  # what is silent while its node hangs counts as over
                more = (twice,) * (chance.random() < 0.2)
                fate = replace(fate, survives=survives, starts=(*fate.starts, *more))
        if self.has("denied allocations", 0.5):
            chance = self.stream("denied allocations")
            begin = 10 ** chance.uniform(0, 3.5)
            fate = replace(fate, unknown=(begin, begin + 10 ** chance.uniform(1, 4)))
        if self.has("refused allocations", 0.3):
            chance = self.stream("refused allocations")
            self.happened["allocations that were refused"] += 1
            full, at_once = chance.random() < 0.5, chance.random() < 0.5
            fate = Fate(refused=True, full=full, at_once=at_once)
        return fate

    def duration(self, spec: JobSpec) -> float:
        return self.stream("plan").choice(
            (1.0, 100.0, 130.0, 3000.0, 9000.0, *((DAY_S,) * self.slow))
        )

    def place(self, path: str) -> str:
        return self.stream("plan").choice(("marker", "archive", "alone"))

    def fault(self, method: str, now: float) -> Fault:
        """What a request meets."""
        if self.healed:
            return ""
        if what := self._within(self._outages, now):
            return what  # type: ignore[return-value]
        if wrong := self._wrong_answer(method):
            return wrong
        chance = self.stream("answers")
        if chance.random() >= self._rate:
            slow = method == "submit" and self.has("slow posts", 0.5)
            return "slowly" if slow else ""
        kinds: list[Fault] = ["unreachable", "lost", "lost", "busy", "unauthorized", "hang"]
        if method in ("states", "find", "submit", "list"):
            kinds.append("not found")
        if method == "find":
            kinds.append("empty")
        if method == "submit":
            kinds.append("late")
        return chance.choice(kinds)

    def _wrong_answer(self, method: str) -> Fault:
        if method in ("get", "put") and self.has("damage", 0.2):
            return self.stream("damage").choice(("halved", "damaged"))
        if method == "get" and self.has("odd", 0.3):
            return "rejected"
        if method == "list" and self.has("wrong listings", 0.2):
            self.happened["wrong listings"] += 1
            return self.stream("wrong listings").choice(("empty", "not found"))
        return ""

    # Here

    def full_here(self, now: float) -> bool:
        """Whether there is no room on this machine."""
        return not self.healed and bool(self._within(self._full_here, now))

    def end(self) -> tuple[str, float]:
        """How a run is ended from here, and when: at a point (see `Session.point`) or a time."""
        if self.has("deaths", 0.6):
            return "dies", 10 ** self.stream("deaths").uniform(0.5, 3)
        if self.has("power", 0.6):
            return "loses power", 10 ** self.stream("power").uniform(0.5, 3)
        for kind, how in (("interrupts", "cancels"), ("detaches", "detaches")):
            if self.has(kind, 0.5):
                return how, 10 ** self.stream(kind).uniform(0, 4 + self.slow)
        if self.has("targets", 0.5):  # the user turns to another target while jobs of one run
            return "detaches", 10 ** self.stream("targets").uniform(1.5, 3.5)
        return "", 0.0

    def of_copy(self) -> tuple[str, float, str, float]:
        """A run of a copy: beside the workflow's own or instead of it, when, how it ends and when.

        The first word is empty if there is none.
        """
        if not self.has("copies", 0.4):
            return "", 0.0, "", 0.0
        chance = self.stream("copies")
        where = chance.choice(("beside", "beside", "instead"))
        how = chance.choice(("", "dies", "dies", "cancels", "detaches"))
        return where, 10 ** chance.uniform(0, 3.5), how, 10 ** chance.uniform(1, 3.5)

    def cut_off(self) -> tuple[float, float]:
        """From when to when the workflow's own controller reaches no site while a copy runs."""
        chance = self.stream("copies")
        begin = 10 ** chance.uniform(0, 3)
        return begin, begin + (10 ** chance.uniform(1, 4) if chance.random() < 0.5 else 0.0)

    def target(self, jobs: Sequence[int]) -> int | None:
        """The job that a run asks for; None for all."""
        return self.stream("targets").choice(jobs) if jobs and self.has("targets", 0.8) else None

    def temporary(self, *, first: bool) -> bool:
        """Whether an output is removed when the jobs of a run do not need it any more."""
        return "targets" in self.kinds and (first or self.stream("targets").random() < 0.3)

    def pause(self) -> float:
        """Seconds until somebody starts it again."""
        pause = self.stream("plan").choice((0.0, 10.0, 600.0, 20000.0))
        return min(pause, 10.0) if self.has("targets") else pause


def fewest(
    make: Callable[[Collection[str]], Schedule], fails: Callable[[Schedule], bool]
) -> tuple[str, ...]:
    """The kinds of misfortune without one of which a failure does not come.

    `make` makes the seed's schedule without some kinds.
    """
    left_out: tuple[str, ...] = ()
    for kind in sorted(make(()).kinds):
        if fails(make((*left_out, kind))):
            left_out = (*left_out, kind)
    return tuple(sorted(make(left_out).kinds))
