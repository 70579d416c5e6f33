"""The scheduler with real processes."""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_sandbox import processes, slurm
from hpc_sandbox.batch import BatchState
from hpc_sandbox.sbatch import SbatchError, parse_sbatch_memory, parse_sbatch_time, parse_script
from hpc_sandbox.scheduler import LocalJob, LocalScheduler
from hpc_sandbox.settings import PARTITIONS, Partition, SandboxError, SandboxSettings, Timing

SETTINGS = SandboxSettings(timing=Timing(kill_wait=0.5, memory_interval=0.05), slots=2)

Submit = Callable[..., Awaitable[LocalJob]]


@pytest.fixture
def settings() -> SandboxSettings:
    return SETTINGS


@pytest.fixture
async def scheduler(tmp_path: Path, settings: SandboxSettings) -> AsyncIterator[LocalScheduler]:
    made = LocalScheduler(tmp_path / "spool", settings, home=tmp_path, user="somebody")
    yield made
    await made.stop()


@pytest.fixture
def submit(scheduler: LocalScheduler, tmp_path: Path) -> Submit:
    def act(body: str, *options: str) -> Awaitable[LocalJob]:
        lines = "".join(f"#SBATCH {option}\n" for option in ("--output=out", *options))
        return scheduler.submit(f"#!/bin/bash\n{lines}{body}\n", tmp_path)

    return act


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def end(job: LocalJob) -> None:
    await until(lambda: job.state.final)


def alive(pid: int) -> bool:
    return any(process.pid == pid for process in processes.processes())


# However busy the machine is, the script has time for its last words.
@pytest.mark.parametrize(
    "settings", [replace(SETTINGS, timing=replace(SETTINGS.timing, kill_wait=30.0))]
)
async def test_walltime_is_enforced_with_term_first(
    tmp_path: Path, scheduler: LocalScheduler, submit: Submit
) -> None:
    limited = await submit("sleep 600", "--time=0:01")
    body = "trap 'echo caught > caught; exit 5' TERM; touch ready; sleep 600 & wait"
    job = await submit(body)
    await until((tmp_path / "ready").exists)
    await scheduler.expire(job.id)
    await asyncio.gather(end(limited), end(job))
    assert limited.state is BatchState.TIMEOUT
    assert (job.state, job.reason, job.exit_text) == (BatchState.TIMEOUT, "TimeLimit", "5:0")
    assert (tmp_path / "caught").exists()


def test_parents_hear_a_signal_before_their_children() -> None:
    """Whose ids may be lower: the kernel's wrap around."""
    session = {7: 30000, 8: 32767, 30000: 1, 32767: 31000, 31000: 30000, 9: 8}
    seen = [processes.Process(pid, parent, 30000, 30000, 0) for pid, parent in session.items()]
    other = processes.Process(500, 1, 500, 500, 0)
    daemon = processes.Process(5, 8, 5, 5, 0)
    order = [p.pid for p in processes.members(30000, [daemon, other, *seen])]
    assert sorted(order) == sorted([*session, 5])
    parents = session | {5: 8}
    assert all(order.index(pid) > order.index(parents[pid]) for pid in order[1:])


def test_processes_that_were_seen_as_their_own_ancestors_are_not_left_out() -> None:
    seen = [processes.Process(pid, 3 - pid, 7, 7, 0) for pid in (1, 2)]
    assert len(processes.members(7, seen)) == 2


async def test_who_ignores_term_is_killed_after_the_kill_wait(
    tmp_path: Path, scheduler: LocalScheduler, submit: Submit
) -> None:
    body = "trap '' TERM; touch ready; while :; do sleep 0.1; done"
    job = await submit(body)
    await until((tmp_path / "ready").exists)
    asked = time.monotonic()
    await scheduler.cancel(job.id)
    await end(job)
    assert time.monotonic() - asked >= SETTINGS.timing.kill_wait
    assert (job.state, job.signal) == (BatchState.CANCELLED, 9)


