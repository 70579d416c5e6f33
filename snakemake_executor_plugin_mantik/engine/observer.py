"""Observers: the events of each try that the engine reports, and what they may add to a job.

The engine knows nothing of what an observer does (`tracking` makes MLflow runs of jobs). An
observer can neither fail a job nor hold up the loop: it raises nothing, and only `prepare` may take
time, within a limit of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec
from snakemake_executor_plugin_mantik.journal import TryRecord

How = Literal["finished", "failed", "killed"]
"""How a try ended: well, by itself with an error, or because somebody or something stopped it."""


@dataclass(frozen=True)
class LiveView:
    """What is shown of a directory while the job writes to it.

    Attributes:
        copy: the directory here, relative to the working directory, in which a copy of it grows
            (`engine.live` says how).
        growing: an extended regular expression: it matches the paths of files that are only added
            to, of which only what is new travels.
    """

    copy: str
    growing: str


@dataclass(frozen=True)
class JobExtras:
    """What an observer adds to a job.

    Attributes:
        directory: relative to the working directory and the workspace alike. What the job leaves
            in it comes back, whether the job succeeds or not, and whatever is wrong with it does
            not change how the job ended. Empty: there is none.
        files: what it holds before the job, by their paths in it; None is an empty directory.
        variables: environment variables of the command.
        secrets: further ones that travel like those of the workflow's `envvars:`.
        live: how the directory is shown while the job runs, if it is to be.
    """

    directory: str
    files: Mapping[str, bytes | None] = field(default_factory=dict, repr=False)
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    live: LiveView | None = None

    def lay_out(self, place: Path) -> None:
        """Write what the directory holds before the job to a new directory here.

        Raises:
            OSError: it cannot be written.
        """
        place.mkdir(parents=True)
        for name, content in self.files.items():
            path = place / name
            (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
            if content is not None:
                path.write_bytes(content)


def failure_kind(reason: Reason) -> How:
    """Whether a job that failed was stopped by somebody, or failed by itself."""
    return "killed" if reason is Reason.CANCELLED else "failed"


@dataclass(frozen=True)
class JobEnd:
    """The end of a try.

    Attributes:
        how: which kind of end it was.
        words: one line on it, empty after a success.
        exit_code: of the command, where it is known.
        log: the job's log, where it is here.
        waited, ran: seconds, where they are known.
        cpu: seconds of CPU time that its processes used, where they are known.
        reason: why it failed; None if it did not, or another try follows without a word.
    """

    how: How
    words: str = ""
    exit_code: int | None = None
    log: Path | None = None
    waited: float | None = None
    ran: float | None = None
    cpu: float | None = None
    reason: Reason | None = None


class Observer:
    """Follows the tries of a run. Its methods do nothing: derive from it what one wants to know.

    All methods are called in the engine's thread. After a controller was killed, the next one may
    report the same event again.
    """

    async def prepare(
        self,
        request: JobRequest,  # noqa: ARG002
        record: TryRecord,  # noqa: ARG002
        workspace: str,  # noqa: ARG002
    ) -> JobExtras | None:
        """Return what to add to a try that is about to be submitted or taken up again, if anything.

        It is the same each time for the same try.

        Args:
            request: the job.
            record: its try.
            workspace: absolute path of the workspace as jobs see it.
        """
        return None

    def submitting(self, record: TryRecord, spec: JobSpec, script: str) -> None:
        """Note that a try is about to be submitted, complete: the `script` of `spec`."""

    def submitted(self, record: TryRecord, site_job: str, queue: str) -> None:
        """Note that the site has acknowledged a try under the id `site_job`."""

    def waiting(self, record: TryRecord, why: str) -> None:
        """Note the scheduler's new reason why a try cannot start; empty: it may start."""

    def started(self, record: TryRecord) -> None:
        """Note that a try has begun to run. May be left out for one that ended soon after."""

    def logged(self, record: TryRecord) -> None:
        """Note that the copy of what a try writes to its directory (`LiveView`) has grown."""

    def ended(self, record: TryRecord, end: JobEnd) -> None:
        """Note that the end of a try is known, and that all that will come back of it is here."""

    def leftover(self, record_id: str) -> str | None:  # noqa: ARG002
        """Return the directory that a try has at the site because of an earlier `prepare`, if any.

        Those of all tries lie beside each other, and nothing else there.
        """
        return None


class Observers(Observer):
    """Several observers as one: each event goes to all of them, in order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    async def prepare(
        self, request: JobRequest, record: TryRecord, workspace: str
    ) -> JobExtras | None:
        """Ask all of them; return the first addition that is not None."""
        added = [await each.prepare(request, record, workspace) for each in self._observers]
        return next((extras for extras in added if extras is not None), None)

    def submitting(self, record: TryRecord, spec: JobSpec, script: str) -> None:
        for each in self._observers:
            each.submitting(record, spec, script)

    def submitted(self, record: TryRecord, site_job: str, queue: str) -> None:
        for each in self._observers:
            each.submitted(record, site_job, queue)

    def waiting(self, record: TryRecord, why: str) -> None:
        for each in self._observers:
            each.waiting(record, why)

    def started(self, record: TryRecord) -> None:
        for each in self._observers:
            each.started(record)

    def logged(self, record: TryRecord) -> None:
        for each in self._observers:
            each.logged(record)

    def ended(self, record: TryRecord, end: JobEnd) -> None:
        for each in self._observers:
            each.ended(record, end)

    def leftover(self, record_id: str) -> str | None:
        found = (each.leftover(record_id) for each in self._observers)
        return next((leftover for leftover in found if leftover is not None), None)
