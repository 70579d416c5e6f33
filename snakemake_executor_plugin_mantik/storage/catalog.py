"""The catalog of a workflow's remote outputs, as Snakemake asks for them."""

import atexit
import math
import os
import posixpath
import stat
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from snakemake_interface_common.logging import get_logger

from ..common.errors import JournalError, JournalLocked, MantikError, SiteRejected
from ..common.humanize import humanize_count
from ..common.state_directory import STATE
from ..engine.compare import Sight, by_directory, same_time
from ..engine.messages import stays_message
from ..jobs.paths import display_path, is_at, local_path, nearest
from ..journal import (
    TIMESTAMP,
    AttemptRecord,
    FileLedger,
    FileRecord,
    Journal,
    RemoteOutput,
    RemoteOutputs,
    content_name,
    has_backup,
    is_utf8,
    read_stored,
    read_uses,
)
from ..sites.base import Entry
from ..staging.transfers import SUFFIX, remove_path
from .access import Access, as_output
from .copies import copy_by_link, fetch_copy, link_copy, put_in_place
from .paths import Dataset

if TYPE_CHECKING:
    from ..engine.core import Engine

_SAME_TIME_S = 0.01
"""Seconds by which the times of the same file may differ: file systems round them."""

_REPLACED = "\N{REPLACEMENT CHARACTER}"
"""What servers show in place of bytes that are not UTF-8."""

UNKNOWN = Entry("", 0, directory=False, modified=-math.inf)
"""What is known of a dataset that could not be looked up: it counts as existing, and as old."""

Write = Callable[[FileLedger], None]
"""Writes to the journal's records of files."""


