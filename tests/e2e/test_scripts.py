"""Scripts through the real `snakemake` command: where they lie, how they fail, what is adopted."""

from tests.support.workflows import Project, until

ONCE = """
    rule once:
        output: "out.txt"
        script: "scripts/{word}.py"
"""


def test_only_the_same_script_is_adopted(project: Project) -> None:
    project.write("Snakefile", ONCE.replace("{word}", "waits"))
    script = """
        import os, time
        open("ran.txt", "a").write("old ")
        while not os.path.exists("go"):
            time.sleep(0.05)
        open(snakemake.output[0], "w").write("old")
    """
    project.write("scripts/waits.py", script)
    ran = project.workspace / "ran.txt"
    first = project.start("--nolock")
    until(ran.exists, "a script that runs")
    first.kill()
    project.write("scripts/waits.py", script.replace("old", "new"))
    second = project.start("--nolock", "--rerun-incomplete")
    until(lambda: ran.read_text() == "old new ", "the new script")
    project.go()

    said = second.end().ok().output

    assert "reattached" not in said
    assert project.read("out.txt") == "new"
