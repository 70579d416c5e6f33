"""Paths of the workspace in UNICORE's storages."""

import posixpath
import re
from collections.abc import Mapping
from urllib.parse import quote

from snakemake_executor_plugin_mantik.common.errors import SiteRejected
from snakemake_executor_plugin_mantik.jobs.paths import path_at_site

_REFUSED = re.compile(r"[%'\\$\x00-\x1f\x7f]")
"""Characters that UNICORE cannot carry (measured): `%`, backslash, newline and tab are refused,
a name with a single quote can be written and not read, `$HOME` and `$USER` are replaced."""


def is_encodable(path: str) -> bool:
    """Check whether UNICORE can carry `path`, which is relative to the workspace."""
    parts = path.split("/")
    return not _REFUSED.search(path) and not {"", ".", ".."} & set(parts)


class StoragePaths:
    """URL paths of files below `root`, a directory relative to the mount point of a storage.

    `storage` is the URL path of the storage itself.
    """

    def __init__(self, site: str, storage: str, root: str) -> None:
        self._site = site
        self.root = root
        self.storage = f"/storages/{quote(storage, safe='')}"
        self._files = f"{self.storage}/files"

    def url(self, path: str) -> str:
        """Return the URL path of `path`; `.` is the workspace itself.

        Raises:
            SiteRejected: UNICORE cannot carry the path.
        """
        if path in (".", ""):
            return f"{self._files}/{quote(self.root)}"
        if not is_encodable(path):
            raise SiteRejected(
                f"UNICORE cannot carry the path {path!r}",
                where=f"site {self._site}",
                do="Use names without % ' $ backslash and control characters",
            )
        return f"{self._files}/{quote(self.below(path))}"

    def below(self, path: str) -> str:
        """Return `path` relative to the storage's mount point."""
        return path_at_site(self.root, path).lstrip("/")


def find_storage(mounts: Mapping[str, str], workspace: str) -> tuple[str, str] | None:
    """Find the storage that holds the absolute path `workspace`, and the path below its mount.

    `mounts` has the absolute mount points by storage. Returns None if no storage holds the
    workspace; of several, the one mounted deepest.
    """
    workspace = posixpath.normpath(workspace)
    found = None
    deepest = -1
    for storage, mount in mounts.items():
        root = posixpath.normpath(mount)
        below = workspace if root == "/" else workspace.removeprefix(root)
        inside = root == "/" or (workspace.startswith(root) and below[:1] == "/")
        if inside and len(root) > deepest:
            found, deepest = (storage, below.strip("/")), len(root)
    return found
