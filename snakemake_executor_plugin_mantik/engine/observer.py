"""Define observers: they receive the events of each attempt, and may add to a job.

The engine does not depend on what an observer does (`tracking` makes MLflow runs of jobs). An
observer can neither fail a job nor block the loop: it raises nothing, and only `prepare` may take
time, within a limit of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..jobs.reasons import Reason
from ..jobs.spec import JobSpec
from ..journal import AttemptRecord
from .request import JobRequest

How = Literal["finished", "failed", "killed"]
"""How an attempt ended: successfully, by itself with an error, or stopped from outside."""
Successor = Literal["", "next segment", "same segment"]
"""The attempt of the same job that follows one that has ended: none that continues it; the next
segment; or one that takes its place as a segment, since it computed nothing."""


@dataclass(frozen=True)
class LiveView:
    """How a job's directory is copied here while the job writes to it.

    Attributes:
        copy: local directory of the copy (see `engine.live_copies`), relative to the working
            directory.
        growing: an extended regular expression that matches the paths of append-only files, of
            which only new bytes are transferred.
        metrics: the directory for the metric of the job's GPUs (`LiveDirectory`).
    """

    copy: str
    growing: str
    metrics: str = ""


@dataclass(frozen=True)
class JobExtras:
    """An observer's additions to a job.

    Attributes:
        directory: relative to the working directory and the workspace alike; empty for none. Its
            files are downloaded whether the job succeeds or not, and an error with them does not
            change how the job ended.
        files: its initial contents, by their paths in it; None is an empty directory.
        variables: environment variables of the command.
        secrets: further variables that are passed like those of the workflow's `envvars:`.
        live: how to copy the directory while the job runs, if at all.
    """

    directory: str
    files: Mapping[str, bytes | None] = field(default_factory=dict, repr=False)
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    live: LiveView | None = None

    def lay_out(self, place: Path) -> None:
        """Write the initial contents of the directory to a new local directory.

        Raises:
            OSError: it cannot be written.
        """
        place.mkdir(parents=True)
        for name, content in self.files.items():
            path = place / name
            (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
            if content is not None:
                path.write_bytes(content)


@dataclass(frozen=True)
class JobEnd:
    """The end of an attempt.

    Attributes:
        how: the kind of end.
        words: one line that describes it, empty after a success.
        exit_code: of the command, or of a step that failed before it, where known.
        log: local path of the job's log, if it was downloaded.
        waited, ran: seconds, where known.
        reason: why it failed; None if it did not, or if another attempt follows silently.
        nodes: the names of the nodes that it ran on, as its scheduler writes them, where known.
        successor: the attempt that follows it.
    """

    how: How
    words: str = ""
    exit_code: int | None = None
    log: Path | None = None
    waited: float | None = None
    ran: float | None = None
    reason: Reason | None = None
    nodes: str = ""
    successor: Successor = ""

    @property
    def facts(self) -> dict[str, object]:
        """What the journal's log says of the end, besides the columns of the attempt."""
        return {
            "how": self.how, "words": self.words, "exit_code": self.exit_code,
            "log": str(self.log or ""), "reason": str(self.reason or ""), "nodes": self.nodes,
            "successor": self.successor,
        }  # fmt: skip


class Observer:
    """Base class that follows the attempts of a run; its methods do nothing.

    All methods are called in the engine's thread. After a controller was killed, the next one may
    report the same event again.
    """

    async def prepare(
        self,
        request: JobRequest,  # noqa: ARG002
        record: AttemptRecord,  # noqa: ARG002
        workspace: str,  # noqa: ARG002
        *,
        waits: bool = False,  # noqa: ARG002
    ) -> JobExtras | None:
        """Return the additions to an attempt that is about to be submitted or adopted, if any.

        They are the same each time for the same attempt. `workspace` is the absolute path of the
        workspace as jobs see it. `waits` is set for a segment that is submitted before the one
        that it follows has ended; when its turn comes, it is adopted.
        """
        return None

    def submitting(self, record: AttemptRecord, spec: JobSpec, script: str) -> None:
        """Note that an attempt is about to be submitted, with the complete `script` of `spec`."""

    def submitted(self, record: AttemptRecord, site_job: str, queue: str) -> None:
        """Note that the site has accepted an attempt under the id `site_job`."""

    def started(self, record: AttemptRecord) -> None:
        """Note that an attempt has begun to run; may be left out for one that ended soon after."""

    def logged(self, record: AttemptRecord) -> None:
        """Note that the copy of what an attempt writes to its directory (`LiveView`) has grown."""

    def ended(self, record: AttemptRecord, end: JobEnd) -> None:
        """Note that the end of an attempt is known, and that all downloads of it are complete."""

    def leftover(self, record_id: str) -> str | None:  # noqa: ARG002
        """Return the directory that an earlier `prepare` gave an attempt at the site, if any.

        The directories of all attempts have the same parent, which contains nothing else.
        """
        return None


class Observers(Observer):
    """Pass each event to several observers, in order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers
        for event in ("submitting", "submitted", "started", "logged", "ended"):
            setattr(self, event, partial(self._tell, event))

    async def prepare(
        self, request: JobRequest, record: AttemptRecord, workspace: str, *, waits: bool = False
    ) -> JobExtras | None:
        """Call all observers; return the first addition that is not None."""
        added = [
            await each.prepare(request, record, workspace, waits=waits) for each in self._observers
        ]
        return next((extras for extras in added if extras is not None), None)

    def _tell(self, event: str, *facts: Any) -> None:
        for each in self._observers:
            getattr(each, event)(*facts)

    def leftover(self, record_id: str) -> str | None:
        found = (each.leftover(record_id) for each in self._observers)
        return next((leftover for leftover in found if leftover is not None), None)
