"""Conclude attempts: fetch a job's outputs, or report why it failed."""

import asyncio
import hashlib
import posixpath
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..common.errors import (
    MantikError,
    OutputMissing,
    OutputsLost,
    SiteError,
    SiteNotFound,
    SiteRejected,
)
from ..common.humanize import humanize_count
from ..common.state_directory import read_end
from ..config.settings import SiteSettings
from ..jobs.markers import Marker, MarkerInvalid, OutputEntry
from ..jobs.paths import display_path, local_path, nearest
from ..jobs.reasons import Reason
from ..jobs.script import STEPS
from ..jobs.spec import OutputFile
from ..journal import (
    TIMESTAMP,
    AttemptRecord,
    AttemptState,
    FileRecord,
    RemoteOutput,
    content_name,
    is_utf8,
    turn_of,
)
from ..sites.base import JobState, Phase, Site
from . import messages
from .attempt import Attempt
from .cancel import Canceller
from .evidence import Evidence, read_owner
from .fetch import log_path
from .machine import (
    End,
    Verdict,
    decide,
    find_lost_checkpoint,
    judge_failure,
    judge_silence,
    judge_start,
    read_reason,
)
from .messages import LastWords
from .request import GroupJob, Outcome
from .work import SiteWork, Worker

_MAX_NAMED_FILES: Final = 5
"""Most files that a message names."""
_BEFORE_INPUTS: Final = STEPS[: STEPS.index("inputs")]
"""Steps before `inputs`: if one fails, the bundles may not have been unpacked."""
_LOG_END_BYTES: Final = 16 << 10
"""How much of a log file to read for its last lines."""
_ASKED_IN_GRACE: Final = 5
"""How often the scheduler is asked, at least, why a job got a signal: some answers are none."""
_TELLING: Final = (
    Reason.TIME_LIMIT,
    Reason.OUT_OF_MEMORY,
    Reason.NODE_FAILURE,
    Reason.PREEMPTED,
    Reason.CANCELLED,
    Reason.ALLOCATION_ENDED,
)
"""Reasons that explain a signal; an exit code of the script does not."""


