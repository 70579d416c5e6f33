"""Keep the lead of a place: answer other controllers, and notice when one has taken over."""

import asyncio
import math
from collections.abc import Callable, Iterable
from contextlib import suppress

from snakemake_executor_plugin_mantik.common.errors import PlaceTaken, SiteError
from snakemake_executor_plugin_mantik.jobs.paths import PLACE
from snakemake_executor_plugin_mantik.sites.base import Entry

from .leases import ASK_PREFIX, Lease, Leases


class Leadership:
    """This controller's lead of a place, from `Leases.take` to the end of the run.

    Attributes:
        lease: its lease.
        deposed: the error to raise once another controller has taken over; None before.
    """

    def __init__(self, lease: Lease, leases: Leases) -> None:
        self.deposed: PlaceTaken | None = None
        self.lease = lease
        self.leases = leases
        self._clock = asyncio.get_running_loop().time
        self._seen = self._clock()
        self._answering: set[asyncio.Task[None]] = set()
        self._on_deposed: list[Callable[[PlaceTaken], None]] = []

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

    def saw(self, directory: str, entries: Iterable[Entry]) -> None:
        """Note the listing of a directory, and answer questions of other controllers in it."""
        self._seen = self._clock()
        for entry in entries:
            asker = entry.name.removeprefix(ASK_PREFIX)
            if asker not in (entry.name, self.lease.instance) and not self._answering:
                task = asyncio.create_task(self._answer(asker, directory))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    async def _answer(self, asker: str, directory: str) -> None:
        with suppress(SiteError, PlaceTaken):
            await self._look()
            await self.leases.answer(asker, directory)

    async def assure(self) -> None:
        """Check that this controller leads; without an answer of the site, conclude nothing.

        This takes a request only if nothing was listed for a while.

        Raises:
            PlaceTaken: another controller has taken over.
        """
        if self.deposed is None and self._clock() - self._seen > self.lease.wait_s / 2:
            with suppress(SiteError):  # the caller's next request reports it
                await self._look()
        if self.deposed is not None:
            raise self.deposed

    async def _look(self) -> None:
        leases, entries = await self.leases.look()
        last = max((o for o in leases if o.workflow == self.lease.workflow),
                   key=lambda o: o.term, default=self.lease)  # fmt: skip
        own = [lease for lease in leases if lease.instance == self.lease.instance]
        if last.term > self.lease.term or any(o.number > self.lease.number for o in own):
            raise self._depose(self.leases.deposed_by(last))
        if not own:
            try:  # our lease was purged, and another controller may have come
                await self.leases.settle(self.lease)
            except PlaceTaken as error:
                raise self._depose(error) from None
        self.saw(PLACE, entries.values())

    def _depose(self, error: PlaceTaken) -> PlaceTaken:
        self.deposed = error
        for act in self._on_deposed:
            act(error)
        return error

    async def keep(self) -> None:
        """Answer other controllers' questions even without jobs, until cancelled or deposed."""
        while self.deposed is None:
            await asyncio.sleep(self.lease.wait_s / 4)
            if self._clock() - self._seen > self.lease.wait_s / 3:
                with suppress(SiteError, PlaceTaken):
                    await self._look()

    async def close(self) -> None:
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
