"""What happens around the command: steps by name, hooks in their order, the code that counts."""

import os
import signal
import stat
from dataclasses import replace

import pytest

from snakemake_executor_plugin_mantik.jobs.deployment import (
    CondaFile,
    Image,
    wrap_conda,
    wrap_container,
    wrap_modules,
)
from snakemake_executor_plugin_mantik.jobs.script import PART_BYTES, STEPS
from snakemake_executor_plugin_mantik.jobs.spec import Environment, InputFile, OutputFile
from tests.support.trial import NASTY, QUICK, Trial, signal_session, wait_until

CLEAN = ("echo cleaned > after",)


@pytest.mark.parametrize("code", [0, 5, 137])
def test_the_code_is_the_commands(trial: Trial, code: int) -> None:
    ended = trial.run(trial.spec(f"exit {code}", environment=Environment(after_on_compute=CLEAN)))
    assert ended.returned == ended.sure.exit_code == code
    assert ended.sure.failed_step == ""
    assert (trial.workspace / "after").exists()


def test_a_command_on_the_login_node_follows_also_after_a_failure(trial: Trial) -> None:
    ended = trial.run(trial.spec("exit 5", environment=Environment(after_on_login=("true",))))
    assert ended.returned == 0
    assert ended.sure.exit_code == 5


def test_hooks_run_in_order_and_share_a_shell(trial: Trial) -> None:
    environment = Environment(
        before_on_compute=("export A=1; echo c1", "cd /; B='two words'; echo c2 $A"),
        after_on_compute=("cd /tmp; echo c3 $A $B", "echo c4 $PWD"),
    )
    ended = trial.run(trial.spec('echo main $A "$PWD"; exit 4', environment=environment))
    workspace = str(trial.workspace)
    lines = ended.log.replace(workspace, "WORKSPACE").splitlines()
    assert lines == ["c1", "c2 1", "main 1 WORKSPACE", "c3 1 two words", "c4 /tmp"]
    assert ended.returned == 4


@pytest.mark.parametrize("hook", ["exit 9", "exit 0", "false", "trap 'echo mine' EXIT; exit 9"])
def test_a_failing_hook_keeps_the_others_and_the_code(trial: Trial, hook: str) -> None:
    environment = Environment(after_on_compute=("touch one", hook, "touch two"))
    ended = trial.run(trial.spec("exit 4", environment=environment))
    assert ended.returned == ended.sure.exit_code == 4
    assert (trial.workspace / "one").exists()
    assert (trial.workspace / "two").exists()
    if hook == "false":
        assert "a command after the job failed with 1" in ended.log


def test_a_signal_to_all_processes_loses_no_hook(trial: Trial) -> None:
    hooks = ("touch one; until [ -e go ]; do sleep 0.05; done", "touch two", "touch three")
    spec = trial.spec("exit 0", environment=Environment(after_on_compute=hooks))
    process = trial.start(spec)
    wait_until((trial.workspace / "one").exists)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal_session(process.pid, number)
    (trial.workspace / "go").touch()
    process.communicate(timeout=600)
    assert (trial.workspace / "two").exists()
    assert (trial.workspace / "three").exists()


@pytest.mark.parametrize(
    ("hook", "code"),
    [
        ("exit 5", 5),
        ("exit 0", 1),
        ("false", 1),
        ("syntax error (", 1),
        ("set -u; echo $not_there; touch not-reached", 1),
        ("exec true", 1),
        ("kill -KILL $BASHPID", 137),
    ],
)
def test_a_failing_command_before_the_job(trial: Trial, hook: str, code: int) -> None:
    environment = Environment(before_on_compute=(hook,), after_on_compute=CLEAN)
    ended = trial.run(trial.spec("touch not-reached", environment=environment))
    assert ended.returned == ended.sure.exit_code
    assert ended.returned == code or (code == 1 and ended.returned)
    assert ended.sure.failed_step == "before"
    assert not (trial.workspace / "not-reached").exists()
    assert (trial.workspace / "after").read_text() == "cleaned\n"


def test_options_that_a_hook_sets_do_no_harm(trial: Trial) -> None:
    environment = Environment(
        before_on_compute=("set -euo pipefail -f -C; IFS=,; trap 'echo err' ERR",),
        after_on_compute=("echo cleaned >> after",),
    )
    ended = trial.run(trial.spec("exit 3", environment=environment))
    assert (trial.workspace / "after").read_text() == "cleaned\n"
    assert ended.returned == ended.sure.exit_code == 3
    assert ended.sure.failed_step == ""