async def test_cancel_ends_grandchildren_and_daemons(
    tmp_path: Path, scheduler: LocalScheduler, submit: Submit
) -> None:
    if not Path("/proc/self/environ").exists():
        pytest.skip("daemons are found by /proc only")
    body = "(sleep 300 & echo $! > one; wait) & setsid -f sleep 301; touch ready; wait"
    job = await submit(body)
    await until(lambda: (tmp_path / "ready").exists() and (tmp_path / "one").exists())

    def mine() -> list[int]:
        return [p.pid for p in processes.marked(job.mark, processes.processes())]

    # One that is just becoming `sleep` shows no environment.
    await until(lambda: len(mine()) >= 4)
    started = mine()
    await scheduler.cancel(job.id)
    await end(job)
    assert not any(alive(pid) for pid in started)


async def test_what_a_job_leaves_behind_ends_with_it(tmp_path: Path, submit: Submit) -> None:
    job = await submit("sleep 300 & echo $! > left; disown")
    await end(job)
    assert job.state is BatchState.COMPLETED
    assert not alive(int((tmp_path / "left").read_text()))


@pytest.mark.parametrize("settings", [replace(SETTINGS, memory_state="FAILED")])
async def test_memory_over_the_limit_as_slurm_without_cgroups_has_it(
    tmp_path: Path, submit: Submit
) -> None:
    """The words are those of Slurm 22.05 with OverMemoryKill."""

    hog = 'python3 -c "import time; x = bytearray(200 << 20); time.sleep(60)"'
    job = await submit(hog, "--mem=100M", "--error=err")
    await end(job)
    assert (job.state, job.reason, job.signal) == (BatchState.FAILED, "JobLaunchFailure", 9)
    said = (tmp_path / "err").read_text()
    assert re.search(r"StepId=1000.batch exceeded memory limit \(\d+ > 104857600\)", said)


async def test_first_come_first_served_and_what_fits_goes_ahead(
    tmp_path: Path, submit: Submit
) -> None:
    wait = "while [ ! -e go ]; do sleep 0.02; done"
    first = await submit(wait)
    wide = await submit("true", "--cpus-per-task=2")
    third = await submit(wait)
    fourth = await submit("true")
    await until(lambda: first.pid and third.pid)
    states = [job.state for job in (first, wide, third, fourth)]
    assert states == [
        BatchState.RUNNING,
        BatchState.PENDING,
        BatchState.RUNNING,
        BatchState.PENDING,
    ]
    assert (wide.reason, fourth.reason) == ("Resources", "Resources")
    (tmp_path / "go").touch()
    await asyncio.gather(*(end(job) for job in (first, wide, third, fourth)))
    assert wide.started is not None
    assert wide.started >= max(first.ended or 0, third.ended or 0)


async def test_slots_are_never_oversubscribed(scheduler: LocalScheduler, submit: Submit) -> None:
    most = 0

    def look(_: LocalJob) -> None:
        nonlocal most
        running = sum(job.state is BatchState.RUNNING for job in scheduler.jobs.values())
        most = max(most, running)

    scheduler.listen(look)
    jobs = [await submit("sleep 0.05") for _ in range(12)]
    await asyncio.gather(*(end(job) for job in jobs))
    assert most == 2


async def test_more_cpus_than_the_machine_has_take_all_of_it(
    tmp_path: Path, submit: Submit
) -> None:
    job = await submit("echo $SLURM_CPUS_PER_TASK", "--cpus-per-task=64")
    await end(job)
    assert (job.slots, (tmp_path / "out").read_text()) == (2, "64\n")


async def test_a_job_starts_after_one_that_never_ran_or_that_nobody_knows(
    scheduler: LocalScheduler, submit: Submit
) -> None:
    await submit("sleep 60")
    held = await submit("true", "--hold")
    after = await submit("true", f"--dependency=afterany:{held.id}")
    await end(await submit("true", "--dependency=afterany:7"))
    assert after.state is BatchState.PENDING
    await scheduler.cancel(held.id)
    await end(after)


async def test_other_dependencies_are_refused(submit: Submit) -> None:
    with pytest.raises(SbatchError, match="Job dependency problem"):
        await submit("true", "--dependency=afterok:7")


