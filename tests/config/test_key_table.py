"""The table of what each key becomes, held against what is really made of it."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.model import BackendConfig, ResourcesConfig
from snakemake_executor_plugin_mantik.config.reading import parse_backend_config
from snakemake_executor_plugin_mantik.engine.forecast import (
    ATTEMPT,
    Preview,
    make_preview,
    plain_request,
)
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.jobs.resources import pbs_directives
from snakemake_executor_plugin_mantik.jobs.spec import Resources as Asked
from website.key_table import COMBINED, RESOURCES, UNSENT, KeyUse

UNICORE = {"UnicoreApiUrl": "https://hpc.example.org/rest/core"}
FIRECREST = {
    "Firecrest": {
        "ApiUrl": "https://f.example.org",
        "TokenUrl": "https://t.example.org",
        "Machine": "m",
    }
}
DOCS = (Path(__file__).parents[2] / "docs" / "backend-config.md").read_text()
ROWS = [*RESOURCES.values(), *COMBINED]
ALWAYS = {
    "--job-name=render", "--partition=q", "--ntasks-per-node=1", "--no-requeue",
    "--output=stdout", "--error=stderr", "-N render", "-q q", "-r n", "-o stdout", "-e stderr",
    "-j oe", "-S /bin/bash",
    f"--job-name=render-{ATTEMPT}", '--output="/WORKSPACE/.mantik/jobs/%j.out"',
    f"-N render-{ATTEMPT}", '-o "/WORKSPACE/.mantik/jobs/"',
}  # fmt: skip


def made(api: Mapping[str, Any], row: KeyUse, scheduler: str) -> Preview:
    document = {**api, "Resources": {"Queue": "q", **row.example}, "Site": {"Scheduler": scheduler}}
    planner = Planner(BackendConfig.model_validate(document), None, Path("/p"))
    return make_preview(planner, plain_request("hpc", "true"))


def directives(shown: Preview, mark: str) -> list[str]:
    lines = shown.script.splitlines()
    return [line.removeprefix(f"{mark} ") for line in lines if line.startswith(mark)]


def test_the_table_has_all_keys() -> None:
    assert set(RESOURCES) == set(ResourcesConfig.key_names()) - {"Memory"} - UNSENT
    assert all(key == "Queue" or list(row.example) == [key] for key, row in RESOURCES.items())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.example))
@pytest.mark.parametrize("scheduler", ["slurm", "none"])
def test_unicore(row: KeyUse, scheduler: str) -> None:
    resources = made(UNICORE, row, scheduler).submission["Resources"]
    assert resources == {"Queue": "q", **row.unicore}


def test_a_rule_that_says_its_nodes_is_not_given_the_total() -> None:
    resources = {"Queue": "q", "Nodes": 2, "TotalCPUs": 96}
    config = BackendConfig.model_validate({**UNICORE, "Resources": resources})
    asked = Planner(config, None, Path("/p")).resources({"nodes": 4}, 1)
    assert (asked.nodes, asked.cpus_per_task, asked.total_cpus) == (4, None, None)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.example))
@pytest.mark.parametrize("api", [UNICORE, FIRECREST], ids=["unicore", "firecrest"])
def test_slurm(row: KeyUse, api: Mapping[str, Any]) -> None:
    found = directives(made(api, row, "slurm"), "#SBATCH")
    assert set(row.slurm) <= set(found)
    assert set(found) <= ALWAYS | set(row.slurm)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.example))
@pytest.mark.parametrize("api", [UNICORE, FIRECREST], ids=["unicore", "firecrest"])
def test_pbs(row: KeyUse, api: Mapping[str, Any]) -> None:
    if not row.pbs:
        with pytest.raises(ValidationError, match="PBS"):
            made(api, row, "pbs")
        return
    found = directives(made(api, row, "pbs"), "#PBS")
    assert set(row.pbs) <= set(found)
    assert set(found) <= ALWAYS | set(row.pbs)


@pytest.mark.parametrize(
    "asked",
    [
        Asked(qos="high"),
        Asked(constraint="a b"),
        Asked(constraint="a|b"),
        Asked(queue="a b"),
        Asked(account="a\n#PBS -q other"),
        Asked(nodes=2, tasks=3),
        Asked(nodes=2, total_cpus=3),
    ],
)
def test_what_pbs_cannot_have_is_refused(asked: Asked) -> None:
    with pytest.raises(UserError):
        pbs_directives(asked, "x")


def test_tasks_and_memory_of_each_cpu_for_pbs() -> None:
    asked = Asked(nodes=2, tasks=8, cpus_per_task=3, memory_mib_per_cpu=100, constraint="a=b&c")
    select = "-l select=2:ncpus=12:mpiprocs=4:mem=1200mb:a=b:c=True"
    assert select in pbs_directives(asked, "x")
    assert pbs_directives(Asked(account="a"), "ü") == (
        "-S /bin/bash", "-N mantik", "-P a", "-r n",
    )  # fmt: skip
    assert "-N xxxxxxxxxxxxxxx" in pbs_directives(Asked(), "x" * 20)
    assert f"-N {'x' * 20}" in pbs_directives(Asked(), "x" * 20, longest_name=20)


@pytest.mark.parametrize(
    ("asked", "select"),
    [
        (Asked(), None),
        (Asked(nodes=3), "select=3"),
        (Asked(cpus_per_task=8), "select=1:ncpus=8:mpiprocs=1"),
        (Asked(nodes=2, total_cpus=8), "select=2:ncpus=4:mpiprocs=1"),
        (Asked(tasks=4), "select=1:ncpus=4:mpiprocs=4"),
        (Asked(cpus_per_task=4, memory_mib_per_cpu=100), "select=1:ncpus=4:mpiprocs=1:mem=400mb"),
    ],
)
def test_chunks_of_pbs(asked: Asked, select: str | None) -> None:
    found = [line for line in pbs_directives(asked, "x") if line.startswith("-l select")]
    assert found == ([f"-l {select}"] if select else [])


def names(options: Iterable[str]) -> set[str]:
    """The names of options and of a chunk's resources: `--mem`, `-q`, `select`, `ncpus`."""
    found: set[str] = set()
    for option in options:
        found |= set(re.findall(r"^--[a-z-]+|^-[a-z](?= |$)", option))
        found |= {name for name in re.findall(r"(?:^-l |:)([a-z0-9]+)=", option) if name}
    return found - {"", "-l"}


