import pytest
from hypothesis import given
from hypothesis import strategies as st

from snakemake_executor_plugin_mantik.config.units import (
    format_duration,
    format_size,
    parse_duration,
    parse_memory,
    parse_size,
)


@given(st.integers(1, 10**8))
def test_durations_come_back(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(1, 10**9 - 1))
def test_memory_comes_back_in_units_that_unicore_knows(mib: int) -> None:
    text = format_size(mib << 20)
    assert parse_memory(text) == mib
    assert text[:-1].isdigit()
    assert text[-1] in "MGT"


@given(st.integers(0, 10**15 - 1))
def test_sizes_come_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(1, 10**6), st.sampled_from("KMGT"))
def test_all_names_of_a_unit_are_the_same(number: int, letter: str) -> None:
    names = [letter, f"{letter}B", f"{letter}iB", letter.lower(), f"{letter}b"]
    assert len({parse_memory(f"{number}{name}") for name in names}) == 1
    assert len({parse_size(f"{number}{name}") for name in names}) == 1


@given(st.text() | st.from_regex(r"-?[0-9.]* ?[a-zA-Z]{0,4}", fullmatch=True))
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    for parse, allowed in ((parse_duration, "30m"), (parse_memory, "64G"), (parse_size, "8M")):
        message = allowed
        try:
            assert parse(text) >= 0
        except ValueError as error:
            message = str(error)
        assert allowed in message


@pytest.mark.parametrize(
    ("text", "mib"),
    [("1K", 1), ("65536", 65536), ("1025K", 2), ("512M", 512), ("64GiB", 65536), ("1TB", 1 << 20)],
)
def test_memory_is_rounded_up_to_whole_mib(text: str, mib: int) -> None:
    assert parse_memory(text) == mib
