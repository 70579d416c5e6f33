"""New files that no rule declares: none of them costs a job its success, or the user a file."""

import asyncio
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.engine import undeclared
from snakemake_executor_plugin_mantik.engine.fetch import Fetcher
from snakemake_executor_plugin_mantik.engine.request import JobRequest, NamedPaths
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.engine.transfer_meter import TransferMeter
from snakemake_executor_plugin_mantik.engine.undeclared import UndeclaredFiles, list_brought
from snakemake_executor_plugin_mantik.engine.workflow_context import WorkflowContext
from snakemake_executor_plugin_mantik.jobs.markers import Marker, OutputEntry
from snakemake_executor_plugin_mantik.journal import Journal, TryRecord, TryState, read_undeclared
from snakemake_executor_plugin_mantik.staging.transfers import OutputStaging
from tests.support import virtualtime
from tests.support.controller import request
from tests.support.simulated import Fault, SimulatedSite, World

RECORD = TryRecord(
    id="3f0d7a6c-0000-4000-8000-000000000001", site="sim", bucket=0, job="j", rule="r", name="r",
    fingerprint="f", state=TryState.SUBMITTED, place="here",
)  # fmt: skip
LONG_AGO_NS = 1_000_000_000 * 10**9


class Bench:
    """A job that has succeeded beside others, and what its site and this machine have."""

    def __init__(self, folder: Path) -> None:
        self.workdir = folder
        self.state = folder / ".state"
        self.said: list[str] = []
        self.site = SimulatedSite(World())
        self.journal = Journal(self.state)

    def conclude(
        self, files: dict[str, bytes], *, wanted: bool = True, asked: JobRequest | None = None
    ) -> float:
        """Conclude a job that has made `files`; return the seconds that this takes."""
        new = []
        for path, content in files.items():
            self.site.world.files.setdefault(path, content)
            new.append(OutputEntry(path, "f", len(content), 0o640, "", "alone", "", LONG_AGO_NS))
        found = [replace(e, sha256=hashlib.sha256(files[e.path]).hexdigest()) for e in new]
        marker = Marker(0, new=tuple(new), wanted=tuple(found) if wanted else ())

        async def concluded() -> float:
            clock = asyncio.get_running_loop().time
            fetcher = Fetcher(
                self.site, SiteRetry("sim", self.said.append, clock), self.workdir,
                self.workdir / ".scratch", on_links=lambda _: None, meter=TransferMeter(),
            )  # fmt: skip
            context = WorkflowContext(
                self.journal, self.workdir, self.state, self.said.append, self._nothing
            )
            started = clock()
            await UndeclaredFiles(context, fetcher).conclude(asked or request(1), RECORD, marker)
            return clock() - started

        return virtualtime.run(concluded())

    async def _nothing(self, records: Sequence[TryRecord]) -> None:
        raise AssertionError

    def write(self, path: str, content: bytes) -> None:
        (self.workdir / path).write_bytes(content)

    def here(self) -> dict[str, bytes]:
        files = (p for p in self.workdir.rglob("*") if p.is_file() and self.state not in p.parents)
        return {p.relative_to(self.workdir).as_posix(): p.read_bytes() for p in files}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.journal.close()


def test_odd_names_stay_at_the_site(bench: Bench) -> None:
    bench.conclude({"not \udcff": b"x", "of 100%": b"y", "good": b"z"})
    assert bench.here() == {"good": b"z"}
    assert "stay at sim: of 100% (1 B)" in bench.said[0]


def test_files_that_other_jobs_still_write_delay_nothing(bench: Bench) -> None:
    bench.site.world.files |= {"growing": b"longer", "other": b"b", "shrunk": b""}

    took = bench.conclude({"growing": b"long", "other": b"a", "shrunk": b"x", "whole": b"z"})

    assert took < 60
    assert bench.here() == {"whole": b"z"}
    assert "left at sim: 3 undeclared files that could not be fetched" in bench.said[0]


