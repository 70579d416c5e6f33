"""Runs job scripts with a real bash in a workspace on this machine."""

import gzip
import io
import os
import signal
import subprocess
import tarfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.jobs.library import library_path, read_library
from snakemake_executor_plugin_mantik.jobs.markers import Marker, read_marker
from snakemake_executor_plugin_mantik.jobs.paths import AttemptPaths, bundle_path, parse_marker_name
from snakemake_executor_plugin_mantik.jobs.script import render_script
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec, ScriptLimits
from snakemake_executor_plugin_mantik.staging.bundle import compress
from tests.support.workflows import until

NASTY = "a b'\"\n#%*$HOME`ü;-"
"""A file name that nothing may stumble over."""

QUICK = ScriptLimits(heartbeat_s=1, grace_s=20, visible_s=0)
"""Nobody waits for long, but for the last words of what ends when it is asked to."""


@dataclass(frozen=True)
class Ended:
    """An attempt that has ended: what the script returned and what it left behind."""

    returned: int
    output: str
    marker: Marker | None
    log: str
    entries: tuple[str, ...]

    @property
    def sure(self) -> Marker:
        """The marker, which must be there."""
        assert self.marker is not None, f"no marker, but {self.entries}\n{self.output}\n{self.log}"
        return self.marker


class Trial:
    """A workspace, and the attempts in it."""

    def __init__(self, folder: Path) -> None:
        self.move(folder / NASTY)
        self.start_folder = folder / "job-17"
        self.start_folder.mkdir()
        self.bin = folder / "bin"
        self.bin.mkdir()
        self._started: list[subprocess.Popen[str]] = []

    def move(self, workspace: Path) -> None:
        """Have the attempts in another workspace, with all that jobs need there."""
        self.workspace, self.attempts = workspace, workspace / ".mantik/attempts/3"
        self.attempts.mkdir(parents=True)
        (workspace / library_path()).write_bytes(read_library())

    def spec(self, command: str = ":", **values: Any) -> JobSpec:
        """A job; `values` are fields of `JobSpec`."""
        spec = JobSpec(
            paths=AttemptPaths(bucket=3, attempt_id=str(uuid.uuid4())),
            workspace=str(self.workspace),
            name="train: alpha=1",
            command=command,
            limits=QUICK,
        )
        return replace(spec, **values)

    def program(self, name: str, text: str) -> None:
        """Put a program in front of all others of that name."""
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def checksums(self, text: str) -> None:
        """Put what a job takes for `sha256sum` once it has read its library."""
        real = 'exec /usr/bin/sha256sum "$@"'
        self.program(
            "sha256sum", f"#!/bin/bash\ncase $1 in .mantik/lib-*) {real} ;; esac\n{text}{real}\n"
        )

    def start(
        self, spec: JobSpec, *, env: Mapping[str, str] | None = None, shell: tuple[str, ...] = ()
    ) -> "subprocess.Popen[str]":
        """Start the script as a scheduler would, in a directory of its own."""
        rendered = render_script(spec)
        for path, content in rendered.beside.items():
            if not (self.workspace / path).exists():  # a test may have put others there
                self.write(path).write_bytes(content)
        script = self.start_folder / f"{uuid.uuid4()}.sh"
        script.write_bytes(rendered.text.encode("utf-8", "surrogateescape"))
        process = subprocess.Popen(
            [*shell, "bash", str(script)],
            cwd=self.start_folder,
            env={**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def bash(self, text: str, **variables: str) -> "subprocess.Popen[str]":
        """Start a text of bash in the workspace, with the system's programs and those of `bin`."""
        paths = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.start_folder)}
        process = subprocess.Popen(
            ["bash", "-c", text],
            cwd=self.workspace,
            env={**os.environ, **paths, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def stop(self) -> None:
        """Kill what still runs of all that was started."""
        for process in self._started:
            if process.poll() is None:
                signal_session(process.pid, signal.SIGKILL)
                process.communicate()
            for stream in filter(None, (process.stdout, process.stderr)):
                stream.close()

    def end(self, spec: JobSpec, process: "subprocess.Popen[str]") -> Ended:
        """Wait for a started script, also for all that holds its output open."""
        output, _ = process.communicate(timeout=600)
        entries = tuple(sorted(path.name for path in self.attempts.iterdir()))
        marker = None
        for name in entries:
            told = parse_marker_name(name)
            if told is not None and told[0] == spec.paths.attempt_id:
                content = (self.attempts / name).read_bytes()
                marker = read_marker(content, attempt_id=told[0], exit_code=told[1])
        log = self.workspace / spec.paths.log
        text = log.read_text(errors="replace") if log.exists() else ""
        return Ended(process.returncode, output, marker, text, entries)

    def run(self, spec: JobSpec, *, env: Mapping[str, str] | None = None) -> Ended:
        return self.end(spec, self.start(spec, env=env))

    def running(
        self, spec: JobSpec, *, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start a script, and wait until its command has made the file `running`."""
        process = self.start(spec, env=env)
        running = self.workspace / "running"
        wait_until(lambda: running.exists() or process.poll() is not None)
        return process

    def signalled(
        self, spec: JobSpec, *signals: int, env: Mapping[str, str] | None = None
    ) -> Ended:
        """Run a script that gets signals once its command has made the file `running`."""
        process = self.running(spec, env=env)
        for number in signals:
            os.kill(process.pid, number)
        return self.end(spec, process)

    def write(self, path: str, text: str = "x") -> Path:
        place = self.workspace / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        return place

    def upload(self, bundle: str, content: bytes) -> None:
        place = self.workspace / bundle_path(bundle)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)

    def upload_parts(self, bundle: str, content: bytes, count: int) -> list[Path]:
        """Put a bundle in parts, each compressed by itself, where the script looks for it."""
        plain = gzip.decompress(content)
        size = -(-len(plain) // count)
        parts = []
        for number in range(count):
            place = self.workspace / bundle_path(bundle) / f"{number + 1:07}-of-{count:07}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(compress(plain[number * size : (number + 1) * size]))
            parts.append(place)
        return parts


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    made = Trial(tmp_path)
    yield made
    made.stop()


def session(leader: int) -> list[int]:
    """The processes of a session: all that a start of a script has made."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getsid(int(process.name)) == leader:
                found.append(int(process.name))
    return found


def signal_session(leader: int, *numbers: signal.Signals) -> None:
    """Send signals to what of a session has not ended meanwhile."""
    for member in session(leader):
        with suppress(ProcessLookupError):
            for number in numbers:
                os.kill(member, number)


def packed(files: Mapping[str, bytes | None], links: Mapping[str, str] | None = None) -> bytes:
    """A gzipped tar; None stands for an empty directory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
            else:
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content or b""))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return buffer.getvalue()


def wait_until(true: Callable[[], object]) -> None:
    until(true, "what has to come")
