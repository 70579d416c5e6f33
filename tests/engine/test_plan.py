"""What a job asks for is compared with what its site's scheduler can be told, before it is sent."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.engine.plan import (
    Planner,
    choose_queue,
    nodes_to_exclude,
    through_links,
    unchecked_resources,
)
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.journal import FileRecord, Journal, StoredOutput
from snakemake_executor_plugin_mantik.sites.base import QueueLimits, SiteFacts
from tests.support.controller import request


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
        with pytest.raises(UserError, match="neither here nor at a site any more"):
            plan.needed_files(job, journal.files, "p")

        (tmp_path / "a").write_text("of before\n")
        assert plan.needed_files(job, journal.files, "p")[0][0] == ("a", None)

        files = (FileRecord("a", 1, "c", modified=1.0),)
        output = StoredOutput("a", "p", False, 1.0, "make", files)
        journal.files.set_remote_files("p", files)
        journal.files.set_stored([output])
        assert [f.path for f in plan.needed_files(job, journal.files, "q")[1]] == ["a"]
        journal.files.drop_stored(output)
        with pytest.raises(UserError, match="not at the site any more where it was made"):
            plan.needed_files(job, journal.files, "p")


def test_files_have_paths_through_links_that_lead_to_links_but_not_round_in_circles() -> None:
    links = {"d/last": "step", "d/step": "./1", "d/1/up": "..", "d/a": "b", "d/b": "a", "e": "/d"}
    found = dict(through_links(["d/1/x", "d/2"], links))
    assert found == {"d/last/x": "d/1/x", "d/step/x": "d/1/x"}
