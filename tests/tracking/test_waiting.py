"""What a job waits for before it is submitted: its run at MLflow, for a while; whose id it gets."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.engine.observer import JobEnd, JobExtras
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.tracking.cursor import Cursor
from snakemake_executor_plugin_mantik.tracking.process import MAKERS
from snakemake_executor_plugin_mantik.tracking.run import (
    PARENT_RUN_TAG,
    WORKFLOW,
    TrackedRun,
    TrackedWorkflow,
    TrackingTarget,
)
from snakemake_executor_plugin_mantik.tracking.tracker import Tracker
from tests.support.controller import request
from tests.support.gate import Gate
from tests.support.workflows import until
from tests.tracking.conftest import TrackingServer

NEVER_S = 3600.0
LONG_S = 300.0
"""Nothing here takes so long, unless it waits for what does not come."""
SOON_S = 0.3
"""What must not happen would happen in less, mostly; nothing is wrong if it takes longer."""


@dataclass
class Site:
    """Tracked jobs that are about to be submitted, with a real worker and a gate before MLflow."""

    workdir: Path
    gate: Gate
    experiment: str
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workdir.mkdir()
        self.journal = Journal(self.workdir / ".snakemake/mantik")
        self.journal.begin_run({}, {})

    def tracker(self, wait_s: float, pace: float = 10.0, **target: str) -> Tracker:
        where = TrackingTarget(f"http://127.0.0.1:{self.gate.port}", experiment=self.experiment)
        made = Tracker(
            self.workdir, self.journal, replace(where, **target), {"hpc1": ""}, mask=str,
            notify=self.said.append, workflow=TrackedWorkflow("Snakefile"), pace=pace,
        )  # fmt: skip
        made._worker._wait_s = wait_s
        return made

    def prepared(self, tracker: Tracker, *names: str) -> dict[str, JobExtras]:
        """What jobs are given that are taken over at once, by their names."""

        async def one(name: str) -> JobExtras:
            job = replace(request(0), job=name, name=name, subject=TrackedRun())
            known = self.journal.open_attempts(name)
            record = known[0] if known else self.journal.new_attempt(
                site="hpc1", job=name, rule="train", name=name, fingerprint="x"
            )  # fmt: skip
            added = await tracker.prepare(job, record, "/scratch")
            assert added is not None, self.said
            return added

        async def all_of_them() -> list[JobExtras]:
            return await asyncio.wait_for(asyncio.gather(*map(one, names)), LONG_S)

        return dict(zip(names, asyncio.run(all_of_them()), strict=True))

    def end(self, tracker: Tracker, *names: str) -> None:
        """The jobs have ended, and MLflow knows all of it."""

        for name in names:
            end = JobEnd("finished", exit_code=0).facts
            [record] = self.journal.open_attempts(name)
            self.journal.ended(record.id, "succeeded", waited=None, ran=None, log="", end=end)
        self.journal.end_run("finished", {})
        tracker.close(LONG_S)


@pytest.fixture
def site(tracking_server: TrackingServer, tmp_path: Path) -> Iterator[Site]:
    gate = Gate(tracking_server.port)
    made = Site(tmp_path / "w", gate, str(tmp_path))
    yield made
    gate.close()
    made.journal.close()


def runs(server: TrackingServer, site: Site) -> dict[str, Run]:
    """The jobs' runs by their names, and the workflow's; one that is there twice is a mistake."""
    client = MlflowClient(server.uri)
    experiment = client.get_experiment_by_name(site.experiment)
    assert experiment is not None, site.said
    found = client.search_runs([experiment.experiment_id])
    by_name = {"" if WORKFLOW in r.data.tags else r.info.run_name: r for r in found}
    assert len(by_name) == len(found)
    return by_name


def test_a_server_that_hangs_delays_a_job_no_longer_than_it_may(
    site: Site, tracking_server: TrackingServer
) -> None:
    site.gate.hold()
    tracker = site.tracker(wait_s=SOON_S)
    tracker.start(tracked=True)

    # Nothing comes through the gate before these are ready to be submitted.
    given = site.prepared(tracker, "one", "two")
    site.gate.open()

    cursor = Cursor(site.workdir)
    ids = [record.id for record in site.journal.all_open_attempts()]
    until(lambda: all(cursor.run(each).run_id for each in ids), "the runs", LONG_S)
    cursor.close()
    assert site.prepared(tracker, "one", "two") == given
    # Who has such an id can be found by it, and what the job logs goes to the run.
    for name, added in given.items():
        store = site.workdir / added.directory
        added.lay_out(store)
        variables = added.variables
        own = store / variables["MLFLOW_EXPERIMENT_ID"] / variables["MLFLOW_RUN_ID"]
        (own / "params" / "seen").write_text(name)
    site.end(tracker, "one", "two")
    found = runs(tracking_server, site)
    assert set(found) == {"", "one", "two"}
    for name, added in given.items():
        own_id = added.variables["MLFLOW_RUN_ID"]
        assert own_id != found[name].info.run_id
        assert found[name].data.tags["mantik.own_run_id"] == own_id
        assert found[name].data.params == {"seen": name}
    told = "MLflow cannot be updated now; jobs continue, and updates follow later."
    assert site.said == [f"{told} It has created no run for {SOON_S:g} s."]


def test_a_server_that_answers_tells_all_jobs_their_ids(
    site: Site, tracking_server: TrackingServer
) -> None:
    names = [f"job {number}" for number in range(3 * MAKERS)]
    tracker = site.tracker(wait_s=NEVER_S)
    tracker.start(tracked=True)

    given = site.prepared(tracker, *names)

    site.end(tracker, *names)
    found = runs(tracking_server, site)
    assert set(found) == {"", *names}
    whole = found[""].info.run_id
    for name in names:
        run = found[name]
        assert run.info.run_id == given[name].variables["MLFLOW_RUN_ID"]
        assert run.info.experiment_id == given[name].variables["MLFLOW_EXPERIMENT_ID"]
        assert (run.data.tags[PARENT_RUN_TAG], run.info.status) == (whole, "FINISHED")
        assert "mantik.own_run_id" not in run.data.tags
    assert site.said == []


def test_who_waits_for_his_turn_at_the_site_may_as_well_wait_for_his_run(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.gate.hold()
    tracker = site.tracker(wait_s=SOON_S, pace=1 / LONG_S)
    tracker.start(tracked=True)
    waits: list[float] = []

    async def made(_: str, turn_s: float) -> None:
        waits.append(turn_s)
        while len(waits) < 3:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(tracker._worker, "made", made)
    site.prepared(tracker, "one", "two", "three")
    site.prepared(tracker, "four")

    assert waits == [0, LONG_S, 2 * LONG_S, 0]
    site.gate.open()
    site.end(tracker, "one", "two", "three", "four")


def test_a_run_that_is_made_already_is_not_waited_for(
    site: Site, tracking_server: TrackingServer
) -> None:
    client = MlflowClient(tracking_server.uri)
    experiment_id = client.create_experiment(site.experiment)
    made = client.create_run(experiment_id, run_name="asked for").info.run_id
    site.gate.hold()
    tracker = site.tracker(wait_s=NEVER_S, run_id=made, experiment_id=experiment_id)
    tracker.start(tracked=True)

    added = site.prepared(tracker, "one")["one"]

    assert added.variables["MLFLOW_RUN_ID"] == made
    assert added.variables["MLFLOW_EXPERIMENT_ID"] == experiment_id
    site.gate.open()
    site.end(tracker, "one")
    (run,) = runs(tracking_server, site).values()
    assert (run.info.run_id, run.info.status) == (made, "FINISHED")
    assert "mantik.own_run_id" not in run.data.tags
