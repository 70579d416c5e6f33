"""Sources that somebody writes to while they are sent."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.engine.place import UNSTEADY, send_sources
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.staging.local import LocalFile, LocalFiles
from tests.support import virtualtime
from tests.support.simulated import SimulatedSite, World
from tests.support.stagers import make_stager


class Busy(LocalFiles):
    """Files to which somebody does something each time when they have just been looked at."""

    def __init__(self, workdir: Path, journal: Journal, act: Callable[[], None]) -> None:
        super().__init__(workdir, journal.files)
        self._act = act

    async def look_at(
        self, wanted: Iterable[tuple[str, Path | None]], *, source: bool = False
    ) -> list[LocalFile]:
        """See `LocalFiles`."""
        found = await super().look_at(wanted, source=source)
        self._act()
        return found


Sent = Callable[[Callable[[], None]], tuple[dict[str, str], list[str]]]


@pytest.fixture
def sent(tmp_path: Path) -> Sent:
    """What is sent of two files, and what is said, when something is done to them meanwhile."""

    def send(act: Callable[[], None]) -> tuple[dict[str, str], list[str]]:
        said: list[str] = []

        async def work() -> dict[str, str]:
            clock = asyncio.get_running_loop().time
            retry = SiteRetry("sim", said.append, clock)
            stager = make_stager(SimulatedSite(World()), journal, retry)
            local = Busy(tmp_path, journal, act)
            return await send_sources(["code.py", "notes"], local, stager, said.append)

        for name in ("code.py", "notes"):
            (tmp_path / name).write_text("x")
        with closing(Journal(tmp_path / ".snakemake/mantik")) as journal:
            return virtualtime.run(work()), said

    return send


def test_what_is_saved_just_now_is_sent_as_it_is_then(sent: Sent, tmp_path: Path) -> None:
    saves = iter(range(UNSTEADY - 1))

    def save() -> None:
        if (number := next(saves, None)) is not None:
            (tmp_path / "code.py").write_text(f"version {number}")

    found, said = sent(save)

    assert sorted(found) == ["code.py", "notes"]
    assert said == []


def test_what_is_written_all_the_time_stays_here(sent: Sent, tmp_path: Path) -> None:
    def grow() -> None:
        with (tmp_path / "notes").open("a") as file:
            file.write("x")

    found, said = sent(grow)

    assert list(found) == ["code.py"]
    [line] = said
    assert "not uploading notes" in line


def test_what_goes_is_not_missed(sent: Sent, tmp_path: Path) -> None:
    found, said = sent(lambda: (tmp_path / "notes").unlink(missing_ok=True))

    assert list(found) == ["code.py"]
    assert said == []
