"""What a UNICORE tells of its queues, quoted from a real one, and what we make of it."""

from snakemake_executor_plugin_mantik.sites.base import QueueLimits
from snakemake_executor_plugin_mantik.sites.unicore.opening import queue_limits


def test_ranges_and_choices() -> None:
    told = {
        "GPUsPerNode": "0-4",
        "CPUsPerNode": "1-16",
        "Runtime": "60-86400",
        "QoS": ["normal", "short"],
        "MemoryPerNode": "1048576-68719476736",
        "NodeConstraints": ["fast"],
        "Nodes": "1-2",
        "TotalCPUs": "1-32",
    }
    assert queue_limits(told) == QueueLimits(
        runtime_s=(60, 86_400),
        nodes=(1, 2),
        cpus_per_node=(1, 16),
        memory_mib_per_node=(1, 65_536),
        gpus_per_node=(0, 4),
        choices={"qos": ("normal", "short"), "constraint": ("fast",)},
    )


def test_what_is_no_list_of_choices_limits_nothing() -> None:
    assert queue_limits({"QoS": "*", "NodeConstraints": [], "Reservation": None}).choices == {}
