"""The agent of a pool, as bash runs it, with small scripts as its jobs."""

import io
import os
import shutil
import signal
import subprocess
import tarfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_sandbox import shims
from snakemake_executor_plugin_mantik.jobs.paths import ATTEMPTS
from snakemake_executor_plugin_mantik.jobs.pools import (
    MARK_BYTES,
    Pool,
    PooledJob,
    agent_script,
    allocation_of,
    pack_jobs,
    split_jobs,
    unpack_marks,
)
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from tests.support.sandbox import wait_for

SRUN = Path(shims.__file__).parent / "bin"
POOL = Pool("small", Resources(runtime_s=600, cpus_per_task=2, gpus_per_node=2), 1, 1, 1)


class Allocations:
    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.directory = workspace / POOL.directory
        self.directory.mkdir(parents=True)
        self.order = 0
        self.agents: list[subprocess.Popen[str]] = []

    def send(self, *scripts: str, **wants: Any) -> list[str]:
        """Send jobs in one file; return their tags."""
        jobs = [self.job(script, **wants) for script in scripts]
        self.put(*jobs)
        return [job.tag for job in jobs]

    def put(self, *jobs: PooledJob) -> None:
        name, content = pack_jobs(jobs)
        (self.directory / f".{name}").write_bytes(content)
        (self.directory / f".{name}").rename(self.directory / name)

    def job(self, script: str, **wants: Any) -> PooledJob:
        self.order += 1
        resources = Resources(**{"runtime_s": 60, "cpus_per_task": 1, **wants})
        text = f"cd {self.workspace}\n{script}\n"
        return PooledJob(str(uuid.uuid4()), text.encode(), resources, False, self.order)

    def start(
        self, pool: Pool = POOL, allocation: str = "", first: str = ""
    ) -> "subprocess.Popen[str]":
        script = self.workspace / f"agent-{len(self.agents)}"
        allocation = allocation or str(uuid.uuid4())
        script.write_text(f"{first}\n{agent_script(pool, str(self.workspace), allocation)}")
        (self.directory / f"pool.{allocation}").touch()
        environment = {k: v for k, v in os.environ.items() if "VISIBLE_DEVICES" not in k}
        environment["SLURM_NNODES"] = str(pool.resources.nodes or 1)
        environment["PATH"] = f"{SRUN}:{environment['PATH']}"
        with (self.workspace / "agent.log").open("a") as log:
            agent = subprocess.Popen(
                ["bash", script], stdout=log, stderr=log, text=True, env=environment
            )
        self.agents.append(agent)
        return agent

    def run(self, pool: Pool = POOL) -> None:
        assert self.start(pool).wait(600) == 0
        assert "rror" not in (self.workspace / "agent.log").read_text()

    def done(self) -> dict[str, str]:
        names = (path.name.split(".") for path in self.directory.glob("done.*"))
        return {tag: how for _, how, tag in names}

    def read(self, name: str) -> str:
        path = self.workspace / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Allocations]:
    made = Allocations(tmp_path)
    yield made
    for agent in made.agents:
        agent.kill()
        agent.wait()


def test_jobs_run_side_by_side_as_far_as_cpus_reach(pool: Allocations) -> None:
    # Each waits for the one before or after it: one alone would never end.
    meet = "touch {0}; until [ -e {1} ]; do sleep 0.05; done"
    tags = pool.send(meet.format("a", "b"), meet.format("b", "a"), "exit 3")
    pool.run()
    assert pool.done() == dict(zip(tags, ("0", "0", "3"), strict=True))
    left = {path.name.split(".")[0] for path in pool.directory.iterdir()}
    assert left == {"done", "used"}


def taken(pool: Allocations, tag: str) -> str:
    """The file of a job that an agent has taken."""
    return next((path.name for path in pool.directory.glob(f"run.*.{tag}")), "")


def used(pool: Allocations) -> list[tuple[int, int]]:
    """How long each agent has been there, and the core seconds that jobs have had."""
    names = (path.name.split(".") for path in pool.directory.glob("used.*"))
    return [(int(there), int(of_jobs)) for _, _, _, there, of_jobs in names]


