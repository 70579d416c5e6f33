"""A stager without the place that it belongs to."""

from collections.abc import AsyncGenerator, Callable

from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.engine.stage import Stager
from snakemake_executor_plugin_mantik.engine.transfer_meter import TransferMeter
from snakemake_executor_plugin_mantik.engine.upload import Importer, Uploader
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.sites.base import SharedFile, Site
from snakemake_executor_plugin_mantik.staging.bundle import Fetch
from snakemake_executor_plugin_mantik.staging.local import LocalFile

UPLOAD_BYTES = 100_000
"""What the site takes in one request."""


async def nowhere(file: LocalFile, offset: int) -> AsyncGenerator[bytes, None]:
    """No file is at another place."""
    raise AssertionError(f"{file.path} from {offset} on")
    yield b""


async def unshared(file: LocalFile) -> SharedFile | None:
    """No site lets another server read its files."""
    return None


def make_stager(
    site: Site,
    journal: Journal,
    retry: SiteRetry,
    notify: Callable[[str], None] = lambda _: None,
    fetch: Fetch = nowhere,
) -> Stager:
    """Make the stager of the place `sim`."""
    importer = Importer(
        site, journal.files, retry, share=unshared, notify=notify, meter=TransferMeter()
    )
    uploader = Uploader(
        site, "sim", journal, retry,
        notify=notify, meter=TransferMeter(), fetch=fetch, importer=importer, limit=UPLOAD_BYTES,
    )  # fmt: skip
    return Stager(site, "sim", journal, retry, uploader)
