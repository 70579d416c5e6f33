"""Paths of files that may be stored outputs.

Snakemake gives each file of a storage a local path in a directory of its own, and commands name it
by that. In a workspace this directory is a link to the workspace itself: there the file has its own
name, too.

    in the Snakefile    results/a.txt                               /data/x.csv
    query               mantik:/results/a.txt                       mantik://data/x.csv
    local path          .snakemake/storage/mantik/results/a.txt     … .mantik/outside/data/x.csv
    in a workspace      results/a.txt                               .mantik/outside/data/x.csv
"""

import os
from typing import Any, Final

from snakemake_executor_plugin_mantik.jobs.paths import outside_path

PREFIX: Final = "mantik:"
"""The prefix of queries of the default storage provider, as `--default-storage-prefix` gives it."""

PROVIDER_MODULE: Final = "snakemake_storage_plugin_mantik"
"""The module of the storage provider."""


def home_of(query: str) -> str:
    """Return the path of a file on this machine: absolute, or relative to the working directory.

    `query` may hold wildcards.
    """
    return os.path.normpath(query.removeprefix(f"{PREFIX}/"))


def workspace_path(query: str) -> str:
    """Return the path of a file in a workspace. The working directory is the workflow's.

    `query` may hold wildcards.
    """
    home = home_of(query)
    if not os.path.isabs(home) and not home.startswith("../"):
        return home
    absolute, here = os.path.abspath(home), os.getcwd()
    if absolute.startswith(f"{here.rstrip('/')}/"):
        return os.path.relpath(absolute, here)
    return outside_path(absolute)


def storable_path(path: Any) -> str | None:
    """Return where a file of a rule that may be a stored output lies in a workspace; else None."""
    if not getattr(path, "is_storage", False):
        return None
    found = path.storage_object
    if type(found.provider).__module__ != PROVIDER_MODULE or home_of(found.query) == str(path):
        return None
    return workspace_path(found.query)


def find_storage_link(job: Any) -> str:
    """Return the directory by which a job's command names stored outputs; empty if it does not.

    In a workspace it is a link to the workspace itself.
    """
    for path in [*job.input, *job.output, *job.log]:
        if storable_path(path) is not None:
            return str(path.storage_object.provider.local_prefix)
    return ""
