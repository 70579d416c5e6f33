"""Outputs come back whole, verified and all together, or not at all."""

import asyncio
import hashlib
import itertools
import os
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from snakemake_executor_plugin_mantik.common.errors import (
    MantikError,
    OutputMissing,
    OutputsLost,
    SiteRejected,
    TransferError,
)
from snakemake_executor_plugin_mantik.engine import cancel
from snakemake_executor_plugin_mantik.engine.attempt import Attempt
from snakemake_executor_plugin_mantik.engine.ending import Ending
from snakemake_executor_plugin_mantik.engine.evidence import Evidence, Finding
from snakemake_executor_plugin_mantik.engine.fetch import Fetcher
from snakemake_executor_plugin_mantik.engine.observer import JobExtras
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.engine.workflow_context import WorkflowContext
from snakemake_executor_plugin_mantik.jobs.markers import OutputEntry
from snakemake_executor_plugin_mantik.jobs.packs import TarDamaged, read_packs
from snakemake_executor_plugin_mantik.jobs.paths import MAX_PATH_DEPTH
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.journal import AttemptRecord, AttemptState, FileRecord
from snakemake_executor_plugin_mantik.sites.base import Entry, Site
from snakemake_executor_plugin_mantik.staging.transfers import OutputStaging
from tests.support import virtualtime
from tests.support.controller import request
from tests.support.simulated import Fault, SimulatedSite, World, make_marker, tarred
from tests.support.trial import Trial, packed

RECORD = AttemptRecord(
    id="3f0d7a6c-0000-4000-8000-000000000001", site="sim", bucket=0, job="j", rule="r", name="r",
    fingerprint="f", state=AttemptState.SUBMITTED,
)  # fmt: skip
NASTY = "a b'\"\n#%*$HOME`ü;-"
FILES = {"small": b"1", "d/archived": b"2" * 3000, "alone": b"3" * 5000, NASTY: b"4"}
PLACES = {"small": "marker", "d/archived": "archive", "alone": "alone", NASTY: "archive"}


class Bench:
    """An attempt that has ended, and a fetcher of it."""

    def __init__(self, folder: Path, files: Mapping[str, bytes] = FILES) -> None:
        self.workdir = folder
        self.links: list[tuple[str, str]] = []
        self.world = World()
        self.site = SimulatedSite(self.world)
        self.scratch = folder / ".scratch"
        self.scratch.mkdir()
        self.declared = [OutputFile(path) for path in files]
        for path, content in files.items():
            self.world.write(path, content)
        self.marker(files)

    def marker(self, files: Mapping[str, bytes], **values: object) -> None:
        content = make_marker(
            RECORD.id, 0, files, place=lambda path: PLACES.get(path, "alone"), world=self.world,
            archive=RECORD.paths.archive, **values,  # type: ignore[arg-type]
        )  # fmt: skip
        self.world.write(RECORD.paths.marker(0), content)

    def fetch(self, record: AttemptRecord = RECORD, **marked: Any) -> tuple[FileRecord, ...]:
        """Fetch what an attempt has made, with other values in its marker."""

        async def fetched() -> tuple[FileRecord, ...]:
            retry = SiteRetry("sim", lambda _: None, asyncio.get_running_loop().time)
            journal = cast(Any, SimpleNamespace(files=SimpleNamespace(set_links=self.links.extend)))
            workflow = WorkflowContext(journal, self.workdir, self.workdir, print, journal)
            fetcher = Fetcher(self.site, retry, workflow, self.scratch)
            marker = await fetcher.marker(record, Evidence(Finding.MARKER, 0))
            return await fetcher.outputs(record, replace(marker, **marked), self.declared)

        return virtualtime.run(fetched())

    def here(self) -> set[str]:
        files = (p for p in self.workdir.rglob("*") if p.is_file() or p.is_symlink())
        return {p.relative_to(self.workdir).as_posix() for p in files}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_outputs_of_every_kind_and_name(bench: Bench) -> None:
    fetched = bench.fetch()
    assert {p: (bench.workdir / p).read_bytes() for p in FILES} == FILES
    assert bench.here() == set(FILES), "and nothing else"
    assert {(f.path, f.size) for f in fetched} == {(p, len(c)) for p, c in FILES.items()}


