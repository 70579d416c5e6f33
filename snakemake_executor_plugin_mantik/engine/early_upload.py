"""Upload files to a place before a job needs them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from snakemake_executor_plugin_mantik.engine.stage import Stager
from snakemake_executor_plugin_mantik.staging.local import LocalFile

_MOST_BUNDLES = 64
"""In how many bundles files are uploaded at most, if none is large: a script names all that it
needs, and of a bundle all is uploaded again if one of its files changes."""


@dataclass(frozen=True)
class EarlyUpload:
    """What was uploaded: the number of files and their size in bytes."""

    files: int
    size: int


async def upload_early(
    stager: Stager,
    files: Sequence[LocalFile],
    begin: Callable[[int], Callable[[float], None]],
    *,
    upload_bytes: int,
) -> EarlyUpload:
    """Upload those of `files` that a place lacks, in bundles that stay until a job unpacks them.

    `begin` is called with the number of bytes to upload; the function that it returns is called
    with the number of those that have been, again and again. `upload_bytes` is the most that the
    site takes with one request.

    Raises:
        FileChanged: a file changed meanwhile. What was uploaded before it counts.
        UserError: a file cannot be read.
        SiteError: the site refuses a request.
    """
    lacking = await stager.find_lacking(files)
    size = sum(file.size for file in lacking)
    report = begin(size)
    done = 0
    for batch in _split(lacking, max(upload_bytes, size // _MOST_BUNDLES)):
        whole = sum(file.size for file in batch)
        await stager.keep(batch, partial(_report_share, report, done, whole))
        done += whole
        report(done)
    return EarlyUpload(len(lacking), size)


def _report_share(report: Callable[[float], None], before: int, size: int, share: float) -> None:
    """Report the bytes sent so far: those of earlier bundles, and a share of the present one."""
    report(before + share * size)


def _split(files: Sequence[LocalFile], size: int) -> Iterator[list[LocalFile]]:
    """Split files into groups of at most `size` bytes, or of one larger file."""
    group: list[LocalFile] = []
    filled = 0
    for file in files:
        if group and filled + file.size > size:
            yield group
            group, filled = [], 0
        group.append(file)
        filled += file.size
    if group:
        yield group
