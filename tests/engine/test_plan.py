"""What a job asks for is compared with what its site's scheduler can be told, before it is sent."""

import asyncio
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteUnreachable, UserError
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.engine.expect import Load, Outlook, order_sites
from snakemake_executor_plugin_mantik.engine.plan import (
    Planner,
    choose_queue,
    nodes_to_exclude,
    through_links,
    unchecked_resources,
)
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.journal import FileRecord, Journal, RemoteOutput
from snakemake_executor_plugin_mantik.sites.base import FreeNode, QueueLimits, SiteFacts
from tests.support.controller import request
from tests.support.virtualtime import run


def planner(scheduler: str) -> Planner:
    document = {
        "UnicoreApiUrl": "https://u.example/X/rest/core",
        "Resources": {"Queue": "gpus", "GPUsPerNode": 2},
        "Site": {"Scheduler": scheduler},
    }
    return Planner(BackendConfig.model_validate(document), None, Path("/p"))


def test_a_kind_of_gpus() -> None:
    rule = {"gpu_model": "a100"}
    assert planner("slurm").resources(rule, 1).gpu_model == "a100"
    for scheduler, told in (("pbs", "PBS has no common name"), ("none", "Scheduler to slurm")):
        with pytest.raises(UserError, match=told):
            planner(scheduler).resources(rule, 1)


@pytest.mark.parametrize(
    ("scheduler", "rule", "told"),
    [
        ("slurm", {"constraint": "a b"}, "--constraint"),
        ("slurm", {"reservation": "a'b"}, "--reservation"),
        ("pbs", {"qos": "high"}, "quality of service"),
        ("pbs", {"constraint": "a|b"}, "chunk of PBS"),
    ],
)
def test_what_no_directive_can_carry(scheduler: str, rule: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        planner(scheduler).resources(rule, 1)
    planner("none").resources(rule, 1)


LIMITS = QueueLimits(
    runtime_s=(60, 86_400), choices={"qos": ("normal", "short"), "constraint": ("fast",)}
)
FACTS = SiteFacts("/w", "UNICORE/X 11.0.0", queues={"batch": LIMITS, "free": QueueLimits()})


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"qos": "long"}, "QoS 'long' requested; queue batch allows normal, short"),
        ({"qos": "Short"}, "QoS 'Short' requested"),
        ({"constraint": "slow"}, "constraint 'slow' requested; queue batch allows fast"),
        ({"runtime_s": 259_200}, "runtime: 3 days requested; queue batch allows at most 24 h"),
    ],
)
def test_what_a_queue_does_not_have(asked: dict[str, Any], told: str) -> None:
    fits = planner("slurm").fits
    with pytest.raises(UserError, match=told):
        fits(Resources(queue="batch", **asked), FACTS)
    fits(Resources(queue="free", **asked), FACTS)


def test_what_a_queue_has() -> None:
    for asked in (
        Resources(queue="batch", qos="short", constraint="fast", runtime_s=86_400),
        Resources(queue="batch"),
        Resources(queue="batch", reservation="mine"),  # nobody lists them here
    ):
        planner("slurm").fits(asked, FACTS)


def test_one_of_several_queues_has_to_allow_a_job() -> None:
    """Slurm takes whichever starts it first."""
    fits = planner("slurm").fits
    assert fits(Resources(queue="batch,free", runtime_s=259_200), FACTS) == []
    with pytest.raises(UserError, match="queue batch allows at most 24 h"):
        fits(Resources(queue="batch", runtime_s=259_200), FACTS)