class Catalog:
    """What is stored where. Read from the journal once, compared with the places when asked.

    A directory is compared when an output in it is asked for. All paths are those in a workspace.

    Attributes:
        access: the places.
    """

    def __init__(self, workdir: Path, notify: Callable[[str], None]) -> None:
        self._workdir = workdir
        self._notify = notify
        self._lock = threading.RLock()
        found = _read(workdir / STATE, notify)
        self._lost = set(found.lost)
        self._known = {output.path: output for output in found.outputs}
        self.access = Access(workdir, notify)
        self._listed: dict[tuple[str, str], Mapping[str, Entry] | None] = {}
        # Places that did not answer, and directories of places that were compared with them.
        self._away: set[str] = set()
        self._compared: set[tuple[str, str]] = set()
        # Paths of outputs of which all directories were compared. They stay so: `add` adds both.
        self._settled: set[str] = set()
        self._outputs_in: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for output in found.outputs:
            for directory in by_directory(output.files):
                self._outputs_in[output.place, directory].append(output.path)
        self._unnamed: dict[tuple[str, str], list[str]] = {}
        self._linked: set[str] = set()
        self._blocked: set[Path] = set()
        self._engine: Engine | None = None
        # With each, whether it is a loss: only a run writes these, which then makes them again.
        self._changes: list[tuple[Write, bool]] = []

    def find(self, path: str) -> RemoteOutput | None:
        """Return the remote output at `path`, or that part of one; None if there is none any more.

        What was last known counts if its site does not answer, or there are no credentials for it.
        """
        with self._lock:
            at = nearest(path, self._known)
            if at is None:
                return None
            output = self._known[at]
            if output.here:
                return output if at == path else None
            if at not in self._settled:
                for directory in sorted(by_directory(output.files)):
                    if (output.place, directory) not in self._compared:
                        self._compared.add((output.place, directory))
                        self._compare(output.place, directory)
                self._settled.add(at)
            found = self._known.get(at)
            return found.part(path) if found is not None and at != path else found

    def _compare(self, place: str, directory: str) -> None:
        """Compare the outputs in a directory of a place with what is there."""
        if place in self._away:
            return
        outputs = filter(None, map(self._known.get, self._outputs_in[place, directory]))
        here = {
            output.path: files
            for output in outputs
            if output.place == place and (files := by_directory(output.files).get(directory))
        }
        files = [file for files in here.values() for file in files]
        try:
            sight = self.access.look(place, directory, files)
        except MantikError as error:  # the executor reports it if a job needs the site
            self._away.add(place)
            self._notify(
                f"Outputs at {self.access.name(place)} were not compared with the site: {error}"
            )
            return
        if sight is None:
            return  # the script of a job that reads them compares them
        unknown = [file.path for file in files if sight.is_unknown(file.path)]
        if unknown:
            self._notify(
                f"{display_path(unknown[0])} is not listed at {self.access.name(place)}"
                f" ({humanize_count(len(unknown), 'file')} in all), but the site does not deny it"
                " for certain: it counts as being there. Start again later; if it was removed,"
                " make it again with snakemake --forcerun and its rule."
            )
        if unnamed := [name for name in sight.entries if not is_utf8(name) or _REPLACED in name]:
            self._unnamed[place, directory] = unnamed
        for path, its_files in here.items():
            self._apply(self._known[path], its_files, sight)

    def unnamed(self, output: RemoteOutput) -> list[str]:
        """Return the paths in an output whose names are not UTF-8; `find` it before.

        The journal knows nothing of them.
        """
        with self._lock:
            return [
                f"{directory}/{name}"
                for (place, directory), names in sorted(self._unnamed.items())
                if place == output.place and is_at(directory, output.path)
                for name in names
            ]

    def look(self, dataset: Dataset) -> Entry | None:
        """Look up a dataset: list each directory at a site once.

        Return `UNKNOWN` before the first run at a site, and where its API cannot list it.
        """
        directory, name = posixpath.split(dataset.path)
        key = dataset.site, directory
        with self._lock:
            if key not in self._listed:
                place = self.access.place(dataset.site)
                if place is None or place in self._away:
                    return UNKNOWN
                try:
                    self._listed[key] = self.access.list(place, directory)
                except SiteRejected as error:  # of this directory
                    self._notify(f"{dataset} was not looked up: {error}")
                    self._listed[key] = None
                except MantikError as error:
                    self._notify(f"Datasets at {dataset.site} were not looked up: {error}")
                    self._away.add(place)
                    return UNKNOWN
            entries = self._listed[key]
        return UNKNOWN if entries is None else entries.get(name)

    def try_again(self) -> None:
        """Ask sites again that have not answered."""
        with self._lock:
            self._away.clear()

    def is_lost(self, path: str) -> bool:
        """Return whether an output does not exist, whatever lies here under its name."""
        with self._lock:
            return path in self._lost

    def outputs(self) -> list[RemoteOutput]:
        """Return all remote outputs, as far as they were compared with their places."""
        with self._lock:
            return [self._known[path] for path in sorted(self._known)]

    def changed_files(self, files: Iterable[RemoteOutput]) -> list[RemoteOutput]:
        """Return those files that are not as `find_workspace_files` has found them any more."""
        now: dict[tuple[str, str], Mapping[str, Entry]] = {}
        changed = []
        for file in files:
            folder, name = posixpath.split(file.path)
            if (file.place, folder) not in now:
                now[file.place, folder] = self.access.list(file.place, folder or ".")
            entry = now[file.place, folder].get(name)
            if entry is None or file != as_output(folder, entry, file.place):
                changed.append(file)
        return changed

    def site(self, output: RemoteOutput) -> str:
        """Return the name of the site where an output is stored; empty for this machine."""
        return self.access.name(output.place) if not output.here else ""

    # Changes

    def add(self, outputs: Iterable[RemoteOutput]) -> None:
        """Note outputs that a job has just made, which the journal knows already."""
        with self._lock:
            self._known |= {output.path: output for output in outputs}
            self._lost -= {output.path for output in outputs}
            for output in outputs:  # newer than any listing
                self._compared |= {(output.place, at) for at in by_directory(output.files)}

    def _apply(self, known: RemoteOutput, files: Iterable[FileRecord], sight: Sight) -> None:
        """Drop an output of which something is gone, and date one that was changed.

        `files` are those of it that lie in the directory of `sight`.
        """
        if any(file.path in sight.gone for file in files):
            self._known.pop(known.path)
            self._lost.add(known.path)
            self._record(lambda ledger: ledger.drop_stored(known), loss=True)
            return
        changed = {
            file: replace(
                file, size=entry.size, modified=entry.modified,
                sha256=content_name("", entry.size, entry.modified),
            )
            for file in files
            if (entry := sight.entries.get(posixpath.basename(file.path))) is not None
            and (entry.size != file.size or not same_time(entry.modified, file.modified))
        }  # fmt: skip
        if changed:
            renewed = tuple(changed.get(file, file) for file in known.files)
            now = self._known[known.path] = replace(known, files=renewed, made=time.time())
            self._record(lambda ledger: ledger.renew_stored(known, now))

    def forget(self, paths: Iterable[str]) -> None:
        """Note that jobs are about to make these outputs again."""
        paths = list(paths)
        with self._lock:
            for path in paths:
                self._known.pop(path, None)
            self._lost.update(paths)
            self._record(lambda ledger: ledger.lose(paths))

    def attach(self, engine: "Engine | None") -> None:
        """Use an engine's journal and connections from now on, or none any more."""
        with self._lock:
            self.access.use(engine)
            self._engine = engine
            self._write()

    def _record(self, change: Write, *, loss: bool = False) -> None:
        """Write to the journal: through the engine, if one runs, else when one is attached."""
        self._changes.append((change, loss))
        self._write()

    def _write(self) -> None:
        while self._engine is not None and self._changes:
            change, _ = self._changes.pop(0)
            self._engine.write_files(change)

    def save(self) -> None:
        """Write what has changed to the journal, if no engine has done so.

        A loss that was only seen is not written: the next look may see more.
        """
        with self._lock:
            changes = [change for change, loss in self._changes if not loss]
            if changes and self._engine is None:
                with closing(Journal(self._workdir / STATE)) as journal:
                    for change in changes:
                        change(journal.files)
                self._changes = []

    # Files

    def bring(
        self, output: RemoteOutput, target: Path, came: Callable[[int], object] = lambda _: None
    ) -> None:
        """Make `target` a verified copy of a remote output, whole or not at all.

        `came` is called with the number of bytes that have come since the last call.

        Raises:
            MantikError: it cannot be fetched.
            OSError: it cannot be written here.
        """
        fetch_copy(self.access, output, target, came)
        self._blocked.discard(target)

    def drop_older(self, output: RemoteOutput, copy: Path) -> None:
        """Remove a local copy of an earlier content, which functions of a Snakefile might read.

        What `block` has put there in an earlier run goes, too.
        """
        if copy in self._blocked:
            return
        with suppress(FileNotFoundError):
            status = copy.lstat()
            older = status.st_mtime < output.made - _SAME_TIME_S
            if older or stat.S_ISDIR(status.st_mode) != output.directory:
                remove_path(copy)

    def block(self, copy: Path, *, directory: bool) -> None:
        """Put an empty directory or file where a local copy could not be made."""
        self._blocked.add(copy)
        remove_path(copy)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if directory:
            copy.mkdir()
        else:
            copy.touch()
        os.utime(copy, (0, 0))  # older than anything: it is fetched for the next rule

    def drop_copy(self, copy: Path) -> None:
        """Remove a local copy, which is no output of the next job that writes there."""
        if not copy.is_absolute() or copy.is_relative_to(self._workdir):
            remove_path(copy)

    def touch(self, path: str) -> None:
        """Let the output at `path`, if a job has made it, be as new as now."""
        with self._lock:
            output = self._known.get(path)
            if output is None:
                return
            newer = self._known[path] = replace(output, made=time.time())
            if output.here:
                os.utime(self.home(path))
            self._record(lambda ledger: ledger.set_stored([newer]))

    def remove(self, path: str) -> None:
        """Remove the output at `path` where it lies: at its place, or on this machine.

        A file that is no output of a job, nor in the directory of one, stays. What a job of an
        earlier run still uses is no output any more, and is removed after that job's end.
        """
        with self._lock:
            at = nearest(path, self._known)
            if at is None:  # the user's own, which is the output no more
                self.forget([path])
                return
            output = self._known[at]
            if output.here:
                remove_path(self.home(path))
                with suppress(OSError, ValueError):  # it is not empty, or outside
                    for above in self.home(path).relative_to(self._workdir).parents[:-1]:
                        (self._workdir / above).rmdir()
                if self.home(at).exists():
                    return
            users: list[AttemptRecord] = []
            try:
                if not output.here and not (
                    users := read_uses(self._workdir / STATE, output.place, path)
                ):
                    self.access.remove(output.place, path)
            except MantikError as error:  # no reason to end a run, and its jobs
                self._notify(f"{display_path(path)} stays at {self.site(output)}: {error}")
            if users:
                self._notify(f"{display_path(path)} {stays_message(self.site(output), users)}")
            self._known.pop(output.path, None)
            self._lost.add(output.path)
            self._record(lambda ledger: ledger.drop_stored(output, still_there=bool(users)))

    def discard(self, outputs: Iterable[RemoteOutput]) -> None:
        """Remove outputs that Snakemake did not accept."""
        for output in outputs:
            with suppress(MantikError):  # what is left there is no output for anybody
                self.remove(output.path)

    def home(self, path: str) -> Path:
        """Return where a file lies on this machine if it is no remote output at a place."""
        return local_path(path, self._workdir)

    def store_here(self, path: str, source: Path) -> None:
        """Put what a local rule has made, `source`, where the rule names it.

        Raises:
            OSError: it cannot be written there.
        """
        home = self.home(path)
        home.parent.mkdir(parents=True, exist_ok=True)
        part = home.with_name(f".{home.name}.{uuid.uuid4().hex[:8]}{SUFFIX}")
        copy_by_link(source.resolve(), part)
        put_in_place(part, home)
        self.note_here(path)

    def _is_copy(self, copy: Path, prefix: Path) -> bool:
        """Return whether a local copy is one of a remote output, or has one in it."""
        path = os.path.relpath(copy, prefix)
        return nearest(path, self._known) is not None or any(
            p.startswith(f"{path}/") for p in self._known
        )

    def note_here(self, path: str, *, touch: bool = False) -> None:
        """Note that a job's output, if it exists, is on this machine; with `touch`, make it.

        Raises:
            OSError: it cannot be made.
        """
        home = self.home(path)
        if touch:
            home.parent.mkdir(parents=True, exist_ok=True)
            home.touch()
        if not os.path.lexists(home):
            return
        if home.is_dir():
            (home / TIMESTAMP).touch()
            self._linked.discard(path)
        output = RemoteOutput(path, "", home.is_dir(), home.stat().st_mtime, "", ())
        with self._lock:
            self._known[path] = output
            self._lost.discard(path)
            self._record(lambda ledger: ledger.set_stored([output]))

    def link_here(self, path: str, target: Path, prefix: Path, *, anew: bool = True) -> None:
        """Make `target` lead to what lies on this machine; functions of a Snakefile read it.

        Unless `anew`, a directory only once. All local copies are below `prefix`.
        """
        home = self.home(path)
        if anew or path not in self._linked or not home.is_dir():
            link_copy(home, target, prefix, lambda copy: self._is_copy(copy, prefix))
            self._linked.add(path)

    def close(self) -> None:
        """Save what has changed and close all connections."""
        try:
            self.save()
        except JournalLocked:
            pass  # another run is using the journal, and compares for itself
        except MantikError as error:
            self._notify(str(error))
        self.access.close()


@cache
def catalog_of(workdir: Path) -> Catalog:
    """Return this process's catalog of the workflow in `workdir`."""
    catalog = Catalog(workdir, get_logger().info)
    atexit.register(catalog.close)
    return catalog


def _read(state: Path, notify: Callable[[str], None]) -> RemoteOutputs:
    """Read what is stored; restore a journal first that is damaged, empty or missing.

    Raises:
        JournalError: it cannot be restored.
    """
    with suppress(JournalError):
        if (found := read_stored(state)).workflow or not has_backup(state):
            return found
    with closing(Journal(state)) as journal:
        notify(journal.remark)
    return read_stored(state)
