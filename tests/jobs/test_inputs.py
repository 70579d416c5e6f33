"""A job computes with the content that it was sent for, or does not compute."""

import hashlib
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.jobs.paths import PLACE
from snakemake_executor_plugin_mantik.jobs.spec import Environment, InputFile, JobSpec, OutputFile
from tests.support.trial import NASTY, Ended, Trial, packed

PATHS = ["data/x", NASTY, "-x", "a]b[c", "*", "back\\slash", "new\nline"]
LARGE = (1 << 20) + 1


def sent(path: str, content: bytes, *, changed: bool = False) -> InputFile:
    digest = hashlib.sha256(content).hexdigest()
    return InputFile(path, len(content), sha256=digest, changed=changed)


def ran(trial: Trial) -> bool:
    return (trial.workspace / "ran").exists()


def job(trial: Trial, *inputs: InputFile, command: str = ":", **values: object) -> JobSpec:
    return trial.spec(f"touch ran; {command}", inputs=inputs, **values)


def assert_changed(ended: Ended, *paths: str) -> None:
    """It says which inputs are others."""
    assert ended.sure.exit_code == 1
    assert ended.sure.failed_step == "inputs"
    assert set(ended.sure.missing_inputs) == set(paths)


def test_another_content_of_the_same_size_is_seen(trial: Trial) -> None:
    inputs = [sent(path, b"new!") for path in PATHS]
    for path in PATHS:
        trial.write(path, "old!")
    assert_changed(trial.run(job(trial, *inputs)), *PATHS)
    assert not ran(trial)
    for path in PATHS:
        trial.write(path, "new!")
    assert trial.run(job(trial, *inputs)).sure.exit_code == 0
    assert ran(trial)


def test_of_many_those_that_are_others_are_told(trial: Trial) -> None:
    contents = {f"d/{n}": f"{n:5}" for n in range(1203)}
    for path, content in contents.items():
        trial.write(path, content)
    others = ["d/3", "d/499", "d/500", "d/1202"]
    inputs = [
        sent(path, b"other" if path in others else text.encode()) for path, text in contents.items()
    ]
    assert_changed(trial.run(job(trial, *inputs)), *others)


def test_one_that_cannot_be_read_is_no_success(trial: Trial) -> None:
    trial.write("a", "a")
    trial.write("b", "b")
    trial.checksums("test $# = 2 || exit 1\n")
    assert_changed(trial.run(job(trial, sent("a", b"a"), sent("b", b"b"))), "a", "b")


@pytest.mark.parametrize("code", [0, 3])
def test_input_that_is_replaced_while_the_command_runs(trial: Trial, code: int) -> None:
    """As a job does that brings another content."""
    command = ""
    for number, path in enumerate(PATHS):
        trial.write(path, "old!")
        trial.write(f"new-{number}", "new!")
        command += f"mv -f -- new-{number} {shlex.quote(path)}; "
    inputs = [sent(path, b"old!") for path in PATHS]
    assert_changed(trial.run(job(trial, *inputs, command=f"{command}exit {code}")), *PATHS)
    assert ran(trial)


@pytest.mark.parametrize(
    "command",
    [
        "cp -- x y; mv -f -- y x",  # another file, the same content
        "echo more >> x",  # what the command does to it itself
        "rm x",
    ],
)
def test_input_that_no_other_content_came_for(trial: Trial, command: str) -> None:
    trial.write("x", "old!")
    assert trial.run(job(trial, sent("x", b"old!"), command=command)).sure.exit_code == 0


@pytest.mark.parametrize("what", ["rm -r d/x", "rm -r d", "echo more > d/x"])
def test_input_that_disappears_before_the_command_starts(trial: Trial, what: str) -> None:
    """An environment takes minutes to make; a command may pass over what is gone meanwhile."""
    trial.write("d/x", "old!")
    trial.write("d/y", "old!")
    trial.write("own", "old!")
    inputs = sent("d/x", b"old!"), sent("d/y", b"old!"), sent("own", b"old!", changed=True)
    hook = f"set -eu; rm own; IFS=x; cd /; cd - > /dev/null; {what}; cd /"
    spec = job(trial, *inputs, environment=Environment(before_on_compute=(hook,)))
    ended = trial.run(spec)
    assert_changed(ended, *(["d/x", "d/y"] if what == "rm -r d" else ["d/x"]))
    assert "these inputs have disappeared or changed since the job started" in ended.log
    assert not ran(trial)


def test_one_that_is_gone_hides_no_other_that_was_replaced(trial: Trial) -> None:
    for path in ("x", "z"):
        trial.write(path, "old!")
    command = "rm x; echo new! > y; mv -f y z"
    assert_changed(
        trial.run(job(trial, sent("x", b"old!"), sent("z", b"old!"), command=command)), "z"
    )


def test_what_a_job_updates_is_compared_before_it_starts_only(trial: Trial) -> None:
    trial.write("x", "old!")
    spec = job(
        trial, sent("x", b"old!", changed=True), command="echo new > y; mv -f y x",
        outputs=(OutputFile("x", keep=True),),
    )  # fmt: skip
    assert trial.run(spec).sure.exit_code == 0
    again = replace(spec, paths=replace(spec.paths, attempt_id=trial.spec().paths.attempt_id))
    assert_changed(trial.run(again), "x")


