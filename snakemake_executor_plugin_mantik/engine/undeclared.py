"""New files that a job left beside its outputs: record and report them."""

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..common.humanize import humanize_size
from ..jobs.markers import MOST_NEW, Marker, OutputEntry
from ..jobs.paths import nearest
from ..journal import AttemptRecord, UndeclaredFile, is_utf8
from .compare import is_same_file
from .request import JobRequest
from .workflow_context import WorkflowContext

_MOST_NAMED = 3
"""Most files that a message names."""


class UndeclaredFiles:
    """The undeclared files of the jobs at one site."""

    def __init__(self, workflow: WorkflowContext) -> None:
        self._journal = workflow.journal
        self._workdir = workflow.workdir
        self._notify = workflow.notify
        self._reported: set[str] = set()

    async def conclude(self, request: JobRequest, record: AttemptRecord, marker: Marker) -> None:
        """Record the new files that a job's marker lists, and report them once for each rule.

        Files that jobs of the run name, or that open attempts of other runs make, are not among
        them, nor are those of the project that another job has unpacked meanwhile.
        """
        files, made = self._journal.files, {file.path: file.size for file in marker.files}
        new = [
            entry
            for entry in marker.new
            if is_utf8(entry.path)
            and nearest(entry.path, request.named.paths) is None
            and not _is_copied(entry, request, made)
            and (
                os.path.lexists(self._workdir / entry.path)
                or not (files.is_stored(entry.path) or files.remote_file(record.place, entry.path))
            )
            and not any(  # an open attempt of another run makes it
                other.makes and other.id != record.id
                for other in files.conflicts(record.place, entry.path)
            )
        ]
        here = await asyncio.to_thread(lambda: [_look_at(self._workdir / e.path, e) for e in new])
        stay = [entry for entry, state in zip(new, here, strict=True) if not state]
        kept = [entry for entry, state in zip(new, here, strict=True) if state == "other"]
        files.add_undeclared(
            UndeclaredFile(
                entry.path, record.place, entry.size, (entry.modified_ns or 0) / 1e9, entry.mode,
                record.name,
            )
            for entry in (*stay, *kept)
        )  # fmt: skip
        # Another job of the rule may have been concluded meanwhile.
        if request.rule in self._reported or not (stay or kept):
            return
        self._reported.add(request.rule)
        if stay:
            self._notify(
                f"{record.name}: new files that no rule declares stay at {record.site}:"
                f" {_names(stay, more=len(marker.new) >= MOST_NEW)}. Bring them with smk-mantik get"
                " PATH; declare what other rules need as output."
            )
        if kept:
            self._notify(
                f"{record.name}: at {record.site} it has written files that no rule declares, and"
                f" you have others under their names on this machine: {_names(kept)}. Yours"
                " were kept."
            )


def _is_copied(entry: OutputEntry, request: JobRequest, made: Mapping[str, int]) -> bool:
    """Return whether an output holds a copy, as those of entry points without named outputs do.

    `made` has the sizes of all files of outputs by path.
    """
    below = os.path.relpath(entry.path, request.project or ".")
    return any(made.get(f"{out.path}/{below}") == entry.size for out in request.outputs)


def list_brought(workdir: Path, files: Iterable[UndeclaredFile]) -> frozenset[str]:
    """Return the paths of files here that came from a site and were not changed since.

    They are no project files: a job that makes one again would replace its own input.
    """
    return frozenset(
        file.path for file in files if is_same_file(workdir / file.path, file.size, file.modified)
    )


def _look_at(path: Path, entry: OutputEntry) -> str:
    """Return what lies here under the name of a new file: nothing (empty), `same`, or `other`.

    A file of the project, and what smk-mantik get has brought, keep the time.
    """
    if not os.path.lexists(path):
        return ""
    same = is_same_file(path, entry.size, (entry.modified_ns or 0) / 1e9)
    return "same" if same and not path.is_symlink() else "other"


def _names(entries: Sequence[OutputEntry], *, more: bool = False) -> str:
    shown = sorted(entries, key=lambda entry: (entry.path.count("/"), entry.path))[:_MOST_NAMED]
    named = [f"{entry.path} ({humanize_size(entry.size)})" for entry in shown]
    rest = len(entries) - len(named)
    least = "at least " if more else ""
    return ", ".join(named) + (f" and {least}{rest} more" if rest else "")