def test_an_agent_shows_what_its_jobs_have_used(pool: Allocations) -> None:
    """Also while it runs, before the end of the last job shows, and if it is killed."""
    pool.send("sleep 2.2", cpus_per_task=2)
    agent = pool.start(replace(POOL, idle_s=60))
    assert wait_for(lambda: used(pool))[0][1] == 0
    wait_for(lambda: list(pool.directory.glob("done.0.*")))
    # It may have been shown before, while the job ran.
    [(there, of_jobs)] = wait_for(lambda: [each for each in used(pool) if each[1] >= 4])
    assert there >= 2
    assert of_jobs <= 2 * there + 1
    agent.kill()
    agent.wait()

    pool.send("true")
    pool.run()
    assert len(used(pool)) == 2


def test_a_clock_that_jumps_ends_nothing(pool: Allocations) -> None:
    """Bash computes SECONDS from the node's clock."""
    [tag] = pool.send("exit 0")
    assert pool.start(first="SECONDS=99999").wait(600) == 0
    assert pool.done() == {tag: "0"}


TWO_NODES = replace(POOL, idle_s=4, resources=replace(POOL.resources, cpus_per_task=1, nodes=2))


def test_each_node_of_an_allocation_runs_jobs(pool: Allocations) -> None:
    """Each job sees one node only; the allocation ends when nothing is left on any."""
    meet = "echo $SLURM_NNODES $SLURM_NTASKS > {0}; until [ -e {1} ]; do sleep 0.05; done"
    tags = pool.send(meet.format("a", "b"), meet.format("b", "a"))
    assert pool.start(TWO_NODES, "A").wait(600) == 0
    assert pool.done() == dict.fromkeys(tags, "0")
    assert pool.read("a") == pool.read("b") == "1 1\n"
    assert {allocation_of(path.name) for path in pool.directory.glob("used.*")} == {"A"}
    assert not list(pool.directory.glob("pool.*"))


def test_what_a_killed_agent_of_one_node_had_taken_is_free(pool: Allocations) -> None:
    note = "echo $PPID > {0}; until [ -e go ]; do sleep 0.1; done"
    killed, other = pool.send(note.format("a"), note.format("b"))
    agent = pool.start(TWO_NODES, "A")
    wait_for(lambda: pool.read("a") and pool.read("b"))
    os.kill(int(pool.read("a")), signal.SIGKILL)
    wait_for(lambda: pool.done() == {killed: "pool"})
    [run] = pool.directory.glob("run.*")
    assert run.name.endswith(other)
    assert allocation_of(run.name) == "A"
    (pool.workspace / "go").touch()
    assert agent.wait(600) == 0
    assert pool.done() == {killed: "pool", other: "0"}


def test_a_signal_reaches_the_agents_of_all_nodes(pool: Allocations) -> None:
    tags = pool.send("touch a; exec sleep 100", "touch b; exec sleep 100")
    agent = pool.start(TWO_NODES)
    wait_for(lambda: len(list(pool.workspace.glob("[ab]"))) == 2)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(600) == 0
    assert pool.done() == dict.fromkeys(tags, "pool")


@pytest.mark.parametrize(
    ("of_node", "first", "second"),
    [
        (0, {"cpus_per_task": 2}, {"cpus_per_task": 2}),
        (1000, {"memory_mib_per_node": 600}, {"memory_mib_per_node": 600}),
        (1000, {}, {"memory_mib_per_node": 600}),  # it has the share of its CPUs
        (0, {"memory_mib_per_node": 1 << 40}, {"memory_mib_per_node": 1 << 40}),  # each alone
    ],
)
def test_what_does_not_fit_waits(
    pool: Allocations, of_node: int, first: dict[str, int], second: dict[str, int]
) -> None:
    for wants in (first, second):
        pool.send("echo begin >> log; sleep 0.3; echo end >> log", **wants)
    memory = {"memory_mib_per_node": of_node} if of_node else {}
    pool.run(replace(POOL, resources=replace(POOL.resources, **memory)))  # type: ignore[arg-type]
    assert pool.read("log").split() == ["begin", "end", "begin", "end"]


