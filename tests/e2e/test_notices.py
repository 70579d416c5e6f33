"""Notices of a failure and of the end of a run, through the real command."""

import json
from pathlib import Path
from typing import Any

from tests.support.workflows import UNTRACKED, Project, tells, until

SNAKEFILE = """
    rule all:
        input: "a.txt", "b.txt", "c.txt", "local.txt"

    rule fails:
        output: "{n,[ab]}.txt"
        shell: "exit 3"

    rule waits:
        output: "c.txt"
        shell: "until [ -e go ]; do sleep 0.1; done; touch {output}"

    localrules: local

    rule local:
        output: "local.txt"
        shell: "touch {output}"
"""


def notices(path: Path) -> list[dict[str, Any]]:
    """What the command was given, each time a line."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_first_failure_is_announced_at_once_and_then_the_end(project: Project) -> None:
    project.extra |= UNTRACKED
    project.write("Snakefile", SNAKEFILE)
    said = project.run("--mantik-notify", "https://host/s3cr3t").failed()
    tells(said, "--mantik-notify: there is no command 'https' on this machine", "curl")
    assert not project.exists(".snakemake/mantik"), "nothing is begun before that is told"
    got = project.directory / "notices.jsonl"
    command = "sh -c 'cat >> notices.jsonl; echo >> notices.jsonl'"
    running = project.start("--keep-going", "--mantik-notify", command)
    [first] = until(lambda: notices(got), "the first failure")
    assert (first["event"], first["outcome"], first["sites"]) == ("failed", None, ["hpc1"])
    assert first["running"] >= 1
    assert first["directory"] == str(project.directory)
    until(lambda: running.output.count("Error in rule fails") == 2, "the second one")
    project.go()
    running.end().failed()

    first, last = notices(got)
    assert (last["event"], last["outcome"]) == ("finished", "failed")
    assert (last["done"], last["total"], last["running"], last["failed"]) == (2, 5, 0, 2)
    assert last["seconds"] > 0
    for job in last["failed_jobs"]:
        assert (job["rule"], job["site"], job["reason"]) == ("fails", "hpc1", "exit_code")
        assert job["message"].startswith("The command ended with exit code 3")
        assert (project.directory / job["log"]).exists()
    assert sorted(job["job"] for job in last["failed_jobs"]) == ["fails n=a", "fails n=b"]
    assert last["text"].startswith("project: failed after ")


def test_ctrl_c_is_announced_and_the_command_is_in_no_file(project: Project) -> None:
    secret = "T0-s3cr3t"
    project.extra |= UNTRACKED
    project.extra["SNAKEMAKE_MANTIK_NOTIFY"] = f"sh -c 'echo no {secret} >&2; exit 3'"
    project.write("Snakefile", SNAKEFILE)
    running = project.start("c.txt", "--mantik-on-interrupt", "cancel")
    running.says("runs at")
    ended = running.interrupt()
    assert ended.code == 1
    tells(ended.output, "The notice of the run's end could not be delivered: sh ended with exit")
    assert "Traceback" not in ended.output
    texts = {path: path.read_bytes() for path in project.directory.rglob("*") if path.is_file()}
    assert not [path for path, text in texts.items() if secret.encode() in text]
    assert secret not in ended.output
