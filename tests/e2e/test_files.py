"""Files of every kind and name: they are the same as after a local run, here and nowhere else."""

import os

from tests.support.workflows import Project

NAMES = [
    "a blank",
    "it's",
    'a "quote"',
    "a#b",
    "100%",
    "%41",
    "müde",
    "a*b",
    "new\nline",
    "$HOME;&",
    "end\n",
]

LONG = "-" + "ü" * 125 + "long"
DEEP = "/".join(["directory"] * 60)


def test_names(both: Project) -> None:
    both.directory = both.directory / "a b'\"#100%ü*"
    both.directory.mkdir()
    names = [*NAMES, "".join(NAMES), LONG, DEEP]
    assert len(os.fsencode(LONG)) == 255, "the longest name of a file"
    for name in names:
        both.write(f"in/{name}", f"of {name}")
    both.write(
        "Snakefile",
        f"""
        NAMES = {names!r}

        rule all:
            input: ["out/" + name + "/" + name for name in NAMES], "all", "-dash"

        rule read:
            input: "in", ["d/" + name for name in NAMES], dash="-dash"
            output: "all"
            shell:
                "for i in {{input:q}}; do "
                "find \\"./$i\\" -type f -exec cat {{{{}}}} +; done > {{output}}"

        rule dash:
            output: "-dash"
            log: "--"
            shell: "echo dash > {{output}}; echo dashes > ./{{log}}"

        for number, name in enumerate(NAMES):
            rule:
                name: f"r{{number}}"
                input: "in/" + name
                output: "out/" + name + "/" + name, directory("d/" + name)
                log: "log/" + name
                shell:
                    "cat {{input:q}} > {{output[0]:q}}; echo log > {{log:q}}; "
                    "mkdir {{output[1]:q}}; cp {{output[0]:q}} {{output[1]:q}}/{{rule}}; "
                    "cp {{input:q}} {{output[1]:q}}"
        """,
    )

    both.run().ok()

    for name in names:
        assert both.read(f"out/{name}/{name}") == f"of {name}"
        assert both.read(f"log/{name}") == "log\n"
        assert (both.directory / "d" / name / name.split("/")[-1]).read_text() == f"of {name}"
    assert both.read("all").count("of ") == 3 * len(names)
    assert both.read("-dash") == "dash\n"
    assert both.read("--") == "dashes\n"


def test_a_rules_own_directory_for_temporary_files(project: Project) -> None:
    """It is made at the site, where alone its variables exist."""
    project.extra |= {"SNAKEMAKE_MANTIK_TRACK": "none", "MINE": "here"}
    project.config.write_text(
        f"{project.place.config}Environment: {{Variables: {{MINE: there}}}}\n"
    )
    project.write("tmp.sh", 'echo "${snakemake_resources[tmpdir]} $TMPDIR" > member2.txt')
    project.write(
        "Snakefile",
        """
        rule all:
            input: "plain.txt", "member2.txt", "option.txt"

        rule plain:
            output: "plain.txt"
            resources: tmpdir=lambda _, attempt: f"own/$MINE/{attempt}"
            shadow: "minimal"
            shell: "touch '{resources.tmpdir}/x'; echo {resources.tmpdir} $TMPDIR > {output}"

        rule member1:
            output: "member1.txt"
            group: "g"
            resources: tmpdir="own/$MINE"
            shell: "touch {resources.tmpdir}/member; touch {output}"

        rule member2:
            input: "member1.txt"
            output: "member2.txt"
            group: "g"
            resources: tmpdir="own/$MINE"
            script: "tmp.sh"

        rule option:
            output: "option.txt"
            shell: "echo {resources.tmpdir} $TMP > {output}"
        """,
    )
    option = f'option:tmpdir="{project.workspace}" + "/${{MINE}}"'
    project.run("--set-resources", option).ok()
    for name, path in (("plain", "own/there/1"), ("member2", "own/there"), ("option", "there")):
        made = str(project.workspace / path)
        assert project.read(f"{name}.txt").split() == [made, made]
        assert os.path.isdir(made)
    assert (project.workspace / "own/there/1/x").exists()
    assert (project.workspace / "own/there/member").exists()


def test_groups_wait_for_the_checkpoint_that_they_read(project: Project) -> None:
    """Snakemake takes such a group for ready at once, depending on the order of a set."""
    project.write(
        "Snakefile",
        """
        import os

        SAMPLES = range(6)

        rule all:
            input: expand("read/{s}", s=SAMPLES)

        checkpoint split:
            output: directory("parts")
            shell: "mkdir {output}; echo 1 > {output}/1; echo 2 > {output}/2"

        def parts(_):
            folder = checkpoints.split.get().output[0]
            return sorted(f"{folder}/{n}" for n in os.listdir(folder) if n.isdigit())

        rule make:
            output: "made/{s}"
            group: "g"
            shell: "echo {wildcards.s} > {output}"

        rule read:
            input: "made/{s}", parts
            output: "read/{s}"
            group: "g"
            shell: "cat {input} > {output}"
        """,
    )
    project.run().ok()
    assert [project.read(f"read/{s}") for s in range(6)] == [f"{s}\n1\n2\n" for s in range(6)]
