"""Snakemake's storage provider `mantik`: outputs stay at the site where a job made them.

    storage.mantik("train/set.tar")               an output, which stays at the site that makes it
    storage.mantik("juwels:/p/data/imagenet")     a dataset, which lies at a site anyway

As the default storage provider it has all files of a workflow. What lies where is the knowledge of
`snakemake_executor_plugin_mantik.storage`; this package answers Snakemake's questions with it. A
file that no job of the executor has stored is a file on this machine, at the path that the
Snakefile names, and is never removed or replaced.
"""

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snakemake_interface_common.exceptions import WorkflowError
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

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.paths import display_path
from snakemake_executor_plugin_mantik.storage.paths import (
    DATASETS,
    PREFIX,
    Dataset,
    home_of,
    parse_dataset,
    plain_local_path,
    query_mistake,
    workspace_path,
)

if TYPE_CHECKING:
    from snakemake_executor_plugin_mantik.journal import RemoteOutput
    from snakemake_executor_plugin_mantik.storage.catalog import Catalog

_EVERYWHERE = ("/dev/", "/proc/", "/sys/")
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
            ),
            ExampleQuery(
                query="train/set.tar",
                description="the same, without --default-storage-provider",
                type=QueryType.ANY,
            ),
            ExampleQuery(
                query="juwels:/p/data/imagenet",
                description="a dataset: a file or directory that lies at a site anyway, read-only",
                type=QueryType.INPUT,
            ),
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
        reason = query_mistake(query)
        return StorageQueryValidationResult(query=query, valid=reason is None, reason=reason)

    def object(
        self,
        query: str,
        **options: Any,  # Snakemake gives none for paths without storage.mantik
    ) -> Any:
        """Return the object of a query. Snakemake never fetches or stores one with `retrieve` off.

        Without `--default-storage-provider` it would fetch all inputs and store all outputs.
        """
        if not options and not query.startswith(f"{PREFIX}/"):
            return InvalidObject(query, f"it does not begin with {PREFIX}/", self)
        if (copied := self._copied(query)) is not None:
            return self._of_copy(copied, query)
        if parse_dataset(query) is not None:
            return DatasetObject(query=query, keep_local=True, retrieve=False, provider=self)
        if not self.is_default:
            options["retrieve"] = False
        return super().object(query, **options)

    def _copied(self, query: str) -> str | None:
        """Return the query of a file that a Snakefile names by its local copy, else None.

        `os.path.join(checkpoints.split.get().output[0], "x")` is such a name.
        """
        if not query.startswith(f"{PREFIX}/"):
            return None
        copy = os.path.relpath(home_of(query), self.local_prefix)
        return None if copy.startswith("..") else f"{PREFIX}/{plain_local_path(copy)}"

    def _of_copy(self, query: str, named: str) -> Any:
        """Return the object for the `query` of a file, which is `named` by its local copy.

        Snakemake would not find the rule that makes it, so it must be a file on this machine, such
        as one in the directory of a checkpoint. Its own local path has to be another one:
        Snakemake takes a file for a local one if that is its name.
        """
        path = home_of(query)
        if not os.path.exists(path) or self.catalog.find(workspace_path(query)):
            return InvalidObject(
                named,
                f"it is made of the path of a rule's output or input, which is that of a local copy"
                f" with --default-storage-provider. Write the path itself, {path}, instead of"
                " rules.NAME.output[0].replace(...) and the like",
                self,
            )
        made = super().object(query)
        made.set_local_path(self.local_prefix / home_of(named).lstrip("/"))
        return made


