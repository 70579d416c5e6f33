"""What must stay at a place because tries use it, those of earlier runs included.

The journal says which paths a try uses (`journal.uses`). Nobody watches a try that this run was not
asked for: whether it has ended, the site shows.
"""

import asyncio
from collections.abc import Iterable

from snakemake_executor_plugin_mantik.journal import Journal, TryRecord
from snakemake_executor_plugin_mantik.sites.base import Site

from .claims import ClaimLooks
from .site_retry import SiteRetry


class InUse:
    """The uses of one place, compared with the site.

    Attributes:
        site: a site that sees the place.
        place: its identity.
        journal: the workflow's journal.
        retry: repeats requests to the site.
    """

    def __init__(self, site: Site, place: str, journal: Journal, retry: SiteRetry) -> None:
        self.site = site
        self.place = place
        self.journal = journal
        self.retry = retry
        self._looks = ClaimLooks(site, retry)

    def by(self, path: str, *, above: bool = True) -> list[TryRecord]:
        """Return the tries because of which a path must stay; see `UseLedger.of`."""
        return self.journal.uses.of(self.place, path, above=above)

    async def settle(self, records: Iterable[TryRecord]) -> list[TryRecord]:
        """Return those tries that may still run; what the others have used is free from now on.

        Raises:
            SiteError: the site does not answer.
        """
        running = [record for record in records if record.may_run]

        async def ended(record: TryRecord) -> bool:
            seen = await self.retry(lambda: self._looks.look(record.paths.tries))
            return record.id in seen.codes

        over = await asyncio.gather(*map(ended, running))
        for record in (r for r, is_over in zip(running, over, strict=True) if is_over):
            self.journal.uses.end(record.id)
        return [record for record, is_over in zip(running, over, strict=True) if not is_over]
