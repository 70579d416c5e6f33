"""New files that a job left beside its outputs: choose those to fetch, and report the others."""

import asyncio
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.common.humanize import humanize_count, humanize_size
from snakemake_executor_plugin_mantik.engine.compare import same_time
from snakemake_executor_plugin_mantik.engine.fetch import Fetcher
from snakemake_executor_plugin_mantik.engine.request import JobRequest
from snakemake_executor_plugin_mantik.engine.workflow_context import WorkflowContext
from snakemake_executor_plugin_mantik.jobs.markers import Marker, OutputEntry
from snakemake_executor_plugin_mantik.jobs.paths import nearest
from snakemake_executor_plugin_mantik.jobs.script import MOST_NEW
from snakemake_executor_plugin_mantik.journal import TryRecord, UndeclaredFile, is_utf8
from snakemake_executor_plugin_mantik.sites.base import is_rest_safe
from snakemake_executor_plugin_mantik.staging.local import sha256_of

_MOST_NAMED = 3
"""Most files that a message names."""


@dataclass(frozen=True)
class NewFiles:
    """The new files of a job that no rule declares.

    Attributes:
        wanted: the files to fetch.
        left: the files that stay at the site.
        kept: the files that stay there because this machine has others under their names.
        before: by path, the checksums of what earlier jobs have brought; empty for nothing.
        more: whether there may be further ones.
    """

    wanted: tuple[OutputEntry, ...] = ()
    left: tuple[OutputEntry, ...] = ()
    kept: tuple[OutputEntry, ...] = ()
    before: Mapping[str, str] = field(default_factory=dict)
    more: bool = False


class UndeclaredFiles:
    """The undeclared files of the jobs at one site."""

    def __init__(self, workflow: WorkflowContext, fetcher: Fetcher) -> None:
        self._journal = workflow.journal
        self._workdir = workflow.workdir
        self._notify = workflow.notify
        self._fetcher = fetcher
        self._reported: set[str] = set()

    async def conclude(self, request: JobRequest, record: TryRecord, marker: Marker) -> None:
        """Fetch the new files that are wanted, record all, and report those that stay.

        The job has succeeded, and its outputs are here: what goes wrong is only reported.
        """
        try:
            await self._conclude(request, record, marker)
        except (MantikError, OSError) as error:
            self._notify(f"{record.name}: undeclared files stay at {record.site}. {error}")

    async def _conclude(self, request: JobRequest, record: TryRecord, marker: Marker) -> None:
        found = await self.sort(request, record, marker)
        taken = self._fetcher.undeclared(record, found.wanted, found.before)
        ends = dict(zip(found.wanted, await taken, strict=True))
        if errors := [end for end in ends.values() if isinstance(end, Exception)]:
            files = humanize_count(len(errors), "undeclared file")
            self._notify(
                f"{record.name}: left at {record.site}: {files} that could not be fetched."
                f" {errors[0]}"
            )
        kept = tuple(entry for entry, end in ends.items() if end is False)
        brought = {entry.path for entry, end in ends.items() if end is True}
        self.settled(request, record, replace(found, kept=found.kept + kept), brought)

    async def sort(self, request: JobRequest, record: TryRecord, marker: Marker) -> NewFiles:
        """Decide about the new files that a job's marker lists.

        Files that jobs of the run name, or that open tries of other runs make, are not among them,
        nor are those of the project that another job has unpacked meanwhile. A file here is
        replaced only if it came from an earlier job in this way and was not changed since. Names
        that the site's file API cannot carry stay there.
        """
        wanted = {e.path: e for e in marker.wanted if e.sha256 and is_rest_safe(e.path)}
        new = [
            wanted.get(entry.path, entry)
            for entry in marker.new
            if is_utf8(entry.path) and nearest(entry.path, request.named.paths) is None
        ]
        before = {e.path: self._journal.undeclared.brought(e.path) for e in new}
        new = [
            entry
            for entry in new
            if (
                before[entry.path]
                or os.path.lexists(self._workdir / entry.path)
                or not self._is_known(record.place, entry.path)
            )
            and not self._is_being_made(record, entry.path)
        ]
        here = await asyncio.to_thread(_look, self._workdir, new, before)
        free = [entry for entry, state in zip(new, here, strict=True) if state == "free"]
        return NewFiles(
            tuple(entry for entry in free if entry.path in wanted),
            tuple(entry for entry in free if entry.path not in wanted),
            tuple(entry for entry, state in zip(new, here, strict=True) if state == "other"),
            before,
            more=len(marker.new) >= MOST_NEW,
        )

    def _is_known(self, place: str, path: str) -> bool:
        files = self._journal.files
        return files.is_stored(path) or files.remote_file(place, path) is not None

    def _is_being_made(self, record: TryRecord, path: str) -> bool:
        conflicts = self._journal.files.conflicts(record.place, path)
        return any(other.makes and other.id != record.id for other in conflicts)

    def settled(
        self, request: JobRequest, record: TryRecord, found: NewFiles, brought: Collection[str]
    ) -> None:
        """Record and report the files; those at the paths `brought` have been fetched."""
        other = {entry.path for entry in found.kept}
        stay = [e for e in found.wanted if e.path not in brought and e.path not in other]
        stay += found.left
        ledger = self._journal.undeclared
        ledger.add(
            UndeclaredFile(
                entry.path, record.place, entry.size, (entry.modified_ns or 0) / 1e9, entry.mode,
                record.name, entry.sha256 if entry.path in brought else ledger.brought(entry.path),
            )
            for entry in (*found.wanted, *found.left, *found.kept)
        )  # fmt: skip
        if request.rule in self._reported or not (stay or found.kept):
            return
        self._reported.add(request.rule)
        if stay:
            self._notify(
                f"{record.name}: new files that no rule declares stay at {record.site}:"
                f" {_names(stay, more=found.more)}. Bring them with smk-mantik get PATH; declare"
                " what other rules need as output."
            )
        if found.kept:
            self._notify(
                f"{record.name}: at {record.site} it has written files that no rule declares, and"
                f" you have others under their names here: {_names(found.kept)}. Yours were kept."
            )


