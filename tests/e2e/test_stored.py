"""Files that stay at the site where a job made them."""

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from snakemake_executor_plugin_mantik.jobs.paths import workspace_root
from snakemake_executor_plugin_mantik.storage.copies import link_copy
from tests.real.centre import tsi
from tests.real.centre.firecrest import SOFTWARE as FIRECREST
from tests.support.command import smk_mantik
from tests.support.places import MakeProject
from tests.support.ports import free_port
from tests.support.workflows import FILES_STAY, UNTRACKED, Place, Project, tells, tree, until

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
TARGETS = """
    rule all:
        input: "report.txt", "results/steps", "results/score.txt"
"""
REPORT = "set\nmodel\n2\n1\nraw\n"


@pytest.fixture
def pipeline(both: Project) -> Project:
    return laid_out(both)


@pytest.fixture
def one(project: Project) -> Project:
    return laid_out(project)


def laid_out(project: Project) -> Project:
    project.extra |= UNTRACKED
    project.write("Snakefile", PIPELINE)
    project.write("data/raw.txt", "raw\n")
    return project


STAY_PROFILE = {
    "default-storage-provider": "mantik",
    "default-storage-prefix": '"mantik:"',
    "shared-fs-usage": "[persistence, software-deployment, sources, source-cache]",
}


def run(project: Project, *arguments: str) -> str:
    return project.run(*FILES_STAY, *arguments).ok().output


def test_outputs_stay_and_ls_and_get_know_them(pipeline: Project) -> None:
    pipeline.write("Snakefile", TARGETS + PIPELINE)
    run(pipeline)

    assert pipeline.read("report.txt") == REPORT
    assert pipeline.read("data/raw.txt") == "raw\n"
    assert pipeline.read("logs/prepare.txt") == "prepared\n"
    assert pipeline.read("logs/report.txt") == "written\n"
    assert not pipeline.exists("results")
    assert "".join(pipeline.lines()) == "pts"
    assert (pipeline.workspace / "results/model.txt").read_text() == "set\nmodel\n"

    said = smk_mantik(pipeline, "ls", "--needed-by", "--json", "--", *FILES_STAY).ok().output
    found = {each["file"]: each for each in json.loads(said[said.index("[\n") :])}
    assert {file: (each["needed_by"], each["target"]) for file, each in found.items()} == {
        "results/model.txt": (["score"], False),
        "results/score.txt": (["all", "report"], True),
        "results/set.txt": (["train"], False),
        "results/steps": (["all", "score"], True),
    }
    model = found["results/model.txt"]
    assert (model["site"], model["size"], model["job"]) == (pipeline.place.name, 10, "train")
    assert (pipeline.workspace / ".snakemake/storage/mantik").is_symlink(), "to the workspace"
    files = sum(len(f) for at, _, f in os.walk(pipeline.workspace) if "/.mantik" not in at)
    tells(smk_mantik(pipeline, "clean").output, f"files of the workflow: {files} files,")

    said = smk_mantik(pipeline, "get", "--all-targets", "--", *FILES_STAY).ok().output
    tells(said, "Brought 2 outputs")
    assert pipeline.read("results/score.txt") == "set\nmodel\n2\n1\n"
    steps = pipeline.directory / "results/steps"
    assert (steps / "one").readlink() == Path("a/1")
    assert (steps / "empty").is_dir()
    assert os.access(steps / "2", os.X_OK)
    assert not pipeline.exists("results/model.txt")
    words = ["get", "--all-targets", "--", *FILES_STAY, "--", "results/model.txt"]
    tells(smk_mantik(pipeline, *words).ok().output, "Brought 1 output")
    assert pipeline.read("results/model.txt") == "set\nmodel\n"
    tells(smk_mantik(pipeline, "get", "--all").ok().output, "Brought 1 output,", "3 were here")
    tells(run(pipeline), "Nothing to be done")
    assert "".join(pipeline.lines()) == "pts"

    (pipeline.directory / "Snakefile").unlink()
    plain = smk_mantik(pipeline, "ls").ok().output
    assert [line.split()[:2] for line in plain.splitlines()[1:5]] == [
        [path, pipeline.place.name]
        for path in ("results/model.txt", "results/score.txt", "results/set.txt", "results/steps/")
    ]
    assert smk_mantik(pipeline, "ls", "--needed-by").code != 0

    kept = pipeline.workspace.parents[3] / "elsewhere/kept"
    kept.mkdir(parents=True)
    for link in (links := [pipeline.workspace / ".snakemake/link", pipeline.workspace / "link"]):
        link.symlink_to(kept.parent)
    smk_mantik(pipeline, "clean", "--yes", "--force").ok()
    assert kept.exists()
    assert not any(map(os.path.lexists, links))


