"""Learn from a place what the journal does not know of it.

The journal may be new, an older copy of it was put back, or another controller has led: then jobs
of runs that it does not know may run at the place. Three things tell of them. The place has a spare
of its own, like the journal's (`journal.backup`): it lists the attempts that were open and the
remote outputs when it was written last. Each claim holds its attempt's identity. And jobs that
start after the lease with the new term end at once, unless the spare has named them.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from contextlib import suppress
from typing import Any

from ..common.errors import PlaceTaken, SiteError, SiteNotFound, SiteRejected
from ..common.humanize import humanize_count, humanize_duration
from ..jobs.paths import ATTEMPTS, PLACE, AttemptPaths
from ..journal import AttemptRecord, AttemptState, Journal, decode_basis
from ..sites.base import Entry, Site
from .adopt import named_paths
from .evidence import find_claims, find_markers, list_claims, read_beginning, read_identity
from .site_retry import SiteRetry

_SPARE = "spare."
"""Prefix of the names of a place's spares; the number follows that was taken for it."""
_LOOK_S = 3.0
"""Seconds between two looks at a claim of which a part is seen."""
_GROWS_S = 30.0
"""Seconds within which the claim of a job that runs grows."""
_LOOK_PREFIX = "look."
"""Prefix of the name of a file that a certain listing shows."""
_LOOKS = 40
"""Most listings until one shows it."""
_PAUSE_S = 60.0
"""Least seconds between two spares of a place."""
_BYTES_PER_S = 20_000
"""Most bytes per second that a place's spares take on average."""
_MOST_NAMED = 5

_Look = Callable[[str], Awaitable[Mapping[str, Entry]]]


def spare_path(number: int) -> str:
    """Return the path of a place's spare, for which a number was taken."""
    return f"{PLACE}/{_SPARE}{number}"


def number_of_spare(name: str) -> int:
    """Return the number in the name of a place's spare; 0 for other files."""
    number = name.removeprefix(_SPARE)
    return int(number) if number != name and number.isdecimal() else 0


class CatchingUp:
    """What one place knows, for a journal that knows less."""

    def __init__(
        self, site: Site, retry: SiteRetry, journal: Journal, place: str, seen_s: float
    ) -> None:
        """Prepare; a file that a job has written may be seen `seen_s` seconds later."""
        self._site = site
        self._retry = retry
        self._journal = journal
        self._place = place
        self._seen_s = max(seen_s, _GROWS_S)

    async def find_unknown(self) -> list[AttemptPaths]:
        """Return attempts that have started there and that this journal has not submitted.

        A wrong answer of the site may hide some.
        """
        return self._unknown(await self._started(self._list))

    async def _started(self, look: _Look) -> dict[AttemptPaths, tuple[int | None, int]]:
        """Return the attempts that have started there: exit codes, if any, and sizes of claims."""
        found: dict[AttemptPaths, tuple[int | None, int]] = {}
        for bucket in sorted(int(name) for name in await look(ATTEMPTS) if name.isdecimal()):
            entries = await look(f"{ATTEMPTS}/{bucket}")
            claims, markers = find_claims(entries), find_markers(entries)
            for attempt_id in sorted(claims.keys() | markers.keys()):
                size = claims[attempt_id].size if attempt_id in claims else -1
                found[AttemptPaths(bucket, attempt_id)] = (
                    markers.get(attempt_id, (None, None))[0],
                    size,
                )
        return found

    def _unknown(
        self, started: Iterable[AttemptPaths], grown: Container[AttemptPaths] = ()
    ) -> list[AttemptPaths]:
        """Return those that another controller has submitted, or goes on with.

        It may have a copy of a plan that this journal has made, too. An attempt that has `grown`
        runs, although it may be over for this journal.
        """
        records = {r.id: r for r in self._journal.attempts(paths.attempt_id for paths in started)}

        def is_unknown(paths: AttemptPaths) -> bool:
            record = records.get(paths.attempt_id)
            if record is None or record.state is AttemptState.PLANNED:
                return True
            return paths in grown and not record.may_run

        return [paths for paths in started if is_unknown(paths)]

    async def read_spare(self, names: Iterable[str]) -> None:
        """Learn what the newest of the place's spares knows; `names` are its directory's."""
        content = b""
        if number := max(map(number_of_spare, names), default=0):
            try:
                content = await self._retry.found(lambda: self._read(spare_path(number)))
            except SiteNotFound:  # whoever wrote a newer one has removed it
                content = b""
        if damaged := self._journal.catch_up(self._place, content):
            self._retry.note(damaged)

    async def take_up(self, where: str) -> str:
        """Learn of the attempts that have started at the place, and name them to the user.

        `where` describes the place.

        Raises:
            PlaceTaken: a job runs there that does not say which one it is.
        """
        self._retry.note(
            f"the local journal does not know what was done in this workspace last; looking for"
            f" jobs that run there, for {humanize_duration(self._seen_s)}"
        )
        before = await self._started(self._list_surely)
        await asyncio.sleep(self._seen_s)
        known = {r.id for r in self._journal.all_open_attempts() if r.place == self._place}
        now, found = await self._started(self._list_surely), []
        grown = {paths for paths in now if before.get(paths) != now[paths]}
        for paths in self._unknown(now, grown):
            if code := now[paths][0]:
                continue  # it has failed, which nobody was told
            facts = await self._identity(paths, where)
            if facts is not None:
                end = {"state": AttemptState.ENDED, "outcome": "succeeded"} if code == 0 else {}
                place = {"place": self._place, "bucket": paths.bucket, "id": paths.attempt_id}
                # It may use anything; that it uses these is certain.
                uses = {"uses": [".", *named_paths(decode_basis(facts["made_of"]))]}
                found.append({**facts, **place, **uses, **end})
        records = self._journal.find_out(found)
        records += [r for r in self._journal.all_open_attempts() if r.id in known and r.may_run]
        return _message(where, records)

    async def _identity(self, paths: AttemptPaths, where: str) -> Mapping[str, Any] | None:
        """Return what a claim says of its attempt; None if nothing and its job does not run.

        A claim is complete before it has its name: one that is not is seen in part.

        Raises:
            PlaceTaken: its job runs.
        """
        clock = asyncio.get_running_loop().time
        end, sizes = clock() + self._seen_s, set[int]()
        while clock() < end:
            try:
                content = await self._retry.found(lambda: self._read(paths.claim), at_once=True)
            except SiteNotFound:  # its job was not known, and has ended
                return None
            if (facts := read_identity(content)) is not None:
                return facts
            sizes.add(len(content))
            await asyncio.sleep(_LOOK_S)
        if len(sizes) > 1:
            raise PlaceTaken(
                f"a job runs there that the local journal does not know ({paths.attempt_id})",
                where=where,
                do="Start again when it has ended",
            )
        return None

    async def _read(self, path: str) -> bytes:
        return await read_beginning(self._site, path)

    async def _list(self, directory: str) -> Mapping[str, Entry]:
        return await self._retry(lambda: list_claims(self._site, self._retry, directory))

    async def _list_surely(self, directory: str) -> Mapping[str, Entry]:
        """List a directory in which something lies that was just put there.

        A site may say for a moment that a directory is empty, or not there.

        Raises:
            SiteRejected: it does so all the time.
        """
        name = f"{_LOOK_PREFIX}{self._journal.instance}"
        path = f"{directory}/{name}"
        for _ in range(_LOOKS):
            await self._retry(lambda: self._site.put(path, b"?\n"))
            entries = await self._list(directory)
            if name in entries:
                await self._retry(lambda: self._site.remove(path))
                return entries
            await asyncio.sleep(_LOOK_S)
        raise SiteRejected(
            f"the site does not list what lies in {directory}",
            where=f"site {self._site.name}",
            do="Start again when it does",
        )


