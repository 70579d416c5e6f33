"""A job that may take more time than its walltime ends with its checkpoint, and says so."""

import hashlib
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.jobs.script import PREDECESSORS
from snakemake_executor_plugin_mantik.jobs.segments import GO_ON_CODE
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec, OutputFile, Predecessor, Segment
from snakemake_executor_plugin_mantik.mlproject.single_rule import started_file
from tests.support.trial import Trial, wait_until

SEGMENT = Segment(2, 5, ("ckpt/",), runtime_s=3600, warn_s=120)
DOCS = Path(__file__).parents[2] / "docs"
ROW = OutputFile("ckpt/", "checkpoint", directory=True, keep=True)


SHORT = {"runtime_s": 201, "warn_s": 400}
"""It is warned at once and asked to end a second later, and has long for its last words."""


def segment(trial: Trial, command: str, **values: object) -> JobSpec:
    return trial.spec(
        command,
        segment=replace(SEGMENT, **values),  # type: ignore[arg-type]
        outputs=(OutputFile("model"), ROW),
    )


DATE = """\
#!/bin/bash
# As the real one, but when the clock of the walltime asks, not before the time of its next signal.
case $1 in
  *%3N)
    if mkdir {asked}; then until [ -e running ]; do sleep 0.05; done; else {before_term}; fi ;;
esac 2> /dev/null
exec /bin/date "$@"
"""


def paced(trial: Trial, before_term: str) -> None:
    """Let the job be warned when it is `running`, and asked to end when a command has succeeded.

    Neither comes before its time, but after it where the machine is busy.
    """
    asked = trial.bin / "asked"
    until = f"until {before_term}; do sleep 0.05; done"
    trial.program("date", DATE.format(asked=asked, before_term=until))


@pytest.mark.parametrize("ask", ["exit 85", 'touch "$MANTIK_CONTINUE_FILE"'])
def test_a_command_asks_to_go_on(trial: Trial, ask: str) -> None:
    trial.write("ckpt/old", "1")
    command = f"cat ckpt/old > ckpt/new; env | grep ^MANTIK_ | sort > seen; {ask}"
    begun = time.time()
    ended = trial.run(segment(trial, command))
    assert (ended.returned, ended.sure.exit_code, ended.sure.go_on) == (
        GO_ON_CODE,
        GO_ON_CODE,
        "asked",
    )
    assert ended.sure.changed
    found = {entry.path: (entry.place, entry.type) for entry in ended.sure.files}
    assert found == {
        "ckpt": ("none", "d"), "ckpt/old": ("stored", "f"), "ckpt/new": ("stored", "f"),
    }  # fmt: skip
    assert all(entry.sha256 for entry in ended.sure.files if entry.type == "f")
    seen = dict(
        line.split("=", 1)
        for line in (trial.workspace / "seen").read_text().split("\n")
        if "=" in line
    )
    assert (seen["MANTIK_SEGMENT"], seen["MANTIK_SEGMENTS"]) == ("2", "5")
    assert begun + 3590 < int(seen["MANTIK_DEADLINE"]) < time.time() + 3601


@pytest.mark.parametrize(
    "ask",
    [
        "exit 85",
        'touch "$MANTIK_CONTINUE_FILE"',
        f"mkdir out; touch {started_file('out')}; exit 85",  # which an entry point makes first
    ],
)
def test_it_does_not_go_on_without_a_changed_checkpoint(trial: Trial, ask: str) -> None:
    trial.write("ckpt/old", "1")
    ended = trial.run(segment(trial, ask, checkpoint=("ckpt/", started_file("out"))))
    assert (ended.sure.exit_code, ended.sure.go_on, ended.sure.changed) == (1, "asked", False)


def test_it_is_warned_before_its_walltime_ends(trial: Trial) -> None:
    """Programs that handle USR1 get it; others go on until TERM."""
    other = "trap ': > unharmed; exit' TERM; : > other; while :; do sleep 0.05; done"
    trial.write("other.sh", other)
    trial.write(
        "train.sh",
        "trap 'echo warned > ckpt/state' USR1; trap 'echo over >> ckpt/state; exit 0' TERM;"
        " until [ -e other ]; do sleep 0.05; done; : > running; while :; do sleep 0.05; done",
    )
    paced(trial, "[ -s ckpt/state ]")
    spec = segment(trial, "bash other.sh & bash train.sh & wait; wait", **SHORT)
    ended = trial.run(spec)
    assert (ended.sure.exit_code, ended.sure.go_on) == (GO_ON_CODE, "time_limit"), ended.log
    assert (trial.workspace / "ckpt/state").read_text() == "warned\nover\n"
    assert (trial.workspace / "unharmed").exists()


