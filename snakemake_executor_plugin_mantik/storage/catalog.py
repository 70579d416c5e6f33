"""The catalog of a workflow's stored outputs, as Snakemake asks for them."""

import atexit
import os
import posixpath
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath

from snakemake_executor_plugin_mantik.common.errors import (
    JournalError,
    JournalLocked,
    MantikError,
    UserError,
)
from snakemake_executor_plugin_mantik.common.state_directory import STATE, change_mode, read_umask
from snakemake_executor_plugin_mantik.engine.stage import same_time
from snakemake_executor_plugin_mantik.jobs.paths import display_path, local_path
from snakemake_executor_plugin_mantik.journal import (
    TIMESTAMP,
    FileLedger,
    FileRecord,
    Journal,
    StoredOutput,
    StoredOutputs,
    content_name,
    is_checksum,
    read_stored,
)
from snakemake_executor_plugin_mantik.sites.base import Entry, is_rest_safe
from snakemake_executor_plugin_mantik.staging.local import sha256_of
from snakemake_executor_plugin_mantik.storage.access import Access

MOST_LISTINGS = 20
"""How many directories of each place are compared with it, at most."""

_SAME_TIME_S = 0.01
"""Seconds by which the times of the same file may differ: file systems round them."""

Write = Callable[[FileLedger], None]
"""Writes to the journal's records of files."""


