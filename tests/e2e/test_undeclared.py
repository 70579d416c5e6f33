"""Files that jobs leave beside their outputs: listed, brought by hand, and fetched."""

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
    tells(smk_mantik(both, "get", "taken.bin").output, "there are other files here: taken.bin")
    tells(smk_mantik(both, "get", "plots").ok().output, "Brought 1 file, 5 B; 1 was here.")
    tells(smk_mantik(both, "get", "--undeclared").ok().output, "Brought 2 files")
    assert both.read("taken.bin") == "mine\n"
    assert all(both.exists(path) for path in NEW)
    smk_mantik(both, "get", "taken.bin", "--force").ok()
    assert both.read("taken.bin") == "theirs\n"
    tells(smk_mantik(both, "get", "nowhere*.txt").output, "there is no file nowhere*.txt")


def test_new_files_are_fetched_with_the_outputs(project: Project) -> None:
    config = project.place.config.replace("Site:", "Site:\n  Undeclared: fetch", 1)
    assert config != project.place.config
    project.config.write_text(config)
    project.write("taken.bin", "mine, which stays\n")
    project.write("Snakefile", SNAKEFILE)

    said = project.run().ok().output

    tells(said, "you have others under their names here: taken.bin (7 B). Yours were kept")
    assert "stay at" not in said
    assert all(project.exists(path) for path in NEW)
    assert project.read("taken.bin") == "mine, which stays\n"

    changed = SNAKEFILE.replace("echo extra", "echo newer").replace("echo deep", "echo other")
    project.write(
        "Snakefile", changed.replace("shell:", 'resources: mantik_fetch="*.json"\n        shell:')
    )
    project.write("plots/more/a.svg", "edited here\n")
    project.write("res/b.json", "edited, too\n")

    said = project.run("--forceall").ok().output

    assert project.read("res/a.json") == "newer\n", said
    assert project.read("res/b.json") == "edited, too\n"
    assert project.read("plots/more/a.svg") == "edited here\n"
    assert project.read("plots/more/b.svg") == "deep\n"


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

        rule sent:
            resources: mantik_fetch="*.png"
            shell: "echo {rule} > it.png"
        """,
    )

    assert "no output" not in project.run().ok().output
    said = project.run("plot", "sent").ok().output

    tells(said, "These rules have no output, so what their jobs make stays at the site: plot.")
    tells(said, "new files that no rule declares stay at hpc1: plot.svg (5 B)")
    assert project.read("it.png") == "sent\n"
    smk_mantik(project, "get", "plot.svg").ok()


def test_wrong_patterns_are_refused(project: Project) -> None:
    project.write(
        "Snakefile", SNAKEFILE.replace("shell:", 'resources: mantik_fetch="/etc/*"\n        shell:')
    )
    tells(project.run().failed(), "mantik_fetch='/etc/*' has to name files below")
