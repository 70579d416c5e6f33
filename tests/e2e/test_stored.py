"""Files that stay at the site where a job made them."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.centre import tsi
from tests.real.centre.firecrest import SOFTWARE as FIRECREST
from tests.support.command import smk_mantik
from tests.support.places import REAL
from tests.support.workflows import (
    FILES_STAY,
    UNTRACKED,
    Place,
    Project,
    tells,
    until,
)

PIPELINE = """
    localrules: report

    rule report:
        input: "results/score.txt", "data/raw.txt"
        output: "report.txt"
        log: "logs/report.txt"
        shell: "cat {input} > {output}; echo written > {log}"

    rule prepare:
        input: "data/raw.txt"
        output: "results/set.txt"
        log: "logs/prepare.txt"
        shell: "sed s/raw/set/ {input} > {output}; echo prepared > {log}; echo p >> ran.txt"

    rule train:
        input: "results/set.txt"
        output: "results/model.txt", directory("results/steps")
        shell:
            "until [ ! -e wait ]; do sleep 0.1; done;"
            " cat {input} > {output[0]}; echo model >> {output[0]};"
            " mkdir -p {output[1]}/a; echo 1 > {output[1]}/a/1; echo 2 > {output[1]}/2;"
            " ln -s a/1 {output[1]}/one; mkdir {output[1]}/empty; chmod +x {output[1]}/2;"
            " echo t >> ran.txt"

    rule score:
        input: rules.train.output
        output: "results/score.txt"
        shell: "cat {input[0]} {input[1]}/2 {input[1]}/one > {output}; echo s >> ran.txt"
