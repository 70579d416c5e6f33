"""At which site a job is expected to start first."""

import asyncio
from collections.abc import Mapping

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteUnreachable
from snakemake_executor_plugin_mantik.engine.expect import Load, Outlook, order_sites
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites.base import FreeNode
from tests.support.virtualtime import run

JOB = Resources(nodes=1, cpus_per_task=8, queue="batch")
ASKED = dict.fromkeys(("a", "b", "c"), (JOB, 8))


def node(cpus: int, *queues: str) -> FreeNode:
    return FreeNode(frozenset(queues or ("batch",)), cpus)


AWAY, NOTHING, FULL = Load(away=True), Load(), Load([node(0)])
FREE = Load([node(8)])


@pytest.mark.parametrize(
    ("loads", "order"),
    [
        pytest.param([NOTHING, NOTHING, NOTHING], "abc", id="nothing is known"),
        pytest.param([NOTHING, FULL, FREE], "cab", id="free, unknown, full"),
        pytest.param([AWAY, FULL, NOTHING], "cba", id="away"),
        pytest.param([Load([node(64, "debug")]), Load([node(7)]), FREE], "cab", id="no room"),
        pytest.param([Load(waits=[(9000, 8)]), NOTHING, Load(waits=[(30, 8)])], "cba", id="waits"),
        pytest.param([Load(waits=[(9000, 512), (5, 8)]), NOTHING, FREE], "cab", id="of its size"),
        pytest.param([Load(waits=[(9000, 512)]), NOTHING, NOTHING], "bca", id="of another size"),
        pytest.param([Load([node(0)], [(2, 8)]), NOTHING, FREE], "cba", id="was free before"),
        pytest.param([Load([node(0)], [(90, 8)]), NOTHING, FREE], "cab", id="full, but soon free"),
    ],
)
def test_order(loads: list[Load], order: str) -> None:
    assert "".join(order_sites(ASKED, dict(zip(ASKED, loads, strict=True)))) == order


def test_a_job_of_several_nodes_needs_as_many_free_ones() -> None:
    asked = {name: (Resources(nodes=2, cpus_per_task=8), 16) for name in ("a", "b")}
    loads = {"a": Load([node(8), node(4)]), "b": Load([node(8), node(9)])}
    assert order_sites(asked, loads) == ["b", "a"]


class Sites:
    def __init__(self, **loads: Load) -> None:
        self.loads = loads
        self.asked = dict.fromkeys(loads, 0)

    async def ask(self, name: str) -> Load:
        self.asked[name] += 1
        if self.loads[name].away:
            await asyncio.sleep(300)
            raise SiteUnreachable("no answer")
        return self.loads[name]


def test_jobs_of_a_minute_take_the_free_nodes_and_cost_one_request() -> None:
    sites = Sites(a=NOTHING, b=Load([node(16), node(8)]))

    async def jobs() -> list[str]:
        outlook = Outlook(sites.ask)
        first = [(await outlook.order(dict.fromkeys("ab", (JOB, 8))))[0] for _ in range(5)]
        assert sites.asked == {"a": 1, "b": 1}
        await asyncio.sleep(61)
        return [*first, (await outlook.order(dict.fromkeys("ab", (JOB, 8))))[0]]

    assert run(jobs()) == [*"bbbaa", "b"]
    assert sites.asked == {"a": 2, "b": 2}


def test_a_site_that_gets_no_more_jobs_of_the_run_counts_as_full() -> None:
    sites = Sites(a=FREE, b=NOTHING)
    asked: Mapping[str, tuple[Resources, int | None]] = dict.fromkeys("ab", (JOB, 8))
    assert run(Outlook(sites.ask).order(asked, {"a"})) == ["b", "a"]


def test_a_site_that_does_not_answer_holds_up_one_job_for_seconds() -> None:
    sites = Sites(a=AWAY, b=NOTHING)

    async def jobs() -> list[float]:
        outlook, clock, took = Outlook(sites.ask), asyncio.get_running_loop().time, []
        for _ in range(3):
            began = clock()
            assert await outlook.order(dict.fromkeys("ab", (JOB, 8))) == ["b", "a"]
            took.append(clock() - began)
        outlook.close()
        return took

    first, *others = run(jobs())
    assert 0 < first <= 30
    assert others == [0, 0]
    assert sites.asked["a"] == 1
