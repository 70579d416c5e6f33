"""`smk-mantik run`: one entry point without a Snakefile, through the real command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import smk_mantik
from tests.support.workflows import UNTRACKED, WAIT_S, Place, Project, Ran, tells

MLPROJECT = """
entry_points:
  main:
    parameters:
      data: path
      alpha: {type: float, default: 0.5}
      out: {default: model.txt}
    command: "cat {data} > {out} && echo {alpha} >> {out} && mkdir -p sub && echo s > 'sub/a b' &&
      touch -d 2001-01-01 'sub/a b' && ln -sf 'a b' sub/last && ln -sf nowhere sub/none"
  fail:
    command: "exit 7"
  sees:
    parameters: {words: string}
    command: "test -f big.bin && printf '%s' {words} > seen"
  trains:
    command: "n=$(cat ckpt/n || echo 0) && echo x > part-$n && echo $((n+1)) > ckpt/n &&
      (test $n = 2 || exit 85)"
"""


@pytest.fixture
def churn(project: Project) -> Project:
    project.write("it's churn/MLproject", MLPROJECT)
    project.write("data set.csv", "1,2\n")
    project.extra |= UNTRACKED
    return project


def run(project: Project, *arguments: str, site: bool = True, other: str = "") -> Ran:
    """Run the command; a fork stands for the Snakemake that takes its place."""
    given = ("--site", other or f"hpc1={project.config}") if site else ()
    became: list[str] = []

    def execv(_program: str, words: list[str]) -> None:
        became.extend(words)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "execv", execv)
        said = smk_mantik(project, "run", *arguments[:1], *given, *arguments[1:])
    assert became, said.output
    assert became[:4] == [sys.executable, "-P", "-m", "snakemake"]
    return project.run(*became[4:], plain=True)


def test_it_becomes_snakemake(churn: Project) -> None:
    words = ("run", "it's churn", "-P", "data=data set.csv")
    ran = subprocess.run(
        [
            sys.executable, "-m", "snakemake_executor_plugin_mantik", *words,
            "--site", f"hpc1={churn.config}", "--", "-n",
        ],
        cwd=churn.directory, env=churn.environment, stdin=subprocess.DEVNULL, text=True,
        capture_output=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    tells(ran.stdout + ran.stderr, "rule run_main:", "This was a dry-run")


def test_named_inputs_and_outputs(churn: Project, firecrest_place: Place) -> None:
    words = (
        "it's churn", "-P", "data={input.data}", "-P", "out={output}", "-P", "alpha=2",
        "--input", "data=data set.csv", "--output", "models/m.txt",
    )  # fmt: skip

    run(churn, *words).ok()
    assert churn.read("models/m.txt") == "1,2\n2\n"
    assert not churn.exists("it's churn/sub")
    (journal,) = churn.attempts
    assert journal.site == "hpc1"

    tells(run(churn, *words).ok().output, "Nothing to be done")
    second = churn.write("hpc2.yaml", firecrest_place.config)
    churn.extra |= firecrest_place.environment
    run(churn, *words, other=f"hpc2={second}").ok()
    assert [record.site for record in churn.attempts] == ["hpc1", "hpc2"]


@pytest.mark.parametrize("local", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_what_it_makes_comes_back(churn: Project, local: bool) -> None:
    before = churn.read("it's churn/MLproject")
    rest = ("--", "--executor", "local", "--cores", "1") if local else ()

    run(churn, "it's churn", "-P", "data=data set.csv", *rest, site=not local).ok()

    (folder,) = (churn.directory / "mlproject-runs").iterdir()
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert names - {".snakemake_timestamp"} == {"model.txt", "sub/a b", "sub/last"}
    assert (folder / "sub/last").readlink() == Path("a b")
    assert (folder / "model.txt").read_text() == "1,2\n0.5\n"
    assert churn.read("it's churn/MLproject") == before
    assert churn.exists("it's churn/model.txt") == local


def test_the_project_may_be_this_directory_all_of_which_goes_up(churn: Project) -> None:
    """What an earlier run has brought does not, and braces are braces."""
    for path in (churn.directory / "it's churn").iterdir():
        path.rename(churn.directory / path.name)
    churn.write("big.bin", "x" * 3_000_000)

    run(churn, ".", "-e", "sees", "-P", "words={x} {{ $HOME {inputs}").ok()

    (folder,) = (churn.directory / "mlproject-runs").iterdir()
    assert (folder / "seen").read_text() == "{x} {{ $HOME {inputs}"
    assert not (folder / "big.bin").exists()
    assert not (folder / "mlproject-runs").exists()


def test_it_goes_on_past_its_walltime(churn: Project) -> None:
    """What all segments have made comes back, and the checkpoint does not."""
    (churn.directory / "it's churn").rename(churn.directory / "its")
    text = churn.config.read_text()
    churn.config.write_text(
        text.replace("Resources:\n", "Resources:\n  Runtime: 10m\n  Continue: 5\n")
    )
    said = run(churn, "its", "-e", "trains", "--checkpoint", "its/ckpt/").ok().output
    tells(said, "segment 1 of 5 has ended", "segment 2 of 5 has ended")
    (folder,) = (churn.directory / "mlproject-runs").iterdir()
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert names - {".snakemake_timestamp"} == {"part-0", "part-1", "part-2"}
    shown = smk_mantik(churn, "jobs").ok().output
    tells(shown, "segment 3 of 5: succeeded")
    assert "cancelled" not in shown
    tells(smk_mantik(churn, "watch", "--once").ok().output, "segment 3 of 5", "hpc1: 1 succeeded")


MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("gone",), "there is no such folder"),
    (("it's churn",), "main.data: has no value and no default"),
    (("it's churn", "-P", "data=x", "--output", "{m}"), "braces in a file's name"),
    (("it's churn", "-P", "data=x", "--continue", "3"), "--continue: needs --checkpoint"),
    (("it's churn", "-P", "data=x", "--checkpoint", "c/"), "--checkpoint: needs --continue"),
    (
        ("it's churn", "-P", "data=x", "--continue", "3", "--checkpoint", "/c"),
        "below the working directory",
    ),
    (("it's churn", "-P", "data=x", "--continue", "3", "--checkpoint", "c"), "needs a walltime"),
    (("it's churn", "-P", "data=x", "--output", "../x"), "--output: has to be a path below"),
    (("..", "-e", "x.sh"), "no script"),
]


def test_mistakes_are_told_before_anything_is_sent(churn: Project) -> None:
    for words, told in MISTAKES:
        site = ("--site", f"hpc1={churn.config}")
        said = smk_mantik(churn, "run", *words[:1], *site, *words[1:])

        assert said.code == 2, said.output
        tells(said.output, told)
        assert "Traceback" not in said.output
        assert not churn.exists(".snakemake")
