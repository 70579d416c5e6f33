"""Who may use a workspace: one workflow owns it, and one controller of that workflow leads it.

In `.mantik/place/` each controller that leads has a lease: a file whose name tells all. No API can
create a file exclusively, so a controller writes its own, lists the directory, and one rule decides
that all compute alike (`Leases.settle`). The journal is the controller here: its runs keep the
lease from one to the next, and its lock lets one of them be at a time.

Another controller of the same workflow has a copy of the journal. It asks, by a file in the
directories that a leader lists anyway; a leader that lives answers. Who gets no answer takes over,
and its lease has a greater term. Jobs read the terms as well: one that a former controller sent
starts only if the present one knows it.
"""

import asyncio
import math
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from snakemake_executor_plugin_mantik.common.errors import (
    PlaceTaken,
    SiteError,
    SiteNotFound,
    printable,
)
from snakemake_executor_plugin_mantik.common.humanize import humanize_duration
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.jobs.paths import PLACE, TRIES, parse_marker_name
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.sites.base import Entry, Site
from snakemake_executor_plugin_mantik.staging.transfers import read_file

ASK_PREFIX, HERE_PREFIX = "ask.", "here."
"""How the names of a question to the leader, and of its answer, begin; who asks follows."""
_FIRST_LOOK_S = 60.0
"""Seconds that a site has to answer when a run starts; later a run waits as long as it takes."""
_LOOK_S = 3.0
"""Seconds between two looks for an answer."""
_LOOKS = 5
"""Looks that a controller takes for another one to step back, if both came at the same moment."""
_TEXT_BYTES = 4096

_LEASE = re.compile(
    r"([0-9]{1,9})\.([0-9a-f]{1,64})\.([0-9a-f]{1,64})\.([0-9a-f]{1,64})\.([0-9]{1,9})"
)
_TRY = re.compile(r"[0-9a-f-]{36}")


@dataclass(frozen=True)
class Lease:
    """A controller's right to a place.

    Attributes:
        term: how often the place has been taken over, plus one.
        workflow: the workflow that owns it (`Journal.workflow`).
        place: the identity of the place.
        instance: the controller (`Journal.instance`).
        wait_s: seconds within which the controller answers a question, if it lives.
    """

    term: int
    workflow: str
    place: str
    instance: str
    wait_s: int

    @property
    def path(self) -> str:
        """Its file in the workspace."""
        parts = (self.term, self.workflow, self.place, self.instance, self.wait_s)
        return f"{PLACE}/{'.'.join(map(str, parts))}"

    @classmethod
    def of(cls, name: str) -> "Lease | None":
        """The lease that a file's name tells."""
        if (match := _LEASE.fullmatch(name)) is None:
            return None
        return cls(int(match[1]), match[2], match[3], match[4], int(match[5]))