class Ending(Worker):
    """Conclude one attempt.

    Attributes:
        marker: how it ended by its script; None as long as, or if, that is unknown.
    """

    def __init__(self, work: SiteWork, attempt: Attempt, canceller: Canceller) -> None:
        super().__init__(work)
        self._stager = work.place.stager
        self._canceller = canceller
        self._undeclared = work.undeclared
        self._request = attempt.whole
        self._continuation = attempt.whole.continuation
        self._attempt = attempt
        self._record = attempt.record
        self._path = log_path(self._logs, attempt.record)
        self._failed_node = ""  # `JobState.failed_node`
        self.marker: Marker | None = None

    async def conclude(self, end: Evidence) -> tuple[Verdict, Outcome | None]:
        """Return what the attempt's end means, and the outcome for Snakemake if it is the last."""
        attempt, record = self._attempt, self._record
        attempt.end, attempt.turn = end, turn_of(self._journal.attempts(record.before))
        if end.exit_code is None:
            return await self._without_marker(end)
        try:
            marker = await self._fetcher.marker(record, end)
        except (MarkerInvalid, SiteError) as error:
            if end.exit_code == 0 and isinstance(error, SiteError):
                return self._unfetched(error)
            await self._log()
            return await self._failed(
                Verdict(End.FAILED, Reason.OUTPUTS),
                f"The job ended with exit code {end.exit_code}, but its marker could not be read."
                f" {error}\n",
            )
        self.marker = marker
        # An earlier run may have submitted it with other bundles.
        known = bool(attempt.staged) and len(attempt.staged) == attempt.sent
        bundles = list(dict.fromkeys(b for staged in attempt.staged for b in staged.bundles))
        again = judge_start(record, marker, self._continuation, bundles if known else None)
        if again is not None:
            return await self._again(again)
        self._journal.files.landed(record.id)
        self._journal.secrets_gone(record.id)  # its script removes them however it ends
        # It is unknown which of several submissions ran, and so what it unpacked.
        if marker.failed_step not in _BEFORE_INPUTS and known and attempt.sent == 1:
            self._stager.confirm(attempt.staged[0])
        if marker.exit_code != 0:
            self._stager.lost([output.path for output in self._request.outputs])
            return await self._command_failed(marker)
        return await self._command_succeeded(marker)

    async def _without_marker(self, end: Evidence) -> tuple[Verdict, Outcome | None]:
        verdict = judge_silence(self._record, end, self._continuation)
        if verdict.end in (End.AGAIN, End.LATER):
            return await self._again(verdict)
        self._failed_node = end.state.failed_node if end.state is not None else ""
        said = LastWords(await self._log(), self._shown())
        await self._canceller.rescue(self._record.id)
        words = messages.stopped_message(end.state, self._attempt.where, said)
        return await self._not_succeeded(verdict, words, said)

    async def _command_failed(self, marker: Marker) -> tuple[Verdict, Outcome | None]:
        record, kept = self._record, list[FileRecord]()
        if self._continuation is not None:
            checkpoint = marker.at(*self._continuation.paths)
            kept = [FileRecord(e.path, e.size, e.sha256) for e in checkpoint if e.type == "f"]
            self.marker = marker = marker.without(checkpoint)
        # Trouble with the job's files does not change that it failed.
        with suppress(MantikError, OSError):
            if not marker.bare:
                await self.fetch(marker)
        log = await self._log()
        asked = self._planner.resources(self._request.resources, self._request.threads)
        reason, self._failed_node = await find_reason(
            self._site, self._settings, marker, record, ids=self._attempt.ids,
            limit=asked.runtime_s,
        )  # fmt: skip
        if find_lost_checkpoint(record, marker, self._continuation):
            self._journal.segments.keep_checkpoint(record.follows, "")  # the job begins anew
        members = self._failed_members()
        logs = [log for member, _ in members for log in member.logs] if members else None
        said = LastWords(log, self._shown(), tuple(self._log_files(logs)))
        ends = [(member.name, code) for member, code in members]
        words = messages.failed_message(marker, self._attempt.where, said, reason, ends)
        verdict = judge_failure(record, marker, reason, self._continuation)
        verdict, outcome = await self._not_succeeded(verdict, words, said, kept)
        return verdict, outcome and replace(outcome, failed=tuple(m.job for m, _ in members))

    async def _not_succeeded(
        self, verdict: Verdict, words: str, said: LastWords, kept: Sequence[FileRecord] = ()
    ) -> tuple[Verdict, Outcome | None]:
        """Close an attempt that has run in vain, or that another one follows."""
        if verdict.end is End.AGAIN:
            return await self._again(verdict)
        if verdict.goes_on:
            self._journal.segments.keep_checkpoint(self._record.id, verdict.goes_on, kept)
        if verdict.end is End.GOES_ON:
            self._notify(verdict.say)
            await self._close(verdict.end, verdict.why, words=verdict.say)
            return verdict, None
        if verdict.why:
            where = self._attempt.where
            words = messages.compose(verdict.why, where, said, verdict.advice)
        return await self._failed(verdict, words)

    async def _again(self, verdict: Verdict) -> tuple[Verdict, None]:
        """Close an attempt whose end is not the job's failure; the job gets another one."""
        if verdict.say:
            (self._retry.note if verdict.end is End.LATER else self._notify)(verdict.say)
        if verdict.purged:
            self._stager.purged()
        await self._stager.missed(verdict.missing)
        self._stager.gone(verdict.bundles)
        await self._close(verdict.end, verdict.why)
        return verdict, None

    async def _command_succeeded(self, marker: Marker) -> tuple[Verdict, Outcome | None]:
        record = self._record
        # If this process dies after the download, the next one recognises the outputs as this job's
        # (`Dispatcher.choose_attempt`), and does not update them a second time.
        self._journal.files.set_remote_files(record.place, self._updated(marker))
        stored = [
            _stored_output(output, record, marker.at(output.path))
            for output in self._request.outputs
            if output.stored
        ]
        if not self._attempt.staged:  # it may have ended long ago
            files = [file for output in stored for file in output.files]
            if lost := await self._place.looks.late_losses(files, marker.ended):
                some = ", ".join(map(display_path, lost[:_MAX_NAMED_FILES]))
                say = (
                    f"{record.name}: its outputs are no longer at {record.site} ({some}); it is"
                    " submitted again."
                )
                why = "its outputs are no longer at the site"
                return await self._again(Verdict(End.AGAIN, why=why, say=say))
        try:
            fetched = await self.fetch(marker)
        except (OutputMissing, OutputsLost) as error:
            if isinstance(error, OutputMissing):
                await self._fetch_present(marker)
            await self._log()
            return await self._failed(Verdict(End.FAILED, Reason.OUTPUTS), f"{error}\n")
        except MantikError as error:
            return self._unfetched(error)
        except OSError as error:
            return self._kept(
                "The outputs cannot be written on this machine"
                f" ({messages.describe_os_error(error)}). They are still at the site: free space"
                " and start again.\n"
            )
        await self._undeclared.conclude(self._request, record, marker)
        await self._log()
        self._record_outputs(marker, stored, fetched)
        await self._close(End.SUCCEEDED, "")
        outcome = self._outcome(Reason.SUCCESS, "", record.id)
        return Verdict(End.SUCCEEDED), replace(outcome, stored=tuple(stored))

    def _unfetched(self, error: MantikError) -> tuple[Verdict, Outcome]:
        """Fail a job that succeeded; its outputs are left for the next run to fetch."""
        # Ended, but not closed: the next run adopts the attempt, and a forced run makes a new one.
        self._journal.ended(self._record.id, "succeeded", waited=None, ran=None, log="")
        return self._kept(
            f"The job succeeded, but its outputs could not be fetched: {error} They are still at"
            " the site. Start again to fetch them without computing them again. To compute them"
            f" again, type: snakemake --forcerun {self._request.rule}\n"
        )

    def _kept(self, words: str) -> tuple[Verdict, Outcome]:
        """Fail a job, and leave its attempt open for the next run to fetch its results."""
        self._notify(f"{self._record.name}: {words.rstrip()}")
        return Verdict(End.KEPT), replace(self._outcome(Reason.OUTPUTS, words, ""), log=None)

    async def _failed(self, verdict: Verdict, words: str) -> tuple[Verdict, Outcome]:
        await self._close(End.FAILED, words.splitlines()[0], reason=verdict.reason)
        return verdict, self._outcome(verdict.reason, words, self._record.id)

    async def _close(
        self, end: End, why: str, *, words: str = "", reason: Reason | None = None
    ) -> None:
        over = decide(end).state is AttemptState.ENDED
        await self._canceller.record_end(
            self._record, end, why, words=words, ids=self._attempt.ids, reason=reason,
            times=self._attempt.times(self.marker), marker=self.marker if over else None,
            log=self._log_here if over else None, failed_node=self._failed_node,
        )  # fmt: skip

    def _outcome(self, reason: Reason, message: str, attempt_id: str) -> Outcome:
        number, ids = self._request.number, " ".join(self._attempt.ids)
        succeeded = reason is Reason.SUCCESS
        return Outcome(number, attempt_id, succeeded, message, self._log_here, ids, reason)

    @property
    def _log_here(self) -> Path | None:
        return self._path if self._path.exists() else None

    def _shown(self) -> Path | None:
        """Return the path of the log for messages, if it is here."""
        path = self._log_here
        here = path is not None and path.is_relative_to(self._workdir)
        return path.relative_to(self._workdir) if path is not None and here else path

    # Files

    async def fetch(self, marker: Marker) -> tuple[FileRecord, ...]:
        """Fetch the outputs, if necessary without the observer's directory.

        Raises:
            MantikError, OSError: an output cannot be fetched.
        """
        record, added, outputs = self._record, self._attempt.extras, self._request.outputs
        if added is None or not added.directory:
            return await self._fetcher.outputs(record, marker, outputs)
        below = f"{added.directory}/"
        # A job's link could lead a reader of its logged files to any local file.
        if links := [e for e in marker.at(added.directory) if e.type == "l"]:
            self._notify(
                f"{record.name}: not downloaded: {humanize_count(len(links), 'symbolic link')} in"
                f" {below}, to which it logged."
            )
            marker = marker.without(links)
        try:
            fetched = await self._fetcher.outputs(record, marker, outputs)
        except (MantikError, OSError) as error:
            if not (logged := marker.at(added.directory)):
                raise
            own = marker.without(logged)
            fetched = await self._fetcher.outputs(record, own, outputs[:-1])
            self._notify(f"{record.name}: its files in {below} could not be fetched. {error}")
        return tuple(file for file in fetched if not file.path.startswith(below))

    async def _fetch_present(self, marker: Marker) -> None:
        """Fetch the log files of a job that lacks outputs; also its other outputs, if requested."""
        wanted, files = self._request.outputs, marker.files
        if not self._request.incomplete:
            wanted = tuple(output for output in wanted if output.kind == "log")
            logs = {output.path for output in wanted}
            files = tuple(entry for entry in files if entry.path in logs)
        without = replace(marker, files=files, missing_outputs=())
        with suppress(MantikError, OSError):
            await self._fetcher.outputs(self._record, without, wanted)

    def _failed_members(self) -> list[tuple[GroupJob, int]]:
        """Return the failed members of a group and their exit codes, from the group's report.

        The user's jobs can write to the report, so lines that make no sense are ignored.
        """
        if (group := self._request.group) is None:
            return []
        report = self._workdir / group.report
        try:
            lines = report.read_text(errors="replace").splitlines()
            report.unlink()
        except OSError:
            return []
        found = {}
        for line in lines:
            number, _, code = line.partition(" ")
            if number.isdecimal() and code.isdecimal() and int(number) < len(group.members):
                found[int(number)] = int(code)
        return [(group.members[number], code) for number, code in found.items()]

    async def _log(self) -> bytes:
        """Write the job's log to its local path, and return it or its end.

        Trouble with the log does not change how the job ended.
        """
        try:
            return await self._fetcher.log(self._record, self.marker, self._path)
        except (SiteError, OSError) as error:
            self._notify(f"{self._record.name}: its log could not be fetched. {error}")
            return self.marker.log if self.marker is not None else b""

    def _log_files(self, chosen: Collection[str] | None) -> Iterator[tuple[str, bytes]]:
        """Yield the paths and ends of the rule's downloaded log files, or of the chosen ones."""
        for output in self._request.outputs:
            path = local_path(output.path, self._workdir)
            if chosen is not None and output.path not in chosen:
                continue
            is_log = output.kind == "log" and not output.directory and path.is_file()
            if is_log and (end := read_end(path, _LOG_END_BYTES)):
                yield display_path(output.path), end

    def _updated(self, marker: Marker) -> list[FileRecord]:
        """Return the records of the files that the job updated, as they are in the workspace."""
        extras = self._attempt.extras
        added = extras.directory if extras is not None else None
        entries = marker.at(*(o.path for o in self._request.updated if o.path != added))
        return [FileRecord(e.path, e.size, e.sha256) for e in entries if e.type == "f"]

    def _record_outputs(
        self, marker: Marker, stored: Sequence[RemoteOutput], fetched: Sequence[FileRecord]
    ) -> None:
        record, ledger = self._record, self._journal.files
        there = {file.path: file for output in stored for file in output.files}
        files = [there.get(file.path, file) for file in fetched]
        empty = [file for file in there.values() if not file.sha256]
        # Snakemake adds these to each `directory()` when its job has succeeded, and the script of
        # a presubmitted attempt to its inputs.
        timestamps = [
            FileRecord(f"{path}/{TIMESTAMP}", 0, hashlib.sha256().hexdigest())
            for path in record.makers
            if not ledger.is_stored(path) and local_path(path, self._workdir).is_dir()
        ]
        ledger.set_remote_files(record.place, [*files, *empty, *timestamps])
        if stored:
            # Nothing else on this machine shows that they exist.
            ledger.set_stored(stored, lasting=True)
        self._journal.note_made(record.id, files)
        paths = [output.path for output in stored]
        strange = [e.path for e in marker.files if not is_utf8(e.path)]
        if unnamed := [path for path in strange if nearest(path, paths) is not None]:
            self._notify(
                f"{record.name}: left at {record.site}: {humanize_count(len(unnamed), 'file')} of"
                f" its outputs with names that are not UTF-8, such as {unnamed[0]!r}. Neither"
                " smk-mantik get nor a job at another site gets these. Let the rule pack its files,"
                " for example with tar."
            )


