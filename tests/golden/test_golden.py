"""A dozen workflows take the steps and make the requests that were recorded.

After a change that is meant to alter these, record them anew and read the difference:

    MANTIK_GOLDEN=record pytest tests/golden
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_sandbox.settings import SiteOption
from tests.golden.record import RecordingSandbox, history, transcript, watch_steps
from tests.support.places import PATIENT
from tests.support.workflows import FILES_STAY, UNTRACKED, Project, place_in, until, with_snakemake

_SITES = {"hpc1": "unicore", "hpc2": "firecrest"}


def finish(project: Project, *flags: str) -> None:
    project.run(*flags).ok()


def stay(project: Project, *flags: str) -> None:
    finish(project, *FILES_STAY, *flags)


def cancel(project: Project, *flags: str) -> None:
    run = project.start(*flags, "--mantik-on-interrupt", "cancel")
    until((project.workspace / "began").exists, "the job")
    run.interrupt().failed()


def submit_all(project: Project, number: int) -> None:
    """Let the first job end when all are at the site."""
    run = project.start("--mantik-presubmit", "10")
    until(lambda: sum(len(one.site_jobs) for one in project.attempts) == number, "the jobs")
    (project.workspace / "go").touch()
    run.end().ok()


@dataclass(frozen=True)
class Workflow:
    """A Snakefile, and how it is run."""

    snakefile: str
    run: Callable[..., None] = finish


WORKFLOWS = {
    "plain": Workflow("""
        rule:
            input: "in.txt"
            output: "out.txt"
            shell: "cat {input} > {output}"
    """),
    "chain": Workflow("""
        rule last:
            input: "b.txt"
            output: directory("c")
            log: "c.log"
            shell: "mkdir {output}; cp {input} {output} 2> {log}"
        rule first:
            input: "in.txt"
            output: temp("b.txt")
            shell: "cat {input} > {output}"
    """),
    "retry": Workflow("""
        rule flaky:
            output: "out.txt"
            retries: 1
            resources: attempt=lambda wildcards, attempt: attempt
            shell: "echo {resources.attempt} > {output}; [ {resources.attempt} = 2 ]"
    """),
    "group": Workflow("""
        rule two:
            input: "b.txt"
            output: "c.txt"
            group: "g"
            shell: "cat {input} > {output}"
        rule one:
            output: temp("b.txt")
            group: "g"
            shell: "echo b > {output}"
    """),
    "checkpoint": Workflow("""
        rule sum:
            input: lambda w: open(checkpoints.names.get().output[0]).read().split()
            output: "sum.txt"
            shell: "cat {input} > {output}"
        checkpoint names:
            output: "names.txt"
            shell: "echo a.txt > {output}"
        rule part:
            output: "{name}.txt"
            wildcard_constraints: name="[a-z]"
            shell: "echo {wildcards.name} > {output}"
    """),
    "stored": Workflow("""
        localrules: all
        rule all:
            input: "c.txt"
        rule two:
            input: "b", "in.txt"
            output: "c.txt"
            shell: "cat {input[0]}/* > {output}"
        rule one:
            output: directory("b")
            shell: "mkdir {output}; echo b > {output}/b"
    """, stay),
    "segments": Workflow("""
        rule train:
            output: "model.txt"
            resources: runtime=60, mantik_continue=3, mantik_checkpoint="ckpt/"
            shell:
                "echo x >> ckpt/epochs; [ $MANTIK_SEGMENT = 1 ] || exit 85;"
                " cp ckpt/epochs {output}"
    """),
    "cancelled": Workflow("""
        rule:
            output: "out.txt"
            shell: "touch began; sleep 600"
    """, cancel),
    "nested": Workflow("""
        rule:
            output: "out.txt"
            run:
                open(output[0], "w").write("x")
    """),
    "script": Workflow("""
        rule:
            input: "in.txt"
            output: "out.txt"
            params: factor=2
            script: "double.py"
    """),
    "presubmitted": Workflow("""
        rule last:
            input: "b.txt"
            output: "c.txt"
            shell: "cat {input} > {output}"
        rule first:
            output: "b.txt"
            shell: "until [ -e go ]; do sleep 0.1; done; echo b > {output}"
    """, lambda project, *_: submit_all(project, 2)),
}  # fmt: skip
SCRIPT = """
    with open(snakemake.output[0], "w") as out:
        out.write(open(snakemake.input[0]).read() * snakemake.params.factor)
"""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordingSandbox]:
    sites = [SiteOption("hpc1"), SiteOption("hpc2", "firecrest")]
    with RecordingSandbox(tmp_path_factory.mktemp("golden"), sites, PATIENT) as box:
        yield box


MARKS = {
    "nested": pytest.mark.software("Snakemake at a site"),
    **dict.fromkeys(("plain", "checkpoint", "group"), pytest.mark.nightly),  # as script and chain
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, ())) for name in WORKFLOWS]
)
def test_workflow_leaves_what_was_recorded(
    name: str, box: RecordingSandbox, tmp_path: Path
) -> None:
    workflow = WORKFLOWS[name]
    journals, requests = [], []
    for site, api in _SITES.items():
        box.wire = []
        place = with_snakemake(place_in(box, site)) if name == "nested" else place_in(box, site)
        project = Project(tmp_path / api / "project", place, dict(UNTRACKED))
        project.write("Snakefile", workflow.snakefile)
        project.write("in.txt")
        project.write("double.py", SCRIPT)
        watch_steps(project)
        try:
            workflow.run(project, "--mantik-presubmit", "0")
        finally:
            project.close()
        journals.append(list(history(project)))
        requests += [f"[{api}]", *transcript(box.wire)]
    assert journals[0] == journals[1], "the journal does not depend on the API"
    lines = ["[journal]", *journals[0], *requests]
    golden = Path(__file__).with_name(f"{name}.txt")
    if os.environ.get("MANTIK_GOLDEN") == "record":
        golden.write_text("\n".join(lines) + "\n")
    assert lines == golden.read_text().splitlines()
