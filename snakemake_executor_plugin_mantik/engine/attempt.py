"""One try while a run has to do with it: values."""

import time
from dataclasses import dataclass, field

from snakemake_executor_plugin_mantik.engine.observer import JobExtras
from snakemake_executor_plugin_mantik.engine.stage import Staged
from snakemake_executor_plugin_mantik.jobs.markers import Marker
from snakemake_executor_plugin_mantik.jobs.spec import LiveDirectory
from snakemake_executor_plugin_mantik.journal import TryRecord

_CLOCKS_DIFFER_S = 60.0
"""Seconds by which the clocks of a site's server and of its nodes may differ."""


@dataclass
class Attempt:
    """One try that this run has to do with.

    Attributes:
        ids: the site's ids of it.
        submitted_at: seconds since the epoch, by the clock here.
        sent_at: when it was submitted, by the site's own clock, where that is known.
        sent: how often it was submitted, at most.
        staged: what each script that this run submitted carried.
        extras: what an observer adds to it.
    """

    record: TryRecord
    ids: list[str]
    submitted_at: float
    sent: int
    sent_at: float | None = None
    staged: list[Staged] = field(default_factory=list)
    extras: JobExtras | None = None

    @property
    def live(self) -> LiveDirectory | None:
        """What is shown of it while it runs."""
        added = self.extras
        if added is None or added.live is None:
            return None
        return LiveDirectory(added.directory, added.live.growing)

    @property
    def where(self) -> str:
        """The site and the ids there, for messages."""
        return f"{self.record.site}, {', '.join(self.ids) or self.record.id}"

    @property
    def joined_ids(self) -> str:
        """The ids at the site, as Snakemake is told them."""
        return " ".join(self.ids)

    def times(self, marker: Marker) -> tuple[float | None, float]:
        """Seconds waited, where that is known, and run.

        It waited from its submission, by the clock of the site's server, to its start, by the
        node's. How long it took to be seen and fetched here is no part of that. Where the two
        clocks cannot be the same, nothing is known.
        """
        if self.sent_at is None or marker.started is None:
            return None, runtime_of(marker)
        waited = marker.started - self.sent_at
        longest = time.time() - self.submitted_at - runtime_of(marker)
        plausible = -_CLOCKS_DIFFER_S <= waited <= longest + _CLOCKS_DIFFER_S
        return (max(0.0, waited) if plausible else None), runtime_of(marker)


def runtime_of(marker: Marker) -> float:
    """Seconds that the job ran, by the node's own clock."""
    if marker.started is None or marker.ended is None:
        return 0.0
    return max(0.0, marker.ended - marker.started)
