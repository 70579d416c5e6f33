"""Read UNICORE job descriptions as UNICORE/X 3.0 does, with its pitfalls about types, and units.

Sources: XNJS `JSONParser`, `UnitParser` and `ResourceRequest`, and answers of a real server.
Unknown keys are silently ignored.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .settings import Partition

_JAVA_NAMES = {
    bool: "java.lang.Boolean", int: "java.lang.Integer", float: "java.math.BigDecimal",
    dict: "org.json.JSONObject", list: "org.json.JSONArray",
}  # fmt: skip
_JOB_TYPES = {
    "BATCH": "BATCH", "NORMAL": "BATCH", "RAW": "RAW", "ON_LOGIN_NODE": "ON_LOGIN_NODE",
    "INTERACTIVE": "ON_LOGIN_NODE", "ALLOCATE": "ALLOCATE",
}  # fmt: skip


class DescriptionError(Exception):
    """The server cannot process a job description; the message is the server's."""


@dataclass(frozen=True)
class Staged:
    """One file to stage in, from inline data or a source URL, or to stage out after success."""

    source: str
    target: str
    data: str | None = None
    must_succeed: bool = True
    permissions: str = ""


@dataclass(frozen=True)
class Command:
    """A pre- or postcommand."""

    text: str
    on_login_node: bool = True
    ignore_failure: bool = False


@dataclass(frozen=True)
class Description:
    """A job description as the server understands it."""

    name: str = "UNICORE_Job"
    job_type: str = "BATCH"
    executable: str = ""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    stdout: str = "stdout"
    stderr: str = "stderr"
    bss_file: str = ""
    umask: str = "0027"
    project: str = ""
    ignore_exit_code: bool = False
    resources: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[Staged, ...] = ()
    exports: tuple[Staged, ...] = ()
    before: Command | None = None
    after: Command | None = None

    @property
    def shown_type(self) -> str:
        """Return the job type in REST: RAW jobs are BATCH."""
        return "BATCH" if self.job_type == "RAW" else self.job_type


def tags_of(json: Mapping[str, Any]) -> list[str]:
    """Return the tags in a job description."""
    tags = json.get("Tags") or json.get("tags") or []
    return [str(tag) for tag in tags] if isinstance(tags, list) else [str(tags)]


def parse_description(json: Mapping[str, Any]) -> Description:
    """Read a job description; resources are checked later, by `check_resources`.

    Raise DescriptionError with the server's `statusMessage` after "Processing failed: ".
    """
    kind = _optional_string(json, "Job type", "BATCH").upper()
    if kind not in _JOB_TYPES:
        raise DescriptionError(
            "java.lang.IllegalArgumentException: No enum constant "
            f"eu.unicore.xnjs.idb.ApplicationInfo.JobType.{kind}"
        )
    if application := json.get("ApplicationName"):
        raise DescriptionError(
            f"eu.unicore.xnjs.ems.ExecutionException: The requested Application '{application}' "
            "is not available. (Requested application is not defined)"
        )
    try:
        resources = parse_resources(json.get("Resources") or {})
    except ValueError as error:
        raise DescriptionError(f"java.lang.IllegalArgumentException: {error}") from error
    return Description(
        # The server reads strings here: a number or a boolean counts as absent.
        name=_optional_string(json, "Name", "UNICORE_Job"),
        job_type=_JOB_TYPES[kind],
        executable=_optional_string(json, "Executable", ""),
        arguments=tuple(_strings(json.get("Arguments") or [])),
        environment=_environment(json),
        stdin=_optional_string(json, "Stdin", ""),
        stdout=_optional_string(json, "Stdout", "stdout"),
        stderr=_optional_string(json, "Stderr", "stderr"),
        bss_file=_optional_string(json, "BSS file", ""),
        umask=_optional_string(json, "Umask", _optional_string(json, "umask", "0027")),
        project=_optional_string(json, "Project", resources.get("Project", "")),
        ignore_exit_code=_boolean(json.get("IgnoreNonZeroExitCode", False)),
        resources=resources,
        imports=_imports(json),
        exports=tuple(
            Staged(
                source=str(item.get("From", item.get("file", ""))),
                target=str(item.get("To", item.get("target"))),
            )
            for item in _items(json, "Exports")
        ),
        before=_command(json, "pre"),
        after=_command(json, "post"),
    )


def _optional_string(json: Mapping[str, Any], key: str, otherwise: str) -> str:
    value = json.get(key)
    return value if isinstance(value, str) else otherwise


def _boolean(value: object) -> bool:
    return value is True or (isinstance(value, str) and value.lower() == "true")


def _strings(values: Sequence[Any]) -> list[str]:
    for number, value in enumerate(values):
        if not isinstance(value, str):
            java = _JAVA_NAMES.get(type(value))
            kind = f"class {java}" if java else "null"
            raise DescriptionError(
                f"org.json.JSONException: JSONArray[{number}] is not a String ({kind} : {value})."
            )
    return list(values)


def _environment(json: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in ("Environment", "Parameters"):
        value = json.get(key) or {}
        if isinstance(value, list):
            pairs = [text.partition("=")[::2] for text in _strings(value)]
            found |= {name.strip(): text.strip() for name, text in pairs}
            continue
        for name, text in value.items():
            if not isinstance(text, str):
                java = _JAVA_NAMES.get(type(text), "java.lang.Object")
                raise DescriptionError(
                    f'org.json.JSONException: JSONObject["{name}"] is not a String '
                    f"(class {java} : {text})."
                )
            found[name] = text
    return found


def _items(json: Mapping[str, Any], key: str) -> list[Any]:
    # The server parses a map, too, but never stages its files.
    return value if isinstance(value := json.get(key), list) else []


def _imports(json: Mapping[str, Any]) -> tuple[Staged, ...]:
    found = []
    for item in _items(json, "Imports"):
        source = str(item.get("From", item.get("source", "")))
        data = item.get("Data")
        if isinstance(data, list):
            data = "".join(f"{line}\n" for line in _strings(data))
        if source.startswith("inline:") and source.removeprefix("inline://") == "":
            raise DescriptionError(
                f"java.net.URISyntaxException: Expected authority at index 9: {source}"
            )
        found.append(
            Staged(
                source=source,
                target=str(item.get("To", item.get("file", ""))),
                data=data if isinstance(data, str) else None,
                must_succeed=_optional_string(item, "FailOnError", "true").lower() != "false",
                permissions=_optional_string(item, "Permissions", ""),
            )
        )
    return tuple(found)


def _command(json: Mapping[str, Any], which: str) -> Command | None:
    value = json.get(f"User {which}command")
    if isinstance(value, list):
        value = "\n".join(_strings(value))
    if not isinstance(value, str) or not value:
        return None
    return Command(
        text=value,
        on_login_node=_boolean(json.get(f"RunUser{which.title()}commandOnLoginNode", True)),
        ignore_failure=_boolean(
            json.get(f"User{which.title()}commandIgnoreNonZeroExitCode", False)
        ),
    )


# --- resources -----------------------------------------------------------------------------------

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
        "Runtime": (1, partition.max_time), "Nodes": (1, partition.nodes),
        "CPUsPerNode": (1, partition.cpus), "TotalCPUs": (1, partition.cpus * partition.nodes),
        "MemoryPerNode": (2**20, partition.memory_mib * 2**20),
        "GPUsPerNode": (0, partition.gpus),
    }  # fmt: skip


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