def _stored_output(
    output: OutputFile, record: AttemptRecord, entries: Sequence[OutputEntry]
) -> RemoteOutput:
    filled = {posixpath.dirname(e.path) for e in entries}
    files = [e for e in entries if e.type == "f" and is_utf8(e.path)]
    empty = [e for e in entries if e.type == "d" and e.path not in filled]
    return RemoteOutput(
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


# Asking the scheduler


async def find_reason(
    site: Site,
    settings: SiteSettings,
    marker: Marker,
    record: AttemptRecord,
    *,
    ids: Sequence[str],
    limit: float | None = None,
) -> tuple[Reason, str]:
    """Return why a job failed that could still write its marker, and `JobState.failed_node`.

    `ids` are empty if a run was killed before it got them. `limit` is the walltime in seconds,
    where known. The scheduler is asked if it may know better; wait up to the marker's grace for a
    site that does not answer or is slow to notice the end.
    """
    reason, ask = read_reason(marker, limit)
    state: JobState | None = None
    grace_s = settings.timing.marker_grace_s
    with suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while ask:
                state = await _last_state(site, record, ids)
                if state is not None and state.phase is not Phase.WAITING:
                    break
                await asyncio.sleep(min(settings.timing.poll_min_s, grace_s / _ASKED_IN_GRACE))
    if state is None:
        return reason, ""
    if state.phase is Phase.WAITING:
        # The site put it back into the queue, where nobody cancelled it. Half a record may say so
        # for some seconds; and it may be another start of the same submission, of which the site
        # knows the last one only.
        with suppress(SiteError):
            owner = await read_owner(site, record)
            if owner is not None and owner.scheduler_job == state.scheduler_id:
                return Reason.PREEMPTED, ""
    return (state.reason, state.failed_node) if state.reason in _TELLING else (reason, "")


async def _last_state(site: Site, record: AttemptRecord, ids: Sequence[str]) -> JobState | None:
    """Return the final state of the job that ran, one of `ids`; None while it may still run.

    A waiting state if the only job waits again.
    """
    ended: list[JobState] = []
    waits: JobState | None = None
    try:
        ids = ids or (await site.find({record.id: record.name})).get(record.id, [])
        for job_id, reported in (await site.states(ids)).items() if ids else ():
            state = reported
            if reported.phase is Phase.ENDED or site.states_lag:
                with suppress(SiteNotFound, SiteRejected):
                    explained = await site.explain(job_id)
                    again = explained.phase in (Phase.ENDED, Phase.WAITING)
                    state = explained if again else reported
            if state.phase is Phase.ENDED:
                ended.append(state)
            if state.phase is Phase.WAITING:
                waits = state
    except SiteError:
        return None
    explaining = [state for state in ended if state.reason in _TELLING]
    if ended and (explaining or len(ended) == len(ids)):
        return (explaining or ended)[-1]
    return waits if len(ids) == 1 else None
