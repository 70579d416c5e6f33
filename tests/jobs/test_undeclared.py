"""New files beside the outputs, as a job's script lists them."""

from snakemake_executor_plugin_mantik.jobs.markers import MOST_NEW
from snakemake_executor_plugin_mantik.jobs.spec import InputFile, OutputFile
from tests.support.trial import NASTY, Trial

COMMAND = f"""
echo out > res/out; mkdir -p tree/inner made/deeper; echo of it > tree/inner/file
echo log > res/log; echo changed > input
touch -d 2001-01-01 made/deeper/old made/deeper; echo one > made/one.json
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


def test_a_failed_command_lists_nothing(trial: Trial) -> None:
    ended = trial.run(trial.spec("echo x > new; exit 3"))
    assert ended.sure.new == ()


def test_very_many_are_not_all_listed(trial: Trial) -> None:
    ended = trial.run(trial.spec("mkdir many; cd many; touch $(seq 600)"))
    assert len(ended.sure.new) == MOST_NEW