def test_the_schedulers_own_warning_counts(trial: Trial) -> None:
    spec = segment(
        trial,
        "trap 'echo 1 > ckpt/state; exit 138' USR1; : > running; while :; do sleep 0.05; done",
    )
    end = {"SLURM_JOB_END_TIME": str(int(time.time()) + 9000)}
    ended = trial.signalled(spec, signal.SIGUSR1, env=end)
    assert (ended.sure.exit_code, ended.sure.go_on) == (GO_ON_CODE, "time_limit"), ended.log


@pytest.mark.parametrize(
    "signals",
    [(signal.SIGTERM,), (signal.SIGUSR1, signal.SIGTERM)],  # or cancelled after its warning
)
def test_an_end_from_outside_lists_the_checkpoint_and_decides_nothing(
    trial: Trial, signals: tuple[signal.Signals, ...]
) -> None:
    spec = segment(trial, "echo 1 > ckpt/state; : > running; sleep 60")
    ended = trial.signalled(spec, *signals)
    assert (ended.sure.exit_code, ended.sure.go_on, ended.sure.changed) == (143, "", True)
    assert "ckpt/state" in [entry.path for entry in ended.sure.files]


def test_a_failure_and_a_success_stay_what_they_are(trial: Trial) -> None:
    failed = trial.run(segment(trial, 'echo 1 > ckpt/a; touch "$MANTIK_CONTINUE_FILE"; exit 3'))
    assert (failed.sure.exit_code, failed.sure.go_on, failed.sure.files) == (3, "", ())
    done = trial.run(segment(trial, "echo 2 > ckpt/a; touch model"))
    assert (done.sure.exit_code, done.sure.go_on) == (0, "")
    assert [entry.path for entry in done.sure.files] == ["model"]


@pytest.mark.parametrize("changes", [True, False])
def test_after_a_segment_without_a_marker_a_change_is_needed(trial: Trial, changes: bool) -> None:
    trial.write("ckpt/state", "0")
    first = segment(trial, f"{'echo 1 > ckpt/state; ' * changes}: > running; sleep 60")
    process = trial.start(first)
    wait_until((trial.workspace / "running").exists)
    trial.stop()
    second = trial.run(segment(trial, "echo 2 > ckpt/state; touch model", before=first.paths))
    assert process.returncode is not None
    if changes:
        assert second.sure.exit_code == 0, second.log
    else:
        assert second.sure.failed_step == "checkpoint"
        assert not (trial.workspace / "model").exists()


def test_one_that_was_presubmitted_runs_only_if_it_is_wanted(trial: Trial) -> None:
    def behind(before: JobSpec, command: str) -> JobSpec:
        return replace(
            segment(trial, command),
            after=(Predecessor(before.paths, ("ckpt", "other"), GO_ON_CODE),),
        )

    first = segment(trial, "echo 1 > ckpt/state; exit 85")
    second = behind(first, "echo 2 > ckpt/new; mv ckpt/new ckpt/state; exit 85")
    third = behind(second, "cat ckpt/state > model")
    fourth = behind(third, "touch ran")
    fifth = behind(fourth, "touch ran")
    assert trial.run(second).sure.failed_step == PREDECESSORS
    assert trial.run(first).sure.exit_code == GO_ON_CODE
    # The same once more, since an attempt runs once.
    second = behind(first, second.command)
    third = behind(second, third.command)
    assert trial.run(second).sure.go_on == "asked"
    assert trial.run(third).sure.exit_code == 0
    assert (trial.workspace / "model").read_text() == "2\n"
    for spec in (behind(third, "touch ran"), fourth, fifth):
        assert trial.run(spec).sure.failed_step == PREDECESSORS
    assert not (trial.workspace / "ran").exists()


