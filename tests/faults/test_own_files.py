"""A user's own files, while outputs stay at a site and each step of a process is its last."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SiteOption
from tests.faults.cell import SITE, Cell, cell_in, settings
from tests.support.workflows import FILES_STAY, UNTRACKED, WAIT_S, Ran, tells

SNAKEFILE = r"""
    import deadly

    localrules: all, here
    ROUND = open("round").read()

    rule all:
        input: "here.txt", "out/set.bin", "out/more", "out/used.bin"

    rule here:
        input: temp("data/a.txt"), "data/own", "out/used.bin", "out/more"
        output: "here.txt"
        params: ROUND
        shell: "cat {input[0]} {input[1]}/x.csv {input[2]} {input[3]}/made > {output}"

    rule make:
        input: "data/a.txt", "data/own", "data/big.bin"
        output: temp("out/passing.bin"), "out/set.bin", directory("out/more")
        params: ROUND
        shell:
            "cat {input[2]} > {output[0]}; cat {input[2]} {input[0]} > {output[1]};"
            " mkdir {output[2]}; echo {params} > {output[2]}/made"

    rule use:
        input: "out/passing.bin", "data/big.bin"
        output: "out/used.bin"
        shell: "tail -c 6000 {input[0]} > {output}"
"""

DEADLY = r'''
"""Kills the process before the first change of each kind that it makes in each directory."""

import os
import signal
import sys
from pathlib import Path

HERE = os.path.realpath(".")
DONE = Path(os.environ["MANTIK_TEST_DONE"])
done = set(DONE.read_text().splitlines()) if DONE.exists() else None
CHANGES = (
    "os.remove", "os.rename", "os.link", "os.rmdir", "os.symlink", "os.truncate", "os.utime",
    "os.chmod",
)


def where(path, directory):
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    base = os.readlink(f"/proc/self/fd/{directory}") if directory >= 0 else "."
    above = os.path.realpath(os.path.dirname(os.path.join(base, os.fsdecode(path))))
    found = os.path.relpath(above, HERE)
    inner = found.startswith(".snakemake") and not found.startswith(".snakemake/storage/")
    return None if inner or found.startswith("..") else found


def watch(event, args):
    if event == "open":
        if not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
        found = where(args[0], -1)
    elif event in CHANGES:
        two = event in ("os.rename", "os.link")
        directory = args[-1] if isinstance(args[-1], int) and event != "os.truncate" else -1
        found = where(args[1 if two else 0], directory)
    else:
        return
    if found is not None and (step := f"{event} in {found}") not in done:
        with DONE.open("a") as file:
            file.write(f"{step}\n")
        os.kill(os.getpid(), signal.SIGKILL)


if done is not None:
    sys.addaudithook(watch)
'''

CHANGES = 20
CHANGES_BY_GET = 2
"""So many kinds of changes, and directories of them, there are at least."""
PART = "mantik-part"
"""End of the names of files that are not whole yet."""
BROUGHT = "out/used.bin"
"""What `smk-mantik get` can bring: what else there is has the name of a file of the user's own."""

State = dict[str, tuple[int, int, bytes]]


class Own:
    """A workflow with files of the user's own, also where jobs have outputs.

    Attributes:
        cell: the workflow.
        done: a file of the changes at which a process was killed; none is, if it does not exist.
    """

    def __init__(self, cell: Cell, directory: Path) -> None:
        self.cell = cell
        self.done, self._elsewhere = directory / "done", directory / "elsewhere"
        self._round = 0
        project = cell.project
        cell.options = FILES_STAY
        project.extra |= UNTRACKED | {"MANTIK_TEST_DONE": str(self.done)}
        project.write("deadly.py", DEADLY)
        self._elsewhere.mkdir()
        (self._elsewhere / "z.csv").write_text("z\n")
        for name in (
            "data/own/x.csv", "data/own/.hidden", "out/notes.txt", "out/set.bin",
            "out/passing.bin", "out/more/1", "out/more/notes.txt",
        ):  # fmt: skip
            project.write(name, f"my own {name}\n").chmod(0o640)
        (project.directory / "data/own/linked").symlink_to(self._elsewhere)
        (project.directory / "data/own/z.csv").symlink_to(self._elsewhere / "z.csv")
        self._before = self._now()

    def _now(self) -> State:
        """The mode, the time and the content of each file."""
        found: State = {}
        directory = self.cell.project.directory
        for top in (directory / "data", directory / "out", self._elsewhere):
            for path in top.rglob("*"):
                link = path.is_symlink()
                if link or path.is_file():
                    content = os.fsencode(path.readlink()) if link else path.read_bytes()
                    status = path.lstat()
                    found[str(path)] = status.st_mode, status.st_mtime_ns, content
        return found

    def unharmed(self, said: str) -> None:
        """Check that each file is what it was, and that there is no other one beside it."""
        now = self._now()
        harmed = [path for path, state in self._before.items() if now.get(path) != state]
        assert not harmed, said
        more = [path for path in now if path not in self._before]
        assert all(path.endswith((BROUGHT, PART)) for path in more), (more, said)

    def anew(self) -> None:
        """Let all rules run again, whatever there is."""
        self._round += 1
        self.cell.project.write("round", str(self._round))

    def killed(self) -> bool:
        """Run once; return whether the run was killed. It harms nothing of the user's."""
        ran = self.cell.end(self.cell.start())
        self.unharmed(ran.output)
        assert ran.code in (0, -signal.SIGKILL), ran.output
        return ran.code != 0

    def run_until_done(self) -> int:
        """Run until a run is not killed, twice with all rules; return how many were killed."""
        kills = 0
        for _ in range(2):
            self.anew()
            while self.killed():
                kills += 1
            self.right()
        return kills

    def right(self) -> None:
        """Check the result of the last run."""
        directory = self.cell.project.directory
        big = (directory / "data/big.bin").read_bytes()
        parts = (b"seven\n", b"my own data/own/x.csv\n", big[-6000:], b"%d\n" % self._round)
        assert (directory / "here.txt").read_bytes() == b"".join(parts)

    def get(self, *targets: str) -> Ran:
        """Bring targets to this machine, by default all."""
        project = self.cell.project
        words = ["get", "--all-targets", "--", "--config", f"outside={self.cell.outside}"]
        words += [*FILES_STAY, "--", *targets]
        command = [sys.executable, "-m", "snakemake_executor_plugin_mantik", *words]
        done = subprocess.run(
            command,
            check=False,
            cwd=project.directory,
            env=project.environment,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        ran = Ran(done.returncode, done.stdout + done.stderr)
        self.unharmed(ran.output)
        return ran


@contextmanager
def own_files(api: str, directory: Path) -> Iterator[Own]:
    with (
        Sandbox(directory / "sandbox", [SiteOption(SITE, api)], settings(2)) as box,
        cell_in(box, SITE, api, directory, snakefile=SNAKEFILE) as cell,
    ):
        yield Own(cell, directory)


def test_killed_at_each_change_of_files(tmp_path: Path) -> None:
    """Before the first change of each kind in each directory; the next process goes on."""
    with own_files("unicore", tmp_path) as own:
        own.done.touch()

        assert own.run_until_done() > CHANGES

        own.done.write_text("")
        kills = 0
        while (ran := own.get(BROUGHT)).code == -signal.SIGKILL:
            kills += 1
        assert (ran.code, kills > CHANGES_BY_GET) == (0, True), ran.output
        assert own.cell.project.exists(BROUGHT)
        tells(own.get().output, "there are local files with other contents: out/more, out/set.bin.")
