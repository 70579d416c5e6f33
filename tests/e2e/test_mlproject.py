"""Entry points of MLproject files as rules: at a site, here, and when they run again."""

import json

import pytest

from tests.support.workflows import UNTRACKED, Project, tells, tree

MLPROJECT = """
name: churn
python_env: python_env.yaml
entry_points:
  train:
    parameters:
      data: path
      alpha: {type: float, default: 0.5}
      note: {type: string, default: none}
      out: string
    command: >
      python train.py --data {data} --alpha {alpha} --note {note} --out {out}
  other:
    command: echo other
"""

TRAIN = """
import json, os, sys
import helper
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
told = {"words": words, "here": os.path.basename(os.getcwd()), "helper": helper.WORD,
        "data": open(words["--data"]).read()}
if os.path.exists("../.mantik"):  # at a site
    assert os.environ["MANTIK_WORKING_DIRECTORY"] == os.getcwd()
with open(words["--out"], "w") as file:
    json.dump(told, file)
"""

SNAKEFILE = """
from snakemake_executor_plugin_mantik import mlproject

project = mlproject.load("churn")
NOTE = "it's  a \\"$HOME\\" {{of}}\\n`pwd` \\\\ ü"

module mantik:
    snakefile: mlproject.RULE

rule all:
    input: expand("models/{alpha}.json", alpha=config.get("alphas", [0.1, 2]))

use rule mlproject from mantik as train with:
    input: data="data/train set.csv"
    output: model="models/{alpha}.json"
    params:
        **project.entry_point(
            "train", data="{input.data}", alpha="{wildcards.alpha}", out="{output.model}",
            note=NOTE,
        )
"""
NOTE = 'it\'s  a "$HOME" {of}\n`pwd` \\ ü'


@pytest.fixture
def churn(project: Project) -> Project:
    """A workflow with a project beside the Snakefile."""
    project.write("Snakefile", SNAKEFILE)
    project.write("churn/MLproject", MLPROJECT)
    project.write("churn/python_env.yaml", "python: 3.11\n")
    project.write("churn/train.py", TRAIN)
    project.write("churn/helper.py", "WORD = 'first'\n")
    project.write("data/train set.csv", "1,2\n")
    project.extra |= UNTRACKED
    return project


def made(project: Project, alpha: str = "0.1") -> dict[str, object]:
    found: dict[str, object] = json.loads(project.read(f"models/{alpha}.json"))
    return found


def test_here_and_there_the_same_comes_out(churn: Project) -> None:
    twin = churn.twin()

    churn.run().ok()
    twin.run(local=True).ok()

    told = made(churn)
    assert (told["here"], told["helper"], told["data"]) == ("churn", "first", "1,2\n")
    words = told["words"]
    assert isinstance(words, dict)
    assert (words["--alpha"], words["--note"]) == ("0.1", NOTE)
    assert words["--data"] == "../data/train set.csv"
    assert not churn.exists("mlflow.db"), "it was told not to track"
    assert runs(churn, local=False) == 0
    ours, theirs = tree(churn.directory), tree(twin.directory)
    assert {name for name in theirs if "__pycache__" not in name} == set(ours)
    assert all(theirs[name] == content for name, content in ours.items())


def runs(project: Project, *arguments: str, local: bool = True) -> int:
    """How many jobs of the rule a run has."""
    said = project.run(*arguments, local=local).ok().output
    return said.count("rule train:")


def test_an_output_in_the_projects_folder_is_no_source(churn: Project) -> None:
    churn.write("Snakefile", SNAKEFILE.replace("models/", "churn/models/"))

    assert runs(churn) == 2
    assert runs(churn, "churn/models/7.json") == 1
    assert runs(churn) == 0, "also when another run had asked for more"


@pytest.mark.nightly
def test_the_project_may_be_the_working_directory(churn: Project) -> None:
    for path in (churn.directory / "churn").iterdir():
        path.rename(churn.directory / path.name)
    churn.write("Snakefile", SNAKEFILE.replace('"churn"', '"."'))

    churn.run().ok()

    assert made(churn)["data"] == "1,2\n"
    assert runs(churn) == 0, "the Snakefile and the outputs are no sources"
    assert runs(churn, "models/9.json") == 1


def test_wrong_values_of_wildcards_end_it_before_a_job_starts(churn: Project) -> None:
    said = churn.run("--config", "alphas=[1,many]")

    assert said.code == 1
    tells(said.output, "churn/MLproject: train.alpha: has to be a number, found 'many'")
    assert not churn.exists("models/1.json")


def test_a_project_elsewhere_is_refused(churn: Project) -> None:
    (churn.directory / "churn").rename(churn.directory.parent / "churn")
    churn.write("Snakefile", SNAKEFILE.replace('"churn"', '"../churn"'))

    tells(churn.run().failed(), "rule train", "../churn", "outside the working directory")


def test_a_project_that_exclude_leaves_out_is_refused(churn: Project) -> None:
    churn.config.write_text(churn.place.config + 'Exclude: ["churn/"]\n')

    tells(churn.run().failed(), "Exclude: leaves out churn", "rule train")


def test_the_project_is_looked_for_beside_the_snakefile(churn: Project) -> None:
    (churn.directory / "flow").mkdir()
    for name in ("Snakefile", "churn"):
        (churn.directory / name).rename(churn.directory / "flow" / name)
    (churn.directory / "run").mkdir()
    (churn.directory / "data").rename(churn.directory / "run/data")

    churn.run("--snakefile", "flow/Snakefile", "--directory", "run", local=True).ok()

    assert churn.exists("run/models/0.1.json")
