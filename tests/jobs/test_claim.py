"""Of all starts of an attempt one runs, whatever happens."""

import posixpath
import shutil
import signal

import pytest

from snakemake_executor_plugin_mantik.jobs.library import library_path, read_library
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from tests.support.trial import Trial, signal_session, wait_until

COUNT = "echo ran >> runs"


@pytest.mark.parametrize("links", [True, False])
def test_of_many_starts_exactly_one_runs(trial: Trial, links: bool) -> None:
    gate = trial.start_folder / "gate"
    if not links:  # all are there before one goes on without
        all_there = f'[ "$(ls {gate} | wc -l)" -ge 20 ]'
        wait = f"mkdir -p {gate}; : > {gate}/$PPID; until {all_there}; do sleep 0.02; done"
        trial.program("ln", f"#!/bin/sh\n{wait}\nexit 1\n")
    for _ in range(3):
        shutil.rmtree(gate, ignore_errors=True)
        spec = trial.spec(COUNT)
        runs = trial.workspace / "runs"
        runs.unlink(missing_ok=True)
        started = [trial.start(spec) for _ in range(20)]
        ended = [trial.end(spec, process) for process in started]
        assert [one.returned for one in ended] == [0] * 20
        assert runs.read_text() == "ran\n"
        uuid = spec.paths.attempt_id
        assert [name for name in ended[-1].entries if name.startswith(uuid)] == [uuid, f"{uuid}.0"]


def test_a_link_that_tells_of_a_failure_after_it_was_made_counts(trial: Trial) -> None:
    trial.program("ln", '#!/bin/sh\n/bin/ln "$@"\nexit 1\n')
    assert trial.run(trial.spec("exit 3")).sure.exit_code == 3


def test_a_revoked_attempt_touches_nothing(trial: Trial) -> None:
    trial.write("out", "old")
    spec = trial.spec(COUNT, outputs=(OutputFile("out"),))
    (trial.attempts / spec.paths.attempt_id).mkdir()
    ended = trial.run(spec)
    assert ended.returned == 0
    assert ended.marker is None
    assert ended.entries == (spec.paths.attempt_id,)
    assert not (trial.workspace / "runs").exists()
    assert (trial.workspace / "out").read_text() == "old"
    assert not (trial.workspace / spec.paths.work).exists()


def test_a_stray_after_the_end_touches_nothing(trial: Trial) -> None:
    spec = trial.spec(f"{COUNT}; echo new > out", outputs=(OutputFile("out"),))
    first = trial.run(spec)
    trial.write("out", "of a successor")
    again = trial.run(spec)
    assert (first.returned, again.returned) == (0, 0)
    assert (trial.workspace / "runs").read_text() == "ran\n"
    assert (trial.workspace / "out").read_text() == "of a successor"
    assert again.entries == first.entries
    assert again.log == first.log


def test_the_claim_tells_who_has_it_and_grows(trial: Trial) -> None:
    spec = trial.spec("until [ -e go ]; do sleep 0.05; done")
    claim = trial.workspace / spec.paths.claim
    process = trial.start(spec, env={"SLURM_JOB_ID": "4711"})
    wait_until(lambda: claim.exists() and claim.read_text().endswith("..\n".strip()))
    lines = dict(line.partition("=")[::2] for line in claim.read_text().splitlines())
    trial.write("go")
    ended = trial.end(spec, process)
    assert lines["scheduler_job"] == "4711"
    assert lines["site_job"] == "job-17"
    assert lines["owner"]
    assert lines["host"]
    assert ended.sure.scheduler_job == "4711"
    assert ended.sure.site_job == "job-17"
    assert ended.sure.host == lines["host"]
    assert [name for name in ended.entries if ".by-" in name] == []


