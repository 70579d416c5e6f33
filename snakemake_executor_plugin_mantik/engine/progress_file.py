"""Publish the transfers of a run in a file, for those who watch it from another terminal."""

import asyncio
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.state_directory import open_private
from snakemake_executor_plugin_mantik.engine.transfer_meter import (
    Direction,
    TransferMeter,
    TransferView,
)

_NAME: Final = "transfers.json"
_WRITE_S: Final = 2.0
"""Seconds between two versions of the file; it exists only while something is under way."""
_STALE_S: Final = 10.0
"""Age from which the file was left by a controller that was killed, or that hangs."""


async def publish_transfers(meter: TransferMeter, state: Path) -> None:
    """Keep the file up to date until cancelled; `state` is the state directory."""
    path = state / _NAME
    written = False
    try:
        while True:
            await asyncio.sleep(_WRITE_S)
            views = meter.views()
            if views:
                written = True
                await asyncio.to_thread(_write, path, views)
            elif written:
                path.unlink(missing_ok=True)
                written = False
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, views: list[TransferView]) -> None:
    """Replace the file. A full disk is reported by the journal."""
    text = json.dumps({"at": time.time(), "transfers": [asdict(view) for view in views]})
    draft = path.with_suffix(".new")
    with suppress(OSError):
        with open_private(draft, "wb") as file:
            file.write(text.encode())
        os.replace(draft, path)


def read_transfers(state: Path) -> list[TransferView]:
    """Return the transfers of the controller that runs; none without one."""
    try:
        found: Any = json.loads((state / _NAME).read_bytes())
        if abs(time.time() - found["at"]) > _STALE_S:
            return []
        return [
            TransferView(**{**each, "direction": Direction(each["direction"])})
            for each in found["transfers"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # there is none, or another version wrote it
