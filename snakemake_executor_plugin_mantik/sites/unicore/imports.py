"""Imports: files that a UNICORE server fetches from another server to one of its storages.

UNICORE calls them transfers. The server reads files of another UNICORE server with a token of its
own for the user, which that server accepts only if its operators trust this one
(`container.security.rest.jwt.trustedIssuerCert`), and files at any http(s) URL. Measured with
UNICORE/X 11.0: `transferredBytes` is 0 until the end, and a transfer that is deleted goes on.
"""

import re
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import SiteError, SiteNotFound, one_line
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.sites.answers import shorten
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, SharedFile
from snakemake_executor_plugin_mantik.sites.unicore.connection import UnicoreConnection
from snakemake_executor_plugin_mantik.sites.unicore.paths import StoragePaths

API: Final = "unicore"

_QUERY: Final = re.compile(r"(\?|%3[Ff]|;)\S+")
"""The end of a URL, which may grant access to a file."""

_PHASES: Final = {
    "CREATED": Phase.WAITING,
    "RUNNING": Phase.RUNNING,
    "DONE": Phase.ENDED,
    "FAILED": Phase.ENDED,
    "ABORTED": Phase.ENDED,
}


def _hidden(text: str, url: str) -> str:
    """Return a server's text without what grants access to the file at `url`."""
    return _QUERY.sub("?…", text.replace(url, url.partition("?")[0]) if url else text)


class UnicoreImports:
    """Imports to the workspace, and the addresses of its files for those of other servers."""

    def __init__(self, connection: UnicoreConnection, paths: StoragePaths) -> None:
        self._connection = connection
        self._paths = paths

    def share(self, path: str) -> SharedFile:
        return SharedFile(f"{self._connection.base}{self._paths.url(path)}", API)

    async def start(self, source: SharedFile, path: str) -> str:
        self._paths.url(path)  # which checks it
        body = {"file": self._paths.below(path), "source": source.url}
        url = f"{self._paths.storage}/transfers"
        try:
            answer = await self._connection.once("import", "POST", url, json=body)
        except SiteError as error:  # the server may repeat the address
            error.what = _hidden(error.what, source.url)
            raise
        import_id = str(answer.headers.get("location", "")).rstrip("/").rpartition("/")[2]
        if not import_id:
            raise self._connection.nonsense(url)
        return import_id

    async def state(self, import_id: str) -> JobState:
        url = f"/transfers/{import_id}"
        try:
            found = await self._connection.get("import state", url)
        except SiteNotFound:
            return JobState(Phase.UNKNOWN)
        phase = _PHASES.get(str(found.get("status")))
        if phase is None:
            raise self._connection.nonsense(url)
        if phase is not Phase.ENDED:
            return JobState(phase)
        done = found["status"] == "DONE"
        message = str(found.get("statusMessage") or "").removeprefix("NOT_SUCCESSFUL").strip()
        message = shorten(one_line(_hidden(message, str(found.get("source") or ""))))
        return JobState(phase, Reason.SUCCESS if done else Reason.UNKNOWN, message)

    async def end(self, import_id: str) -> None:
        try:
            await self._connection.ask("end import", "DELETE", f"/transfers/{import_id}")
        except SiteNotFound:
            return