@pytest.mark.parametrize("how", ["inline", "bundle"])
def test_older_content_is_left_for_a_newer_one(trial: Trial, how: str) -> None:
    def brings(content: bytes, number: int) -> JobSpec:
        bundle = packed({**dict.fromkeys(PATHS, content), "other": b"o"})
        numbers = dict.fromkeys(PATHS, number) if number else {}
        spec = job(trial, *(sent(path, content) for path in PATHS), numbers=numbers)
        if how == "inline":
            return replace(spec, inline=bundle)
        trial.upload(f"17/{number}", bundle)
        return replace(spec, bundles=(f"17/{number}",))

    def marks() -> set[str]:
        return {(trial.workspace / f".mantik/newer/{path}.n").read_text() for path in PATHS}

    assert trial.run(brings(b"0000", 0)).sure.exit_code == 0
    assert not (trial.workspace / ".mantik/newer").exists(), "most contents have no number"
    assert trial.run(brings(b"2222", 2)).sure.exit_code == 0
    assert marks() == {"2\n"}
    (trial.workspace / "other").unlink()
    for number, content in ((1, b"1111"), (0, b"0000")):
        trial.workspace.joinpath(f".mantik/bundles/17/{number}.done").unlink(missing_ok=True)
        assert_changed(trial.run(brings(content, number)), *PATHS)
        assert {(trial.workspace / path).read_bytes() for path in PATHS} == {b"2222"}
    assert (trial.workspace / "other").exists(), "what has no newer content comes"
    assert trial.run(brings(b"3333", 3)).sure.exit_code == 0
    assert marks() == {"3\n"}


# Large inputs


@pytest.fixture
def reads(trial: Trial) -> Path:
    """What `sha256sum` was given to read, one a line."""
    log = trial.workspace.parent / "read"
    log.touch()
    trial.checksums(f'stat -L -c %s -- "${{2-/dev/stdin}}" >> {log}\n')
    return log


def large(trial: Trial, path: str, byte: bytes = b"x") -> InputFile:
    trial.write(path).write_bytes(byte * LARGE)
    return sent(path, byte * LARGE)


def test_large_input_is_read_once(trial: Trial, reads: Path) -> None:
    inputs = [large(trial, path) for path in PATHS]
    for _ in range(2):
        assert trial.run(job(trial, *inputs)).sure.exit_code == 0
    assert reads.read_text() == f"{LARGE}\n" * len(PATHS)


@pytest.mark.parametrize("how", ["in place", "replaced", "linked"])
def test_large_input_of_the_same_size_and_time_is_read(trial: Trial, reads: Path, how: str) -> None:
    spec = large(trial, "x")
    assert trial.run(job(trial, spec)).sure.exit_code == 0
    path = trial.workspace / "x"
    before = path.stat()
    match how:
        case "in place":
            path.write_bytes(b"y" * LARGE)
        case "replaced":
            trial.write("y").write_bytes(b"y" * LARGE)
            (trial.workspace / "y").replace(path)
        case _:
            trial.write("y").write_bytes(b"y" * LARGE)
            path.unlink()
            path.symlink_to("y")
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert_changed(trial.run(job(trial, spec)), "x")
    assert reads.read_text() == f"{LARGE}\n" * 2, "once, however long it waits for slow disks"


@pytest.mark.parametrize("inline", [True, False])
def test_large_input_that_has_just_been_unpacked_need_not_be_read(
    trial: Trial, reads: Path, inline: bool
) -> None:
    content = os.urandom(LARGE)
    bundle = packed({"d/x": content})
    spec = job(trial, sent("d/x", content), inline=bundle if inline else b"")
    if not inline:
        trial.upload("17/1", bundle)
        spec = replace(spec, bundles=("17/1",))
    assert trial.run(spec).sure.exit_code == 0
    assert reads.read_text() == ""
    assert trial.run(job(trial, sent("d/x", content))).sure.exit_code == 0
    assert reads.read_text() == ""


def test_large_input_from_another_place_is_read_once(trial: Trial, reads: Path) -> None:
    content, other = os.urandom(LARGE), os.urandom(LARGE)
    trial.upload("17/1", packed({"d/x": content}))
    moved = replace(sent("d/x", content), moved=True)
    for _ in range(2):
        spec = replace(job(trial, moved), bundles=("17/1",))
        assert trial.run(spec).sure.exit_code == 0
        assert reads.read_text() == f"{LARGE}\n"
    trial.upload("17/2", packed({"d/y": other}))
    damaged = replace(sent("d/y", content), moved=True)
    assert_changed(trial.run(replace(job(trial, damaged), bundles=("17/2",))), "d/y")


def test_large_output_is_read_by_its_maker_only(trial: Trial, reads: Path) -> None:
    command = f"head -c {LARGE} /dev/zero > out"
    assert trial.run(job(trial, command=command, outputs=(OutputFile("out"),))).sure.exit_code == 0
    assert (trial.workspace / ".mantik/known/out.k").exists()
    read = reads.read_text()
    assert trial.run(job(trial, sent("out", bytes(LARGE)))).sure.exit_code == 0
    assert reads.read_text() == read


# Who leads


def lease(trial: Trial, term: int) -> None:
    trial.write(f"{PLACE}/{term}.{'a' * 32}.{'b' * 16}.{'c' * 16}.60")


def test_job_of_a_former_controller_does_not_start(trial: Trial) -> None:
    lease(trial, 3)
    old, known, present = (job(trial, term=term) for term in (2, 2, 3))
    trial.write(f"{PLACE}/known.3", f"{known.paths.attempt_id}\n")
    ended = trial.run(old)
    assert (ended.returned, ended.marker, ran(trial)) == (0, None, False)
    assert not (trial.workspace / old.paths.claim).exists()
    for spec in (known, present):
        assert trial.run(spec).sure.exit_code == 0


def test_job_starts_where_a_centre_has_removed_the_lease(trial: Trial) -> None:
    assert trial.run(job(trial, term=1)).sure.exit_code == 0
