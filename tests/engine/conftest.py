"""Async tests of the engine run in virtual time."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.controller import Controller
from tests.support.virtualtime import VirtualLoop
from tests.support.world import World


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": VirtualLoop}


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def controller(tmp_path: Path, world: World) -> AsyncIterator[Controller]:
    controller = Controller(world, tmp_path)
    await controller.open()
    yield controller
    controller.work.watcher.close()
    controller.journal.close()
