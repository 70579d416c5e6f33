"""What a job asks for is compared with what its site's scheduler can be told, before it is sent."""

from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.errors import UserError


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
