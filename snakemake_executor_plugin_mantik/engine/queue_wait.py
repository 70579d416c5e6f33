"""Judge how long jobs may wait for their uploads: in the queue, and on a node of theirs."""

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

_ARRIVAL_S: Final = 900.0
_ARRIVAL_SHARE: Final = 0.25
"""The most seconds, and the most of its walltime, that a started job waits for its files."""
_NOTABLE_SHARE: Final = 0.05
"""The share of its walltime without which a job may have reached its time limit."""


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


def longest_arrival_s(runtime_s: int | None) -> int:
    """Return the most seconds that a started job waits for its files: part of its walltime."""
    return int(min(_ARRIVAL_S, _ARRIVAL_SHARE * (runtime_s or _ARRIVAL_S / _ARRIVAL_SHARE)))


def lacked_time(awaited_s: float, runtime_s: int | None) -> bool:
    """Return whether a wait for files may be why a job reached its time limit.

    A long job is not computed again for a wait of minutes: its walltime was too short anyway.
    """
    return awaited_s > 0 and (runtime_s is None or awaited_s >= _NOTABLE_SHARE * runtime_s)
