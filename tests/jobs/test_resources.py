"""A rule's resources win over the backend config's, and reach Slurm as they are meant."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.resources import (
    merge_resources,
    pbs_directives,
    slurm_directives,
    suggest_resource,
    total_cpus,
)
from snakemake_executor_plugin_mantik.jobs.spec import Resources

BASE = Resources(
    queue="booster",
    runtime_s=43200,
    nodes=2,
    cpus_per_task=48,
    total_cpus=96,
    gpus_per_node=4,
    memory_mib_per_node=65536,
    account="hai",
    reservation="course-7",
    constraint="gpu",
    qos="high",
)


def test_without_resources_of_a_rule_the_config_is_asked_for() -> None:
    rule = {"tmpdir": "/tmp", "disk_mb": 1000, "mem_mib": 954, "site": "alps", "runtime": None}
    assert merge_resources(BASE, rule, 1) == BASE


@pytest.mark.parametrize(
    ("rule", "threads", "changes"),
    [
        ({"runtime": 90}, 1, {"runtime_s": 5400}),
        ({"runtime": "90"}, 1, {"runtime_s": 5400}),
        ({"runtime": 90.0}, 1, {"runtime_s": 5400}),
        ({"mem_mb": 4000}, 1, {"memory_mib_per_node": 4000}),
        ({"mem_mb": 5}, 1, {"memory_mib_per_node": 64}),
        ({"mem_mb": 0}, 1, {"memory_mib_per_node": None}),
        ({"mem_mb_per_cpu": 2000}, 1, {"memory_mib_per_node": None, "memory_mib_per_cpu": 2000}),
        ({"nodes": 4}, 1, {"nodes": 4, "total_cpus": None}),
        ({}, 8, {"cpus_per_task": 8, "total_cpus": None}),
        ({"cpus_per_task": 3}, 8, {"cpus_per_task": 3, "total_cpus": None}),
        ({"tasks": 16}, 1, {"tasks": 16, "cpus_per_task": 1, "total_cpus": None}),
        ({"tasks": 16}, 4, {"tasks": 16, "cpus_per_task": 4, "total_cpus": None}),
        (
            {"tasks_per_node": 3},
            1,
            {"tasks": 6, "tasks_per_node": 3, "cpus_per_task": 1, "total_cpus": None},
        ),
        ({"gpu": 2}, 1, {"gpus_per_node": 1}),
        ({"gpus": "8"}, 1, {"gpus_per_node": 4}),
        ({"gpu": 0}, 1, {"gpus_per_node": None}),
        ({"gpu": 2, "gpus": 2}, 1, {"gpus_per_node": 1}),
        ({"gpu": 2, "gpu_model": "a100"}, 1, {"gpus_per_node": 1, "gpu_model": "a100"}),
        ({"gpu_model": ""}, 1, {}),
        ({"nodes": 1, "gpu": 3}, 1, {"nodes": 1, "gpus_per_node": 3, "total_cpus": None}),
        ({"slurm_partition": "devel"}, 1, {"queue": "devel"}),
        ({"partition": "devel", "queue": "devel"}, 1, {"queue": "devel"}),
        ({"slurm_account": 7}, 1, {"account": "7"}),
        ({"account": "x"}, 1, {"account": "x"}),
        ({"qos": "low"}, 1, {"qos": "low"}),
        ({"slurm_qos": ""}, 1, {"qos": None}),
        ({"constraint": "a100&ib"}, 1, {"constraint": "a100&ib"}),
        ({"reservation": "r"}, 1, {"reservation": "r"}),
    ],
)
def test_a_rule_wins(rule: dict[str, object], threads: int, changes: dict[str, Any]) -> None:
    assert merge_resources(BASE, rule, threads) == Resources(**{**vars(BASE), **changes})


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ({"runtime": "2h"}, ["runtime", "minutes"]),
        ({"runtime": -1}, ["runtime"]),
        ({"runtime": True}, ["runtime"]),
        ({"runtime": 1.5}, ["runtime"]),
        ({"runtime": float("inf")}, ["runtime"]),
        ({"mem_mb": "<TBD>"}, ["mem_mb"]),
        ({"mem_mb": [1]}, ["mem_mb"]),
        ({"mem_mb": 1, "mem_mb_per_cpu": 2}, ["mem_mb=1", "mem_mb_per_cpu=2"]),
        ({"nodes": 0}, ["nodes"]),
        ({"tasks": 0}, ["tasks"]),
        ({"tasks": 4, "tasks_per_node": 2}, ["tasks=4", "tasks_per_node=2", "one of them"]),
        ({"tasks_per_gpu": 2}, ["tasks_per_gpu"]),
        ({"cpus_per_task": "many"}, ["cpus_per_task"]),
        ({"gpu": 1, "gpus": 2}, ["gpu=1", "gpus=2"]),
        ({"gpu": 3}, ["gpu=3", "2 nodes"]),
        ({"gpu": "a100"}, ["gpu"]),
        ({"partition": "a", "queue": "b"}, ["partition=a", "queue=b"]),
        ({"slurm_account": 1.5}, ["slurm_account"]),
        ({"qos": True}, ["qos"]),
        ({"gres": "gpu:1"}, ["gres", "gpu=<number over all nodes>", "gpu_model"]),
        (
            {"slurm_extra": "--gres=gpu:a100:2 -C ib  --exclusive -x n1"},
            ["slurm_extra", "Use `gpu`, `constraint`, `exclude` instead"],
        ),
        ({"slurm_extra": "--dependency=singleton"}, ["sets itself", "Remove --dependency"]),
        ({"slurm_extra": "--arr=1-3"}, ["sets itself", "Remove --array"]),
        ({"slurm_extra": "more"}, ["slurm_extra", "'more' as --name or --name=value"]),
        ({"slurm_extra": "--mail-user me"}, ["'me' as --name"]),
        ({"slurm_extra": "'--comment=a b'"}, ["without blanks"]),
        ({"slurm_extra": "'--comment"}, ["slurm_extra", "cannot be split"]),
        ({"gpu_model": "a100:2"}, ["gpu_model", "one kind"]),
        ({"gpu_model": "a100,h100"}, ["gpu_model", "one kind"]),
    ],
)
def test_what_cannot_be_meant_is_refused(rule: dict[str, object], names: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        merge_resources(BASE, rule, 1)
    assert all(name in str(raised.value) for name in names), str(raised.value)


def test_a_kind_of_gpus() -> None:
    asked = merge_resources(BASE, {"gpu": 2, "gpu_model": "a100"}, 1)
    assert "--gpus-per-node=a100:1" in slurm_directives(asked, "train")
    with pytest.raises(UserError, match=r"gpu_model=a100 .* requests no GPUs"):
        slurm_directives(merge_resources(Resources(), {"gpu_model": "a100"}, 1), "train")
    with pytest.raises(UserError, match=r"PBS has no common name .* gpu_model=a100"):
        pbs_directives(replace(asked, qos=None), "train")


def test_what_only_slurm_has() -> None:
    rule = {"exclude": "n[1-3]", "nodelist": "n7", "slurm_extra": "--mail-type=END  --exclusive"}
    asked = merge_resources(Resources(), rule, 1)
    options = slurm_directives(asked, "train")
    assert {"--exclude=n[1-3]", "--nodelist=n7", "--mail-type=END", "--exclusive"} <= {*options}
    assert merge_resources(asked, {"exclude": "", "slurm_extra": ""}, 1).extra is None
    with pytest.raises(UserError, match=r"PBS cannot express the resource nodelist=n7"):
        pbs_directives(asked, "train")
    with pytest.raises(UserError, match=r"PBS takes one queue, not a,b"):
        pbs_directives(Resources(queue="a,b"), "train")


ONE = "--ntasks-per-node=1"


@pytest.mark.parametrize(
    ("resources", "options"),
    [
        (Resources(), [ONE]),
        (Resources(account="x"), ["--account=x", ONE]),
        (
            merge_resources(Resources(nodes=2), {"tasks_per_node": 8}, 1),
            ["--nodes=2", "--ntasks=16", "--ntasks-per-node=8", "--cpus-per-task=1"],
        ),
        (
            Resources(nodes=2, tasks=16, cpus_per_task=2, memory_mib_per_cpu=512),
            ["--nodes=2", "--ntasks=16", "--cpus-per-task=2", "--mem-per-cpu=512M"],
        ),
        (Resources(total_cpus=96, nodes=2), ["--nodes=2", ONE, "--cpus-per-task=48"]),
        (Resources(total_cpus=96), ["--nodes=1", ONE, "--cpus-per-task=96"]),
        (Resources(runtime_s=59), ["--time=0-00:00:59", ONE]),
        (Resources(runtime_s=90061), ["--time=1-01:01:01", ONE]),
        (Resources(runtime_s=864000), ["--time=10-00:00:00", ONE]),
    ],
)
def test_what_sbatch_is_asked_for(resources: Resources, options: list[str]) -> None:
    asked = slurm_directives(resources, "\n")
    assert asked == ("--job-name=mantik", *options, "--no-requeue")


def test_cpus_over_all_nodes() -> None:
    with pytest.raises(UserError, match="divided"):
        slurm_directives(Resources(total_cpus=97, nodes=2), "j")
    assert merge_resources(Resources(), {"tasks_per_node": 8}, 1).tasks == 8, "a node"
    assert total_cpus(BASE) == 96
    assert total_cpus(Resources(nodes=2, cpus_per_task=3)) == 6
    assert total_cpus(Resources(nodes=2, tasks=8, cpus_per_task=3)) == 24
    assert total_cpus(Resources(nodes=2)) is None


@given(st.text(), st.integers(1, 10**7))
def test_a_text_stays_one_word_of_one_line(text: str, seconds: int) -> None:
    try:
        options = slurm_directives(Resources(queue=text, runtime_s=seconds), text)
    except UserError:
        return
    assert f"--partition={text}" in options
    for option in options:
        assert len(option.split()) == 1
        assert len(option.splitlines()) == 1
    assert len(options[0]) <= len("--job-name=") + 64


@pytest.mark.parametrize("text", ["a b", "a\n#SBATCH --x", "", "a\tb", "'a'", "a\u2028b", "a#b"])
def test_a_value_that_would_say_more_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="constraint"):
        slurm_directives(Resources(constraint=text), "j")


@pytest.mark.parametrize(
    ("name", "likely"),
    [
        ("slurm_partitoin", "slurm_partition"),
        ("Runtime", "runtime"),
        ("walltime", None),
        ("mem_gb", None),
        ("mem_bm", "mem_mb"),
        ("qoss", "qos"),
        ("runtim", "runtime"),
        ("tasks-per-node", "tasks_per_node"),
        ("tasks_per_core", None),
        ("cpus_per_tasks", "cpus_per_task"),
        ("gpu", None),
        ("licenses", None),
        ("disk_mb", None),
        ("mem_mib", None),
        ("download", None),
    ],
)
def test_names_that_are_likely_meant_to_mean_something(name: str, likely: str | None) -> None:
    assert suggest_resource(name) == likely
