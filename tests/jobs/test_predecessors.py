"""An attempt submitted before its inputs existed runs only if those that make them did."""

import os
from shlex import quote

import pytest

from snakemake_executor_plugin_mantik.jobs.script import PREDECESSORS
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec, OutputFile, Predecessor
from tests.support.trial import NASTY, Ended, Trial

LARGE = 3 << 20


def after(*before: JobSpec) -> tuple[Predecessor, ...]:
    return tuple(Predecessor(one.paths, tuple(o.path for o in one.outputs)) for one in before)


def refused(ended: Ended) -> bool:
    return ended.sure.failed_step == PREDECESSORS and ended.sure.exit_code > 0


def test_it_runs_with_what_they_have_made(trial: Trial) -> None:
    first = trial.spec(
        f"mkdir -p d/e && echo 1 > d/e/one && echo 2 > {quote(f'd/{NASTY}')} && echo 3 > three",
        outputs=(OutputFile("d", directory=True), OutputFile("three")),
    )
    second = trial.spec(f"head -c {LARGE} /dev/zero > large", outputs=(OutputFile("large"),))
    third = trial.spec(
        "cat d/e/one three > all; wc -c < large >> all",
        outputs=(OutputFile("all"),),
        after=after(first, second),
    )
    assert trial.run(first).returned == trial.run(second).returned == 0
    ended = trial.run(third)
    assert ended.returned == 0, ended.log
    assert (trial.workspace / "all").read_text() == f"1\n3\n{LARGE}\n"


def test_it_does_not_run_before_they_have(trial: Trial) -> None:
    first = trial.spec("echo 1 > one", outputs=(OutputFile("one"),))
    trial.write("one", "1\n")
    trial.write("two", "right")
    ended = trial.run(trial.spec("touch ran", outputs=(OutputFile("two"),), after=after(first)))
    assert refused(ended)
    assert "the job that makes ./one has not succeeded" in ended.log
    assert not (trial.workspace / "ran").exists()
    assert (trial.workspace / "two").read_text() == "right"


def test_it_does_not_run_if_one_of_them_has_failed(trial: Trial) -> None:
    good = trial.spec("echo 1 > one", outputs=(OutputFile("one"),))
    bad = trial.spec("echo 2 > two; exit 3", outputs=(OutputFile("two"),))
    assert trial.run(good).returned == 0
    assert trial.run(bad).returned == 3
    assert refused(trial.run(trial.spec("touch ran", after=after(good, bad))))
    assert refused(trial.run(trial.spec("touch ran", after=after(bad, good))))


def test_one_that_lacks_an_output_is_no_predecessor(trial: Trial) -> None:
    first = trial.spec("touch one", outputs=(OutputFile("one"), OutputFile("two")))
    assert trial.run(first).sure.missing_outputs == ("two",)
    assert refused(trial.run(trial.spec("touch ran", after=after(first))))


def test_a_marker_without_lists_proves_nothing(trial: Trial) -> None:
    first = trial.spec("echo 1 > one", outputs=(OutputFile("one"),))
    trial.run(first)
    marker = trial.workspace / first.paths.marker(0)
    for content in (b"", b"owner=x\n", marker.read_bytes()[:100]):
        marker.write_bytes(content)
        assert refused(trial.run(trial.spec("touch ran", after=after(first))))


@pytest.mark.parametrize("size", [10, LARGE])
def test_it_does_not_run_with_another_content(trial: Trial, size: int) -> None:
    first = trial.spec(f"head -c {size} /dev/zero > one", outputs=(OutputFile("one"),))
    trial.run(first)
    one = trial.workspace / "one"
    before = one.stat()
    other = trial.write("other", "1" * size)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(one)
    ended = trial.run(trial.spec("touch ran", after=after(first)))
    assert (ended.sure.failed_step, ended.sure.missing_inputs) == ("inputs", ("one",))
    assert not (trial.workspace / "ran").exists()


def test_a_content_that_is_replaced_meanwhile_is_noticed(trial: Trial) -> None:
    first = trial.spec("echo 1 > one", outputs=(OutputFile("one"),))
    trial.run(first)
    second = trial.spec("echo 2 > new && mv new one", after=after(first))
    ended = trial.run(second)
    assert (ended.sure.failed_step, ended.sure.missing_inputs) == ("inputs", ("one",))


def test_many_files_are_found(trial: Trial) -> None:
    first = trial.spec(
        "mkdir d; for i in {1..1200}; do echo $i > d/$i; done",
        outputs=(OutputFile("d", directory=True),),
    )
    assert trial.run(first).returned == 0
    ended = trial.run(trial.spec("cat d/* | wc -l > n", after=after(first)))
    assert ended.returned == 0, ended.log
    assert (trial.workspace / "n").read_text() == "1200\n"
