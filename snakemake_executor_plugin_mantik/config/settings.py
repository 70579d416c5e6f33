"""The key `Site` of a backend config: a site's limits and paths, all optional.

Credentials are not part of it: they come from the environment or the keyring.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from ..jobs.spec import ScriptLimits
from .exclude import read_patterns
from .section import ConfigSection, Keys, config_key, missing_file
from .values import (
    LIST,
    Duration,
    Name,
    Positive,
    Size,
    Text,
    Url,
    describe_value,
    not_allowed,
    one_of,
    parse_text,
    words_schema,
)

Patterns = Annotated[tuple[str, ...], BeforeValidator(read_patterns), LIST]
_SCHEDULERS: Final = ("slurm", "pbs", "none")
_SHARING: Final = ("private", "group")


def _yes_or_no(value: object) -> bool:
    if not isinstance(value, bool):
        raise not_allowed("true or false", value)
    return value


_YesOrNo = Annotated[bool, BeforeValidator(_yes_or_no), WithJsonSchema({"type": "boolean"})]


def _workspace(value: object) -> str:
    path = parse_text(value, "a path at the site")
    if not path.isprintable() or path.startswith(("~", "$")) or ".." in path.split("/"):
        raise ValueError(
            "has to be a path at the site, absolute or relative to its storage, without '..', '~' "
            f"and variables; found {describe_value(value)}"
        )
    return path.rstrip("/") or "/"


@dataclass(frozen=True)
class Timing:
    """Waits and limits that no user has a reason to change; tests pass shorter ones.

    Attributes:
        timeout_s: how long one request may take, and as long again for each MiB of a file that it
            carries.
        concurrent_requests: requests at the same time. Uploads and downloads of files (at
            firecREST: downloads through its object store) have a separate limit of the same size.
            A firecREST server has ten SSH sessions for each user, and a question about a job takes
            two.
        submissions_per_second: limits a burst at a server that answers at once. Others are slower
            anyway, since all but one of the `concurrent_requests` are the most at a time.
        poll_min_s: shortest time between two polls of the site's jobs, after a change.
        marker_grace_s: how long to wait for a job's marker after the scheduler reported its end:
            slow file systems show it late.
        unknown_wait_s: time after which to repeat a submission whose result is unknown; the job
            still runs only once.
        fetch_wait_s: how long to repeat the download of a successful job's outputs if the site
            refuses them or returns something else; after that the next run downloads them.
        inline_limit_bytes: small inputs up to this total size are part of the submission, whose
            script may have 4 MB at firecREST.
        script: of job scripts; `TermGrace` replaces their `grace_s`.
    """

    timeout_s: float = 120
    concurrent_requests: int = 4
    submissions_per_second: float = 50
    poll_min_s: float = 1
    marker_grace_s: float = 30
    unknown_wait_s: float = 120
    fetch_wait_s: float = 300
    inline_limit_bytes: int = 256 << 10
    script: ScriptLimits = field(default_factory=ScriptLimits)


TIMING: Final = "MANTIK_TIMING"
"""The variable with a `Timing` as JSON, for tests that run commands."""


def _timing() -> Timing:
    given = os.environ.get(TIMING)
    return TypeAdapter(Timing).validate_json(given) if given else Timing()


class SiteSettings(ConfigSection):
    """Settings of a site; times in seconds, sizes in bytes."""

    @classmethod
    def missing(cls, data: Mapping[str, Any], project: Path) -> Iterator[tuple[Keys, str]]:
        if message := missing_file(data.get("CAFile"), project):
            yield ("CAFile",), message

    scheduler: Annotated[
        Literal["slurm", "pbs", "none"], one_of(*_SCHEDULERS), words_schema(*_SCHEDULERS)
    ] = config_key(
        "Scheduler",
        "The scheduler behind UNICORE: slurm, pbs (PBS Professional, OpenPBS), or none "
        "where UNICORE starts jobs itself or another scheduler does.",
        "slurm",
    )
    workspace: Annotated[str, BeforeValidator(_workspace)] | None = config_key(
        "Workspace",
        "Path of a directory at the site for the workspace, absolute or relative to Storage. Each "
        "workflow needs its own, which it has by default; the sites of one workflow may share one.",
        None,
    )
    sharing: Annotated[Literal["private", "group"], one_of(*_SHARING), words_schema(*_SHARING)] = (
        config_key(
            "Sharing",
            "Who may enter the workspace at the site: only you (private), or also the "
            "group that owns it (group), as in a project directory.",
            "private",
        )
    )
    storage: Name | None = config_key(
        "Storage",
        "Name of the site's storage (UNICORE: HOME, PROJECT, SCRATCH, ...) that "
        "contains the workspace; by default it is detected.",
        None,
    )
    ca_file: Text | None = config_key(
        "CAFile",
        "File with certificates (PEM), in addition to the system's own, to verify the "
        "site's TLS certificate with; relative to the project folder.",
        None,
    )
    proxy: Url | None = config_key(
        "Proxy", "URL of an HTTP proxy for all requests, without credentials.", None
    )
    expand: _YesOrNo = config_key(
        "Expand",
        "Let bash expand $NAME, ${NAME} and $(COMMAND) in Variables, Options and "
        "Paths at the site, on the node, as mantik's own backend did.",
        False,
    )
    max_jobs: Positive = config_key(
        "MaxJobs", "Maximum number of jobs that are submitted and have not ended.", 100
    )
    poll_s: Duration = config_key(
        "Poll", "Longest time between two polls of the site's jobs; shorter after a change.", "15s"
    )
    term_grace_s: Duration = config_key(
        "TermGrace",
        "Time a command has to end after TERM before it is killed; shorter than the scheduler's "
        "own (Slurm's KillWait, 30s).",
        "20s",
    )
    project_files_limit_bytes: Size = config_key(
        "ProjectFilesLimit", "Maximum total size of the project files that no rule names.", "32M"
    )
    include: Patterns = config_key(
        "Include",
        "Files to upload although they seem to hold a secret: patterns as in "
        "Exclude. A credential's own file is never uploaded.",
        (),
    )
    timing: SkipJsonSchema[Timing] = Field(default_factory=_timing)
