"""Compare what the journal knows of stored outputs with what lies at their places."""

import posixpath
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from snakemake_executor_plugin_mantik.common.errors import SiteError
from snakemake_executor_plugin_mantik.common.humanize import humanize_count
from snakemake_executor_plugin_mantik.engine.compare import Sight, same_time
from snakemake_executor_plugin_mantik.jobs.paths import display_path
from snakemake_executor_plugin_mantik.journal import (
    FileRecord,
    StoredOutput,
    content_name,
    is_utf8,
)
from snakemake_executor_plugin_mantik.sites.base import Entry, is_rest_safe

from .access import Access

MOST_LISTINGS = 12
"""How many directories of each place are compared with it, at most."""

_REPLACED = "\N{REPLACEMENT CHARACTER}"
"""What servers show in place of bytes that are not UTF-8."""

Change = tuple[StoredOutput, StoredOutput | None]
"""An output as it was known, and as it is; None if something of it is gone."""


class Comparison:
    """Lists each directory of a place once, when an output in it is asked for.

    What was last known counts if a site does not answer.
    """

    def __init__(
        self, access: Access, notify: Callable[[str], None], outputs: Iterable[StoredOutput]
    ) -> None:
        """Make it; `outputs` are all that the journal knows."""
        self._access = access
        self._notify = notify
        self._compared: set[tuple[str, str]] = set()
        # Paths of outputs of which all directories were compared. They stay so: `made` adds both.
        self._settled: set[str] = set()
        self._outputs_in = _by_directory(outputs)
        self._listings: dict[str, int] = {}
        self._unnamed: dict[tuple[str, str], list[str]] = {}

    def made(self, outputs: Iterable[StoredOutput]) -> None:
        """Note outputs that a job has just made: they are newer than any listing."""
        self._compared |= {
            (output.place, posixpath.dirname(file.path))
            for output in outputs
            for file in output.files
        }

    def unnamed(self, output: StoredOutput) -> list[str]:
        """Return the paths in a directory whose names are not UTF-8, as far as it was listed.

        The journal knows nothing of them.
        """
        return [
            f"{directory}/{name}"
            for (place, directory), names in sorted(self._unnamed.items())
            if place == output.place and f"{directory}/".startswith(f"{output.path}/")
            for name in names
        ]

    def compare(self, output: StoredOutput, known: Mapping[str, StoredOutput]) -> Iterator[Change]:
        """Compare an output at a place, and all others in its directories, once.

        Yield what has changed; `known`, all outputs by path, must follow at once.

        Raises:
            UserError: there are no credentials, or no backend config, for its place.
        """
        if output.path not in self._settled:
            for directory in sorted({posixpath.dirname(file.path) for file in output.files}):
                yield from self._compare(output.place, directory, known)
            self._settled.add(output.path)

    def _compare(
        self, place: str, directory: str, known: Mapping[str, StoredOutput]
    ) -> Iterator[Change]:
        """Compare the outputs in a directory of a place with what is there, once."""
        if (place, directory) in self._compared:
            return
        self._compared.add((place, directory))
        if self._listings.get(place, 0) >= MOST_LISTINGS or not is_rest_safe(directory):
            return  # the script of a job that reads them compares them
        self._listings[place] = self._listings.get(place, 0) + 1
        outputs = filter(None, map(known.get, self._outputs_in.get((place, directory), ())))
        paths = [file.path for output in outputs for file in output.files]
        paths = [path for path in paths if posixpath.dirname(path) == directory]
        try:
            sight = self._access.look(place, directory, paths)
        except SiteError as error:  # the executor reports it if a job needs the site
            self._listings[place] = MOST_LISTINGS
            self._notify(
                f"Outputs at {self._access.name(place)} were not compared with the site: {error}"
            )
            return
        unknown = [path for path in paths if sight.is_unknown(path)]
        if unknown:
            self._notify(
                f"{display_path(unknown[0])} is not listed at {self._access.name(place)}"
                f" ({humanize_count(len(unknown), 'file')} in all), but the site does not deny it"
                " for certain: it counts as being there. Start again later; if it was removed,"
                " make it again with snakemake --forcerun and its rule."
            )
        if unnamed := [name for name in sight.entries if not is_utf8(name) or _REPLACED in name]:
            self._unnamed[place, directory] = unnamed
        for path in self._outputs_in.get((place, directory), ()):
            output = known.get(path)
            if output is None or output.place != place:
                continue
            if here := {f for f in output.files if posixpath.dirname(f.path) == directory}:
                yield from _changes(output, here, sight)


def _changes(output: StoredOutput, files: set[FileRecord], sight: Sight) -> Iterator[Change]:
    """Yield the change of an output of which `files` lie in the directory of `sight`."""
    now = {file: sight.entries.get(posixpath.basename(file.path)) for file in files}
    if any(file.path in sight.gone for file in files):
        yield output, None
        return
    changed = {
        file: entry
        for file, entry in now.items()
        if entry is not None
        and (entry.size != file.size or not same_time(entry.modified, file.modified))
    }
    if changed:
        renewed = tuple(_renewed(file, changed.get(file)) for file in output.files)
        yield output, replace(output, files=renewed, made=time.time())


def _renewed(file: FileRecord, entry: Entry | None) -> FileRecord:
    if entry is None:
        return file
    name = content_name("", entry.size, entry.modified)
    return replace(file, size=entry.size, sha256=name, modified=entry.modified)


def _by_directory(outputs: Iterable[StoredOutput]) -> dict[tuple[str, str], list[str]]:
    """Return the paths of the outputs of which files lie in a directory of a place."""
    found: dict[tuple[str, str], list[str]] = {}
    for output in outputs:
        for directory in {posixpath.dirname(file.path) for file in output.files}:
            found.setdefault((output.place, directory), []).append(output.path)
    return found
