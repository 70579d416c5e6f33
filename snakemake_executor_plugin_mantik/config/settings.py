"""The key `Site` of a backend config: a site's time-outs, limits and paths, all optional.

Credentials are not part of it: they come from the environment or the keyring.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from snakemake_executor_plugin_mantik.config import units
from snakemake_executor_plugin_mantik.config.exclude import read_patterns
from snakemake_executor_plugin_mantik.config.section import ConfigSection, Keys
from snakemake_executor_plugin_mantik.config.values import (
    Duration,
    Name,
    Positive,
    Rate,
    Size,
    Text,
    Url,
    describe_value,
    list_schema,
    not_allowed,
    parse_text,
    words_schema,
)

_SCHEDULERS: Final = ("slurm", "pbs", "none")
_SHARING: Final = ("private", "group")


def _scheduler(value: object) -> str:
    name = parse_text(value).lower()
    if name not in _SCHEDULERS:
        raise ValueError(f"has to be slurm, pbs or none, found {describe_value(value)}")
    return name


def _sharing(value: object) -> str:
    name = parse_text(value).lower()
    if name not in _SHARING:
        raise ValueError(f"has to be private or group, found {describe_value(value)}")
    return name


def _yes_or_no(value: object) -> bool:
    if not isinstance(value, bool):
        raise not_allowed("true or false", value)
    return value


def _workspace(value: object) -> str:
    path = parse_text(value, "a path at the site")
    if not path.isprintable() or path.startswith(("~", "$")) or ".." in path.split("/"):
        raise ValueError(
            "has to be a path at the site, absolute or relative to its storage, without '..', '~' "
            f"and variables; found {describe_value(value)}"
        )
    return path.rstrip("/") or "/"


def _time(alias: str, default: str, description: str) -> Any:
    return Field(
        units.parse_duration(default),
        alias=alias,
        description=description,
        json_schema_extra={"default": default},
    )


def _bytes(alias: str, default: str, description: str) -> Any:
    return Field(
        units.parse_size(default),
        alias=alias,
        description=description,
        json_schema_extra={"default": default},
    )


def _seconds(value: object) -> int | None:
    """Return the seconds of a time; None if invalid, which the key's own validation reports."""
    try:
        return units.parse_duration(str(value))
    except ValueError:
        return None


