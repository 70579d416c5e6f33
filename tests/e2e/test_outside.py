"""Files outside of the working directory: a site has them in a mirror, and nothing else of them."""

import os
from pathlib import Path

from tests.support.workflows import Project, tells, until

WORKFLOW = """
    ROOT = "{root}"
    OUT = ROOT + "/out/" + {name!r}

    rule all:
        input: OUT + "/last.txt", "up.txt"

    rule first:
        input: ROOT + "/data/x.csv", "../data/y.csv"
        output: temp(OUT + "/first.txt"), tree=directory(OUT + "/tree")
        log: OUT + "/first.log"
        params: folder=lambda wildcards, output: os.path.dirname(output[0])
        shell:
            "mkdir {{output.tree}}; touch {{output.tree}}/leaf; cd {{params.folder}}; "
            "cat {{input[0]}} > first.txt; "
            "echo {{input}} {{output}} {{params}} {{log}} {root}/data/x.csv {{workflow.basedir}} "
            "> {{log}}"

    rule last:
        input: OUT + "/first.txt", OUT + "/tree", "../data"
        output: OUT + "/last.txt"
        log: "last.log"
        shell:
            "cat {{input[0]}} {{input[2]}}/y.csv > {{output}}; ls {{input[1]}} >> {{output}}; "
            "pwd > {{log}}"

    rule up:
        input: "../data/y.csv"
        output: "up.txt"
        shell: "cat {{input}} > {{output}}"
"""


def fill(project: Project, name: str = "a") -> Path:
    """Write the workflow and its data; the directory that holds all of it."""
    root = project.directory.parent
    for data in ("x", "y"):
        project.write(f"../data/{data}.csv", f"{data}\n")
    project.write("Snakefile", WORKFLOW.format(root=root, name=name))
    return root


def test_nothing_at_the_site_is_called_as_here(both: Project) -> None:
    root = fill(both)

    both.run().ok()

    assert (root / "out/a/last.txt").read_text() == "x\ny\nleaf\n"
    assert not (root / "out/a/first.txt").exists()
    assert sorted(os.listdir(root / "out/a")) == ["first.log", "last.txt", "tree"]
    workspace = both.read("last.log").strip()
    mirror = f"{workspace}/.mantik/outside{root}"
    assert (root / "out/a/first.log").read_text().split() == [
        f"{mirror}/data/x.csv", f".mantik/outside{root}/data/y.csv", f"{mirror}/out/a/first.txt",
        f"{mirror}/out/a/tree", f"{mirror}/out/a", f"{mirror}/out/a/first.log",
        f"{mirror}/data/x.csv", workspace,
    ]  # fmt: skip
    there = both.workspace / f".mantik/outside{root}"
    assert sorted(os.listdir(there / "out/a")) == ["first.log", "last.txt", "tree"], "temp() stays"

    # No job computes with something else, and a change is seen.
    (there / "data/x.csv").write_text("z\n")
    (root / "data/y.csv").rename(root / "data/other")
    (root / "data/y.csv").write_text("new\n")
    both.run("--forcerun", "first").ok()
    assert (root / "out/a/last.txt").read_text() == "x\nnew\nleaf\n"


def test_a_command_that_makes_nothing_outside(project: Project) -> None:
    project.write(
        "Snakefile",
        f"""
        rule none:
            output: "{project.directory.parent}/none.txt"
            log: "../none.log"
            shell: "echo said > {{log}}"
        """,
    )
    said = project.run().failed()
    tells(said, f"did not make {project.directory.parent}/none.txt")
    assert not (project.directory.parent / "none.txt").exists()
    assert (project.directory.parent / "none.log").read_text() == "said\n"


def test_a_run_that_was_killed_finds_its_job_again(project: Project) -> None:
    root = project.directory.parent
    project.write(
        "Snakefile",
        f"""
        rule slow:
            output: "{root}/slow.txt"
            shell: "echo once >> {root}/slow.txt; while [ ! -e go ]; do sleep 0.1; done"
        """,
    )
    running = project.start()
    made = project.workspace / f".mantik/outside{root}/slow.txt"
    until(made.exists, "the job")
    running.kill()
    (project.workspace / "go").touch()

    said = project.run("--nolock", "--rerun-incomplete").ok().output

    tells(said, "taken up again")
    assert (root / "slow.txt").read_text() == "once\n"
    assert not list(root.glob(".*mantik-part"))


def test_what_commands_name_beside_a_snakefile_elsewhere(project: Project) -> None:
    root = project.directory.parent
    project.write("../code/tools/where.py", "import beside; print(__file__, beside.__file__)")
    project.write("../code/tools/beside.py", "")
    project.write("../code/tools/.hidden", "")
    project.write("../code/data/large.bin", "x" * (2 << 20))
    project.write(
        "../code/Snakefile",
        """
        rule where:
            output: "where.txt"
            shell:
                "python3 {workflow.basedir}/tools/where.py > {output}; "
                "ls -A {workflow.basedir}/tools | grep -v __pycache__ >> {output}; "
                "echo {workflow.basedir}/nothing/x.py {workflow.basedir}s/x >> {output}"
        """,
    )

    project.run("--snakefile", "../code/Snakefile").ok()

    first, *names, last = project.read("where.txt").splitlines()
    mirror = f"{project.workspace}/.mantik/outside{root}/code/tools"
    assert first == f"{mirror}/where.py {mirror}/beside.py"
    assert names == ["beside.py", "where.py"]
    assert last == f"{root}/code/nothing/x.py {root}/codes/x"
