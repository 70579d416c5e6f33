"""Snakemake's storage provider `mantik`: outputs stay at the site where a job made them.

What lies where is the knowledge of `snakemake_executor_plugin_mantik.storage`; this package answers
Snakemake's questions with it. A file that no job of the executor has stored is a file on this
machine, at the path that the Snakefile names, and is never removed or replaced.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snakemake_interface_storage_plugins.io import IOCacheStorageInterface, get_constant_prefix
from snakemake_interface_storage_plugins.storage_object import (
    StorageObjectGlob,
    StorageObjectRead,
    StorageObjectTouch,
    StorageObjectWrite,
)
from snakemake_interface_storage_plugins.storage_provider import (
    ExampleQuery,
    QueryType,
    StorageProviderBase,
    StorageQueryValidationResult,
)

from snakemake_executor_plugin_mantik.jobs.paths import display_path
from snakemake_executor_plugin_mantik.storage.paths import PREFIX, home_of, workspace_path

if TYPE_CHECKING:
    from snakemake_executor_plugin_mantik.journal import StoredOutput
    from snakemake_executor_plugin_mantik.storage.catalog import Catalog

_EVERYWHERE = tuple(("/", name) for name in ("dev", "proc", "sys"))
"""The beginnings of paths that are the same on every machine."""
_TIMESTAMP = ".snakemake_timestamp"


class StorageProvider(StorageProviderBase):
    """Knows which outputs of a workflow lie at which site."""

    @classmethod
    def example_queries(cls) -> list[ExampleQuery]:
        return [
            ExampleQuery(
                query=f"{PREFIX}/results/model.pt",
                description="a file that stays at the site where a job makes it",
                type=QueryType.ANY,
            )
        ]

    @property
    def catalog(self) -> "Catalog":
        """The catalog of the workflow in the present working directory."""
        # Imported here because Snakemake imports all storage plugins for each of its commands.
        from snakemake_executor_plugin_mantik.storage.catalog import catalog_of

        return catalog_of(Path.cwd())

    def rate_limiter_key(self, query: str, operation: Any) -> str:  # noqa: ARG002
        return PREFIX

    def default_max_requests_per_second(self) -> float:
        return 1000.0

    def use_rate_limiter(self) -> bool:
        return False

    @classmethod
    def is_valid_query(cls, query: str) -> StorageQueryValidationResult:
        valid = query.startswith(f"{PREFIX}/") and len(query) > len(PREFIX) + 1
        reason = None if valid else f"it does not begin with {PREFIX}/, followed by a path"
        return StorageQueryValidationResult(query=query, valid=valid, reason=reason)


class StorageObject(StorageObjectRead, StorageObjectWrite, StorageObjectGlob, StorageObjectTouch):
    """A file or directory that may be stored at a site."""

    provider: StorageProvider

    def __post_init__(self) -> None:
        if self.home.parts[:2] in _EVERYWHERE:
            self.set_local_path(self.home)
            self.keep_local = True  # this is no copy

    @property
    def home(self) -> Path:
        """The path on this machine, if it is no stored output."""
        return Path(home_of(self.query))

    def local_suffix(self) -> str:
        return workspace_path(self.query)

    async def inventory(self, cache: IOCacheStorageInterface) -> None:
        """Do nothing: the catalog lists each directory at most once."""

    def get_inventory_parent(self) -> str | None:
        return None

    def cleanup(self) -> None:
        """Do nothing: Snakemake itself removes the local copy."""

    def exists(self) -> bool:
        if (output := self._stored()) is not None and not output.here:
            self.provider.catalog.drop_older(output, self.local_path())
            return True
        if self.provider.catalog.is_lost(self._path) or not os.path.exists(self.home):
            return False
        self.provider.catalog.link_here(self._path, self.local_path())
        return True

    def mtime(self) -> float:
        if (output := self._stored()) is not None and not output.here:
            return output.made
        timestamp = self.home / _TIMESTAMP
        return (timestamp if timestamp.exists() else self.home).stat().st_mtime

    def size(self) -> int:
        if (output := self._stored()) is not None and not output.here:
            return 0 if output.directory else output.size
        return 0 if self.home.is_dir() else self.home.stat().st_size

    def checksum(self) -> str | None:
        output = self._stored()
        if output is None or output.directory or len(output.files) != 1:
            return None
        return f"sha256:{output.files[0].sha256}"

    def retrieve_object(self) -> None:
        target = self.local_path()
        output = self._stored()
        if output is not None and not output.here:
            self.provider.catalog.bring(output, target)
            return
        self.provider.catalog.link_here(self._path, target)

    def store_object(self) -> None:
        self.provider.catalog.store_here(self._path, self.local_path())

    def remove(self) -> None:
        """Remove what a job has stored. A file of the user's own stays."""
        self.provider.catalog.drop_copy(self.local_path())
        self.provider.catalog.remove(self._path)

    def touch(self) -> None:
        """Let a stored output be as new as now. A file of the user's own keeps its time."""
        self.provider.catalog.touch(self._path)

    def list_candidate_matches(self) -> Iterable[str]:
        prefix = os.path.dirname(get_constant_prefix(home_of(self.query)))
        found = {
            os.path.join(folder, name)
            for folder, _, names in os.walk(prefix or ".")
            for name in names
        }
        for output in self.provider.catalog.outputs():
            found |= {display_path(path) for path in [output.path, *(f.path for f in output.files)]}
        return [f"{PREFIX}/{os.path.normpath(path)}" for path in sorted(found)]

    @property
    def _path(self) -> str:
        return workspace_path(self.query)

    def _stored(self) -> "StoredOutput | None":
        return self.provider.catalog.find(self._path)
