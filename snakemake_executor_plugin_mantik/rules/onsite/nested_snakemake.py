"""Run one job of a workflow with the Snakemake of a site.

This file reads the order of `rules/kinds/nested_snakemake.py` (JSON) from standard input, finds
a Python with a fitting Snakemake, continues there if it is another one, and runs that Snakemake in
its own process. It supports Python 3.7, because the first Python on a node may be an old one.

It changes Snakemake in its process, because not everything on the user's machine is at a site:

- Rules other than the job's are left out also if a workflow has checkpoints, because their inputs
  are not at the site. The order lists the outputs of finished checkpoints.
- The job must have the same files as on the user's machine. A Snakefile that searches for files
  (`glob_wildcards`) finds those of the site, and a job with half its inputs would succeed.
- A workflow with `workdir:` is read in the directory that the user's Snakemake was started in, as
  far as it was uploaded: paths before that directive are relative to it. `workdir:` enters the
  workspace.
- Sources outside the workspace come from a cache that is filled before.
- Files of a storage are replaced by their local copies: a node has neither credentials nor access,
  and the user's machine fetches and stores. If the job does this itself, it has its own copies.
- Only one job at a time makes environments of rules: Snakemake assumes that it is the only process.
- The document of a `cwl:` rule has the address that Snakemake uses from Python 3.14 on. Before, it
  is `file:/…`, which cwltool refuses.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any
from urllib.parse import quote

UNFIT = 78
"""Exit code if no Snakemake fits (EX_CONFIG of sysexits.h)."""

LACK = "mantik: there is no fitting Snakemake:"
"""Prefix of the message that no Snakemake fits."""

_ASK = """\
import sys
try:
    from importlib.metadata import version
    print(version("snakemake"))
except Exception:
    print("")
"""


def fits(found: str, wanted: str) -> bool:
    """Return whether Snakemake `found` can replace `wanted`: same major, no older minor release.

    A newer minor release runs workflows of older ones. An older one lacks new features. Patch
    releases do not count.
    """
    try:
        there, here = ([int(part) for part in text.split(".")[:2]] for text in (found, wanted))
    except ValueError:
        return False
    return there[0] == here[0] and there >= here


def snakemake_version(python: str) -> str:
    """Return the version of Snakemake in a Python's environment, empty if not installed."""
    try:
        answer = subprocess.run([python, "-c", _ASK], stdout=subprocess.PIPE, check=False)
    except OSError:
        return ""
    return answer.stdout.decode(errors="replace").strip()


def main() -> None:
    """Find a fitting Snakemake and run the job."""
    text = sys.stdin.read()
    order = json.loads(text)
    wanted = order["snakemake"]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    found = {sys.executable: snakemake_version(sys.executable)}
    if fits(found[sys.executable], wanted):
        run_nested(order)
    for name in [*order["pythons"]]:
        python = shutil.which(name)
        if python is None or python in found:
            continue
        found[python] = snakemake_version(python)
        if fits(found[python], wanted):
            _become(python, text)
    _unfit(order, found)


def _become(python: str, text: str) -> None:
    """Replace this process by one that runs this file with another Python."""
    with tempfile.TemporaryFile() as handed:
        handed.write(text.encode())
        handed.seek(0)
        os.dup2(handed.fileno(), 0)
    sys.stdout.flush()
    os.execv(python, [python, os.path.abspath(__file__)])  # noqa: S606 - it takes this one's place


def _unfit(order: dict[str, Any], found: dict[str, str]) -> None:
    seen = ", ".join(
        f"{python} has {'Snakemake ' + version if version else 'none'}"
        for python, version in found.items()
    )
    wanted = order["snakemake"]
    needed = f"{wanted} or a newer {wanted.split('.')[0]}.x is needed"
    _lack(f"{needed}; {seen}. {order['do']}")


def _lack(what: str) -> None:
    """Exit, and record for the job's marker that the job failed before its command."""
    sys.stderr.write(f"{LACK} {what}\n")
    # A container may not have the directory of `MANTIK_STATE`.
    place = os.environ.get("MANTIK_STATE", os.devnull)
    with contextlib.suppress(OSError), open(place, "a") as state:
        state.write("step=own\n")
    sys.exit(UNFIT)


def run_nested(order: dict[str, Any]) -> None:
    """Run the job with the Snakemake of this Python, and exit with its code."""
    for package in order["packages"]:
        _require(package, order)
    copies = order["copies"]
    if copies:
        copies["there"] = there = os.path.expandvars(copies["there"])
        shutil.rmtree(there, ignore_errors=True)  # left over from an attempt that was killed
        order["arguments"][:0] = ["--local-storage-prefix", there]
        for kind in ("input", "output", "checkpointed"):
            order[kind] = [moved(path, copies["here"], there) for path in order[kind]]
    # Snakemake migrates a directory with `metadata` but no `incomplete`, as from an old release.
    # Several jobs that migrate it at the same time would conflict.
    os.makedirs(os.path.join(".snakemake", "incomplete"), exist_ok=True)
    sys.path[0] = os.getcwd()  # as `python -m snakemake` has it
    sys.argv = ["snakemake", *order["arguments"]]
    cache = tempfile.mkdtemp(prefix="mantik-sources-")
    sys.argv[1:1] = ["--runtime-source-cache-path", cache]
    # Import this module first: Snakemake's modules import each other, and only this order works.
    from snakemake.cli import main as snakemake

    try:
        _fill(cache, order["cache"])
        _adapt(order)
        snakemake(sys.argv[1:])
    finally:
        sys.stdout.flush()
        shutil.rmtree(cache, ignore_errors=True)
        if copies:
            shutil.rmtree(copies["there"], ignore_errors=True)


