"""Expect at which of several sites a job starts first, from what can be had cheaply of each."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

from ..common.errors import MantikError
from ..jobs.resources import cpus_per_node
from ..jobs.spec import Resources
from ..sites.base import FreeNode

_VALID_S = 60.0
"""Seconds for which what is known of a site's load is used."""
_ANSWER_S = 10.0
"""Most seconds to wait for a site that is asked for its load."""
_UNKNOWN_S = 600.0
"""The wait that is expected where nothing is known."""
_BUSY_S = 3600.0
"""The wait that is expected where no free node is large enough, and nothing else is known."""
_ALIKE = 4
"""Jobs are of one size if their cores differ by this factor at most."""


@dataclass(frozen=True)
class Load:
    """What is known of how busy a site is.

    Attributes:
        nodes: those on which jobs can start now; None if the site does not tell.
        waits: seconds that this project's last jobs there waited at least, and their cores.
        away: whether it does not answer.
    """

    nodes: Sequence[FreeNode] | None = None
    waits: Sequence[tuple[float, int | None]] = ()
    away: bool = False

    def without(self, resources: Resources) -> "Load":
        """Return it with the nodes taken that a job of `resources` would get."""
        taken = _nodes_for(resources, self)
        if self.nodes is None or taken is None:
            return self
        cpus = cpus_per_node(resources) or 1
        nodes = [
            replace(node, cpus=node.cpus - cpus) if number in taken else node
            for number, node in enumerate(self.nodes)
        ]
        return replace(self, nodes=nodes)


_AWAY = Load(away=True)

Asked = Mapping[str, tuple[Resources, int | None]]
"""What a job would request at each site, and its cores there."""


def order_sites(asked: Asked, loads: Mapping[str, Load]) -> list[str]:
    """Return the sites of `asked` in the order in which they are expected to start a job.

    Sites with equal expectations keep their order.
    """
    return sorted(asked, key=lambda name: expected_wait(*asked[name], loads[name]))


def expected_wait(resources: Resources, cores: int | None, load: Load) -> float:
    """Return the seconds that a job is expected to wait, infinite at a site that is away.

    It starts at once where nodes are free. Otherwise it waits as long as the project's last jobs of
    its size there (half of them waited longer), or as the last of any size. Where no node is free,
    jobs that found one tell nothing.
    """
    if load.away:
        return math.inf
    if _nodes_for(resources, load) is not None:
        return 0.0
    waits = [one for one in load.waits if load.nodes is None or one[0] > _VALID_S]
    alike = [wait for wait, of in waits if of and cores and 1 / _ALIKE <= of / cores <= _ALIKE]
    if waits:
        return median(alike or [wait for wait, _ in waits])
    return _UNKNOWN_S if load.nodes is None else _BUSY_S


def _nodes_for(resources: Resources, load: Load) -> set[int] | None:
    """Return the numbers of free nodes on which a job can start now; None if there are not enough.

    It may name one queue, several, or none.
    """
    number, cpus = resources.nodes or 1, cpus_per_node(resources) or 1
    fit = [
        at
        for at, node in enumerate(load.nodes or ())
        if node.cpus >= cpus
        and (not resources.queues or not node.queues.isdisjoint(resources.queues))
    ]
    return set(fit[:number]) if len(fit) >= number else None


@dataclass
class _Look:
    """A look at a site, and what is known from it: until it ends, that the site is away."""

    began: float
    task: "asyncio.Task[None] | None" = None
    load: Load = _AWAY


class Outlook:
    """Orders the sites of a run's jobs. Each site is asked for its load once a minute at most."""

    def __init__(self, ask: Callable[[str], Awaitable[Load]]) -> None:
        """Prepare; `ask` returns the load of a site, or raises a `MantikError` if it is away."""
        self._ask = ask
        self._looks: dict[str, _Look] = {}

    async def order(self, asked: Asked, full: Collection[str] = ()) -> list[str]:
        """Return the sites for a job in order, and count it among the jobs at the first one.

        `full` are the sites that get no more jobs of this run for now. For `asked`, see
        `order_sites`.
        """
        looks = dict(zip(asked, await asyncio.gather(*map(self._look, asked)), strict=True))
        loads = {name: look.load for name, look in looks.items()}
        loads |= {name: replace(loads[name], nodes=()) for name in full if name in loads}
        order = order_sites(asked, loads)
        looks[order[0]].load = looks[order[0]].load.without(asked[order[0]][0])
        return order

    async def _look(self, name: str) -> _Look:
        now = asyncio.get_running_loop().time()
        look = self._looks.get(name)
        if look is None or look.task is None or (look.task.done() and now - look.began > _VALID_S):
            look = self._looks[name] = _Look(now)
            look.task = asyncio.create_task(self._see(name, look))
        assert look.task is not None
        # A site that does not answer holds up one job, not each.
        await asyncio.wait([look.task], timeout=max(0.0, look.began + _ANSWER_S - now))
        return look

    async def _see(self, name: str, look: _Look) -> None:
        with suppress(MantikError):
            look.load = await self._ask(name)

    def close(self) -> None:
        for look in self._looks.values():
            if look.task is not None:
                look.task.cancel()
