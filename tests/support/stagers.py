"""A stager without the place that it belongs to."""

from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.engine.stage import Stager
from snakemake_executor_plugin_mantik.engine.workflow_context import PlaceContext, WorkflowContext
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


def context_of(journal: Journal, notify: Callable[[str], None]) -> WorkflowContext:
    """What the work at all places shares, for uploads: no try is given up."""
    nobody = cast(Any, None)
    return WorkflowContext(journal, journal.path.parent, journal.path.parent, notify, nobody)


def make_stager(
    site: Site,
    journal: Journal,
    retry: SiteRetry,
    notify: Callable[[str], None] = lambda _: None,
    fetch: Fetch = nowhere,
) -> Stager:
    """Make the stager of the place `sim`."""
    at = PlaceContext("sim", site, retry, context_of(journal, notify))
    return Stager(at, fetch=fetch, share=unshared, limit=UPLOAD_BYTES)
