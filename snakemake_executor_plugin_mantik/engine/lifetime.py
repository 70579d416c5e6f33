"""Jobs that last get a longer life at the site, whose own default may be a day."""

from collections.abc import Callable, Iterable

from snakemake_executor_plugin_mantik.common.errors import SiteError
from snakemake_executor_plugin_mantik.engine.scheduler_poller import SchedulerPoller
from snakemake_executor_plugin_mantik.engine.site_retry import TRANSIENT, SiteRetry
from snakemake_executor_plugin_mantik.engine.watched import Watched
from snakemake_executor_plugin_mantik.sites.base import Site

EXTEND_AFTER_S = 60.0
_EXTEND_BY_S = 30 * 86400.0
_EXTEND_AGAIN_S = 7 * 86400.0
"""Jobs that last get a longer life at the site: its default may be a day, then it cancels them.

Those whose ids are not known yet are looked for each time."""
_EXTEND_AT_ONCE = 500
"""Tries that one cycle extends at most: the next look at all of them waits for it."""
_EXTEND_REFUSED_S = 3600.0
"""Seconds after which a site that refused that, or did not tell all ids, is asked again."""


class Extender:
    """Sees to it that the site does not end jobs because its own time for them is over."""

    def __init__(
        self, site: Site, retry: SiteRetry, poller: SchedulerPoller, clock: Callable[[], float]
    ) -> None:
        """Make an extender; `poller` finds the ids that are not known yet."""
        self._site = site
        self._retry = retry
        self._poller = poller
        self._clock = clock

    async def extend(self, tries: Iterable[Watched]) -> None:
        """Extend the life of those of `tries` for which it is time."""
        now = self._clock()
        due = [w for w in tries if now >= w.next_extension][:_EXTEND_AT_ONCE]
        if not due:
            return
        for watched in due:
            watched.next_extension = now + EXTEND_AFTER_S
        unsure = [w for w in due if len(w.ids) < w.sent]
        sure = [w for w in due if len(w.ids) >= w.sent]
        known = [w for w in [*sure, *await self._poller.identify(unsure)] if w.ids]
        if not known:
            return
        wait = _EXTEND_AGAIN_S
        try:
            await self._site.extend([i for w in known for i in w.ids], _EXTEND_BY_S)
        except TRANSIENT:
            return
        except SiteError as error:
            wait = _EXTEND_REFUSED_S
            self._retry.note(f"Jobs may end when the site's own time for them is over. {error}")
        for watched in known:
            all_known = len(watched.ids) >= watched.sent
            watched.next_extension = now + (wait if all_known else _EXTEND_REFUSED_S)