class StorageObject(StorageObjectRead, StorageObjectWrite, StorageObjectGlob, StorageObjectTouch):
    """A file or directory that may be stored at a site."""

    provider: StorageProvider

    def __post_init__(self) -> None:
        if f"{home_of(self.query)}/".startswith(_EVERYWHERE):
            self.set_local_path(self.home)
            self.keep_local = True  # this is no copy

    def __repr__(self) -> str:
        """Return what Snakemake shows if `rules.NAME.output` is given to `expand()`."""
        path = home_of(self.query)
        return (
            f"<{self.query}: with --default-storage-provider, an output of a rule cannot be given"
            f' to expand(). Write its path instead, as in expand("{path}", ...)>'
        )

    @property
    def home(self) -> Path:
        """The path on this machine, if it is no remote output."""
        return Path(home_of(self.query))

    def local_suffix(self) -> str:
        return workspace_path(self.query)

    async def inventory(self, cache: IOCacheStorageInterface) -> None:
        """Let Snakemake see no local copies while it builds its graph of jobs.

        Snakemake 9.27 removes those of files that are made again
        (`DAG.sanitize_local_storage_copies`), and then takes them for protected, because they exist
        according to its cache and cannot be written (`_IOFile.protected`). The catalog removes
        outdated copies itself, and lists each directory of a place at most once.
        """
        cache.exists_local.has_inventory.add(PREFIX)
        if os.path.exists(self.home) and not os.access(self.home, os.W_OK):
            cache.exists_local[str(self.local_path())] = True

    def get_inventory_parent(self) -> str | None:
        """Return the key of `inventory`, one for all files."""
        return PREFIX

    def cleanup(self) -> None:
        """Do nothing: Snakemake itself removes the local copy."""

    def exists(self) -> bool:
        if self._is_home:
            return os.path.exists(self.home)
        self._clear_way()
        if (output := self._stored()) is not None and not output.here:
            self.provider.catalog.drop_older(output, self.local_path())
            return True
        if self.provider.catalog.is_lost(self._path) or not os.path.exists(self.home):
            return False
        if self.retrieve:
            with suppress(OSError):  # reported when a rule needs it
                self._link_here(anew=False)
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

    async def managed_retrieve(self) -> None:
        """Fetch it for a local rule. Without it only that rule fails.

        An error here would end the run, and all its jobs; and a command might succeed without the
        file. It finds something there that it cannot read: a directory for a file, and vice versa.
        """
        self._clear_way()
        try:
            await super().managed_retrieve()
        except (WorkflowError, OSError) as error:
            self.provider.logger.error(" ".join(map(str, error.args)))  # noqa: TRY400 - no trace
            output = self._stored()
            self.provider.catalog.block(
                self.local_path(), directory=output is None or not output.directory
            )

    def retrieve_object(self) -> None:
        if self._is_home:
            return
        if (output := self._stored()) is not None and not output.here:
            self.provider.catalog.bring(output, self.local_path())
        else:
            self._link_here(anew=True)

    def store_object(self) -> None:
        if not self._is_home:
            self.provider.catalog.store_here(self._path, self.local_path())

    def remove(self) -> None:
        """Remove what a job has stored. A file of the user's own stays."""
        if self._is_home:
            return
        self._clear_way()
        if self.retrieve or self._stored() is not None:
            self.provider.catalog.drop_copy(self.local_path())
            self.provider.catalog.remove(self._path)

    def touch(self) -> None:
        """Let a remote output be as new as now. A file of the user's own keeps its time."""
        self.provider.catalog.touch(self._path)

    def list_candidate_matches(self) -> Iterable[str]:
        prefix = os.path.dirname(get_constant_prefix(home_of(self.query)))
        folders = os.walk(prefix or ".")
        found = {os.path.join(folder, name) for folder, _, names in folders for name in names}
        for output in self.provider.catalog.outputs():
            found |= {display_path(path) for path in [output.path, *(f.path for f in output.files)]}
        # `storage.mantik("results/{name}.txt")` has a query without the prefix.
        begin = f"{PREFIX}/" if self.query.startswith(f"{PREFIX}/") else ""
        return [f"{begin}{os.path.normpath(path)}" for path in sorted(found)]

    @property
    def _path(self) -> str:
        return workspace_path(self.query)

    @property
    def _is_home(self) -> bool:
        """Whether it is the same file on every machine, and has no local copy."""
        return bool(self.local_path() == self.home)

    def _link_here(self, *, anew: bool) -> None:
        prefix = self.provider.local_prefix
        self.provider.catalog.link_here(self._path, self.local_path(), prefix, anew=anew)

    def _clear_way(self) -> None:
        """Remove what is no directory from above the local copy.

        A link there could lead to files of the user's own.
        """
        copy, prefix = self.local_path(), self.provider.local_prefix
        if copy.is_relative_to(prefix):
            for below in copy.relative_to(prefix).parents[:-1]:
                if (above := prefix / below).is_symlink() or above.is_file():
                    above.unlink()

    def _stored(self) -> "RemoteOutput | None":
        return self.provider.catalog.find(self._path)


class InvalidObject(StorageObject):
    """What Snakemake gets for a path that the default storage cannot take."""

    def __init__(self, query: str, reason: str, provider: StorageProvider) -> None:
        super().__init__(query=query, keep_local=False, retrieve=True, provider=provider)
        self._reason = reason

    def is_valid_query(self) -> Any:
        return StorageQueryValidationResult(query=self.query, valid=False, reason=self._reason)


class DatasetObject(StorageObjectRead):
    """A dataset. Snakemake neither fetches nor removes it, and no job makes it."""

    provider: StorageProvider

    @property
    def dataset(self) -> Dataset:
        found = parse_dataset(self.query)
        assert found is not None
        return found

    def local_suffix(self) -> str:
        return f"{DATASETS}/{self.dataset.site}{self.dataset.path}"

    async def inventory(self, cache: IOCacheStorageInterface) -> None:
        """Do nothing: the catalog lists each directory at most once."""

    def get_inventory_parent(self) -> str | None:
        return None

    def cleanup(self) -> None:
        """Do nothing: there is no local copy."""

    def exists(self) -> bool:
        """Return whether it exists; True as well if it cannot be looked up before the run starts.

        The executor looks it up before it submits the first job.
        """
        return self.provider.catalog.look(self.dataset) is not None

    def mtime(self) -> float:
        entry = self.provider.catalog.look(self.dataset)
        return -math.inf if entry is None else entry.modified

    def size(self) -> int:
        entry = self.provider.catalog.look(self.dataset)
        return 0 if entry is None else entry.size

    def retrieve_object(self) -> None:
        raise UserError(
            f"{self.dataset} is a dataset, which is never fetched",
            do="Read it in a job at its site",
        )