@pytest.mark.parametrize("path", ["alone", RECORD.paths.archive])
def test_a_refusal_that_lasts_does_not_lose_the_outputs(bench: Bench, path: str) -> None:
    bench.site.fault = lambda asked, about: "rejected" if about == path and asked == "get" else ""
    refused(bench, SiteRejected, "no")


def test_broken_transfer_does_not_begin_anew(bench: Bench) -> None:
    asked: list[int] = []
    get = bench.site.get
    faults: list[Fault] = ["unreachable"] * 5

    def counted(path: str, *, offset: int = 0, size: int | None = None) -> object:
        asked.append(offset)
        return get(path, offset=offset, size=size)

    bench.site.get = counted  # type: ignore[assignment, method-assign]
    bench.site.fault = lambda m, p: faults.pop() if p == "alone" and m == "get" and faults else ""
    bench.fetch()
    offsets = [offset for offset in asked if offset]
    assert offsets == sorted(offsets)
    assert offsets[0] == 2500


def refused(bench: Bench, kind: type[MantikError], text: str) -> None:
    """It fails with that, and nothing has taken its place."""
    for path in FILES:
        (bench.workdir / path).parent.mkdir(exist_ok=True)
        (bench.workdir / path).write_text("before")
    with pytest.raises(kind, match=text):
        bench.fetch()
    assert {(bench.workdir / path).read_text() for path in FILES} == {"before"}
    assert bench.here() == set(FILES), "nothing half is left"


Change = Callable[[bytes], bytes | None]


@pytest.mark.parametrize("path", ["alone", RECORD.paths.archive])
@pytest.mark.parametrize(
    ("change", "kind", "told"),
    [
        (lambda content: b"x" * len(content), OutputsLost, "checksum differs"),
        (lambda content: content[:100], TransferError, "100 bytes at the site"),
        (lambda content: None, TransferError, "no longer there"),
    ],
    ids=["changed", "shorter", "gone"],
)
def test_what_is_not_at_the_site_as_it_was_made(
    bench: Bench, path: str, change: Change, kind: type[MantikError], told: str
) -> None:
    content = change(bench.world.files.pop(path) or b"")
    if content is not None:
        bench.world.files[path] = content
    refused(bench, kind, told)


@pytest.mark.parametrize("path", ["alone", RECORD.paths.archive])
def test_content_that_is_damaged_on_its_way_is_not_lost(bench: Bench, path: str) -> None:
    get, attempts = bench.site.get, itertools.count()

    async def damaged(
        asked: str, *, offset: int = 0, size: int | None = None
    ) -> AsyncIterator[bytes]:
        if asked == path:
            content = bench.world.files[path] or b""
            yield next(attempts).to_bytes(len(content), "big")
            return
        async for part in get(asked, offset=offset, size=size):
            yield part

    bench.site.get = damaged  # type: ignore[assignment, method-assign]
    with pytest.raises(TransferError) as raised:
        bench.fetch()
    assert not isinstance(raised.value, OutputsLost)


def test_file_grew_at_the_site(bench: Bench) -> None:
    bench.world.files["alone"] = FILES["alone"] + b"x" * 1_000_000
    refused(bench, TransferError, "checksum differs")


def test_archive_that_is_none(bench: Bench) -> None:
    junk = b"x" * 5000
    digest = hashlib.sha256(junk).hexdigest()
    bench.world.files[RECORD.paths.archive] = junk
    content = make_marker(RECORD.id, 0, FILES, place=PLACES.__getitem__)
    bench.world.write(RECORD.paths.marker(0), content)

    with pytest.raises(TransferError, match="damaged"):
        bench.fetch(archive_size=5000, archive_sha256=digest)
    assert bench.here() == set()


