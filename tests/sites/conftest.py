"""A server that says what it is told."""

from collections.abc import Iterator

import pytest

from snakemake_executor_plugin_mantik.sites import rest
from tests.support.parrot import Parrot


@pytest.fixture
def parrot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parrot]:
    monkeypatch.setattr(rest, "REPEAT_FIRST_S", 0.01)
    parrot = Parrot("/rest/core")
    parrot.thread.start()
    yield parrot
    parrot.stop()
