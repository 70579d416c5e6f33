"""Which site a rule's resources name."""

from types import SimpleNamespace

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.reasons import FAILURES
from snakemake_executor_plugin_mantik.rules.resources import choose_sites, job_retry_reasons


def test_the_site_is_taken_out_of_the_resources() -> None:
    resources: dict[str, object] = {"mantik_site": "b", "site": "x", "mantik": 1, "nodes": 2}
    assert choose_sites(resources, {"a": 1, "b": 2}) == ("b",)
    assert resources == {"site": "x", "mantik": 1, "nodes": 2}
    assert choose_sites(resources, {"a": 1, "b": 2}) == ("a",)


def test_several_sites_need_a_limit_on_the_wait() -> None:
    wanted: dict[str, object] = {"mantik_site": "b, a", "mantik_wait": "30m"}
    assert choose_sites(wanted, {"a": 1, "b": 2}) == ("b", "a")
    with pytest.raises(UserError, match=r"when to try the next site. Add .* mantik_wait=\"30m\""):
        choose_sites({"mantik_site": "b,a"}, {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("wanted", "known"), [("HPC2", "hpc2"), ("hcp2", "hpc2"), ("juwels", "JUWELS")]
)
def test_a_site_of_nearly_the_name_is_suggested(wanted: str, known: str) -> None:
    with pytest.raises(UserError, match=rf"'{wanted}' \(did you mean {known}\?\)"):
        choose_sites({"mantik_site": wanted}, {"first": 1, known: 2})


@pytest.mark.parametrize(
    ("meant", "names"),
    [
        ("mantik_site", ["mantiksite", "mantik-site", "mantik_sites", "Mantik_Site", "mantik_sit",
                         "mantk_site"]),
        ("mantik_retry_on", ["mantik_retryon", "mantik_retries_on", "mantik-retry-on"]),
    ],
)  # fmt: skip
def test_a_misspelt_resource_is_no_other_one(meant: str, names: list[str]) -> None:
    for name in names:
        with pytest.raises(UserError, match=rf"no resource {name} \(did you mean {meant}\?\)"):
            choose_sites({name: "b"}, {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, set(FAILURES)),
        ("preempted", {"preempted"}),
        (" out_of_memory , exit_code preempted,", {"out_of_memory", "exit_code", "preempted"}),
    ],
)
def test_reasons_for_a_retry(value: object, found: set[str]) -> None:
    assert set(job_retry_reasons(SimpleNamespace(resources={"mantik_retry_on": value}))) == found


@pytest.mark.parametrize("value", ["", " , ", 1, "oom", "out_of_memory;preempted", "success"])
def test_what_is_no_reason_for_a_retry(value: object) -> None:
    with pytest.raises(UserError, match=r"mantik_retry_on=.*out_of_memory, node_failure"):
        job_retry_reasons(SimpleNamespace(resources={"mantik_retry_on": value}))
