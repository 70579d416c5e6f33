"""A workflow that is started again and again until it is done, and what must hold of it.

What Snakemake does stands here in short: it starts what can start, removes old outputs first, takes
outputs or does not, tries again, and the next run begins with what is not done.
"""

import asyncio
import hashlib
import json
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

from snakemake_executor_plugin_mantik.engine.core import AT_ONCE_S, CLOSE_WAIT_S
from snakemake_executor_plugin_mantik.engine.end import CANCEL_WAIT_S
from snakemake_executor_plugin_mantik.engine.request import JobRequest, Outcome, _digest
from snakemake_executor_plugin_mantik.errors import MantikError
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import TryRecord, history
from snakemake_executor_plugin_mantik.staging.sources import Sources
from tests.support.controller import request
from tests.support.laptop import Died, Session
from tests.support.schedules import DAY_S, Schedule
from tests.support.world import PayloadRun, World, result

UNWELL, SESSIONS = 8, 16
"""How many runs there are in which things may happen, and at most in all."""
ATTEMPTS = 3
LOST_S = 40 * DAY_S
"""A run that takes as long waits for something that never comes."""
UNTOLD = {"answers", "outages", "strays", "late", "lost", "restarts"}
"""Where these happen, nobody may tell who ended a job that says itself that it was ended."""
DATA = ("data/a", "data/b", "data/large")


@dataclass
class Job:
    """A job of the workflow, as the user has written it just now."""

    number: int
    needs: Sequence[int]
    data: Sequence[str]
    site: str
    version: int = 0

    @property
    def request(self) -> JobRequest:
        """What the engine is asked."""
        inputs = [*self.data, *(f"out/{need}" for need in self.needs)]
        asked = replace(request(self.number, *inputs), site=self.site)
        return replace(asked, command=f"make {self.number} version {self.version}")

    @property
    def output(self) -> str:
        """What it makes."""
        return f"out/{self.number}"


