"""Files of every kind and name: they are the same as after a local run, here and nowhere else."""

import hashlib
import os
import posixpath

from snakemake_executor_plugin_mantik.jobs.library import library_path
from tests.support.workflows import Project, mortal, tells, tree

FLAGS = r"""
    rule all:
        input:
            "touched", "kept.txt", "tree.txt", "nothing/at", "ensured", "updated.txt",
            "ancient.txt", "many.a", "many.b", "empty", "tool", "linked.txt", "sizes.txt",
            "scattered.txt"

    rule touched:
        output: touch("touched")
        shell: "true"

    rule kept:
        output: protected("kept.txt")
        shell: "echo kept > {output}"

    rule tree:
        output: directory("tree/of/files")
        shell:
            "mkdir -p {output}/a/b {output}/void; echo 1 > {output}/a/b/c; echo 2 > {output}/d; "
            "ln -s a/b/c {output}/link; ln -s nowhere {output}/dangling; "
            "chmod +x {output}/d; touch {output}/.hidden; touch -d @1577934245 {output}/d"

    rule void:
        output: directory("nothing/at")
        shell: "mkdir {output}"

    rule use_tree:
        input: "tree/of/files", "nothing/at"
        output: "tree.txt"
        shell:
            "( cd {input[0]}; find . ! -type d | LC_ALL=C sort; cat a/b/c d link; "
            "[ -x d ] && echo executable; [ -d void ] && echo void ) > {output}; "
            "[ -d {input[1]} ]; ls -A {input[1]} >> {output}"

    rule ensured:
        output: ensure("ensured", non_empty=True, sha256="SHA256")
        shell: "echo content > {output}"

    rule updated:
        input: "in/data"
        output: update("updated.txt")
        shell: "cat {input} >> {output}"

    rule old:
        input: ancient("in/data")
        output: "ancient.txt"
        shell: "cp {input} {output}"

    rule many:
        output: multiext("many", ".a", ".b")
        shell: "echo a > {output[0]}; echo b > {output[1]}"

    rule empty:
        output: "empty"
        shell: ": > {output}"

    rule tool:
        output: "tool"
        shell: "printf '#!/bin/sh\necho used\n' > {output}; chmod +x {output}"

    rule use_tool:
        input: tool="tool", link="in/link", folder="in", empty="empty"
        output: "linked.txt"
        shell:
            "./{input.tool} > {output}; cat {input.link} >> {output}; [ ! -s {input.empty} ]; "
            "ls {input.folder} >> {output}"

    rule passing:
        output: temp("passing.txt"), temp(directory("passing.d"))
        shell: "echo pass | tee {output[0]}; mkdir {output[1]}; touch {output[1]}/x"

    rule use_passing:
        input: "passing.txt", "passing.d"
        output: "sizes.txt"
        shell: "cat {input[0]} > {output}; ls {input[1]} >> {output}"

    checkpoint scatter:
        output: directory("scattered")
        shell: "mkdir {output}; for i in 1 2 3; do echo $i > {output}/$i.part; done"

    rule part:
        input: "scattered/{i}.part"
        output: "parts/{i}.txt"
        shell: "sed s/^/part/ {input} > {output}"

    def parts(wildcards):
        folder = checkpoints.scatter.get().output[0]
        return expand("parts/{i}.txt", i=sorted(glob_wildcards(folder + "/{i}.part").i))

    rule gather:
        input: parts
        output: "scattered.txt"
        resources: mem_mb=lambda _: 200 * len(checkpoints.scatter.get().output)
        shell: "cat {input} > {output}"
"""


def fill(project: Project) -> None:
    digest = hashlib.sha256(b"content\n").hexdigest()
    project.write("Snakefile", FLAGS.replace("SHA256", digest))
    project.write("updated.txt", "before\n")
    project.write("in/data", "data\n")
    (project.directory / "in/link").symlink_to("data")


def test_flags_of_outputs(both: Project) -> None:
    fill(both)
    twin = both.twin()
    twin.run(local=True).ok()

    both.run().ok()

    assert tree(both.directory) == tree(twin.directory)
    for project in (both, twin):
        assert (project.directory / "tree/of/files/d").stat().st_mtime == 1577934245
    assert both.read("updated.txt") == "before\ndata\n"
    assert not both.exists("passing.txt")
    there = {path.relative_to(both.workspace).as_posix() for path in both.workspace.rglob("*")}
    assert "linked.txt" in there
    assert not [path for path in there if path.startswith("passing")], "temp() files stay there"
    ours = [path for path in (both.workspace / ".mantik").rglob("*") if not path.is_dir()]
    left = {path.name for path in ours if path.parent.name != "place"}
    assert left == {posixpath.basename(library_path())}, "only the lease and the library stay"

    both.prefix = mortal()
    tells(both.run("--forcerun", "kept", "--until", "kept").output, "kept.txt", "Write-protected")
    assert both.read("kept.txt") == "kept\n"
    both.run("--forcerun", "updated", "--until", "updated").ok()
    assert both.read("updated.txt") == "before\ndata\ndata\n"


def test_promises_that_an_output_breaks(project: Project) -> None:
    project.write(
        "Snakefile",
        """
        rule all:
            input: "empty", "other"

        rule empty:
            output: ensure("empty", non_empty=True)
            shell: "touch {output}"

        rule other:
            output: ensure("other", sha256="00")
            shell: "echo other > {output}"
        """,
    )

    said = project.run("--keep-going").output

    tells(said, "unexpected empty output files", "checksums that differ")
    assert not project.exists("empty")
    assert not project.exists("other")


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
