"""Look at all sites of a workflow that no controller watches."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from snakemake_executor_plugin_mantik.common.errors import MantikError, SiteNotFound, UserError
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.connections.connect import find_config, visit_site
from snakemake_executor_plugin_mantik.jobs.paths import parse_marker_name
from snakemake_executor_plugin_mantik.journal import TryRecord, read_history, read_stored
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, Site

from .overview import Sight, present_tries

_SHORTEST_ID = 8
"""Minimum number of characters of a try's id to name it."""

_MOST_NAMED = 20
"""Most jobs that a message lists."""


def is_meant(text: str, record: TryRecord) -> bool:
    """Return whether a text names a try.

    It does by the job's name, its rule, its rule and some of its wildcards (`train sample=a`), an
    id at the site, or at least eight characters of the try's own id.
    """
    ids = {part for job in record.site_jobs for part in (job, job.rstrip("/").rsplit("/", 1)[-1])}
    short = len(text) >= _SHORTEST_ID and record.id.startswith(text)
    return short or text in {record.name, record.rule, *ids} or _has_wildcards(text, record)


def _has_wildcards(text: str, record: TryRecord) -> bool:
    rule, *given = text.replace(",", " ").split() or [""]
    known = record.name.removeprefix(record.rule).replace(",", " ").split()
    return rule == record.rule and bool(given) and set(given) <= set(known)


def find_try(directory: Path, text: str) -> TryRecord:
    """Return the last try of the one job that a text names; `directory` is the state directory.

    A name of a member of a group means the group.

    Raises:
        UserError: it names no job, or several, which are listed.
        JournalError: there is no journal, or it cannot be read.
    """
    records = read_history(directory)
    found = [r for r in records if r.id.startswith(text)] if len(text) >= _SHORTEST_ID else []
    found = found[:1] or [r for r in present_tries(records) if is_meant(text, r)]
    # A job may have the name of a rule whose other jobs have wildcards.
    exact = [record for record in found if text == record.name]
    found = exact or found or read_history(directory, text)[-1:]
    names = dict.fromkeys(record.name for record in found)
    if len(names) == 1:
        return found[-1]
    if not names:
        known = _listed(list(dict.fromkeys(record.name for record in records)))
        raise UserError(
            f"no job is named {text!r}; these were submitted:{known or ' none'}",
            do="Use a name, a rule or an id that smk-mantik jobs shows",
        )
    raise UserError(
        f"{text!r} names {len(names)} jobs:{_listed(list(names))}",
        do="Name one of them, with its wildcards or its id at the site",
    )


def _listed(names: Sequence[str]) -> str:
    shown = "".join(f"\n  {name}" for name in names[:_MOST_NAMED])
    left = len(names) - _MOST_NAMED
    return f"{shown}\n  and {left} more" if left > 0 else shown


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


class Visitors:
    """Connections to the sites that have open tries, opened when they are first looked at.

    Use it as an asynchronous context. `away` has a message for each site that could not be asked,
    and `unread` for each one whose logs could not be read.
    """

    def __init__(self, directory: Path, given: Sequence[str] = ()) -> None:
        """Prepare for the workflow in `directory`.

        `given` are backend configs to use, `[NAME=]FILE`, instead of those that the last run used.
        """
        self._directory = directory
        self._given = given
        self._looks: dict[str, SiteLooks] = {}
        self._stack = AsyncExitStack()
        self.away: dict[str, str] = {}
        self.unread: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    @property
    def sights(self) -> Mapping[str, Sight]:
        """What the looks have shown so far, by the tries' ids."""
        return {i: sight for looks in self._looks.values() for i, sight in looks.sights.items()}

    @property
    def last_lines(self) -> Mapping[str, str]:
        """The last lines that running tries were seen to write, by the tries' ids."""
        return {i: line for looks in self._looks.values() for i, line in looks.last_lines.items()}

    async def read_logs(self, running: Sequence[TryRecord]) -> None:
        """Read the end of one running try's log at each site, with two requests each at most."""
        await asyncio.gather(*(self._read_log(*one) for one in self._by_site(running).items()))

    async def _read_log(self, name: str, records: Sequence[TryRecord]) -> None:
        try:
            # Beside a controller, nobody expects to be asked in the middle of a table.
            await (await self._open(name, may_ask=False)).read_log(records)
            self.unread.pop(name, None)
        except MantikError as error:
            self.unread[name] = f"The output of jobs that run at {name} is not shown: {error}"

    async def look(self) -> None:
        """Look at each site that has open tries, with one request each."""
        records = [r for r in read_history(self._directory / STATE) if r.may_run]
        await asyncio.gather(*(self._look(*one) for one in self._by_site(records).items()))

    def _by_site(self, records: Iterable[TryRecord]) -> dict[str, list[TryRecord]]:
        """Return records by their sites, without those of tries that were left behind elsewhere."""
        places = {name: s.place for name, s in read_stored(self._directory / STATE).sites.items()}
        by_site: dict[str, list[TryRecord]] = {}
        for record in records:
            if record.place == places.get(record.site):
                by_site.setdefault(record.site, []).append(record)
        return by_site

    async def _open(self, name: str, *, may_ask: bool = True) -> SiteLooks:
        if name not in self._looks:
            known = read_stored(self._directory / STATE).sites
            loaded = find_config(known.get(name), name, self._given)
            visit = visit_site(name, loaded, self._directory, may_ask=may_ask)
            self._looks[name] = SiteLooks(await self._stack.enter_async_context(visit))
        return self._looks[name]

    async def _look(self, name: str, records: Sequence[TryRecord]) -> None:
        try:
            await (await self._open(name)).look(records)
            self.away.pop(name, None)
        except MantikError as error:
            self.away[name] = f"{name} was not asked: {error}"
