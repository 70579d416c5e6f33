"""Look at the sites of a workflow that no controller watches, and at what jobs write.

A log at a site is read by its new bytes: one request for its size and one for the rest. The pause
between two reads grows while nothing is new.
"""

import asyncio
import codecs
import shlex
import time
import uuid
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..common.errors import MantikError, SiteError, SiteNotFound, UserError
from ..common.state_directory import STATE
from ..config.settings import SiteSettings
from ..engine.evidence import Evidence, Finding, find_markers, judge
from ..jobs.markers import MarkerInvalid, read_marker
from ..jobs.paths import display_path, local_path, parse_marker_name
from ..journal import GIVEN_UP, AttemptRecord, read_history, read_stored
from ..sites.base import Entry, JobState, Phase, Site, is_rest_safe
from ..staging.transfers import read_file
from .workflow import Condition, Sight

TAIL_BYTES: Final = 4096
"""Bytes at the end of a log in which its last line is looked for."""

_SEEN: Final = {
    Finding.WAITING: Condition.WAITING,
    Finding.RUNNING: Condition.RUNNING,
    Finding.LOST: Condition.RUNNING,  # what only looks gives nothing up
    Finding.ENDING: Condition.OVER,
    Finding.ENDED: Condition.OVER,
    Finding.MARKER: Condition.OVER,
    Finding.REVOKED: Condition.CANCELLED,
}
_SETTINGS: Final = SiteSettings()


def find_last_line(tail: bytes) -> str:
    """Return the last line that is not blank of the end of a log; empty if there is none.

    Of a line that was written anew with carriage returns, as progress bars are, the last version
    counts.
    """
    for line in reversed(tail.decode(errors="replace").replace("\r\n", "\n").split("\n")):
        if versions := [part for part in line.split("\r") if part.strip()]:
            return versions[-1]
    return ""


class SiteLooks:
    """Looks at one site. Call all methods from one event loop.

    They raise SiteError if the site does not answer.
    """

    def __init__(self, site: Site, sights: dict[str, Sight], last_lines: dict[str, str]) -> None:
        """Prepare; `site` is open.

        `sights` get what looks show, and `last_lines` what running attempts have written, by their
        ids.
        """
        self._site = site
        self.sights, self._last_lines = sights, last_lines
        self._known: dict[str, Evidence] = {}
        self._states: Mapping[str, JobState] | None = None
        self._looks = 0
        self._bucket = 0
        self._sizes: dict[str, int] = {}
        self._turns: dict[str, int] = {}

    async def look(self, records: Sequence[AttemptRecord]) -> None:
        """Add to `sights` what one request shows of some open attempts of the site."""
        now = time.monotonic()
        known = {r.id: self._known.setdefault(r.id, Evidence(seen=now)) for r in records}
        records = [r for r in records if known[r.id].exit_code is None]
        if not records:
            return
        states = None
        if self._looks % 2 == 0:
            states = await self._site.glance([i for r in records for i in r.site_jobs])
        self._looks += 1
        if states is None:
            records = await self._list(records)
        self._states = self._states if states is None else states
        for record in records:
            evidence = known[record.id]
            if self._states is not None:
                evidence.ids = list(record.site_jobs)
                evidence.hear(self._states)
            self.sights[record.id] = _sight(evidence)

    async def read_log(self, records: Sequence[AttemptRecord]) -> None:
        """Note the last line that one of some running attempts has written.

        The attempts take turns, since no request brings the logs of several. A call makes two
        requests at most.
        """
        record = min(records, key=lambda each: self._turns.get(each.id, 0))
        self._turns[record.id] = max(self._turns.values(), default=0) + 1
        path = record.paths.log
        with suppress(SiteNotFound):  # it has written nothing yet
            entry = await self._site.stat(path)
            if entry is None or entry.size == self._sizes.get(record.id):
                return
            offset = max(0, entry.size - TAIL_BYTES)
            parts = self._site.get(path, offset=offset, size=entry.size)
            tail = b"".join([part async for part in parts])
            self._sizes[record.id] = entry.size
            self._last_lines[record.id] = find_last_line(tail)

    async def _list(self, records: Sequence[AttemptRecord]) -> list[AttemptRecord]:
        """List one bucket; the buckets take turns. Return the attempts that it shows."""
        buckets = list(dict.fromkeys(record.bucket for record in records))
        bucket = buckets[self._bucket % len(buckets)]
        self._bucket += 1
        of_bucket = [record for record in records if record.bucket == bucket]
        try:
            entries = await self._site.list(of_bucket[0].paths.attempts)
        except SiteNotFound:
            return []
        markers = find_markers(entries)
        for record in of_bucket:
            self._known[record.id].see(record.id, entries, time.monotonic())
            if record.id in markers:
                self._known[record.id].mark(*markers[record.id])
        return of_bucket