class PlaceSpare:
    """The place's own spare: written when something has changed, and at the end of a run."""

    def __init__(
        self,
        site: Site,
        journal: Journal,
        place: str,
        retry: SiteRetry,
        assure: Callable[[], Awaitable[None]],
        *,
        stale: bool = False,
    ) -> None:
        """Make it; `assure` checks that this controller still leads the place.

        The spare there is `stale` if it may name jobs that this controller does not know, and that
        must never start: it could not be read, or only in part.
        """
        self._site = site
        self._journal = journal
        self._place = place
        self._retry = retry
        self._assure = assure
        self._writing = asyncio.Lock()
        self._noted = -1
        self._written: bytes | None = None
        self._clock = asyncio.get_running_loop().time
        # A run that opens the place takes a number.
        self._numbered = -math.inf if stale else self._clock()

    @property
    def _pause_s(self) -> float:
        # A long one is written so seldom that it costs the site little.
        return max(_PAUSE_S, len(self._written or b"") / _BYTES_PER_S)

    async def keep(self) -> None:
        """Write it again and again, and notice if another controller leads, until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            with suppress(SiteError, PlaceTaken):
                await self._assure()
                # A submission may have had it written meanwhile: then it is not even removed, since
                # `renew` relies on its number.
                await asyncio.sleep(max(0.0, self._numbered + self._pause_s - self._clock()))
                if self._clock() - self._numbered >= self._pause_s:
                    await self.write()

    async def renew(self) -> None:
        """Write it before a submission, unless it, or the lease, got its number a short time ago.

        A copy of the journal from before that, put back later, shows by its number that it does not
        know the job.

        Raises:
            SiteError, PlaceTaken: see `write`.
        """
        async with self._writing:
            if self._clock() - self._numbered >= self._pause_s:
                await self._write(self._journal.spare_of(self._place) or b"\n")

    async def write(self) -> None:
        """Write it if the journal has noted something since.

        Raises:
            SiteError: the site does not answer, or refuses.
            PlaceTaken: another controller leads the place.
        """
        async with self._writing:
            if self._noted == self._journal.noted:
                return
            noted, content = self._journal.noted, self._journal.spare_of(self._place)
            if content != self._written:  # else what was noted is about another place
                await self._write(content)
            self._noted = noted

    async def _write(self, content: bytes) -> None:
        await self._assure()
        names = await self._retry.found(lambda: self._site.list(PLACE), at_once=True)
        before = [name for name in names if number_of_spare(name)]
        if content:
            number = max([self._journal.number(self._place), *map(number_of_spare, names)]) + 1
            self._journal.take_number(self._place, number)
            await self._site.put(spare_path(number), content)
            self._numbered = self._clock()
        for name in before:
            await self._site.remove(f"{PLACE}/{name}")
        self._written = content


def _message(where: str, records: list[AttemptRecord]) -> str:
    running = [record.name for record in records if record.may_run]
    more = f" and {len(running) - _MOST_NAMED} more" if len(running) > _MOST_NAMED else ""
    told = [
        f"Runs that the local journal does not know have used {where}: it is new, an older copy of"
        " it was put back, or another controller has led there."
    ]
    if running:
        told.append(f"Their jobs are followed: {', '.join(running[:_MOST_NAMED])}{more}.")
    if ended := len(records) - len(running):
        told.append(f"{humanize_count(ended, 'job', 'jobs')} of theirs succeeded meanwhile.")
    told.append("What still waits in a queue and is not named here ends without doing anything.")
    return " ".join(told)