def test_a_workspace_that_is_gone_is_left_alone(trial: Trial) -> None:
    spec = trial.spec(COUNT)
    trial.attempts.rmdir()
    process = trial.start(spec)
    output, _ = process.communicate(timeout=600)
    assert (process.returncode, output) == (0, "")
    names = {path.name for path in trial.workspace.rglob("*")}
    assert names == {".mantik", "attempts", posixpath.basename(library_path())}


@pytest.mark.parametrize("lost", ["all", "half", "end", "a letter"])
def test_without_its_library_nothing_runs(trial: Trial, lost: str) -> None:
    library = trial.workspace / library_path()
    content = read_library()
    if lost == "all":
        library.unlink()
    elif lost == "a letter":
        library.write_bytes(content.replace(b"_m_main() {", b"_m_mail() {"))
    else:
        end = len(content) // 2 if lost == "half" else content.index(b"\n_m_main() {")
        library.write_bytes(content[:end])
    ended = trial.run(trial.spec(COUNT))
    assert (ended.returned, ended.entries) == (0, ())  # as after a purge of the workspace
    assert f"no whole {library_path()} in" in ended.output


def test_a_claim_of_nobody_is_not_taken_for_ones_own(trial: Trial) -> None:
    """Where the disk is full the link has no content."""
    trial.program("ln", '#!/bin/sh\nfor last; do :; done\n: > "$last"\nexit 0\n')
    trial.program("sleep", "#!/bin/sh\nexit 0\n")
    spec = trial.spec(COUNT)
    ended = trial.run(spec)
    assert ended.returned == 75
    assert "cannot claim" in ended.output
    assert not (trial.workspace / "runs").exists()


@pytest.mark.parametrize("others", [0, 3, 12])
def test_revocation_that_races_many_starts(trial: Trial, others: int) -> None:
    """Either nothing runs, or one does and the controller hears of it: it cannot revoke."""
    calls = trial.start_folder / "calls"
    trial.program("ln", f'#!/bin/sh\necho x >> {calls}\nexec /bin/ln "$@"\n')
    spec = trial.spec(COUNT)
    claim = trial.workspace / spec.paths.claim
    started = [trial.start(spec) for _ in range(12)]
    wait_until(lambda: (calls.read_text().count("x") if calls.exists() else 0) >= others)
    try:
        claim.mkdir()
        revoked = True
    except FileExistsError:
        revoked = False
    ended = [trial.end(spec, process) for process in started]
    runs = trial.workspace / "runs"
    assert [one.returned for one in ended] == [0] * 12
    assert claim.is_dir() == revoked
    assert (runs.read_text() if runs.exists() else "") == ("" if revoked else "ran\n")
    assert ended[-1].entries[1:] == (() if revoked else (f"{spec.paths.attempt_id}.0",))


def test_late_strays_after_a_successor(trial: Trial) -> None:
    """One whose first start died without a word, one that was revoked: both start once more."""
    outputs = (OutputFile("out"),)
    lost = trial.spec("echo lost > out; sleep 60", outputs=outputs)
    revoked = trial.spec("echo revoked > out", outputs=outputs)
    first = trial.start(lost)
    wait_until((trial.workspace / "out").exists)
    signal_session(first.pid, signal.SIGKILL)
    first.communicate()
    (trial.workspace / revoked.paths.claim).mkdir()

    successor = trial.spec(
        "echo mine > out; : > begun; until [ -e go ]; do sleep 0.02; done; cat out > seen",
        outputs=outputs,
    )
    process = trial.start(successor)
    wait_until((trial.workspace / "begun").exists)
    during = [trial.run(lost), trial.run(revoked)]
    trial.write("go")
    ended = trial.end(successor, process)
    after = [trial.run(lost), trial.run(revoked)]

    assert [stray.returned for stray in (*during, *after)] == [0] * 4
    assert [stray.marker for stray in (*during, *after)] == [None] * 4
    assert ended.sure.exit_code == 0
    assert (trial.workspace / "seen").read_text() == "mine\n"
    assert (trial.workspace / "out").read_text() == "mine\n"
