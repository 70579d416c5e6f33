"""Files that jobs leave beside their outputs: listed, and brought by hand."""

import json

from tests.support.command import smk_mantik
from tests.support.workflows import Project, tells

SNAKEFILE = """
    rule all:
        input: "res/a.txt", "res/b.txt"

    rule one:
        output: "res/{name}.txt"
        shell:
            "echo {wildcards.name} > {output}; echo extra > res/{wildcards.name}.json;"
            " mkdir -p plots/more; echo deep > plots/more/{wildcards.name}.svg; touch .hidden;"
            " name=taken; echo theirs > $name.bin"
"""
NEW = {"plots/more/a.svg", "plots/more/b.svg", "res/a.json", "res/b.json"}


def test_new_files_are_reported_once_listed_and_brought(both: Project) -> None:
    both.write("Snakefile", SNAKEFILE)
    name = both.place.name

    said = both.run().ok().output

    assert said.count(f"new files that no rule declares stay at {name}: ") == 1, said
    tells(said, "taken.bin (7 B)", "smk-mantik get PATH")
    assert not both.exists("res/a.json")
    listed = json.loads(smk_mantik(both, "ls", "--undeclared", "--json").ok().output)
    assert {(each["file"], each["site"]) for each in listed} == {
        (path, name) for path in (*NEW, "taken.bin")
    }
    smk_mantik(both, "get", "plots/more/a.svg").ok()
    assert both.read("plots/more/a.svg") == "deep\n"
    assert not both.exists("plots/more/b.svg")
    both.write("taken.bin", "mine\n")
    tells(smk_mantik(both, "get", "taken.bin").output, "other contents: taken.bin")
    tells(smk_mantik(both, "get", "plots").ok().output, "Brought 1 file, 5 B; 1 was here.")
    tells(smk_mantik(both, "get", "--undeclared").ok().output, "Brought 2 files")
    assert both.read("taken.bin") == "mine\n"
    assert all(both.exists(path) for path in NEW)
    smk_mantik(both, "get", "taken.bin", "--force").ok()
    assert both.read("taken.bin") == "theirs\n"
    tells(smk_mantik(both, "get", "nowhere*.txt").output, "there is no file nowhere*.txt")


def test_a_rule_without_outputs_is_warned_of(project: Project) -> None:
    """An entry of the log that a run leaves: nothing else shows that the rule has run."""
    project.write(
        "Snakefile",
        """
        rule all:
            input: "a.txt"

        rule a:
            output: "a.txt"
            shell: "touch {output}"

        rule plot:
            shell: "echo plot > plot.svg"
        """,
    )

    said = project.run("all", "plot").ok().output

    tells(said, "These rules have no output, so what their jobs make stays at the site: plot.")
    tells(said, "new files that no rule declares stay at hpc1: plot.svg (5 B)")
    smk_mantik(project, "get", "plot.svg").ok()