def test_the_first_queue_that_allows_a_job() -> None:
    day, hour = QueueLimits(runtime_s=(1, 86_400)), QueueLimits(runtime_s=(1, 3600))
    gpus = replace(day, gpus_per_node=(0, 4))
    facts = replace(FACTS, queues={"gpus": gpus, "hidden": QueueLimits(), "fast": hour, "all": day})

    def chosen(**asked: Any) -> str | None:
        return choose_queue(Resources(queue="auto", **asked), facts).queue

    assert chosen() == chosen(runtime_s=3600) == "fast"
    assert chosen(runtime_s=3601) == "all"
    assert chosen(runtime_s=60, gpus_per_node=1) == "gpus"
    fits = planner("slurm").fits
    assert fits(Resources(queue="auto", runtime_s=3601), facts) == []
    machine = {"ApiUrl": "https://f.example", "TokenUrl": "https://t.example", "Machine": "m"}
    document = {"Firecrest": machine, "Resources": {"Queue": "auto"}}
    there = Planner(BackendConfig.model_validate(document), None, Path("/p"))
    with pytest.raises(UserError, match="does not report which walltimes its queues allow"):
        there.resources({}, 1)
    assert there.resources({"slurm_partition": "all"}, 1).queue == "all"
    with pytest.raises(UserError, match=r"no queue allows this job: runtime: .* queue gpus .* all"):
        fits(Resources(queue="auto", runtime_s=86_401), facts)
    with pytest.raises(UserError, match=r"does not report which walltimes .*several .* \(free\)"):
        fits(Resources(queue="auto"), replace(FACTS, queues={"free": QueueLimits()}))


def test_enough_nodes_are_left_for_a_job_that_avoids_those_that_failed() -> None:
    queues = {f"q{n}": QueueLimits(nodes=(1, n)) for n in (1, 2, 3, 9)}
    facts = SiteFacts("/w", "firecREST", queues={**queues, "free": QueueLimits()})

    def left_out(queue: str | None, **asked: Any) -> str:
        return "".join(nodes_to_exclude(Resources(queue=queue, **asked), facts, "abcdef"))

    assert [left_out(f"q{n}") for n in (1, 2, 3, 9)] == ["", "f", "ef", "cdef"]
    assert [left_out(f"q{n}", nodes=2) for n in (1, 2, 3, 9)] == ["", "", "f", "cdef"]
    assert left_out("q3,q9") == "ef"
    for unknown in (None, "free", "hidden", "q9,free"):
        assert left_out(unknown) == left_out(unknown, nodes=5) == "f"
    assert left_out("q1,free") == ""
    for choosy in ("constraint", "reservation", "gpu_model", "exclude"):
        assert left_out("q9", **{choosy: "x"}) == "f"
    assert left_out("q9", nodelist="f") == ""


def test_a_queue_that_a_site_does_not_list_may_exist() -> None:
    [warning] = planner("slurm").fits(Resources(queue="batch,secret"), FACTS)
    assert "the site lists no queue 'secret', only batch, free" in warning


def test_what_cannot_be_checked_is_named() -> None:
    asked = Resources(queue="batch", runtime_s=60, nodes=2, qos="short", reservation="mine")
    assert unchecked_resources(asked, LIMITS) == ["nodes", "reservation"]
    assert unchecked_resources(asked, QueueLimits()) == ["runtime", "nodes", "QoS", "reservation"]


def test_an_input_that_is_nowhere_is_reported_before_its_job_is_submitted(tmp_path: Path) -> None:
    plan = replace(planner("slurm"), project=tmp_path)
    job = replace(request(1, "a"), storable=frozenset({"a"}))
    with closing(Journal(tmp_path / "state")) as journal:
        with pytest.raises(UserError, match="neither on this machine nor at a site"):
            plan.needed_files(job, journal.files, "p")

        (tmp_path / "a").write_text("of before\n")
        assert plan.needed_files(job, journal.files, "p")[0][0] == ("a", None)

        files = (FileRecord("a", 1, "c", modified=1.0),)
        output = RemoteOutput("a", "p", False, 1.0, "make", files)
        journal.files.set_remote_files("p", files)
        journal.files.set_stored([output])
        assert [f.path for f in plan.needed_files(job, journal.files, "q")[1]] == ["a"]
        journal.files.drop_stored(output)
        with pytest.raises(UserError, match="no longer at the place where it was made"):
            plan.needed_files(job, journal.files, "p")


def test_files_have_paths_through_links_that_lead_to_links_but_not_round_in_circles() -> None:
    links = {"d/last": "step", "d/step": "./1", "d/1/up": "..", "d/a": "b", "d/b": "a", "e": "/d"}
    found = dict(through_links(["d/1/x", "d/2"], links))
    assert found == {"d/last/x": "d/1/x", "d/step/x": "d/1/x"}


# At which site a job is expected to start first.


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