@pytest.mark.parametrize(
    ("step", "values"),
    [
        ("secrets", {"secrets": ("TOKEN",)}),
        ("bundles", {"bundles": ("not-there",)}),
        ("bundles", {"inline": b"no tar at all"}),
        ("inputs", {"inputs": (InputFile("not there", 3),)}),
        ("outputs", {"outputs": (OutputFile("file/below"),)}),
        ("modules", {"environment": Environment(modules=("GCC",))}),
        ("variables", {"environment": Environment(variables={"UID": "7"})}),
        ("python", {"environment": Environment(python="venv")}),
    ],
)
def test_a_failing_step_is_named(trial: Trial, step: str, values: dict[str, object]) -> None:
    assert step in STEPS
    trial.write("file")
    ended = trial.run(trial.spec("touch not-reached", **values))
    assert ended.sure.failed_step == step
    assert ended.returned == ended.sure.exit_code > 0
    assert not (trial.workspace / "not-reached").exists()
    assert f"its step '{step}' failed" in ended.log


@pytest.mark.parametrize(
    "setup",
    [
        wrap_modules(["GCC"], "touch not-reached", rule="r"),
        wrap_conda("not-there", "touch not-reached", rule="r"),
        wrap_conda(CondaFile("e.yaml", "e", "e.yaml"), "touch not-reached", rule="r"),
        wrap_container(Image("not there.sif"), "touch not-reached", rule="r"),
    ],
)
def test_a_rules_own_environment_that_fails_is_no_failure_of_its_command(
    trial: Trial, setup: str
) -> None:
    assert "own" in STEPS
    ended = trial.run(trial.spec(setup))
    assert ended.sure.failed_step == "own"
    assert ended.returned == ended.sure.exit_code == 1
    assert not (trial.workspace / "not-reached").exists()


def test_modules_are_loaded_before_the_variables_are_set(trial: Trial) -> None:
    init = trial.start_folder / "init.sh"
    init.write_text('module() { echo "module $*, $A, $P"; M=1; A=changed; P=/of/module:$P; }\n')
    environment = Environment(
        modules=("Stages/2025", "it's; echo bad"),
        variables={"A": "ours", "P": "/my/path"},
        before_on_compute=("echo $M $A $P",),
    )
    ended = trial.run(trial.spec(environment=environment), env={"BASH_ENV": str(init)})
    assert ended.log.splitlines() == [
        "module load Stages/2025 it's; echo bad, ours, /my/path",
        "1 ours /of/module:/my/path",
    ]


def test_a_module_that_fails_is_told(trial: Trial) -> None:
    init = trial.start_folder / "init.sh"
    init.write_text("module() { return 1; }\n")
    spec = trial.spec("touch not-reached", environment=Environment(modules=("`touch bad`",)))
    ended = trial.run(spec, env={"BASH_ENV": str(init)})
    assert ended.sure.failed_step == "modules"
    assert "not all modules could be loaded: `touch bad`" in ended.log
    assert not (trial.workspace / "bad").exists()


@pytest.mark.parametrize(
    ("names", "step", "said"),
    [(("TOKEN",), "", "IT'S $X\n"), (("TOKEN", "OTHER"), "secrets", "does not set OTHER")],
)
def test_secrets_are_read_and_removed(
    trial: Trial, names: tuple[str, ...], step: str, said: str
) -> None:
    spec = trial.spec('echo "$TOKEN" | tr a-z A-Z', secrets=names)
    secrets = trial.write(spec.paths.secrets, "TOKEN='it'\\''s $x'\n")
    ended = trial.run(spec)
    assert (ended.sure.failed_step, said in ended.log) == (step, True)
    assert not secrets.exists()


def test_missing_and_different_inputs_are_told(trial: Trial) -> None:
    trial.write("right", "abc")
    trial.write(f"short {NASTY}", "ab")
    trial.write("folder/x")
    inputs = (
        InputFile("right", 3),
        InputFile(f"short {NASTY}", 3),
        InputFile(f"not there {NASTY}"),
        InputFile("folder", directory=True),
        InputFile("right", directory=True),
        InputFile("folder", 5),
        InputFile("right"),
    )
    ended = trial.run(trial.spec("touch not-reached", inputs=inputs))
    assert ended.sure.failed_step == "inputs"
    missing = {f"short {NASTY}", f"not there {NASTY}", "right", "folder"}
    assert set(ended.sure.missing_inputs) == missing
    assert not (trial.workspace / "not-reached").exists()


