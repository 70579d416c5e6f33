"""Conclude tries: fetch a job's outputs, or report why it failed."""

import hashlib
import posixpath
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from snakemake_executor_plugin_mantik.common.errors import (
    MantikError,
    OutputMissing,
    OutputsLost,
    SiteError,
)
from snakemake_executor_plugin_mantik.common.files import read_end
from snakemake_executor_plugin_mantik.common.humanize import humanize_count
from snakemake_executor_plugin_mantik.jobs.markers import Marker, MarkerInvalid, OutputEntry
from snakemake_executor_plugin_mantik.jobs.paths import display_path, local_path, nearest
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.script import PREDECESSORS, STEPS
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.journal import (
    TIMESTAMP,
    UNTIMED,
    WENT_ON,
    FileRecord,
    StoredOutput,
    Times,
    TryRecord,
    TryState,
    content_name,
    is_utf8,
    turn_of,
)

from . import messages
from .attempt import Attempt, used_of
from .cancel import Canceller
from .compare import Looks
from .dispatch import Submitter
from .evidence import GIVEN_UP, Evidence, Finding
from .failure_classifier import FailureClassifier
from .fetch import Fetcher, log_path
from .messages import LastWords
from .observer import JobEnd, Observer, failure_kind, with_times
from .request import GroupJob, JobRequest, Outcome
from .segments import (
    GoesOn,
    SegmentEnd,
    goes_on_message,
    judge_segment,
    lost_checkpoint,
    without_checkpoint,
)
from .stage import Stager
from .undeclared import UndeclaredFiles
from .workflow_context import WorkflowContext

_MAX_NAMED_FILES = 5
"""Most files that a message names."""
_BEFORE_INPUTS = STEPS[: STEPS.index("inputs")]
"""Steps before `inputs`: if one fails, the bundles may not have been unpacked."""

_LOG_END_BYTES = 16 << 10
"""How much of a log file to read for its last lines."""


