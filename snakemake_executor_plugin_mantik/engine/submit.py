"""Submit a try, after recording it in the journal; a lost answer means unknown, not failed."""

import asyncio
import shlex
from collections.abc import Mapping

from snakemake_executor_plugin_mantik.common.errors import (
    SiteBusy,
    SiteNotFound,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.jobs.paths import SECRETS
from snakemake_executor_plugin_mantik.jobs.resources import memory_per_node
from snakemake_executor_plugin_mantik.jobs.script import render_script
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec, Resources
from snakemake_executor_plugin_mantik.journal import Asked, Journal, TryRecord
from snakemake_executor_plugin_mantik.sites.base import Site, Submission

from .site_retry import SiteRetry

_NOT_DONE = (SiteBusy, SiteUnauthorized, SiteNotFound)
"""After these errors the job does not exist and may be submitted again. A server answers "not
found" for its own services while it starts."""


def make_submission(spec: JobSpec) -> Submission:
    """Return the submission of a try: its script and resources.

    Raises:
        UserError: no script can contain some part of it.
    """
    return Submission(
        tag=spec.paths.try_id,
        name=spec.name,
        script=render_script(spec),
        resources=spec.resources,
        before_on_login=spec.environment.before_on_login,
        after_on_login=spec.environment.after_on_login,
        login_shell=bool(spec.environment.modules),
        slurm_options=spec.environment.slurm_options,
    )


class Submitter:
    """Submit tries to one site."""

    def __init__(self, site: Site, journal: Journal, retry: SiteRetry) -> None:
        self._site = site
        self._journal = journal
        self._retry = retry
        self._directories: dict[str, asyncio.Task[None]] = {}

    async def submit(
        self,
        record: TryRecord,
        submission: Submission,
        secrets: Mapping[str, str],
        cores: int | None = None,
    ) -> str | None:
        """Submit a try; return the site's id of it, or None if the submission's fate is unknown.

        Submitting a try again is harmless: its claim lets it run once. `cores` is how many it
        occupies, if known.

        Raises:
            SiteRejected: the site refuses it; the job does not exist.
        """
        paths = record.paths
        await self._directory(paths.tries)  # the job makes its claim there
        if secrets:
            await self._directory(SECRETS, private=True)
            content = _secret_assignments(secrets)
            self._journal.secrets_sent(record.id)
            await self._retry.found(lambda: self._site.put(paths.secrets, content, private=True))

        def begin() -> None:
            # Not earlier: a request that still waits its turn is not made if this process dies.
            resources = submission.resources
            asked = _asked(resources, cores)
            self._journal.submitting(record.id, resources.queue or "", resources.runtime_s, asked)

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
        """Let the next submission make its directories again: the workspace has lost files."""
        self._directories.clear()

    async def _directory(self, path: str, *, private: bool = False) -> None:
        """Make a directory that jobs need, once per run, and again after `purged`."""
        if path not in self._directories:
            self._directories[path] = asyncio.create_task(
                self._retry.found(lambda: self._site.make_directory(path, private=private))
            )
        try:
            await self._directories[path]
        except BaseException:
            self._directories.pop(path, None)  # the next job tries again
            raise


def _asked(resources: Resources, cores: int | None) -> Asked:
    nodes, gpus = resources.nodes, resources.gpus_per_node
    return Asked(
        cores=cores,
        memory_mib=memory_per_node(resources),
        memory_mib_per_cpu=resources.memory_mib_per_cpu,
        nodes=nodes,
        gpus=gpus and gpus * (nodes or 1),
    )


def _secret_assignments(secrets: Mapping[str, str]) -> bytes:
    """Return the file that sets the secrets in a job's bash, whatever characters they contain."""
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items()]
    return "".join(lines).encode()