@pytest.mark.parametrize("key", RESOURCES)
def test_the_docs_say_the_same(key: str) -> None:
    """No option more and none less in the table of the docs than in that of the code."""
    line = next(line for line in DOCS.splitlines() if line.startswith(f"| `{key}` |"))
    _, _, unicore, slurm, pbs, _ = line.split("|")
    row = RESOURCES[key]
    quoted = [re.findall(r"`([^`]+)`", cell) for cell in (unicore, slurm, pbs)]
    assert {name for name in quoted[0] if name[0].isupper()} == set(row.unicore)
    assert names(quoted[1]) == names(row.slurm)
    told = names(f"-l {text[1:]}" if text.startswith(":") else text for text in quoted[2])
    if key == "NodeConstraints":
        told -= {"name"}  # of `name=value`
    wanted = names(row.pbs) | ({"select"} if "select" in told else set())
    assert told == wanted if row.pbs else "refused" in pbs


def test_the_docs_have_no_other_rows() -> None:
    table = DOCS.partition("| key | UNICORE")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(RESOURCES)


def test_the_example_is_read() -> None:
    example = DOCS.partition("```yaml\n")[2].partition("```")[0]
    config, warnings = parse_backend_config(example.encode(), "yaml", shown="docs")
    assert warnings == []
    assert config.resources.memory_mib_per_node == 65536