class SiteSettings(ConfigSection):
    """Settings of a site; times in seconds, sizes in bytes."""

    scheduler: Annotated[
        Literal["slurm", "pbs", "none"], BeforeValidator(_scheduler), words_schema(*_SCHEDULERS)
    ] = Field(
        default="slurm",
        alias="Scheduler",
        description="The scheduler behind UNICORE: slurm, pbs (PBS Professional, OpenPBS), or none "
        "where UNICORE starts jobs itself or another scheduler does.",
    )
    workspace: Annotated[str, BeforeValidator(_workspace)] | None = Field(
        default=None,
        alias="Workspace",
        description="Path of the workspace at the site, absolute or relative to Storage. Each "
        "workflow needs its own, which it has by default; the sites of one workflow may share one.",
    )
    sharing: Annotated[
        Literal["private", "group"], BeforeValidator(_sharing), words_schema(*_SHARING)
    ] = Field(
        default="private",
        alias="Sharing",
        description="Who may enter the workspace at the site: only you (private), or also the "
        "group that owns it (group), as in a project directory.",
    )
    storage: Name | None = Field(
        default=None,
        alias="Storage",
        description="Name of the site's storage (UNICORE: HOME, PROJECT, SCRATCH, ...) that "
        "contains the workspace; by default it is detected.",
    )
    ca_file: Text | None = Field(
        default=None,
        alias="CAFile",
        description="File with certificates (PEM), in addition to the system's own, to verify the "
        "site's TLS certificate with; relative to the project folder.",
    )
    proxy: Url | None = Field(
        default=None,
        alias="Proxy",
        description="URL of an HTTP proxy for all requests, without credentials.",
    )
    timeout_s: Duration = _time(
        "Timeout",
        "120s",
        "How long one request may take; as long again for each MiB of a file that it carries.",
    )
    concurrent_requests: Positive = Field(
        default=4,
        alias="ConcurrentRequests",
        description="Maximum number of simultaneous requests. Uploads and downloads of files (at "
        "firecREST: downloads through its object store) have a separate limit of the same size.",
    )
    expand: Annotated[bool, BeforeValidator(_yes_or_no), WithJsonSchema({"type": "boolean"})] = (
        Field(
            default=False,
            alias="Expand",
            description="Let bash expand $NAME, ${NAME} and $(COMMAND) in Variables, Options and "
            "Paths at the site, on the node, as mantik's own backend did.",
        )
    )
    max_jobs: Positive = Field(
        default=100,
        alias="MaxJobs",
        description="Maximum number of jobs that are submitted and have not ended.",
    )
    submissions_per_second: Rate = Field(
        default=50.0,
        alias="SubmissionsPerSecond",
        description="Maximum number of submissions per second.",
    )
    poll_min_s: Duration = _time(
        "PollMin", "1s", "Shortest time between two polls of the site's jobs."
    )
    poll_max_s: Duration = _time(
        "PollMax", "15s", "Longest time between two polls of the site's jobs; not below PollMin."
    )
    heartbeat_s: Duration = _time("Heartbeat", "10s", "How often a running job writes a heartbeat.")
    term_grace_s: Duration = _time(
        "TermGrace",
        "20s",
        "Time a command has to end after TERM before it is killed; shorter than the scheduler's "
        "own (Slurm's KillWait, 30s).",
    )
    marker_grace_s: Duration = _time(
        "MarkerGrace",
        "30s",
        "How long to wait for a job's marker after the scheduler reported its end: slow file "
        "systems show it late.",
    )
    unknown_wait_s: Duration = _time(
        "UnknownWait",
        "120s",
        "Time after which to repeat a submission whose result is unknown (the job still runs only "
        "once).",
    )
    fetch_wait_s: Duration = _time(
        "FetchWait",
        "5m",
        "How long to repeat the download of a successful job's outputs if the site refuses them or "
        "returns something else; after that the next run downloads them.",
    )
    inline_limit_bytes: Size = _bytes(
        "InlineLimit", "256K", "Small inputs up to this total size are part of the submission."
    )
    marker_limit_bytes: Size = _bytes(
        "MarkerLimit", "1M", "Outputs up to this total size are downloaded with the job's marker."
    )
    archive_file_limit_bytes: Size = _bytes(
        "ArchiveFileLimit", "8M", "Single outputs up to this size are downloaded in one archive."
    )
    log_tail_bytes: Size = _bytes(
        "LogTail", "256K", "How much of a log's end is downloaded with the job's marker."
    )
    live_s: Duration = _time(
        "Live",
        "10s",
        "How often a running job checks what its code has logged, to report it meanwhile.",
    )
    live_file_limit_bytes: Size = _bytes(
        "LiveFileLimit", "1M", "Artifacts up to this size are reported while the job runs."
    )
    live_limit_bytes: Size = _bytes(
        "LiveLimit",
        "64M",
        "Maximum packed size of what is reported while a job runs; the rest follows at its end.",
    )
    source_file_limit_bytes: Size = _bytes(
        "SourceFileLimit",
        "1M",
        "Larger files of the project folder are not uploaded as sources.",
    )
    sources_limit_bytes: Size = _bytes("SourcesLimit", "32M", "Maximum total size of the sources.")
    include: Annotated[tuple[str, ...], BeforeValidator(read_patterns), list_schema()] = Field(
        default=(),
        alias="Include",
        description="Files to upload although they seem to hold a secret: patterns as in "
        "Exclude. A credential's own file is never uploaded.",
    )

    @classmethod
    def between(cls, data: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
        shortest = _seconds(data.get("PollMin", "1s"))
        longest = _seconds(data.get("PollMax", "15s"))
        if shortest and longest and longest < shortest:
            key = "PollMax" if "PollMax" in data else "PollMin"
            yield (
                (key,),
                f"PollMax ({units.format_duration(longest)}) has to be PollMin "
                f"({units.format_duration(shortest)}) or longer",
            )