def _sight(known: Evidence) -> Sight:
    finding = judge(known, time.monotonic(), _SETTINGS)
    # Without a claim it waits, as far as listings can tell.
    condition = _SEEN.get(finding, Condition.WAITING if known.looked else None)
    states = list((known.states or {}).values())
    details = {Finding.REVOKED: GIVEN_UP, Finding.ENDING: known.last_state.detail}
    return Sight(
        condition,
        known.exit_code,
        pending=next((s.pending for s in states if condition is Condition.WAITING), ""),
        started=next((s.started for s in states if s.phase is Phase.RUNNING), None),
        detail=details.get(Finding.ENDING if finding is Finding.ENDED else finding, ""),
    )


class Visitors:
    """Connections to the sites that have open attempts, opened when they are first looked at.

    `aclose` closes them. `sights` has what the looks have shown so far, `last_lines` the last lines
    that running attempts were seen to write, by the attempts' ids. `away` has a message for each
    site that could not be asked, and `unread` for each one whose logs could not be read.
    """

    def __init__(
        self, directory: Path, visit: Callable[[str, bool], AbstractAsyncContextManager[Site]]
    ) -> None:
        """Prepare for the workflow in `directory`.

        `visit` opens a site by its name; the user may be asked to log in if its argument says so.
        """
        self._directory = directory
        self._visit = visit
        self._looks: dict[str, SiteLooks] = {}
        self._stack = AsyncExitStack()
        self.aclose = self._stack.aclose
        self.sights: dict[str, Sight] = {}
        self.last_lines: dict[str, str] = {}
        self.away: dict[str, str] = {}
        self.unread: dict[str, str] = {}

    async def read_logs(self, running: Sequence[AttemptRecord]) -> None:
        """Read the end of one running attempt's log at each site, two requests each at most."""
        # Beside a controller, nobody expects to be asked in the middle of a table.
        words = "The output of jobs that run at {} is not shown: {}"
        await self._each(running, SiteLooks.read_log, self.unread, words, may_ask=False)

    async def look(self) -> None:
        """Look at each site that has open attempts, with one request each."""
        records = [r for r in read_history(self._directory / STATE) if r.may_run]
        await self._each(records, SiteLooks.look, self.away, "{} was not asked: {}", may_ask=True)

    async def _each(
        self,
        records: Sequence[AttemptRecord],
        act: Callable[[SiteLooks, Sequence[AttemptRecord]], Awaitable[None]],
        failures: dict[str, str],
        words: str,
        *,
        may_ask: bool,
    ) -> None:
        """Do something at each site that has some of `records`; note why it failed in `words`."""

        async def visit(name: str, there: Sequence[AttemptRecord]) -> None:
            try:
                if name not in self._looks:
                    site = await self._stack.enter_async_context(self._visit(name, may_ask))
                    self._looks[name] = SiteLooks(site, self.sights, self.last_lines)
                await act(self._looks[name], there)
                failures.pop(name, None)
            except MantikError as error:
                failures[name] = words.format(name, error)

        await asyncio.gather(*(visit(*one) for one in self._by_site(records).items()))

    def _by_site(self, records: Iterable[AttemptRecord]) -> dict[str, list[AttemptRecord]]:
        """Return records by their sites, without those that were left behind elsewhere."""
        places = {name: s.place for name, s in read_stored(self._directory / STATE).sites.items()}
        by_site: dict[str, list[AttemptRecord]] = {}
        for record in records:
            if record.place == places.get(record.site):
                by_site.setdefault(record.site, []).append(record)
        return by_site


LOOK_S: Final = 0.5
"""Seconds between two reads of a growing log on this machine."""

_ASKED_PAUSE_S: Final = 2.0
_FIRST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 30.0
"""Seconds between two reads of a log at a site, after news and after a while without any."""

PIECE: Final = 1 << 16
"""Bytes, or characters, that are copied at a time."""


