"""A real MLflow server, a sandbox, and the runs as MLflow's own client sees them."""

import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import httpx
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.jobs.spec import ScriptLimits
from snakemake_executor_plugin_mantik.tracking import worker_client
from snakemake_executor_plugin_mantik.tracking.run import WORKFLOW
from snakemake_executor_plugin_mantik.tracking.worker_client import WORKER
from tests.support import mlflowserver
from tests.support.daemons import Daemon
from tests.support.forkserver import LIMITS
from tests.support.gate import Gate
from tests.support.ports import free_port
from tests.support.shared import Told, keep, session_directory, shared
from tests.support.workflows import SHORT, Place, Project, place_in, until

START_S = 600.0
CHECKOUT = Path(__file__).parents[2]
PASSWORD = "s3cret-of-the-tracking-server"
"""Never leaves this machine; the server here does not ask for it."""

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


HEAD = """
from pathlib import PurePosixPath
from snakemake_executor_plugin_mantik.mlproject import Call
"""
"""Begins a workflow whose rules the executor takes for runs of entry points."""
RULE = """
rule {name}:
    output: "{name}.txt"
    params: call=Call(PurePosixPath("."), "demo", "main", "abc", {arguments!r})
    shell: {command!r} " && echo > {{output}}"
"""


def rule(command: str, name: str = "train", arguments: dict[str, str] | None = None) -> str:
    """A rule that makes NAME.txt after a command."""
    return RULE.format(name=name, command=command, arguments=arguments or {})


def workflow(**commands: str) -> str:
    targets = ", ".join(f'"{name}.txt"' for name in commands)
    rules = [rule(command, name) for name, command in commands.items()]
    return "\n".join([HEAD, f"rule all:\n    input: {targets}\n", *rules])


@dataclass
class TrackingServer:
    """A real `mlflow server` that serves artifacts too.

    Attributes:
        database: the URL of its SQL database; empty: a SQLite file.
        artifacts: the place that it keeps artifacts in; empty: a directory.
        environment: variables of its own.
    """

    directory: Path
    port: int
    database: str = ""
    artifacts: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--workers", "1"),
            *("--backend-store-uri", self.database or f"sqlite:///{self.directory}/db"),
            *("--artifacts-destination", self.artifacts or str(self.directory / "artifacts")),
        ]

    @property
    def variables(self) -> dict[str, str]:
        return {
            **os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_SERVER_ALLOWED_HOSTS": "*", **self.environment,
        }  # fmt: skip

    @property
    def log(self) -> Path:
        return self.directory / "server.log"

    @cached_property
    def _daemon(self) -> Daemon:
        return Daemon(self.command, self.directory, self.log, self.variables, forks=True)

    def start(self) -> None:
        self._daemon.start()
        self.wait()

    def wait(self) -> None:
        until(self._answers, f"MLflow ({self.log})", START_S)

    def _answers(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.uri}/health", timeout=2).status_code == httpx.codes.OK
        return False

    def stop(self) -> None:
        self._daemon.kill()


_ALL_OF_IT = ("setsid", "sh", "-c", """trap 'kill -9 0' TERM; "$@" & wait""", "sh")
"""Runs a server so that SIGTERM ends what it has forked as well."""


def _start_tracking(directory: Path, users: Path) -> Told:
    made = TrackingServer(directory, free_port())
    command = [*_ALL_OF_IT, *made.command]
    keep(users, command, directory=directory, console=made.log, env=made.variables)
    made.wait()
    return {"directory": str(directory), "port": made.port}


@pytest.fixture(scope="session")
def tracking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrackingServer]:
    """The session's tracking server; each test has an experiment of its own there."""
    with shared(session_directory(tmp_path_factory) / "mlflow", _start_tracking) as told:
        yield TrackingServer(Path(told["directory"]), told["port"])