"""
REPORT = "set\nmodel\n2\n1\nraw\n"


@pytest.fixture(params=["sandbox", "firecrest", *REAL])
def pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    place: Place = request.getfixturevalue(f"{request.param}_place")
    made = Project(tmp_path / "project", place)
    yield laid_out(made)
    made.close()


@pytest.fixture
def one(project: Project) -> Project:
    """The same at one API alone."""
    return laid_out(project)


def laid_out(project: Project) -> Project:
    project.extra |= UNTRACKED
    project.write("Snakefile", PIPELINE)
    project.write("data/raw.txt", "raw\n")
    return project


def ran(project: Project) -> str:
    path = project.workspace / "ran.txt"
    return "".join(path.read_text().split()) if path.exists() else ""


def run(project: Project, *arguments: str) -> str:
    return project.run(*FILES_STAY, *arguments).ok().output


def test_outputs_stay(pipeline: Project) -> None:
    run(pipeline)

    assert pipeline.read("report.txt") == REPORT
    assert pipeline.read("data/raw.txt") == "raw\n"
    assert pipeline.read("logs/prepare.txt") == "prepared\n"
    assert pipeline.read("logs/report.txt") == "written\n"
    assert not pipeline.exists("results")
    assert ran(pipeline) == "pts"
    assert (pipeline.workspace / "results/model.txt").read_text() == "set\nmodel\n"
    tells(run(pipeline), "Nothing to be done")

    listed = smk_mantik(pipeline, "ls").ok().output
    assert [line.split()[:2] for line in listed.splitlines()[1:5]] == [
        [path, pipeline.place.name]
        for path in ("results/model.txt", "results/score.txt", "results/set.txt", "results/steps/")
    ]
    smk_mantik(pipeline, "get", "results/steps", "results/model.txt").ok()
    assert pipeline.read("results/model.txt") == "set\nmodel\n"
    steps = pipeline.directory / "results/steps"
    assert (steps / "one").readlink() == Path("a/1")
    assert (steps / "empty").is_dir()
    assert os.access(steps / "2", os.X_OK)
    assert not pipeline.exists("results/set.txt")
    tells(smk_mantik(pipeline, "get", "--all").ok().output, "Brought 2 outputs", "2 were here")
    tells(run(pipeline), "Nothing to be done")
    assert ran(pipeline) == "pts"


def test_what_was_purged_is_made_again(pipeline: Project) -> None:
    run(pipeline)
    shutil.rmtree(pipeline.workspace / "results")

    run(pipeline, "--forcerun", "report")

    assert ran(pipeline) == "ptspts"
    assert pipeline.read("report.txt") == REPORT


def test_a_part_of_a_directory_that_was_purged(pipeline: Project) -> None:
    run(pipeline)
    (pipeline.workspace / "results/steps/a/1").unlink()

    run(pipeline, "--forcerun", "score")

    assert ran(pipeline) == "ptsts"
    assert pipeline.read("report.txt") == REPORT


def test_what_was_changed_at_the_site_is_newer(pipeline: Project) -> None:
    run(pipeline)
    model = pipeline.workspace / "results/model.txt"
    model.write_text("better\n")
    later = time.time() + 60
    os.utime(model, (later, later))

    run(pipeline)

    assert ran(pipeline) == "ptss"
    assert pipeline.read("report.txt") == "better\n2\n1\nraw\n"
    tells(run(pipeline), "Nothing to be done")


def test_an_input_here_that_changed_is_sent_again(one: Project) -> None:
    run(one)
    one.write("data/raw.txt", "raw and more\n")

    run(one)

    assert ran(one) == "ptspts"
    assert one.read("report.txt") == "set and more\nmodel\n2\n1\nraw and more\n"


def test_killed_at_any_time(pipeline: Project) -> None:
    pipeline.write(
        "Snakefile", PIPELINE.replace("echo p >> ran.txt", "touch wait; echo p >> ran.txt")
    )
    running = pipeline.start(*FILES_STAY)
    until(lambda: ran(pipeline) == "p", "the first job")
    running.says("queued behind train")
    running.kill()
    (pipeline.workspace / "wait").unlink()
    until(lambda: ran(pipeline) == "pts", "the jobs that are ahead")

    run(pipeline, "--nolock", "--rerun-incomplete")

    assert ran(pipeline) == "pts"
    assert pipeline.read("report.txt") == REPORT
    assert pipeline.read("data/raw.txt") == "raw\n"


def test_temporary_outputs_are_removed_at_the_site(pipeline: Project) -> None:
    text = PIPELINE.replace('output: "results/set.txt"', 'output: temp("results/set.txt")')
    pipeline.write(
        "Snakefile", text.replace('"results/model.txt", dir', 'temp("results/model.txt"), dir')
    )

    run(pipeline)

    there = sorted(path.name for path in (pipeline.workspace / "results").iterdir())
    assert there == ["score.txt", "steps"]
    assert pipeline.read("report.txt") == REPORT


@pytest.mark.parametrize("way", ["delete", "temp input", "forceall", "touch"])
def test_files_of_the_user_stay(one: Project, way: str) -> None:
    one.write("results/notes.txt", "my own\n")
    one.write("results/set.txt", "an older one\n")
    if way == "temp input":
        one.write(
            "Snakefile",
            PIPELINE.replace('input: "data/raw.txt"', 'input: temp("data/raw.txt")', 1),
        )
        run(one)
    run(one, "--forceall")
    if way == "delete":
        run(one, "--delete-all-output")
        assert not (one.workspace / "results/model.txt").exists()
        assert not one.exists("report.txt")
    elif way == "forceall":
        run(one, "--forceall")
    elif way == "touch":
        one.run(*FILES_STAY, "--touch", "--forceall")

    assert one.read("data/raw.txt") == "raw\n"
    assert one.read("results/notes.txt") == "my own\n"
    assert one.read("results/set.txt") == "an older one\n"


def test_get_replaces_nothing_unless_told(one: Project) -> None:
    run(one)
    one.write("results/model.txt", "mine\n")

    said = smk_mantik(one, "get", "results").output
    tells(said, "files with other contents here: results/model.txt", "--force")
    assert one.read("results/model.txt") == "mine\n"
    assert not one.exists("results/set.txt")
    tells(smk_mantik(one, "get", "nothing.txt").output, "no output at a site is nothing.txt")
    tells(smk_mantik(one, "get").output, "there is nothing to bring")

    smk_mantik(one, "get", "results", "--force").ok()
    assert one.read("results/model.txt") == "set\nmodel\n"


def test_a_failed_job_leaves_no_output(one: Project) -> None:
    one.write("Snakefile", PIPELINE.replace("chmod +x {output[1]}/2;", "exit 1;"))

    one.run(*FILES_STAY).failed()

    assert "results/model.txt" not in smk_mantik(one, "ls").ok().output
    one.write("Snakefile", PIPELINE)
    run(one)
    assert ran(one) == "pts"


def test_an_older_file_here_is_no_output_of_a_job_that_failed(one: Project) -> None:
    run(one)
    smk_mantik(one, "get", "--all").ok()
    one.write("data/raw.txt", "raw, too\n")
    one.write("Snakefile", PIPELINE.replace("chmod +x {output[1]}/2;", "[ ! -e fails ];"))
    (one.workspace / "fails").touch()
    one.run(*FILES_STAY).failed()
    (one.workspace / "fails").unlink()

    run(one)

    assert one.read("report.txt") == "set, too\nmodel\n2\n1\nraw, too\n"
    assert one.read("results/model.txt") == "set\nmodel\n"  # what get brought


def test_a_file_from_before_is_no_output_of_a_job_that_failed(one: Project) -> None:
    one.write("results/set.txt", "from before\n")
    one.write("Snakefile", PIPELINE.replace("sed s/raw", "[ ! -e fails ]; sed s/raw"))
    one.write("fails")
    one.run(*FILES_STAY, "--forcerun", "prepare").failed()
    (one.directory / "fails").unlink()

    run(one)

    assert one.read("report.txt") == REPORT
    assert one.read("results/set.txt") == "from before\n"


def test_a_directory_here_does_not_hide_the_one_at_the_site(one: Project) -> None:
    run(one)
    smk_mantik(one, "get", "results/steps").ok()

    run(one, "--forcerun", "train")
    run(one, "--forcerun", "score")

    assert ran(one) == "ptstss"
    assert one.read("report.txt") == REPORT


def test_a_local_rule_finds_none_of_its_old_output(one: Project) -> None:
    text = PIPELINE.replace(
        "cat {input} > {output}; echo written > {log}", "cat {input} >> {output}"
    )
    one.write("Snakefile", text)
    run(one)

    run(one, "--forcerun", "report")

    assert one.read("report.txt") == REPORT


def test_a_link_of_the_user_is_read(one: Project) -> None:
    one.write("shared/raw.txt", "raw\n")
    (one.directory / "data/raw.txt").unlink()
    (one.directory / "data/raw.txt").symlink_to("../shared/raw.txt")

    run(one)

    assert one.read("report.txt") == REPORT
    assert (one.directory / "data/raw.txt").readlink() == Path("../shared/raw.txt")


def test_options_that_contradict_are_told(one: Project) -> None:
    said = one.run("--default-storage-provider", "mantik", "--default-storage-prefix", "mantik:")
    tells(said.failed(), "--shared-fs-usage persistence software-deployment sources source-cache")
    words = [word if word != "mantik:" else "other:" for word in FILES_STAY]
    tells(one.run(*words).failed(), "mantik:/")


def test_what_cannot_stay_is_told_before_anything_is_sent(one: Project) -> None:
    one.write("Snakefile", 'rule x:\n    output: "x"\n    run: open(output[0], "w").close()\n')
    said = one.run(*FILES_STAY).failed()
    tells(said, "rule x has run:", "needs a Snakemake at the site")
    one.write(
        "Snakefile", 'rule x:\n    output: storage.fs("away/x")\n    shell: "touch {output}"\n'
    )
    tells(one.run(*FILES_STAY).failed(), "rule x uses away/x", "no other storage is fetched")
    assert not one.workspace.exists()


def test_protected_outputs_come_here(one: Project) -> None:
    text = PIPELINE.replace('output: "results/set.txt"', 'output: protected("results/set.txt")')
    one.write("Snakefile", text)
    run(one)

    assert one.read("results/set.txt") == "set\n"
    assert (one.directory / "results/set.txt").stat().st_mode & 0o222 == 0
    assert one.read("report.txt") == REPORT
    tells(run(one), "Nothing to be done")


@pytest.mark.parametrize(
    "places",
    [
        ("sandbox", "firecrest"),
        pytest.param(
            ("unicore_centre", "firecrest_centre"),
            marks=[pytest.mark.software(tsi.SOFTWARE), pytest.mark.software(FIRECREST)],
        ),
    ],
    ids=["sandbox", "real"],
)
def test_between_sites(
    places: tuple[str, str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    first, other = (request.getfixturevalue(f"{name}_place") for name in places)
    project = laid_out(Project(tmp_path / "project", first))
    second = tmp_path / f"{other.name}.yaml"
    second.write_text(other.config)
    project.sites = [str(second)]
    project.extra |= other.environment
    there = f'    rule train:\n        resources: mantik_site="{other.name}"\n'
    text = PIPELINE.replace("    rule train:\n", there)
    project.write("Snakefile", text)

    said = run(project)

    tells(said, "Moving results/set.txt (4 B) between sites", "Moving results/model.txt")
    assert project.read("report.txt") == REPORT
    assert not project.exists("results")
    assert (project.workspace_at(other) / "results/steps/2").read_text() == "2\n"
    tells(run(project), "Nothing to be done")

    said = run(project, "--forcerun", "score")
    assert "Moving" not in said
    assert project.read("report.txt") == REPORT
    project.close()


def test_plan_counts_what_lies_there(project: Project, firecrest_place: Place) -> None:
    laid_out(project)
    run(project)
    second = project.directory.parent / "hpc2.yaml"
    second.write_text(firecrest_place.config)
    project.sites = [str(second)]
    config = ["--mantik-backend-config", str(project.config), str(second)]
    words = ["plan", *config, "--forcerun", "score", *FILES_STAY, "--", "report"]

    said = smk_mantik(project, *words).ok().output
    tells(said, "score", "5 at the site")
    there = '    rule score:\n        resources: mantik_site="hpc2"\n'
    project.write("Snakefile", PIPELINE.replace("    rule score:\n", there))
    assert "5 at the site" not in smk_mantik(project, *words).ok().output
    assert ran(project) == "pts"


def test_clean_names_what_is_only_there(one: Project) -> None:
    run(one)
    smk_mantik(one, "get", "results/model.txt").ok()

    said = smk_mantik(one, "clean", "--yes")
    assert said.code == 1
    tells(said.output, "only there: results/set.txt (4 B, made by prepare)", "smk-mantik get")
    assert "only there: results/model.txt" not in said.output
    assert (one.workspace / "results/set.txt").exists()

    smk_mantik(one, "clean", "--yes", "--force").ok()
    assert not one.workspace.exists() or not (one.workspace / "results").exists()
    tells(smk_mantik(one, "ls").ok().output, "No output stays at a site")
    run(one, "--forcerun", "report")
    assert one.read("report.txt") == REPORT
