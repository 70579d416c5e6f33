"""Fetches a directory of a job that could not say what it left: killed, cancelled, without room.

Nothing is known of the files but what the site lists, and nobody depends on them: they are taken as
they are, as far as time goes.
"""

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path, PurePosixPath

from snakemake_executor_plugin_mantik.common.errors import SiteError
from snakemake_executor_plugin_mantik.jobs.paths import MAX_PATH_DEPTH
from snakemake_executor_plugin_mantik.sites.base import Site, is_rest_safe

SALVAGE_WAIT_S = 60.0
"""Seconds that it may take: an end waits for it."""
MAX_SALVAGED_BYTES = 4 << 30
"""Bytes that are taken at most: a file at a site may have no end (a link to /dev/zero)."""
_SUFFIX = ".mantik-salvage"


async def salvage_files(site: Site, directory: str, workdir: Path) -> None:
    """Bring what lies below `directory` at the site to the same place here, as far as possible.

    What is there already of the same name is replaced, once all of it has come.

    Args:
        site: where it lies.
        directory: relative to the workspace and to `workdir`.
        workdir: the workflow's directory.
    """
    target = workdir / directory
    part = target.with_name(target.name + _SUFFIX)
    try:
        async with asyncio.timeout(SALVAGE_WAIT_S):
            await _fetch(site, directory, part)
        await asyncio.to_thread(_settle, part, target)
    except (TimeoutError, SiteError, OSError):
        pass  # what is here already has to do
    finally:
        shutil.rmtree(part, ignore_errors=True)


async def _fetch(site: Site, directory: str, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    folders, size = [PurePosixPath()], 0
    while folders:
        folder = folders.pop()
        for name, entry in (await site.list(str(directory / folder))).items():
            below = folder / name
            if len(below.parts) != len(folder.parts) + 1 or len(below.parts) > MAX_PATH_DEPTH:
                continue
            if name == ".." or not is_rest_safe(str(directory / below)):
                continue
            if entry.directory:
                (target / below).mkdir()
                folders.append(below)
                continue
            with (target / below).open("wb") as file, suppress(SiteError):
                async for part in site.get(str(directory / below), size=entry.size):
                    size += len(part)
                    if size > MAX_SALVAGED_BYTES:
                        return
                    file.write(part)


def _settle(part: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in part.iterdir():
        place = target / path.name
        if place.is_dir():
            shutil.rmtree(place)
        path.rename(place)