@dataclass
class Play:
    """One schedule, from the first run to the last."""

    schedule: Schedule
    workdir: Path
    worlds: dict[str, World] = field(init=False)
    jobs: list[Job] = field(init=False)
    done: dict[int, bytes] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Write the workflow's files."""
        plan = self.schedule.stream("plan")
        kinds = self.schedule.kinds
        one = self.schedule.world("sim") if kinds & {"one place", "two names"} else None
        self.worlds = {name: one or self.schedule.world(name) for name in self.schedule.names}
        self._versions: dict[str, list[bytes]] = defaultdict(list)
        self._settled: dict[str, float] = {}
        self._touches = 0
        for path in (*DATA, "lib.py"):
            self._change(path, plan.randbytes(2000) if path == "data/large" else b"0000")
        self.jobs = []
        for number in range(plan.randint(1, 4)):
            needs = [need for need in range(number) if plan.random() < 0.3]
            site = plan.choice(self.schedule.names)
            self.jobs.append(Job(number, needs, plan.sample(DATA, 2), site))

    @property
    def now(self) -> float:
        """The time everywhere."""
        return max(world.now for world in self.worlds.values())

    def run(self) -> None:
        """Play it to its end.

        Raises:
            AssertionError: a job was lost, doubled or misreported, or an output is not whole.
        """
        with mock.patch("uuid.uuid4", self.schedule.uuid):
            self._runs_of_snakemake()

    def _runs_of_snakemake(self) -> None:
        random.seed(self.schedule.seed)  # how long a pause is, in the engine
        for number in range(SESSIONS):
            if number == UNWELL:
                self.schedule.heal(*self.worlds.values())
            session = Session(
                self.worlds, self.workdir, self.schedule.config,
                one_client="one place" not in self.schedule.kinds,
            )  # fmt: skip
            how, when = self.schedule.end()
            session.full = lambda s=session: self.schedule.full_here(s.loop.time())  # type: ignore[misc]
            for site in session.sites.values():
                site.fault = lambda method, _, s=session: self.schedule.fault(  # type: ignore[misc]
                    method, s.loop.time()
                )
                site.cut = lambda: self.schedule.has("interrupts", 0.5)
            if how in ("dies", "loses power"):
                session.die_at(round(when))
            try:
                session.run(self._snakemake(session, how, when))
            except Died:
                if how == "loses power":
                    session.lose_power()
            self._check_files()
            self._pass(session.loop.time() + self.schedule.pause())
            if all(self._is_done(job) for job in self.jobs):
                break
            self._edit()
        assert all(self._is_done(job) for job in self.jobs), f"never done: {self.failures}"
        self._pass(self.now + 2 * DAY_S)  # what is still to start late starts now
        self._check_runs()

    def _pass(self, now: float) -> None:
        for world in self.worlds.values():
            world.advance(now)

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
        path = chance.choice(DATA)
        content = (self.workdir / path).read_bytes()
        if chance.random() < 0.5:
            self._change(path, content + b"+")
        else:  # a change that a file's size does not tell
            self._change(path, b"%04d" % self._touches + content[4:])

    async def _edits(self) -> None:
        """Change inputs while jobs wait and run."""
        chance = self.schedule.stream("edits")
        while self.schedule.has("edits"):
            await asyncio.sleep(10 ** chance.uniform(0, 4))
            self._edit_input(chance)

    # Snakemake

    def _named(self, job: Job, try_id: str) -> bytes:
        """What a try has to make: of the contents that its fingerprint names."""
        [record] = [r for r in history(self.workdir / ".state") if r.id == try_id]
        made_of = json.loads(record.made_of)["made_of"]
        inputs = {
            path: next(
                (c for c in self._versions[path]
                 if _digest(hashlib.sha256(c).hexdigest()) == made_of[f"input {path}"]), b"?",
            )
            for path in job.request.inputs
        }  # fmt: skip
        return result(job.request.command, job.output, inputs)

    def _expected(self, job: Job) -> bytes:
        asked = job.request
        inputs = {path: (self.workdir / path).read_bytes() for path in job.data}
        inputs |= {f"out/{need}": self._expected(self.jobs[need]) for need in job.needs}
        return result(asked.command, job.output, inputs)

    def _is_done(self, job: Job) -> bool:
        is_there = (self.workdir / job.output).exists()
        return is_there and self.done.get(job.number) == self._expected(job)

    async def _snakemake(self, session: Session, how: str, when: float) -> None:
        try:
            await session.engine.opened(Sources(("lib.py",), 1, ()), *self.schedule.names)
        except (MantikError, OSError):
            if self.schedule.healed:
                raise
            await session.engine.closed(tidy=False)
            return
        ended: dict[int, asyncio.Future[bool]] = {
            job.number: session.loop.create_future() for job in self.jobs
        }
        tasks = [asyncio.create_task(self._job(session, job, ended)) for job in self.jobs]
        editing = asyncio.create_task(self._edits())
        in_time = how in ("cancels", "detaches")
        done, going = await asyncio.wait(
            tasks,
            timeout=when if in_time else LOST_S,
            return_when=asyncio.FIRST_EXCEPTION,
        )
        editing.cancel()
        for task in done:
            task.result()
        assert in_time or not going, f"it waits for ever: {self.failures} {session.said}"
        for task in going:
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

    def _wanted(self, session: Session) -> list[TryRecord]:
        """The open tries of the jobs that this run has begun."""
        begun = [request.job for request in session.engine._requests.values()]
        return session.journal.open_tries(*begun)

    async def _job(
        self, session: Session, job: Job, ended: dict[int, asyncio.Future[bool]]
    ) -> None:
        well = [await asyncio.shield(ended[need]) for need in job.needs]
        ended[job.number].set_result(
            all(well) and (self._is_done(job) or await self._attempts(session, job))
        )

    async def _attempts(self, session: Session, job: Job) -> bool:
        for _ in range(ATTEMPTS):
            (self.workdir / job.output).unlink(missing_ok=True)
            session.point()
            outcome = await session.engine.job(job.request)
            if not outcome.succeeded:
                self._check_failure(job, outcome)
                await session.engine.committed(outcome)
                continue
            self._check_success(job, outcome)
            if self.schedule.has("unwanted", 0.3):
                self._excuse(outcome.try_id)
                await session.engine.committed(outcome, taken=False)
                continue
            self._touch(job.output)
            self.done[job.number] = (self.workdir / job.output).read_bytes()
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

    def _excuses(self, try_id: str) -> set[str]:
        return {e for w in self.worlds.values() for e in w.excuses.get(try_id, ())}

    def _excuse(self, try_id: str) -> None:
        for world in self.worlds.values():
            world.excuses[try_id].add(Reason.OUTPUTS)

    def _settle(self, try_id: str) -> None:
        """The user was told that a try is over."""
        self._settled[try_id] = self.now
        going = [r for r in self._runs() if r.try_id == try_id and r.ended is None]
        assert not going, f"misreported: it is over, but it runs: {going}"

    def _check_success(self, job: Job, outcome: Outcome) -> None:
        self._settle(outcome.try_id)
        runs = [run for run in self._runs() if run.try_id == outcome.try_id]
        assert runs, f"misreported: {job} has never run"
        assert runs[-1].how == "exit 0", f"misreported: {job} succeeded: {runs}"
        # Without claims, which the centre has removed, nothing holds a second start back.
        assert len(runs) == 1 or "purges" in self.schedule.kinds, f"doubled: {runs}"
        found = (self.workdir / job.output).read_bytes()
        named = self._named(job, outcome.try_id)
        assert found == named, f"{job.output} is not of what the journal says that {job} had"
        if "edits" not in self.schedule.kinds:
            assert found == self._expected(job), f"{job.output} is not what {job} makes now"
        self._versions[job.output].append(found)

    def _check_failure(self, job: Job, outcome: Outcome) -> None:
        self.failures.append(f"{self.now:.0f} {job.request.name}: {outcome.message}")
        if outcome.try_id:
            self._settle(outcome.try_id)
            excuses = self._excuses(outcome.try_id)
            if excuses & {Reason.PREEMPTED, Reason.TIME_LIMIT} and self.schedule.kinds & UNTOLD:
                excuses.add(Reason.CANCELLED)
            assert outcome.reason in excuses, (
                f"misreported: {outcome} for {sorted(excuses)}: {self.failures[-1]}"
            )
        else:
            unwell = self.schedule.kinds & {"full", "full here", "purges"}
            assert unwell, f"misreported: {self.failures[-1]}"
            assert not self.schedule.healed, f"misreported: {self.failures[-1]}"

    def _check_files(self) -> None:
        """Whatever has just died: what lies under an output's name is whole."""
        made = {content for run in self._runs() for content in run.made.values()}
        for job in self.jobs:
            path = self.workdir / job.output
            assert not path.exists() or path.read_bytes() in made, f"{path} is not whole"

    def _check_runs(self) -> None:
        of_job: dict[str, list[PayloadRun]] = defaultdict(list)
        for run in self._runs():
            of_job[run.job].append(run)
        for runs in of_job.values():
            for run, following in pairwise(runs):
                over = run.ended is not None and run.ended <= following.begun
                assert over, f"doubled: two at the same time: {runs}"
            wanted = [r for r in runs if r.how == "exit 0" and not self._excuses(r.try_id)]
            asked = [(run.site, run.found) for run in wanted]
            if not ("changes" in self.schedule.kinds and self._one_place):
                assert len(asked) == len(set(asked)), f"doubled: {wanted}"
            for run in runs:
                told = self._settled.get(run.try_id, LOST_S * SESSIONS)
                assert run.begun <= told, f"misreported: it was over, and then it ran: {run}"
        left = [path for path in self.workdir.rglob("*.mantik-part") if path.exists()]
        assert not left, f"something half is left: {left}"