class Leases:
    """The leases at one workspace, as one controller sees them."""

    def __init__(
        self, site: Site, workspace: str, journal: Journal, retry: SiteRetry, about: str
    ) -> None:
        """Make it.

        Args:
            site: opened.
            workspace: its absolute path, for messages.
            journal: of the workflow: the controller.
            retry: repeats what the site does not answer.
            about: who and where we are, for whoever finds our lease.
        """
        self._site = site
        self._where = f"site {site.name}, {workspace}"
        self._journal = journal
        self._retry = retry
        self._about = about

    async def look(self) -> tuple[list[Lease], dict[str, Entry]]:
        """All leases, and all entries of their directory."""
        entries = await self._list(PLACE)
        return [lease for name in entries if (lease := Lease.of(name))], entries

    async def take(
        self, wait_s: int, known: str, mine: Sequence[str], *, fresh: bool
    ) -> tuple[Lease, str]:
        """Lead the place, and what the user is to be told of it; empty if nothing.

        Args:
            wait_s: seconds within which this controller sees a question.
            known: the identity that the journal has for the workspace; empty if it knows none.
            mine: the tries that the journal knows to be open there.
            fresh: whether the journal knows nothing of the workspace.

        Raises:
            PlaceTaken: another workflow owns it, or another controller leads it.
            TimeoutError: the site does not answer.
        """
        journal = self._journal
        async with asyncio.timeout(_FIRST_LOOK_S):
            leases, _ = await self.look()
        ours = [lease for lease in leases if lease.workflow == journal.workflow]
        foreign = [lease for lease in leases if lease.workflow != journal.workflow]
        if foreign and not ours:
            raise await self._foreign(max(foreign, key=_rank))
        new = Lease(1, journal.workflow, known or uuid.uuid4().hex[:16], journal.instance, wait_s)
        if not ours:
            if fresh:
                await self._unused()
            elif known and await self._buckets(journal.buckets(known)):
                # Claims are younger than a lease, so a sweep may have left them.
                await self._ask(new, "its lease was removed from there")
            return await self.settle(new), ""
        last = max(ours, key=_rank)
        new = replace(new, term=last.term, place=last.place)
        if last.instance == journal.instance:
            if (
                foreign and not known
            ):  # of two that came at once; which one stepped back is not told
                return await self.settle(last), ""
            if wait_s > last.wait_s:
                await self._write(new)
                await self._remove(last.path)
            return max(last, new, key=lambda lease: lease.wait_s), ""
        about = await self._told(last)
        replaced = last.instance == journal.predecessor
        if not replaced:
            await self._ask(last, about)
        new = replace(new, term=last.term + 1)
        if mine:
            content = "".join(f"{try_id}\n" for try_id in mine).encode()
            await self._retry(lambda: self._site.put(f"{PLACE}/known.{new.term}", content))
        await self.settle(new)
        for lease in ours:
            await self._remove(lease.path)
        await self._remove(f"{PLACE}/{ASK_PREFIX}{journal.instance}")
        if replaced:
            return new, ""
        return new, (
            f"Another controller of this workflow ({about}) has led {self._where} and does not"
            f" answer: this one leads it from now on. Jobs that the other one sent and that are"
            " not known here do not start any more."
        )

    async def _unused(self) -> None:
        """See to it that no jobs that no journal answers for may write into a workspace.

        Raises:
            PlaceTaken: there are claims of jobs.
        """
        if await self._buckets():
            raise PlaceTaken(
                "another workflow uses this workspace, or an earlier run of this one whose journal"
                " is no longer here; its jobs may still write there",
                where=self._where,
                do=f"Set Site: Workspace to another path; or, once no job of it runs, remove"
                f" {TRIES} in it",
            )

    async def settle(self, mine: Lease) -> Lease:
        """Write a lease and see to it that nobody else has done the same.

        Each writes first and lists then: of two, one at least sees the other. The one with the
        smaller name waits for the other to step back; the other does, or has not seen the first.

        Raises:
            PlaceTaken: somebody else has.
        """
        await self._write(mine)
        for look in range(_LOOKS):
            leases, _ = await self.look()
            others = [o for o in leases if o.instance != mine.instance and o.term >= mine.term]
            if not others and mine in leases:
                return mine
            if any(_rank(other) < _rank(mine) for other in others):
                break
            if mine not in leases:  # the site said that it was there, and lost it
                await self._write(mine)
            if look < _LOOKS - 1:
                await asyncio.sleep(_LOOK_S)
        if not others:
            return mine
        await self._remove(mine.path)
        last = max(others, key=_rank)
        raise await (self._led(last) if last.workflow == mine.workflow else self._foreign(last))

    async def _ask(self, last: Lease, about: str) -> None:
        """Ask a leader whether it lives, and return when it has not answered for long enough.

        The question stays in the buckets: a leader that comes back finds it.

        Raises:
            PlaceTaken: it lives, or jobs go on that it has sent and that the journal does not know.
        """
        me = self._journal.instance
        clock = asyncio.get_running_loop().time
        deadline = math.inf
        asked: set[str] = set()
        sizes: dict[str, int] = {}
        self._retry.note(
            f"another controller of this workflow ({about}) led it last; it is asked whether it"
            f" still does, which takes up to {humanize_duration(last.wait_s)}"
        )
        try:
            growing = False
            while True:
                begun = clock()
                for directory in [PLACE, *await self._buckets()]:
                    if directory not in asked:
                        path = f"{directory}/{ASK_PREFIX}{me}"
                        await self._retry(lambda path=path: self._site.put(path, b"?\n"))  # type: ignore[misc]
                        asked.add(directory)
                    if directory != PLACE:
                        growing = await self._grows(directory, sizes) or growing
                leases, entries = await self.look()
                if f"{HERE_PREFIX}{me}" in entries or any(o.term > last.term for o in leases):
                    raise await self._led(last)
                # A slow site answers few looks: the last one begins when the time is over.
                deadline = min(deadline, clock() + last.wait_s)
                if begun < deadline:
                    await asyncio.sleep(min(_LOOK_S, max(deadline - clock(), 0.0)))
                elif not growing:
                    return
                else:
                    raise PlaceTaken(
                        "jobs run there that another controller of this workflow has sent"
                        f" ({about}), and of which this one does not know",
                        where=self._where,
                        do="Go on with that one; or start again when they have ended",
                    )
        except PlaceTaken:
            for directory in asked:
                await self._remove(f"{directory}/{ASK_PREFIX}{me}")
            await self._remove(f"{PLACE}/{HERE_PREFIX}{me}")
            raise

    async def _buckets(self, known: Collection[int] = ()) -> list[str]:
        """The directories of tries, without those that are `known`."""
        entries = await self._list(TRIES)
        names = [entry.name for entry in entries.values() if entry.directory]
        return [f"{TRIES}/{name}" for name in names if name not in map(str, known)]

    async def _grows(self, directory: str, sizes: dict[str, int]) -> bool:
        """Whether a job that the journal does not know shows a heartbeat since the last look."""
        entries = await self._list(directory)
        over = {marker[0] for name in entries if (marker := parse_marker_name(name)) is not None}
        names = [
            n for n, e in entries.items() if _TRY.fullmatch(n) and not e.directory and n not in over
        ]
        known = {record.id for record in self._journal.tries(names)}
        growing = False
        for name in names:
            size = entries[name].size
            growing = growing or (name not in known and sizes.get(name, size) != size)
            sizes[name] = size
        return growing

    async def answer(self, asker: str, directory: str) -> None:
        """Tell a controller that asks that this one leads."""
        await self._site.put(f"{PLACE}/{HERE_PREFIX}{asker}", b"!\n")
        await self._site.remove(f"{directory}/{ASK_PREFIX}{asker}")

    async def _list(self, directory: str) -> dict[str, Entry]:
        try:
            return await self._retry.found(lambda: self._site.list(directory), at_once=True)
        except SiteNotFound:
            return {}

    async def _write(self, lease: Lease) -> None:
        await self._retry(lambda: self._site.put(lease.path, f"{self._about}\n".encode()))

    async def _remove(self, path: str) -> None:
        await self._retry(lambda: self._site.remove(path))

    async def _told(self, lease: Lease) -> str:
        """Who has a lease, in its own words."""
        try:
            content = await read_file(self._site, lease.path, _TEXT_BYTES)
        except SiteError:
            return "it does not tell which"
        return " ".join(printable(content.decode(errors="replace")).split())[:300] or "?"

    async def _foreign(self, lease: Lease) -> PlaceTaken:
        return PlaceTaken(
            f"another workflow owns this workspace: {await self._told(lease)}",
            where=self._where,
            do="Set Site: Workspace to another path; or type smk-mantik clean there, which removes"
            f" that workflow's workspace; or, if that workflow is gone, remove {PLACE} in it",
        )

    async def _led(self, lease: Lease) -> PlaceTaken:
        return self.deposed_by(lease, await self._told(lease))

    def deposed_by(self, lease: Lease, about: str = "") -> PlaceTaken:
        """That another controller of the same workflow leads."""
        told = about or f"its journal is {lease.instance}"
        return PlaceTaken(
            f"another controller of this workflow leads this workspace: {told}",
            where=self._where,
            do="Go on there, or start again when that run has ended; nothing was cancelled",
        )


def _rank(lease: Lease) -> tuple[int, str]:
    return lease.term, lease.instance