def test_gpus_are_handed_out_singly(pool: Allocations) -> None:
    meet = "echo $CUDA_VISIBLE_DEVICES > {0}; until [ -e {1} ]; do sleep 0.05; done"
    pool.send(meet.format("a", "b"), meet.format("b", "a"), gpus_per_node=1)
    pool.send("echo gpus=$CUDA_VISIBLE_DEVICES > none")
    pool.run()
    assert {pool.read("a"), pool.read("b")} == {"0\n", "1\n"}
    assert pool.read("none") == "gpus=\n"


def test_a_job_finds_its_id_and_cpus(pool: Allocations) -> None:
    job = pool.job("", cpus_per_task=2)
    script = f'echo "$_m_pooled $SLURM_CPUS_PER_TASK" > {pool.workspace}/found\n'.encode()
    pool.put(replace(job, script=script))
    pool.run()
    assert pool.read("found") == f"pool.small.{job.tag} 2\n"


def test_a_job_waits_for_those_that_it_is_behind(pool: Allocations) -> None:
    """However they end: its script looks at that. One of them runs in another allocation."""
    slow = pool.job(
        "echo slow begins >> log; until [ -e go ]; do sleep 0.1; done; echo slow >> log"
    )
    fails = pool.job("echo fails >> log; exit 3")
    first = replace(pool.job("echo first >> log"), behind=(f"7/{fails.tag}",))
    last = pool.job("echo last >> log")
    last = replace(last, behind=tuple(f"7/{job.tag}" for job in (fails, slow, first)))
    after = replace(pool.job("echo after >> log"), behind=(f"7/{last.tag}",))
    pool.put(after, last, first, fails, slow)
    agents = [pool.start(replace(POOL, resources=replace(POOL.resources, cpus_per_task=1)))]
    wait_for(lambda: list(pool.directory.glob("run.*")))
    agents.append(pool.start())
    wait_for(lambda: pool.read("log").count("\n") == 3)
    assert "last" not in pool.read("log")
    (pool.workspace / "go").touch()
    assert [agent.wait(600) for agent in agents] == [0, 0]
    assert pool.read("log").splitlines()[-3:] == ["slow", "last", "after"]


def test_a_job_starts_that_is_behind_one_whose_marker_is_there(pool: Allocations) -> None:
    (pool.workspace / ATTEMPTS / "7").mkdir(parents=True)
    (pool.workspace / ATTEMPTS / "7/over.0").touch()
    (pool.directory / "run.killed.over").touch()  # its agent died after it
    (pool.directory / "done.pool.other").touch()  # it ended with its allocation, to run again
    waits = replace(pool.job("echo no >> log"), behind=("7/over", "7/other"))
    pool.put(replace(pool.job("echo yes >> log"), behind=("7/over",)), waits)
    pool.run()
    assert pool.read("log") == "yes\n"
    assert [path.name for path in pool.directory.glob("behind.*")] == [waits.file]
    (pool.directory / f"stop.{waits.tag}").touch()
    pool.run()
    assert not list(pool.directory.glob("behind.*"))
    assert not list(pool.directory.glob("stop.*"))


def test_a_file_that_is_not_all_there_waits(pool: Allocations) -> None:
    name, whole = pack_jobs([pool.job("echo ran >> log"), pool.job("echo ran >> log")])
    path = pool.directory / name
    for size in (0, 10, 30, len(whole) - 1):
        path.write_bytes(whole[:size])
        pool.run()
        assert path.exists()
        assert not pool.done()
    path.write_bytes(whole)
    pool.run()
    assert pool.read("log") == "ran\nran\n"


def test_markers_of_jobs_come_together(pool: Allocations) -> None:
    folder = pool.workspace / ATTEMPTS / "7"
    folder.mkdir(parents=True)
    texts = [b"", b"first\n\nsecond", bytes(range(256)) * 20]
    jobs = [pool.job("") for _ in [*texts, *range(3)]]
    for job, text in zip(jobs, [*texts, b"x" * (MARK_BYTES + 1)], strict=False):
        (folder / f"{job.tag}.0").write_bytes(text)
    (folder / f"{jobs[4].tag}.3").write_bytes(b"failed")
    scripts = [b"exit 0\n"] * 4 + [b"exit 3\n", b"exit 0\n"]
    sent = [replace(j, script=s, bucket=7) for j, s in zip(jobs, scripts, strict=True)]
    pool.put(*sent)

    pool.run()

    found = dict[str, bytes]()
    for path in pool.directory.glob("marks.*"):
        found |= unpack_marks(path.read_bytes())
    whole = {f"7/{job.tag}.0": text for job, text in zip(jobs, texts, strict=False)}
    assert found == {**whole, f"7/{jobs[4].tag}.3": b"failed"}
    # What succeeded, as its marker says, needs no other word.
    assert pool.done() == {jobs[4].tag: "3", jobs[5].tag: "0"}


