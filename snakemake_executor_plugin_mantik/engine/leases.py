"""Decide who uses a workspace: one workflow owns it, and one controller of that workflow leads it.

Each leading controller has a lease in `.mantik/place/`: a file whose name contains all that the
rule below needs, and whose content describes the controller to people. No API can create a file
exclusively, so a controller writes its lease and lists the directory; then one rule decides, which
all controllers compute alike (`Leases._settle`). A controller is identified by its journal: the
runs of a journal keep the lease from one to the next, and the journal's lock allows one run at a
time.

Each run takes the next number at the place, which is in its lease and in the journal. A journal
whose number is less than the place's does not know what was done there since: it is new, or an
older copy was put back. Then it learns of that from the place (`engine.catch_up`).

Another controller of the same workflow has a copy of the journal. It is refused, since only the
user can know that the one that led the place has ended, and says so with `smk-mantik unlock`: of
that very lease. Nobody is asked if the leader's journal lay in the same directory, which is locked:
it is lost. The new lease has a greater term. Jobs read the terms, too: a job that a former
controller submitted starts only if the present one knows it.
"""

import asyncio
import math
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ..common.errors import JournalError, PlaceTaken, SiteError, SiteRejected, printable
from ..common.humanize import humanize_duration
from ..jobs.paths import ATTEMPTS, PLACE
from ..journal import Journal
from ..sites.base import Entry, Site
from ..staging.transfers import read_file
from .catch_up import CatchingUp, number_of_spare
from .site_retry import SiteRetry

_FIRST_LOOK_S = 60.0
"""Seconds that a site has to answer when a run starts; later a run waits as long as it takes."""
_TRUSTED_S = 90.0
"""Seconds for which a controller believes that it leads, without looking. What it submits after
another one has taken over does not start, whenever it looks."""
_LOOK_S = 3.0
"""Seconds between two listings while another controller steps back."""
_LOOKS = 5
"""Listings for which a controller waits for another one to step back, if both began at once."""
_SEEN_S = 120.0
"""Seconds that a site's listings may take to show a lease that was written."""
_TEXT_BYTES = 4096