def test_a_late_input_is_waited_for(trial: Trial) -> None:
    spec = trial.spec("cat late", inputs=(InputFile("late", 5),))
    spec = replace(spec, limits=replace(QUICK, visible_s=20))
    process = trial.start(spec)
    wait_until((trial.workspace / spec.paths.log).exists)
    trial.write("late", "12345")
    assert trial.end(spec, process).log == "12345"


def test_old_outputs_are_removed_and_directories_made(trial: Trial) -> None:
    for path in ("plain", "kept", "log.txt", "tree/old", "touched", f"{NASTY}/deep"):
        trial.write(path, "old")
    (trial.workspace / "dangling").symlink_to("nowhere")
    outputs = (
        OutputFile("plain"),
        OutputFile("kept", keep=True),
        OutputFile("log.txt", "log"),
        OutputFile("tree", directory=True),
        OutputFile("touched", "touched"),
        OutputFile(f"{NASTY}/deep"),
        OutputFile("dangling"),
        OutputFile("-new folder/a/out"),
        OutputFile("-rf"),
    )
    command = 'for f in *; do [ "$f" = .mantik ] || find "./$f" -printf "%p\\0"; done'
    ended = trial.run(trial.spec(command, outputs=outputs))
    seen = set(ended.log.split("\0"))
    assert seen == {f"./{NASTY}", "./-new folder", "./-new folder/a", "./kept", ""}
    assert (trial.workspace / "kept").read_text() == "old"


def test_files_have_the_users_umask(trial: Trial) -> None:
    spec = trial.spec("umask; mkdir d; touch d/f")
    old = os.umask(0o027)
    try:
        ended = trial.run(spec)
    finally:
        os.umask(old)
    assert ended.log == "0027\n"
    ours = stat.S_IMODE((trial.workspace / spec.paths.work).stat().st_mode)
    assert ours == 0o700


def test_temporary_files_go_where_the_node_says(trial: Trial) -> None:
    place = trial.write("tmp/x").parent
    spec = trial.spec(
        'echo "$TMPDIR|$TMP|$TEMPDIR|$TEMP"', environment=Environment(variables={"TMP": "mine"})
    )
    ended = trial.run(spec, env={"TMPDIR": str(place)})
    assert ended.log == f"{place}|mine|{place}|{place}\n"
    spec = trial.spec("echo $TMPDIR")
    assert trial.run(spec, env={"TMPDIR": "/not/there"}).log == "/tmp\n"


def test_a_rules_own_directory_for_temporary_files_is_made_on_the_node(trial: Trial) -> None:
    spec = trial.spec('echo "$TMPDIR|$TMP"', variables={"TMPDIR": "a b/'$SLURM_JOB_ID'/${OF}x"})
    ended = trial.run(spec, env={"SLURM_JOB_ID": "7", "OF": "$no"})
    made = f"{trial.workspace}/a b/'7'/$nox"
    assert ended.log == f"{made}|{made}\n"
    assert (trial.workspace / "a b/'7'/$nox").is_dir()
    spec = trial.spec('echo "$TMPDIR"', variables={"TMPDIR": "~/$TMPDIR/x"})
    home = trial.write("home/x").parent
    assert (
        trial.run(spec, env={"HOME": str(home), "TMPDIR": "/not/there"}).log == f"{home}//tmp/x\n"
    )
    spec = trial.spec('echo "$TMPDIR"', variables={"TMPDIR": "/$NOWHERE/x"})
    assert "the resource tmpdir names NOWHERE, a variable that this node does not set" in (
        trial.run(spec).log
    )
    (trial.workspace / "file").write_text("")
    spec = trial.spec('echo "$TMPDIR"', variables={"TMPDIR": "file/x"})
    assert "file/x of the resource tmpdir cannot be made" in trial.run(spec).log


def test_another_shell_that_reads_nothing_from_the_scheduler(trial: Trial) -> None:
    ended = trial.run(trial.spec('cat; readlink /proc/self/fd/0 "/proc/$$/exe"', shell="sh"))
    assert ended.log.startswith("/dev/null\n")
    assert "bash" not in ended.log


@pytest.mark.parametrize("size", [99_999, PART_BYTES])
def test_a_command_of_any_length(trial: Trial, size: int) -> None:
    tail = "\necho end 'of it'; exit 3"
    ended = trial.run(trial.spec("#" * (size - len(tail)) + tail))
    assert ended.log == "end of it\n"
    assert ended.returned == 3
