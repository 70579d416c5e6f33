"""Servers that tests start end with the tests, however these end."""

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.sandbox import wait_for

STARTS = """
import sys
from pathlib import Path
from tests.support.daemons import Daemon

here = Path(sys.argv[1])
forking = "sleep 1000 & echo $$ $! >> pids; wait"
Daemon(["bash", "-c", forking], here, here / "console", forks=True).start()
Daemon(["bash", "-c", "echo $$ >> pids; exec sleep 1000"], here, here / "console").start()
sys.stdin.read()
"""


def runs(pid: str) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_servers_of_a_killed_process_end(number: signal.Signals, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    checkout = Path(__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", STARTS, tmp_path], stdin=subprocess.PIPE, cwd=checkout
    ) as process:
        started = wait_for(
            lambda: found if pids.exists() and len(found := pids.read_text().split()) == 3 else []
        )
        assert all(map(runs, started))
        process.send_signal(number)
    wait_for(lambda: not any(map(runs, started)))
