"""Judge from recent waits in a queue how much of an upload may be left when a try is submitted."""

import time
from typing import Final

from snakemake_executor_plugin_mantik.journal import Journal

_WAITS: Final = 8
"""How many of the last waits count."""
_FEWEST: Final = 3
"""With fewer waits, the queue is unknown."""
_RECENT_S: Final = 7 * 86400.0
"""Older waits do not count."""
_SHARE: Final = 0.5
"""The share of the shortest wait that the rest of an upload may take."""
_MARGIN_S: Final = 30.0
"""Seconds less than that share: shorter waits are not worth it."""


def longest_rest_s(journal: Journal, site: str, queue: str) -> float:
    """Return the most seconds that the rest of an upload may take; 0 if it has to be complete.

    A node that waits for files costs core hours, so the shortest of the recent waits counts, and
    only half of it.
    """
    waits = journal.arrivals.recent_waits(site, queue, _WAITS)
    now = time.time()
    recent = [waited for created, waited in waits if now - created < _RECENT_S]
    if len(recent) < _FEWEST:
        return 0.0
    return max(0.0, _SHARE * min(recent) - _MARGIN_S)
