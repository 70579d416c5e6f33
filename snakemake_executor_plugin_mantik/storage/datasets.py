"""Datasets: files and directories that lie at a site anyway. They are looked up, and never more."""

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from snakemake_executor_plugin_mantik.common.errors import MantikError, SiteRejected
from snakemake_executor_plugin_mantik.sites.base import Entry
from snakemake_executor_plugin_mantik.storage.access import Access
from snakemake_executor_plugin_mantik.storage.paths import Dataset


@dataclass(frozen=True)
class Finding:
    """What was found of a dataset: its entry, None if it is not there; or nothing is known of it.

    It is not known before the first run at a site, and where the site's API cannot list it.
    """

    known: bool
    entry: Entry | None = None


class Datasets:
    """Looks up datasets: one listing per directory."""

    def __init__(self, access: Access, notify: Callable[[str], None]) -> None:
        """Make it; `notify` writes a line to the user's log."""
        self._access = access
        self._notify = notify
        self._away: set[str] = set()
        self._listed: dict[tuple[str, str], Mapping[str, Entry] | None] = {}

    def try_again(self) -> None:
        """Ask sites again that have not answered."""
        self._away.clear()

    def look(self, dataset: Dataset) -> Finding:
        """Look up a dataset."""
        directory, name = posixpath.split(dataset.path)
        key = dataset.site, directory
        if key not in self._listed:
            place = self._access.place(dataset.site)
            if place is None or dataset.site in self._away:
                return Finding(known=False)
            try:
                self._listed[key] = self._access.list(place, directory)
            except SiteRejected as error:  # of this directory
                self._notify(f"{dataset} was not looked up: {error}")
                self._listed[key] = None
            except MantikError as error:
                self._notify(f"Datasets at {dataset.site} were not looked up: {error}")
                self._away.add(dataset.site)
                return Finding(known=False)
        entries = self._listed[key]
        return Finding(known=False) if entries is None else Finding(True, entries.get(name))