@pytest.mark.parametrize("damage", ["headers of headers", "cut"])
def test_archive_that_is_a_trap(bench: Bench, damage: str) -> None:
    landing = OutputStaging(bench.workdir, RECORD.id, ["x"])
    archive = bench.scratch / "a.tar"
    if damage == "cut":
        archive.write_bytes(tarred({"x": b"1" * 5000}, "w")[:2000])
    else:
        member = tarfile.TarInfo("long")
        member.type = tarfile.GNUTYPE_LONGNAME
        archive.write_bytes(member.tobuf(tarfile.GNU_FORMAT) * 5000)
    with pytest.raises(TransferError, match="damaged"):
        landing.unpack(archive, [OutputEntry("x", "f", 5000, 0o644, "", "archive")])


def test_archive_that_lacks_a_file(bench: Bench) -> None:
    bench.world.files[RECORD.paths.archive] = tarred({NASTY: b"4"}, "w")
    with pytest.raises(TransferError):
        bench.fetch()
    assert bench.here() == set()


def test_output_that_was_not_made(bench: Bench) -> None:
    bench.marker({}, lacking=["d/archived"])
    refused(bench, OutputMissing, "d/archived")


@pytest.mark.parametrize("path", ["../escape", "/tmp/escape", "d/../../escape", "other"])
def test_hostile_paths_go_nowhere(bench: Bench, path: str) -> None:
    bench.marker({path: b"x"})
    bench.world.write(path, b"x")
    refused(bench, TransferError, "none of the rule's outputs")


def test_one_failure_ends_the_other_downloads(tmp_path: Path) -> None:
    files = {f"alone-{n}": os.urandom(20_000) for n in range(5)}
    bench = Bench(tmp_path, files)
    del bench.world.files["alone-2"]
    with pytest.raises(TransferError):
        bench.fetch()
    assert bench.here() == set(), "nothing is written behind our back"


@pytest.mark.parametrize("damage", ["cut", "gone", "another's"])
@pytest.mark.parametrize("heals", [True, False])
def test_marker_is_read_again(bench: Bench, damage: str, heals: bool) -> None:
    path = RECORD.paths.marker(0)
    whole = bench.world.files[path] or b""
    match damage:
        case "cut":
            bench.world.files[path] = whole[:50]
        case "gone":
            del bench.world.files[path]
        case _:
            bench.world.files[path] = make_marker("another", 0, {})
    if heals:
        bench.world.after(20, lambda: bench.world.write(path, whole))
        bench.fetch()
        assert bench.here() == set(FILES)
    else:
        refused(bench, MantikError, "marker cannot be used|no file")


@pytest.mark.parametrize("content", [b"", b"owner=x\nsite_job=1\n"])
def test_bare_marker_is_told(bench: Bench, content: bytes) -> None:
    bench.world.files[RECORD.paths.marker(0)] = content
    refused(bench, TransferError, "no room")


def test_marker_of_the_real_script(trial: Trial, tmp_path: Path) -> None:
    """Files, directories and links that a real bash made."""
    outputs = (OutputFile("d", directory=True), OutputFile(NASTY), OutputFile("big"))
    spec = trial.spec(
        f"mkdir -p d/e d/empty; echo 1 > d/e/x; ln -s e/x d/link; echo 2 > {quoted(NASTY)};"
        " head -c 3000000 /dev/zero > big; chmod 700 big",
        outputs=outputs,
    )
    assert trial.run(spec).returned == 0
    (tmp_path / "here").mkdir()
    bench = Bench(tmp_path / "here", {})
    for path in trial.workspace.rglob("*"):
        if path.is_file():
            bench.world.write(path.relative_to(trial.workspace).as_posix(), path.read_bytes())
    (bench.workdir / "d").mkdir()
    (bench.workdir / "d/old").write_text("of an earlier run")
    bench.declared = [*outputs]
    bench.fetch(replace(RECORD, id=spec.paths.attempt_id, bucket=3))
    assert bench.here() == {"d/e/x", "d/link", NASTY, "big"}
    assert (bench.workdir / "d/link").readlink() == Path("e/x")
    assert bench.links == [("d/link", "e/x")]
    assert (bench.workdir / "d/empty").is_dir()
    assert (bench.workdir / "big").stat().st_mode & 0o777 == 0o700


def quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


def test_entry_that_the_file_api_cannot_carry(bench: Bench) -> None:
    entry = OutputEntry(NASTY, "f", 1, 0o644, "", "alone")

    with pytest.raises(TransferError, match="cannot carry"):
        bench.fetch(files=(entry,))


# What a job leaves for an observer may hold anything: nothing but plain files comes of it.


DEEP = "a/" * (MAX_PATH_DEPTH + 1)


def concluded(trial: Trial, workdir: Path, command: str) -> tuple[list[str], list[str]]:
    """What a job left that a real bash ran: the paths here, links included, and what is told."""
    outputs = (OutputFile("out"), OutputFile("log", directory=True))
    spec = trial.spec(f"echo 1 > out; mkdir log; {command}", outputs=outputs)
    assert trial.run(spec).returned == 0
    world = World()
    for path in trial.workspace.rglob("*"):
        if path.is_file() and not path.is_symlink():
            world.write(path.relative_to(trial.workspace).as_posix(), path.read_bytes())
    workdir.mkdir()
    record = AttemptRecord(
        spec.paths.attempt_id, "sim", spec.paths.bucket, "j", "r", "r", "f", AttemptState.SUBMITTED
    )
    site, said = SimulatedSite(world), list[str]()
    nothing = cast(Any, None)
    journal = cast(Any, SimpleNamespace(files=SimpleNamespace(set_links=list)))
    workflow = WorkflowContext(journal, workdir, workdir, said.append, nothing)
    fetcher = Fetcher(site, SiteRetry("sim", print), workflow, workdir / ".scratch")
    work = cast(Any, MagicMock(fetcher=fetcher, places=MagicMock(workflow=workflow)))
    attempt = Attempt(record, [], 0.0, 1, extras=JobExtras("log"))
    attempt.whole = replace(request(1), outputs=outputs)

    async def fetched() -> None:
        marker = await fetcher.marker(record, Evidence(Finding.MARKER, 0))
        await Ending(work, attempt, nothing).fetch(marker)

    virtualtime.run(fetched())
    left = [p for p in workdir.rglob("*") if p.is_symlink() or not p.is_dir()]
    return sorted(p.relative_to(workdir).as_posix() for p in left), said


@pytest.mark.parametrize(
    ("command", "comes", "told"),
    [
        ("ln -s /etc log/metrics; ln -s plain log/beside; ln -s /etc/passwd log/passwd",
         ["log/plain"], "3 symbolic links"),
        (f"mkdir -p log/{DEEP}; echo 2 > log/{DEEP}/x",
         [], f"nested more than {MAX_PATH_DEPTH} levels"),
    ],
)  # fmt: skip
def test_neither_links_nor_depth_in_what_a_job_logs_cost_the_job(
    trial: Trial, tmp_path: Path, command: str, comes: list[str], told: str
) -> None:
    left, said = concluded(trial, tmp_path / "here", f"echo 2 > log/plain; {command}")

    assert left == [*comes, "out"]
    assert told in said[0]
    assert len(said) == 1


def test_a_pack_that_goes_too_deep() -> None:
    with pytest.raises(TarDamaged, match="a file"):
        list(read_packs(packed({f"./{DEEP}x": b"1"})))


class Endless:
    """A site that has a directory in each directory, and a file that has no end."""

    def __init__(self) -> None:
        self.listed = 0

    async def list(self, path: str) -> dict[str, Entry]:
        self.listed += 1
        file = SimpleNamespace(directory=False, size=0)
        return {"d": cast(Entry, SimpleNamespace(directory=True)), "zero": cast(Entry, file)}

    async def get(self, path: str, *, size: int | None = None) -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 10)


def test_a_salvage_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel, "MAX_SALVAGED_BYTES", 100 << 10)
    site = Endless()

    virtualtime.run(cancel.salvage_files(cast(Site, site), "log", tmp_path))

    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) <= 101 << 10
    assert site.listed <= MAX_PATH_DEPTH + 1
