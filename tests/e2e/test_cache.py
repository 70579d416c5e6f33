"""Snakemake's cache between workflows: filled and asked by jobs at sites as by local ones."""

from pathlib import Path

from tests.support.places import MakeProject
from tests.support.workflows import Place, Project, tells

SNAKEFILE = """
    rule all:
        input: "made/last.txt"

    rule cached:
        input: "in.txt"
        output: "made/a.txt"
        cache: True
        shell: "cat {input} > {output}; echo ran >> runs; echo a >> {output}"

    rule several:
        input: "made/a.txt"
        output: one="made/one.txt", tree=directory("made/tree")
        cache: "omit-software"
        shell: "cp {input} {output.one}; mkdir {output.tree}; echo 1 > {output.tree}/1"

    rule last:
        input: rules.several.output
        output: "made/last.txt"
        shell: "cat {input[0]} {input[1]}/1 > {output}"
"""


def test_between_workflows(
    project: Project, project_at: MakeProject, firecrest_place: Place, tmp_path: Path
) -> None:
    other = project_at(firecrest_place, folder="other")
    local = project_at(project.place, folder="local")
    (tmp_path / "cache").mkdir()
    for each in (project, other, local):
        each.write("Snakefile", SNAKEFILE)
        each.write("in.txt", "in\n")
        each.extra["SNAKEMAKE_OUTPUT_CACHE"] = str(tmp_path / "cache")
    project.run("--cache").ok()
    assert len(list((tmp_path / "cache").iterdir())) == 3
    assert {record.rule for record in project.attempts} == {"cached", "several", "last"}

    other.run("--cache").ok()
    assert {record.rule for record in other.attempts} == {"last"}, "the others were in the cache"
    local.run("--cache", local=True).ok()
    assert not local.exists("runs"), "what a site has made was not taken here"

    for each in (project, other, local):
        assert each.read("made/last.txt") == "in\na\n1\n"
        assert (each.directory / "made/a.txt").is_symlink()

    # There is none without a place for it, as Snakemake says.
    del project.extra["SNAKEMAKE_OUTPUT_CACHE"]
    said = project.run("--cache", "--forcerun", "cached", "--until", "cached").ok().output
    tells(said, "Snakemake will not use between workflow caching")
    assert [record.rule for record in project.attempts].count("cached") == 2


def test_cache_that_cannot_be_written(project: Project, tmp_path: Path) -> None:
    project.write("Snakefile", SNAKEFILE)
    project.write("in.txt", "in\n")
    project.extra["SNAKEMAKE_OUTPUT_CACHE"] = str(tmp_path / "nowhere")
    said = project.run("--cache", "--until", "cached").failed()
    tells(said, "nowhere", "Cannot access cache location")
