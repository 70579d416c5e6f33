"""`smk-mantik plan` tells what `snakemake` would send, and does nothing at all."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

from tests.support import forkserver
from tests.support.terminal import Terminal
from tests.support.workflows import WAIT_S, Place, Project, Ran, one_rule_each, tells

SNAKEFILE = """
    print("the Snakefile speaks")
    localrules: here

    rule all:
        input: "c.txt", expand("x{i}.txt", i=range(2)), "here.txt"

    rule a:
        input: "data.bin", "dir"
        output: "a.txt"
        resources: mem_mb=4000, runtime=90, nodes=2, gpu=4
        threads: 8
        shell: "cat data.bin > {output}"

    rule b:
        input: "a.txt"
        output: "b.txt"
        params: first=lambda wildcards, input: open(input[0]).read(1)
        resources: mem_mb=lambda wildcards, input: int(input.size_mb) + 5
        shell: "cp {input} {output}; echo {params.first}"

    rule c:
        input: "b.txt"
        output: "c.txt"
        resources: mantik_site="other"
        shell: "cp {input} {output}"

    rule x:
        input: "data.bin"
        output: "x{i}.txt"
        shell: "cp {input} {output}"

    rule here:
        output: "here.txt"
        shell: "touch {output} RAN"
"""


def plan(
    project: Project, *arguments: str, credentials: bool = False, command: str = "plan"
) -> Ran:
    """Run `smk-mantik plan`, or another command; standard error comes first in what it said."""
    environment = project.environment
    if not credentials:
        for name in project.place.environment:
            environment.pop(name)
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        process = forkserver.run(
            [command, *arguments], cwd=project.directory, environment=environment,
            output=output.fileno(), errors=errors.fileno(),
            module="snakemake_executor_plugin_mantik",
        )  # fmt: skip
        code = process.wait(WAIT_S)
        output.seek(0)
        errors.seek(0)
        return Ran(code, errors.read() + "\n=====\n" + output.read())


def of(ran: Ran) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(ran.output.partition("\n=====\n")[2])
    return made


@pytest.fixture
def planned(project: Project) -> Project:
    """A workflow with most of what makes a difference, and a second site for one of its rules."""
    project.write("Snakefile", SNAKEFILE)
    project.write("data.bin", "x" * 3_000_000)
    project.write("dir/one.txt")
    project.write("dir/two.txt")
    project.write("script.py", "print(1)\n")
    # The working directory's own profile is read, as it is by snakemake.
    project.write("profiles/default/config.yaml", f"mantik-backend-config: [{project.config}]\n")
    return project


def options(project: Project) -> list[str]:
    config = str(project.config)
    return ["--mantik-backend-config", config, f"other={config}"]


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def test_everything_that_would_be_sent_is_told_and_nothing_is_done(planned: Project) -> None:
    ran = plan(planned, "--json", *options(planned), "--", "all").ok()
    made = of(ran)

    jobs = {job["job"]: job for job in made["jobs"]}
    assert list(jobs) == ["a", "x i=0", "x i=1", "b", "c"]
    a = jobs["a"]
    assert (a["site"], a["nested"], a["outputs"]) == ("hpc1", False, ["a.txt"])
    assert a["command"].endswith("cat data.bin > a.txt")
    expected = {"nodes": 2, "cpus_per_task": 8, "gpus_per_node": 2, "runtime_s": 5400}
    assert expected.items() <= a["resources"].items()
    assert a["resources"]["memory_mib_per_node"] == 4000
    assert a["inputs"] == {
        "files": 3, "bytes": 3_000_004, "at_site": 0, "later": 0, "made_there": 0,
        "moved": 0, "moved_bytes": 0, "imported": 0, "imported_bytes": 0,
    }  # fmt: skip
    assert jobs["b"]["command"] is None
    assert jobs["b"]["later"] == ["mem_mb"]
    assert jobs["c"]["site"] == "other"
    # Two names of one workspace: what is made at one is there for the other.
    assert jobs["c"]["inputs"]["made_there"] == 1

    one, other = made["sites"]["hpc1"], made["sites"]["other"]
    assert (one["jobs"], other["jobs"], made["here"]) == (4, 1, 1)
    assert one["core_hours"] == 1.5 * 16
    assert one["without_cores"] == 0
    assert one["gpu_hours"] == 1.5 * 4
    assert one["without_runtime"] == 3
    assert 3_000_004 < one["uploads"]["bytes"] < 3_010_000, "data.bin goes up once, with sources"
    assert made["project_files"]["hpc1"]["files"] == 2, "Snakefile and script"

    told = plan(planned, "--details", *options(planned), "--quiet", "-n", "-j1").ok().output
    said, _, shown = told.partition("=====")
    assert said.splitlines()[1:] == ["the Snakefile speaks", ""], said
    tells(shown, "hpc1: 4 jobs, at most 24.0 core hours and 6.0 GPU hours", "1 h 30 min",
          "other: 1 job, core hours unknown without a walltime",
          "5 to upload (2.9 MiB), 2 of them project files, 1 made at the site by jobs of this run",
          "mem_mb, its command: follows from files that are still to be made",
          "1 job on this machine.", "    set -euo pipefail;  cat data.bin > a.txt")  # fmt: skip

    titles, _, x, _, b = (" ".join(line.split()) for line in shown.splitlines()[1:6])
    assert titles == "job site queue nodes CPUs memory GPUs time uploads"
    assert x == "x i=0 hpc1 batch default default default 1 file, 2.9 MiB"
    assert b == "b hpc1 batch ? ? ?", "its memory is not known yet"

    assert not planned.exists("here.txt")
    assert not planned.exists("RAN")
    found = files(planned.directory)
    planned.run("-n", *options(planned), plain=True).ok()
    assert files(planned.directory) == found, "a dry run leaves the same"
    assert not planned.exists(".snakemake/mantik")


def test_what_is_at_the_site_is_not_counted_again(planned: Project) -> None:
    planned.run("a.txt", "x0.txt").ok()
    before = files(planned.directory / ".snakemake" / "mantik")

    made = of(plan(planned, "--json", "x0.txt", "x1.txt", "b.txt"))

    assert [job["job"] for job in made["jobs"]] == ["b", "x i=1"]
    assert [job["inputs"]["at_site"] for job in made["jobs"]] == [1, 1]
    assert made["sites"]["hpc1"]["uploads"]["files"] == 0
    assert files(planned.directory / ".snakemake" / "mantik") == before
    assert plan(planned, "x0.txt").output.endswith("=====\n\nNo job would be submitted.\n")
    planned.write("data.bin", "y" * 3_000_000)
    made = of(plan(planned, "--json", "x1.txt"))
    assert made["sites"]["hpc1"]["uploads"]["bytes"] == 3_000_000


def test_a_file_that_its_job_updates_is_sent(project: Project) -> None:
    project.write("log.txt", "so far")
    project.write(
        "Snakefile", 'rule a:\n    output: update("log.txt")\n    shell: "date >> {output}"'
    )
    made = of(plan(project, "--json", *options(project), "--forceall", "a").ok())
    assert made["jobs"][0]["inputs"]["bytes"] == len("so far")


def test_what_a_run_would_ignore_is_told(project: Project) -> None:
    project.write("Snakefile", one_rule_each(one='conda: "e"\nresources: mantik_wait="1h"'))
    told = plan(project, "--mantik-backend-config", str(project.config)).ok().output
    tells(
        told,
        "Ignoring conda: e of rule one; pass --mantik-software-dep",
        "mantik_wait has no effect on these rules, which name no second site to go to: one.",
    )


def test_mistakes_are_those_of_a_real_run(planned: Project) -> None:
    planned.write("Snakefile", SNAKEFILE.replace('"other"', '"hpc1"'))
    ran = plan(planned, "--set-resources", "x:mantik_site=hpc2")
    assert ran.code == 2, ran.output
    tells(ran.output, "there is no site 'hpc2' (did you mean hpc1?)")
    assert "Traceback" not in ran.output
    assert not ran.output.partition("=====")[2].strip()


def test_core_hours_of_a_job_without_cpus_are_unknown(planned: Project) -> None:
    wanted = ["--set-resources", "x:runtime=60"]
    said = plan(planned, *wanted, "--set-threads", "x=1", "--", "x1.txt").ok().output
    tells(said, "an unknown number of core hours for 1 job", "cpus_per_task of the rule")
    said = plan(planned, *wanted, "x:cpus_per_task=1", "--", "x1.txt").ok().output
    tells(said, "at most 1.0 core hours;")


POOLED = """
Resources: {Queue: batch, Runtime: 1h}
Pools:
  small: {Queue: batch, CPUsPerNode: 48, Runtime: 2h, Takes: 15m}
