"""A measured command: real processes, their memory and time."""

import csv
import json
from pathlib import Path

import pytest
from snakemake.benchmark import write_benchmark_records

from snakemake_executor_plugin_mantik.adapter.job_files import _record
from snakemake_executor_plugin_mantik.jobs.spec import Apptainer, Benchmark, Environment, OutputFile
from tests.support.trial import Trial

MIB = 1 << 20
MEASURED = "measured dir/$(raw)"
FILE = "bench 'dir'/$(ü).tsv"
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


def benchmark(*commands: str, file: str = FILE) -> Benchmark:
    return Benchmark(MEASURED, file, commands)


def check_file(trial: Trial, file: str = FILE) -> None:
    """Compare the benchmark file at the site with what Snakemake writes here."""
    twin = trial.workspace / f"twin{Path(file).suffix}"
    records = [_record(line) for line in (trial.workspace / MEASURED).read_text().splitlines()]
    write_benchmark_records(records, str(twin), False)
    ours, theirs = ((path.read_text()) for path in (trial.workspace / file, twin))
    if file.endswith(".jsonl"):
        tables = [[json.loads(line) for line in text.splitlines()] for text in (ours, theirs)]
    else:
        assert ours.splitlines()[0] == theirs.splitlines()[0]
        tables = [[*csv.DictReader(text.splitlines(), delimiter="\t")] for text in (ours, theirs)]
    assert len(tables[0]) == len(tables[1])
    for mine, other in zip(*tables, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            if name == "h:m:s" or value == "NA":
                assert mine[name] == value
            else:
                assert float(mine[name]) == pytest.approx(float(value), rel=0.01, abs=0.011), name


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
    check_file(trial)


def test_each_run_has_its_line(trial: Trial) -> None:
    commands = ("echo one >> ran", "echo two >> ran", "#" * 100_001 + "\necho three >> ran")
    ended = trial.run(
        trial.spec(commands[0], benchmark=benchmark(*commands, file="b.jsonl"), outputs=OUTPUTS)
    )
    assert ended.sure.exit_code == 0, ended.log
    assert (trial.workspace / "ran").read_text() == "one\ntwo\nthree\n"
    assert len(lines(trial)) == 3
    check_file(trial, "b.jsonl")


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
    check_file(trial)


def test_nothing_of_the_measuring_is_left(trial: Trial) -> None:
    # `run` waits for all that holds the script's output open: a sampler that lives on would hang.
    command = "sleep 600 & echo $! > pid; kill -9 $$"
    ended = trial.run(trial.spec(command, benchmark=benchmark(command), outputs=OUTPUTS))
    assert ended.sure.exit_code == 137
