"""Job descriptions are kept as golden files; GOLDEN=write makes them anew, to look at the diff."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites.base import Submission
from snakemake_executor_plugin_mantik.sites.unicore.description import (
    batch_directives,
    batch_file,
    job_description,
    lost_resources,
)
from tests.support.trial import wait_until

GOLDEN = Path(__file__).parent / "golden"

ATTEMPT = "0b6c1a9e-0d5d-4f2c-9a54-3f6f3f0d8a11"
GPUS = Resources(
    queue="booster",
    runtime_s=5400,
    nodes=2,
    cpus_per_task=12,
    gpus_per_node=4,
    memory_mib_per_node=65536,
    account="training2026",
    qos="high",
)
PLAIN = Submission(ATTEMPT, "prepare: data=a b,ü\n", "echo 'hi' \"$HOME\" ü\n", Resources())
FULL = Submission(
    ATTEMPT,
    "train_model-7",
    "#!/bin/bash\npython train.py\n",
    GPUS,
    before_on_login=("module load git", "git clone https://example.org/x"),
    after_on_login=("rm -rf x  # tidy",),
)
KNOWN = frozenset(
    ("Runtime", "Nodes", "CPUsPerNode", "TotalCPUs", "MemoryPerNode", "GPUsPerNode", "QoS")
)


@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("slurm-plain", job_description(PLAIN, "slurm")),
        ("slurm-full", job_description(FULL, "slurm", KNOWN)),
        ("none-full", job_description(FULL, "none", KNOWN)),
    ],
)
def test_golden(name: str, description: dict[str, Any]) -> None:
    file = GOLDEN / f"{name}.json"
    rendered = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
    if os.environ.get("GOLDEN") == "write":
        file.write_text(rendered, encoding="utf-8")
    assert rendered == file.read_text(encoding="utf-8")


@pytest.mark.parametrize(("shell", "first"), [("bash", "batch script"), ("sh", "server's shell")])
def test_a_job_that_is_told_to_end_may_say_its_last_words(
    shell: str, first: str, tmp_path: Path
) -> None:
    """Whoever is told first: when the batch script has ended, the rest is killed."""
    last_words = (
        "trap 'sleep 1; echo late > late; exit 1' TERM; echo $$ $PPID > job; read -r _ < never"
    )
    (tmp_path / "job.sh").write_text(f"{last_words}\n")
    (tmp_path / "own.sh").write_text("bash job.sh\necho $? > code\n")
    (tmp_path / "bss.sh").write_text(f"{batch_file(PLAIN, 'slurm', whole=False)}\n{shell} own.sh\n")
    os.mkfifo(tmp_path / "never")
    batch = subprocess.Popen([shell, "bss.sh"], cwd=tmp_path, start_new_session=True)
    wait_until(lambda: (tmp_path / "job").exists() and (tmp_path / "job").read_text())
    job, own = map(int, (tmp_path / "job").read_text().split())
    if first == "batch script":
        os.killpg(batch.pid, signal.SIGTERM)
    else:
        os.kill(own, signal.SIGTERM)
        wait_until(lambda: not Path(f"/proc/{own}").exists())
        os.kill(job, signal.SIGTERM)
    assert batch.wait(600) == 143
    assert (tmp_path / "late").exists()
    assert not (tmp_path / "code").exists()


@pytest.mark.parametrize("scheduler", ["slurm", None])
def test_the_batch_file_runs_the_jobs_script(scheduler: str | None, tmp_path: Path) -> None:
    """Once: with a scheduler, and where UNICORE itself runs jobs and ignores the batch file."""
    script = "#!/bin/bash\ncat <<'E'\n$HOME `a` \\ it's \"q\"\nE\nexit 3\n"
    submission = Submission(ATTEMPT, "x", script, Resources())
    description = job_description(submission, "slurm")
    (batch,) = (each["Data"] for each in description["Imports"])
    (tmp_path / description["BSS file"]).write_text(batch)
    command = " ".join([description["Executable"], *description["Arguments"]])
    (tmp_path / "UNICORE_Job").write_text(f"#!/bin/bash\n{command}\necho $? > code\n")
    (tmp_path / "UNICORE_Job").chmod(0o755)
    (tmp_path / "slurm_script").write_text(f"{batch}\n{tmp_path}/UNICORE_Job\n")
    first = "slurm_script" if scheduler else "./UNICORE_Job"
    done = subprocess.run(["bash", first], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == '$HOME `a` \\ it\'s "q"\n'
    assert (tmp_path / "job.sh").read_text() == script
    assert not (tmp_path / "job.sh.new").exists()
    assert (tmp_path / "code").read_text() == "3\n"


@pytest.mark.parametrize("script", ["echo ü\n", "echo a\r\n", f"# {'x' * (1 << 20)}\n"])
def test_a_script_that_a_batch_file_may_change_is_a_file_of_its_own(script: str) -> None:
    description = job_description(Submission(ATTEMPT, "x", script, Resources()), "slurm")
    data = {each["To"]: each["Data"] for each in description["Imports"]}
    assert data["job.sh"] == script
    assert script not in data["bss.sh"]


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize(
    ("given", "kept"), [("{tsi}:a b", "a b"), ("a:{tsi}:b", "a:b"), ("a::b", "a::b"), (None, None)]
)
def test_jobs_do_not_see_the_modules_of_the_tsi(
    given: str | None, kept: str | None, shell: str, tmp_path: Path
) -> None:
    (tmp_path / "tsi").mkdir()
    (tmp_path / "tsi" / "TSI.py").touch()
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    if given is not None:
        environment["PYTHONPATH"] = given.format(tsi=tmp_path / "tsi")
    show = 'echo "${PYTHONPATH-unset}"\n'
    (tmp_path / "bss.sh").write_text(batch_file(PLAIN, "slurm", whole=False) + show)
    done = subprocess.run(
        [shell, "bss.sh"], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout == f"{kept or 'unset'}\n"


def test_resources_that_the_queue_does_not_know_are_left_out() -> None:
    described = job_description(FULL, "none", {"Runtime", "Nodes"})["Resources"]
    assert described == {"Queue": "booster", "Runtime": "90m", "Nodes": "2"}


@pytest.mark.parametrize(
    ("commands", "ran", "code"),
    [
        (("false # comment", "echo b"), "", 1),
        (("echo a # comment", "echo b"), "a b", 0),
        (("false", "echo x || echo RAN"), "", 1),
        (("cat <<E\na\nE", "echo b"), "a b", 0),
        (("sleep 0 &", "echo b"), "b", 0),
        (("# nothing", "echo b"), "b", 0),
        (("echo a", "exit 3", "echo b"), "a", 3),
        (("echo a; false", "echo b"), "a", 1),
        (('echo a; echo "b;c"',), "a b;c", 0),
        (("echo a > f", "cat f"), "a", 0),
        (("cd .. && A=1", "echo $A"), "1", 0),
        (("echo $(echo a) `echo b`",), "a b", 0),
    ],
)
def test_each_command_of_a_login_hook_runs_if_those_before_it_succeeded(
    commands: tuple[str, ...], ran: str, code: int, tmp_path: Path
) -> None:
    hooked = Submission(ATTEMPT, "x", "", Resources(), before_on_login=commands)
    description = job_description(hooked, "slurm")
    for each in description["Imports"]:
        (tmp_path / each["To"]).write_text(each["Data"])
    # As a server does: in double quotes, and with a redirection behind it.
    hook = description["User precommand"]
    script = f'UC_EXECUTABLE="{hook}"; {hook} >> stdout'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, check=False)
    written = (tmp_path / "stdout").read_text().split()
    assert (written, done.returncode) == (ran.split(), code), hook


@pytest.mark.parametrize(
    ("server", "asked", "lost"),
    [
        ("UNICORE/X 11.0.0", Resources(gpus_per_node=4), 1),
        ("9.3.0", Resources(gpus_per_node=4), 1),
        ("11.1.2", Resources(gpus_per_node=4), 1),
        ("11.2.0", Resources(gpus_per_node=4), 0),
        ("9.2.3", Resources(gpus_per_node=4), 0),
        ("8.0", Resources(gpus_per_node=4), 0),
        ("2.5.5", Resources(memory_mib_per_node=2048), 1),
        ("3.1.0", Resources(memory_mib_per_node=2048, gpus_per_node=1), 2),
        ("3.1.0", Resources(memory_mib_per_node=2047, gpus_per_node=0), 0),
        ("2.5.4", Resources(gpus_per_node=4), 0),
        ("3.2.0", Resources(gpus_per_node=4), 0),
        ("", Resources(gpus_per_node=4), 0),
    ],
)
def test_what_a_server_loses_is_sent_raw_or_refused(
    server: str, asked: Resources, lost: int
) -> None:
    assert len(lost_resources(asked, server)) == lost
    submission = Submission(ATTEMPT, "x", "", asked)
    assert job_description(submission, "slurm", server=server)["Job type"] == "RAW"
    if lost:
        with pytest.raises(UserError, match="loses"):
            job_description(submission, "none", server=server)
    else:
        assert "Job type" not in job_description(submission, "none", server=server)


def test_a_raw_job_for_pbs_brings_its_own_directives() -> None:
    asked = Resources(queue="q", nodes=2, cpus_per_task=8, runtime_s=90000, account="a")
    description = job_description(Submission(ATTEMPT, "train: x", "", asked), "pbs", None)
    assert description["Job type"] == "RAW"
    assert description["Imports"][0]["Data"].splitlines()[:11] == [
        "#!/bin/bash",
        "#PBS -S /bin/bash",
        "#PBS -N train_x",
        "#PBS -q q",
        "#PBS -P a",
        "#PBS -l select=2:ncpus=8:mpiprocs=1",
        "#PBS -l place=scatter",
        "#PBS -l walltime=25:00:00",
        "#PBS -r n",
        "#PBS -o stdout",
        "#PBS -e stderr",
    ]


def test_cpus_are_told_in_ways_that_do_not_contradict() -> None:
    def described(**asked: int) -> dict[str, str]:
        resources = Resources(**asked)  # type: ignore[arg-type]
        submission = Submission(ATTEMPT, "x", "", resources)
        return dict(job_description(submission, "none", None).get("Resources", {}))

    assert described(cpus_per_task=4) == {"Nodes": "1", "CPUsPerNode": "4"}
    assert described(total_cpus=8) == {"TotalCPUs": "8"}
    both = described(nodes=2, cpus_per_task=4, total_cpus=8)
    assert both == {"Nodes": "2", "CPUsPerNode": "4", "TotalCPUs": "8"}
    assert "TotalCPUs" not in described(nodes=2, cpus_per_task=4, total_cpus=9)
    assert described(nodes=2, tasks=8, cpus_per_task=3) == {"Nodes": "2", "CPUsPerNode": "12"}


@pytest.mark.parametrize(
    ("scheduler", "line"),
    [("slurm", "#SBATCH --dependency=afterany:7:12"), ("pbs", "#PBS -W depend=afterany:7:12")],
)
def test_a_job_that_starts_after_others(scheduler: Any, line: str) -> None:
    job = Submission(ATTEMPT, "x", "true\n", Resources(), after=("7", "12"))
    assert line in batch_directives(job, scheduler)
    assert "depend" not in "".join(batch_directives(replace(job, after=()), scheduler))


def test_a_batch_script_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """Not even one that waits for a pipe which nobody opens any more."""
    cat = tmp_path / "cat"
    cat.write_text('#!/bin/sh\nkill -9 $PPID\necho $$ > "$0.pid"\nexec /bin/cat "$@"\n')
    cat.chmod(0o755)
    (tmp_path / "bss.sh").write_text(f"{batch_file(PLAIN, 'slurm', whole=False)}\nwait\n")
    changed = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    batch = subprocess.Popen(["sh", "bss.sh"], cwd=tmp_path, env=changed, start_new_session=True)
    try:
        assert batch.wait(600) == -signal.SIGKILL
        said = tmp_path / "cat.pid"
        wait_until(lambda: said.exists() and said.read_text().strip())
        # A process that has ended has no program any more, also if nobody has asked for its end.
        wait_until(lambda: not os.path.exists(f"/proc/{said.read_text().strip()}/exe"))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(batch.pid, signal.SIGKILL)
