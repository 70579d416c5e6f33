"""A project and a site for runs, and what MLflow knows of them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.runs import controller
from snakemake_executor_plugin_mantik.runs.directories import RunDirectory
from tests.support.command import smk_mantik
from tests.support.workflows import WAIT_S, Project, Ran, until
from tests.tracking.conftest import (
    TrackingServer,
    empty_store,
    place,
    tracking_server,
    until_published,
)

__all__ = ["empty_store", "tracking_server"]

MLPROJECT = """
name: churn
python_env: python_env.yaml
entry_points:
  main:
    parameters:
      alpha: {type: float, default: 0.5}
      data: {type: path, default: data.csv}
    command: "python train.py {alpha} {data}"
  waits:
    command: "echo begun && touch started && until test -e go; do sleep 0.1; done && echo over"
  trains:
    command: "n=$(cat ckpt/n || echo 0) && echo part $n && echo $((n+1)) > ckpt/n &&
      (test $n = 2 || exit 85)"
"""

TRAIN = """
import os, sys
print("alpha", sys.argv[1])
with open("model.txt", "w") as out:
    out.write(sys.argv[1] + " " + open(sys.argv[2]).read())
"""


@dataclass
class Runs:
    """A project `churn` beside which commands are typed, and the runs of it."""

    project: Project
    uri: str

    def __post_init__(self) -> None:
        self.home = self.project.directory.parent / "all runs"
        self.project.extra |= {
            "MANTIK_RUNS": str(self.home),
            "XDG_DATA_HOME": str(self.project.directory.parent / "data"),
            "MLFLOW_TRACKING_URI": self.uri,
            "MLFLOW_EXPERIMENT_NAME": str(self.project.directory.parent),
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        self.project.write("churn/MLproject", MLPROJECT)
        self.project.write("churn/python_env.yaml", "python: '2.7'\n")
        self.project.write("churn/train.py", TRAIN)
        self.project.write("churn/data.csv", "1,2\n")

    @property
    def experiment(self) -> str:
        return self.project.extra["MLFLOW_EXPERIMENT_NAME"]

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=self.uri)

    @property
    def site(self) -> str:
        return f"{self.project.place.name}={self.project.config}"

    def notify(self, *words: str) -> Ran:
        return smk_mantik(self.project, "runs", *words)

    def json(self, *words: str) -> Any:
        """The same with `--json`, which must succeed."""
        said = self.notify(*words, "--json").ok().output
        # What MLflow logs goes to the standard error, which is in between here.
        begin = re.search(r"^[\[{]", said, re.MULTILINE)
        assert begin is not None, said
        return json.loads(said[begin.start() :])

    def submit(self, *words: str, project: str = "churn") -> str:
        made = self.json("submit", project, "--site", self.site, *words)
        return str(made["run_id"])

    def mlflow(self, *words: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "mlflow", "run", *words, "-b", "mantik"],
            cwd=self.project.directory, env=self.project.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def directory(self, run_id: str) -> RunDirectory:
        return RunDirectory(self.home / run_id)

    def workspace(self, run_id: str) -> Path:
        return Project(self.directory(run_id).workdir, self.project.place).workspace

    def started(self, run_id: str) -> None:
        """Wait until the job of the entry point `waits` runs."""
        until(lambda: self._is_started(run_id), "the job", WAIT_S)

    def _is_started(self, run_id: str) -> bool:
        here = self.directory(run_id)
        assert here.end is None, self.log(run_id)
        noted = any(record.site_jobs for record in here.attempts)
        return noted and (self.workspace(run_id) / "started").exists()

    def let_go(self, run_id: str) -> None:
        """Let that job come to its end."""
        (self.workspace(run_id) / "go").touch()

    def over(self, run_id: str) -> Run:
        """Wait for a run's controller, and until MLflow knows all; the run in MLflow."""
        controller.wait_for_controller(self.directory(run_id))
        assert self.directory(run_id).end is not None, self.log(run_id)
        until_published(self.home)
        return self.client.get_run(run_id)

    def log(self, run_id: str) -> str:
        return self.directory(run_id).log.read_text()

    def is_alive(self, run_id: str) -> bool:
        return self.directory(run_id).alive

    def kill(self, run_id: str) -> None:
        lock = self.directory(run_id).lock
        # A controller holds the lock before it writes its name there.
        until(lambda: lock.read_text() or not self.is_alive(run_id), "the controller's name")
        if holder := lock.read_text():
            with suppress(ProcessLookupError):
                os.killpg(json.loads(holder)["group"], signal.SIGKILL)
        controller.wait_for_controller(self.directory(run_id))

    def close(self) -> None:
        if self.home.exists():
            for path in self.home.iterdir():
                if self.is_alive(path.name):
                    self.kill(path.name)
        self.project.close()


@pytest.fixture(autouse=True)
def _own_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let MLflow forget after a test the URI that it keeps for the whole process."""
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def store_uri(empty_store: Path, tmp_path: Path) -> str:
    shutil.copyfile(empty_store, tmp_path / "runs.db")
    return f"sqlite:///{tmp_path}/runs.db"


@pytest.fixture
def runs(sandbox: Sandbox, store_uri: str, tmp_path: Path) -> Iterator[Runs]:
    """Runs at the UNICORE site that go to a SQLite file."""
    made = Runs(Project(tmp_path / "it's here", place(sandbox, "hpc1")), store_uri)
    yield made
    made.close()


@pytest.fixture
def served(sandbox: Sandbox, tracking_server: TrackingServer, tmp_path: Path) -> Iterator[Runs]:
    """Runs at the firecREST site that go to a server."""
    made = Runs(Project(tmp_path / "project", place(sandbox, "hpc2")), tracking_server.uri)
    yield made
    made.close()