def test_jobs_are_divided_among_files() -> None:
    jobs = [
        PooledJob(str(n), os.urandom(size), Resources(runtime_s=60), False, n)
        for n, size in enumerate((10, 500, 20_000, 10, 10))
    ]
    parts = split_jobs(jobs, 16_000)
    assert [job for part in parts for job in part] == jobs
    assert len(parts) == 3
    assert all(len(pack_jobs(part)[1]) <= 16_000 or len(part) == 1 for part in parts)


def test_one_of_several_allocations_takes_each_job(pool: Allocations) -> None:
    tags = pool.send(*["echo ran >> log"] * 60)
    agents = [pool.start() for _ in range(3)]
    assert [agent.wait(600) for agent in agents] == [0, 0, 0]
    assert pool.done() == dict.fromkeys(tags, "0")
    assert pool.read("log") == "ran\n" * 60


STUBBORN = "trap 'echo asked > asked' TERM; touch begun; while :; do sleep 0.1; done"


def test_a_walltime_ends_a_job(pool: Allocations) -> None:
    quiet = replace(POOL, grace_s=-14)  # a second until it is killed
    [tag] = pool.send(STUBBORN, runtime_s=1)
    pool.run(quiet)
    assert pool.done() == {tag: "time"}
    assert pool.read("asked") == "asked\n"


def test_a_cancelled_job_ends(pool: Allocations) -> None:
    running, waiting = pool.send("touch begun; exec sleep 100", "touch no", cpus_per_task=2)
    agent = pool.start()
    wait_for((pool.workspace / "begun").exists)
    for tag in (waiting, running):
        (pool.directory / f"stop.{tag}").touch()
    assert agent.wait(600) == 0
    assert pool.done() == {running: "stop"}
    assert not (pool.workspace / "no").exists()
    assert not list(pool.directory.glob("stop.*"))


@pytest.mark.parametrize("allocated", [replace(POOL, idle_s=4), TWO_NODES])
def test_an_agent_goes_on_in_a_directory_that_was_made_anew(
    pool: Allocations, allocated: Pool
) -> None:
    """As after a purge: its jobs can be cancelled, show how they end, and others follow them."""
    script = "touch begun-{0}; until [ -e {0} ]; do sleep 0.05; done; exit {0}"
    cancelled, failed = pool.send(script.format(1), script.format(2))
    agent = pool.start(allocated, "A")
    wait_for(lambda: len(list(pool.workspace.glob("begun-*"))) == 2)
    shutil.rmtree(pool.directory)
    (pool.workspace / "2").touch()
    pool.directory.mkdir()
    [follows] = pool.send("touch began; exit 4")

    assert {allocation_of(wait_for(lambda: taken(pool, cancelled)))} == {"A"}
    wait_for(lambda: list(pool.directory.glob("pool.A")))
    (pool.directory / f"stop.{cancelled}").touch()

    assert agent.wait(600) == 0
    done = pool.done()
    assert done.pop(failed, "2") == "2", "it may have ended without a directory to say so in"
    assert done == {cancelled: "stop", follows: "4"}
    assert not list(pool.directory.glob("[!du]*")), "also the allocation's file is removed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_of_an_agent_that_was_ended(
    pool: Allocations, number: signal.Signals
) -> None:
    agent = pool.start(replace(POOL, idle_s=600))
    [running] = pool.send("exit 0")
    wait_for(lambda: pool.done() == {running: "0"})
    below = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    assert below, "what wakes it"
    agent.send_signal(number)
    agent.wait(600)
    wait_for(lambda: not any(Path(f"/proc/{process}").exists() for process in below))


