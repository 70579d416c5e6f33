"""Imports: files that a job at a firecREST site fetches from another server, with curl.

It has the directives of the site's own transfer jobs, whose nodes reach the site's object store and
often the internet. The URL grants access to the file, so the job reads it from a private file, as
`curl --config`.
"""

import re
import shlex
import uuid
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import SiteRejected, SiteUnreachable
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, SharedFile
from snakemake_executor_plugin_mantik.sites.firecrest.files import FirecrestFiles
from snakemake_executor_plugin_mantik.sites.firecrest.jobs import FirecrestJobs
from snakemake_executor_plugin_mantik.sites.firecrest.opening import FirecrestSystem
from snakemake_executor_plugin_mantik.sites.firecrest.paths import (
    JOBS,
    TRANSFERS,
    WorkspacePaths,
)
from snakemake_executor_plugin_mantik.sites.firecrest.transfers import transfer_script

_ATTEMPTS: Final = 5
"""How often the job connects; each attempt goes on where the one before broke off."""
_STALLED_S: Final = 120
"""Seconds of next to no bytes after which an attempt ends."""

_SAFE: Final = re.compile(r"https?://[!#-\[\]-~]+")
"""URLs that are one option of curl's, in quotes: ASCII without blanks, quotes and backslashes."""

_FETCH: Final = """\
config={config}
trap 'rm -f -- "$config"' EXIT
umask 077
for attempt in {attempts}; do
  curl --config "$config" --fail --silent --show-error --location --continue-at - \\
    --connect-timeout 60 --speed-limit 1000 --speed-time {stalled} --output {target} && exit
  sleep "$attempt"
done
exit 1
"""


class FirecrestImports:
    """Imports to the workspace.

    Their ids are those of their jobs, if these are known, and of the private files.
    """

    def __init__(
        self,
        system: FirecrestSystem,
        paths: WorkspacePaths,
        files: FirecrestFiles,
        jobs: FirecrestJobs,
        account: str | None,
    ) -> None:
        self._system = system
        self._paths = paths
        self._files = files
        self._jobs = jobs
        self._account = account

    async def start(self, source: SharedFile, path: str) -> str | None:
        if source.api or not _SAFE.fullmatch(source.url):
            return None
        name = str(uuid.uuid4())
        config = f"{TRANSFERS}/{name}"
        commands = _FETCH.format(
            config=shlex.quote(self._paths.absolute(config)),
            target=shlex.quote(self._paths.absolute(path)),
            attempts=" ".join(map(str, range(1, _ATTEMPTS + 1))),
            stalled=_STALLED_S,
        )
        script = transfer_script(self._system, self._paths.absolute(JOBS), self._account, commands)
        await self._files.make_directory(TRANSFERS, private=True)
        scheme = source.url.partition(":")[0]
        options = f'url = "{source.url}"\ngloboff\nproto = "={scheme}"\nproto-redir = "={scheme}"\n'
        await self._files.put(config, options.encode(), private=True)
        try:
            job = await self._jobs.submit(script, self._paths.root)
        except SiteRejected:
            await self._files.remove(config)
            raise
        except SiteUnreachable:  # it may have been submitted
            job = ""
        return f"{job}/{name}"

    async def state(self, import_id: str) -> JobState:
        job = import_id.partition("/")[0]
        return await self._jobs.state(job) if job else JobState(Phase.UNKNOWN)

    async def end(self, import_id: str) -> None:
        job, _, name = import_id.partition("/")
        await self._files.remove(f"{TRANSFERS}/{name}")  # a job that starts later ends at once
        if not job:
            return
        if (await self._jobs.state(job)).phase is not Phase.ENDED:
            await self._jobs.cancel([job])
        await self._files.remove(f"{JOBS}/{job}.out")
