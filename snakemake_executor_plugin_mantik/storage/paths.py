"""Paths of files that may be remote outputs.

Snakemake gives each file of a storage a local path in a directory of its own, and commands name it
by that. In a workspace this directory is a link to the workspace itself: there the file has its own
name, too.

    in the Snakefile    results/a.txt                               /data/x.csv
    query               mantik:/results/a.txt                       mantik://data/x.csv
    local path          .snakemake/storage/mantik/results/a.txt     … .mantik/outside/data/x.csv
    in a workspace      results/a.txt                               .mantik/outside/data/x.csv

`storage.mantik("results/a.txt")` in a Snakefile is the same file without the profile's lines. Then
its query is its path, and commands name it by that.

A dataset lies at a site anyway, and no path on this machine leads to it. Commands get its path at
the site.

    in the Snakefile    storage.mantik("juwels:/p/data/imagenet")
    at the site         /p/data/imagenet
"""

import os
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..jobs.paths import display_path, outside_path

PREFIX: Final = "mantik:"
"""The prefix of queries of the default storage provider, as `--default-storage-prefix` gives it."""

DATASETS: Final = ".mantik/datasets"
"""Where a dataset's local copy would be, below the directory of copies. There never is one."""

PROVIDER_MODULE: Final = "snakemake_storage_plugin_mantik"
"""The module of the storage provider."""

_DATASET = re.compile(r"([\w.-]+):(/[^/].*)")
_DATASET_COPY = re.compile(rf"{DATASETS}/[^/]+(?=/)")
_WILD_SITE = re.compile(r"[^/:]*\{[^/:]*:/")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


@dataclass(frozen=True)
class Dataset:
    """A file or directory that lies at a site, made by no job: its site's name, its path there."""

    site: str
    path: str

    def __str__(self) -> str:
        return f"{self.site}:{self.path}"


def parse_dataset(query: str) -> Dataset | None:
    """Return the dataset that a query names; None if it names another file.

    `query` may hold wildcards.
    """
    if query.startswith(PREFIX):
        return None
    found = _DATASET.fullmatch(query)
    return Dataset(found[1], posixpath.normpath(found[2])) if found is not None else None


def query_mistake(query: str) -> str | None:
    """Return what is wrong with a query, which may hold wildcards, or None."""
    if parse_dataset(query) is not None:
        return None
    if query.startswith(PREFIX):
        return None if len(query) > len(f"{PREFIX}/") else "it names no file"
    if not query:
        return "it is empty"
    if _WILD_SITE.match(query):
        return "the name of a dataset's site cannot have wildcards"
    if _SCHEME.match(query):
        return "it is neither a path nor SITE:/absolute/path"
    return None


def home_of(query: str) -> str:
    """Return the path of a file on this machine: absolute, or relative to the working directory.

    `query` may hold wildcards.
    """
    return os.path.normpath(query.removeprefix(f"{PREFIX}/"))


def workspace_path(query: str, workdir: Path = Path()) -> str:
    """Return the path of a file in a workspace. `workdir` is the workflow's directory.

    `query` may hold wildcards.
    """
    home = home_of(query)
    if not os.path.isabs(home) and home.split("/")[0] != "..":
        return home
    here = os.path.realpath(workdir)
    absolute = os.path.normpath(os.path.join(here, home))
    if absolute.startswith(f"{here.rstrip('/')}/"):
        return os.path.relpath(absolute, here)
    return outside_path(absolute, here)


def storable_path(path: Any) -> str | None:
    """Return where a file of a rule that may be a remote output lies in a workspace; else None."""
    if not is_ours(path) or home_of(path.storage_object.query) == str(path):
        return None
    query = path.storage_object.query
    return None if parse_dataset(query) is not None else workspace_path(query)


def find_dataset(path: Any) -> Dataset | None:
    """Return the dataset that a file of a rule is; None if it is another file."""
    return parse_dataset(path.storage_object.query) if is_ours(path) else None


def find_local_prefix(workflow: Any) -> str | None:
    """Return the directory of local copies of the provider `mantik`; None if it is not used."""
    for provider in workflow.storage_registry._storages.values():  # there is no public method
        if type(provider).__module__ == PROVIDER_MODULE:
            return str(provider.local_prefix)
    return None


def plain_local_path(rest: str) -> str:
    """Return the path that rules name, of a local copy at `rest` in the directory of copies."""
    dataset = _DATASET_COPY.match(rest)
    return display_path(rest) if dataset is None else rest[dataset.end() :]


def is_ours(path: Any) -> bool:
    """Return whether a file of a rule belongs to the storage provider `mantik`."""
    if not getattr(path, "is_storage", False):
        return False
    return type(path.storage_object.provider).__module__ == PROVIDER_MODULE


def uses_provider(workflow: Any) -> bool:
    """Return whether a workflow has files of the storage provider `mantik`."""
    return find_local_prefix(workflow) is not None


def find_storage_link(job: Any) -> str:
    """Return the directory by which a job's command names remote outputs; empty if it does not.

    In a workspace it is a link to the workspace itself.
    """
    for path in [*job.input, *job.output, *job.log]:
        if storable_path(path) is not None and path.storage_object.retrieve:
            return str(path.storage_object.provider.local_prefix)
    return ""
