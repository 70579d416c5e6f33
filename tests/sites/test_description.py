"""Job descriptions are kept as golden files; GOLDEN=write makes them anew, to look at the diff."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites.base import Submission
from snakemake_executor_plugin_mantik.sites.unicore.description import (
    batch_file,
    job_description,
)

GOLDEN = Path(__file__).parent / "golden"

TRY = "0b6c1a9e-0d5d-4f2c-9a54-3f6f3f0d8a11"
GPUS = Resources(
    queue="booster",
    runtime_s=5400,
    nodes=2,
    cpus_per_task=12,
    gpus_per_node=4,
    memory_mib_per_node=65536,
    account="training2026",
    qos="high",
)
PLAIN = Submission(TRY, "prepare: data=a b,ü\n", "echo 'hi' \"$HOME\" ü\n", Resources())
FULL = Submission(
    TRY,
    "train_model-7",
    "#!/bin/bash\npython train.py\n",
    GPUS,
    before_on_login=("module load git", "git clone https://example.org/x"),
    after_on_login=("rm -rf x  # tidy",),
)
KNOWN = frozenset(
    ("Runtime", "Nodes", "CPUsPerNode", "TotalCPUs", "MemoryPerNode", "GPUsPerNode", "QoS")
)


@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("slurm-plain", job_description(PLAIN, "slurm")),
        ("slurm-full", job_description(FULL, "slurm", KNOWN)),
        ("none-plain", job_description(PLAIN, "none", KNOWN)),
        ("none-full", job_description(FULL, "none", KNOWN)),
        ("none-full-queue-unknown", job_description(FULL, "none")),
    ],
)
def test_golden(name: str, description: dict[str, Any]) -> None:
    file = GOLDEN / f"{name}.json"
    rendered = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
    if os.environ.get("GOLDEN") == "write":
        file.write_text(rendered, encoding="utf-8")
    assert rendered == file.read_text(encoding="utf-8")


def test_batch_file_begins_with_the_schedulers_lines() -> None:
    text = batch_file(FULL)
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    first, _, rest = text.rpartition("\n#SBATCH ")
    assert all(line.startswith("#SBATCH --") for line in first.splitlines()[1:])
    assert "mkfifo" in rest
    assert "#SBATCH --gpus-per-node=4" in lines
    assert "#SBATCH --output=stdout" in lines


def test_resources_that_the_queue_does_not_know_are_left_out() -> None:
    described = job_description(FULL, "none", {"Runtime", "Nodes"})["Resources"]
    assert described == {"Queue": "booster", "Runtime": "5400", "Nodes": "2"}


def test_values_are_texts() -> None:
    """UNICORE reads many values with getString: a number or a boolean would count as absent."""
    description = job_description(FULL, "none", KNOWN)
    assert all(isinstance(value, str) for value in description["Resources"].values())
    assert description["RunUserPrecommandOnLoginNode"] == "true"


@pytest.mark.parametrize("commands", [("true\n",), ("true", "false # why"), ("a\nb\n", "c")])
def test_login_hooks_end_without_a_newline(commands: tuple[str, ...]) -> None:
    """A newline at the end would hide a failure."""
    hooked = Submission(TRY, "x", "", Resources(), before_on_login=commands)
    hook = job_description(hooked, "slurm")["User precommand"]
    assert hook.startswith("(")
    assert hook.endswith(")")
