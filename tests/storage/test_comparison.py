"""A stored output is what its job made only while nothing of it is gone or changed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from snakemake_executor_plugin_mantik.engine.compare import Sight
from snakemake_executor_plugin_mantik.journal import FileRecord, StoredOutput
from snakemake_executor_plugin_mantik.sites.base import Entry
from snakemake_executor_plugin_mantik.storage.access import Access, Change, Comparison

MADE_AT, SIZE, SUM = 1000.0, 4, "a" * 64
FILE = FileRecord("out/model", SIZE, SUM, modified=MADE_AT, mode=0o644)
OUTPUT = StoredOutput("out/model", "place", False, MADE_AT, "train", (FILE,))


class Looking:
    """Access to a place of which one directory was looked at."""

    notify = staticmethod(print)

    def __init__(self, *entries: Entry) -> None:
        self._entries = {entry.name: entry for entry in entries}

    def look(self, place: str, directory: str, files: Sequence[FileRecord]) -> Sight:
        assert (place, directory) == ("place", "out")
        paths = (file.path for file in files)
        gone = (path for path in paths if path.rpartition("/")[2] not in self._entries)
        return Sight(self._entries, frozenset(gone))


def compared(*entries: Entry) -> list[Change]:
    access = cast("Access", Looking(*entries))
    return [*Comparison(access, [OUTPUT]).compare(OUTPUT, {OUTPUT.path: OUTPUT})]


@pytest.mark.parametrize("seconds", [0.0, 1.5, 3600.0, -3600.5])
def test_an_output_as_it_was_made_stays(seconds: float) -> None:
    """Clocks are rounded, and local times are off by an hour after a change to summer time."""
    assert compared(Entry("model", SIZE, False, MADE_AT + seconds)) == []


@pytest.mark.parametrize(
    ("size", "modified"), [(SIZE, MADE_AT + 10), (SIZE, MADE_AT - 10), (SIZE + 1, MADE_AT)]
)
def test_one_that_was_changed_has_another_content_and_is_new(size: int, modified: float) -> None:
    [(known, now)] = compared(Entry("model", size, False, modified))
    assert known is OUTPUT
    assert now is not None
    [file] = now.files
    assert (file.size, file.modified) == (size, modified)
    assert file.sha256 != SUM
    assert now.made > OUTPUT.made
    assert replace(now, made=OUTPUT.made, files=OUTPUT.files) == OUTPUT


def test_one_that_is_gone_does_not_exist() -> None:
    assert compared(Entry("other", SIZE, False, MADE_AT)) == [(OUTPUT, None)]
