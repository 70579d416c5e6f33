"""Submitting one try: written to the journal first; a lost answer is unknown, not failed."""

import asyncio
import shlex
from collections.abc import Mapping

from snakemake_executor_plugin_mantik.common.errors import (
    SiteBusy,
    SiteNotFound,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.jobs.paths import SECRETS
from snakemake_executor_plugin_mantik.jobs.script import render_script
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec
from snakemake_executor_plugin_mantik.journal import Journal, TryRecord
from snakemake_executor_plugin_mantik.sites.base import Site, Submission

_NOT_DONE = (SiteBusy, SiteUnauthorized, SiteNotFound)
"""After these the job does not exist and may simply be submitted again. Not found is what a server
says of its own services while it starts."""


def make_submission(spec: JobSpec) -> Submission:
    """A try as a site is given it.

    Raises:
        UserError: something of it no script can carry.
    """
    return Submission(
        tag=spec.paths.try_id,
        name=spec.name,
        script=render_script(spec),
        resources=spec.resources,
        before_on_login=spec.environment.before_on_login,
        after_on_login=spec.environment.after_on_login,
        login_shell=bool(spec.environment.modules),
    )


class Submitter:
    """Submits tries to one site."""

    def __init__(self, site: Site, journal: Journal, retry: SiteRetry) -> None:
        self._site = site
        self._journal = journal
        self._retry = retry
        self._directories: dict[str, asyncio.Task[None]] = {}

    async def submit(
        self, record: TryRecord, submission: Submission, secrets: Mapping[str, str]
    ) -> str | None:
        """Submit a try; the site's id of it, or None if its fate is unknown.

        Submitting a try again is harmless: its claim lets it run once.

        Raises:
            SiteRejected: the site will not take it; it does not exist.
        """
        paths = record.paths
        await self._directory(paths.tries)  # the job makes its claim in it
        if secrets:
            await self._directory(SECRETS, private=True)
            content = _secret_assignments(secrets)
            self._journal.secrets_sent(record.id)
            await self._retry.found(lambda: self._site.put(paths.secrets, content, private=True))

        def begin() -> None:
            # Not before: what waits for its turn was not sent, whenever this process dies.
            self._journal.submitting(record.id, submission.resources.queue or "")

        try:
            site_job = await self._retry(
                lambda: self._site.submit(submission, begin), repeat=_NOT_DONE
            )
        except SiteUnreachable as error:
            self._retry.failed(error)
            return None
        self._journal.submitted(record.id, site_job, self._site.clock)
        return site_job

    def purged(self) -> None:
        """The workspace has lost things: its directories are made anew."""
        self._directories.clear()

    async def _directory(self, path: str, *, private: bool = False) -> None:
        """Make a directory that must be there before jobs, once; jobs of a run share it."""
        if path not in self._directories:
            self._directories[path] = asyncio.create_task(
                self._retry.found(lambda: self._site.make_directory(path, private=private))
            )
        try:
            await self._directories[path]
        except BaseException:
            self._directories.pop(path, None)  # the next job may have more luck
            raise


def _secret_assignments(secrets: Mapping[str, str]) -> bytes:
    """The file that sets the secrets in a job's bash, for any value."""
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items()]
    return "".join(lines).encode()
