"""Ends what tests have started, even if their process is killed."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_KEEPER = """
read -r said && exit
for process in /proc/[0-9]*; do
  case $(readlink "$process/cwd") in "$1"/*) kill -9 "${process#/proc/}" ;; esac
done
"""


@contextmanager
def killed_with_this_process(directory: Path) -> Iterator[None]:
    """Have what works below `directory` killed if this process ends before the block does.

    These are servers, jobs of sandboxes, and controllers that are meant to outlive a Snakemake.
    """
    command = ["sh", "-c", _KEEPER, "sh", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as keeper:
        yield
        keeper.communicate(b"the block has ended\n")