"""
SHORT = """
    rule all:
        input: expand("{n}.{kind}", n=range(30), kind=["one", "two"]), "long.txt"
    rule one:
        output: "{n}.one"
        resources: runtime=10
        shell: "date > {output}"
    rule two:
        output: "{n}.two"
        threads: 4
        resources: runtime=15
        shell: "date > {output}"
    rule long:
        output: "long.txt"
        shell: "date > {output}"
"""


def test_plan_shows_what_goes_to_a_pool_and_what_that_saves(project: Project) -> None:
    url = "UnicoreApiUrl: https://unicore.fz-juelich.de/JUWELS/rest/core"
    project.config.write_text(url + POOLED)
    project.write("Snakefile", SHORT)
    config = ["--mantik-backend-config", f"juwels={project.config}"]
    told = plan(project, *config).ok().output
    tells(told, "juwels: 61 jobs, at most 83.0 core hours", "juwels, pool small: 60 jobs of"
          " one (30), two (30), 35.0 core hours and those when an allocation is idle, instead of"
          " 600.0 with whole nodes for each job.")  # fmt: skip

    # Where a job gets the cores that it requests, nothing is saved.
    project.config.write_text(url.replace("JUWELS", "OTHER") + POOLED)
    tells(plan(project, *config).ok().output, "juwels, pool small: 60 jobs of one (30), two (30).")


def test_a_job_that_cannot_be_sent_is_told_with_the_others(project: Project) -> None:
    rules = one_rule_each(
        a='shell: "echo {nonsense} > {output}"', b="resources: runtime=99999, nodes=99"
    )
    project.write("Snakefile", rules)
    config = ["--mantik-backend-config", str(project.config)]
    storage = project.place.storage / "mantik"
    before = sorted(storage.glob("*"))
    ran = plan(project, "--connect", *config, credentials=True)
    assert ran.code == 2
    tells(ran.output, "a: ", "nonsense", "b: runtime: 69 days 10 h requested; queue batch allows",
          "at most 24 h. nodes: 99 requested")  # fmt: skip
    tells(ran.output, "a, b: cannot be submitted, see below")
    assert sorted(storage.glob("*")) == before, "a look leaves nothing there"
    told = plan(project, "--connect", *config)
    assert told.code == 2
    tells(told.output, "credentials")


def test_through_firecrest(firecrest: Project, firecrest_place: Place) -> None:
    firecrest.write(
        "Snakefile",
        """
        rule b:
            input: "../made.txt", "huge.bin"
            output: "b.txt"
            shell: "cp {input[0]} {output}"

        rule a:
            output: "../made.txt"
            shell: "touch {output}"
        """,
    )
    with (firecrest.directory / "huge.bin").open("wb") as file:
        file.truncate(1 << 40)  # nobody reads that in time: what no site can have is not read
    firecrest.config.write_text(
        firecrest.config.read_text().replace("Queue: batch\n", "Queue: batch\n  Runtime: 72h\n")
    )
    config = ["--mantik-backend-config", str(firecrest.config)]
    storage = firecrest_place.storage / "mantik"
    before = sorted(storage.glob("*"))
    made = of(plan(firecrest, "--json", "--connect", *config, credentials=True).ok())
    assert sorted(storage.glob("*")) == before, "a look leaves nothing there"
    assert [job["site"] for job in made["jobs"]] == [firecrest_place.name] * 2
    assert made["sites"][firecrest_place.name]["unchecked"] == ["runtime"]
    assert made["jobs"][1]["inputs"] == {
        "files": 1, "bytes": 1 << 40, "at_site": 0, "later": 0, "made_there": 1,
        "moved": 0, "moved_bytes": 0, "imported": 0, "imported_bytes": 0,
    }  # fmt: skip


def test_of_many_jobs_those_of_a_rule_share_a_row(project: Project) -> None:
    project.write("Snakefile", MANY)
    for i in range(30):
        project.write(f"data/{i}.txt", "x" * (i + 1))
    terminal = Terminal(
        [sys.executable, "-m", "snakemake_executor_plugin_mantik", "plan", *options(project)],
        columns=80, cwd=project.directory, env=project.environment | {"TERM": "xterm"},
    )  # fmt: skip
    try:
        assert terminal.end() == 2
        shown = [" ".join(line.split()) for line in terminal.screen]
    finally:
        terminal.close()
    begin = shown.index("job jobs queue CPUs memory time uploads")
    assert shown[begin + 1].startswith("a_rule_with_a_long_name 29 batch default 3000 MiB 1 h")
    assert "up to 1 file, 30 B each" in " ".join(shown[begin + 1 : begin + 8])
    row = next(line for line in shown if "i=7" in line)
    assert row.startswith("a_rule_with_a_long_name i=7 batch default 3000 MiB 2 h"), row
    assert any("wrong (2 jobs): " in line for line in shown), shown


MANY = """
    rule all:
        input: expand("made/{i}.txt", i=range(30)), "0.wrong", "1.wrong"

    rule a_rule_with_a_long_name:
        input: "data/{i}.txt"
        output: "made/{i}.txt"
        resources: mem_mb=3000, runtime=lambda wildcards: 120 if wildcards.i == "7" else 60
        shell: "cp {input} {output}"

    rule wrong:
        output: "{i}.wrong"
        shell: "echo {nonsense} > {output}"
