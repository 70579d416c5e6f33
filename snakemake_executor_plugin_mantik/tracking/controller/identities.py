"""Whose id a job is given as its run's: MLflow's, or one of ours where that takes too long."""

import math
import uuid
from collections import Counter
from collections.abc import Mapping

from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.tracking.controller.courier import Courier
from snakemake_executor_plugin_mantik.tracking.outbox import Outbox, RunRecord
from snakemake_executor_plugin_mantik.tracking.run import TrackingTarget
from snakemake_executor_plugin_mantik.tracking.store import RunIdentity


class Identities:
    """The runs' ids as jobs are given them. Belongs to the engine's thread."""

    def __init__(
        self, target: TrackingTarget, courier: Courier, paces: Mapping[str, float]
    ) -> None:
        """Nothing is asked yet.

        Args:
            target: where the runs go.
            courier: has MLflow make the runs.
            paces: how many jobs a second are submitted to each site, at most.
        """
        self._target = target
        self._courier = courier
        self._paces = dict(paces)
        self._waiting: Counter[str] = Counter()

    async def of(self, record: TryRecord, outbox: Outbox) -> RunIdentity:
        """The identity that a try has been given before, or is given now.

        A run that was made for the job before has an id: nothing is waited for, unless the job is
        to speak to the server itself and has to know that the run is still there.

        Args:
            record: of a try whose run is in the outbox.
            outbox: an object of this thread.

        Raises:
            OSError: the worker cannot be started.
            sqlite3.Error: the outbox cannot be used.
        """
        known = _known(outbox, record)
        own_id = "" if known.data.get("direct") else str(known.data.get("run_id", ""))
        if own_id:
            self._courier.wake()
        elif not known.run_id and not known.own_id:
            await self._made(record)
            known = _known(outbox, record)
        if not known.run_id and not known.own_id:
            experiment = self._target.experiment or "Default"
            experiment_id = self._target.experiment_id or "0"
            own_id = own_id or uuid.uuid4().hex
            outbox.give_own_id(record.id, own_id, experiment_id, experiment)
            known = _known(outbox, record)
        return RunIdentity(*known.given, known.experiment)

    async def _made(self, record: TryRecord) -> None:
        """Wait for the run; those that wait already are submitted before, at the site's pace."""
        turn_s = self._waiting[record.site] / self._paces.get(record.site, math.inf)
        self._waiting[record.site] += 1
        try:
            await self._courier.made(record.id, turn_s)
        finally:
            self._waiting[record.site] -= 1


def _known(outbox: Outbox, record: TryRecord) -> RunRecord:
    run = outbox.run(record.id)
    assert run is not None
    return run