@dataclass(frozen=True)
class JobLog:
    """The log of a job.

    Attributes:
        record: returns the attempt whose log to show now; None if there is none yet.
        visit: opens the site of an attempt.
        is_controlled: returns whether a controller runs, which downloads the log in the end.
        is_over: returns whether nothing can follow any more.
        file: the rule's own log file to show, as a path in the workspace; by default the output.
    """

    workdir: Path
    record: Callable[[], AttemptRecord | None]
    visit: Callable[[AttemptRecord], AbstractAsyncContextManager[Site]]
    is_controlled: Callable[[], bool]
    is_over: Callable[[], bool]
    file: str = ""

    async def copy(self, write: Callable[[str], None], *, follow: bool) -> bool:
        """Write the log as text.

        With `follow`, continue until the job is over, or has ended at its site with no controller
        to fetch its results. If it is tried again meanwhile, the log of the new attempt follows.

        Return whether the job has been submitted, so that it may have had output. Raise MantikError
        if the log is at the site and cannot be read there; with `follow`, that is tried again.
        """
        last, shown, decoder = "", 0, codecs.getincrementaldecoder("utf-8")("replace")
        pause = LOOK_S
        async with AsyncExitStack() as stack:
            site: Site | None = None
            while True:
                over = not follow or self.is_over()  # before reading: the rest is read after it
                record = self.record()
                if record is not None and record.id != last:
                    last, shown = record.id, 0
                before = shown
                if record is None:
                    pass
                elif (log := self._here(record)) is not None:
                    for piece in _rest(log, shown):
                        shown += len(piece)
                        write(decoder.decode(piece))
                elif record.may_run:
                    if site is None:
                        site = await stack.enter_async_context(self.visit(record))
                        pause = _FIRST_PAUSE_S
                    async for piece in self._there(site, record, shown, patient=follow):
                        shown += len(piece)
                        write(decoder.decode(piece))
                    if shown == before and not self.is_controlled():
                        end = await _end(site, record, patient=follow)
                        if end is not None and not self.file and not shown:
                            write(end.decode(errors="replace"))
                        over = over or end is not None
                if over:
                    return bool(last)
                await asyncio.sleep(pause)
                if site is not None:
                    grown = shown > before
                    pause = _FIRST_PAUSE_S if grown else min(1.5 * pause, _LONGEST_PAUSE_S)

    def _here(self, record: AttemptRecord) -> Path | None:
        """Return the log of a job that has ended on this machine; None if it is not here."""
        if not self.file:
            path = self.workdir / record.log
            return path if record.log and path.is_file() else None
        path = local_path(self.file, self.workdir)
        return path if record.outcome and path.is_file() else None

    async def _there(
        self, site: Site, record: AttemptRecord, shown: int, *, patient: bool
    ) -> AsyncIterator[bytes]:
        """Yield what a log has beyond `shown`; if `patient`, nothing if the site does not answer.

        A log that does not exist yet yields nothing, either.
        """
        if self.file and not is_rest_safe(self.file):
            raise UserError(
                "the APIs of sites cannot carry its name",
                where=display_path(self.file),
                do="Wait until the job has ended: its log is downloaded then",
            )
        path = self.file or record.paths.log
        try:
            if self.file and record.started is None:
                # A log of an earlier attempt lies there until the job starts.
                claim = await site.stat(record.paths.claim)
                if claim is None or claim.directory:
                    return
            entry = await site.stat(path)
            if entry is not None and entry.size > shown:
                async for piece in site.get(path, offset=shown, size=entry.size):
                    yield piece
        except SiteNotFound:
            return
        except SiteError:
            if not patient:
                raise


def _rest(log: Path, shown: int) -> Iterator[bytes]:
    with log.open("rb") as file:
        file.seek(shown)
        while piece := file.read(PIECE):
            yield piece


async def _end(site: Site, record: AttemptRecord, *, patient: bool) -> bytes | None:
    """Return the end of the output in an attempt's marker; None if the attempt has not ended."""
    try:
        entries = await site.list(record.paths.attempts)
        codes = dict(filter(None, map(parse_marker_name, entries)))
        if record.id not in codes:
            return None
        content = await read_file(site, record.paths.marker(codes[record.id]))
        with suppress(MarkerInvalid):
            return read_marker(content, attempt_id=record.id, exit_code=codes[record.id]).log
        return b""
    except SiteNotFound:
        return None
    except SiteError:
        if not patient:
            raise
        return None


_ASK_S: Final = 300
"""Seconds that a command beside a job may take."""
_LATE_S: Final = 120
"""Seconds more after which no answer is expected: it starts with the job's next heartbeat."""
_OUTPUT_BYTES: Final = 1 << 20


async def run_beside(site: Site, record: AttemptRecord, command: str) -> tuple[bytes, int]:
    """Run a line of bash on the first node of a running job; return its output and exit code.

    It runs in the workspace, outside the job's container, with the variables that the scheduler
    has given the job. Of a long output the last MiB is returned.

    Raises:
        UserError: the job does not run, or has ended before the command.
        SiteError: the site does not answer.
    """
    folder, name = record.paths.asked, uuid.uuid4().hex
    end_s = time.monotonic() + _ASK_S + _LATE_S
    found: Mapping[str, Entry] = {}
    while f"{name}.code" not in found:
        claim = await site.stat(record.paths.claim)
        ended = await _end(site, record, patient=False) is not None
        if claim is None or claim.directory or ended or time.monotonic() > end_s:
            what = "it has ended, or does not answer" if found else "it does not run now"
            raise UserError(what, where=record.name, do="See what runs with smk-mantik jobs --ask")
        if not found:
            asked = f"exec timeout -k 5 {_ASK_S} bash -c {shlex.quote(command)}\n"
            await site.make_directory(folder)
            await site.put(f"{folder}/{name}.sh", asked.encode())
        await asyncio.sleep(_ASKED_PAUSE_S)
        found = await site.list(folder)
    output, code = (f"{folder}/{name}.{kind}" for kind in ("out", "code"))
    size = found[f"{name}.out"].size
    parts = site.get(output, offset=max(0, size - _OUTPUT_BYTES), size=size)
    return b"".join([part async for part in parts]), int(await read_file(site, code))
