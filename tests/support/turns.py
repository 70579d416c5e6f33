"""Which cells of a table of tests CI tries, and which are left to `make nightly`."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def in_turn(groups: Iterable[Sequence[tuple[Any, ...]]]) -> "list[Any]":
    """All cells, as parameters: CI tries one of each group, the next one in each next group."""
    return [
        pytest.param(
            *cell, id="-".join(map(str, cell)),
            marks=() if place == number % len(group) else pytest.mark.nightly,
        )
        for number, group in enumerate(groups)
        for place, cell in enumerate(group)
    ]  # fmt: skip