_LEASE = re.compile(
    r"([0-9]{1,9})\.([0-9a-f]{1,64})\.([0-9a-f]{1,64})\.([0-9a-f]{1,64})\.([0-9]{1,9})"
)
_PROCESS = ", process "
"""What comes after the directory and the host in what a controller says of itself."""
_SEAT = re.compile(r"^seat=([0-9a-f]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Lease:
    """A controller's right to a place.

    Attributes:
        term: how often the place has been taken over, plus one.
        workflow: the workflow that owns it (`Journal.workflow`).
        place: the identity of the place.
        instance: the controller (`Journal.instance`).
        number: of the controller's run: how many numbers were taken at the place before, plus one.
    """

    term: int
    workflow: str
    place: str
    instance: str
    number: int = 0

    @property
    def path(self) -> str:
        """Return the path of its file in the workspace."""
        parts = (self.term, self.workflow, self.place, self.instance, self.number)
        return f"{PLACE}/{'.'.join(map(str, parts))}"

    @classmethod
    def of(cls, name: str) -> "Lease | None":
        """Parse the name of a lease's file; return None for other files."""
        if (match := _LEASE.fullmatch(name)) is None:
            return None
        return cls(int(match[1]), match[2], match[3], match[4], int(match[5]))


class Leases:
    """The leases at one workspace as one controller sees them, and its lead of the place.

    Attributes:
        lease: its own, once it has taken it.
        deposed: the error to raise once another controller has taken over; None before.
        was_behind: whether the journal did not know what was done at the place last.
    """

    lease: Lease
    was_behind = False

    def __init__(
        self,
        site: Site,
        workspace: str,
        journal: Journal,
        retry: SiteRetry,
        about: str,
        *,
        seen_s: float = 0.0,
    ) -> None:
        """Prepare access to the leases of a workspace.

        `workspace` is an absolute path, for messages; `about` describes this controller to others
        that find its lease; `seen_s` is how much later a file may be seen that a job has written.
        """
        self._site = site
        self._where = f"site {site.name}, {workspace}"
        self._journal = journal
        self._retry = retry
        self._about = about
        self._seen_s = seen_s
        self.deposed: PlaceTaken | None = None
        self._clock = asyncio.get_running_loop().time
        self._seen = self._clock()
        self._looking = asyncio.Lock()
        self._on_deposed: list[Callable[[PlaceTaken], None]] = []

    async def _look(self) -> tuple[list[Lease], dict[str, Entry]]:
        """Return all leases, and all entries of their directory."""
        entries = await self._list(PLACE)
        return [lease for name in entries if (lease := Lease.of(name))], entries

    async def take(
        self, known: str, mine: Callable[[str], Sequence[str]], held: Collection[Lease] = ()
    ) -> tuple[Lease, str]:
        """Lead the place; return the lease and a message for the user, which may be empty.

        Args:
            known: the place's identity according to the journal; empty if it has no record of the
                workspace.
            mine: returns the ids of attempts that were submitted to a place and are open according
                to the journal.
            held: the leases that this process has already.

        Raises:
            PlaceTaken: another workflow owns it, another controller leads it, or attempts are there
                that this journal does not know.
            TimeoutError: the site does not answer.
        """
        async with asyncio.timeout(_FIRST_LOOK_S):
            leases, entries = await self._look()
        ours = [lease for lease in leases if lease.workflow == self._journal.workflow]
        if leases and not ours:
            raise await self._foreign(max(leases, key=_rank))
        if not ours:
            if same := [lease for lease in held if lease.place == known]:
                await self._settle(same[0], leads=True)
                return same[0], ""
            first = await self._take_first(known, entries, mine)
            return first or await self.take(known, mine, held)
        last = max(ours, key=_rank)
        if last in held:  # a site of another name sees the same place
            return last, ""
        if last.instance != self._journal.instance:
            await self._may_follow(last)
        taken, message = await self._take_next(last, entries, mine)
        for lease in ours:
            await self._remove(lease.path)
        return taken, message

    async def _take_first(
        self, known: str, entries: Collection[str], mine: Callable[[str], Sequence[str]]
    ) -> tuple[Lease, str] | None:
        """Lead a place that has no lease; see `take`. Return None if it has one, after all.

        A site may say for a moment that a directory is empty, or not there. Claims are younger than
        a lease, so a purge may have left those of another controller.
        """
        journal = self._journal
        new = Lease(
            1, journal.workflow, known or _new_identity(), journal.instance, journal.number(known)
        )
        if await self._buckets(journal.buckets(known)):
            if not known:
                raise PlaceTaken(
                    "another workflow uses this workspace, or an earlier run of this one whose"
                    " journal is no longer here; its jobs may still write there",
                    where=self._where,
                    do=f"Set Site: Workspace to another path; or, once no job of it runs, remove"
                    f" {ATTEMPTS} in it",
                )
            await self._may_follow(new)  # the name of no other's lease, and of none after this
            new = replace(new, term=latest_term(), instance="")  # nobody knows the term any more
            return await self._take_next(new, entries, mine)
        taken, leases = await self._settle_next(new, entries)
        if any(o.workflow == journal.workflow and o != taken for o in leases):
            await self._remove(taken.path)
            return None
        catching_up = self._catching_up(new.place)
        self.was_behind = unknown = bool(known and await catching_up.find_unknown())
        return taken, await catching_up.take_up(self._where) if unknown else ""

    async def _may_follow(self, last: Lease) -> None:
        """Check that the controller with a lease, or with one that was removed, has ended.

        Raises:
            PlaceTaken: it may go on.
        """
        if not self._journal.is_unlocked(last.place, last.path):
            _, seat = await self._description(last)
            if seat != self._journal.seat:  # nobody else can lead from here, which is locked
                raise await self._led(last)

    async def _take_next(
        self, last: Lease, entries: Collection[str], mine: Callable[[str], Sequence[str]]
    ) -> tuple[Lease, str]:
        """Follow the holder of a lease, which may be an earlier run of this journal; see `take`."""
        journal, own = self._journal, last.instance == self._journal.instance
        new = replace(last, instance=journal.instance)
        numbers = [last.number, *map(number_of_spare, entries)]
        catching_up = self._catching_up(new.place)
        self.was_behind = behind = (
            not own
            or max(numbers) > journal.number(new.place)
            or bool(await catching_up.find_unknown())
        )
        if not behind and not journal.was_restored(new.place):
            taken, _ = await self._settle_next(new, entries, alone=True)
            return taken, ""
        # What starts under the new term ends at once unless it is known.
        new = replace(new, term=last.term + 1)
        journal.doubt(new.place)
        if behind:
            await catching_up.read_spare(entries)
        if ids := mine(new.place):
            content = "".join(f"{attempt_id}\n" for attempt_id in ids).encode()
            await self._retry(lambda: self._site.put(f"{PLACE}/known.{new.term}", content))
        taken, _ = await self._settle_next(new, entries)
        return taken, await catching_up.take_up(self._where) if behind else ""

    def _catching_up(self, place: str) -> CatchingUp:
        return CatchingUp(self._site, self._retry, self._journal, place, self._seen_s)

    async def _settle_next(
        self, lease: Lease, entries: Iterable[str], *, alone: bool = False
    ) -> tuple[Lease, list[Lease]]:
        """Take the next number at a place, and settle for the lease; return all leases, too.

        The journal has the number first: if this fails, it is the one that knows more. If this
        controller is `alone`, as it has a lease of this term there already, it looks for nobody.
        """
        numbers = [lease.number, self._journal.number(lease.place), *map(number_of_spare, entries)]
        lease = replace(lease, number=max(numbers) + 1)
        self._journal.take_number(lease.place, lease.number)
        return lease, await self._settle(lease, alone=alone)

    async def _settle(
        self, mine: Lease, *, alone: bool = False, leads: bool = False
    ) -> list[Lease]:
        """Write a lease and check that no other controller has done the same, unless it is `alone`.

        Return all leases there.

        Each controller writes first and then lists, so that at least one of two sees the other. In
        the same term, the one with the smaller instance waits for the other to step back; the other
        does so unless it has not seen the first. One that `leads` already waits longer than any
        that comes: a listing may have hidden its lease from both for a moment.

        Raises:
            PlaceTaken: another controller holds the place.
            SiteRejected: the site lists no file that is written there, so that nobody can lead.
        """
        await self._write(mine)
        since, looks = self._clock(), 0
        while True:
            leases, _ = await self._look()
            others = [o for o in leases if o.instance != mine.instance and o.term >= mine.term]
            if alone:
                others = []
            if not others and mine in leases:
                self._seen = self._clock()
                return leases
            looks = looks + 1 if others else 0
            most = 1 if any(_rank(other) < _rank(mine) for other in others) else _LOOKS
            if looks >= most + (_LOOKS if leads else 0):
                break
            if not others and self._clock() - since > _SEEN_S:
                raise SiteRejected(
                    f"the site confirms files in {PLACE} but has not listed them for"
                    f" {humanize_duration(_SEEN_S)}",
                    where=self._where,
                    do="Set Site: Workspace to a path on another file system",
                )
            if mine not in leases:  # the site confirmed the file, and shows it late or lost it
                await self._write(mine)
            await asyncio.sleep(_LOOK_S)
        await self._remove(mine.path)
        last = max(others, key=_rank)
        raise await (self._led(last) if last.workflow == mine.workflow else self._foreign(last))

    async def _buckets(self, known: Collection[int] = ()) -> list[str]:
        entries = await self._list(ATTEMPTS)
        names = [entry.name for entry in entries.values() if entry.directory]
        return [f"{ATTEMPTS}/{name}" for name in names if name not in map(str, known)]

    async def _list(self, directory: str) -> dict[str, Entry]:
        return await self._retry.listed(lambda: self._site.list(directory))

    async def _write(self, lease: Lease) -> None:
        content = f"{self._about}\nseat={self._journal.seat}\n".encode()
        await self._retry(lambda: self._site.put(lease.path, content))

    async def _remove(self, path: str) -> None:
        await self._retry(lambda: self._site.remove(path))

    async def _description(self, lease: Lease) -> tuple[str, str]:
        """Return how the holder of a lease describes itself, or that its lease cannot be read.

        The second text names the directory of its journal; it is empty if it is unknown.
        """
        try:
            content = await self._retry(lambda: read_file(self._site, lease.path, _TEXT_BYTES))
        except SiteError:
            return "its lease is gone or cannot be read", ""
        text = content.decode(errors="replace")
        seat = _SEAT.search(text)
        about = " ".join(printable(_SEAT.sub("", text)).split())[:300] or "?"
        return about, seat[1] if seat is not None else ""

    async def _foreign(self, lease: Lease) -> PlaceTaken:
        return PlaceTaken(
            f"another workflow owns this workspace: {(await self._description(lease))[0]}",
            where=self._where,
            do="Set Site: Workspace to another path; or type smk-mantik clean there, which removes"
            f" that workflow's workspace; or, if that workflow is gone, remove {PLACE} in it",
        )

    async def _led(self, lease: Lease) -> PlaceTaken:
        """Return the error saying that another controller of the same workflow leads.

        The journal notes whose lease it is, for `smk-mantik unlock`.
        """
        about, _ = await self._description(lease)
        with suppress(JournalError):  # the next run is refused, too
            self._journal.lock(lease.place, lease.path, f"{self._where}: {about}")
        copy, do = "", "Continue there; or make certain that it has ended"
        if about.partition(_PROCESS)[0] == printable(self._about).partition(_PROCESS)[0]:
            copy, do = ", in an earlier copy of this directory", "Make certain that it has ended"
        return PlaceTaken(
            f"another controller of this workflow leads this workspace: {about}{copy}",
            where=self._where,
            do=f"{do}, type smk-mantik unlock here, and start again. Jobs go on meanwhile",
        )

    # From `take` to the end of the run

    @property
    def term(self) -> int:
        """Return the term of the lease, which job scripts contain."""
        return self.lease.term

    def on_deposed(self, act: Callable[[PlaceTaken], None]) -> None:
        """Register `act` to be called if another controller takes over."""
        self._on_deposed.append(act)

    def doubt(self) -> None:
        """Make the next `assure` list the leases, after something unexpected."""
        self._seen = -math.inf

    async def assure(self) -> None:
        """Check that this controller leads; without an answer of the site, conclude nothing.

        This takes a request only if the last look was a while ago.

        Raises:
            PlaceTaken: another controller has taken over.
        """
        async with self._looking:  # of many callers one looks
            if self.deposed is None and self._clock() - self._seen > _TRUSTED_S:
                self._seen = self._clock()
                try:
                    await self._check()
                except BaseException as error:
                    self.doubt()
                    if not isinstance(error, SiteError):  # the caller's next request reports it
                        raise
        if self.deposed is not None:
            raise self.deposed

    async def _check(self) -> None:
        leases, _ = await self._look()
        last = max((o for o in leases if o.workflow == self.lease.workflow),
                   key=_rank, default=self.lease)  # fmt: skip
        own = [lease for lease in leases if lease.instance == self.lease.instance]
        if last.term > self.lease.term or any(o.number > self.lease.number for o in own):
            self._depose(await self._led(last))
        elif not own:
            try:  # our lease was purged, and another controller may have come
                await self._settle(self.lease, leads=True)
            except PlaceTaken as error:
                self._depose(error)

    def _depose(self, error: PlaceTaken) -> None:
        self.deposed = error
        for act in self._on_deposed:
            act(error)


def latest_term() -> int:
    """Return a term that no place has had: there were fewer takeovers than minutes."""
    return int(time.time() / 60)


def _new_identity() -> str:
    return uuid.uuid4().hex[:16]


def _rank(lease: Lease) -> tuple[int, str, int]:
    return lease.term, lease.instance, lease.number
