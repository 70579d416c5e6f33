"""Each flag of a file, and what else Snakemake does with files, while outputs stay at sites."""

import json
import zipfile

from tests.support.command import smk_mantik
from tests.support.workflows import FILES_STAY, UNTRACKED, Project, tells

SHA256_OF_ONE = "4355a46b19d348dc2f57c046f8ef63d4538ebb936000f3c9ee954a27460dd865"
"""The checksum of "1" and a newline."""

FLAGS = f"""
    NAMES = glob_wildcards("data/{{name}}.txt").name

    rule all:
        input: expand("out/{{name}}.txt", name=NAMES), "figure.txt", "tables", "sum.txt"

    rule copy:
        input: ancient("data/{{name}}.txt")
        output: report("out/{{name}}.txt")
        shell: "cp {{input}} {{output}}"

    rule figure:
        output: report("figure.txt", category="Figures")
        log: "logs/figure.txt"
        benchmark: "bench/figure.tsv"
        shell: "echo figure > {{output}}; echo drawn > {{log}}"

    rule tables:
        output: report(directory("tables"), patterns=["{{name}}.txt"], category="Tables")
        shell: "mkdir {{output}}; echo 1 > {{output}}/one.txt; echo 2 > {{output}}/two.txt"

    rule ensured:
        output: ensure("one.txt", sha256="{SHA256_OF_ONE}"), ensure("full", non_empty=True)
        shell: "echo 1 | tee {{output}}"

    rule kept:
        output: protected("kept.txt"), protected(directory("kept.d"))
        shell: "echo kept > {{output[0]}}; mkdir {{output[1]}}; echo x > {{output[1]}}/x"

    rule nested:
        output: "nest/in/first", directory("nest/deep"), multiext("nest/many", ".a", ".b")
        shell:
            "echo 1 > {{output[0]}}; mkdir {{output[1]}}; echo 2 > {{output[1]}}/second;"
            " echo a > {{output[2]}}; echo b > {{output[3]}}"

    rule passing:
        output: temp("passing.txt"), temp(directory("passing.d"))
        shell: "echo pass > {{output[0]}}; mkdir {{output[1]}}; touch {{output[1]}}/x"

    rule grown:
        output: update("grown.txt")
        shell: "echo grown >> {{output}}"

    rule flag:
        output: touch("flags/done")
        shell: "true"

    checkpoint parts:
        output: directory("parts")
        shell: "mkdir {{output}}; for n in x y; do echo $n > {{output}}/$n; done"

    rule part:
        input: "parts/{{name}}"
        output: "part-{{name}}"
        shell: "cat {{input}} {{input}} > {{output}}"

    def parts(wildcards):
        found = glob_wildcards(checkpoints.parts.get().output[0] + "/{{name,[a-z]}}")
        return expand("part-{{name}}", name=sorted(found.name))

    rule sum:
        input:
            rules.ensured.output, "kept.txt", "nest/in/first", "nest/many.b", "passing.txt",
            "grown.txt", parts, more=["kept.d", "nest/deep", "passing.d", "flags/done"]
        params: lambda wildcards, input: " ".join(input[:9])
        output: "sum.txt"
        shell: "cat {{params}} {{input.more[0]}}/x {{input.more[1]}}/second > {{output}}"
"""


def test_flags(project: Project) -> None:
    project.extra |= UNTRACKED
    project.write("Snakefile", FLAGS)
    for name in ("a", "b"):
        project.write(f"data/{name}.txt", f"{name}\n")

    project.run(*FILES_STAY).ok()

    there = project.workspace
    total = "1\n1\nkept\n1\nb\npass\ngrown\nx\nx\ny\ny\nx\n2\n"
    assert (there / "sum.txt").read_text() == total
    assert not (there / "passing.txt").exists()
    assert not (there / "passing.d").exists()
    here = {path.name for path in project.directory.iterdir() if not path.name.startswith(".")}
    assert here == {
        "Snakefile", "data", "logs", "bench", "kept.txt", "kept.d", "grown.txt", "flags", "parts",
    }  # fmt: skip
    assert project.read("logs/figure.txt") == "drawn\n"
    assert project.read("bench/figure.tsv").startswith("s\t")
    assert project.read("data/a.txt") == "a\n"
    tells(project.run(*FILES_STAY).ok().output, "Nothing to be done")
    listed = json.loads(smk_mantik(project, "ls", "--json").ok().output)
    assert {each["file"] for each in listed} == {
        "figure.txt", "full", "nest/deep", "nest/in/first", "nest/many.a", "nest/many.b", "one.txt",
        "out/a.txt", "out/b.txt", "part-x", "part-y", "sum.txt", "tables",
    }  # fmt: skip

    looks = (
        '    print("found", *glob_wildcards(storage.mantik("out/{n}.txt")).n, exists("one.txt"))'
    )
    project.write("Snakefile", f"{FLAGS}\n{looks}\n")
    tells(project.run(*FILES_STAY, "-n").ok().output, "found a b True")
    project.write("Snakefile", FLAGS)

    project.run(*FILES_STAY, "--report", "report.zip").ok()
    with zipfile.ZipFile(project.directory / "report.zip") as report:
        shown = {name.rpartition("/")[2]: name for name in report.namelist() if "/raw/" in name}
        assert report.read(shown["figure.txt"]) == b"figure\n"
    assert shown.keys() == {"figure.txt", "one.txt", "two.txt", "a.txt", "b.txt"}

    project.run(*FILES_STAY, "--touch", "--forceall").ok()
    tells(project.run(*FILES_STAY).ok().output, "Nothing to be done")
    wrong = FLAGS.replace(SHA256_OF_ONE, SHA256_OF_ONE[::-1])
    project.write("Snakefile", wrong)
    tells(project.run(*FILES_STAY, "--forcerun", "ensured").failed(), "one.txt", "checksum")
    project.write("Snakefile", FLAGS)
    project.run(*FILES_STAY).ok()
    assert (there / "sum.txt").read_text() == total
