"""Files outside of the working directory: a site has them in a mirror, and nothing else of them.

`tests/workflows/paths-up` compares with a local run what scripts find above their directory.
"""

import os
import uuid
from pathlib import Path
from textwrap import dedent

from tests.support.command import smk_mantik
from tests.support.workflows import FILES_STAY, Project, tells

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
    mirror = os.path.dirname(workspace)
    assert (root / "out/a/first.log").read_text().split() == [
        f"{mirror}/data/x.csv", "../data/y.csv", f"{mirror}/out/a/first.txt",
        f"{mirror}/out/a/tree", f"{mirror}/out/a", f"{mirror}/out/a/first.log",
        f"{mirror}/data/x.csv", workspace,
    ]  # fmt: skip
    there = both.workspace.parent
    assert sorted(os.listdir(there / "out/a")) == ["first.log", "last.txt", "tree"], "temp() stays"

    # No job computes with something else, and a change is seen.
    (there / "data/x.csv").write_text("z\n")
    (root / "data/y.csv").rename(root / "data/other")
    (root / "data/y.csv").write_text("new\n")
    both.run("--forcerun", "first").ok()
    assert (root / "out/a/last.txt").read_text() == "x\nnew\nleaf\n"


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
    mirror = f"{project.workspace.parent}/code/tools"
    assert first == f"{mirror}/where.py {mirror}/beside.py"
    assert names == ["beside.py", "where.py"]
    assert last == f"{root}/code/nothing/x.py {root}/codes/x"


ABOVE = """
    rule all:
        input: "../results/last.txt", "../../{above}/made.txt"

    rule first:
        input: "../data/in.txt"
        output: "../results/first.txt"
        shell: "python3 copy.py ../data/in.txt ../results/first.txt"

    rule last:
        input: "../results/first.txt"
        output: "../results/last.txt"
        shell: "python3 copy.py ../results/first.txt ../results/last.txt; touch ../results/more.txt"

    rule farther:
        input: "../../{above}/in.txt"
        output: "../../{above}/made.txt"
        shell: "python3 copy.py ../../{above}/in.txt ../../{above}/made.txt"
"""


def fill_above(project: Project) -> Path:
    """Write a workflow whose script opens files by their paths; return where farther ones are."""
    far = project.directory.parent.parent / f"far-{uuid.uuid4()}"
    far.mkdir()
    (far / "in.txt").write_text("far\n")
    project.write("../data/in.txt", "near\n")
    project.write("copy.py", "import shutil, sys; shutil.copyfile(*sys.argv[1:])")
    project.write("Snakefile", ABOVE.format(above=far.name))
    return far


def test_a_script_finds_what_is_above_and_clean_removes_it(both: Project) -> None:
    far = fill_above(both)

    both.run().ok()

    assert both.read("../results/last.txt") == "near\n"
    assert (far / "made.txt").read_text() == "far\n"
    tells(smk_mantik(both, "get", "--undeclared").ok().output, "Brought 1 file")
    assert both.exists("../results/more.txt")
    above = both.workspace.parent
    assert sorted(os.listdir(above)) == ["data", "results", "workdir"]
    assert os.listdir(above.parent / far.name)

    found = smk_mantik(both, "clean", "--yes").ok().output

    tells(found, "files of the workflow: ")
    assert os.listdir(above) == ["workdir"]
    assert os.listdir(above.parent) == ["up1"]
    # The next run makes it all again in the same workspace.
    (far / "made.txt").unlink()
    both.run().ok()
    assert (far / "made.txt").read_text() == "far\n"


def test_outputs_above_that_stay_at_their_site(both: Project) -> None:
    far = fill_above(both)
    stay = FILES_STAY

    both.run(*stay).ok()

    assert not both.exists("../results/last.txt")
    tells(smk_mantik(both, "ls").ok().output, "../results/last.txt", f"../../{far.name}/made.txt")
    tells(both.run(*stay).ok().output, "Nothing to be done")
    tells(smk_mantik(both, "clean", "--yes").output, "only there: ../results/last.txt")
    smk_mantik(both, "get", "../results/last.txt", str(far / "made.txt")).ok()
    assert both.read("../results/last.txt") == "near\n"
    assert (far / "made.txt").read_text() == "far\n"


def test_a_workspace_stays_when_a_workflow_begins_to_look_above(project: Project) -> None:
    project.write("../data/in.txt", "near\n")
    rule = """
        rule {0}:
            input: "{1}"
            output: "{0}.txt"
            shell: "cp {1} {0}.txt"
    """
    project.write("own.txt", "own\n")
    project.write(
        "Snakefile", "rule all:\n    input: 'a.txt'\n" + dedent(rule).format("a", "own.txt")
    )
    project.run().ok()
    project.write(
        "Snakefile",
        "rule all:\n    input: 'a.txt', 'b.txt'\n"
        + dedent(rule).format("a", "own.txt") + dedent(rule).format("b", "../data/in.txt"),
    )  # fmt: skip
    project.run().ok()
    assert project.read("b.txt") == "near\n"
    assert [record.rule for record in project.attempts] == ["a", "b"]
