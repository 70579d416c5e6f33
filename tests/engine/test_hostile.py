"""What a job leaves for an observer may hold anything: nothing but plain files comes of it."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snakemake_executor_plugin_mantik.engine import cancel
from snakemake_executor_plugin_mantik.engine.attempt import Attempt
from snakemake_executor_plugin_mantik.engine.evidence import Evidence, Finding
from snakemake_executor_plugin_mantik.engine.fetch import Fetcher
from snakemake_executor_plugin_mantik.engine.finalize import Finalizer
from snakemake_executor_plugin_mantik.engine.observer import JobExtras, Observer
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.engine.workflow_context import WorkflowContext
from snakemake_executor_plugin_mantik.jobs.live_packs import PackDamaged, read_packs
from snakemake_executor_plugin_mantik.jobs.paths import MAX_PATH_DEPTH
from snakemake_executor_plugin_mantik.jobs.spec import OutputFile
from snakemake_executor_plugin_mantik.journal import TryRecord, TryState
from snakemake_executor_plugin_mantik.sites.base import Entry, Site
from tests.support import virtualtime
from tests.support.controller import request
from tests.support.simulated import SimulatedSite, World
from tests.support.trial import Trial, packed

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
    record = TryRecord(
        spec.paths.try_id, "sim", spec.paths.bucket, "j", "r", "r", "f", TryState.SUBMITTED
    )
    site, said = SimulatedSite(world), list[str]()
    nothing = cast(Any, None)
    journal = cast(Any, SimpleNamespace(files=SimpleNamespace(set_links=list)))
    workflow = WorkflowContext(journal, workdir, workdir, said.append, nothing)
    fetcher = Fetcher(site, SiteRetry("sim", print), workflow, workdir / ".scratch")
    finalizer = Finalizer(
        workflow, stager=nothing, submitter=nothing, fetcher=fetcher, canceller=nothing,
        classifier=nothing, late=nothing, observer=Observer(),
    )  # fmt: skip
    attempt = Attempt(record, [], 0.0, 1, extras=JobExtras("log"))

    async def fetched() -> None:
        marker = await fetcher.marker(record, Evidence(Finding.MARKER, 0))
        await finalizer._outputs(replace(request(1), outputs=outputs), attempt, marker)

    virtualtime.run(fetched())
    left = [p for p in workdir.rglob("*") if p.is_symlink() or not p.is_dir()]
    return sorted(p.relative_to(workdir).as_posix() for p in left), said


def test_no_link_comes_of_what_a_job_logs(trial: Trial, tmp_path: Path) -> None:
    links = "ln -s /etc log/metrics; ln -s plain log/beside; ln -s /etc/passwd log/passwd"

    left, said = concluded(trial, tmp_path / "here", f"echo 2 > log/plain; {links}")

    assert left == ["log/plain", "out"]
    assert len(said) == 1
    assert "3 symbolic links" in said[0]


def test_what_lies_too_deep_costs_the_log_and_not_the_job(trial: Trial, tmp_path: Path) -> None:
    left, said = concluded(trial, tmp_path / "here", f"mkdir -p log/{DEEP}; echo 2 > log/{DEEP}/x")

    assert left == ["out"]
    assert f"nested more than {MAX_PATH_DEPTH} levels" in said[0]


def test_a_pack_that_goes_too_deep() -> None:
    with pytest.raises(PackDamaged, match="directories"):
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
