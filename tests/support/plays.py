"""A workflow that is started again and again until it is done, and what must hold of it.

What Snakemake does stands here in short: it starts what can start, removes old outputs first, takes
outputs or does not, tries again, and the next run begins with what is not done.
"""

import asyncio
import copy
import hashlib
import itertools
import json
import os
import posixpath
import random
import shutil
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from snakemake_executor_plugin_mantik.common.errors import MantikError, PlaceTaken
from snakemake_executor_plugin_mantik.engine.adopt import name_of_maker
from snakemake_executor_plugin_mantik.engine.cancel import CANCEL_WAIT_S
from snakemake_executor_plugin_mantik.engine.compare import look
from snakemake_executor_plugin_mantik.engine.core import AT_ONCE_S, CLOSE_WAIT_S
from snakemake_executor_plugin_mantik.engine.leases import Lease
from snakemake_executor_plugin_mantik.engine.place import make_retry
from snakemake_executor_plugin_mantik.engine.request import JobRequest, Outcome, _digest
from snakemake_executor_plugin_mantik.jobs.paths import ATTEMPTS, PLACE
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.segments import Continuation
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.journal import (
    AttemptRecord,
    AttemptState,
    Journal,
    RemoteOutput,
    RemoteOutputs,
    read_history,
    read_stored,
)
from snakemake_executor_plugin_mantik.staging.project_files import ProjectFiles
from tests.support.controller import request
from tests.support.laptop import Died, Session, run_all
from tests.support.schedules import DAY_S, REPEATING, Schedule
from tests.support.simulated import Fault
from tests.support.world import PayloadRun, World, result

UNWELL, SESSIONS = 8, 16
"""How many runs there are in which things may happen, and at most in all."""
REPEATS = 3
WALLTIME_MIN = 170
"""Minutes that a job of a pool requests."""
LOST_S = 100 * DAY_S
"""A run that takes as long waits for something that never comes."""
YOUNG_S = 90.0
"""Age of a copy of the journal up to which nothing at the place may say that it is one: a run
writes a spare there each minute."""
UNTOLD = {"answers", "outages", "strays", "late", "lost", "restarts"}
"""Where these happen, nobody may tell who ended a job that says itself that it was ended."""
SWEPT = {"purges", "tampers"}
"""Where these happen, what a job needs or has made may be gone."""
DATA = ("data/a", "data/b", "data/large")
OTHERS_TAKE = {"copies", "purges"}
"""Where these happen, a job may run twice, or another controller removes what is a former one's."""
REFUSED = ("another controller of this workflow", "another workflow")
"""How it is told that a place is another's."""
OTHERS = 100
"""The number of the first job of another workflow."""


Ended = dict[int, "asyncio.Future[bool]"]
"""Whether each job of a run has ended well, by number."""


@dataclass
class Job:
    """A job of the workflow, as the user has written it just now."""

    number: int
    needs: Sequence[int]
    data: Sequence[str]
    site: str
    version: int = 0
    stays: bool = False
    temporary: bool = False
    storable: frozenset[str] = frozenset()
    continuation: Continuation | None = None
    pooled: bool = False

    @property
    def request(self) -> JobRequest:
        inputs = [*self.data, *(f"out/{need}" for need in self.needs)]
        outputs = (OutputFile(self.output, stored=self.stays),)
        asked = replace(
            request(self.number, *inputs), site=self.site, outputs=outputs, storable=self.storable
        )
        asked = replace(asked, command=f"make {self.number} version {self.version}")
        if self.pooled:
            return replace(asked, resources={"mantik_pool": "small", "runtime": WALLTIME_MIN})
        if self.continuation is None:
            return asked
        return replace(asked, continuation=self.continuation, resources={"runtime": 1440})

    @property
    def output(self) -> str:
        return f"out/{self.number}"


