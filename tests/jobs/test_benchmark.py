"""A measured command: real processes, their memory and time."""

from snakemake_executor_plugin_mantik.jobs.spec import Apptainer, Benchmark, Environment, OutputFile
from tests.support.trial import Trial

MIB = 1 << 20
MEASURED = "measured dir/$(raw)"
OUTPUTS = (OutputFile(MEASURED),)
# It goes on until the measuring has seen its memory and some time of it. Its memory never shrinks:
# of a peak, some of what is measured one after the other would be seen and some not.
BUSY = (
    'bash -c \'for n in {1..100}; do printf -v "x[n]" "%1000000s"; done; '
    "until read -r _ _ uss _ _ _ used hz < <(cat .mantik/work/*/*/marker/sample.*) && "
    "(( uss > 90 << 20 && used - ${first:=$used} > hz / 3 )); do :; done 2> /dev/null' & wait"
)


def lines(trial: Trial) -> list[list[str]]:
    return [line.split() for line in (trial.workspace / MEASURED).read_text().splitlines()]


def benchmark(*commands: str) -> Benchmark:
    return Benchmark(MEASURED, commands)


def test_memory_and_time_of_all_processes_are_seen(trial: Trial) -> None:
    ended = trial.run(trial.spec(BUSY, benchmark=benchmark(BUSY), outputs=OUTPUTS))
    assert ended.sure.exit_code == 0, ended.log
    [[begin, end, rss, vms, uss, pss, read, written, ticks, per_second]] = lines(trial)
    assert 0.3 < float(end) - float(begin) < 110
    assert 90 * MIB < int(uss) < 1000 * MIB
    # They are taken one after the other, while the memory may grow.
    for less, more in ((uss, pss), (pss, rss), (rss, vms)):
        assert int(less) < 1.5 * int(more)
    assert int(read) >= 0
    assert int(written) >= 0
    assert 0.3 < int(ticks) / int(per_second) < 110


def test_each_run_has_its_line(trial: Trial) -> None:
    commands = ("echo one >> ran", "echo two >> ran", "#" * 100_001 + "\necho three >> ran")
    ended = trial.run(trial.spec(commands[0], benchmark=benchmark(*commands), outputs=OUTPUTS))
    assert ended.sure.exit_code == 0, ended.log
    assert (trial.workspace / "ran").read_text() == "one\ntwo\nthree\n"
    assert len(lines(trial)) == 3


def test_a_run_that_fails_is_the_last(trial: Trial) -> None:
    commands = ("echo one >> ran", "exit 7", "echo three >> ran")
    ended = trial.run(trial.spec(commands[0], benchmark=benchmark(*commands), outputs=OUTPUTS))
    assert ended.sure.exit_code == 7
    assert (trial.workspace / "ran").read_text() == "one\n"


def test_in_an_image(trial: Trial) -> None:
    # A stand-in for Apptainer: it runs the command where it is.
    trial.program("apptainer", '#!/bin/bash\nshift 2\nexec "$@"\n')
    trial.write("image.sif")
    command = "until cat .mantik/work/*/*/marker/sample.* 2> /dev/null; do sleep 0.1; done"
    ended = trial.run(
        trial.spec(
            command,
            benchmark=benchmark(command),
            outputs=OUTPUTS,
            environment=Environment(apptainer=Apptainer("image.sif")),
        )
    )
    assert ended.sure.exit_code == 0, ended.log
    assert len(lines(trial)[0]) == 10


def test_nothing_of_the_measuring_is_left(trial: Trial) -> None:
    # `run` waits for all that holds the script's output open: a sampler that lives on would hang.
    command = "sleep 600 & echo $! > pid; kill -9 $$"
    ended = trial.run(trial.spec(command, benchmark=benchmark(command), outputs=OUTPUTS))
    assert ended.sure.exit_code == 137