def test_a_signal_to_the_allocation_ends_its_jobs(pool: Allocations) -> None:
    [tag] = pool.send("touch begun; exec sleep 100")
    agent = pool.start()
    wait_for((pool.workspace / "begun").exists)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(600) == 0
    assert pool.done() == {tag: "pool"}


def test_what_ran_before_an_allocation_was_put_back_has_ended(pool: Allocations) -> None:
    (pool.directory / "run.again.lost").touch()
    (pool.directory / "run.other.runs").touch()
    assert pool.start(allocation="again").wait(600) == 0
    assert pool.done() == {"lost": "pool"}
    assert (pool.directory / "run.other.runs").exists()


def test_a_job_that_does_not_fit_the_time_that_is_left_stays(pool: Allocations) -> None:
    [tag] = pool.send("touch no", runtime_s=590)
    pool.run()
    assert not pool.done()
    assert list(pool.directory.glob(f"ready.*.{tag}"))


def test_files_of_others_are_not_run(pool: Allocations) -> None:
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    pool.send("touch no")
    [path] = pool.directory.glob("in.*")
    os.chown(path, 12345, 12345)
    path.chmod(0o644)
    pool.run()
    assert path.exists()
    assert not (pool.workspace / "no").exists()


def test_a_job_that_was_sent_twice_does_not_run_beside_itself(pool: Allocations) -> None:
    job = pool.job("echo ran >> log; until [ -e go ]; do sleep 0.05; done")
    pool.put(job)
    agent = pool.start()
    wait_for((pool.workspace / "log").exists)
    pool.put(replace(job, order=7))
    wait_for(
        lambda: (
            {path.name.split(".")[0] for path in pool.directory.iterdir()}
            == {"pool", "run", "used"}
        )
    )
    assert pool.read("log") == "ran\n"
    (pool.workspace / "go").touch()
    assert agent.wait(600) == 0
    assert pool.done() == {job.tag: "0"}
    assert pool.read("log") == "ran\n"


def test_what_a_killed_agent_was_unpacking_is_unpacked(pool: Allocations) -> None:
    """Once its allocation has ended: before, it may still do it."""
    for owner in ("ended", "alive"):
        name, content = pack_jobs([pool.job(f"touch {owner}")])
        unpacking = f".unpack.{owner}.{name.removeprefix('in.')}"
        (pool.directory / unpacking).write_bytes(content)
        (pool.directory / f"{unpacking}.jobs").mkdir()
    (pool.directory / "pool.alive").touch()
    long_ago = time.time() - 31 * 86400
    for name in ("run.ended.job", "run.alive.job", ".marks.ended"):
        (pool.directory / name).touch()
        os.utime(pool.directory / name, (long_ago, long_ago))
    (pool.directory / "run.ended.new").touch()
    pool.run()
    assert (pool.workspace / "ended").exists()
    assert not (pool.workspace / "alive").exists()
    assert len(list(pool.directory.glob(".unpack.alive.*"))) == 2
    assert not list(pool.directory.glob(".unpack.ended.*"))
    left = {path.name for path in pool.directory.glob("run.*")}
    assert left == {"run.alive.job", "run.ended.new"}
    assert not list(pool.directory.glob(".marks.*"))


def test_a_file_whose_rest_never_comes_is_removed(pool: Allocations) -> None:
    name, whole = pack_jobs([pool.job("touch ran")])
    long_ago = time.time() - 3600
    for kind, content in (("cut", whole[:-1]), ("empty", b""), ("whole", whole)):
        path = pool.directory / f"{name}{kind}"
        path.write_bytes(content)
        os.utime(path, (long_ago, long_ago))
    pool.run()
    assert not list(pool.directory.glob("in.*"))
    assert (pool.workspace / "ran").exists()


def test_markers_that_are_cut_off_are_left_out() -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, text in (("7/a.0", b"one"), ("7/b.0", b"two")):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    content = file.getvalue()
    for size in range(1600):
        assert unpack_marks(content[:size]).items() <= {"7/a.0": b"one", "7/b.0": b"two"}.items()
    assert unpack_marks(content) == {"7/a.0": b"one", "7/b.0": b"two"}