def _start_forks(directory: Path, users: Path) -> Told:
    name, console = f"mantik-{uuid.uuid4()}", directory / "console.log"
    command = [sys.executable, "-m", mlflowserver.__name__, "serve", name]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    keep(users, command, directory=CHECKOUT, console=console, env=environment)
    until(lambda: "listens" in console.read_text(), "what forks for MLflow", START_S)
    return {"words": f"{sys.executable} -IS {mlflowserver.__file__} {name}"}


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The words before a file or module that uses MLflow, which run it without the import."""
    with shared(session_directory(tmp_path_factory) / "forks", _start_forks) as told:
        yield told["words"]


def place(sandbox: Sandbox, name: str) -> Place:
    script = ScriptLimits(heartbeat_s=1, live_s=1)
    return place_in(sandbox, name).timed(replace(SHORT, marker_grace_s=1, script=script))


def until_published(root: Path) -> None:
    """Wait until no process publishes what happened in a directory, or below.

    Not for the lock of these: nobody holds it while one is starting.
    """
    until(lambda: not _is_published_from(root), "what publishes to MLflow")


def _is_published_from(root: Path) -> bool:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if WORKER.encode() in words and (process / "cwd").readlink().is_relative_to(root):
                return True
    return False


@dataclass
class Tracked:
    """A project whose runs are tracked, and what MLflow knows of them.

    Attributes:
        python: what jobs may run files with that use MLflow, unless they are to be killed.
    """

    project: Project
    uri: str
    experiment: str
    python: str

    def __post_init__(self) -> None:
        self.project.extra |= {
            "MLFLOW_TRACKING_URI": self.uri,
            **({"PYTHONPATH": path} if (path := os.environ.get("PYTHONPATH")) else {}),
            "MLFLOW_EXPERIMENT_NAME": self.experiment,
            "MLFLOW_TRACKING_PASSWORD": PASSWORD,
            "MLFLOW_TRACKING_USERNAME": "user",
            # However slow the machine is, a server that answers tells the jobs' ids.
            LIMITS: json.dumps(
                {f"{worker_client.__name__}.MADE_WAIT_S": 600,
                 f"{worker_client.__name__}.PYTHON": self.python.split()}
            ),
        }  # fmt: skip
        self.client = MlflowClient(tracking_uri=self.uri)

    def _settle(self) -> None:
        """Where no Snakemake runs any more, wait until MLflow knows what it can.

        A Snakemake itself does not wait for that for longer than 30 s.
        """
        if all(running.process.poll() is not None for running in self.project.started):
            until_published(self.project.directory)

    def runs(self) -> dict[str, Run]:
        """The jobs' runs by their names; a name that comes twice is a mistake."""
        self._settle()
        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment is None:
            return {}
        found = self.client.search_runs([experiment.experiment_id])
        found = [run for run in found if WORKFLOW not in run.data.tags]
        names = [run.info.run_name for run in found]
        assert len(set(names)) == len(names), names
        return {run.info.run_name: run for run in found}

    def run(self) -> Run:
        (run,) = self.runs().values()
        return run

    def workflows(self) -> list[Run]:
        """The workflows' runs, the oldest first."""
        self._settle()
        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment is None:
            return []
        wanted = f"tags.`{WORKFLOW}` != ''"
        found = self.client.search_runs([experiment.experiment_id], wanted)
        return sorted(found, key=lambda run: run.info.start_time)

    def workflow(self) -> Run:
        (run,) = self.workflows()
        return run

    def history(self, run: Run, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric, in order."""
        found = self.client.get_metric_history(run.info.run_id, name)
        return sorted((metric.step, metric.value) for metric in found)

    def artifacts(self, run: Run, below: str | None = None) -> list[str]:
        found: list[str] = []
        for entry in self.client.list_artifacts(run.info.run_id, below):
            found += self.artifacts(run, entry.path) if entry.is_dir else [entry.path]
        return sorted(found)


@pytest.fixture
def tracked(
    sandbox: Sandbox, tracking_server: TrackingServer, tmp_path: Path, python: str
) -> Iterator[Tracked]:
    """A project at the UNICORE site whose runs go to the server."""
    project = Project(tmp_path / "project", place(sandbox, "hpc1"))
    yield Tracked(project, tracking_server.uri, str(tmp_path), python)
    project.close()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store without runs: a SQLite file, which takes seconds to make."""
    made = tmp_path_factory.mktemp("store") / "runs.db"
    MlflowClient(tracking_uri=f"sqlite:///{made}").search_experiments()
    return made


@pytest.fixture
def elsewhere(
    sandbox: Sandbox, tmp_path: Path, python: str, empty_store: Path
) -> Iterator[Tracked]:
    """A project at the firecREST site whose runs go to a SQLite file beside the Snakefile."""
    project = Project(tmp_path / "project", place(sandbox, "hpc2"))
    shutil.copyfile(empty_store, project.directory / "runs.db")
    made = Tracked(project, f"sqlite:///{project.directory / 'runs.db'}", "digits", python)
    project.extra["MLFLOW_TRACKING_URI"] = "sqlite:///runs.db"
    yield made
    project.close()


@pytest.fixture
def gated(
    sandbox: Sandbox, tracking_server: TrackingServer, tmp_path: Path, python: str
) -> Iterator[tuple[Tracked, Gate]]:
    """Like `tracked`, with a gate before the server."""
    project = Project(tmp_path / "project", place(sandbox, "hpc1"))
    gate = Gate(tracking_server.port)
    made = Tracked(project, tracking_server.uri, str(tmp_path), python)
    project.extra["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{gate.port}"
    yield made, gate
    gate.close()
    project.close()
