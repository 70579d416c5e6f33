"""A stager without the place that it belongs to."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, cast

from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.engine.stage import Staged, Stager
from snakemake_executor_plugin_mantik.engine.workflow_context import PlaceContext, WorkflowContext
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.sites.base import SharedFile
from snakemake_executor_plugin_mantik.staging.bundle import Fetch
from snakemake_executor_plugin_mantik.staging.local import LocalFile, LocalFiles
from tests.support.simulated import SimulatedSite, World

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
    """What the work at all places shares, for uploads: no attempt is given up."""
    at = journal.path.parents
    return WorkflowContext(journal, at[2], at[0], notify, cast(Any, None))


class Bench:
    """The stager of the place `sim`, as it is in one run of a workflow.

    Attributes:
        said: the lines in the user's log.
    """

    journal: Journal

    def __init__(self, workdir: Path) -> None:
        self.world, self.workdir = World(), workdir
        self.world.make_directory(".mantik")
        self.begin()

    def begin(self, fetch: Fetch = nowhere) -> None:
        """Begin a run, or another one with the same journal and site."""
        if hasattr(self, "journal"):
            self.journal.close()
        self.journal = Journal(self.workdir / ".snakemake/mantik")
        self.site = SimulatedSite(self.world)
        self.said: list[str] = []
        self.local = LocalFiles(self.workdir, self.journal.files)
        self.stager = self.make_stager(self.local, fetch)

    def make_stager(self, local: LocalFiles, fetch: Fetch = nowhere) -> Stager:
        retry = SiteRetry("sim", self.said.append, asyncio.get_running_loop().time)
        at = PlaceContext("sim", self.site, retry, context_of(self.journal, self.said.append))
        return Stager(at, local, fetch=fetch, share=unshared, limit=UPLOAD_BYTES)

    def job(self, staged: Staged) -> tuple[str, tuple[str, ...]] | None:
        """What fails in a job's script; None if nothing does."""
        record = self.journal.new_attempt(site="sim", job="j", rule="r", name="j", fingerprint="f")
        spec = JobSpec(
            record.paths, "/ws", "j", ":",
            bundles=staged.bundles, inline=staged.inline, inputs=staged.inputs,
        )  # fmt: skip
        return self.world._stage(spec)
