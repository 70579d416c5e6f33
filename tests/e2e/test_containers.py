"""Several environments of a config, and containers that srun starts, with a fake of the plugins."""

from tests.support import slurmplugins
from tests.support.needs import require
from tests.support.workflows import Project, tells

SNAKEFILE = """
    rule all:
        input: "train.txt", "prep.txt", "plain.txt", "last.txt"

    rule train:
        input: "prep.txt"
        output: "train.txt"
        resources: mantik_environment="train"
        benchmark: repeat("train.tsv", 2)
        shell: "cat {input} > {output}; echo $FROM_IMAGE $TASTE >> {output}"

    rule prep:
        output: "prep.txt"
        resources: mantik_environment="prep"
        shell: "echo $TASTE > {output}"

    rule first:
        output: "first.txt"
        group: "both"
        resources: mantik_environment="train"
        shell: "echo $FROM_IMAGE > {output}"

    rule last:
        input: "first.txt"
        output: "last.txt"
        benchmark: "last.tsv"
        group: "both"
        resources: mantik_environment="train"
        shell: "cat {input} > {output}; echo $TASTE $PWD >> {output}"

    rule plain:
        output: "plain.txt"
        shell: "echo ${{TASTE-none}} > {output}"
"""


def test_rules_choose_an_environment(project: Project) -> None:
    require(slurmplugins.lacking(), "a fake container")
    plugins = slurmplugins.install(project.directory.parent / "plugins")
    project.config.write_text(
        f"""{project.place.config}
Environments:
  train:
    ContainerEngine: {{File: env/train.toml}}
    PreRunCommandOnComputeNode: {plugins}
    Variables: {{TASTE: of the train}}
  prep: {{Variables: {{TASTE: of the prep}}}}
"""
    )
    project.write("Snakefile", SNAKEFILE)
    project.write("env/train.toml", 'image = "ubuntu"\nmounts = ["/elsewhere:/elsewhere"]\n')
    said = project.run().failed()
    tells(said, "nothing submitted", "would not see the workspace", "env/train.toml")

    mount = project.place.server
    project.write("env/train.toml", f'image = "ubuntu"\nmounts = ["{mount}:{mount}"]\n')
    project.run().ok()
    assert project.read("train.txt") == "of the prep\nimage of the train\n"
    assert project.read("plain.txt") == "none\n"
    assert project.read("last.txt").startswith(f"image\nof the train {mount}")
    assert len(project.read("train.tsv").splitlines()) == 3
    assert len(project.read("last.tsv").splitlines()) == 2

    project.write("env/train.toml", f'image = "missing"\nmounts = ["{mount}:{mount}"]\n')
    said = project.run("--force", "train.txt").failed()
    tells(said, "when it started the container", "failed to import")

    wrong = ("--set-resources", "prep:mantik_environment=perp", "--force", "prep.txt")
    tells(project.run(*wrong).failed(), "there is no environment 'perp'", "did you mean prep?")