class Finalizer:
    """Conclude the tries at one site. Call all methods from the event loop's thread."""

    def __init__(
        self,
        workflow: WorkflowContext,
        *,
        stager: Stager,
        submitter: Submitter,
        fetcher: Fetcher,
        canceller: Canceller,
        classifier: FailureClassifier,
        looks: Looks,
        observer: Observer,
    ) -> None:
        self._journal = workflow.journal
        self._stager = stager
        self._submitter = submitter
        self._fetcher = fetcher
        self._canceller = canceller
        self._classifier = classifier
        self._looks = looks
        self._undeclared = UndeclaredFiles(workflow)
        self._observer = observer
        self._workdir = workflow.workdir
        self._logs = workflow.logs
        self._notify = workflow.notify

    async def conclude(
        self, request: JobRequest, attempt: Attempt, end: Evidence, runtime_s: int | None
    ) -> Outcome | GoesOn | None:
        """Return the job's outcome, or None if it is to be submitted again at once.

        `GoesOn` means that another segment of the job is to be submitted. `runtime_s` is the job's
        walltime, where known.
        """
        record, attempt.end = attempt.record, end
        attempt.turn = turn_of(self._journal.tries(record.before))
        path = log_path(self._logs, record)
        if end.exit_code is None:
            return await self._conclude_without_marker(request, attempt, end, path)
        try:
            marker = await self._fetcher.marker(record, end)
        except (MarkerInvalid, SiteError) as error:
            if end.exit_code == 0 and isinstance(error, SiteError):
                return self._unfetched(request, attempt, str(error))
            await self._log(record, None, path)
            words = (
                f"The job ended with exit code {end.exit_code}, but its marker could not be read"
            )
            return self._failed(
                request, attempt, f"{words}. {error}\n", path, None, reason=Reason.OUTPUTS
            )
        lost = lost_checkpoint(request.continuation, record, marker)
        if lost is None and (why := self._not_started(attempt, marker)) is not None:
            await self.again(attempt, why, attempt.times(marker))
            return None
        self._journal.files.landed(record.id)
        self._journal.secrets_gone(record.id)  # its script removes them however it ends
        # It is unknown which of several submissions ran, and so what it unpacked.
        if marker.failed_step not in _BEFORE_INPUTS and attempt.sent == len(attempt.staged) == 1:
            self._stager.confirm(attempt.staged[0])
        if marker.exit_code != 0:
            self._stager.lost([output.path for output in request.outputs])
            return await self._command_failed(request, attempt, marker, path, runtime_s)
        return await self._command_succeeded(request, attempt, marker, path)

    async def _command_succeeded(
        self, request: JobRequest, attempt: Attempt, marker: Marker, path: Path
    ) -> Outcome | None:
        record = attempt.record
        # If this process dies after the download, the next one recognises the outputs as this job's
        # (`SiteRunner._is_already_updated`), and does not update them a second time.
        self._stager.made(_updated(request, attempt, marker))
        if not attempt.staged and await self._lost_outputs(request, record, marker):
            why = "its outputs are no longer at the site"
            await self.again(attempt, why, attempt.times(marker))
            return None
        try:
            fetched = await self._outputs(request, attempt, marker)
        except (OutputMissing, OutputsLost) as error:
            if isinstance(error, OutputMissing):
                await self._fetch_present(request, record, marker)
            await self._log(record, marker, path)
            return self._failed(request, attempt, f"{error}\n", path, marker, reason=Reason.OUTPUTS)
        except MantikError as error:
            return self._unfetched(request, attempt, str(error))
        except OSError as error:
            return self._kept(
                request, attempt,
                f"The outputs cannot be written here ({messages.describe_os_error(error)}). They"
                " are still at the site: free space and start again.\n",
            )  # fmt: skip
        await self._undeclared.conclude(request, record, marker)
        await self._log(record, marker, path)
        return self._succeeded(request, attempt, marker, fetched, path)

    async def _lost_outputs(self, request: JobRequest, record: TryRecord, marker: Marker) -> bool:
        """Check whether outputs are gone that were to stay at the site, and report it."""
        stored = _stored_outputs(request, record, marker)
        files = [file for output in stored for file in output.files]
        lost = await self._looks.late_losses(files, marker.ended)
        if lost:
            some = ", ".join(map(display_path, lost[:_MAX_NAMED_FILES]))
            self._notify(
                f"{record.name}: its outputs are no longer at {record.site} ({some}); it is"
                " submitted again."
            )
        return bool(lost)

    def _unfetched(self, request: JobRequest, attempt: Attempt, why: str) -> Outcome:
        """Fail a job that succeeded; its outputs are left for the next run to fetch."""
        words = (
            f"The job succeeded, but its outputs could not be fetched: {why} They are still at the"
            " site. Start again to fetch them without computing them again. To compute them again,"
            f" type: snakemake --forcerun {request.rule}\n"
        )
        # Ended, but not closed: the next run adopts the try, and a forced run makes a new one.
        self._journal.ended(attempt.record.id, "succeeded", waited=None, ran=None, log="")
        return self._kept(request, attempt, words)

    def _kept(self, request: JobRequest, attempt: Attempt, words: str) -> Outcome:
        """Fail a job, and leave its try open for the next run to fetch its results."""
        self._notify(f"{attempt.record.name}: {words.rstrip()}")
        return Outcome(request.number, "", False, words, None, attempt.joined_ids, Reason.OUTPUTS)

    async def _outputs(
        self, request: JobRequest, attempt: Attempt, marker: Marker
    ) -> tuple[FileRecord, ...]:
        """Fetch the outputs, if necessary without the observer's directory.

        Raises:
            MantikError, OSError: an output cannot be fetched.
        """
        record, added = attempt.record, attempt.extras
        if added is None or not added.directory:
            return await self._fetcher.outputs(record, marker, request.outputs)
        below = f"{added.directory}/"
        # A job's link could lead a reader of its logged files to any local file.
        if links := [e for e in marker.at(added.directory) if e.type == "l"]:
            self._notify(
                f"{record.name}: not downloaded: {humanize_count(len(links), 'symbolic link')} in"
                f" {below}, to which it logged."
            )
            marker = marker.without(links)
        try:
            fetched = await self._fetcher.outputs(record, marker, request.outputs)
        except (MantikError, OSError) as error:
            if not (logged := marker.at(added.directory)):
                raise
            own = marker.without(logged)
            fetched = await self._fetcher.outputs(record, own, request.outputs[:-1])
            self._notify(f"{record.name}: its files in {below} could not be fetched. {error}")
        return tuple(file for file in fetched if not file.path.startswith(below))

    async def _fetch_present(self, request: JobRequest, record: TryRecord, marker: Marker) -> None:
        """Fetch the log files of a job that lacks outputs; also its other outputs, if requested."""
        wanted, files = request.outputs, marker.files
        if not request.incomplete:
            wanted = tuple(output for output in wanted if output.kind == "log")
            logs = {output.path for output in wanted}
            files = tuple(entry for entry in files if entry.path in logs)
        without = replace(marker, files=files, missing_outputs=())
        with suppress(MantikError, OSError):
            await self._fetcher.outputs(record, without, wanted)

    async def _conclude_without_marker(
        self, request: JobRequest, attempt: Attempt, end: Evidence, path: Path
    ) -> Outcome | GoesOn | None:
        if (lost := self._lost(request, attempt, end)) is not None:
            await self.again(attempt, lost, attempt.times(None))
            return None
        log = await self._log(attempt.record, None, path)
        await self._canceller.remove_secrets(attempt.record)
        words = messages.stopped_message(
            end.state, attempt.where, LastWords(log, self._shown(path))
        )
        await self._canceller.rescue(attempt.record.id)
        reason = end.state.reason if end.state is not None else None
        if reason in (None, Reason.SUCCESS):  # it left no marker, so it did not succeed
            reason = Reason.UNKNOWN
        if (then := self._then(request, attempt, None, reason)) is not None:
            if not then.failure:
                return await self._goes_on(attempt, None, reason, path)
            said = LastWords(log, self._shown(path))
            words = messages.segment_message(then.failure, attempt.where, said, then.advice)
        return self._failed(request, attempt, words, path if log else None, None, reason=reason)

    def _then(
        self,
        request: JobRequest,
        attempt: Attempt,
        marker: Marker | None,
        reason: Reason,
        kept: Iterable[FileRecord] = (),
    ) -> SegmentEnd | None:
        """Return what follows a segment; None if the job may not go on. Record its checkpoint."""
        record = attempt.record
        if request.continuation is None:
            return None
        if marker is not None and (lost := lost_checkpoint(request.continuation, record, marker)):
            self._journal.segments.keep_checkpoint(record.follows, "")  # the job begins anew
            return lost
        then = judge_segment(request.continuation, record, marker, reason)
        if then is not None and then.goes_on:
            self._journal.segments.keep_checkpoint(record.id, then.goes_on, kept)
        return then

    async def _goes_on(
        self, attempt: Attempt, marker: Marker | None, reason: Reason, path: Path
    ) -> GoesOn:
        """Close a segment that another one follows."""
        record = attempt.record
        message = goes_on_message(record, reason)
        self._notify(message)
        why = "asked" if reason is Reason.EXIT_CODE else reason.words
        log = path if path.exists() else None
        job_end = JobEnd("killed", message, log=log, successor="next segment")
        self._end(attempt, f"{WENT_ON} ({why})", job_end, marker, attempt.times(marker))
        await self._canceller.done(record.id, attempt.ids)
        return GoesOn()

    def _end(
        self, attempt: Attempt, outcome: str, end: JobEnd, marker: Marker | None, times: Times
    ) -> None:
        """Record how a try has ended, with what it has used, and report it to the observer."""
        used = used_of(marker, times)
        end = replace(
            with_times(end, times), cpu=used.cpu_s,
            nodes=(marker.nodes or marker.host) if marker is not None else "",
        )  # fmt: skip
        self._journal.ended(
            attempt.record.id, outcome, waited=times.waited, ran=times.ran,
            log=str(end.log or ""), reason=end.reason or "", used=used, end=end.facts,
        )  # fmt: skip
        self._observer.ended(attempt.record, end)

    async def again(self, attempt: Attempt, why: str, times: Times = UNTIMED) -> None:
        """Close a try whose end is not the job's failure; the job gets another one."""
        end = JobEnd("killed", why, successor="same segment")
        await self._canceller.remove_secrets(attempt.record)
        self._journal.abandoned(attempt.record.id, f"failed: {why}", times=times, end=end.facts)
        self._observer.ended(attempt.record, with_times(end, times))
        await self._canceller.done(attempt.record.id, attempt.ids)

    async def _command_failed(
        self,
        request: JobRequest,
        attempt: Attempt,
        marker: Marker,
        path: Path,
        limit: int | None,
    ) -> Outcome | GoesOn:
        kept: list[FileRecord] = []
        if request.continuation is not None:
            marker, kept = without_checkpoint(request.continuation, marker)
        # Trouble with the job's files does not change that it failed.
        with suppress(MantikError, OSError):
            if not marker.bare:
                await self._outputs(request, attempt, marker)
        log = await self._log(attempt.record, marker, path)
        reason = await self._classifier.reason(marker, attempt.record, attempt.ids, limit)
        then = self._then(request, attempt, marker, reason, kept)
        if then is not None and not then.failure:
            return await self._goes_on(attempt, marker, reason, path)
        members = self._failed_members(request)
        logs = [log for member, _ in members for log in member.logs] if members else None
        said = LastWords(log, self._shown(path), tuple(self._log_files(request, logs)))
        ends = [(member.name, code) for member, code in members]
        words = (
            messages.failed_message(marker, attempt.where, said, reason, ends)
            if then is None
            else messages.segment_message(then.failure, attempt.where, said, then.advice)
        )
        outcome = self._failed(request, attempt, words, path, marker, reason=reason)
        return replace(outcome, failed=tuple(member.job for member, _ in members))

    def _failed_members(self, request: JobRequest) -> list[tuple[GroupJob, int]]:
        """Return the failed members of a group and their exit codes, from the group's report.

        The user's jobs can write to the report, so lines that make no sense are ignored.
        """
        if request.group is None:
            return []
        report = self._workdir / request.group.report
        try:
            lines = report.read_text(errors="replace").splitlines()
            report.unlink()
        except OSError:
            return []
        found = {}
        for line in lines:
            number, _, code = line.partition(" ")
            if number.isdecimal() and code.isdecimal() and int(number) < len(request.group.members):
                found[int(number)] = int(code)
        return [(request.group.members[number], code) for number, code in found.items()]

    def _lost(self, request: JobRequest, attempt: Attempt, end: Evidence) -> str | None:
        """Return why a try without a marker is to be run again; None if the job failed."""
        if end.found is Finding.REVOKED:
            return GIVEN_UP
        if attempt.record.state is TryState.ENDED:
            return "its results are no longer at the site"
        if end.claimed or end.state is None or end.state.reason is not Reason.SUCCESS:
            return None
        # A script that exits 0 without a claim found no workspace, no directory for claims, or a
        # newer term, which the lease reports.
        self._notify(
            f"{request.name}: the workspace at {request.site} has lost files; submitting it again."
        )
        self._stager.purged()
        self._submitter.purged()
        return "the workspace was purged"

    def _not_started(self, attempt: Attempt, marker: Marker) -> str | None:
        """Return why a job is to be submitted again whose inputs were not there; None if not."""
        if marker.failed_step == PREDECESSORS:
            return "the jobs that make its inputs had not succeeded"
        if not self._inputs_unusable(attempt, marker):
            return None
        others = ", ".join(map(display_path, marker.missing_inputs[:_MAX_NAMED_FILES]))
        if not others:
            return "files were purged at the site"
        self._notify(
            f"{attempt.record.name}: its inputs changed while it waited or ran ({others}), or the"
            " site has lost them; it is submitted again with their present contents."
        )
        return f"its inputs changed: {others}"

    def _inputs_unusable(self, attempt: Attempt, marker: Marker) -> bool:
        """Check whether files for the job were missing or changed; mark them for a new upload."""
        if marker.missing_inputs:
            self._stager.lost(marker.missing_inputs)
            return True
        if marker.failed_step != "bundles" or marker.signal:
            return False
        if not attempt.staged or len(attempt.staged) < attempt.sent:
            # An earlier run submitted it, perhaps with other bundles: which ones is unknown.
            self._stager.purged()
            return True
        bundles = [bundle for staged in attempt.staged for bundle in staged.bundles]
        self._stager.gone(list(dict.fromkeys(bundles)))
        return bool(bundles)

    async def _log(self, record: TryRecord, marker: Marker | None, path: Path) -> bytes:
        """Write the job's log to `path`, and return it or its end.

        Trouble with the log does not change how the job ended.
        """
        try:
            return await self._fetcher.log(record, marker, path)
        except (SiteError, OSError) as error:
            self._notify(f"{record.name}: its log could not be fetched. {error}")
            return marker.log if marker is not None else b""

    def _succeeded(
        self,
        request: JobRequest,
        attempt: Attempt,
        marker: Marker,
        files: tuple[FileRecord, ...],
        path: Path,
    ) -> Outcome:
        stored = _stored_outputs(request, attempt.record, marker)
        self._report_unnamed(attempt.record, marker, [output.path for output in stored])
        there = {file.path: file for output in stored for file in output.files}
        files = tuple(there.get(file.path, file) for file in files)
        empty = [file for file in there.values() if not file.sha256]
        self._stager.made([*files, *empty, *self._timestamps(attempt.record)])
        if stored:
            # Nothing else on this machine shows that they exist.
            self._journal.files.set_stored(stored, lasting=True)
        self._journal.note_made(attempt.record.id, files)
        log = path if path.exists() else None
        job_end = JobEnd("finished", exit_code=0, log=log)
        self._end(attempt, "succeeded", job_end, marker, attempt.times(marker))
        return Outcome(
            request.number, attempt.record.id, True, log=log, site_job=attempt.joined_ids,
            stored=tuple(stored),
        )  # fmt: skip

    def _report_unnamed(self, record: TryRecord, marker: Marker, stored: Collection[str]) -> None:
        """Warn of files in stored outputs whose names the journal cannot hold."""
        unnamed = [
            e.path
            for e in marker.files
            if not is_utf8(e.path) and nearest(e.path, stored) is not None
        ]
        if unnamed:
            self._notify(
                f"{record.name}: left at {record.site}: {humanize_count(len(unnamed), 'file')} of"
                f" its outputs with names that are not UTF-8, such as {unnamed[0]!r}. Neither"
                " smk-mantik get nor a job at another site gets these. Let the rule pack its files,"
                " for example with tar."
            )

    def _timestamps(self, record: TryRecord) -> list[FileRecord]:
        """Return what the script of a try that was submitted ahead has added to its inputs.

        These are the files that Snakemake adds to each `directory()` when its job has succeeded.
        """
        return [
            FileRecord(f"{path}/{TIMESTAMP}", 0, hashlib.sha256().hexdigest())
            for path in record.makers
            if not self._journal.files.is_stored(path) and local_path(path, self._workdir).is_dir()
        ]

    def _failed(
        self,
        request: JobRequest,
        attempt: Attempt,
        words: str,
        path: Path | None,
        marker: Marker | None,
        *,
        reason: Reason,
    ) -> Outcome:
        log = path if path is not None and path.exists() else None
        first, code = words.splitlines()[0], marker.exit_code if marker is not None else None
        job_end = JobEnd(failure_kind(reason), first, code, log, reason=reason)
        self._end(attempt, f"failed: {first}", job_end, marker, attempt.times(marker))
        return Outcome(
            request.number, attempt.record.id, False, words, log, attempt.joined_ids, reason
        )

    def _log_files(
        self, request: JobRequest, chosen: Collection[str] | None = None
    ) -> Iterator[tuple[str, bytes]]:
        """Yield the paths and ends of the rule's downloaded log files, or of the chosen ones."""
        for output in request.outputs:
            path = local_path(output.path, self._workdir)
            if chosen is not None and output.path not in chosen:
                continue
            is_log = output.kind == "log" and not output.directory and path.is_file()
            if is_log and (end := read_end(path, _LOG_END_BYTES)):
                yield display_path(output.path), end

    def _shown(self, path: Path) -> Path | None:
        if not path.exists():
            return None
        return path.relative_to(self._workdir) if path.is_relative_to(self._workdir) else path