TEXTS = """
    import os

    rule all:
        input: "all.txt", "deep/a/title.txt"

    rule make:
        output: "results/{s}/x.csv"
        shell: "echo {wildcards.s} > {output}"

    rule texts:
        input: a="results/a/x.csv", b="results/b/x.csv", raw="data/raw.txt"
        output: "{kind}.txt"
        log: "logs/{kind}.log"
        params:
            sample=lambda wildcards, input: input.a.split("/")[1],
            folder=lambda wildcards, input, output: [os.path.dirname(f) for f in input],
            size=lambda wildcards, input: os.path.getsize(input.raw),
            written="of results/a/x.csv",
            files=lambda wildcards: rules.bash.output,
            near=lambda wildcards, input: {"x": (f"../{input.b}", f"{input.a}.csi")},
        wildcard_constraints: kind="all"
        shadow: "minimal"
        shell:
            "echo \\"{rule} {wildcards} {input} {output} {log} {params} {params.folder[1]}\\""
            " > {output}; cat {input} >> {output}; echo > {log}"

    rule bash:
        input: *rules.texts.input
        output: "bash.txt"
        log: "logs/bash.log"
        params: sample=lambda wildcards, input: os.path.dirname(input[0])
        resources: text=lambda wildcards, input: f"of:{input[0]}"
        group: "g"
        script: "texts.sh"

    checkpoint parts:
        output: directory("parts/d")
        shell: "mkdir {output}; echo 1 > {output}/1.txt"

    def parts(wildcards):
        folder = checkpoints.parts.get().output[0]
        return [os.path.join(folder, name) for name in os.listdir(folder)]

    rule title:
        input: "bash.txt", parts, other="results/a/x.csv"
        output: "{d}/{s}/title.txt"
        log: "logs/{d}/{s}.log"
        params: rules.bash.output, other=lambda wildcards, input: [input.other, {"a": input[0]}]
        resources: text=lambda wildcards, input: f"of:{input.other}"
        group: "g"
        script: "texts.py"
"""
TEXTS_PY = """
s = snakemake
lists = (s.input, s.output, s.log, s.params, s.wildcards)
print(*map(list, lists), *(dict(each.items()) for each in lists), s.resources.text, s.rule,
      s.log_fmt_shell(), s.config, file=open(s.output[0], "w"))
"""
TEXTS_SH = """
declare -p snakemake_input snakemake_output snakemake_log snakemake_params > bash.txt
cat "${snakemake_input[@]}" >> bash.txt
"""


def test_jobs_see_the_paths_that_their_rules_name(project: Project) -> None:
    """As in a run on this machine, where no file is stored."""
    laid_out(project)
    project.write("Snakefile", TEXTS)
    project.write("texts.py", TEXTS_PY)
    project.write("texts.sh", TEXTS_SH)
    twin = project.twin()
    twin.run(local=True).ok()

    run(project)

    for name in ("all.txt", "bash.txt", "deep/a/title.txt"):
        assert (project.workspace / name).read_text() == twin.read(name)
        assert "storage" not in twin.read(name)


READ = """
    localrules: copy

    rule make:
        output: "results/a.txt"
        shell: "echo one > {output}"

    rule copy:
        input: "results/a.txt"
        output: "copy.txt"
        shell: "cp {input} {output}"

    rule use:
        input: "copy.txt", a="results/a.txt"
        output: "used.txt"
        params: word=lambda wildcards, input: open(input.a).read().strip()
        shell: "echo {params.word} > {output}"
"""


def test_a_parameter_is_read_from_what_is_stored(one: Project) -> None:
    one.write("Snakefile", READ)
    one.run("used.txt", *FILES_STAY).ok()
    assert (one.workspace / "used.txt").read_text() == "one\n"

    one.write("results/a.txt", "of another run\n")
    said = one.run("used.txt", "--forcerun", "copy", *FILES_STAY).failed()
    tells(said, "depends on results/a.txt, of which another version lies", "Move results/a.txt")