def test_one_that_was_presubmitted_compares_the_checkpoint(trial: Trial) -> None:
    first = segment(trial, "echo 1 > ckpt/state; exit 85")
    trial.run(first)
    trial.write("ckpt/state", "9\n")
    second = segment(trial, "touch ran")
    second = replace(second, after=(Predecessor(first.paths, ("ckpt",), GO_ON_CODE),))
    ended = trial.run(second)
    assert (ended.sure.failed_step, ended.sure.missing_inputs) == ("inputs", ("ckpt/state",))
    assert not (trial.workspace / "ran").exists()


SAVES_SLOWLY = """\
trap 'echo warned >> notes; sleep 1; echo 1 > ckpt/new; mv ckpt/new ckpt/state' USR1
trap 'sleep 1; echo over >> notes; echo 2 > ckpt/state; exit 143' TERM
: > "running$1"
while :; do sleep 0.05; done
"""


def test_the_checkpoint_is_listed_when_all_have_ended(trial: Trial) -> None:
    """The shell around the program ends at once: it does not handle TERM."""
    trial.write("train.sh", SAVES_SLOWLY)
    spec = segment(trial, "bash train.sh; true", **SHORT)
    paced(trial, "[ -s notes ]")
    ended = trial.run(spec)
    assert (ended.sure.exit_code, ended.sure.go_on) == (GO_ON_CODE, "time_limit"), ended.log
    assert (trial.workspace / "notes").read_text() == "warned\nover\n", ended.log
    [state] = [entry for entry in ended.sure.files if entry.path == "ckpt/state"]
    assert state.sha256 == hashlib.sha256(b"2\n").hexdigest()


SRUN = """\
#!/bin/bash
# As the real one: steps are no children of the job's script, and TERM kills them.
case $1 in --overlap) while [[ $1 == -* ]]; do shift; done; SLURM_STEP_ID=7 exec "$@" ;; esac
export SLURM_STEP_ID=3
setsid "$@" &
trap 'kill -s KILL -- "-$!"; exit 137' TERM
trap '' USR1
until wait; [ -z "$(jobs -r)" ]; do :; done
"""


@pytest.mark.parametrize("works", [True, False])
def test_the_steps_of_srun_are_warned(trial: Trial, works: bool) -> None:
    """By a step beside them: neither the launcher nor a shell in the step passes USR1 on."""
    trial.write("train.sh", SAVES_SLOWLY)
    trial.program("srun", SRUN if works else SRUN.replace("shift; done;", "exit 1; done;"))
    spec = segment(trial, "srun bash -c 'env -i PATH=\"$PATH\" bash train.sh; true'", **SHORT)
    paced(trial, "[ -s notes ]" if works else f"grep -q 'cannot be sent USR1' {spec.paths.log}")
    ended = trial.run(spec, env={"SLURM_JOB_ID": f"4{os.getpid()}"})
    notes = trial.workspace / "notes"
    if works:
        assert ended.sure.go_on == "time_limit", ended.log
        assert notes.read_text() == "warned\nover\n", ended.log
        assert (trial.workspace / "ckpt/state").read_text() == "2\n"
    else:
        assert "the steps of srun cannot be sent USR1" in ended.log
        assert (ended.sure.exit_code, ended.sure.go_on) == (137, "time_limit")
        assert not notes.exists()


EXAMPLES = re.findall(
    r"^```python\n(.*?)^```", (DOCS / "segments.md").read_text(), re.MULTILINE | re.DOTALL
)
EPOCH = """
import time

now = time.time()
time.time = lambda: now


def train_one_epoch():
    global now
    now += 60
    with open("epochs", "a") as file:
        print(epoch, file=file)


"""
"""What the example's loop calls: an epoch takes a minute, on a clock of its own."""


def test_the_loop_of_the_docs_trains_each_epoch_once(trial: Trial) -> None:
    for example in EXAMPLES[1:]:
        compile(example, "docs/segments.md", "exec")
    [loop] = [example for example in EXAMPLES if "MANTIK_DEADLINE" in example]
    trial.write("train.py", EPOCH + loop)
    codes = []
    for number in range(10):
        ended = trial.run(segment(trial, "python3 train.py && touch model", number=number, most=10))
        codes.append(ended.sure.exit_code)
        if codes[-1] != GO_ON_CODE:
            break
        assert (ended.sure.go_on, ended.sure.changed) == ("asked", True)
    # Fewer than 60 epochs fit in each hour.
    assert codes == [GO_ON_CODE] * 5 + [0], ended.log
    epochs = (trial.workspace / "epochs").read_text().split()
    assert epochs == [str(number) for number in range(300)]
