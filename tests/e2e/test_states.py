"""What Snakemake's logger plugins and its metadata hear of a job at a site."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

from tests.support.workflows import Project, one_rule_each, tells, until

PLUGIN = '''
    """Writes what it is told into a file, as JSON lines."""

    import json

    from snakemake_interface_logger_plugins.base import LogHandlerBase

    NAMES = ("state", "jobid", "rule_name", "site", "external_jobid", "queue", "reason",
             "exit_code", "aux", "event")


    class LogHandler(LogHandlerBase):
        writes_to_stream = False
        writes_to_file = False
        has_filter = False
        has_formatter = False
        needs_rulegraph = False

        def emit(self, record):
            facts = {name: getattr(record, name) for name in NAMES if hasattr(record, name)}
            with open("heard.jsonl", "a") as file:
                print(json.dumps({"text": record.getMessage(), **facts}, default=str), file=file)
'''

SNAKEFILE = """
    rule all:
        input: "good.txt", "bad.txt"

    rule good:
        output: "good.txt"
        shell: "until [ -e go ]; do sleep 0.1; done; touch {output}"

    rule bad:
        output: "bad.txt"
        shell: "exit 3"
"""


def listening(project: Project, tmp_path: Path) -> None:
    """Install a logger plugin `ears` for the workflow."""
    package = tmp_path / "plugins" / "snakemake_logger_plugin_ears"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(dedent(PLUGIN))
    paths = [str(package.parent), *(path for path in sys.path if path)]
    project.extra["PYTHONPATH"] = os.pathsep.join(paths)


def heard(project: Project) -> list[dict[str, Any]]:
    return [json.loads(line) for line in project.read("heard.jsonl").splitlines()]


def test_states_are_told_to_logger_plugins_and_to_the_metadata(
    firecrest: Project, tmp_path: Path
) -> None:
    listening(firecrest, tmp_path)
    firecrest.write("Snakefile", SNAKEFILE)
    running = firecrest.start("--logger", "ears", "--keep-going", "--printshellcmds")
    running.says("good: runs at")
    (good,) = (record for record in firecrest.attempts if record.rule == "good")
    marks = firecrest.directory / ".snakemake" / "incomplete"

    def marked() -> bool:
        with suppress(FileNotFoundError):  # that of the other job goes meanwhile
            return any(good.site_jobs[0] in m.read_text() for m in marks.rglob("*") if m.is_file())
        return False

    until(marked, "the job's id in Snakemake's metadata")
    firecrest.go()
    assert running.end().code == 1, running.output

    told = heard(firecrest)
    name = firecrest.place.name
    states = [record for record in told if "state" in record]
    assert [r["state"] for r in states if r["rule_name"] == "good"] == [
        "submitted", "running", "succeeded",
    ]  # fmt: skip
    jobid = next(r["jobid"] for r in told if r.get("rule_name") == "good" and "event" in r)
    for record in states:
        assert record["site"] == name
        if record["rule_name"] == "good":
            assert record["jobid"] == jobid
            assert record["external_jobid"] == good.site_jobs[0]
    failed = next(r for r in states if r["state"] == "failed")
    assert (failed["rule_name"], failed["reason"], failed["exit_code"]) == ("bad", "exit_code", 3)
    error = next(r for r in told if r.get("event") == "job_error")
    assert error["aux"]["reason"] == "exit_code"
    assert error["aux"]["site"] == name
    assert error["aux"]["external_jobid"] == failed["external_jobid"]
    tells(running.output, "Shell command: until [ -e go ]", "    reason: exit_code")


FAILS = one_rule_each(
    code='shell: "echo first; echo what was wrong; exit 3"',
    log='log: "l"\nshell: "echo more is there > {log}; exit 3"',
    set_up='envmodules: "no/such/module"',
)


def test_what_failed_is_told_with_quiet_rules(project: Project) -> None:
    """Snakemake tells nothing of failed jobs then: a line of ours has the reason and the log."""
    image = (
        'rule image:\n    output: "i"\n    resources: mantik_environment="gone"\n    shell: ""\n'
    )
    project.write("Snakefile", f"{FAILS}\n{image}")
    gone = "Environments: {gone: {Apptainer: {Path: /no.sif, Type: remote}}}\n"
    project.config.write_text(project.place.config + gone)
    options = ("--keep-going", "--mantik-software-deployment", "env-modules")
    said = project.run("all", "image", "--quiet", "rules", *options).failed()
    name = project.place.name
    [code] = [line for line in said.splitlines() if f"code: failed at {name}" in line]
    tells(code, "(exit code). The command ended with exit code 3", "Output in .snakemake/mantik/")
    assert code.endswith(".log, which ends with: what was wrong")
    assert "Output in l, which ends with: more is there\n" in said
    [set_up] = [line for line in said.splitlines() if f"set_up: failed at {name}" in line]
    tells(set_up, "(set up). The job failed before its command", "Output in ")
    [image] = [line for line in said.splitlines() if f"image: failed at {name}" in line]
    tells(image, "(set up). The job failed", ", which ends with: mantik: image: there is no ")


def test_a_command_that_did_not_run_is_not_said_to_have_failed(project: Project) -> None:
    project.write("Snakefile", FAILS)
    options = ("--keep-going", "--mantik-software-deployment", "env-modules")
    said = project.run("--quiet", "progress", *options).failed()
    assert "submitted to" not in said
    tells(said, "Project files for hpc1: 1 file (")
    assert said.count("(command exited with non-zero exit code)") == 2
    tells(said.partition("Error in rule code")[2], "(command exited with non-zero exit code)")
