"""Download a directory of a job that could not list its files: killed, cancelled, or out of space.

The files are known only from the site's listing, and nothing depends on them: they are downloaded
as they are, within a time limit.
"""

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path, PurePosixPath

from snakemake_executor_plugin_mantik.common.errors import SiteError
from snakemake_executor_plugin_mantik.jobs.paths import MAX_PATH_DEPTH
from snakemake_executor_plugin_mantik.sites.base import Site, is_rest_safe

SALVAGE_WAIT_S = 60.0
"""Most seconds for the download: the report of the job's end waits for it."""
MAX_SALVAGED_BYTES = 4 << 30
"""Most bytes to download: a file at a site may be endless (a link to /dev/zero)."""
_SUFFIX = ".mantik-salvage"


async def salvage_files(site: Site, directory: str, workdir: Path) -> None:
    """Download `directory`, relative to the workspace and to `workdir`, as far as possible.

    Local entries of the same names are replaced after the whole download. A file whose download
    fails stays incomplete; after a timeout or a failed listing, nothing is replaced. Beyond
    `MAX_SALVAGED_BYTES` the rest is left out.
    """
    target = workdir / directory
    part = target.with_name(target.name + _SUFFIX)
    try:
        async with asyncio.timeout(SALVAGE_WAIT_S):
            await _fetch(site, directory, part)
        await asyncio.to_thread(_settle, part, target)
    except (TimeoutError, SiteError, OSError):
        pass  # keep the files that are here already
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