class Catalog:
    """What is stored where. Read from the journal once, compared with the places when asked.

    All paths are those in a workspace.
    """

    def __init__(
        self, workdir: Path, environ: Mapping[str, str], notify: Callable[[str], None]
    ) -> None:
        self._workdir = workdir
        self._notify = notify
        self._lock = threading.RLock()
        found = _read(workdir / STATE, notify)
        self._lost = set(found.lost)
        self._known = {output.path: output for output in found.outputs}
        self._access = Access(workdir, environ, notify)
        self._compared: set[tuple[str, str]] = set()
        self._listings: dict[str, int] = {}
        self._changes: list[Write] = []
        self._write: Callable[[Write], None] | None = None

    def find(self, path: str) -> StoredOutput | None:
        """Return the stored output at `path`, or that part of one; None if there is none any more.

        Raises:
            MantikError: its place cannot be reached.
        """
        with self._lock:
            above = (path, *map(str, PurePosixPath(path).parents))
            at = next((each for each in above if each in self._known), None)
            if at is None:
                return None
            output = self._known[at]
            if output.here:
                return output if at == path else None
            for directory in sorted({posixpath.dirname(file.path) for file in output.files}):
                self._compare(output.place, directory)
            found = self._known.get(at)
            return found.part(path) if found is not None and at != path else found

    def is_lost(self, path: str) -> bool:
        """Return whether an output does not exist, whatever lies here under its name."""
        with self._lock:
            return path in self._lost

    def outputs(self) -> list[StoredOutput]:
        """Return all stored outputs, as far as they were compared with their places."""
        with self._lock:
            return [self._known[path] for path in sorted(self._known)]

    def site(self, output: StoredOutput) -> str:
        """Return the name of the site where an output is stored; empty for this machine."""
        return self._access.name(output.place) if not output.here else ""

    # Changes

    def add(self, outputs: Iterable[StoredOutput]) -> None:
        """Note outputs that a job has just made, which the journal knows already."""
        with self._lock:
            self._known |= {output.path: output for output in outputs}
            self._lost -= {output.path for output in outputs}
            # They are newer than any listing.
            self._compared |= {
                (output.place, posixpath.dirname(file.path))
                for output in outputs
                for file in output.files
            }

    def forget(self, paths: Iterable[str]) -> None:
        """Note that jobs are about to make these outputs again."""
        paths = list(paths)
        with self._lock:
            for path in paths:
                self._known.pop(path, None)
            self._lost.update(paths)
            self._record(lambda ledger: ledger.lose(paths))

    def attach(self, write: Callable[[Write], None] | None) -> None:
        """Use an engine's journal from now on, or none any more; bring it up to date."""
        with self._lock:
            self._write = write
            changes, self._changes = self._changes, []
            for change in changes:
                self._record(change)

    def _record(self, change: Write) -> None:
        """Write to the journal: through the engine, if one runs, else when one is attached."""
        if self._write is not None:
            self._write(change)
        else:
            self._changes.append(change)

    def save(self) -> None:
        """Write what has changed to the journal, if no engine has done so."""
        with self._lock:
            if self._changes and self._write is None:
                journal = Journal(self._workdir / STATE)
                try:
                    for change in self._changes:
                        change(journal.files)
                    self._changes = []
                finally:
                    journal.close()

    # Comparison with the places

    def _compare(self, place: str, directory: str) -> None:
        """Compare the outputs in a directory of a place with what is there, once."""
        if (place, directory) in self._compared:
            return
        self._compared.add((place, directory))
        if self._listings.get(place, 0) >= MOST_LISTINGS or not is_rest_safe(directory):
            return  # the script of a job that reads them compares them
        self._listings[place] = self._listings.get(place, 0) + 1
        entries = self._access.list(place, directory)
        for output in list(self._known.values()):
            if output.place != place:
                continue
            if here := {f for f in output.files if posixpath.dirname(f.path) == directory}:
                self._compare_output(output, here, entries)

    def _compare_output(
        self,
        output: StoredOutput,
        files: set[FileRecord],
        entries: Mapping[str, Entry],
    ) -> None:
        """Drop an output of which something is gone, and date one that was changed."""
        now = {file: entries.get(posixpath.basename(file.path)) for file in files}
        if None in now.values():
            self._known.pop(output.path)
            self._lost.add(output.path)
            self._record(lambda ledger: ledger.drop_stored(output))
            return
        changed = {
            file: entry
            for file, entry in now.items()
            if entry is not None
            and (entry.size != file.size or not same_time(entry.modified, file.modified))
        }
        if not changed:
            return
        renewed = tuple(_renewed(file, changed.get(file)) for file in output.files)
        newer = replace(output, files=renewed, made=time.time())
        self._known[output.path] = newer
        self._record(lambda ledger: ledger.renew_stored(newer))

    # Files

    def bring(self, output: StoredOutput, target: Path) -> None:
        """Make `target` a verified copy of a stored output, whole or not at all.

        Raises:
            MantikError: it cannot be fetched.
            OSError: it cannot be written here.
        """
        for file in output.files:
            if not is_rest_safe(file.path):
                raise UserError(
                    "the site's file API cannot carry the name",
                    where=f"site {self.site(output)}, file {file.path!r}",
                    do="Let the rule pack its files, for example with tar",
                )
        part = self.part_of(target)
        part.parent.mkdir(parents=True, exist_ok=True)
        if output.directory:
            part.mkdir(exist_ok=True)
        wanted = []
        for file in output.files:
            local = Path(f"{part}{file.path.removeprefix(output.path)}")
            if not file.sha256:
                local.mkdir(parents=True, exist_ok=True)
                continue
            sha256 = file.sha256 if is_checksum(file.sha256) else ""
            if not sha256:  # what came of it before may be another content
                local.unlink(missing_ok=True)
            wanted.append((file.path, local, file.size, sha256))
        self._access.download(output.place, wanted)
        modes = [file.mode for file in output.files if file.sha256]
        for mode, (_, local, *_) in zip(modes, wanted, strict=True):
            change_mode(local, mode & ~read_umask() | 0o400)
        for path, to in output.links:
            link = Path(f"{part}{path.removeprefix(output.path)}")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(to)
        if output.directory:
            (part / TIMESTAMP).touch()
        os.utime(part, (output.made, output.made))
        _put(part, target)

    @staticmethod
    def part_of(target: Path) -> Path:
        """Return where `bring` collects what comes for `target`."""
        return target.with_name(f".{target.name}.mantik-part")

    @staticmethod
    def drop_older(output: StoredOutput, copy: Path) -> None:
        """Remove a local copy of an earlier content, which functions of a Snakefile might read."""
        with suppress(FileNotFoundError):
            if copy.lstat().st_mtime < output.made - _SAME_TIME_S:
                _remove(copy)

    def drop_copy(self, copy: Path) -> None:
        """Remove a local copy, which is no output of the next job that writes there."""
        if not copy.is_absolute() or copy.is_relative_to(self._workdir):
            _remove(copy)

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

        A file that is no output of a job, nor in the directory of one, stays.
        """
        with self._lock:
            above = (path, *map(str, PurePosixPath(path).parents))
            at = next((each for each in above if each in self._known), None)
            if at is None:  # the user's own, which is the output no more
                self.forget([path])
                return
            output = self._known[at]
            if output.here:
                _remove(self.home(path))
                self._remove_empty(self.home(path).parent)
                if self.home(at).exists():
                    return
            else:
                try:
                    self._access.remove(output.place, path)
                except MantikError as error:  # no reason to end a run, and its jobs
                    self._notify(f"{display_path(path)} stays at {self.site(output)}: {error}")
            self._known.pop(output.path, None)
            self._lost.add(output.path)
            self._record(lambda ledger: ledger.drop_stored(output))

    def discard(self, outputs: Iterable[StoredOutput]) -> None:
        """Remove outputs that Snakemake did not accept."""
        for output in outputs:
            with suppress(MantikError):  # what is left there is no output for anybody
                self.remove(output.path)

    def _remove_empty(self, directory: Path) -> None:
        """Remove a directory of the workflow, and those above it, if they are empty."""
        with suppress(OSError):
            while directory != self._workdir and directory.is_relative_to(self._workdir):
                directory.rmdir()
                directory = directory.parent

    def home(self, path: str) -> Path:
        """Return where a file lies on this machine if it is no stored output at a place."""
        return local_path(path, self._workdir)

    def store_here(self, path: str, source: Path) -> None:
        """Put what a local rule has made, `source`, where the rule names it.

        Raises:
            OSError: it cannot be written there.
        """
        home = self.home(path)
        home.parent.mkdir(parents=True, exist_ok=True)
        part = home.with_name(f".{home.name}.{uuid.uuid4().hex[:8]}.mantik-part")
        copy_by_link(source.resolve(), part)
        _put(part, home)
        self.note_here(path)

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
        output = StoredOutput(path, "", home.is_dir(), home.stat().st_mtime, "", ())
        with self._lock:
            self._known[path] = output
            self._lost.discard(path)
            self._record(lambda ledger: ledger.set_stored([output]))

    def link_here(self, path: str, target: Path) -> None:
        """Make `target` lead to what lies on this machine, unless it does.

        Functions of a Snakefile read files by these paths. `target` is never a user's own file.
        """
        home = self.home(path)
        made = path in self._known and home.is_dir()
        with suppress(OSError):
            if os.path.samefile(home, target) and not (made and target.is_symlink()):
                return
            if made and os.path.samefile(home / TIMESTAMP, target / TIMESTAMP):
                return
        _remove(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        if made:  # Snakemake may remove files below it
            copy_by_link(home, target)
            return
        try:
            os.link(home.resolve(), target)
        except OSError:  # a directory, or on another file system
            target.symlink_to(home.resolve())

    def close(self) -> None:
        """Save what has changed and close all connections."""
        try:
            self.save()
        except JournalLocked:
            pass  # another run is using the journal, and compares for itself
        except MantikError as error:
            self._notify(str(error))
        self._access.close()


@cache
def catalog_of(workdir: Path) -> Catalog:
    """Return this process's catalog of the workflow in `workdir`."""
    from snakemake_interface_common.logging import get_logger

    catalog = Catalog(workdir, os.environ, get_logger().info)
    atexit.register(catalog.close)
    return catalog


