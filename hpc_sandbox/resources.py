"""Read and check the resources of a UNICORE job description with the server's units and ranges.

Sources: XNJS `UnitParser` and `ResourceRequest`, and answers of a real server.
"""

import re
from collections.abc import Mapping, Sequence

from .settings import Partition

_AMOUNT = re.compile(r"(?P<number>[0-9.]*)\s*(?P<unit>.*)")
_TIMES = (("seconds", 1), ("minutes", 60), ("hours", 3600), ("days", 86400))
_SIZES = {
    0: ("", "bytes"),
    1: ("kilobytes", "kb", "K", "k"),
    2: ("megabytes", "mb", "M", "m"),
    3: ("gigabytes", "gb", "G", "g"),
    4: ("terabytes", "tb", "T", "t"),
}
_FREE = ("Reservation", "NodeConstraints", "QoS", "Project", "Exclusive", "ArraySize", "ArrayLimit")


def parse_resources(json: Mapping[str, object]) -> dict[str, str]:
    """Return the requested resources as strings, time in seconds and memory in bytes.

    Raise ValueError with the server's message for a value or unit that it cannot read.
    """
    found = {}
    for name, value in json.items():
        key = "MemoryPerNode" if name == "Memory" else name
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if key in ("Runtime", "MemoryPerNode"):
            try:
                found[key] = str(_time(text) if key == "Runtime" else _size(text))
            except ValueError as error:
                raise ValueError(f"Could not parse requested resource <{name}>: {error}") from error
        else:
            found[key] = text
    return found


def _amount(text: str) -> tuple[int, str]:
    match = _AMOUNT.fullmatch(text.strip())
    number, unit = (match["number"], match["unit"].strip()) if match else ("", text)
    if not number.isdigit():
        raise ValueError(f'java.lang.NumberFormatException: For input string: "{number}"')
    return int(number), unit


def _no_conversion(unit: str) -> ValueError:
    return ValueError(f"java.lang.IllegalArgumentException: No conversion for unit '{unit}'")


def _time(text: str) -> int:
    number, unit = _amount(text)
    for name, seconds in _TIMES:
        if name.startswith(unit):  # "" is seconds, "m" is minutes
            return number * seconds
    raise _no_conversion(unit)


def _size(text: str) -> int:
    number, unit = _amount(text)
    for power, names in _SIZES.items():
        if unit in names or (len(unit) > 2 and any(name.startswith(unit) for name in names)):
            return int(number * 1024**power)
    raise _no_conversion(unit)


def ranges(partition: Partition) -> dict[str, tuple[int, int]]:
    """Return the allowed ranges of a queue: seconds, counts, bytes."""
    return {
        "Runtime": (1, partition.max_time),
        "Nodes": (1, partition.nodes),
        "CPUsPerNode": (1, partition.cpus),
        "TotalCPUs": (1, partition.cpus * partition.nodes),
        "MemoryPerNode": (2**20, partition.memory_mib * 2**20),
        "GPUsPerNode": (0, partition.gpus),
    }


def check_resources(resources: Mapping[str, str], partitions: Sequence[Partition]) -> Partition:
    """Return the requested queue after a check of all ranges, for RAW jobs too.

    Raise ValueError with the server's message for a resource that is unknown or out of range.
    """
    queue = resources.get("Queue", partitions[0].name)
    partition = next((p for p in partitions if p.name == queue), None)
    if partition is None:
        raise ValueError(f"Resource request <Queue = {queue}> is out of range.")
    allowed = ranges(partition)
    for name, value in resources.items():
        if name == "Queue" or name in _FREE:
            continue
        if name not in allowed:
            raise ValueError(f"Resource <{name}> is not available for partition <{queue}>")
        low, high = allowed[name]
        if not value.isdigit() or not low <= int(value) <= high:
            raise ValueError(f"Resource request <{name}={value}> is out of range.")
    return partition