def _require(package: str, order: dict[str, Any]) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        needed = f"its Python, {sys.executable}, has no {package}, which the workflow uses"
        _lack(f"{needed}. {order['do']}")


def _fill(cache: str, entries: dict[str, str]) -> None:
    """Copy sources to their paths in Snakemake's source cache."""
    for entry, path in entries.items():
        target = os.path.join(cache, entry)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(path, target)


def _adapt(order: dict[str, Any]) -> None:
    """Change Snakemake as described in the docstring of this module."""
    from snakemake import cwl, sourcecache, storage
    from snakemake.checkpoints import Checkpoints
    from snakemake.dag import DAG
    from snakemake.deployment import conda, singularity
    from snakemake.exceptions import WorkflowError
    from snakemake.jobs import Job
    from snakemake.workflow import Workflow

    split_git_path = sourcecache.split_git_path
    flag = storage.flag_with_storage_object
    make_dag, make_checkpoints, prepare = DAG.__init__, Checkpoints.__init__, Job.prepare
    names = set(order["rules"])

    def only_requested(self: Any, workflow: Any, rules: Any, *args: Any, **more: Any) -> None:
        make_dag(self, workflow, [rule for rule in rules if rule.name in names], *args, **more)

    def with_made(self: Any) -> None:
        make_checkpoints(self)
        self._created_output.update(order["checkpointed"])

    def split(path: str) -> Any:
        """Split a path without looking for its repository on the disk: its files are cached."""
        file, _, revision = re.sub("^git[+]file:/+", "/", path).rpartition("@")
        for root in order["repositories"]:
            if file.startswith(f"{root}/"):
                return root, file[len(root) + 1 :], revision
        return split_git_path(path)

    def local(path: Any, stored: Any) -> Any:
        flagged = flag(path, stored)
        if stored.retrieve:
            del flagged.flags["storage_object"]
        return flagged

    async def compared(self: Any) -> None:
        for kind in ("input", "output"):
            difference = differing(kind, list(map(str, getattr(self, kind))), order[kind])
            if difference:
                raise WorkflowError(difference, rule=self.rule)
        await prepare(self)

    def address(path: str) -> str:
        return f"//{quote(os.fsencode(path))}"

    def never(self: Any) -> bool:  # noqa: ARG001
        return False

    DAG.__init__, Checkpoints.__init__, Job.prepare = only_requested, with_made, compared
    if order["beginning"]:
        _read_in(order["beginning"], Workflow)
    sourcecache.HostingProviderFile.is_persistently_cacheable = never
    sourcecache.split_git_path = split
    cwl.pathname2url = address
    if not order["copies"]:
        storage.flag_with_storage_object = local
    for kind, act in ((conda.Env, "create"), (singularity.Image, "pull")):
        setattr(kind, act, one_at_a_time(getattr(kind, act)))


def _read_in(beginning: str, kind: Any) -> None:
    """Let Snakemake's `Workflow` read the Snakefiles in the directory `beginning`."""
    include, workspace = kind.include, os.getcwd()
    begun: list[Any] = []

    def included(self: Any, *args: Any, **more: Any) -> None:
        if begun:
            include(self, *args, **more)
            return
        begun.append(self)
        os.makedirs(beginning, exist_ok=True)
        os.chdir(beginning)
        try:
            include(self, *args, **more)
        finally:
            os.chdir(workspace)

    def enter(self: Any, workdir: str) -> None:  # noqa: ARG001
        os.chdir(workspace)

    kind.include, kind.workdir = included, enter


def one_at_a_time(act: Any) -> Any:
    """Wrap `act` in a lock, so that only one job of the workspace runs it at a time.

    On a file system without locks, several may.
    """

    def locked(*args: Any, **more: Any) -> Any:
        with open(os.path.join(".snakemake", "mantik.lock"), "a") as lock:
            with contextlib.suppress(OSError):  # on a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            return act(*args, **more)

    return locked


def moved(path: str | None, here: str, there: str) -> str | None:
    """Return a path, moved below the directory `there` if it is below `here`."""
    if path is None or not path.startswith(f"{here}/"):
        return path
    return there + path[len(here) :]


def differing(kind: str, there: list[str], here: list[str | None]) -> str:
    """Return an error if a job has other files at the site than on the user's machine, else ''.

    None stands for a file that each Snakemake has in its own source cache.
    """
    own = {number for number, path in enumerate(here) if path is None}
    theirs = [path for number, path in enumerate(there) if number not in own]
    ours = [path for path in here if path is not None]
    if theirs == ours:
        return ""
    lacking = [path for path in ours if path not in theirs]
    more = [path for path in theirs if path not in ours]
    what = "is in another order"
    if lacking:
        what = "lacks " + ", ".join(lacking[:5]) + (", …" if len(lacking) > 5 else "")
    elif more:
        what = "has also " + ", ".join(more[:5]) + (", …" if len(more) > 5 else "")
    return (
        f"the job's {kind} at the site {what}. It depends on something that is different there: a"
        " Snakefile that searches for files (glob_wildcards, os.listdir) finds those of the site."
        " Read the list from a file instead, such as a sample sheet or a config"
    )


if __name__ == "__main__":
    main()