def list_brought(workdir: Path, files: Iterable[UndeclaredFile]) -> frozenset[str]:
    """Return the paths of files here that came from a site and were not changed since.

    They are no sources: a job that makes one again would replace its own input.
    """
    return frozenset(file.path for file in files if _is_brought(workdir / file.path, file))


def _is_brought(path: Path, file: UndeclaredFile) -> bool:
    try:
        status = path.stat()
        if not path.is_file():
            return False
        if status.st_size == file.size and same_time(status.st_mtime, file.modified):
            return True
        # An older version, if a newer one has stayed at the site.
        return bool(file.brought) and sha256_of(path) == file.brought
    except OSError:
        return False


def _look(workdir: Path, new: Sequence[OutputEntry], before: dict[str, str]) -> list[str]:
    """Return what lies here under the names of new files: nothing of its own, `same`, or `other`.

    `before` has the checksums of what earlier jobs brought: that is `free` to be replaced, too.
    """
    return [_look_at(workdir / entry.path, entry, before[entry.path]) for entry in new]


def _look_at(path: Path, entry: OutputEntry, before: str) -> str:
    if not os.path.lexists(path):
        return "free"
    try:
        if not path.is_file() or path.is_symlink():
            return "other"
        status = path.stat()
        same = status.st_size == entry.size
        if before or (entry.sha256 and same):
            found = sha256_of(path)
            if before == found != entry.sha256:
                return "free"
            same = found == entry.sha256
        elif same:
            # A file of the project, or what smk-mantik get has brought: both keep the time.
            same = same_time(status.st_mtime, (entry.modified_ns or 0) / 1e9)
        return "same" if same else "other"
    except OSError:
        return "other"


def _names(entries: Sequence[OutputEntry], *, more: bool = False) -> str:
    shown = sorted(entries, key=lambda entry: (entry.path.count("/"), entry.path))[:_MOST_NAMED]
    named = [f"{entry.path} ({humanize_size(entry.size)})" for entry in shown]
    rest = len(entries) - len(named)
    least = "at least " if more else ""
    return ", ".join(named) + (f" and {least}{rest} more" if rest else "")
