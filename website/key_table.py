"""A table of what each key of `Resources` becomes; docs/backend-config.md shows it.

The table is for people and for tests, which compare it with real submissions. These are made by
`sites.unicore.description`, `jobs.resources`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class KeyUse:
    """What one key of `Resources` becomes.

    Attributes:
        example: values of the config from which the other columns follow.
        unicore: entries of the job description's Resources.
        slurm: options of sbatch, in the script for firecREST or of a RAW job of UNICORE.
        pbs: options of qsub, in the same scripts; empty if PBS has no such option, so the value is
            refused.
    """

    example: Mapping[str, str | int]
    unicore: Mapping[str, str]
    slurm: tuple[str, ...]
    pbs: tuple[str, ...]


RESOURCES: Final[Mapping[str, KeyUse]] = {
    "Queue": KeyUse({}, {"Queue": "q"}, ("--partition=q",), ("-q q",)),
    "Runtime": KeyUse(
        {"Runtime": "90m"}, {"Runtime": "90m"}, ("--time=0-01:30:00",), ("-l walltime=01:30:00",)
    ),
    "Nodes": KeyUse(
        {"Nodes": 2}, {"Nodes": "2"}, ("--nodes=2",), ("-l select=2", "-l place=scatter")
    ),
    "CPUsPerNode": KeyUse(
        {"CPUsPerNode": 8},
        {"Nodes": "1", "CPUsPerNode": "8"},
        ("--ntasks-per-node=1", "--cpus-per-task=8"),
        ("-l select=1:ncpus=8:mpiprocs=1",),
    ),
    "TotalCPUs": KeyUse(
        {"TotalCPUs": 8},
        {"Nodes": "1", "CPUsPerNode": "8", "TotalCPUs": "8"},
        ("--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=8"),
        ("-l select=1:ncpus=8:mpiprocs=1",),
    ),
    "GPUsPerNode": KeyUse(
        {"GPUsPerNode": 4}, {"GPUsPerNode": "4"}, ("--gpus-per-node=4",), ("-l select=1:ngpus=4",)
    ),
    "MemoryPerNode": KeyUse(
        {"MemoryPerNode": "64GiB"},
        {"MemoryPerNode": "64G"},
        ("--mem=65536M",),
        ("-l select=1:mem=65536mb",),
    ),
    "Reservation": KeyUse(
        {"Reservation": "r"}, {"Reservation": "r"}, ("--reservation=r",), ("-q r",)
    ),
    "NodeConstraints": KeyUse(
        {"NodeConstraints": "a100"},
        {"NodeConstraints": "a100"},
        ("--constraint=a100",),
        ("-l select=1:a100=True",),
    ),
    "QoS": KeyUse({"QoS": "high"}, {"QoS": "high"}, ("--qos=high",), ()),
}
"""Uses by key; each example also has the queue `q`."""

UNSENT: Final = frozenset({"Continue", "Checkpoint"})
"""Keys that no scheduler gets."""

COMBINED: Final = (
    KeyUse(
        {"Nodes": 2, "TotalCPUs": 16},
        {"Nodes": "2", "TotalCPUs": "16", "CPUsPerNode": "8"},
        ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=8"),
        ("-l select=2:ncpus=8:mpiprocs=1", "-l place=scatter"),
    ),
    KeyUse(
        {"CPUsPerNode": 8, "TotalCPUs": 16},
        {"Nodes": "2", "TotalCPUs": "16", "CPUsPerNode": "8"},
        ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=8"),
        ("-l select=2:ncpus=8:mpiprocs=1", "-l place=scatter"),
    ),
    KeyUse(
        {"Nodes": 2, "CPUsPerNode": 8, "TotalCPUs": 9},
        {"Nodes": "2", "TotalCPUs": "16", "CPUsPerNode": "8"},
        ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=8"),
        ("-l select=2:ncpus=8:mpiprocs=1", "-l place=scatter"),
    ),
)
"""What `TotalCPUs` becomes in combination with `Nodes` and `CPUsPerNode`."""
