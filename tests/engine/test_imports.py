"""Imports: what becomes of files that one site's server fetches from another."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import (
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.engine.upload import IMPORT_BYTES, Uploader
from snakemake_executor_plugin_mantik.engine.workflow_context import PlaceContext
from snakemake_executor_plugin_mantik.jobs.paths import imported_path
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import FileRecord, Journal
from snakemake_executor_plugin_mantik.sites.base import Entry, JobState, Phase, SharedFile
from snakemake_executor_plugin_mantik.staging.local import LocalFile
from tests.support.simulated import SimulatedSite, World
from tests.support.stagers import UPLOAD_BYTES, context_of, nowhere

SIZE = IMPORT_BYTES
SHARED = SharedFile("https://store/file?Signature=secret")
FAILED = JobState(Phase.ENDED, Reason.UNKNOWN, "no route to the other host")
LONG_S = 10_000.0
DONE = JobState(Phase.ENDED, Reason.SUCCESS)
RUNNING = JobState(Phase.RUNNING)
UNKNOWN = JobState(Phase.UNKNOWN)
SILENT = JobState(Phase.UNKNOWN, detail="no answer")
"""Stands for an error in place of a state."""


class Importing(SimulatedSite):
    """A site that imports; what it says of imports is set by the test.

    Attributes:
        asked: how often an import was to begin.
        begun: the paths of the imports that were begun.
        sizes: by path, the sizes that it shows, one after the other; the last one stays.
        states: the states of imports, one after the other; the last one stays.
        error: what the beginning of an import meets.
        removed, ended: the paths that were removed, and the imports that were ended.
    """

    def __init__(self) -> None:
        super().__init__(World())
        self.asked = 0
        self.begun: list[str] = []
        self.sizes = [0, SIZE // 2, SIZE]
        self.import_states = [RUNNING, RUNNING, DONE]
        self.error: Exception | None = None
        self.removed: list[str] = []
        self.ended: list[str] = []

    async def start_import(self, source: SharedFile, path: str) -> str | None:
        assert source is SHARED
        self.asked += 1
        if self.error is not None:
            raise self.error
        self.begun.append(path)
        return f"import-{len(self.begun)}"

    async def import_state(self, import_id: str) -> JobState:
        states = self.import_states
        state = states.pop(0) if len(states) > 1 else states[0]
        if state is SILENT:
            raise SiteUnreachable("no answer")
        return state

    async def end_import(self, import_id: str) -> None:
        self.ended.append(import_id)

    async def stat(self, path: str) -> Entry | None:
        if path in self.removed:
            return None
        size = self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0]
        return Entry(path.rpartition("/")[2], size, directory=False)

    async def remove(self, path: str) -> None:
        self.removed.append(path)


class Run:
    """One run of a workflow with a place that imports.

    Attributes:
        said: the lines in the user's log.
    """

    journal: Journal

    def __init__(self, site: Importing, state: Path) -> None:
        self.site, self.state = site, state
        self.begin()

    def begin(self) -> None:
        """Begin a run, or another one with the same journal and site."""
        if hasattr(self, "journal"):
            self.journal.close()
        self.journal = Journal(self.state)
        self.said: list[str] = []
        self.shared: SharedFile | None = SHARED
        self.away = ""
        self.refused = False
        retry = SiteRetry("sim", self.said.append, asyncio.get_running_loop().time)
        at = PlaceContext("sim", self.site, retry, context_of(self.journal, self.said.append))
        self.importer = Uploader(at, nowhere, self._share, UPLOAD_BYTES)

    async def _share(self, file: LocalFile) -> SharedFile | None:
        if file.stored == self.away:
            await asyncio.sleep(LONG_S)
        if self.refused:
            raise SiteNotFound("it is not there")
        return self.shared

    async def bring(self, *files: LocalFile) -> list[str]:
        """The paths of the files that were imported."""
        self.journal.files.begin_bundle("sim", "1/b", "", [file.record for file in files])
        names = await self.importer.bring("1/b", files)
        begun = [name.rpartition("/")[2] for name in self.site.begun]
        assert set(names.values()) <= set(begun)
        return sorted(names)


def stored(path: str = "set.tar", size: int = SIZE) -> LocalFile:
    digest = hashlib.sha256(path.encode()).hexdigest()
    return LocalFile.at("elsewhere", FileRecord(path, size, digest, mode=0o644))


@pytest.fixture
def site() -> Importing:
    return Importing()


@pytest.fixture
async def run(site: Importing, tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(site, tmp_path / ".snakemake/mantik")
    yield run
    run.journal.close()


async def stop(run: Run, after: float) -> None:
    """Let a run that waits for an import end, and begin the next one."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(after):
            await run.bring(stored())
    run.begin()