async def test_nothing_survives_stop(
    tmp_path: Path, scheduler: LocalScheduler, submit: Submit
) -> None:
    body = "trap '' TERM; sleep 300 & echo $! > a; touch ready; wait"
    job = await submit(body)
    await until((tmp_path / "ready").exists)
    assert job.pid
    pids = [job.pid, int((tmp_path / "a").read_text())]
    assert all(alive(pid) for pid in pids)
    await scheduler.stop()
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("settings", [replace(SETTINGS, environment={"EXTRA": "1"})])
async def test_the_environment_is_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submit: Submit
) -> None:
    monkeypatch.setenv("MANTIK_HPC1_PASSWORD", "hush")
    monkeypatch.setenv("SOME_TOKEN", "hush")

    job = await submit("env")
    await end(job)
    text = (tmp_path / "out").read_text()
    assert "hush" not in text
    assert f"HOME={tmp_path}\n" in text
    assert f"SLURM_JOB_ID={job.id}\n" in text
    assert "EXTRA=1\n" in text


async def test_modules_and_srun_are_there(tmp_path: Path, submit: Submit) -> None:
    body = """
module load Sandbox/1.0 && echo "module $MANTIK_SANDBOX_MODULE"
bash -c 'module load Sandbox && echo again'
module load Nope/2 || echo "code $?"
srun -n 3 bash -c 'echo "task $SLURM_PROCID"'
srun echo once per node
srun -n 99 true || echo "code $?"
srun --ntasks=1 bash -c 'exit 6'; echo "code $?"
"""

    options = ("--ntasks=2", "--cpus-per-task=2", "--error=err")
    job = await submit("export SRUN_CPUS_PER_TASK=1" + body, *options)
    await end(job)
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[:3] == ["module 1.0", "again", "code 1"]
    assert sorted(lines[3:6]) == ["task 0", "task 1", "task 2"]
    assert lines[6:] == ["once per node", "once per node", "code 1", "code 6"]
    errors = (tmp_path / "err").read_text()
    # In the words of Lmod, or of this machine's own environment modules.
    assert "module(s) are unknown" in errors or "Unable to locate a modulefile" in errors
    assert "More processors requested than permitted" in errors


async def test_srun_of_this_machine_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submit: Submit
) -> None:
    foreign = tmp_path / "bin" / "srun"
    foreign.parent.mkdir()
    foreign.write_text("#!/bin/sh\necho 'it looks for the job in another Slurm'\n")
    foreign.chmod(0o755)
    monkeypatch.setenv("PATH", f"{foreign.parent}:{os.environ['PATH']}")

    job = await submit("srun echo mine")
    await end(job)
    assert (tmp_path / "out").read_text() == "mine\n"


# `#SBATCH` lines as sbatch reads them.


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2", 120), ("0:05", 5), ("1:30", 90), ("1:00:00", 3600), ("1-0", 86400),
        ("1-2:03", 93780), ("1-02:03:04", 93784),
    ],
)  # fmt: skip
def test_time(text: str, seconds: int) -> None:
    assert parse_sbatch_time(text) == seconds


def test_time_of_another_form_is_refused() -> None:
    with pytest.raises(SbatchError, match="Invalid --time specification"):
        parse_sbatch_time("1h")


@pytest.mark.parametrize(("text", "mib"), [("100", 100), ("2G", 2048), ("512K", 1), ("0", None)])
def test_memory(text: str, mib: int | None) -> None:
    assert parse_sbatch_memory(text, "mem") == mib


def test_all_that_the_executor_writes() -> None:
    request = parse_script(
        """#!/bin/bash
#SBATCH --job-name="my job"
#SBATCH --partition=devel
#SBATCH -A proj1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=3
#SBATCH --cpus-per-task=4   # a comment
#SBATCH --mem=5000M
#SBATCH --gpus-per-node=a100:2
#SBATCH --time=00:10:00
#SBATCH --no-requeue
#SBATCH --output=stdout --error=stderr
echo first command
#SBATCH --nodes=7
""",
        PARTITIONS,
    )
    assert (request.name, request.partition, request.account) == ("my job", "devel", "proj1")
    assert (request.nodes, request.tasks, request.tasks_per_node) == (2, 6, 3)
    assert (request.cpus_per_task, request.cpus, request.gpus) == (4, 24, 2)
    assert (request.memory_mib, request.time_s) == (5000, 600)
    assert (request.output, request.error) == ("stdout", "stderr")


