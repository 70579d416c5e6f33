"""Scripts through the real `snakemake` command: where they lie, how they fail, what is adopted."""

from pathlib import Path

from tests.support.workflows import UNTRACKED, Project, tree, until

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
    (project.workspace / "go").touch()

    said = second.end().ok().output

    assert "taken up again" not in said
    assert project.read("out.txt") == "new"


ELSEWHERE = {
    "flow/Snakefile": """
        module inner:
            snakefile: "../inner/Snakefile"
            config: {"word": "module"}

        rule all:
            input: "up.txt", "cached.txt", "inner.txt", "bash.txt", "shadow.txt", "shell.txt"

        use rule * from inner

        include: "rules/up.smk"

        rule cached:
            output: "cached.txt"
            script: workflow.source_path("scripts/cached.py")

        rule bash:
            output: "bash.txt"
            params: words=workflow.basedir + "/words.txt"
            script: "scripts/a.sh"

        rule shell:
            output: "shell.txt"
            shell: "cat {workflow.basedir:q}/words.txt > {output}"

        rule shadow:
            input: "data.txt"
            output: "shadow.txt"
            shadow: "minimal"
            script: "scripts/shadow.py"
    """,
    "flow/rules/up.smk": """
        rule up:
            output: "up.txt"
            script: "../scripts/up.py"
    """,
    "flow/scripts/up.py": """
        from helper import say
        from package.part import more
        say(snakemake.output[0], more, snakemake.rule)
    """,
    "flow/scripts/helper.py": """
        def say(path, *words):
            with open(path, "w") as out:
                print(*words, file=out)
    """,
    "flow/scripts/package/__init__.py": "",
    "flow/scripts/package/part.py": "more = 'more'",
    "flow/scripts/cached.py": "open(snakemake.output[0], 'w').write(snakemake.rule)",
    "flow/scripts/a.sh": """
        . "${snakemake[scriptdir]}/lib.sh" > "${snakemake_output[0]}"
        cat "${snakemake_params[words]}" >> "${snakemake_output[0]}"
    """,
    "flow/words.txt": "words",
    "flow/scripts/lib.sh": "echo lib",
    "flow/scripts/shadow.py": """
        import os
        from helper import say
        open("left.txt", "w")
        say(snakemake.output[0], os.listdir(), open(snakemake.input[0]).read())
    """,
    "inner/Snakefile": """
        rule inner:
            output: "inner.txt"
            script: "inner.py"
    """,
    "inner/inner.py": "open(snakemake.output[0], 'w').write(snakemake.config['word'])",
}


def test_scripts_elsewhere(firecrest: Project, tmp_path: Path) -> None:
    firecrest.extra.update(UNTRACKED)
    for path, text in ELSEWHERE.items():
        firecrest.write(f"../else where/{path}", text)
    firecrest.write("data.txt", "data")
    twin = firecrest.twin()
    arguments = ("--snakefile", "../else where/flow/Snakefile")
    twin.run(*arguments, local=True).ok()

    firecrest.run(*arguments).ok()

    files = tree(firecrest.directory)
    expected = tree(twin.directory)
    for each in (files, expected):
        # What else is in a shadow directory is not the workflow's to see.
        each["shadow.txt"] = each["shadow.txt"].rpartition(b"]")[2]  # type: ignore[arg-type]
    assert files == expected
