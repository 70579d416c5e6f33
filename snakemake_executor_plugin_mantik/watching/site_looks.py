"""Look at the open tries of one site, with one request per look, whatever their number.

A listing of a bucket shows which of its tries run or have ended, at any site. Where one request
lists the scheduler's jobs with their reasons (firecREST), the looks alternate between the two. The
logs of running tries are read one at a time.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import SiteNotFound
from snakemake_executor_plugin_mantik.jobs.paths import parse_marker_name
from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, Site
from snakemake_executor_plugin_mantik.watching.overview import Sight

TAIL_BYTES: Final = 4096
"""Bytes at the end of a log in which its last line is looked for."""


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
    """Looks at one site. Call all methods from one event loop."""

    def __init__(self, site: Site) -> None:
        """Prepare; `site` is open."""
        self._site = site
        self._looks = 0
        self._bucket = 0
        self.sights: dict[str, Sight] = {}
        self.last_lines: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._turns: dict[str, int] = {}

    async def look(self, records: Sequence[TryRecord]) -> None:
        """Add to `sights` what one request shows of some open tries of the site.

        Raises:
            SiteError: the site does not answer.
        """
        records = [r for r in records if self._sight(r).exit_code is None]
        if not records:
            return
        states: dict[str, JobState] | None = None
        if self._looks % 2 == 0:
            states = await self._site.glance([i for r in records for i in r.site_jobs])
        self._looks += 1
        if states is None:
            await self._list(records)
            return
        for record in records:
            for site_job in record.site_jobs:
                if site_job in states:
                    self._saw(record, states[site_job])

    async def read_log(self, records: Sequence[TryRecord]) -> None:
        """Set in `last_lines` the last line that one of some running tries has written.

        The tries take turns, since no request brings the logs of several. A call makes two requests
        at most.

        Raises:
            SiteError: the site does not answer.
        """
        if not records:
            return
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
            self.last_lines[record.id] = find_last_line(tail)

    def _sight(self, record: TryRecord) -> Sight:
        return self.sights.get(record.id, Sight())

    def _saw(self, record: TryRecord, state: JobState) -> None:
        known = self._sight(record)
        if state.phase is Phase.WAITING and known.phase is Phase.RUNNING:
            return  # its claim proves more
        self.sights[record.id] = replace(
            known,
            phase=state.phase,
            pending=state.pending,
            started=(state.started if state.phase is Phase.RUNNING else None) or known.started,
            detail=state.detail if state.phase is Phase.ENDED else "",
        )

    async def _list(self, records: Sequence[TryRecord]) -> None:
        """List one bucket; the buckets take turns."""
        buckets = list(dict.fromkeys(record.bucket for record in records))
        bucket = buckets[self._bucket % len(buckets)]
        self._bucket += 1
        of_bucket = [record for record in records if record.bucket == bucket]
        try:
            entries = await self._site.list(of_bucket[0].paths.tries)
        except SiteNotFound:
            return
        codes = dict(filter(None, map(parse_marker_name, entries)))
        for record in of_bucket:
            claim = entries.get(record.id)
            if record.id in codes:
                self.sights[record.id] = Sight(Phase.ENDED, codes[record.id])
            elif claim is not None and not claim.directory:
                self.sights[record.id] = replace(
                    self._sight(record), phase=Phase.RUNNING, pending=""
                )
            elif self._sight(record).phase is Phase.UNKNOWN:
                self.sights[record.id] = Sight(Phase.WAITING)
