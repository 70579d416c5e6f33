"""The agent in an allocation of a pool, in virtual time: what `jobs/bash/agent.sh` does."""

import gzip
import io
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from snakemake_executor_plugin_mantik.jobs.packs import read_tar
from snakemake_executor_plugin_mantik.jobs.paths import ATTEMPTS, parse_marker_name
from snakemake_executor_plugin_mantik.jobs.pools import MARGIN_S, job_id
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.sites.base import Phase

if TYPE_CHECKING:
    from tests.support.world import World

TICK_S: Final = 1.0
REST_S: Final = 600.0
"""Seconds after which it removes a file of jobs that is not whole, and marks."""


ENDS: Final = {
    "time": Reason.TIME_LIMIT,
    "stop": Reason.CANCELLED,
    "pool": Reason.ALLOCATION_ENDED,
}


class Killed(Exception):  # noqa: N818 - reads as what it says
    """The agent was killed."""


@dataclass
class Running:
    """A job that it runs: when its walltime is over, and how the agent has asked it to end."""

    job: Any
    start: Any
    cpus: int
    bucket: str
    ends: float
    how: str = ""


class Agent:
    def __init__(
        self,
        world: "World",
        allocation: Any,
        script: str,
        over: Callable[..., None],
        step: int | None,
    ) -> None:
        """Make it; `over` is called when it ends; it is killed at its step number `step`."""
        values = dict(re.findall(r"^_p_(\w+)=(.*)$", script, re.MULTILINE))
        self._world, self._allocation, self._over, self._left = world, allocation, over, step
        self.directory = values["directory"].removeprefix("/ws/")
        self._name, self._tag = values["name"], values["alloc"]
        self._cpus = int(values["cpus"])
        self._idle_s, self._grace_s = float(values["idle_s"]), float(values["grace_s"])
        self.limit_s = float(values["runtime_s"]) + MARGIN_S
        self._ends = world.now + float(values["runtime_s"])
        self._sweeps, self._busy = world.sweeps, world.now
        self._running: dict[str, Running] = {}
        self._marks, self._marked = dict[str, bytes](), 0
        self._due = self._dead = self._leaving = self._began = False

    @property
    def alive(self) -> bool:
        return not self._dead

    def stir(self, seconds: float = TICK_S) -> None:
        """Something has happened in its directory, or will after some time."""
        if not self._dead and (seconds > TICK_S or not self._due):
            self._due |= seconds <= TICK_S
            self._world.after(seconds, self._tick)

    def signalled(self) -> None:
        self._leaving = True
        for job in self._running.values():
            self._end(job, "pool")
        self.stir()

    def die(self, survives: float) -> None:
        """It is killed; the jobs of it survive for some seconds."""
        self._dead = True
        for job in self._running.values():
            self._world.after(survives, partial(self._world.lose, job.start))

    def _tick(self) -> None:
        self._due = False
        if self._dead:
            return
        try:
            if not self._began:
                self._began = True
                for name in self._names(rf"run\.{self._tag}\..*"):  # of a start before this one
                    self._move(name, f"done.pool.{name.rpartition('.')[2]}")
            self._reap()
            self._show_marks()
            self._read_stops()
            if not self._leaving:
                self._unpack()
                self._take()
            self._leave()
        except Killed:
            self._over(killed=True)

    def _step(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Killed

    # The directory, in which nothing is any more once it was swept

    @property
    def _swept(self) -> bool:
        return self._world.sweeps > self._sweeps

    def _names(self, pattern: str) -> list[str]:
        if self._swept:
            return []
        begin = f"{self.directory}/"
        names = [path.removeprefix(begin) for path in self._world.files if path.startswith(begin)]
        return sorted(name for name in names if re.fullmatch(pattern, name))

    def _move(self, name: str, to: str) -> None:
        self._step()
        if f"{self.directory}/{name}" in self._world.files and not self._swept:
            self._world.move(f"{self.directory}/{name}", f"{self.directory}/{to}")

    def _remove(self, name: str) -> None:
        self._step()
        if not self._swept:
            self._world.remove(f"{self.directory}/{name}")

    def _write(self, name: str, content: bytes) -> None:
        self._step()
        if not (self._swept or self._world.full):
            self._world.written(f"{self.directory}/{name}", content)

    # What it does

    def _end(self, running: Running, how: str) -> None:
        if running.how or running.start.phase is Phase.ENDED:
            return
        running.how = how
        self._world.excuse(running.job, ENDS[how])
        self._world.ask_to_end(running.job, running.start)
        self._world.after(self._grace_s, partial(self._world.lose, running.start))
        self.stir(self._grace_s + 1)

    def _reap(self) -> None:
        for tag, one in list(self._running.items()):
            if one.start.phase is not Phase.ENDED:
                if self._world.now >= one.ends:
                    self._end(one, "time")
                continue
            code = one.start.code
            marks = {
                path.removeprefix(f"{ATTEMPTS}/"): content
                for path, content in self._world.files.items()
                if path.startswith(f"{ATTEMPTS}/{one.bucket}/{tag}.")
                and parse_marker_name(path.rpartition("/")[2])
            }
            self._step()
            for path, content in marks.items():
                if not self._world.full:
                    self._marks[path] = content or b""
            if marks and f"{one.how}{code}" == "0":
                self._remove(f"run.{self._tag}.{tag}")
            else:
                self._move(f"run.{self._tag}.{tag}", f"done.{one.how or code}.{tag}")
            del self._running[tag]
            self._cpus += one.cpus
            self._busy = self._world.now

    def _show_marks(self) -> None:
        if self._marks:
            name = f"marks.{self._tag}.{self._marked}"
            file = io.BytesIO()
            with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
                for path, content in self._marks.items():
                    member = tarfile.TarInfo(path)
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
            self._write(name, file.getvalue())
            self._marks, self._marked = {}, self._marked + 1
            self._world.after(REST_S, partial(self._world.remove, f"{self.directory}/{name}"))

    def _read_stops(self) -> None:
        for name in self._names(r"stop\..*"):
            tag = name.removeprefix("stop.")
            if tag in self._running:
                self._end(self._running[tag], "stop")
            if self._names(rf"run\..*\.{tag}") and not self._names(rf"run\.{self._tag}\.{tag}"):
                continue
            for waiting in self._names(rf"(ready|behind)\..*\.{tag}"):
                self._remove(waiting)
            self._remove(name)

    def _unpack(self) -> None:
        for name in self._names(r"in\..*"):
            content = self._world.files[f"{self.directory}/{name}"] or b""
            if int(name.split(".")[2]) != len(content):
                path = f"{self.directory}/{name}"
                if self._world.since(path) > REST_S:
                    self._remove(name)
                else:
                    self.stir(REST_S + 1)
                continue
            mine = f".unpack.{self._tag}.{name}"
            self._move(name, mine)
            for file, pieces in read_tar(io.BytesIO(gzip.decompress(content))):
                self._write(file, b"".join(pieces))
            self._remove(mine)

    def _promote(self) -> None:
        ended = {
            name
            for name in self._names(r"run\..*")
            if (owner := name.split(".")[1]) != self._tag and not self._names(f"pool.{owner}")
        }
        there = {
            name.rpartition(".")[2]
            for name in self._names(r"(ready|behind|run)\..*")
            if name not in ended  # an agent may have died between the end of its job and the file's
        }
        done = {name.rpartition(".")[2] for name in self._names(r"done\.(?!pool\.).*")}
        done |= {
            path.rpartition("/")[2].partition(".")[0]
            for path in self._world.files
            if path.startswith(f"{ATTEMPTS}/") and parse_marker_name(path.rpartition("/")[2])
        }
        for name in self._names(r"behind\..*"):
            line = (self._world.files[f"{self.directory}/{name}"] or b"").split(b"\n")[1].decode()
            before = {path.rpartition("/")[2] for path in line.removeprefix("# After: ").split()}
            if before <= done - there:
                self._move(name, f"ready.{name.removeprefix('behind.')}")

    def _take(self) -> None:
        self._promote()
        for name in self._names(r"ready\..*"):
            _, _, cpus, _, _, seconds, _, bucket, tag = name.split(".")
            ends = self._world.now + float(seconds)
            if int(cpus) > self._cpus or ends + self._grace_s > self._ends:
                continue
            if self._names(rf"run\.{self._tag}\.{tag}"):
                self._remove(name)
                continue
            self._move(name, f"run.{self._tag}.{tag}")
            self._step()
            own = job_id(self._name, tag)
            job, start = self._world.start_in(self._allocation, own, tag)
            self._running[tag] = Running(job, start, int(cpus), bucket, ends + 1)
            self._cpus -= int(cpus)
            self._world.after(float(seconds) + 1, self._tick)

    def _leave(self) -> None:
        now = self._world.now
        if any(one.start.phase is Phase.ENDED for one in self._running.values()) or self._marks:
            self.stir()
        if self._running:
            return
        idle = now - self._busy
        if self._leaving or idle >= self._idle_s or now + self._grace_s >= self._ends:
            self._show_marks()
            self._remove(f"pool.{self._tag}")
            self._dead = True
            self._over(killed=False)
        else:
            self.stir(max(TICK_S, self._idle_s - idle))
