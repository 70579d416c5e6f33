"""New files beside the outputs, as a job's script lists them."""

import hashlib

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.fetching import parse_fetch
from snakemake_executor_plugin_mantik.jobs.script import MOST_NEW
from snakemake_executor_plugin_mantik.jobs.spec import InputFile, OutputFile
from tests.support.trial import NASTY, Trial

COMMAND = f"""
echo out > res/out; mkdir -p tree/inner made/deeper; echo of it > tree/inner/file
echo log > res/log; echo changed > input
touch -d 2001-01-01 made/deeper/old; echo one > made/one.json
echo x > .hidden; mkdir .secret made/__pycache__; echo x | tee .secret/x > made/__pycache__/x.pyc
ln -s made/one.json link
mkdir -p a/b/c/d/e; echo x > a/b/near; echo x > a/b/c/d/e/far
echo x > res/{NASTY!r}; echo x > $'not \\xff utf-8'
""".replace(repr(NASTY), "'a b'\\''\"\n#%*$HOME`ü;-'")


def test_only_new_files_that_are_no_outputs_are_listed(trial: Trial) -> None:
    trial.write("before/old")
    trial.write("input")
    outputs = (
        OutputFile("res/out"), OutputFile("res/log", "log"), OutputFile("tree", directory=True)
    )  # fmt: skip
    spec = trial.spec(
        COMMAND, inputs=(InputFile("input", changed=True),), outputs=outputs,
        fetch=("*.json", "made/deeper/*"),
    )  # fmt: skip

    ended = trial.run(spec)

    found = {entry.path: entry for entry in ended.sure.new}
    assert set(found) == {
        "a/b/near", "made/deeper/old", "made/one.json", f"res/{NASTY}", "not \udcff utf-8"
    }, ended.log  # fmt: skip
    assert found["made/one.json"].size == 4
    assert found["made/deeper/old"].modified_ns == 978307200 * 10**9
    assert {entry.path for entry in ended.sure.files} == {
        "res/out", "res/log", "tree", "tree/inner", "tree/inner/file"
    }  # fmt: skip
    wanted = {entry.path: entry for entry in ended.sure.wanted}
    assert set(wanted) == {"made/one.json", "made/deeper/old"}
    assert wanted["made/one.json"].sha256 == hashlib.sha256(b"one\n").hexdigest()


def test_another_jobs_file_that_vanishes_costs_the_outputs_nothing(trial: Trial) -> None:
    """`find` lists a file that is gone when sha256sum is to read it."""
    trial.program(
        "find",
        '#!/bin/bash\nPATH=${PATH#*:}; find "$@"; code=$?\n'
        "[[ $* != *-newerct* ]] || printf '5\\0001.5\\000644\\000./ghost.tmp\\0'; exit $code",
    )
    spec = trial.spec(
        "echo out > out; echo x > kept.tmp", outputs=(OutputFile("out"),), fetch=("*.tmp",)
    )

    ended = trial.run(spec)

    assert [entry.path for entry in ended.sure.new] == ["kept.tmp", "ghost.tmp"], ended.log
    assert [(e.path, e.place, bool(e.sha256)) for e in ended.sure.wanted] == [
        ("kept.tmp", "alone", True), ("ghost.tmp", "alone", False)
    ]  # fmt: skip
    assert {e.path: c for e, c in ended.sure.small_outputs()} == {"out": b"out\n"}
    assert ended.sure.files[0].sha256
    assert "cannot write" not in ended.log


def test_a_failed_command_lists_nothing(trial: Trial) -> None:
    ended = trial.run(trial.spec("echo x > new; exit 3"))
    assert ended.sure.new == ()


def test_very_many_are_not_all_listed(trial: Trial) -> None:
    ended = trial.run(trial.spec("mkdir many; cd many; touch $(seq 600)"))
    assert len(ended.sure.new) == MOST_NEW


@pytest.mark.parametrize("value", [5, "/etc/*", "../*", "a//b", "results/", "a\x1b"])
def test_patterns_that_can_match_nothing_are_refused(value: object) -> None:
    with pytest.raises(UserError, match="mantik_fetch"):
        parse_fetch(value)


def test_patterns() -> None:
    assert parse_fetch(None) is None
    assert parse_fetch("") == ()
    assert parse_fetch(" *.json  plots/* ") == ("*.json", "plots/*")
