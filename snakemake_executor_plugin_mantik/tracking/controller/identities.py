"""Give each job the id of its run: MLflow's, or one of ours where MLflow takes too long."""

import math
import uuid
from collections import Counter
from collections.abc import Mapping

from snakemake_executor_plugin_mantik.journal import TryRecord
from snakemake_executor_plugin_mantik.tracking.controller.worker_client import WorkerClient
from snakemake_executor_plugin_mantik.tracking.outbox import Outbox, RunRecord
from snakemake_executor_plugin_mantik.tracking.run import TrackingTarget
from snakemake_executor_plugin_mantik.tracking.store import RunIdentity


class Identities:
    """Assigns run ids to jobs. Belongs to the engine's thread."""

    def __init__(
        self, target: TrackingTarget, worker: WorkerClient, paces: Mapping[str, float]
    ) -> None:
        """Prepare.

        Args:
            target: the destination of the runs.
            worker: has MLflow create the runs.
            paces: the most jobs per second that are submitted to each site.
        """
        self._target = target
        self._worker = worker
        self._paces = dict(paces)
        self._waiting: Counter[str] = Counter()

    async def of(self, record: TryRecord, outbox: Outbox) -> RunIdentity:
        """Return the identity that a try was given before, or give it one.

        Does not wait for a run that was created before the job, since its id is known. It waits if
        the job logs to the server directly, because the run must still exist there.

        The try's run must be in the outbox, which must be an object of this thread.

        Raises:
            OSError: the worker cannot be started.
            sqlite3.Error: the outbox cannot be used.
        """
        known = _known(outbox, record)
        own_id = "" if known.data.get("direct") else str(known.data.get("run_id", ""))
        if own_id:
            self._worker.wake()
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
        """Wait for a run, longer behind others that wait: the site's pace delays the job anyway."""
        turn_s = self._waiting[record.site] / self._paces.get(record.site, math.inf)
        self._waiting[record.site] += 1
        try:
            await self._worker.made(record.id, turn_s)
        finally:
            self._waiting[record.site] -= 1


def _known(outbox: Outbox, record: TryRecord) -> RunRecord:
    run = outbox.run(record.id)
    assert run is not None
    return run