async def test_only_large_ones_are_imported(run: Run) -> None:
    assert await run.bring(stored(), stored("small", IMPORT_BYTES - 1)) == ["set.tar"]
    assert run.said == ["Moving set.tar (16.0 MiB) to site sim, from server to server."]
    assert [*run.journal.files.imports("1/b", "sim")] == ["set.tar"]


async def test_the_next_run_waits_for_the_same_import(run: Run, site: Importing) -> None:
    site.import_states, site.sizes = [RUNNING], list(range(0, SIZE, 1000))
    await stop(run, 60)
    site.import_states, site.sizes = [RUNNING, DONE], [SIZE // 2, SIZE]
    assert await run.bring(stored()) == ["set.tar"]
    assert run.said[0].endswith("from server to server; 50% of it is there already.")
    assert len(site.begun) == 1


async def test_an_import_that_ended_while_nobody_looked(run: Run, site: Importing) -> None:
    """A site forgets imports after a day; what counts is whether all of the file is there."""
    site.import_states = [RUNNING]
    await stop(run, 1)
    site.import_states = [UNKNOWN]
    assert await run.bring(stored()) == ["set.tar"]
    assert len(site.begun) == 1


@pytest.mark.parametrize("how", ["failed", "stalled", "silent", "short", "forgotten", "refused"])
async def test_what_is_not_imported_is_left_to_another_way(
    run: Run, site: Importing, how: str
) -> None:
    reasons = {
        "failed": FAILED.detail,
        "stalled": "Nothing of it has come for 600 s",
        "silent": "Nothing of it has come for 600 s",
        "short": "Not all of it is there",
        "forgotten": "Not all of it is there",
        "refused": "no imports",
    }
    site.import_states = {
        "failed": [RUNNING, FAILED],
        "stalled": [JobState(Phase.WAITING)],
        "silent": [SILENT],
        "short": [DONE],
        "forgotten": [UNKNOWN],
    }.get(how, [DONE])
    site.sizes = [0] if how in ("stalled", "failed") else [SIZE - 1]
    if how == "refused":
        site.error = SiteRejected("no imports")
    assert await run.bring(stored()) == []
    assert run.said[-1] == (
        "Site sim cannot fetch set.tar from the other site's server; it comes through this"
        f" machine. {reasons[how]}."
    )
    assert site.removed == site.begun, "half a file takes no room"
    assert not run.journal.files.imports("1/b", "sim")
    if how not in ("stalled", "silent"):  # one file alone does not condemn the way
        assert await run.bring(stored("other.tar")) == []
    said = len(run.said)
    assert await run.bring(stored("last.tar")) == [], "not tried for ever"
    assert len(run.said) == said


async def test_failures_that_have_nothing_to_do_with_the_way(run: Run, site: Importing) -> None:
    """A file that is not there, one failure between others, a directory that cannot be made."""
    run.refused = True
    for n in range(3):
        assert await run.bring(stored(f"gone-{n}")) == []
    assert "it is not there" in run.said[-1]
    run.refused = False
    for n in range(3):
        site.import_states, site.sizes = [FAILED], [0]
        assert await run.bring(stored(f"bad-{n}")) == []
        site.import_states, site.sizes = [DONE], [SIZE]
        assert await run.bring(stored(f"good-{n}")) == [f"good-{n}"]


async def test_one_odd_answer_ends_no_import(run: Run, site: Importing) -> None:
    """A scheduler may not know a job that was just submitted, a file system shows it late."""
    site.import_states = [UNKNOWN, SILENT, RUNNING, UNKNOWN, DONE]
    site.sizes[1:1] = [SIZE // 2] * 5
    assert await run.bring(stored()) == ["set.tar"]


async def test_a_place_that_is_away_holds_up_no_other(run: Run) -> None:
    away = [replace(stored(f"{n}"), stored="away") for n in range(8)]
    run.away = "away"
    waiting = asyncio.create_task(run.importer.bring("1/a", away))
    await asyncio.sleep(1)
    assert await run.bring(stored()) == ["set.tar"]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("comes", [True, False])
@pytest.mark.parametrize("killed", [True, False])
async def test_an_answer_that_is_lost(run: Run, site: Importing, comes: bool, killed: bool) -> None:
    """What has begun is waited for, and not begun again beside it, also by the next run."""
    site.error = SiteUnreachable("no answer")
    site.sizes = [0, SIZE // 2]
    if killed:
        await stop(run, 1)
    site.sizes = [0, SIZE // 2, SIZE] if comes else [0]
    run.journal.files.begin_bundle("sim", "1/b", "", [stored().record])
    assert [*await run.importer.bring("1/b", [stored()])] == ["set.tar"] * comes
    assert site.asked == 1
    site.error, site.sizes = None, [SIZE]
    site.removed.clear()
    assert await run.bring(stored("other.tar")) == ["other.tar"]
    assert site.ended == ["import-1"], "the other one has no id"


@pytest.mark.parametrize("error", [SiteBusy("busy"), SiteUnauthorized("an old token")])
async def test_what_a_site_did_not_do_is_asked_again(
    run: Run, site: Importing, error: SiteError
) -> None:
    site.error = error
    waiting = asyncio.create_task(run.bring(stored()))
    await asyncio.sleep(10)
    site.error = None
    assert await waiting == ["set.tar"]


async def test_no_way_is_no_failure(run: Run) -> None:
    run.shared = None
    assert await run.bring(stored()) == []
    assert run.said == []


async def test_the_same_again(run: Run) -> None:
    """It is imported again, unless a job has found it to be another content.

    It streams then, and is compared on the way: that shows where it changed.
    """
    assert await run.bring(stored()) == ["set.tar"]
    run.journal.files.send_again("1/b")
    assert await run.bring(stored()) == ["set.tar"], "the bundle was lost"
    run.importer.doubt(["set.tar", "other.tar"])
    run.journal.files.send_again("1/b")
    assert await run.bring(stored()) == []
    assert await run.bring(stored("other.tar")) == ["other.tar"]


async def test_an_import_of_another_site_of_the_place_is_left_alone(
    run: Run, site: Importing
) -> None:
    """Its id may mean another job there, which must not be ended."""
    run.journal.files.begin_bundle("sim", "1/b", "", [stored().record])
    run.journal.files.set_import("1/b", "set.tar", "name", "twin", "import-7")
    assert await run.bring(stored()) == ["set.tar"]
    assert len(site.begun) == 1
    await run.importer.end_imports("1/b")
    assert "import-7" not in site.ended


def test_what_grants_access_is_not_shown() -> None:
    assert "secret" not in repr(SHARED)


async def test_each_file_has_a_name_of_its_own(run: Run, site: Importing) -> None:
    assert await run.bring(stored("a"), stored("b")) == ["a", "b"]
    assert len({path for path in site.begun if path.startswith(imported_path("1/b", ""))}) == 2