def _stored_outputs(request: JobRequest, record: TryRecord, marker: Marker) -> list[StoredOutput]:
    """Return the outputs of a job that stay at its place."""
    return [
        _stored_output(output, record, marker.at(output.path))
        for output in request.outputs
        if output.stored
    ]


def _stored_output(
    output: OutputFile, record: TryRecord, entries: Sequence[OutputEntry]
) -> StoredOutput:
    filled = {posixpath.dirname(e.path) for e in entries}
    files = [e for e in entries if e.type == "f" and is_utf8(e.path)]
    empty = [e for e in entries if e.type == "d" and e.path not in filled]
    return StoredOutput(
        output.path,
        record.place,
        output.directory,
        time.time(),
        record.name,
        tuple(map(_stored_file, [*files, *empty])),
        tuple((e.path, e.target) for e in entries if e.type == "l"),
    )


def _stored_file(entry: OutputEntry) -> FileRecord:
    modified = (entry.modified_ns or 1) / 1e9  # 0 would mean that it is not stored
    size, name = 0, ""
    if entry.type == "f":
        size, name = entry.size, content_name(entry.sha256, entry.size, modified)
    return FileRecord(entry.path, size, name, modified=modified, mode=entry.mode)


def _updated(request: JobRequest, attempt: Attempt, marker: Marker) -> list[FileRecord]:
    """Return the records of the files that the job updated, as they are in the workspace."""
    added = attempt.extras.directory if attempt.extras is not None else None
    entries = marker.at(*(o.path for o in request.updated if o.path != added))
    return [FileRecord(e.path, e.size, e.sha256) for e in entries if e.type == "f"]
