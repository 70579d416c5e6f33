"""`#SBATCH` lines as sbatch reads them."""

import pytest

from hpc_sandbox.sbatch import SbatchError, parse_sbatch_memory, parse_sbatch_time, parse_script
from hpc_sandbox.settings import PARTITIONS


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2", 120), ("0:05", 5), ("1:30", 90), ("1:00:00", 3600), ("1-0", 86400),
        ("1-2:03", 93780), ("1-02:03:04", 93784),
    ],
)  # fmt: skip
def test_time(text: str, seconds: int) -> None:
    assert parse_sbatch_time(text) == seconds


def test_time_of_another_form_is_refused() -> None:
    with pytest.raises(SbatchError, match="Invalid --time specification"):
        parse_sbatch_time("1h")


@pytest.mark.parametrize(("text", "mib"), [("100", 100), ("2G", 2048), ("512K", 1), ("0", None)])
def test_memory(text: str, mib: int | None) -> None:
    assert parse_sbatch_memory(text, "mem") == mib


def test_all_that_the_executor_writes() -> None:
    request = parse_script(
        """#!/bin/bash
#SBATCH --job-name="my job"
#SBATCH --partition=devel
#SBATCH -A proj1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=3
#SBATCH --cpus-per-task=4   # a comment
#SBATCH --mem=5000M
#SBATCH --gpus-per-node=a100:2
#SBATCH --time=00:10:00
#SBATCH --no-requeue
#SBATCH --output=stdout --error=stderr
echo first command
#SBATCH --nodes=7
""",
        PARTITIONS,
    )
    assert (request.name, request.partition, request.account) == ("my job", "devel", "proj1")
    assert (request.nodes, request.tasks, request.tasks_per_node) == (2, 6, 3)
    assert (request.cpus_per_task, request.cpus, request.gpus) == (4, 24, 2)
    assert (request.memory_mib, request.time_s) == (5000, 600)
    assert (request.output, request.error) == ("stdout", "stderr")


def test_memory_per_cpu_counts_the_cpus_of_a_node() -> None:
    script = "#!/bin/bash\n#SBATCH --cpus-per-task=4 --mem-per-cpu=100\n"
    assert parse_script(script, PARTITIONS).memory_mib == 400


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--partition=nope", "invalid partition specified: nope"),
        ("--time=30-0", "Requested time limit is invalid"),
        ("--nodes=99", "Node count specification invalid"),
        ("--cpus-per-task=1000", "Requested node configuration is not available"),
        ("--gpus-per-node=9", "Requested node configuration is not available"),
        ("--mem=9T", "Memory specification can not be satisfied"),
        ("--nodes=none", '"none" is not a valid node count'),
        ("--blah=1", "unrecognized option '--blah=1'"),
        ("blah", "unrecognized option 'blah'"),
    ],
)
def test_refusals_in_the_words_of_sbatch(line: str, words: str) -> None:
    with pytest.raises(SbatchError, match=words):
        parse_script(f"#!/bin/bash\n#SBATCH {line}\n", PARTITIONS)


def test_a_script_without_shebang_is_refused() -> None:
    with pytest.raises(SbatchError, match="does not look like a batch script"):
        parse_script("echo x\n", PARTITIONS)
