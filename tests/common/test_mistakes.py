"""Mistakes that are collected and reported together."""

import pytest

from snakemake_executor_plugin_mantik.common.errors import (
    ConfigError,
    Mistake,
    MistakeCollector,
    UserError,
    shorten_list,
)


def test_one_mistake_is_reported_as_it_is() -> None:
    found = MistakeCollector()
    with found.check():
        pass
    found.refuse()
    with found.check():
        raise UserError("this is wrong", do="Correct it")
    with pytest.raises(UserError, match=r"^this is wrong\. Correct it\.$"):
        found.refuse()


def test_several_are_numbered_and_say_once_that_nothing_was_submitted() -> None:
    found = MistakeCollector()
    with found.check():
        raise ConfigError([Mistake("a.yaml", "Queue", "is missing")])
    inner = MistakeCollector()
    for what in ("nothing submitted: one\n  two", "three (nothing submitted)"):
        with inner.check():
            raise UserError(what, do="Correct it")
    with found.check():
        inner.refuse()
    with pytest.raises(UserError) as caught:
        found.refuse()
    assert str(caught.value).splitlines() == [
        "Nothing submitted: the workflow has 3 kinds of mistakes.",
        "1. One mistake in the configuration.",
        "     a.yaml: Queue: is missing",
        "2. One",
        "     two.",
        "   Correct it.",
        "3. Three. Correct it.",
    ]


def test_other_errors_are_not_collected() -> None:
    with pytest.raises(ZeroDivisionError), MistakeCollector().check():
        _ = 1 / 0


def test_long_lists_are_cut() -> None:
    assert shorten_list(map(str, range(21))) == [str(n) for n in range(21)]
    assert shorten_list(map(str, range(1000)))[19:] == ["19", "… and 980 more"]