def is_here(output: StoredOutput, workdir: Path) -> bool:
    """Check whether a stored output is on this machine, too, where its rule names it."""
    home = local_path(output.path, workdir)
    for file in output.files:
        path = Path(f"{home}{file.path.removeprefix(output.path)}")
        if not file.sha256:
            same = path.is_dir()
        else:
            same = path.is_file() and path.stat().st_size == file.size
            same = same and sha256_of(path) == file.sha256
        if not same:
            return False
    return True


def copy_by_link(source: Path, target: Path) -> None:
    """Make `target` a hard link to the file `source`, or a directory of such links, or copies."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copy2(one, other)

    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, copy_function=link)
    else:
        link(str(source), str(target))


def _renewed(file: FileRecord, entry: Entry | None) -> FileRecord:
    if entry is None:
        return file
    name = content_name("", entry.size, entry.modified)
    return replace(file, size=entry.size, sha256=name, modified=entry.modified)


def _put(part: Path, target: Path) -> None:
    """Move a file or directory to its final path; other files in a directory there stay."""
    if target.is_symlink() or (target.exists() and not (target.is_dir() and part.is_dir())):
        _remove(target)
    if not target.exists():
        part.replace(target)
        return
    for each in part.iterdir():
        _put(each, target / each.name)
    part.rmdir()


def _read(state: Path, notify: Callable[[str], None]) -> StoredOutputs:
    """Read what is stored; restore a damaged journal first.

    Raises:
        JournalError: it cannot be restored.
    """
    try:
        return read_stored(state)
    except JournalError:
        journal = Journal(state)
        notify(journal.remark)
        journal.close()
        return read_stored(state)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            path.unlink()
