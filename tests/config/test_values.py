import os
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snakemake_executor_plugin_mantik.config.units import (
    format_duration,
    format_size,
    parse_duration,
    parse_memory,
    parse_size,
)
from snakemake_executor_plugin_mantik.config.values import parse_integer, split_words


def bash(line: str) -> list[str]:
    """The arguments that bash makes of `line`."""
    done = subprocess.run(
        ["bash", "-c", f"shopt -s expand_aliases; printf '%s\\0' x {line}"],
        capture_output=True,
        check=True,
        env={"PATH": os.environ["PATH"], "DATA": "/p/data", "HOME": "/h", "LC_ALL": "C.UTF-8"},
    )
    return done.stdout.decode().split("\0")[1:-1]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", []),
        ("--nv -B /a:/b\n", ["--nv", "-B", "/a:/b"]),
        ("-B $DATA:/data", ["-B", "/p/data:/data"]),
        ("--nv\n  -B ${DATA}/x:/x\n", ["--nv", "-B", "/p/data/x:/x"]),
        ("--env 'A=1 2'", ["--env", "A=1 2"]),
        ('--env A="$DATA  x"', ["--env", "A=/p/data  x"]),
        ("--env A='$DATA'", ["--env", "A=$DATA"]),
        (r"--env A=\$DATA\ x", ["--env", "A=$DATA x"]),
        (r'--env "a \" b"', ["--env", 'a " b']),
        ("--bind a#b", ["--bind", "a#b"]),
        ("--env ''", ["--env", ""]),
        ("--env 'a;b|c&d'", ["--env", "a;b|c&d"]),
        ("--env A=$(echo 'a)' \"b c\")x --nv", ["--env", "A=a)", "b", "cx", "--nv"]),
        ('"$(echo "a  b" c)" d', ["a  b c", "d"]),
        ("'$(echo a' b", ["$(echo a", "b"]),
    ],
)
def test_words_mean_to_bash_what_was_written(text: str, arguments: list[str]) -> None:
    assert bash(" ".join(split_words(text))) == arguments


@settings(max_examples=150, deadline=None)
@example("$'\\'")
@example("$'\\'' a")
@given(st.text("ab\\ '\"$DATA/:=\t\n#", max_size=12))
def test_splitting_is_bash_s_own(text: str) -> None:
    try:
        words = split_words(text)
    except ValueError:
        return
    if "$$" in text:  # a number that differs each time
        return
    each = [argument for word in words for argument in bash(word)]
    assert bash(" ".join(words)) == each
    assert (
        bash(text.replace("\n", " ") if not set(text) & set("'\"\\") else " ".join(words)) == each
    )


@pytest.mark.parametrize(
    "text", ["a;b", "a|b", "a&", "$(x", "`x`", "a>b", "# x", "'a", '"a', "a\\"]
)
def test_what_would_end_the_command_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="has a"):
        split_words(text)


def test_a_number_that_is_too_large_is_refused_as_that() -> None:
    with pytest.raises(ValueError, match="a whole number of 1 or more and below a billion"):
        parse_integer(10**9, 1)


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
