"""What a site needs beyond the environment and the resources: the key `Site`, all of it optional.

Nothing here says who the user is: credentials come from the environment or the keyring.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

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
    """The seconds of a time, None where it is none: its own key tells that."""
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
        description="The site's scheduler: slurm or pbs (jobs bring their own #SBATCH or #PBS "
        "lines), or none where the API runs jobs by itself.",
    )
    workspace: Annotated[str, BeforeValidator(_workspace)] | None = Field(
        default=None,
        alias="Workspace",
        description="Path of the workspace at the site, absolute or relative to the storage; by "
        "default one is made for each workflow.",
    )
    sharing: Annotated[
        Literal["private", "group"], BeforeValidator(_sharing), words_schema(*_SHARING)
    ] = Field(
        default="private",
        alias="Sharing",
        description="Who may enter the workspace that is made at the site: you alone (private), or "
        "the group that owns it, too (group), as in a project directory.",
    )
    storage: Name | None = Field(
        default=None,
        alias="Storage",
        description="Name of the site's storage (UNICORE: HOME, PROJECT, SCRATCH, ...) that holds "
        "the workspace.",
    )
    ca_file: Text | None = Field(
        default=None,
        alias="CAFile",
        description="File with the certificates (PEM) that the site's TLS certificate is checked "
        "against, beside the system's own; relative to the project folder.",
    )
    proxy: Url | None = Field(
        default=None, alias="Proxy", description="URL of a HTTP proxy that all requests go through."
    )
    timeout_s: Duration = _time(
        "Timeout",
        "120s",
        "How long one request may take; as long again for each MiB of a file that it carries.",
    )
    concurrent_requests: Positive = Field(
        default=4,
        alias="ConcurrentRequests",
        description="Requests to the site at the same time, at most.",
    )
    max_jobs: Positive = Field(
        default=100,
        alias="MaxJobs",
        description="Jobs submitted and not ended at the same time, at most.",
    )
    submissions_per_second: Rate = Field(
        default=50.0, alias="SubmissionsPerSecond", description="Submissions per second, at most."
    )
    poll_min_s: Duration = _time(
        "PollMin", "1s", "Shortest time between two looks at the site's jobs."
    )
    poll_max_s: Duration = _time(
        "PollMax", "15s", "Longest time between two looks at the site's jobs."
    )
    heartbeat_s: Duration = _time(
        "Heartbeat", "10s", "How often a running job gives a sign of life."
    )
    term_grace_s: Duration = _time(
        "TermGrace",
        "20s",
        "Time a command has to end after TERM before it is killed; shorter than the scheduler's "
        "own (Slurm's KillWait, 30s).",
    )
    marker_grace_s: Duration = _time(
        "MarkerGrace",
        "30s",
        "How long to wait for a job's own last word after the scheduler said that it ended: slow "
        "file systems show it late.",
    )
    unknown_wait_s: Duration = _time(
        "UnknownWait",
        "120s",
        "After which time a submission whose fate is unknown is tried again (it runs once all the "
        "same).",
    )
    fetch_wait_s: Duration = _time(
        "FetchWait",
        "5m",
        "How long outputs of a job that succeeded are asked for again though the site refuses them "
        "or gives something else.",
    )
    inline_limit_bytes: Size = _bytes(
        "InlineLimit", "256K", "Small inputs up to this size together travel in the submission."
    )
    marker_limit_bytes: Size = _bytes(
        "MarkerLimit", "1M", "Outputs up to this size together come back with the job's marker."
    )
    archive_file_limit_bytes: Size = _bytes(
        "ArchiveFileLimit", "8M", "Single outputs up to this size come back in one archive."
    )
    log_tail_bytes: Size = _bytes("LogTail", "256K", "How much of a log's end the marker holds.")
    live_s: Duration = _time(
        "Live", "10s", "How often a job looks for what its code has logged, while it runs."
    )
    live_file_limit_bytes: Size = _bytes(
        "LiveFileLimit", "1M", "Artifacts up to this size are told of while the job runs."
    )
    live_limit_bytes: Size = _bytes(
        "LiveLimit",
        "64M",
        "So much is told of a job while it runs, packed; the rest when it is over.",
    )
    source_file_limit_bytes: Size = _bytes(
        "SourceFileLimit",
        "1M",
        "Project files up to this size go up with a job that needs the project's sources.",
    )
    sources_limit_bytes: Size = _bytes(
        "SourcesLimit", "32M", "The project's sources together, at most."
    )
    include: Annotated[tuple[str, ...], BeforeValidator(read_patterns), list_schema()] = Field(
        default=(),
        alias="Include",
        description="Files of the project that go up as sources although they seem to hold a "
        "secret: patterns as in Exclude. A credential's own file never goes.",
    )

    @classmethod
    def between(cls, data: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
        """`PollMax` is not below `PollMin`."""
        shortest = _seconds(data.get("PollMin", "1s"))
        longest = _seconds(data.get("PollMax", "15s"))
        if shortest and longest and longest < shortest:
            key = "PollMax" if "PollMax" in data else "PollMin"
            yield (
                (key,),
                f"PollMax ({units.format_duration(longest)}) has to be PollMin "
                f"({units.format_duration(shortest)}) or longer",
            )
