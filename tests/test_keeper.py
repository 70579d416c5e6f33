import subprocess
import sys
from pathlib import Path

from tests.support.workflows import until

STARTS = """
import pathlib, subprocess, sys, time
from tests.support.keeper import killed_with_this_process
directory = pathlib.Path(sys.argv[1])
with killed_with_this_process(directory.parent):
    left = subprocess.Popen(["sleep", "1000"], cwd=directory, start_new_session=True)
    print(left.pid, flush=True)
    time.sleep(1000)
"""


def test_what_tests_start_ends_when_they_are_killed(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    words = [sys.executable, "-c", STARTS, str(tmp_path / "server")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1]) as tests:
        assert tests.stdout is not None
        left = int(tests.stdout.readline())
        tests.kill()
    # It is nobody's child now: whoever takes it in may leave a zombie, which works nowhere.
    cwd = Path(f"/proc/{left}/cwd")
    until(lambda: not works_in(cwd, tmp_path), "its end")


def works_in(cwd: Path, directory: Path) -> bool:
    try:
        return cwd.readlink().is_relative_to(directory)
    except OSError:
        return False
