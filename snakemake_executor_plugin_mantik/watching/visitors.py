"""Look at all sites of a workflow that no controller watches."""

import asyncio
from collections.abc import Mapping, Sequence
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

    Use it as an asynchronous context. `away` has a message for each site that could not be asked.
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

    async def look(self) -> None:
        """Look at each site that has open tries, with one request each."""
        records = [r for r in read_history(self._directory / STATE) if r.may_run]
        places = {name: s.place for name, s in read_stored(self._directory / STATE).sites.items()}
        by_site: dict[str, list[TryRecord]] = {}
        for record in records:
            if record.place == places.get(record.site):  # else left behind elsewhere
                by_site.setdefault(record.site, []).append(record)
        await asyncio.gather(*(self._look(*one) for one in by_site.items()))

    async def _look(self, name: str, records: Sequence[TryRecord]) -> None:
        try:
            if name not in self._looks:
                known = read_stored(self._directory / STATE).sites
                loaded = find_config(known.get(name), name, self._given)
                visit = visit_site(name, loaded, self._directory)
                self._looks[name] = SiteLooks(await self._stack.enter_async_context(visit))
            await self._looks[name].look(records)
            self.away.pop(name, None)
        except MantikError as error:
            self.away[name] = f"{name} was not asked: {error}"