def test_a_connection_that_breaks_is_made_again(bench: Bench) -> None:
    faults: list[Fault] = ["unreachable", "busy"]
    bench.site.fault = lambda method, about: faults.pop() if faults and method == "get" else ""
    bench.conclude({"a": b"x"})
    assert (bench.here(), bench.said, faults) == ({"a": b"x"}, [], [])


def test_two_jobs_may_bring_the_same_file(bench: Bench) -> None:
    def make(method: str, about: str) -> Fault:
        if method == "get":
            bench.write("a", b"same")
        return ""

    bench.site.fault = make
    bench.conclude({"a": b"same"})
    assert bench.said == []
    assert list_brought(bench.workdir, read_undeclared(bench.state)) == {"a"}


@pytest.mark.parametrize("mine", ["file", "directory"])
def test_what_the_user_makes_meanwhile_is_kept(bench: Bench, mine: str) -> None:
    def make(method: str, about: str) -> Fault:
        if method == "get" and not (bench.workdir / "a").exists():
            if mine == "directory":
                (bench.workdir / "a").mkdir()
            bench.write("a/mine" if mine == "directory" else "a", b"mine")
        return ""

    bench.site.fault = make
    bench.conclude({"a": b"theirs"})
    assert set(bench.here().values()) == {b"mine"}
    assert "Yours were kept" in bench.said[0]


def test_a_new_version_replaces_only_an_unchanged_one(bench: Bench) -> None:
    bench.conclude({"a": b"one", "b": b"one"})
    for path in ("a", "b"):
        bench.site.world.files[path] = b"two"
    bench.write("b", b"own")
    bench.conclude({"a": b"two", "b": b"two"})
    assert bench.here() == {"a": b"two", "b": b"own"}


def test_what_is_here_already_is_not_fetched_again(bench: Bench) -> None:
    bench.conclude({"a": b"one"})
    bench.conclude({"a": b"one"})
    assert bench.site.calls["get"] == 1


@pytest.mark.parametrize("wanted", [True, False])
def test_a_new_version_of_the_same_size_is_reported(bench: Bench, wanted: bool) -> None:
    bench.write("a", b"one")
    bench.conclude({"a": b"two"}, wanted=wanted)
    assert "others under their names here: a (3 B)" in bench.said[0]


def test_fetched_files_keep_their_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they need not be read to tell them from the user's own."""
    bench.conclude({"a": b"one"})
    status = (bench.workdir / "a").stat()
    assert (status.st_mtime_ns, status.st_mode & 0o777) == (LONG_AGO_NS, 0o640)
    monkeypatch.setattr(undeclared, "sha256_of", None)
    assert list_brought(bench.workdir, read_undeclared(bench.state)) == {"a"}
    assert time.time_ns() > LONG_AGO_NS


def test_what_running_jobs_make_is_not_taken_half_written(bench: Bench) -> None:
    """A checkpoint adds jobs after the request, and an earlier run may have left some."""
    asked = replace(request(1), named=NamedPaths(frozenset({"known"})))
    asked.named.paths |= {"added"}
    bench.journal.files.carry("here", "another try", (), ["earlier"])
    bench.journal.files.carry("elsewhere", "a third one", (), ["free"])
    bench.journal.files.carry("here", RECORD.id, (), ["own"])

    bench.conclude(
        dict.fromkeys(("known", "added/z", "earlier/y", "free", "own"), b"x"), asked=asked
    )

    assert set(bench.here()) == {"free", "own"}
    assert bench.said == []


def test_a_fault_of_this_machine_costs_the_job_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clear(landing: OutputStaging) -> None:
        raise OSError("the disk is broken")

    bench.write("file", b"mine")
    bench.conclude({"file/below": b"x"})
    assert "left at sim: 1 undeclared file that could not be fetched" in bench.said[0]
    monkeypatch.setattr(OutputStaging, "clear", clear)
    bench.conclude({"a": b"x"})
    assert "the disk is broken" in bench.said[-1]
