"""What a group asks for, from what its members do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snakemake.common.tbdstring import TBDString
from snakemake.iocontainers import ResourceList
from snakemake.resources import Resources

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.rules.context import RuleContext
from snakemake_executor_plugin_mantik.rules.kinds.groups import Asked, Unit, group_obstacle
from snakemake_executor_plugin_mantik.rules.units import unit_name


def member(name: str, threads: int = 1, pipe: object = None, **resources: Any) -> Any:
    """A job of the rule `name`, as far as is looked at here."""
    everything = {"_cores": threads, "_nodes": 1, "tmpdir": TBDString(), **resources}
    return SimpleNamespace(
        resources=ResourceList(fromdict=everything),
        threads=threads,
        pipe_group=pipe,
        rule=SimpleNamespace(name=name, resources={}),
        wildcards_dict={"s": "1", "name": name},
        output=[],
        is_group=lambda: False,
    )


def group(*layers: list[Any]) -> Any:
    members = [each for layer in layers for each in layer]

    class Group:
        global_resources = Resources()
        groupid = "g"
        toposorted = layers
        rules = frozenset(each.rule.name for each in members)

        def is_group(self) -> bool:
            return True

        def __len__(self) -> int:
            return len(members)

    return Group()


def site(**resources: object) -> Any:
    known = {"runtime_s": None, "memory_mib_per_node": None, "gpus_per_node": None, "nodes": None}
    return SimpleNamespace(config=SimpleNamespace(resources=SimpleNamespace(**known | resources)))


SITES = {"one": site(), "two": site()}
DEPENDING = group(
    [member("a", 2, mem_mb=100, runtime=10), member("b", 3, mem_mb=50, runtime=20)],
    [member("c", 4, mem_mb=120, runtime=5)],
)


def asked(of_group: Any, sites: dict[str, Any] = SITES) -> Asked:
    return Unit(of_group, RuleContext(sites, Path())).asked


def test_what_runs_at_a_time_adds_up() -> None:
    found = asked(DEPENDING)
    assert (found.site, found.threads) == ("one", 5)
    assert found.resources == {"mem_mb": 150, "runtime": 25}
    assert [each["_cores"] for each in found.of_members] == [2, 3, 4]


def test_members_that_say_nothing_get_what_the_backend_config_says() -> None:
    base = site(runtime_s=3600, memory_mib_per_node=400, gpus_per_node=1, nodes=2)
    assert asked(DEPENDING, {"one": base}).resources == {"mem_mb": 150, "runtime": 25, "nodes": 1}
    silent = group([member("a", mem_mb=100, runtime=10, gpu=2), member("b")])
    found = asked(silent, {"one": base})
    assert found.resources == {"mem_mb": 400, "runtime": 60, "gpu": 2, "nodes": 1}
    assert asked(group([member("a")], [member("b")]), {"one": base}).resources == {"nodes": 1}


def test_one_name_for_each_thing() -> None:
    mixed = group(
        [
            member("a", cpus_per_task=4, mem_mb_per_cpu=10, gpus=1),
            member("b", 2, mem_mb=50, gpu=2),
            member("c", mem_mb=TBDString()),
        ]
    )
    found = asked(mixed)
    assert found.threads == 7
    assert found.resources == {"mem_mb": 90, "gpu": 3, "cpus_per_task": 7}
    chain = group([member("a", cpus_per_task=1)], [member("b")])
    assert asked(chain).resources == {"cpus_per_task": 1}


def test_both_ends_of_a_pipe_run_for_the_longer_of_the_two() -> None:
    found = asked(group([member("a", 2, "p", runtime=5), member("b", 1, "p", runtime=9)]))
    assert (found.threads, found.resources) == (3, {"runtime": 9})


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ({"mantik_site": "two"}, {}, r"different sites: a at two; b at one"),
        ({"mantik_site": "there"}, {}, r"no site 'there'"),
        ({"mantik_site": TBDString()}, {}, r"depends on a file that its own group makes"),
        ({"qos": "x"}, {"qos": "y"}, r"qos is 'x' for a, 'y' for b"),
        ({"qos": "x"}, {}, r"qos is 'x' for a, not set for b"),
        ({"mem_mb": "lots"}, {"mem_mb": "lots"}, r"rule a: the resource mem_mb='lots'"),
    ],
)
def test_members_that_do_not_go_together(
    first: dict[str, Any], second: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        Unit(group([member("a", **first), member("b", **second)]), RuleContext(SITES, Path())).site  # noqa: B018


@pytest.mark.parametrize("resources", [{"tasks": 2}, {"nodes": 2}, {"mpi": "srun"}])
def test_members_share_a_node(resources: dict[str, Any]) -> None:
    context = RuleContext(SITES, Path())
    one = member("a", **resources)
    together, alone = Unit(group([one, member("b")]), context), Unit(group([one]), context)
    assert group_obstacle(together, together.members[0]) is not None
    assert group_obstacle(alone, alone.members[0]) is None


def test_a_groups_name() -> None:
    assert unit_name(DEPENDING) == "group g: a, b, c s=1"
    assert unit_name(group([member("a")])) == "a s=1, name=a"


def test_a_site_that_is_not_known_yet() -> None:
    later = group([member("a", mantik_site=TBDString()), member("b")])
    assert asked(later).site is None
