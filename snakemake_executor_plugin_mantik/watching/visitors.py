"""Look at all sites of a workflow that no controller watches."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.connections.visit import find_config, visit_site
from snakemake_executor_plugin_mantik.journal import TryRecord, read_history, read_stored
from snakemake_executor_plugin_mantik.watching.overview import Sight
from snakemake_executor_plugin_mantik.watching.site_looks import SiteLooks


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
