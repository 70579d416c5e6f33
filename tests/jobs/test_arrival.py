"""A job that starts before its files have arrived waits for them, and no longer than allowed."""

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.jobs.paths import COMPLETE, bundle_done_path, bundle_path
from snakemake_executor_plugin_mantik.jobs.script import ARRIVAL, render_script
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec
from tests.support.trial import Ended, Trial, packed, wait_until

BUNDLE = "3/one"
COUNT = 3


def waiting(trial: Trial, arrival_s: int = 100, **values: object) -> JobSpec:
    """A job that reads what one bundle brings."""
    return trial.spec(
        "cat file > copy", bundles=(BUNDLE,), arriving=(BUNDLE,), arrival_s=arrival_s, **values
    )


def arrive(trial: Trial, count: int = COUNT) -> list[Path]:
    """All parts but the word that they are there."""
    return trial.upload_parts(BUNDLE, packed({"file": b"content\n" * 1000}), count)


def announce(parts: list[Path], *, more: int = 0) -> None:
    """Say that parts are there, or so many bytes more."""
    size = sum(part.stat().st_size for part in parts) + more
    (parts[0].parent / COMPLETE).write_text(f"{len(parts)} {size}\n")


def waits(trial: Trial, spec: JobSpec) -> bool:
    """Whether its script waits for its files just now."""
    state = trial.workspace / spec.paths.work / "marker/state"
    return state.exists() and "awaited=" in state.read_text().rpartition("step=")[2]


def gave_up(ended: Ended) -> bool:
    return ended.sure.failed_step == ARRIVAL and ended.sure.exit_code > 0


def test_it_waits_until_all_is_there(trial: Trial) -> None:
    spec = waiting(trial)
    process = trial.start(spec)
    wait_until(lambda: waits(trial, spec))
    parts = arrive(trial)
    part = parts[1].rename(parts[1].with_name("away"))
    announce([parts[0], part, parts[2]])
    assert process.poll() is None
    part.rename(parts[1])
    ended = trial.end(spec, process)
    assert ended.returned == 0, ended.log
    assert (trial.workspace / "copy").read_bytes() == b"content\n" * 1000
    assert ended.sure.awaited >= 2
    assert not parts[0].parent.exists(), "it would count twice"


def test_it_does_not_wait_for_what_is_there(trial: Trial) -> None:
    announce(arrive(trial))
    ended = trial.run(waiting(trial))
    assert (ended.returned, ended.sure.awaited) == (0, 0.0), ended.log


def test_parts_alone_are_not_all(trial: Trial) -> None:
    """The last one may be half there: only what comes after it says that it is whole."""
    arrive(trial)
    assert gave_up(trial.run(waiting(trial, arrival_s=1)))
    assert not (trial.workspace / "copy").exists()


@pytest.mark.parametrize("what", ["a part", "bytes", "the whole line"])
def test_the_word_alone_is_not_all(trial: Trial, what: str) -> None:
    """A file system of another node may show it before the parts."""
    parts = arrive(trial)
    announce(parts, more=what == "bytes")
    if what == "a part":
        parts[-1].unlink()
    elif what == "the whole line":
        (parts[0].parent / COMPLETE).write_text("")
    ended = trial.run(waiting(trial, arrival_s=1))
    assert gave_up(ended)
    assert 1 <= ended.sure.awaited < 60
    assert "is submitted again" in ended.log


def test_what_another_job_has_unpacked_is_there(trial: Trial) -> None:
    trial.write("file", "content\n")
    spec = waiting(trial)
    process = trial.start(spec)
    wait_until(lambda: waits(trial, spec))
    trial.write(bundle_done_path(BUNDLE), "")
    assert trial.end(spec, process).returned == 0


def test_what_was_withdrawn_is_not_waited_for(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snakemake_executor_plugin_mantik.jobs.script._GONE_S", 1)
    arrive(trial)
    spec = waiting(trial, arrival_s=10_000)
    process = trial.start(spec)
    wait_until(lambda: waits(trial, spec))
    shutil.rmtree(trial.workspace / bundle_path(BUNDLE))
    ended = trial.end(spec, process)
    assert gave_up(ended)
    assert "is not coming any more" in ended.log


def test_a_signal_ends_the_wait(trial: Trial) -> None:
    spec = waiting(trial)
    process = trial.start(spec)
    wait_until(lambda: waits(trial, spec))
    process.send_signal(signal.SIGTERM)
    sure = trial.end(spec, process).sure
    assert (sure.failed_step, sure.signal) == (ARRIVAL, "TERM")
    assert sure.awaited >= 2, "its walltime may have ended by it"


def test_secrets_do_not_outlast_it(trial: Trial) -> None:
    spec = waiting(trial, arrival_s=1, secrets=("TOKEN",))
    secrets = trial.write(spec.paths.secrets, "export TOKEN=x\n")
    assert gave_up(trial.run(spec))
    assert not secrets.exists()


def test_other_scripts_hold_nothing_of_it(trial: Trial) -> None:
    spec = waiting(trial)
    assert "_m_await_bundles" in render_script(spec)
    others = render_script(replace(spec, arriving=(), arrival_s=0))
    assert "await" not in others
    assert ARRIVAL not in others
