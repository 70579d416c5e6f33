"""What a job has logged so far, carried over piece by piece, whoever dies: all of it, once."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from snakemake_executor_plugin_mantik.tracking.live import LATER, TREE, LiveReplay
from snakemake_executor_plugin_mantik.tracking.replay import Replay
from snakemake_executor_plugin_mantik.tracking.told import Destination, Told
from tests.tracking.test_replay import (  # noqa: F401 - fixtures, too
    SOURCE,
    TRY,
    Killed,
    Mortal,
    Replayed,
    empty,
    store,
    target,
    told,
)


class Job:
    """A job that logs, and a worker that tells of it: what it knows dies with it."""

    def __init__(self, replayed: Replayed, directory: Path) -> None:
        self.replayed = replayed
        self.copy = directory / "copy"
        self.tree = self.copy / TREE
        self.ended = directory / "ended" / "mlruns"
        self.known = Told(doubt=False)
        self.said: list[str] = []
        self.destination = Destination(
            TRY, replayed.run_id, replayed.experiment_id, SOURCE, "7", name="train C=1"
        )

    def logs(self, stage: int) -> None:
        """What the copy holds at a stage; 3: the job is over, and its whole store is here."""
        whole = self.replayed.store
        if stage == 3:
            shutil.copytree(whole, self.ended)
            return
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(whole, self.tree)
        (self.copy / LATER).write_text("" if stage == 2 else "7/x")
        run = self.tree / "7" / SOURCE
        if stage == 1:
            shutil.rmtree(self.tree / "7" / "models")
            (run / "params" / "depth").write_text("")  # just being written
            lines = (run / "metrics" / "loss" / "a").read_bytes().splitlines(keepends=True)
            (run / "metrics" / "loss" / "a").write_bytes(b"".join(lines[:3]) + lines[3][:7])
            for meta in self.tree.glob("7/*/meta.yaml"):
                if "run_name: open" in meta.read_text():
                    meta.write_text("")

    def tell(self, stage: int, client: Any = None) -> None:
        """What the worker does then."""
        client = client or self.replayed.client
        if stage < 3:
            LiveReplay(client, self.copy, self.destination, self.known, self.said.append).run()
        else:
            Replay(
                client, self.ended, self.destination, self.known, tell=self.said.append
            ).whole("FAILED")  # fmt: skip

    def begins_anew(self) -> None:
        """The worker is another one."""
        self.known = Told(doubt=True)


@pytest.fixture
def job(told: Replayed, tmp_path: Path) -> Job:  # noqa: F811
    return Job(told, tmp_path)


class Counting:
    """A client that counts what is told, and of which artifacts."""

    def __init__(self, client: MlflowClient) -> None:
        self._client = client
        self.points = 0
        self.acts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._client, name)
        if not name.startswith(Mortal.ACTS):
            return real

        def act(*arguments: Any, **named: Any) -> Any:
            self.acts.append(name)
            self.points += len(named.get("metrics", ()))
            return real(*arguments, **named)

        return act


def test_what_is_there_is_told_and_nothing_twice(job: Job) -> None:
    client = Counting(job.replayed.client)
    job.logs(1)
    job.tell(1, client)

    found = job.replayed.view()
    run = found["train C=1"]
    # Half a line, an empty parameter and half a description are left to the next time.
    assert [point[0] for point in run["metrics"]["loss/a"]] == [0, 1, 2]
    assert run["params"] == {"C": "1"}
    assert run["artifacts"] == ["plots/ü #1.txt"]
    assert set(found) == {"train C=1", "inner", "models"}
    assert found["inner"]["status"] == "FINISHED"
    acts = len(client.acts)
    job.tell(1, client)
    assert len(client.acts) == acts
    job.logs(2)
    job.tell(2, client)
    assert [model[0] for model in job.replayed.view()["models"]] == ["net"]
    job.logs(3)
    job.tell(3, client)

    said = [line for line in job.said if "C stays" not in line]
    assert said == []

    # loss/a, bad, endless, inner and open once each, score also for its model, which came later.
    assert client.points == 5 + 1 + 1 + 1 + 1 + 2
    assert client.acts.count("log_artifacts") == 1
    assert client.acts.count("log_model_artifacts") == 1


def test_killed_anywhere_while_the_job_logs(
    job: Job,
    tmp_path: Path,
    empty: Path,  # noqa: F811
) -> None:
    fresh = tmp_path / "fresh.db"
    shutil.copyfile(tmp_path / "mlflow.db", fresh)
    logged = tmp_path / "logged" / "mlruns"
    shutil.copytree(job.replayed.store, logged)
    job.replayed.replay()
    expected = job.replayed.view()
    died = 0
    for stage in (1, 2, 3):
        for deaths in range(1, 30, 3):
            directory = tmp_path / f"{stage}-{deaths}"
            directory.mkdir()
            shutil.copyfile(fresh, directory / "mlflow.db")
            client = MlflowClient(tracking_uri=f"sqlite:///{directory / 'mlflow.db'}")
            again = Job(
                Replayed(client, logged, job.replayed.run_id, job.replayed.experiment_id, []),
                directory,
            )
            alive = True
            for at in (1, 2, 3):
                again.logs(at)
                try:
                    again.tell(at, Mortal(client, deaths) if at == stage else client)
                except Killed:
                    alive = False
                    again.begins_anew()
                    again.tell(at)
            assert again.replayed.view() == expected, (stage, deaths)
            if alive:
                break
            died += 1
    assert died > 5
