"""Locks, with real processes that hold them."""

import fcntl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.locks import is_locked, take_lock

HOLD = """
import sys
from snakemake_executor_plugin_mantik.common.locks import take_lock
with open(sys.argv[1], "ab") as file:
    print(take_lock(file), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator["tuple[Path, subprocess.Popen[bytes]]"]:
    path = tmp_path / "lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"True\n"
    yield path, process
    process.kill()
    process.communicate()


def test_one_holds_until_it_is_killed(held: "tuple[Path, subprocess.Popen[bytes]]") -> None:
    path, process = held
    assert is_locked(path)
    with path.open("ab") as file:
        assert not take_lock(file)
        process.kill()
        process.wait()
        assert not is_locked(path)
        assert take_lock(file)
        assert is_locked(path)
    assert not is_locked(path)


def test_a_lock_that_was_never_made_is_free_and_is_not_made(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "lock")
    assert not (tmp_path / "lock").exists()


def test_whoever_looks_does_not_turn_away_whoever_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open("rb") as looking, path.open("ab") as file:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not is_locked(path), "many may look at once"
        # Looking ends while the other one pauses.
        monkeypatch.setattr(time, "sleep", lambda _: looking.close())
        assert take_lock(file)