def test_memory_per_cpu_counts_the_cpus_of_a_node() -> None:
    script = "#!/bin/bash\n#SBATCH --cpus-per-task=4 --mem-per-cpu=100\n"
    assert parse_script(script, PARTITIONS).memory_mib == 400


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--partition=nope", "invalid partition specified: nope"),
        ("--time=30-0", "Requested time limit is invalid"),
        ("--nodes=99", "Node count specification invalid"),
        ("--cpus-per-task=1000", "Requested node configuration is not available"),
        ("--gpus-per-node=9", "Requested node configuration is not available"),
        ("--mem=9T", "Memory specification can not be satisfied"),
        ("--nodes=none", '"none" is not a valid node count'),
        ("--blah=1", "unrecognized option '--blah=1'"),
        ("blah", "unrecognized option 'blah'"),
    ],
)
def test_refusals_in_the_words_of_sbatch(line: str, words: str) -> None:
    with pytest.raises(SbatchError, match=words):
        parse_script(f"#!/bin/bash\n#SBATCH {line}\n", PARTITIONS)


def test_a_script_without_shebang_is_refused() -> None:
    with pytest.raises(SbatchError, match="does not look like a batch script"):
        parse_script("echo x\n", PARTITIONS)


# What can be said of the sandbox on Slurm without a Slurm; tests/real has the rest.


SHOWN = (
    "JobId=7 JobName=a b=c (1) UserId=root(0) JobState=FAILED Reason=NonZeroExitCode "
    "Dependency=(null) Restarts=0 ExitCode=7:0 CPUs/Task=2 ReqB:S:C:T=0:0:*:* "
    "Comment=said x=y WorkDir=/a b/c StdOut=/a b/c/out "
)


def test_fields_of_scontrol() -> None:
    told = slurm.fields(SHOWN)

    assert told["JobName"] == "a b=c (1)"
    assert (told["JobState"], told["ExitCode"], told["CPUs/Task"]) == ("FAILED", "7:0", "2")
    assert told["WorkDir"] == "/a b/c"
    assert slurm.fields("") == {}


def test_a_name_does_not_forge_a_state() -> None:
    assert slurm.fields("JobId=7 JobState=RUNNING Comment=x JobState=COMPLETED")["JobState"] == (
        "RUNNING"
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:05", 5), ("10:00", 600), ("1:00:00", 3600), ("1-00:00:00", 86400),
        ("infinite", 365 * 86400), ("n/a", 365 * 86400),
    ],
)  # fmt: skip
def test_seconds(text: str, seconds: int) -> None:
    assert slurm.seconds_of(text) == seconds


SINFO = """#!/bin/sh
cat << EOF
devel|2:00:00|30:00|2|48|95000|(null)
batch*|1-00:00:00|1:00:00|8|128|515000|gpu:a100:4(S:0-1)
batch*|1-00:00:00|1:00:00|4|256|257000|(null)
EOF
"""


def install(directory: Path, sinfo: str) -> None:
    directory.mkdir()
    for name in slurm.COMMANDS:
        program = directory / name
        program.write_text(sinfo)
        program.chmod(0o755)


def test_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "bin", SINFO)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    assert slurm.partitions() == (
        Partition("batch", 86400, 3600, nodes=12, cpus=256, memory_mib=515000, gpus=4),
        Partition("devel", 7200, 1800, nodes=2, cpus=48, memory_mib=95000, gpus=0),
    )


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("", "this machine has no sbatch, scancel"),
        ("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n",
         "does not answer: Unable to contact"),
    ],
)  # fmt: skip
def test_no_slurm_and_one_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, told: str
) -> None:
    if program:
        install(tmp_path / "bin", program)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}" + ":/usr/bin:/bin" * bool(program))
    with pytest.raises(SandboxError, match=told):
        slurm.partitions()
