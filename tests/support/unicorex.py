"""UNICORE/X servers in embedded mode, for tests: queues, two storages, no scheduler.

Jobs are processes of the server's own user, started at once as far as there is room. Whoever aborts
one is told that it ended, but it runs on. All pytest workers share one server (2 s to start,
220 MB). Without Java or Maven the tests are skipped, in CI they fail.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from string import Template

import pytest

from tests.real import apptainer
from tests.support.needs import require
from tests.support.ports import free_port
from tests.support.shared import Told, keep, session_directory, shared
from tests.support.unicoreserver import (
    DATA,
    OwnUnicoreX,
    UnicoreX,
    lacking,
    server_command,
    wait_until_it_answers,
    write_configuration,
)

SOFTWARE = "UNICORE/X"
"""What the marks `software` call it."""

SLOTS = 16
"""How many jobs run at the same time on the server that tests share; others wait in turn."""
OWN_SLOTS = 3
"""How many jobs run at the same time on a server of a test's own; others wait in its memory."""


def _configure(server: UnicoreX, slots: int) -> None:
    for name in ("scratch", "work", "jobs"):
        (server.directory / name).mkdir()
    mode = Template((DATA / "embedded.config").read_text())
    text = mode.substitute(DIRECTORY=server.directory, SLOTS=slots)
    write_configuration(server, text, DATA / "idb.json", "root")


def _start_shared(directory: Path, users: Path, slots: int = SLOTS) -> Told:
    server = UnicoreX(directory, free_port(), directory / "scratch")
    command = server_command()
    _configure(server, slots)
    environment = {**os.environ, **apptainer.environment()}
    console = directory / "console.log"
    keeper = keep(users, command, directory=directory, console=console, env=environment)
    wait_until_it_answers(server, lambda: keeper.poll() is None)
    return server.to_json()


@pytest.fixture(scope="session")
def unicorex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnicoreX]:
    """The session's UNICORE/X server; tests keep apart by workspaces of their own."""
    require(lacking(), SOFTWARE)
    with shared(session_directory(tmp_path_factory) / "unicorex", _start_shared) as told:
        yield UnicoreX.from_json(told)


@pytest.fixture(scope="session")
def narrow_unicorex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnicoreX]:
    """Another one, which runs one job at a time: the next ones wait."""
    require(lacking(), SOFTWARE)
    start = partial(_start_shared, slots=1)
    with shared(session_directory(tmp_path_factory) / "narrow-unicorex", start) as told:
        yield UnicoreX.from_json(told)


@contextmanager
def own_unicorex(directory: Path, slots: int) -> Iterator[OwnUnicoreX]:
    """A server of one test, in a new directory, which the test starts."""
    require(lacking(), SOFTWARE)
    directory.mkdir()
    server = OwnUnicoreX(directory, free_port(), directory / "scratch")
    _configure(server, slots)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def unicorex_to_stop(tmp_path: Path) -> Iterator[OwnUnicoreX]:
    """A server for one test that stops it."""
    with own_unicorex(tmp_path / "unicorex", OWN_SLOTS) as server:
        server.start()
        yield server
