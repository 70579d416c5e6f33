"""Bytes and seconds as people read them."""

import pytest

from snakemake_executor_plugin_mantik.common.humanize import humanize_duration, humanize_size


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
