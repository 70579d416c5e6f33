"""An HPC centre on this machine: a Slurm of two nodes, and servers of both APIs in front of it.

Slurm, the TSI, sshd and firecREST are the real ones. Jobs run as a user without privileges. All
workers of a test session share one centre (`python -m tests.real.centre`); what a test stops or
kills is a server of its own in front of the same Slurm.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.real.slurm import lacking as slurm_lacking

USER = "mantik-user"
"""The login name that jobs run as; tests/real/install makes it."""
SERVERS = Path(
    os.environ.get("MANTIK_TEST_SERVERS")
    or Path(__file__).parents[3] / ".cache" / "real" / "servers"
)
"""Where the project files of the servers are that no package registry has: `tsi`, `firecrest-v2`.

tests/real/install fetches them there unless MANTIK_TEST_SERVERS names another directory.
"""


def lacking() -> list[str]:
    found = slurm_lacking()
    try:
        pwd.getpwnam(USER)
    except KeyError:
        found.append(f"the user {USER}")
    for name in ("tsi", "firecrest-v2"):
        if not (SERVERS / name).is_dir():
            found.append(f"{SERVERS / name}")
    return found


@dataclass(frozen=True)
class Centre:
    """A centre that runs.

    Attributes:
        directory: holds all of its files; everybody may enter it.
        scratch: the directory in which the user works.
    """

    directory: Path

    @property
    def scratch(self) -> Path:
        return self.directory / "scratch"

    @property
    def environment(self) -> Mapping[str, str]:
        """What leads Slurm's commands to the centre's Slurm."""
        return {"SLURM_CONF": str(self.directory / "slurm" / "slurm.conf")}

    def queued(self, site_jobs: Iterable[str]) -> list[str]:
        """The scheduler's ids of those of a site's jobs that wait or run, by its own word.

        It knows UNICORE's jobs by their directories, firecREST's by their ids.
        """
        asked = subprocess.run(
            ["squeue", "--noheader", "--format=%i %Z"], env={**os.environ, **self.environment},
            capture_output=True, text=True, check=True, timeout=600,
        )  # fmt: skip
        known = set(site_jobs)
        lines = [line.split(" ", 1) for line in asked.stdout.splitlines()]
        return [job for job, directory in lines if known & {job, Path(directory).name}]


@contextmanager
def open_directory() -> Iterator[Path]:
    """A directory that the user may write to, which pytest's own ones are not."""
    directory = Path(tempfile.mkdtemp(prefix="mantik-outside-"))
    directory.chmod(0o777)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
