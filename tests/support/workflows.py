"""Runs workflows through the real `snakemake` command, at a sandbox or a real UNICORE/X."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import dedent
from typing import TypeVar

from hpc_sandbox.batch import CancelError
from hpc_sandbox.firecrest.site import FirecrestServer
from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.cli.sandbox import backend_config, environment_of
from snakemake_executor_plugin_mantik.common.errors import JournalError
from snakemake_executor_plugin_mantik.config.settings import TIMING, Timing
from snakemake_executor_plugin_mantik.connections.connect import workspace_name
from snakemake_executor_plugin_mantik.jobs.paths import workspace_below
from snakemake_executor_plugin_mantik.journal import AttemptRecord, Journal, read_history
from tests.support import forkserver
from tests.support.forkserver import Fork

T = TypeVar("T")
WAIT_S = 600.0
"""How long one command may take, seconds: many times what it does take."""

FOREIGN = ("MANTIK_", "MLFLOW_", "SNAKEMAKE_", "OMP_", "XDG_")
"""Variables that a developer may have set and that would change what is tested."""


@dataclass(frozen=True)
class Place:
    """A site that workflows of tests run at.

    Attributes:
        name: its name in the workflow.
        config: the text of its backend config.
        environment: credentials.
        storage: the local directory that holds its workspaces, in one named `mantik`.
        server: the local directory that holds all of the server's files.
        end: ends jobs there, by the site's ids.
    """

    name: str
    config: str
    environment: Mapping[str, str]
    storage: Path
    server: Path
    end: Callable[[Sequence[str]], None] = lambda ids: None

    def timed(self, timing: Timing) -> "Place":
        """The same with other waits and limits in all that runs with its environment."""
        return replace(self, environment={**self.environment, TIMING: json.dumps(asdict(timing))})


SHORT = Timing(marker_grace_s=5, unknown_wait_s=20)
"""Waits for sandboxes, which do nothing late."""


def place_in(box: Sandbox, name: str) -> Place:
    def end(ids: Sequence[str]) -> None:
        recorded = box.record(name)
        running = {run["scheduler_id"] for run in recorded["runs"] if run["ended"] is None}
        for job in recorded["jobs"]:
            if job["id"] in ids:
                for number in running & set(job["scheduler_ids"]):
                    with suppress(CancelError):  # it is ending already
                        box.cancel_job(name, number)

    directory = box.directory / name
    site = box.site(name)
    # firecREST has a directory for each user in each of its file systems.
    own = site.home.name if isinstance(site, FirecrestServer) else "."
    # A busy machine may take a while to let a job say its last words.
    config = backend_config(box, name).replace("TermGrace: 3s", "TermGrace: 12s")
    place = Place(name, config, environment_of(box), directory / "scratch" / own, directory, end)
    return place.timed(SHORT)


def with_snakemake(place: Place) -> Place:
    """The same site with the Python environment of the tests, which Snakemake is in."""
    environment = f"Environment: {{Python: '{sys.prefix}'}}\n"
    return replace(place, config=place.config + environment)


@dataclass(frozen=True)
class Ran:
    """A command that has ended: exit code, and all that it said."""

    code: int
    output: str

    def ok(self) -> "Ran":
        assert self.code == 0, self.output
        return self

    def failed(self) -> str:
        """What it said; it must have failed in an orderly way."""
        assert self.code == 1, self.output
        assert "Traceback" not in self.output, self.output
        assert 'File "' not in self.output, self.output
        assert "cannot schedule new futures" not in self.output, self.output
        return self.output


@dataclass
class Project:
    """A workflow's directory on this machine, and the site that its rules run at.

    Attributes:
        directory: the workflow's.
        place: the first site.
        extra: variables that Snakemake is given beside the site's credentials.
        sites: further backend configs, as `--mantik-backend-config` takes them.
        forked: whether a fork may stand for the command, which saves its imports.
    """

    directory: Path
    place: Place
    extra: dict[str, str] = field(default_factory=dict)
    sites: list[str] = field(default_factory=list)
    forked: bool = True

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.config = self.directory.parent / f"{self.place.name}.yaml"
        self.config.write_text(self.place.config)
        self.started: list[Running] = []
        self._workflow: tuple[str, str] | None = None

    def close(self) -> None:
        """End what a failed test has left running, here and at the site; show what was said."""
        for running in self.started:
            running.kill()
            print(running.output)  # noqa: T201 - pytest shows it with a failure only
        with suppress(JournalError):  # there may be none, or a damaged one
            self.place.end([job for record in self.attempts for job in record.site_jobs])

    def write(self, path: str, text: str = "x\n") -> Path:
        """Write a file of the workflow; common indentation is removed."""
        target = self.directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(dedent(text))
        return target

    def read(self, path: str) -> str:
        return (self.directory / path).read_text()

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.directory / path)

    @property
    def workspace(self) -> Path:
        """The workflow's workspace at the site, as this machine sees it."""
        return self.workspace_at(self.place)

    def lines(self, name: str = "ran.txt") -> list[str]:
        """What the jobs have noted in a file of the workspace, in that order."""
        path = self.workspace / name
        return path.read_text().splitlines() if path.exists() else []

    def go(self) -> None:
        """Let jobs end that wait for this."""
        (self.workspace / "go").touch()

    def workspace_at(self, place: Place) -> Path:
        """The same at another site."""
        if self._workflow is None:
            until(self._read_workflow, "the journal")
            assert self._workflow is not None
        home, workflow = self._workflow
        root = place.storage / "mantik" / workspace_name(Path(home), workflow)
        return Path(workspace_below(str(root)))

    def _read_workflow(self) -> bool:
        """Whether the journal has the workflow by now. Before the first run it is made."""
        state = self.directory / ".snakemake" / "mantik"
        file = state / "journal.sqlite"
        # A run makes it itself, and fails if another process holds its lock.
        running = any(run.process.poll() is None for run in self.started)
        if not running and not file.exists():
            Journal(state).close()
        with (
            suppress(sqlite3.OperationalError),  # there is none yet, or no table
            closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db,
        ):
            found = db.execute("SELECT home, id FROM workflow WHERE home <> ''")  # two writes
            self._workflow = found.fetchone()
        return self._workflow is not None

    @property
    def attempts(self) -> list[AttemptRecord]:
        """What the journal knows of all jobs."""
        return read_history(self.directory / ".snakemake" / "mantik")

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        return {**kept, **self.place.environment, **self.extra}

    def command(self, *arguments: str, plain: bool = False, local: bool = False) -> list[str]:
        """The command line; `plain`: without any option of ours, `local`: with Snakemake's own."""
        words = [sys.executable, "-m", "snakemake", *arguments]
        if local:
            words += ["--executor", "local", "--cores", "4"]
        elif not plain:
            words += ["--executor", "mantik", "--jobs", "20"]
            words += ["--mantik-backend-config", str(self.config), *self.sites]
        return words

    def run(self, *arguments: str, plain: bool = False, local: bool = False) -> Ran:
        return self.start(*arguments, plain=plain, local=local).end()

    def start(self, *arguments: str, plain: bool = False, local: bool = False) -> "Running":
        """Start `snakemake`: a fork of a process that has imported it, or the command itself."""
        log = self.directory.parent / f"output-{time.monotonic_ns()}.txt"
        command = self.command(*arguments, plain=plain, local=local)
        process: Fork | subprocess.Popen[bytes]
        with log.open("wb") as output:
            if self.forked and forkserver.can_run(self.environment):
                process = forkserver.run(
                    command[command.index("snakemake") + 1 :],
                    cwd=self.directory,
                    environment=self.environment,
                    output=output.fileno(),
                )
            else:
                process = subprocess.Popen(
                    command,
                    cwd=self.directory,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        self.started.append(Running(process, log))
        return self.started[-1]

    def twin(self) -> "Project":
        """The same files in another directory, to be run with Snakemake's own local executor."""
        directory = self.directory.with_name(f"{self.directory.name}-twin")
        shutil.copytree(self.directory, directory, symlinks=True)
        return Project(directory, self.place, self.extra, sites=self.sites)


@dataclass(frozen=True)
class Running:
    """A `snakemake` that was started."""

    process: "subprocess.Popen[bytes] | Fork"
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def says(self, words: str, deadline: float = WAIT_S) -> None:
        end = time.monotonic() + deadline
        while words not in self.output:
            over = self.process.poll() is not None and words not in self.output
            assert not over, f"it ended without saying {words!r}:\n{self.output}"
            assert time.monotonic() < end, f"not said in {deadline} s: {words!r}:\n{self.output}"
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill it with -9, as a crash or an empty battery does."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def interrupt(self) -> Ran:
        self.process.send_signal(signal.SIGINT)
        return self.end()

    def end(self, deadline: float = WAIT_S) -> Ran:
        """Wait for its end, `deadline` seconds at most."""
        return Ran(self.process.wait(deadline), self.output)


UNTRACKED = {"SNAKEMAKE_MANTIK_TRACK": "none"}
"""For workflows whose MLflow runs are not looked at: MLflow takes seconds to start."""

FILES_STAY = (
    "--shared-fs-usage", "persistence", "software-deployment", "sources", "source-cache",
    "--default-storage-provider", "mantik", "--default-storage-prefix", "mantik:",
)  # fmt: skip
"""Options with which outputs stay at their sites."""

NEW_FILE = 0o644
"""Permissions of a file that was made with the umask 022, which the tests run with."""


def one_rule_each(**texts: str) -> str:
    """A Snakefile with a rule of each name, which makes a file of that name, and one for all.

    A text has the rule's other lines; a rule that runs nothing else touches its output.
    """
    made = [f"rule all:\n    input: {list(texts)!r}\n"]
    for name, text in texts.items():
        runs = re.search(r"^(shell|script|run|notebook):", text, re.MULTILINE)
        lines = [
            f'output: "{name}"',
            *text.splitlines(),
            *([] if runs else ['shell: "touch {output}"']),
        ]
        made.append(f"rule {name}:\n" + "".join(f"    {line}\n" for line in lines))
    return "\n".join(made)


def tree(directory: Path) -> dict[str, str | bytes]:
    """All below a directory: bytes of files, targets of links, `/` for directories.

    Hidden things, MLflow's own files and Python's bytecode are left out. Permissions belong to a
    file's name, unless they are those of any new file.
    """
    found: dict[str, str | bytes] = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if name.startswith((".", "mlruns", "mlflow.db")) or "/.snakemake/" in f"/{name}/":
            continue
        if "__pycache__" in path.parts:
            continue
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_dir():
            found[name] = "/"
        else:
            mode = path.stat().st_mode & 0o777
            found[name if mode == NEW_FILE else f"{name} [{mode:o}]"] = path.read_bytes()
    return found


def until(condition: Callable[[], T], what: str, deadline: float = WAIT_S) -> T:
    """Return what a condition gives that holds, for those who look at it."""
    end = time.monotonic() + deadline
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {deadline} s in vain for {what}"
        time.sleep(0.05)
    return found


def tells(said: str, *words: str) -> None:
    """See to it that each of `words` is in what was said."""
    lacking = [word for word in words if word not in said]
    assert not lacking, f"not said: {lacking}\n\n{said}"
