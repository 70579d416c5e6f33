"""What is seen of jobs and their logs: beside a controller, without one, and when all is over."""

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from hpc_sandbox.server import Sandbox
from tests.support.command import smk_mantik
from tests.support.terminal import Terminal
from tests.support.workflows import UNTRACKED, WAIT_S, Project, tells, until

SNAKEFILE = """
    rule all:
        input: expand("{sample}.txt", sample=list("abc"))

    rule train:
        output: "{sample}.txt"
        log: "logs/{sample}.log"
        resources: runtime=90
        shell:
            "echo step 1 of {wildcards.sample}; echo more > {log}; "
            "until [ -e go ]; do sleep 0.1; done; echo step 2; touch {output}"
"""


def seen(project: Project, *command: str) -> dict[str, dict[str, Any]]:
    found = json.loads(smk_mantik(project, *command, "--json").ok().output)
    return {job["job"]: job for job in (found["jobs"] if isinstance(found, dict) else found)}


def watching(project: Project, columns: int) -> Terminal:
    return Terminal(
        [sys.executable, "-m", "snakemake_executor_plugin_mantik", "watch"],
        columns=columns,
        cwd=project.directory,
        env=project.environment | {"TERM": "xterm"},
    )


def states(project: Project, *command: str) -> Counter[str]:
    return Counter(job["state"] for job in seen(project, *command).values())


def test_a_command_beside_a_running_job(both: Project) -> None:
    both.write(
        "Snakefile",
        """
        rule train:
            output: "out.txt"
            shell: "touch begun; until [ -e go ]; do sleep 0.1; done; touch {output}"
        """,
    )
    running = both.start()
    until((both.workspace / "begun").exists, "the job")
    beside = smk_mantik(both, "exec", "train", "echo at $PWD; exit 3")
    assert (beside.code, beside.output) == (3, f"at {both.workspace}\n")
    both.go()
    running.end().ok()
    over = smk_mantik(both, "exec", "train", "true")
    tells(over.output, "train: it does not run any more (succeeded)", "smk-mantik jobs")