@dataclass
class Play:
    """One schedule, from the first run to the last.

    Attributes:
        schedule: what happens.
        workdir: the workflow's directory, which is made.
        first: the number of its first job.
        worlds: the sites, by name.
        jobs: the workflow's.
        done: what jobs have made, by number.
        failures: what was told of those that failed.
        led: whether the last run led its places.
        refused: whether it was told that one is another's.
    """

    schedule: Schedule
    workdir: Path
    first: int = 0
    worlds: dict[str, World] = field(default_factory=dict)
    jobs: list[Job] = field(init=False)
    done: dict[int, bytes] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    led: bool = False
    refused: bool = False

    def __post_init__(self) -> None:
        plan = self.schedule.stream("two workflows" if self.first else "plan")
        kinds = self.schedule.kinds
        if not self.worlds:
            one = self.schedule.world("sim") if kinds & {"one place", "two names"} else None
            self.worlds = {name: one or self.schedule.world(name) for name in self.schedule.names}
        self._copy: Play | None = None
        self._again: Session | None = None
        self._outdated: set[str] = set()
        self._backed_up = 0.0
        self._intruder: Play | None = None
        self._versions: dict[str, list[bytes]] = defaultdict(list)
        self._settled: dict[str, float] = {}
        self._unwanted: set[str] = set()
        self._touches = 0
        for path in (*DATA, "lib.py"):
            self._change(path, plan.randbytes(2000) if path == "data/large" else b"0000")
        self.jobs = []
        for number in range(self.first, self.first + plan.randint(*self.schedule.jobs)):
            needs = [n for n in range(self.first, number) if plan.random() < self.schedule.needs]
            temporary = self.schedule.temporary(first=number == self.first)
            if "targets" in kinds and number > self.first:  # all read the same
                needs = [self.first, *needs[self.first in needs :]]
            site = plan.choice(self.schedule.names)
            stays = self.schedule.stays() and not temporary
            storable = frozenset(j.output for j in self.jobs if j.stays and j.number in needs)
            self.jobs.append(
                Job(
                    number,
                    needs,
                    plan.sample(DATA, 2),
                    site,
                    stays=stays,
                    temporary=temporary,
                    storable=storable,
                    continuation=self.schedule.continuation(number),
                    pooled=self.schedule.pooled(),
                )
            )

    @property
    def now(self) -> float:
        return max(world.now for world in self.worlds.values())

    def run(self) -> None:
        """Play it to its end.

        Raises:
            AssertionError: a job was lost, doubled or misreported, or an output is not whole.
        """
        now = itertools.count(10**18, 10**9)  # names with the time in them are the same, too
        with (
            mock.patch("uuid.uuid4", self.schedule.uuid),
            mock.patch("time.time_ns", now.__next__),
        ):
            self._runs_of_snakemake()

    def _runs_of_snakemake(self) -> None:
        random.seed(self.schedule.seed)  # how long a pause is, in the engine
        for number in range(SESSIONS):
            if number == UNWELL:
                self.schedule.heal(*self.worlds.values())
            self._run_once()
            for play in filter(None, (self, self._copy)):
                if play.refused and (self.schedule.healed or self.schedule.has("copies", 0.5)):
                    play._unlock()
            late = self.refused and self.schedule.stream("copies").random() < 0.5
            self._pass(self.now + self.schedule.pause() + 2 * DAY_S * late)
            self._note_outdated()
            if not self._needed(self._targets):
                break
            self._edit()
            self._mislay()
        assert not self._needed(self._targets), f"never done: {self.failures}"
        self._pass(self.now + 2 * DAY_S)  # what is still to start late starts now
        self._check_runs()
        for world in {id(world): world for world in self.worlds.values()}.values():
            assert not world.taken or self.schedule.kinds & OTHERS_TAKE, f"taken: {world.taken}"

    def _run_once(self) -> None:
        """One run of the workflow's own controller, and of others beside it or instead of it."""
        how, when = self.schedule.end()
        where, begins, copy_how, copy_when = self.schedule.of_copy()
        works: dict[Session, Coroutine[Any, Any, None]] = {}
        session, beside = None, self._copied() if where else None
        if where != "instead" or beside is None:
            cut_off = self.schedule.cut_off() if beside is not None else (0.0, 0.0)
            session = self._session(how, when, cut_off=cut_off)
            works[session] = self._start(session, how, when)
        if beside is not None:
            other = beside._session(copy_how, copy_when, beside=session)
            works[other] = beside._visit(other, begins, copy_how, copy_when)
        intruder = self._intruding() if session is not None else None
        if intruder is not None:
            third = intruder._session("", 0.0, beside=session)
            works[third] = intruder._intrude(third)
        run_all(works)
        for one in works:
            freed = sum("allocation that ran it has ended" in line for line in one.said)
            self.schedule.happened["jobs whose allocation ended"] += freed
            with suppress(Died):
                one.result()
        for play in filter(None, (self, beside)):
            if play._again is not None:
                play._again.bury()
        last = self._again or session
        if last is not None and last.died and how == "loses power":
            last.lose_power()
        for play in filter(None, (self, beside, intruder)):
            play._again = None
            play._check_files()
        if intruder is not None:
            intruder._clean()

    def _session(
        self,
        how: str,
        when: float,
        *,
        cut_off: tuple[float, float] = (0.0, 0.0),
        beside: Session | None = None,
    ) -> Session:
        session = Session(
            self.worlds, self.workdir, self.schedule.config,
            one_client="one place" not in self.schedule.kinds, beside=beside,
            presubmit=self.schedule.presubmit,
        )  # fmt: skip
        clock = session.loop.time
        begin, end = (clock() + seconds for seconds in cut_off)

        def fault(method: str, about: str) -> Fault:
            if begin <= clock() < end:
                return "unreachable"
            return self.schedule.fault(method, clock())

        session.full = lambda: self.schedule.full_here(clock())
        for site in session.sites.values():
            site.fault = fault
            site.cut = lambda: self.schedule.has("interrupts", 0.5)
        if how in ("dies", "loses power"):
            session.die_at(round(when))
        return session

    def _pass(self, now: float) -> None:
        for world in self.worlds.values():
            world.advance(now)

    # Others

    def _copied(self) -> "Play | None":
        """A copy of the project with its journal, in another directory or on another machine."""
        there = (self.workdir / ".snakemake/mantik" / "journal.sqlite").exists()
        # Nobody can know of the jobs of a copy that is removed, once its lease is swept, too.
        lasts = not there or "purges" in self.schedule.kinds
        if self._copy is None or (not lasts and self.schedule.has("copies", 0.3)):
            if not there:
                return None
            self._copy = made = copy.copy(self)
            made.workdir, made.refused = self.workdir.with_name("copy"), False
            shutil.rmtree(made.workdir, ignore_errors=True)
            shutil.copytree(self.workdir, made.workdir)
            made.jobs = copy.deepcopy(self.jobs)
            made.done, made._settled = dict(self.done), dict(self._settled)
            made._versions = copy.deepcopy(self._versions)
        return self._copy

    async def _visit(self, session: Session, begins: float, how: str, when: float) -> None:
        await asyncio.sleep(begins)
        await self._start(session, how, when)
        self.schedule.happened["copies that were refused"] += self.refused

    async def _start(self, session: Session, how: str, when: float) -> None:
        """A run; if it is refused, the user may say that the other one has ended, and start again.

        They need not be right.
        """
        await self._snakemake(session, how, when)
        if not (self.refused and self.schedule.has("copies", 0.4)):
            return
        session.bury()
        self._unlock()
        over = asyncio.Event()
        self._again = again = self._session(how, when, beside=session)
        again.begin(self._snakemake(again, how, when), over.set)
        await over.wait()
        self.schedule.happened["controllers that were unlocked at once"] += self.led
        again.end()
        again.result()

    def _unlock(self) -> None:
        if (self._state / "journal.sqlite").exists():
            with closing(Journal(self._state)) as journal:
                journal.unlock()

    def _intruding(self) -> "Play | None":
        """Another workflow whose `Site: Workspace` is the same."""
        if not self.schedule.has("two workflows", 0.3):
            return None
        if self._intruder is None:
            workdir = self.workdir.with_name("other")
            self._intruder = Play(self.schedule, workdir, OTHERS, self.worlds)
        return self._intruder

    async def _intrude(self, session: Session) -> None:
        """A run of the other workflow; it does not come to a place that is nobody's yet."""
        await asyncio.sleep(10 ** self.schedule.stream("two workflows").uniform(0, 3.5))
        if all(self._leases(world) for world in self.worlds.values()):
            await self._snakemake(session, "cancels", 1000.0)
            assert not self.led or "purges" in self.schedule.kinds, "two workflows in one place"
            self.schedule.happened["other workflows that were refused"] += self.refused
            self.schedule.happened["other workflows at a swept place"] += self.led

    @staticmethod
    def _leases(world: World) -> list[Lease]:
        names = [path.rpartition("/")[2] for path in world.files if path.startswith(f"{PLACE}/")]
        return [lease for name in names if (lease := Lease.of(name)) is not None]

    def _clean(self) -> None:
        """The workflow's user removes what it has at the sites, as `smk-mantik clean` does."""
        known = read_history(self.workdir / ".snakemake/mantik")
        with closing(Journal(self.workdir / ".snakemake/mantik")) as journal:
            workflow = journal.workflow
        for world in self.worlds.values():
            tags = {record.id for record in known}
            for job in [job for job in world.jobs.values() if job.tag in tags]:
                world.forget(job.id)
            gone = {record.paths.attempts for record in known}
            for path in gone | {o.path for o in self._leases(world) if o.workflow == workflow}:
                world.remove(path)

    # The journal

    @property
    def _state(self) -> Path:
        return self.workdir / ".snakemake/mantik"

    def _back_up(self) -> None:
        """Copy the journal, as a backup or a snapshot of the file system does."""
        for path in self._saved.rglob("*"):
            if path.is_file() and not (self._state / path.relative_to(self._saved)).exists():
                path.unlink()
        self._backed_up = self.now
        if self._state.exists():
            shutil.copytree(
                self._state, self._saved, dirs_exist_ok=True, copy_function=_copy_what_changed
            )

    @property
    def _saved(self) -> Path:
        return self.workdir.with_name(f"{self.workdir.name}-saved")

    async def _back_ups(self) -> None:
        """Copy it while jobs wait and run."""
        chance = self.schedule.stream("journals")
        while self.schedule.has("journals"):
            await asyncio.sleep(10 ** chance.uniform(1, 4))
            self._back_up()

    def _mislay(self) -> None:
        """Perhaps lose the journal, or all that was written to it lately."""
        chance = self.schedule.stream("journals")
        if not (self.schedule.has("journals", 0.5) and self._state.exists()):
            return
        journal = self._state / "journal.sqlite"
        how = chance.choice(("removed", "emptied", "restored", "cut"))
        if how in ("restored", "cut") and not (self._saved / journal.name).exists():
            return
        before = {record.id for record in self._journal()}
        for path in self._state.glob(f"{journal.name}*"):
            path.unlink()
        match how:
            case "removed":
                shutil.rmtree(self._state)
            case "emptied":
                journal.touch()
            case "restored":
                shutil.rmtree(self._state)
                shutil.copytree(self._saved, self._state)
                if self.now - self._backed_up < YOUNG_S:  # no number was taken at the place since
                    self._outdated |= before - {record.id for record in self._journal()}
            case _:  # its spare is newer
                for path in self._saved.glob(f"{journal.name}*"):
                    shutil.copy(path, self._state)
        self.schedule.happened["journals lost or put back"] += 1

    def _journal(self) -> Sequence[AttemptRecord]:
        there = (self._state / "journal.sqlite").exists()
        return read_history(self._state) if there else ()

    def _note_outdated(self) -> None:
        """What was made of an attempt's outputs is not wanted if that attempt is not, after all."""
        self._outdated |= {
            record.id
            for record in self._journal()
            if record.state is AttemptState.ABANDONED
            and (record.after or record.name in self._read_temporary)
        }

    # The user

    def _change(self, path: str, content: bytes) -> None:
        (self.workdir / path).parent.mkdir(parents=True, exist_ok=True)
        new = self.workdir / ".new"
        new.write_bytes(content)
        new.replace(self.workdir / path)  # in virtual time the change time may be the same
        self._versions[path].append(content)
        self._touch(path)

    def _touch(self, path: str) -> None:
        """Real time hardly passes between two runs: no two contents may have the same mtime."""
        self._touches += 1
        when = 0 if "same times" in self.schedule.kinds else self._touches
        os.utime(self.workdir / path, ns=(when, when))

    def _edit(self) -> None:
        """Perhaps change something between two runs; never back to what it was."""
        chance = self.schedule.stream("changes")
        if not self.schedule.has("changes", 0.5):
            return
        match chance.choice(("input", "command", "source", "site")):
            case "input":
                self._edit_input(chance)
            case "source":
                self._change("lib.py", (self.workdir / "lib.py").read_bytes() + b"+")
            case "command":
                chance.choice(self.jobs).version += 1
            case "site":
                chance.choice(self.jobs).site = self.schedule.names[-1]

    def _edit_input(self, chance: random.Random) -> None:
        happened = self.schedule.happened
        path = chance.choice(DATA)
        content = (self.workdir / path).read_bytes()
        if chance.random() < 0.5:
            self._change(path, content + b"+")
        else:  # a change that a file's size does not tell
            self._change(path, b"%04d" % self._touches + content[4:])
            happened["edits of equal size and time"] += "same times" in self.schedule.kinds

    async def _edits(self) -> None:
        """Change inputs while jobs wait and run."""
        chance = self.schedule.stream("edits")
        while self.schedule.has("edits"):
            await asyncio.sleep(10 ** chance.uniform(0, 4))
            self._edit_input(chance)
            self.schedule.happened["edits while jobs wait or run"] += 1

    # Snakemake

    def _named(self, job: Job, attempt_id: str) -> bytes:
        """What an attempt has to make: of the contents that its fingerprint names."""
        [record] = [
            r for r in read_history(self.workdir / ".snakemake/mantik") if r.id == attempt_id
        ]
        made_of = json.loads(record.made_of)["made_of"]
        made_by = {
            _digest(name_of_maker(run.attempt_id)): content
            for run in self._runs()
            for content in run.made.values()
        }
        inputs = {
            path: next(
                (c for c in self._versions[path]
                 if _digest(hashlib.sha256(c).hexdigest()) == made_of[f"input {path}"]),
                made_by.get(made_of[f"input {path}"], b"?"),
            )
            for path in job.request.inputs
        }  # fmt: skip
        return result(job.request.command, job.output, inputs)

    def _expected(self, job: Job) -> bytes:
        asked = job.request
        inputs = {path: (self.workdir / path).read_bytes() for path in job.data}
        needed = [self.jobs[need - self.first] for need in job.needs]
        inputs |= {other.output: self._expected(other) for other in needed}
        return result(asked.command, job.output, inputs)

    # Outputs that stay at their places

    def _content(self, job: Job) -> bytes | None:
        """What lies under an output's name, here or at its place, as far as it is known."""
        if job.stays:
            output = next((o for o in self._known().outputs if o.path == job.output), None)
            return None if output is None else self._at_place(output)
        path = self.workdir / job.output
        return path.read_bytes() if path.exists() else None

    def _known(self) -> RemoteOutputs:
        return read_stored(self.workdir / ".snakemake/mantik")

    def _at_place(self, output: RemoteOutput) -> bytes | None:
        """A remote output's content if it is as it was made."""
        [file] = output.files
        names = [s.site for s in self._known().sites.values() if s.place == output.place]
        world = self.worlds[names[0]] if names else None
        content = world.files.get(file.path) if world is not None else None
        same = content is not None and len(content) == file.size
        if world is None or not same or abs(world.modified(file.path) - file.modified) > 0.001:
            return None
        return content

    async def _compare(self, session: Session) -> None:
        """Forget what is not there any more, as Snakemake's storage provider does."""
        for output in self._known().outputs:
            name = next(s.site for s in self._known().sites.values() if s.place == output.place)
            retry = make_retry(session.sites[name], session.said.append)
            [file] = output.files
            try:
                sight = await look(
                    session.sites[name], retry, output.place, posixpath.dirname(file.path),
                    [file.path], dear=True,
                )  # fmt: skip
            except MantikError:
                continue
            if sight.lacks(file):
                assert self._at_place(output) is None, f"{output} was given up, and is there"
                session.journal.files.drop_stored(output)

    def _discard(self, session: Session, job: Job, outcome: Outcome) -> None:
        """Remove what Snakemake did not take, unless the site cannot be reached."""
        [output] = outcome.stored
        if self.schedule.stream("unwanted").random() < 0.7:
            self.worlds[job.site].remove(output.path)
        session.journal.files.drop_stored(output)

    @property
    def _read_temporary(self) -> set[str]:
        """The jobs that end when what they read is made again."""
        return {
            job.request.name
            for job in self.jobs
            if any(self.jobs[need - self.first].temporary for need in job.needs)
        }

    @property
    def _behind_unwanted(self) -> set[str]:
        """The jobs that read what Snakemake once did not take."""
        unwanted = {
            path for run in self._runs() if run.attempt_id in self._unwanted for path in run.made
        }
        return {job.request.name for job in self.jobs if unwanted & set(job.request.inputs)}

    @property
    def _targets(self) -> list[Job]:
        """What the user wants in the end."""
        needed = {need for job in self.jobs for need in job.needs}
        return [job for job in self.jobs if not job.temporary or job.number not in needed]

    def _needed(self, targets: Sequence[Job]) -> set[int]:
        """The jobs that must run for these targets."""
        found: set[int] = set()
        for job in targets:
            if not self._is_done(job):
                found |= {job.number} | self._needed([self.jobs[n - self.first] for n in job.needs])
        return found

    def _remove_temporary(self, job: Job, needed: set[int], ended: Ended) -> None:
        """Remove what a job was the last one to need, as Snakemake does."""
        for need in [self.jobs[n - self.first] for n in job.needs]:
            readers = [j.number for j in self.jobs if need.number in j.needs and j.number in needed]
            if need.temporary and all(ended[r].done() and ended[r].result() for r in readers):
                (self.workdir / need.output).unlink(missing_ok=True)
                self.schedule.happened["temporary outputs that were removed"] += 1
                reads = {j.request.name for j in self.jobs if need.number in j.needs}
                going = any(run.job in reads and run.ended is None for run in self._runs())
                self.schedule.happened["removals under a reader"] += going

    def _is_done(self, job: Job) -> bool:
        content = self._content(job)
        return content is not None and self.done.get(job.number) == self._expected(job)

    async def _snakemake(self, session: Session, how: str, when: float) -> None:
        self.led = self.refused = False
        self._going: dict[int, str] = {}
        try:
            await session.engine.opened(ProjectFiles(("lib.py",), 1, ()), *self.schedule.names)
            self.led = True
        except (MantikError, OSError) as error:
            self.refused = any(words in str(error) for words in REFUSED)
            # Jobs that another controller has sent, or a lost journal, may still run.
            if self.schedule.healed and not self.refused:
                raise
            if "remove .mantik/attempts" in str(error) and self.schedule.healed:
                self._pass(self.now + 2 * DAY_S)
                for world in self.worlds.values():
                    world.remove(ATTEMPTS)
            await session.engine.closed(tidy=False)
            return
        took_over = any("another controller has led there" in line for line in session.said)
        self.schedule.happened["takeovers"] += took_over
        await self._compare(session)
        done_jobs = {job.request.job for job in self.jobs if self._is_done(job)}
        try:
            await session.engine.unneeded(done_jobs)
        except PlaceTaken:
            self.refused = True
            await session.engine.closed(tidy=False)
            return
        ended: Ended = {job.number: session.loop.create_future() for job in self.jobs}
        target = self.schedule.target(sorted(self._needed(self._targets)))
        wanted = self._targets if target is None else [self.jobs[target - self.first]]
        self._asked = self._needed(wanted)
        for number in ended.keys() - self._asked:
            ended[number].set_result(True)
        asked = [job for job in self.jobs if job.number in self._asked]
        tasks = [asyncio.create_task(self._job(session, job, ended)) for job in asked]
        beside = [asyncio.create_task(one) for one in (self._edits(), self._back_ups())]
        in_time = how in ("cancels", "detaches")
        done, going = await asyncio.wait(
            [*tasks, asyncio.create_task(asyncio.sleep(0))],  # there may be nothing to do
            timeout=when if in_time else LOST_S,
            return_when=asyncio.FIRST_EXCEPTION,
        )
        for one in beside:
            one.cancel()
        for task in done:
            task.result()
        assert in_time or not going, f"it waits for ever: {self.failures} {session.said}"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)
        at_once = self.schedule.has("interrupts", 0.3)
        if going and how == "cancels":
            await self._cancel(session, AT_ONCE_S if at_once else CANCEL_WAIT_S)
        tidy = not (going and (at_once or how == "detaches"))
        with suppress(TimeoutError):  # as Engine.close does
            async with asyncio.timeout(CLOSE_WAIT_S):
                await session.engine.closed(tidy=tidy)

    async def _cancel(self, session: Session, wait_s: float) -> None:
        wanted = self._wanted(session)
        left = {record.id for record in await session.engine.cancelled(wait_s)}
        for record in wanted:
            # Where the claims were removed, the site's promise to end a job has to do.
            if record.id not in left and "purges" not in self.schedule.kinds:
                self._settle(record.id)

    def _wanted(self, session: Session) -> list[AttemptRecord]:
        """The open attempts of the jobs that this run has begun."""
        begun = [request.job for request in session.engine._requests.values()]
        return session.journal.open_attempts(*begun)

    async def _job(self, session: Session, job: Job, ended: Ended) -> None:
        well = [await asyncio.shield(ended[need]) for need in job.needs]
        ended[job.number].set_result(
            all(well) and (self._is_done(job) or await self._attempts(session, job))
        )
        self._remove_temporary(job, self._asked, ended)

    def _look_again(self, session: Session) -> None:
        """Propose the jobs that wait only for jobs at the same site, as the executor does."""
        for job in self.jobs:
            if job.number not in self._asked or job.number in self._going or self._is_done(job):
                continue
            needs = [self.jobs[need - self.first] for need in job.needs]
            makers = [need for need in needs if not self._is_done(need)]
            if makers and all(self._going.get(maker.number) == job.site for maker in makers):
                self._going[job.number] = job.site
                unmade = {maker.output: maker.request.job for maker in makers}
                session.engine.proposed(replace(job.request, unmade=unmade))
                self.schedule.happened["jobs proposed"] += 1

    def _impatient(self, job: Job) -> JobRequest:
        """What the engine is asked for a job that may go to another site, perhaps."""
        impatient = len(self.schedule.names) > 1 and self.schedule.patience_s
        return replace(job.request, patience_s=self.schedule.patience_s if impatient else None)

    async def _attempts(self, session: Session, job: Job) -> bool:
        for _ in range(REPEATS):
            if job.stays:
                session.journal.files.lose([job.output])
            (self.workdir / job.output).unlink(missing_ok=True)
            session.point()
            self._going[job.number] = job.site
            self._look_again(session)
            outcome = await session.engine.job(self._impatient(job))
            if outcome.withdrawn:
                job.site = next(name for name in self.schedule.names if name != job.site)
                self._going[job.number] = job.site
                self.schedule.happened["jobs that went to another site"] += 1
                outcome = await session.engine.job(job.request)
            session.point()
            if not outcome.succeeded:
                self._going.pop(job.number)
            if not outcome.succeeded:
                self._check_failure(job, outcome)
                await session.engine.committed(outcome)
                continue
            self._check_success(job, outcome)
            if outcome.attempt_id in self._unwanted or self.schedule.has("unwanted", 0.3):
                self._unwanted.add(outcome.attempt_id)  # a killed run may not have recorded it
                self._excuse(outcome.attempt_id)
                self._going.pop(job.number)
                if job.stays:
                    self._discard(session, job, outcome)
                await session.engine.committed(outcome, taken=False)
                continue
            if not job.stays:
                self._touch(job.output)
            self.done[job.number] = self._versions[job.output][-1]
            session.point()
            await session.engine.committed(outcome)
            return True
        return False

    @property
    def _one_place(self) -> bool:
        """Whether a job may change its site and run there again with the same files."""
        return len({id(world) for world in self.worlds.values()}) < len(self.worlds)

    # What must hold

    def _runs(self) -> list[PayloadRun]:
        worlds = {id(world): world for world in self.worlds.values()}
        runs = [run for world in worlds.values() for run in world.runs]
        return sorted(runs, key=lambda run: run.begun)

    def _excuses(self, attempt_id: str) -> set[str]:
        return {e for w in self.worlds.values() for e in w.excuses.get(attempt_id, ())}

    def _excuse(self, attempt_id: str) -> None:
        for world in self.worlds.values():
            world.excuses[attempt_id].add(Reason.OUTPUTS)

    def _settle(self, attempt_id: str) -> None:
        """The user was told that an attempt is over."""
        self._settled[attempt_id] = self.now
        going = [r for r in self._runs() if r.attempt_id == attempt_id and r.ended is None]
        assert not going, f"misreported: it is over, but it runs: {going}"

    def _check_success(self, job: Job, outcome: Outcome) -> None:
        told = outcome.attempt_id in self._settled
        self._settle(outcome.attempt_id)
        runs = [run for run in self._runs() if run.attempt_id == outcome.attempt_id]
        assert runs, f"misreported: {job} has never run"
        assert runs[-1].how == "exit 0", f"misreported: {job} succeeded: {runs}"
        # Without claims, which the centre has removed, nothing holds a second start back; and what
        # a controller does not know to be over, it sends again.
        # Nor does an older journal know that it was over, and Snakemake asks for the job again.
        given_up = outcome.attempt_id in self._unwanted | self._outdated
        needed_again = given_up or job.temporary or told
        again = "journals" in self.schedule.kinds and needed_again
        again = again or bool(self.schedule.kinds & {"purges", "copies"})
        assert len(runs) == 1 or again, f"doubled: {runs}"
        here = self.worlds[job.site]
        makers = [self.jobs[need - self.first] for need in job.needs]
        moved = sum(maker.stays and self.worlds[maker.site] is not here for maker in makers)
        self.schedule.happened["outputs that moved between places"] += moved
        named = self._named(job, outcome.attempt_id)
        assert [output.path for output in outcome.stored] == [job.output] * job.stays
        found = self._content(job)
        if job.stays:
            self.schedule.happened["outputs that stayed"] += 1
            removed = self.schedule.kinds & SWEPT or outcome.attempt_id in self._unwanted
            assert found is not None or removed, f"{job} is not there"
            found = named if found is None else found
        assert found is not None
        assert found == named, f"{job.output} is not of what the journal says that {job} had"
        if "edits" not in self.schedule.kinds:
            assert found == self._expected(job), f"{job.output} is not what {job} makes now"
        self._versions[job.output].append(found)

    def _check_failure(self, job: Job, outcome: Outcome) -> None:
        self.failures.append(f"{self.now:.0f} {job.request.name}: {outcome.message}")
        if outcome.attempt_id:
            again = outcome.attempt_id in self._settled  # which an older journal does not know
            self._settle(outcome.attempt_id)
            excuses = self._excuses(outcome.attempt_id)
            untold = {Reason.PREEMPTED, Reason.TIME_LIMIT, Reason.ALLOCATION_ENDED}
            # A sweep of a pool's directory takes what its agent says of the end.
            silent = UNTOLD | SWEPT if job.pooled else UNTOLD
            # Nor does the site know that any more once the user was told of it.
            if excuses & untold and (self.schedule.kinds & silent or again):
                excuses.add(Reason.CANCELLED)
            if job.pooled and "refused allocations" in self.schedule.kinds:
                excuses.add(Reason.REJECTED)
            if "copies" in self.schedule.kinds or again:  # they were replaced or removed since
                excuses.add(Reason.OUTPUTS)
            if "odd" in self.schedule.kinds and "marker could not be read" in outcome.message:
                excuses.add(Reason.OUTPUTS)  # only its name says how the job ended
            lacks = any(world.lacks_marker(outcome.attempt_id) for world in self.worlds.values())
            if lacks and self.schedule.kinds & {"copies", "journals"}:
                # Another controller, or a run that the journal has forgotten, has removed it.
                excuses.add(Reason.EXIT_CODE)
            assert outcome.reason in excuses, (
                f"misreported: {outcome} for {sorted(excuses)}: {self.failures[-1]}"
            )
        else:
            unwell = self.schedule.kinds & {"full", "full here", *SWEPT}
            led = any(words in outcome.message for words in REFUSED)
            self.schedule.happened["controllers that found another one leading"] += led
            # Another controller that led meanwhile may have made the outputs, too.
            led |= "not what the job made" in outcome.message
            others = led and self.schedule.kinds & {"copies", "two workflows"}
            # Three allocations in a row may end.
            ending = job.pooled and "allocations keep ending" in outcome.message
            ending = ending and "lost allocations" in self.schedule.kinds
            # Three bundles in a row may arrive damaged.
            damaged = "damage" in self.schedule.kinds and "keep disappearing" in outcome.message
            assert unwell or others or ending or damaged, f"misreported: {self.failures[-1]}"
            # What was lost before everything was well may be noticed only now.
            lost = bool(self.schedule.kinds & SWEPT)
            # So may what stays, of which an older journal knows another time.
            lost |= "journals" in self.schedule.kinds and "where it was made" in outcome.message
            assert not self.schedule.healed or lost, f"misreported: {self.failures[-1]}"

    def _check_files(self) -> None:
        """Whatever has just died: what lies under an output's name is whole."""
        made = {content for run in self._runs() for content in run.made.values()}
        for job in self.jobs:
            path = self.workdir / job.output
            assert not path.exists() or path.read_bytes() in made, f"{path} is not whole"
            assert not (job.stays and path.exists()), f"{path} came here"
        for output in self._known().outputs:
            content, [file] = self._at_place(output), output.files
            right = content is None or hashlib.sha256(content).hexdigest() == file.sha256
            assert right, f"{output} has another content"

    def _check_steps(self, runs: list[PayloadRun], *, again: bool) -> None:
        """Each segment goes on where the one before ended, or the job begins anew for a reason.

        With `again` the next target may be one.
        """
        steps = [int(step) for run in runs for step in run.steps.values()]
        self.schedule.happened["segments that went on"] += sum(step > 1 for step in steps)
        for run, following in itertools.pairwise([run for run in runs if run.steps]):
            went_on = int(*following.steps.values()) == int(*run.steps.values()) + 1
            ended = run.how == "killed" or "time_limit" in run.how
            self.schedule.happened["segments after a walltime or a kill"] += ended and went_on
        if "tampers" in self.schedule.kinds:  # a checkpoint may have become any other one
            return
        for before, step in itertools.pairwise(steps):
            assert step in (1, before + 1), f"a step was lost or doubled: {runs}"
        excused = any(self._excuses(run.attempt_id) for run in runs)
        if not (excused or again) and not self.schedule.kinds & {
            "purges",
            "changes",
            "edits",
            *REPEATING,
        }:
            assert steps == list(range(1, len(steps) + 1)), f"steps were taken again: {runs}"

    def _check_runs(self) -> None:
        self._note_outdated()
        # The journal may not know any more that an attempt was over whose output is needed again.
        forgotten = "power" in self.schedule.kinds and bool(self.schedule.kinds & SWEPT)
        # Nor does an older journal; and what stays may be made again that no spare knows yet.
        mislaid = "journals" in self.schedule.kinds
        stay = {job.request.name for job in self.jobs if job.stays}
        temporary = {job.request.name for job in self.jobs if job.temporary}
        of_job: dict[str, list[PayloadRun]] = defaultdict(list)
        for run in self._runs():
            of_job[run.job].append(run)
        for job, runs in of_job.items():
            again = job in temporary | self._read_temporary
            self._check_steps(runs, again=again)
            for run, following in itertools.pairwise(runs):
                if self.schedule.kinds >= {"copies", "purges"}:
                    break  # a copy whose lease is swept leaves no trace
                over = run.ended is not None and run.ended <= following.begun
                assert over, f"doubled: two at the same time: {runs}"
            if "copies" in self.schedule.kinds:
                continue  # what one of them has done, another one does for itself
            wanted = [
                r for r in runs
                if r.how == "exit 0" and not self._excuses(r.attempt_id)
                and r.attempt_id not in self._outdated
            ]  # fmt: skip
            asked = [(run.site, run.found) for run in wanted]
            if job in temporary:
                continue  # it is made again for the next target
            # A job that changed its site may be back there, where it waits for neither too long.
            back = self._one_place or self.schedule.patience_s
            changed = "changes" in self.schedule.kinds and back
            # No power: what had been submitted behind an attempt that was not taken was not ended.
            behind = "power" in self.schedule.kinds and job in self._behind_unwanted
            if not (changed or behind or (mislaid and job in stay)):
                assert len(asked) == len(set(asked)), f"doubled: {wanted}"
            for run in runs:
                told = self._settled.get(run.attempt_id, LOST_S * SESSIONS)
                again = mislaid or (forgotten and run.job in stay)
                assert run.begun <= told or again, f"misreported: it was over, and it ran: {run}"
        left = [path for path in self.workdir.rglob("*.mantik-part") if path.exists()]
        # Nobody knows which run a lost journal has had.
        assert not left or mislaid, f"something half is left: {left}"
        if not self.schedule.kinds & {"copies", "two workflows"}:
            ways = [*(self._state / "transfers").glob("*/*")]
            assert not ways, f"something is left on its way: {ways}"


def _copy_what_changed(path: str, copy: str) -> None:
    """Copy a file unless the copy is of the same time and size; most files of a journal are."""
    known, there = os.stat(path), os.stat(copy) if os.path.exists(copy) else None
    if there is None or (there.st_mtime_ns, there.st_size) != (known.st_mtime_ns, known.st_size):
        shutil.copy2(path, copy)