def test_a_part_of_a_directory_that_was_purged(pipeline: Project) -> None:
    run(pipeline)
    (pipeline.workspace / "results/steps/a/1").unlink()
    run(pipeline, "--forcerun", "score")
    assert "".join(pipeline.lines()) == "ptsts", "a part of a directory was purged"
    assert pipeline.read("report.txt") == REPORT

    model = pipeline.workspace / "results/model.txt"
    model.write_text("better\n")
    os.utime(model, (time.time() + 60,) * 2)
    run(pipeline)
    assert "".join(pipeline.lines()) == "ptstss", "what was changed there is newer"
    assert pipeline.read("report.txt") == "better\n2\n1\nraw\n"

    shutil.rmtree(pipeline.workspace / "results")
    said = smk_mantik(pipeline, "get", "results/set.txt").output
    tells(said, "is no longer at the place where it was made. Run the workflow again")
    run(pipeline, "--forcerun", "report")
    assert "".join(pipeline.lines()) == "ptstsspts", "all was purged"
    assert pipeline.read("report.txt") == REPORT

    pipeline.write("data/raw.txt", "raw and more\n")
    run(pipeline)
    assert "".join(pipeline.lines()) == "ptstssptspts", "an input here is another"
    assert pipeline.read("report.txt") == "set and more\nmodel\n2\n1\nraw and more\n"


UNFETCHED = """
    localrules: report

    rule all:
        input: "report.txt", "results/slow.txt"

    rule prepare:
        output: "results/set.txt"
        shell: "echo set > {output}"

    rule purge:
        input: "results/set.txt"
        output: "results/purged.txt"
        shell: "rm results/set.txt; touch {output}"

    rule slow:
        output: "results/slow.txt"
        shell: "until [ -e go ]; do sleep 0.1; done; touch {output}"

    rule report:
        input: "results/set.txt", "results/purged.txt"
        output: "report.txt"
        shell: "test ! -e {input[0]} || cat {input} > {output}; touch {output}"
"""


def test_only_a_local_rule_fails_whose_input_cannot_be_fetched(one: Project) -> None:
    one.write("Snakefile", UNFETCHED)
    running = one.start(*FILES_STAY, "--keep-going", "--latency-wait", "1")
    running.says("Error in rule report")
    one.go()

    said = running.end().failed()

    tells(said, "Failed to retrieve", "results/set.txt")
    assert (one.workspace / "results/slow.txt").exists()
    assert "cancel" not in said


OWN = """
    localrules: all, one, both

    rule all:
        input: "one.txt", "both.txt", "there.txt"

    rule one:
        input: "data/own/x.csv"
        output: "one.txt"
        shell: "cat {input} > {output}"

    rule both:
        input: "data/own", "one.txt"
        output: "both.txt"
        shell: "cat {input[0]}/*.csv {input[0]}/linked/*.csv > {output}"

    rule there:
        input: "data/own", "data/own/x.csv", "data/own/linked/z.csv"
        output: "there.txt"
        shell: "cat {input[0]}/*.csv > {output}"
"""


def test_own_files_below_a_directory_that_is_read_too(one: Project) -> None:
    for name in ("x", "y"):
        one.write(f"data/own/{name}.csv", f"{name}\n")
    elsewhere = one.directory.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "z.csv").write_text("z\n")
    (one.directory / "data/own/linked").symlink_to(elsewhere)
    (one.directory / "data/own/around").symlink_to(one.directory / "data")
    one.write("Snakefile", OWN)
    before = tree(one.directory / "data")

    run(one)
    run(one, "-n")

    assert tree(one.directory / "data") == before
    assert (elsewhere / "z.csv").read_text() == "z\n"
    smk_mantik(one, "get", "--all").ok()
    assert one.read("both.txt") == "x\ny\nz\n"
    run(one, "--delete-all-output")
    assert tree(one.directory / "data") == before


def test_files_that_are_the_same_everywhere_are_never_removed(one: Project) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        (Path(directory) / "x").write_text("x\n")
        one.write(
            "Snakefile",
            f"""
            localrules: here
            rule here:
                input: "{directory}"
                output: directory("{directory}/made")
                shell: "mkdir {{output}}; cp {{input}}/x {{output}}"
            """,
        )
        one.run(*FILES_STAY).ok()
        one.run(*FILES_STAY, "-n").ok()

        assert tree(Path(directory)).keys() >= {"x", "made/x"}


