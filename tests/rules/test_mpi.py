"""Whether a command starts its tasks itself."""

from types import SimpleNamespace

import pytest

from snakemake_executor_plugin_mantik.rules.deployment import has_launcher


@pytest.mark.parametrize(
    ("command", "mpi", "found"),
    [
        ("{resources.mpi} -n {resources.tasks} x", "srun", True),
        ("module load x; {resources[mpi]} x", "mpiexec", True),
        ("{resources.mpi:q} x", "srun", True),
        ("{resources.mpi!s} x", "srun", True),
        ("{{{resources.mpi}}} x", "srun", True),
        ("{resources.mpi} x", None, False),
        ("{{resources.mpi}} x", "srun", False),
        ("srun x", "srun", False),
        ("{resources.mpiexec} x", "srun", False),
        (None, "srun", False),
    ],
)
def test_a_command_that_names_its_launcher(command: str, mpi: str | None, found: bool) -> None:
    job = SimpleNamespace(rule=SimpleNamespace(shellcmd=command), resources={"mpi": mpi})
    assert has_launcher(job) is found
