"""Paths of the workspace in firecREST's API."""

from typing import Final

from snakemake_executor_plugin_mantik.common.errors import SiteRejected
from snakemake_executor_plugin_mantik.sites.base import is_rest_safe

JOBS: Final = ".mantik/jobs"
"""Holds the scheduler's output of each job, `<id>.out`: mostly empty, else why it was killed."""
TRANSFERS: Final = ".mantik/transfers"
"""Holds parts of large files during their transfer."""

_ESCAPED: Final = frozenset("&<>")
"""firecREST HTML-escapes paths in the scripts of its transfer jobs (autoescape)."""


def is_expressible(path: str) -> bool:
    """Check whether firecREST can carry `path`, which is relative to the workspace.

    It puts paths between single quotes of a shell command, and lists names as C strings.
    """
    return is_rest_safe(path) and not {"", ".", ".."} & set(path.split("/"))


def is_transferable(path: str) -> bool:
    """Check whether firecREST's own transfer jobs find `path`."""
    return not _ESCAPED & set(path)


class WorkspacePaths:
    """Absolute paths below the workspace `root`."""

    def __init__(self, site: str, root: str) -> None:
        self._site = site
        self.root = root.rstrip("/")

    def absolute(self, path: str) -> str:
        """Return the absolute path of `path`; `.` is the workspace itself.

        Raises:
            SiteRejected: firecREST cannot carry the path.
        """
        return self.root if path in (".", "") else f"{self.root}/{self._checked(path)}"

    def anywhere(self, path: str) -> str:
        """Return an absolute path, or that of `path` in the workspace. To read only.

        Raises:
            SiteRejected: firecREST cannot carry the path.
        """
        return f"/{self._checked(path[1:])}" if path.startswith("/") else self.absolute(path)

    def _checked(self, path: str) -> str:
        if not is_expressible(path):
            raise SiteRejected(
                f"firecREST cannot carry the path {path!r}",
                where=f"site {self._site}",
                do="Use names of ASCII characters without % ' $ ` \" and backslash",
            )
        return path


def parent_directory(path: str) -> str:
    """Return the directory that holds `path`, relative to the workspace."""
    return path.rpartition("/")[0] or "."
