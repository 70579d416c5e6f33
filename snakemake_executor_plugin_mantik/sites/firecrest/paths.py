"""Paths of the workspace as firecREST takes them."""

from typing import Final

from snakemake_executor_plugin_mantik.common.errors import SiteRejected
from snakemake_executor_plugin_mantik.sites.base import is_rest_safe

JOBS: Final = ".mantik/jobs"
"""Holds what the scheduler writes of a job, `<id>.out`: mostly empty, else why it was killed."""
TRANSFERS: Final = ".mantik/transfers"
"""Holds parts of large files on their way."""

_ESCAPED: Final = frozenset("&<>")
"""firecREST writes paths into the scripts of its transfer jobs as into HTML (autoescape)."""


def is_expressible(path: str) -> bool:
    """Whether firecREST can carry `path`, which is relative to the workspace.

    It puts paths between single quotes of a shell command, and lists names as a C string.
    """
    return is_rest_safe(path) and not {"", ".", ".."} & set(path.split("/"))


def is_transferable(path: str) -> bool:
    """Whether firecREST's own transfer jobs find `path`."""
    return not _ESCAPED & set(path)


class WorkspacePaths:
    """Paths below the workspace, absolute.

    Attributes:
        root: the workspace.
    """

    def __init__(self, site: str, root: str) -> None:
        self._site = site
        self.root = root.rstrip("/")

    def absolute(self, path: str) -> str:
        """The absolute path of `path`; `.` is the workspace itself.

        Raises:
            SiteRejected: if firecREST cannot carry the path.
        """
        if path in (".", ""):
            return self.root
        if not is_expressible(path):
            raise SiteRejected(
                f"firecREST cannot carry the path {path!r}",
                where=f"site {self._site}",
                do="Use names of ASCII characters without % ' $ ` \" and backslash",
            )
        return f"{self.root}/{path}"


def parent_directory(path: str) -> str:
    """The directory that holds `path`, relative to the workspace."""
    return path.rpartition("/")[0] or "."