def test_jobs_and_logs_are_seen_at_all_times(firecrest: Project, sandbox: Sandbox) -> None:
    firecrest.extra |= UNTRACKED
    firecrest.write("Snakefile", SNAKEFILE)
    name = firecrest.place.name
    running = firecrest.start()
    running.says("submitted to")
    # The sandbox's site has two slots.
    until(lambda: states(firecrest, "jobs") == {"running": 2, "waiting": 1}, "two jobs that run")

    jobs = seen(firecrest, "watch")
    [waiting] = [job for job in jobs.values() if job["state"] == "waiting"]
    first, second = (job for job in jobs.values() if job["state"] == "running")
    for job in (first, second):
        assert job["waiting_since"] <= job["running_since"]
        assert job["walltime"] == 5400
    assert waiting["running_since"] is None

    def pending() -> bool:
        return bool(seen(firecrest, "jobs")[waiting["job"]]["pending"])

    if name == "hpc2":  # UNICORE's states do not say it; details are asked for later
        until(pending, "the scheduler's reason")

    # By rule and wildcards, by id, and the rule's own log file; of a job that runs.
    until(lambda: "step 1" in smk_mantik(firecrest, "logs", first["job"]).ok().output, "its output")
    not_yet = smk_mantik(firecrest, "exec", waiting["job"], "true")
    assert not_yet.code == 2
    tells(not_yet.output, f"{waiting['job']}: it does not run now", "smk-mantik jobs --ask")
    # In a terminal beside the controller, with what a job that runs has written.
    terminal = watching(firecrest, columns=140 if name == "hpc2" else 80)
    try:
        modes = terminal.modes
        until(lambda: "step 1 of" in terminal.output, "the last line")
        terminal.type(b"f")
        until(lambda: "Keys:" in (shown := "".join(terminal.screen)) and "train" not in shown, "f")
        terminal.type(b"fc")
        until(lambda: "press Ctrl-C there" in terminal.output, "why it cannot cancel a job")
        terminal.type(b"\nl")
        until(lambda: "Log of number (1 to 3)" in terminal.output, "the question")
        terminal.type(b"2\n")
        until(lambda: "[1]: 2\r\nstep 1 of" in terminal.output, "what the job writes")
        terminal.type(b"\x03")  # ends the log, not the table
        until(lambda: "Keys:" in terminal.output.rpartition("[1]: 2")[2], "the table")
        terminal.type(b"\x03")
        assert terminal.end() == 0
        assert terminal.modes == modes
    finally:
        terminal.close()
    by_id = smk_mantik(firecrest, "logs", first["site_jobs"][0]).ok().output
    assert by_id == f"step 1 of {first['job'][-1]}\n"
    until(
        lambda: "more" in smk_mantik(firecrest, "logs", "--log", first["id"]).ok().output, "a log"
    )
    assert "no output" in smk_mantik(firecrest, "logs", waiting["job"]).ok().output
    for path in ("", "./", f"{firecrest.directory}/"):
        output = f"{path}{first['job'][-1]}.txt"
        assert smk_mantik(firecrest, "logs", output).ok().output == by_id
    ambiguous = smk_mantik(firecrest, "logs", "train")
    assert ambiguous.code == 2
    tells(ambiguous.output, "'train' names 3 jobs", *jobs, "Name one of them")
    unknown = smk_mantik(firecrest, "logs", "trian")
    tells(unknown.output, "no job is named 'trian'", *jobs)

    assert json.loads(smk_mantik(firecrest, "report", "--json").ok().output)["going_on"] is True
    running.kill()
    before = Counter(sandbox.record(name)["requests"])
    assert states(firecrest, "jobs") == {"running": 2, "waiting or running": 1}
    assert Counter(sandbox.record(name)["requests"]) == before, "nobody asked"
    alone = seen(firecrest, "watch", "--once")
    assert [alone[job["job"]]["state"] for job in (first, second, waiting)] == [
        "running", "running", "waiting",
    ]  # fmt: skip
    tells(
        smk_mantik(firecrest, "watch").ok().output, "No Snakemake runs here", f"{name}: 1 waiting"
    )

    # Followed to its end, without a controller.
    following = subprocess.Popen(
        [sys.executable, "-m", "snakemake_executor_plugin_mantik", "logs", "-f", first["job"]],
        cwd=firecrest.directory,
        env=firecrest.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    assert following.stdout.readline() == f"step 1 of {first['job'][-1]}\n"
    firecrest.go()
    said, _ = following.communicate(timeout=WAIT_S)
    assert said.endswith("step 2\n")
    assert following.returncode == 0

    def over() -> bool:
        return states(firecrest, "jobs", "--ask") == {"ended at the site": 3}

    until(over, "the ends of all")
    tells(smk_mantik(firecrest, "watch", "--once").ok().output, "train (3 jobs)")
    firecrest.run("--nolock", "--rerun-incomplete").ok()
    assert states(firecrest, "watch") == {"succeeded": 3}
    assert smk_mantik(firecrest, "logs", *first["job"].split()).ok().output == (
        f"step 1 of {first['job'][-1]}\nstep 2\n"
    )
    assert smk_mantik(firecrest, "logs", "--log", first["job"]).ok().output == "more\n"

    smk_mantik(firecrest, "report").ok()
    assert "<svg" in firecrest.read("mantik-report.html")
    told = json.loads(smk_mantik(firecrest, "report", "--json").ok().output)
    assert (told["going_on"], told["jobs"]) == (False, {"succeeded": 4})
    assert told["run"]["ending"] == "finished"
    [rule] = told["rules"]
    assert (rule["rule"], rule["attempts"], rule["walltime"]) == ("train", 3, 5400)
    assert 1 << 20 < rule["memory_used"] < 100 << 20


def test_a_job_that_was_given_up_does_not_wait(project: Project) -> None:
    """Its claim is a directory: the one who was about to end it died before the journal had it."""
    project.extra |= UNTRACKED
    project.write("Snakefile", SNAKEFILE)
    running = project.start()
    running.says("submitted to", WAIT_S)
    until(lambda: states(project, "jobs") == {"running": 2, "waiting": 1}, "two jobs that run")
    running.kill()
    [waiting] = [record for record in project.attempts if record.started is None]
    (project.workspace / waiting.paths.claim).mkdir()
    shown = smk_mantik(project, "jobs", "--ask").ok().output
    tells(" ".join(shown.split()), "given up before it started")
    terminal = watching(project, columns=80)
    try:
        until(lambda: "Keys:" in terminal.output, "the table")
        terminal.type(b"c")
        until(lambda: "Cancel number" in terminal.output, "the question")
        terminal.type(b"1\ny\n\n")
        until(lambda: "which has confirmed it" in terminal.output, "the end of that job")
        terminal.type(b"q")
        assert terminal.end() == 0
    finally:
        terminal.close()
    assert states(project, "jobs")["cancelled"] == 1
    project.go()


@pytest.mark.parametrize("option", ["jobs", pytest.param("watch", marks=pytest.mark.nightly)])
def test_a_site_that_cannot_be_asked_is_named_and_the_rest_is_shown(
    project: Project, option: str
) -> None:
    project.extra |= UNTRACKED
    project.write("Snakefile", SNAKEFILE)
    running = project.start()
    running.says("submitted to", WAIT_S)
    running.kill()
    # Jobs whose ids the journal has not got yet cannot be ended later: let all end by themselves.
    project.go()
    project.config.unlink()
    ran = smk_mantik(project, option, *(["--ask"] if option == "jobs" else ["--once"])).ok()
    tells(ran.output, "hpc1 was not asked", "no longer exists", "--site hpc1=FILE", "train sample=")