def test_a_mirror_follows_and_is_never_taken_away(tmp_path: Path) -> None:
    home, prefix = tmp_path / "home", tmp_path / "home/.snakemake/storage/mantik"
    for name in ("a", "b/c", "d/e"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    (home / "itself").symlink_to("itself")
    (home / "around").symlink_to(home)
    target = prefix / "data"
    link_copy(home, target, prefix, lambda copy: copy.name == "kept")
    kept = (target / "a").stat().st_ino, target.stat().st_ino
    (target / "kept").write_text("a copy")
    (home / "b/c").unlink()
    (home / "a").write_text("A")

    link_copy(home, target, prefix, lambda copy: copy.name == "kept")

    assert ((target / "a").stat().st_ino, target.stat().st_ino) == kept
    assert tree(target) == {
        "a": b"A", "b": "/", "d": "/", "d/e": b"d/e", "kept": b"a copy", "itself": ANY,
    }  # fmt: skip
    link_copy(home, home, prefix, lambda copy: False)
    assert (home / "a").read_text() == "A"


def test_killed_at_any_time(pipeline: Project) -> None:
    pipeline.write(
        "Snakefile", PIPELINE.replace("echo p >> ran.txt", "touch wait; echo p >> ran.txt")
    )
    running = pipeline.start(*FILES_STAY)
    until(lambda: "".join(pipeline.lines()) == "p", "the first job")
    running.says("waits for train")
    running.kill()
    (pipeline.workspace / "wait").unlink()
    until(lambda: "".join(pipeline.lines()) == "pts", "the jobs that are ahead")

    run(pipeline, "--nolock", "--rerun-incomplete")

    assert "".join(pipeline.lines()) == "pts"
    assert pipeline.read("report.txt") == REPORT
    assert pipeline.read("data/raw.txt") == "raw\n"


RISKY = """
    localrules: all, here

    rule all:
        input: "here.txt", "results/there.txt"

    rule here:
        input: temp("data/raw.txt"), "data/own", "results/there.txt"
        output: "here.txt"
        shell:
            "echo {input} > held; until [ ! -e hold ]; do sleep 0.1; done;"
            " cat {input[0]} {input[1]}/x.csv {input[2]} > {output}"

    rule there:
        input: "data/raw.txt", "data/own"
        output: temp("results/there.txt")
        shell: "cat {input[0]} {input[1]}/x.csv > {output}"
"""
COMMANDS = (
    ["--unlock"], ["--cleanup-metadata", "data/raw.txt"], ["--rerun-incomplete"],
    ["--delete-temp-output"], ["--forceall"], ["--touch", "--forceall"], ["--delete-all-output"],
)  # fmt: skip


def test_own_files_outlive_a_killed_run_and_all_that_removes_files(one: Project) -> None:
    """Killed while a local rule had its copies, with a second run beside it."""
    one.write("Snakefile", RISKY)
    one.write("data/own/x.csv", "x\n")
    one.write("results/there.txt", "from before\n")
    one.write("hold")
    own = {name: tree(one.directory / name) for name in ("data", "results")}
    running = one.start(*FILES_STAY)
    until(lambda: one.exists("held"), "a local rule")

    assert one.run(*FILES_STAY).code != 0, "another run goes on"
    running.kill()
    assert {name: tree(one.directory / name) for name in own} == own
    (one.directory / "hold").unlink()
    for words in COMMANDS:
        ran_ = one.run(*FILES_STAY, *words)

        assert ran_.code == 0 or words[0] == "--cleanup-metadata", ran_.output  # it has none
        assert {name: tree(one.directory / name) for name in own} == own, words
        if words == ["--forceall"]:
            assert one.read("here.txt") == "raw\nx\nraw\nx\n"
    assert not one.exists("here.txt"), "an output"


def test_get_plan_and_clean_know_what_lies_where(one: Project, firecrest_place: Place) -> None:
    run(one)
    second = one.directory.parent / "hpc2.yaml"
    second.write_text(firecrest_place.config)
    config = ["--mantik-backend-config", str(one.config), str(second)]
    words = ["plan", *config, "--forcerun", "score", *FILES_STAY, "--", "report"]
    tells(smk_mantik(one, *words).ok().output, "score", "5 at the site")
    there = '    rule score:\n        resources: mantik_site="hpc2"\n'
    one.write("Snakefile", PIPELINE.replace("    rule score:\n", there))
    said = smk_mantik(one, *words).ok().output
    # A link goes as the file that it leads to, as in `test_between_sites`.
    tells(said, "5 to move, 16 B", "5 to move from other sites, through this machine (16 B)")
    assert "5 at the site" not in said

    one.write("Snakefile", "raise AssertionError")  # which is not read
    for words in (["--all", "x"], ["--all-targets", "x"], ["--all", "--all-targets"]):
        wrong = smk_mantik(one, "get", *words)
        assert wrong.code == 2
        tells(wrong.output, "it is not clear what to bring", "Name files, or add --all")
        assert "AssertionError" not in wrong.output
    one.write("Snakefile", PIPELINE)

    blocking = one.write("results")
    tells(
        smk_mantik(one, "get", "results/model.txt").output, "model.txt: the file cannot be written"
    )
    blocking.unlink()
    smk_mantik(one, "get", "results/model.txt").ok()
    kept = smk_mantik(one, "clean", "--yes")
    assert kept.code == 1
    tells(kept.output, "only there: results/set.txt (4 B, made by prepare)", "smk-mantik get")
    assert "only there: results/model.txt" not in kept.output
    assert (one.workspace / "results/set.txt").exists()

    one.write("results/model.txt", "mine\n")
    said = smk_mantik(one, "get", "results").output
    tells(said, "local files with other contents: results/model.txt", "--force")
    assert one.read("results/model.txt") == "mine\n"
    assert not one.exists("results/set.txt")
    tells(smk_mantik(one, "get", "nothing.txt").output, "there is no file nothing.txt at a site")
    assert smk_mantik(one, "get").output.startswith("smk-mantik get: there is nothing to bring")
    smk_mantik(one, "get", "results", "--force").ok()
    assert one.read("results/model.txt") == "set\nmodel\n"
    one.write("results/set.txt", "mine\n")
    run(one, "--forcerun", "train")
    assert (one.workspace / "results/set.txt").read_text() == "set\n", "a copy is no source"
    assert one.read("report.txt") == REPORT
    assert "".join(one.lines()) == "ptsts"

    smk_mantik(one, "clean", "--yes", "--force").ok()
    assert not one.workspace.exists() or not (one.workspace / "results").exists()
    tells(smk_mantik(one, "ls").ok().output, "No output stays at a site")
    run(one, "--forcerun", "report")
    assert one.read("report.txt") == REPORT


def test_without_credentials_what_lies_there_is_not_compared(one: Project) -> None:
    run(one)
    one.place = replace(one.place, environment={})
    uncompared = "were not compared with the site: site hpc1: no credentials"
    tells(run(one, "-n"), uncompared, "Nothing to be done")
    words = ["plan", "--mantik-backend-config", str(one.config), "--forcerun", "score"]
    tells(smk_mantik(one, *words, *FILES_STAY, "--", "report").ok().output, "5 at the site")
    said = one.run(*FILES_STAY, "--forcerun", "score").failed()
    tells(said, uncompared, "Set one of these sets of variables")
    stored = PIPELINE.replace('"results/set.txt"', 'storage.mantik("results/set.txt")')
    one.write("Snakefile", stored)
    tells(one.run("-n").ok().output, uncompared)


def test_get_says_why_older_results_keep_it_from_bringing_targets(one: Project) -> None:
    one.write("Snakefile", TARGETS + PIPELINE)
    older = ("results/set.txt", "results/model.txt", "results/steps/2", "results/score.txt")
    for name in (*older, "report.txt"):
        one.write(name, "older\n")
    tells(run(one), "Nothing to be done")

    said = smk_mantik(one, "get", "--all-targets", "--", *FILES_STAY).ok().output

    tells(said, "Brought 0 outputs", "No site has report.txt, results/score.txt, results/steps:")
    tells(said, "older results", "remove them and run the workflow")

    run(one, "--forcerun", "train")
    refused = smk_mantik(one, "get", "--all-targets", "--", *FILES_STAY)
    assert refused.code == 2
    tells(refused.output, "nothing was brought", "other contents: results/score.txt", "--force")
    assert "No site has" not in refused.output
    assert one.read("results/score.txt") == "older\n"


@pytest.mark.nightly
def test_get_brings_the_targets_of_another_directory(one: Project) -> None:
    profile = "".join(f"{key}: {value}\n" for key, value in STAY_PROFILE.items())
    one.write("profiles/default/config.yaml", profile)
    one.write("Snakefile", TARGETS + PIPELINE)
    one.write("other/data/raw.txt", "raw, too\n")
    one.run("--directory", "other").ok()

    smk_mantik(one, "get", "--all-targets", "-d", "other").ok()

    assert one.read("other/results/score.txt") == "set, too\nmodel\n2\n1\n"
    assert not one.exists("results")


def test_what_a_failed_job_made_is_no_output(one: Project) -> None:
    one.write("Snakefile", TARGETS + PIPELINE.replace("echo s >> ran.txt", "exit 1"))
    one.run(*FILES_STAY).failed()

    said = smk_mantik(one, "get", "--all-targets", "--", *FILES_STAY)

    assert said.code == 2
    tells(said.output, "Brought 1 output,", "do not exist: report.txt, results/score.txt")
    assert (one.directory / "results/steps").is_dir()
    assert "results/score.txt" not in smk_mantik(one, "ls").ok().output
    one.write("Snakefile", TARGETS + PIPELINE)
    run(one)
    assert "".join(one.lines()) == "pts"


def test_a_file_from_before_is_no_output_of_a_job_that_failed(one: Project) -> None:
    one.write("results/set.txt", "from before\n")
    one.write("Snakefile", PIPELINE.replace("sed s/raw", "[ ! -e fails ]; sed s/raw"))
    one.write("fails")
    one.run(*FILES_STAY, "--forcerun", "prepare").failed()
    (one.directory / "fails").unlink()

    run(one)

    assert one.read("report.txt") == REPORT
    assert one.read("results/set.txt") == "from before\n"


def test_a_local_rule_reads_a_link_of_the_user_and_none_of_its_old_output(one: Project) -> None:
    one.write("shared/raw.txt", "raw\n")
    (one.directory / "data/raw.txt").unlink()
    (one.directory / "data/raw.txt").symlink_to("../shared/raw.txt")
    text = PIPELINE.replace(
        "cat {input} > {output}; echo written > {log}", "cat {input} >> {output}"
    )
    one.write("Snakefile", text)
    run(one)

    run(one, "--forcerun", "report")

    assert one.read("report.txt") == REPORT
    assert (one.directory / "data/raw.txt").readlink() == Path("../shared/raw.txt")


IDIOMS = {
    "expand(rules.train.output)": (
        "with --default-storage-provider, an output of a rule cannot be given to expand()",
        'Write its path instead, as in expand("results/model.txt", ...)',
    ),
    'rules.train.output[0].replace("model", "nodel")': (
        "made of the path of a rule's output",
        "Write the path itself, results/nodel.txt, instead of rules.NAME.output[0].replace(...)",
    ),
}
CANNOT_STAY = """
    rule full:
        output: "full"
        run: open(output[0], "w").close()

    rule away:
        output: storage.fs("away/x")
        shell: "touch {output}"

    rule train:
        input: local("data/raw.txt")
        output: local("model.pt")
        shell: "touch {output} ran"
"""


def test_what_cannot_stay_is_told_before_anything_is_sent(one: Project) -> None:
    half = one.run("--default-storage-provider", "mantik", "--default-storage-prefix", "mantik:")
    tells(half.failed(), "--shared-fs-usage persistence software-deployment sources source-cache")
    words = [word if word != "mantik:" else "other:" for word in FILES_STAY]
    tells(one.run(*words).failed(), "mantik:/")
    for idiom, told in IDIOMS.items():
        one.write("Snakefile", PIPELINE.replace("rules.train.output", idiom))
        tells(one.run(*FILES_STAY).failed(), *told)
    one.write("Snakefile", CANNOT_STAY)
    said = one.run(*FILES_STAY, "full", "train", "away").failed()
    tells(said, "rule full has run:", "needs a Snakemake at the site")
    tells(said, "rule away uses away/x", "no other storage is fetched")
    tells(said, "nothing submitted", "rule train flags", "with local(…)", "smk-mantik get")
    assert not one.exists("ran")
    assert not one.workspace.exists()
    one.write("Snakefile", f"    localrules: train\n{CANNOT_STAY}")
    one.run(*FILES_STAY, "train").ok()
    assert one.exists("ran")
    assert one.exists("model.pt")


REAL_PAIR = pytest.param(
    ("unicore_centre", "firecrest_centre"),
    marks=[pytest.mark.software(tsi.SOFTWARE), pytest.mark.software(FIRECREST)],
    id="real",
)


@pytest.mark.parametrize(
    "places", [pytest.param(("sandbox", "firecrest"), id="sandbox"), REAL_PAIR]
)
def test_between_sites(
    places: tuple[str, str], request: pytest.FixtureRequest, project_at: MakeProject
) -> None:
    project, first, other = between(places, request, project_at)
    there = f'    rule train:\n        resources: mantik_site="{other.name}"\n'
    text = PIPELINE.replace("    rule train:\n", there)
    text = text.replace(" ln -s", " ln -s one {output[1]}/again; ln -s", 1)
    text = text.replace("{input[1]}/one", "{input[1]}/again")  # a link to a link
    project.write("Snakefile", text)

    said = run(project)

    tells(
        said,
        f"Moving results/set.txt (4 B) to site {other.name}, through this machine",
        "Moving results/model.txt and 5 more files",
        f"to site {first.name}, through",
    )
    assert project.read("report.txt") == REPORT
    assert not project.exists("results")
    assert (project.workspace_at(other) / "results/steps/2").read_text() == "2\n"

    said = run(project, "--forcerun", "score")
    assert "Moving" not in said
    assert project.read("report.txt") == REPORT


def between(
    places: tuple[str, str], request: pytest.FixtureRequest, project_at: MakeProject
) -> tuple[Project, Place, Place]:
    first, other = (request.getfixturevalue(f"{name}_place") for name in places)
    project = laid_out(project_at(first))
    second = project.config.with_name(f"{other.name}.yaml")
    second.write_text(other.config)
    project.sites = [str(second)]
    project.extra |= other.environment
    return project, first, other


GROUPED = """
    rule report:
        input: expand("results/{n}.txt", n=[1, 2]), "kept/1.txt"
        output: "report.txt"
        shell: "cat {input} > {output}; echo report >> ran.txt"

    rule finish:
        input: "parts/{n}", "kept/{n}.txt", "raw/{n}.txt"
        output: "results/{n}.txt"
        group: "one"
        shell: "cat {input[0]}/*.txt {input[1]} {input[2]} > {output}; echo finish >> ran.txt"

    rule split:
        input: "raw/{n}.txt"
        output: temp(directory("parts/{n}")), "kept/{n}.txt"
        group: "one"
        shell:
            "mkdir {output[0]}; cp {input} {output[0]}/a.txt; echo kept > {output[1]};"
            " echo split >> ran.txt"

    rule raw:
        output: temp("raw/{n}.txt")
        shell: "echo {wildcards.n} > {output}; echo raw >> ran.txt"
"""


TEMPORARY = ("parts/1", "parts/2", "raw/1.txt", "raw/2.txt")


def test_groups_with_temporary_files(project: Project) -> None:
    project.extra |= UNTRACKED
    project.write("Snakefile", GROUPED)

    said = run(project)

    ran_ = sorted((project.workspace / "ran.txt").read_text().split())
    assert ran_ == [*["finish"] * 2, *["raw"] * 2, "report", *["split"] * 2], said
    there = project.workspace
    assert (there / "report.txt").read_text() == "1\nkept\n1\n2\nkept\n2\nkept\n"
    assert (there / "kept/2.txt").exists()
    assert not any((there / name).exists() for name in TEMPORARY), said
    assert not any(project.exists(name) for name in ("report.txt", "results", "kept", "parts"))
    for purged in ("results/1.txt", "report.txt"):
        (there / purged).unlink()
    said = run(project)
    assert len((there / "ran.txt").read_text().split()) == 7 + 4, said
    assert not any((there / name).exists() for name in TEMPORARY), said
    tells(run(project), "Nothing to be done")


LARGE = """
    rule sum:
        input: "large.bin"
        output: "sum.txt"
        resources: mantik_site="{other}"
        shell: "sha256sum < {{input}} > {{output}}; echo sum >> {{output}}"

    rule make:
        output: "large.bin"
        resources: mantik_site="{first}"
        shell: "head -c {size} /dev/urandom > {{output}}"
"""
LARGE_BYTES = 150_000_000


@pytest.mark.parametrize(
    "places",
    [pytest.param(("sandbox", "firecrest"), marks=pytest.mark.nightly, id="sandbox"), REAL_PAIR],
)
def test_killed_while_a_file_moves(
    places: tuple[str, str], request: pytest.FixtureRequest, project_at: MakeProject
) -> None:
    project, first, other = between(places, request, project_at)
    text = LARGE.format(first=first.name, other=other.name, size=LARGE_BYTES)
    project.write("Snakefile", text)
    bundles = project.workspace_at(other) / ".mantik/bundles"
    running = project.start(*FILES_STAY)
    # Three parts may be on their way, and count for nothing.
    until(lambda: len([*bundles.glob("*/*.tar.gz/*-of-*")]) > 6, "a part of the file")
    running.kill()
    parts = [*bundles.glob("*/*.tar.gz/*-of-*")]

    said = run(project, "--rerun-incomplete", "--nolock")

    told = f"Moving large.bin (143.1 MiB) to site {other.name}, through this machine; "
    tells(said, told, "% of it is there already")
    [part] = {part.parent for part in parts}
    assert not part.exists(), "the same bundle was completed, and unpacked"
    made = hashlib.sha256((project.workspace_at(first) / "large.bin").read_bytes()).hexdigest()
    assert (project.workspace_at(other) / "sum.txt").read_text() == f"{made}  -\nsum\n"
    here = [path for path in project.directory.rglob("*") if path.is_file()]
    assert max(path.stat().st_size for path in here) < LARGE_BYTES / 10, "nothing of it came here"


LINKS = """
    rule read:
        input: "results/link", "results/folder", "results/old"
        output: "read.txt"
        shell: "cat {input[0]} {input[1]}/x {input[1]}/again > {output}; echo r >> ran.txt"

    rule make:
        output: "results/link", directory("results/folder"), "results/old"
        shell:
            "mkdir hidden {output[1]}; echo the target > hidden/one; touch -d @0 {output[2]};"
            " ln -s ../hidden/one {output[0]};"
            " echo x > {output[1]}/x; ln -s x {output[1]}/link; ln -s link {output[1]}/again;"
            " touch {output[1]}/$(printf 'n\\\\377'); echo m >> ran.txt;"
            " echo y > {output[1]}/ü; echo z > {output[1]}/%"
"""


def test_outputs_that_are_links_or_have_odd_names(one: Project) -> None:
    one.write("Snakefile", LINKS)

    tells(run(one), "1 file of its outputs with names that are not UTF-8", r"n\udcff")

    run(one, "--forcerun", "read")

    assert "".join(one.lines()) == "mrr"
    assert (one.workspace / "read.txt").read_text() == "the target\nx\nx\n"
    said = smk_mantik(one, "get", "--all").failed()
    assert one.read("results/link") == "the target\n"
    assert one.read("results/folder/ü") == "y\n"
    tells(said, "results/folder: left at ", "1 file with names that are not UTF-8, such as")
    tells(said, "1 file with names that its file API cannot carry, such as 'results/folder/%'")
    tells(smk_mantik(one, "get", "--all").failed(), "4 were here")
    tells(smk_mantik(one, "clean", "--yes").output, "only there: results/folder (")


def test_damaged_and_lost_journals_moves_and_a_silent_site(one: Project, tmp_path: Path) -> None:
    """None of them makes what lies there again."""
    run(one)
    state = one.directory / ".snakemake"
    (state / "mantik/journal.sqlite").write_bytes(b"no journal\n" * 1000)
    tells(run(one, "--forcerun", "score"), "Outputs that stay there: 4.")
    assert "".join(one.lines()) == "ptss"

    shutil.rmtree(state)
    said = one.run(*FILES_STAY, "--forcerun", "score").failed()
    tells(said, "the journal did not know of 4 outputs at the sites", "Start again")

    before = one.workspace
    moved = Project(tmp_path / "elsewhere/project", one.place, one.extra)
    moved.directory.rmdir()
    one.directory.rename(moved.directory)
    run(moved, "--forcerun", "score")
    assert "".join(moved.lines()) == "ptsss"
    assert moved.workspace == before

    copy = Project(tmp_path / "copy", one.place, one.extra)
    copy.directory.rmdir()
    shutil.copytree(moved.directory, copy.directory)
    smk_mantik(copy, "get", "results/model.txt").ok()
    assert copy.read("results/model.txt") == "set\nmodel\n"
    said = copy.run(*FILES_STAY, "--forcerun", "score").failed()
    tells(
        said,
        f"is a copy of {moved.directory}",
        f"4 outputs stay in the workspace {before}",
        f"Set Site: Workspace to {workspace_root(str(before))} in",
    )
    assert "results/set.txt" in smk_mantik(copy, "ls").ok().output

    config = moved.config.read_text()
    moved.config.write_text(re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{free_port()}", config))
    tells(run(moved, "-n"), "were not compared with the site", "Nothing to be done")
    assert "".join(moved.lines()) == "ptsss"

    there = f"Site:\n  Workspace: {workspace_root(str(before))}\n"
    copy.config.write_text(copy.config.read_text().replace("Site:\n", there))
    said = copy.run(*FILES_STAY, "--forcerun", "score").failed()
    tells(said, f"leads this workspace: {moved.directory} on ", "type smk-mantik unlock here")
    assert smk_mantik(copy, "unlock").code == 2
    tells(smk_mantik(copy, "unlock", "--yes").ok().output, f"{moved.directory} on ", "may lead")
    tells(smk_mantik(copy, "unlock").ok().output, "No run here was refused")
    tells(run(copy, "--forcerun", "score"), "or another controller has led there")
    assert "".join(moved.lines()) == "ptssss"
