"""Numbers, bytes and seconds as people read them."""

import re
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.humanize import (
    humanize_count,
    humanize_duration,
    humanize_size,
)

PACKAGE = Path(__file__).parents[2] / "snakemake_executor_plugin_mantik"


def test_numbers_of_things() -> None:
    found = [humanize_count(number, "file") for number in (0, 1, 2, 2000)]
    assert found == ["0 files", "1 file", "2 files", "2,000 files"]
    assert humanize_count(1, "attempt", "attempts") == "1 attempt"
    assert humanize_count(2, "attempt", "attempts") == "2 attempts"


def test_no_message_counts_things_by_itself() -> None:
    """`1 files` is what a plural after a number in braces says when there is one."""
    things = "files|jobs|outputs|runs|sites|rules|transfers|links|attempts|segments|mistakes|fields"
    allowed = ("kinds of mistakes", "sites cannot be used", "jobs:", 'mistakes"')  # never one
    found = [
        f"{path.name}: {match[0]}"
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "sandbox"  # quotes servers
        for match in re.finditer(
            rf"\{{(?:len\([^{{}}]+\)[^{{}}]*|[a-z.]*(?:number|left|files|jobs|total|done|size))\}}"
            rf"(?: \w+)? (?:{things})\b.{{0,16}}",
            path.read_text(),
        )
        if not any(words in match[0] for words in allowed)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1010 << 10, "1010.0 KiB"),
        (3 << 50, "3072.0 TiB"),
    ],
)
def test_sizes(number: int, text: str) -> None:
    assert humanize_size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (60, "1 min"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h"),
        (2 * 86400 - 60, "47 h 59 min"),
        (2 * 86400 + 300, "2 days"),
        (69.45 * 86400, "69 days 10 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert humanize_duration(seconds) == text
