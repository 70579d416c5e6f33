"""Core hours: what a site bills, or the admission that nobody knows."""

import pytest

from snakemake_executor_plugin_mantik.config.known_sites import KNOWN_SITES, node_cores
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.engine.forecast import Total
from snakemake_executor_plugin_mantik.jobs.resources import billed_cores
from snakemake_executor_plugin_mantik.jobs.spec import Resources

JUWELS = {
    "UnicoreApiUrl": "https://unicore.fz-juelich.de/JUWELS/rest/core",
    "Resources": {"Queue": "batch"},
}


@pytest.mark.parametrize(
    ("asked", "of_node", "billed"),
    [
        (Resources(nodes=2), 48, 96),
        (Resources(), 48, 48),
        (Resources(nodes=2, cpus_per_task=1), 48, 96),
        (Resources(cpus_per_task=4), 48, 48),
        (Resources(tasks=49), 48, 96),
        (Resources(total_cpus=96), 48, 96),
        (Resources(nodes=2, cpus_per_task=4), None, 8),
        (Resources(tasks=6), None, 6),
        (Resources(total_cpus=5), None, 5),
        (Resources(nodes=2), None, None),
        (Resources(), None, None),
    ],
)
def test_cores_that_are_billed(asked: Resources, of_node: int | None, billed: int | None) -> None:
    assert billed_cores(asked, of_node) == billed


@pytest.mark.parametrize(
    ("url", "counted"), [({}, (96.0, 0)), ({"UnicoreApiUrl": "https://x.example/core"}, (0.0, 1))]
)
def test_an_hour_on_two_nodes_of_juwels_or_of_a_site_that_nobody_knows(
    url: dict[str, str], counted: tuple[float, int]
) -> None:
    config = BackendConfig.model_validate(JUWELS | url)
    asked = Resources(nodes=2, runtime_s=3600, queue="batch")
    total = Total()
    total.add(asked, billed_cores(asked, node_cores(config, asked.queue)))
    assert (total.core_hours, total.without_cores) == counted


def test_a_job_may_use_its_walltime_in_each_segment() -> None:
    total = Total()
    total.add(Resources(runtime_s=3600, gpus_per_node=4), 8, segments=10)
    assert (total.core_hours, total.gpu_hours) == (80.0, 40.0)


def test_known_cores_are_of_known_partitions() -> None:
    for site in KNOWN_SITES.values():
        assert set(site.cores) <= {"", *site.queues}, site.name