"""


def test_a_group_is_one_job(project: Project) -> None:
    rules = one_rule_each(
        a='group: "g"\nresources: runtime=10',
        b='input: "a"\ngroup: "g"\nthreads: 3\nresources: runtime=20',
        c='input: "b"',
    )
    project.write("Snakefile", rules)
    made = of(plan(project, "--json", *options(project), "--", "all").ok())
    group, after = made["jobs"]
    assert group["job"] == "group g: a, b"
    assert group["outputs"] == ["a", "b"]
    assert {"cpus_per_task": 3, "runtime_s": 1800}.items() <= group["resources"].items()
    assert after["inputs"]["made_there"] == 1


def test_sources_and_what_is_none_are_listed_with_the_reason(planned: Project) -> None:
    planned.write(".hidden")
    planned.write("old/x.csv")
    planned.write("big.csv", "x" * 2_000_000)
    planned.config.write_text(f"{planned.place.config}Exclude: [old/]\n")
    project_files, left = (
        {"Snakefile", "script.py"},
        {
            ".hidden": "hidden",
            "profiles/default/config.yaml": "a profile of Snakemake",
            "big.csv": "larger than 1.0 MiB",
            "old/": "in Exclude of the backend config",
        },
    )
    made = of(plan(planned, "--json", "--project-files", *options(planned), "--", "all").ok())
    assert made["project_file_sizes"]["hpc1"].keys() == project_files, "inputs are none of them"
    assert made["left_out"]["hpc1"] == {".snakemake/": "hidden", **left}
    said = plan(planned, "--project-files", *options(planned), "--", "all").ok().output
    tells(
        said, "Project files for hpc1:", "  script.py (9 B)", "Not uploaded to hpc1, unless a rule"
    )
    tells(said, *(f"  {path}: {why}" for path, why in left.items()))


def test_what_rules_made_for_other_targets_is_no_project_file(project: Project) -> None:
    """Unless the Snakefile no longer has the rule."""
    rules = one_rule_each(here="localrule: True", other="", wanted="", gone="")
    project.write("Snakefile", rules)
    project.run("here", "other", "gone").ok()
    project.write("Snakefile", rules.replace("rule gone", "rule new"))
    words = ("--json", "--project-files", *options(project), "--", "wanted")
    assert of(plan(project, *words).ok())["project_file_sizes"]["hpc1"].keys() == {
        "Snakefile", "gone",
    }  # fmt: skip


@pytest.mark.parametrize("named", ["x", "x i=0", "x0.txt"])
def test_the_script_of_a_rule_is_shown_although_its_output_exists(
    planned: Project, named: str
) -> None:
    planned.write("x0.txt")
    wanted = ("--", *options(planned), "--set-resources", "x:nodes=2", "--", "all")
    made = of(plan(planned, named, "--json", *wanted, command="render").ok())
    assert (made["job"], made["site"], made["resources"]["nodes"]) == ("x i=0", "hpc1", 2)
    assert made["uploads"] == ["Snakefile", "data.bin", "script.py"]
    tells(made["script"], "cp data.bin x0.txt", "- - ./data.bin", "output - ./x0.txt")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["here"], "Name a rule (a, b, c, x), a job"),
        (["x", "--environment", "e"], "are for a plain command"),
        (["hpc1.yaml"], "Add --command, or name a rule"),
        (["b"], "for b follows from files that are still to be made"),
    ],
)
def test_what_has_no_script_to_show(planned: Project, words: list[str], told: str) -> None:
    planned.write("hpc1.yaml")
    ran = plan(planned, *words, "--", *options(planned), "--", "all", command="render")
    assert ran.code == 2
    tells(ran.output, told)
    assert "Traceback" not in ran.output
