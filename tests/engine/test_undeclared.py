"""New files that no rule declares: recorded and reported once, whatever lies here."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.engine.request import JobRequest, NamedPaths
from snakemake_executor_plugin_mantik.engine.undeclared import UndeclaredFiles, list_brought
from snakemake_executor_plugin_mantik.jobs.markers import Marker, OutputEntry
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.journal import (
    AttemptRecord,
    AttemptState,
    FileRecord,
    Journal,
    read_undeclared,
)
from tests.support.controller import request
from tests.support.stagers import context_of

RECORD = AttemptRecord(
    id="3f0d7a6c-0000-4000-8000-000000000001", site="sim", bucket=0, job="j", rule="r", name="r",
    fingerprint="f", state=AttemptState.SUBMITTED, place="here",
)  # fmt: skip
LONG_AGO_NS = 1_000_000_000 * 10**9


class Bench:
    """A job that has succeeded beside others, and what this machine has."""

    def __init__(self, folder: Path) -> None:
        self.workdir = folder
        self.state = folder / ".snakemake/mantik"
        self.said: list[str] = []
        self.journal = Journal(self.state)

    def conclude(
        self, paths: Sequence[str], asked: JobRequest | None = None, made: Sequence[str] = ()
    ) -> set[str]:
        """Conclude a job that has made files of one byte; return the paths that are listed."""
        new = (OutputEntry(p, "f", 1, 0o640, "", "alone", "", LONG_AGO_NS) for p in paths)
        context = context_of(self.journal, self.said.append)
        files = (OutputEntry(p, "f", 1, 0o640, "", "archive") for p in made)
        marker = Marker(0, files=tuple(files), new=tuple(new))
        asyncio.run(UndeclaredFiles(context).conclude(asked or request(1), RECORD, marker))
        return {file.path for file in read_undeclared(self.state)}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.journal.close()


def test_what_lies_here_is_compared(bench: Bench) -> None:
    """A file of the project that another job has unpacked meanwhile is none of them."""
    for path in ("same", "mine"):
        (bench.workdir / path).write_bytes(b"x")
    os.utime(bench.workdir / "same", ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert bench.conclude(["same", "mine", "of 100%", "not \udcff"]) == {"mine", "of 100%"}
    assert len(bench.said) == 2
    assert "stay at sim: of 100% (1 B). Bring" in bench.said[0]
    assert "others under their names on this machine: mine (1 B). Yours were kept" in bench.said[1]
    # What comes from there keeps its time, and is no project file then.
    os.utime(bench.workdir / "mine", ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert list_brought(bench.workdir, read_undeclared(bench.state)) == {"mine"}


def test_what_other_jobs_make_is_not_listed(bench: Bench) -> None:
    """A checkpoint adds jobs after the request, and an earlier run may have left some."""
    asked = replace(request(1), named=NamedPaths(frozenset({"known"})))
    asked.named.paths |= {"added"}
    bench.journal.files.carry("here", "another attempt", (), ["earlier"])
    bench.journal.files.carry("elsewhere", "a third one", (), ["free"])
    bench.journal.files.carry("here", RECORD.id, (), ["own"])
    # What came from here, and is not here any more.
    bench.journal.files.set_remote_files("here", [FileRecord("sent", 1, "0" * 64)])
    paths = ["known", "added/z", "earlier/y", "free", "own", "sent"]
    assert bench.conclude(paths, asked) == {"free", "own"}


def test_what_was_copied_into_an_output_is_not_listed(bench: Bench) -> None:
    out = OutputFile("mlproject-runs/x", directory=True)
    asked = replace(request(1), project="churn", outputs=(out,))
    made = ["mlproject-runs/x/sub/model.pt", "mlproject-runs/x/other.pt"]
    paths = ["churn/sub/model.pt", "churn/left.pt", "elsewhere/other.pt"]
    assert bench.conclude(paths, asked, made) == {"churn/left.pt", "elsewhere/other.pt"}
    [said] = bench.said
    assert "model.pt" not in said
