"""The journal's records of files: local ones, those at the sites, and those in pending bundles."""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from pathlib import PurePosixPath

from ..jobs.paths import at_or_above
from .backup import Row, Subject, stored_rows
from .database import Tables
from .records import LOST, FileRecord, RemoteOutput, UndeclaredFile, is_utf8

TIMESTAMP = ".snakemake_timestamp"
"""The file that Snakemake adds to each `directory()` output."""
MADE = ""
"""In place of the checksum of a file that an attempt makes: its content is not known before."""


_MOST_UNDECLARED = 10_000
"""Most undeclared files that the journal lists; the latest count."""


@dataclass(frozen=True)
class WriteConflict:
    """What may overwrite a file: a bundle, or an attempt that makes it or whose script carries it.

    `id` is that of the bundle or attempt; `makes` is whether the attempt makes it.
    """

    id: str
    bundle: bool
    makes: bool


class FileLedger:
    """The workflow's files: local checksums, and the contents of the workspaces."""

    def __init__(
        self,
        database: Tables,
        note: Callable[[Subject, Iterable[Row]], None] = lambda _, __: None,
    ) -> None:
        """Make it; `note` adds the rows of remote outputs to the journal's spare."""
        self._note = note
        self._database = database
        self._db = database.db

    def local_file(self, *key: str | int) -> str | None:
        """Return the checksum of a local file if it was taken with the same values; else None.

        They are as for `set_local_files`.
        """
        found: str | None = self._database.value(
            "SELECT sha256 FROM local_files WHERE path = ? AND size = ? AND mtime_ns = ?"
            " AND ctime_ns = ? AND inode = ?",
            *key,
        )
        return found

    def set_local_files(self, files: Iterable[tuple[str, int, int, int, int, str]]) -> None:
        """Record (path, size, mtime and ctime in ns, inode, sha256) of local files."""
        self._database.change_each(
            "INSERT OR REPLACE INTO local_files VALUES (?, ?, ?, ?, ?, ?)", files
        )

    def remote_file(self, place: str, path: str) -> FileRecord | None:
        row = self._db.execute(
            "SELECT * FROM remote_files WHERE place = ? AND path = ?", (place, path)
        ).fetchone()
        return _file(row) if row else None

    def remote_files(self, place: str, *, below: str = "") -> list[FileRecord]:
        """Return all files known to be in the workspace at `place`, or in a directory of it."""
        low, high = _below(below) if below else ("", "\U0010ffff")
        rows = self._db.execute(
            "SELECT * FROM remote_files WHERE place = ? AND path >= ? AND path < ?",
            (place, low, high),
        )
        return [_file(row) for row in rows]

    def remote_files_at(self, place: str, paths: Iterable[str]) -> list[FileRecord]:
        """Return the files known to be in the workspace at `place` under some paths, or below."""
        found: list[FileRecord] = []
        for path in paths:
            found += filter(None, [self.remote_file(place, path)])
            found += self.remote_files(place, below=path)
        return found

    def set_remote_files(self, place: str, files: Iterable[FileRecord]) -> None:
        self._database.change_each(
            "INSERT OR REPLACE INTO remote_files VALUES (?, ?, ?, ?, ?, ?, ?)",
            [
                (place, f.path, f.size, f.sha256, f.project, f.modified, f.mode)
                for f in files
                if is_utf8(f.path)
            ],
        )

    def forget_remote_files(self, place: str, paths: Iterable[str]) -> None:
        """Record that files may no longer be in the workspace at `place`."""
        self._database.change_each(
            "DELETE FROM remote_files WHERE place = ? AND path = ?",
            [(place, path) for path in paths],
        )

    # Remote outputs

    def stored_facts(self, place: str | None = None) -> Iterator[tuple[Subject, Iterable[Row]]]:
        """Yield what the spare has to hold of the remote outputs, at all places or at one."""
        rows = self._db.execute(
            "SELECT * FROM stored WHERE ?1 IS NULL OR place IN (?1, ?2) ORDER BY path",
            (place, LOST),
        ).fetchall()
        for row in rows:
            path = row["path"]
            yield ("stored", path), stored_rows(path, self._whole(row))

    def set_stored(self, outputs: Sequence[RemoteOutput], *, lasting: bool = False) -> None:
        """Record outputs that stay at their places; their files are recorded there already.

        With `lasting`, all of it is on disk when the method returns.
        """
        with self._database.lasting() if lasting else nullcontext(), self._database.write() as db:
            db.executemany(
                "INSERT OR REPLACE INTO stored VALUES (?, ?, ?, ?, ?, ?)",
                [(o.path, o.place, o.directory, len(o.files), o.made, o.job) for o in outputs],
            )
            for output in outputs:
                db.execute("DELETE FROM links WHERE path >= ? AND path < ?", _below(output.path))
                db.executemany("INSERT OR REPLACE INTO links VALUES (?, ?)", output.links)
        for output in outputs:
            self._note(("stored", output.path), stored_rows(output.path, output))

    def stored(self, path: str) -> RemoteOutput | None:
        """Return the remote output at `path`, or that part of one; None if any of it is lost."""
        row = self._stored_row(path)
        output = self._whole(row) if row is not None else None
        return output.part(path) if output is not None and output.path != path else output

    def _stored_row(self, path: str) -> sqlite3.Row | None:
        """Return the row of the output at `path`, or of the nearest that may contain it."""
        found = (
            "SELECT * FROM stored WHERE path IN (SELECT value FROM json_each(?))"
            " ORDER BY length(path) DESC LIMIT 1"
        )
        row: sqlite3.Row | None = self._db.execute(
            found, (json.dumps(at_or_above(path)),)
        ).fetchone()
        return row

    def all_stored(self, place: str | None = None) -> list[RemoteOutput]:
        """Return the remote outputs, at one place or all, of which nothing is known to be lost."""
        which = "SELECT * FROM stored WHERE ?1 IS NULL OR place = ?1 ORDER BY path"
        rows = self._db.execute(which, (place,)).fetchall()
        return [output for row in rows if (output := self._whole(row)) is not None]

    def _whole(self, row: sqlite3.Row) -> RemoteOutput | None:
        place, path = row["place"], row["path"]
        if place == LOST:
            return None
        if not place:
            return RemoteOutput(path, place, bool(row["directory"]), row["made"], row["job"], ())
        file = self.remote_file(place, path)
        files = [file] if file is not None else self.remote_files(place, below=path)
        # The script of a job that was presubmitted adds this file, and Snakemake does here.
        files = [f for f in files if f.stored or PurePosixPath(f.path).name != TIMESTAMP]
        # A file that was uploaded since has another content.
        if len(files) != row["files"] or not all(file.stored for file in files):
            return None
        below = "SELECT * FROM links WHERE path >= ? AND path < ?"
        links = [(link["path"], link["target"]) for link in self._db.execute(below, _below(path))]
        return RemoteOutput(
            path, place, bool(row["directory"]), row["made"], row["job"], tuple(files),
            tuple(links),
        )  # fmt: skip

    def is_stored(self, path: str, *, here: bool = True) -> bool:
        """Return whether a path is that of a remote output, or below it, at whatever place.

        Unless `here`, those that are on this machine do not count.
        """
        row = self._stored_row(path)
        return row is not None and row["place"] != LOST and (here or row["place"] != "")

    def has_row(self, path: str) -> bool:
        """Return whether a job has made an output at `path`, or was to make one."""
        return bool(self._database.value("SELECT 1 FROM stored WHERE path = ?", path))

    def renew_stored(self, known: RemoteOutput, output: RemoteOutput) -> None:
        """Record that files of an output were changed at its place, unless it was made anew.

        `known` is the output as it was when it was compared, `output` as it is now.
        """
        if self._is_current(known):
            self.set_remote_files(output.place, output.files)
            self.set_stored([output])

    def _is_current(self, output: RemoteOutput) -> bool:
        row = self._db.execute(
            "SELECT place, made FROM stored WHERE path = ?", (output.path,)
        ).fetchone()
        return row is not None and (row["place"], row["made"]) == (output.place, output.made)

    def drop_stored(self, output: RemoteOutput, *, still_there: bool = False) -> None:
        """Record that an output, or a part of it, is gone from its place, unless it was made anew.

        A comparison may be recorded late: after a run that was under way beside it. With
        `still_there` its files are to be removed, but in use: the manifest keeps them until then.
        """
        if not self._is_current(output):
            return
        self.lose([output.path])
        if still_there:
            plain = [replace(file, modified=0.0, mode=0) for file in output.files]
            self.set_remote_files(output.place, plain)
        else:
            self.forget_remote_files(output.place, [file.path for file in output.files])

    def forget_stored(self, paths: Iterable[str]) -> None:
        """Record that nothing is known of outputs: what lies here under their names counts."""
        paths = [path for path in paths if self.has_row(path)]
        if not paths:
            return
        self._database.change_each("DELETE FROM stored WHERE path = ?", [(path,) for path in paths])
        for path in paths:
            self._note(("stored", path), ())

    def lose(self, paths: Iterable[str]) -> None:
        """Record that outputs do not exist, whatever lies here under their names."""
        rows = [(path, LOST) for path in paths]
        if not rows:
            return
        self._database.change_each("INSERT OR REPLACE INTO stored VALUES (?, ?, 0, 0, 0, '')", rows)
        for path, _ in rows:
            self._note(("stored", path), stored_rows(path, None))

    def add_undeclared(self, files: Iterable[UndeclaredFile]) -> None:
        """Record files that no rule declares and that are new, or new again.

        Forgets the oldest ones beyond a limit.
        """
        rows = [astuple(file) for file in files if is_utf8(file.path)]
        if not rows:
            return
        with self._database.write() as db:
            db.executemany("INSERT OR REPLACE INTO undeclared VALUES (?, ?, ?, ?, ?, ?)", rows)
            db.execute(
                "DELETE FROM undeclared WHERE rowid <= (SELECT max(rowid) FROM undeclared) - ?",
                (_MOST_UNDECLARED,),
            )

    # Links

    def set_links(self, links: Iterable[tuple[str, str]]) -> None:
        """Record (path, target) of symbolic links that jobs made and that were downloaded."""
        self._database.change_each("INSERT OR REPLACE INTO links VALUES (?, ?)", links)

    def links(self, path: str) -> dict[str, str]:
        """Return the links that jobs made at `path` or below it, with their targets."""
        rows = self._db.execute(
            "SELECT path, target FROM links WHERE path = ? OR path >= ? AND path < ?",
            (path, *_below(path)),
        )
        return {row["path"]: row["target"] for row in rows}

    # Bundles

    def begin_bundle(
        self, place: str, bundle: str, digest: str, files: Iterable[FileRecord]
    ) -> None:
        """Record that a bundle is being sent; `digest` names its contents."""
        with self._database.write() as db:
            db.execute(
                "INSERT OR IGNORE INTO bundles (id, place, state, digest)"
                " VALUES (?, ?, 'sending', ?)",
                (bundle, place, digest),
            )
            _add_files(db, bundle, files, "IGNORE")

    def find_begun(self, place: str, digest: str, prefix: str) -> str | None:
        """Return a bundle with these contents, and such a name, that was not sent completely."""
        found: str | None = self._database.value(
            "SELECT id FROM bundles WHERE place = ? AND digest = ? AND state = 'sending'"
            " AND id LIKE ?",
            place, digest, f"{prefix}%",
        )  # fmt: skip
        return found

    def set_sent(self, bundle: str, size: int, parts: int) -> None:
        """Record that the first `parts` of a bundle of `size` bytes are at its place."""
        self._database.change(
            "UPDATE bundles SET size = ?, sent = ? WHERE id = ?", size, parts, bundle
        )

    def sent(self, bundle: str) -> tuple[int, int]:
        """Return the size of a bundle, 0 if nothing was sent, and the number of parts sent."""
        row = self._db.execute("SELECT size, sent FROM bundles WHERE id = ?", (bundle,)).fetchone()
        return (row["size"], row["sent"]) if row else (0, 0)

    def set_bundle(self, bundle: str, state: str) -> None:
        """Record that a bundle is `uploaded`, or `unpacked`, or cannot be unpacked any more."""
        with self._database.write() as db:
            db.execute("UPDATE bundles SET state = ? WHERE id = ?", (state, bundle))
            if state == "unpacked":
                db.execute("DELETE FROM bundle_files WHERE bundle = ?", (bundle,))

    def forget_bundle(self, bundle: str) -> None:
        """Record that nothing is left of a bundle."""
        with self._database.write() as db:
            _forget_bundle(db, bundle)

    def bundles(self, place: str) -> dict[str, str]:
        """Return the bundles at a place, each with its state: `sending`, or as for `set_bundle`."""
        rows = self._db.execute(
            "SELECT id, state FROM bundles WHERE place = ? AND state <> 'carried' ORDER BY rowid",
            (place,),
        )
        return {row["id"]: row["state"] for row in rows}

    def uploaded_bundles(self, place: str) -> dict[str, list[FileRecord]]:
        """Return uploaded bundles that are not known to be unpacked, with their files."""
        bundles = self.bundles(place).items()
        return {bundle: self.bundle_files(bundle) for bundle, s in bundles if s == "uploaded"}

    def bundle_files(self, bundle: str) -> list[FileRecord]:
        """Return the files of a bundle that is not known to have been unpacked, else none."""
        rows = self._db.execute("SELECT * FROM bundle_files WHERE bundle = ?", (bundle,))
        return [_file(row) for row in rows]

    def bundles_with(self, place: str, path: str, sha256: str) -> list[tuple[str, bool]]:
        """Return the bundles that bring a content, each with whether all of it was uploaded."""
        rows = self._db.execute(
            "SELECT id, state FROM bundle_files JOIN bundles ON bundle = id WHERE path = ?"
            " AND sha256 = ? AND place = ? AND state <> 'carried' ORDER BY bundles.rowid DESC",
            (path, sha256, place),
        )
        return [(row["id"], row["state"] == "uploaded") for row in rows]

    def forget_bundled_files(self, place: str, paths: Iterable[str]) -> None:
        """Record that no bundle at `place` brings these files any more."""
        self._database.change_each(
            "DELETE FROM bundle_files WHERE path = ? AND bundle IN"
            " (SELECT id FROM bundles WHERE place = ? AND state <> 'carried')",
            [(path, place) for path in paths],
        )

    # Files of bundles that a site imports

    def set_import(
        self, bundle: str, path: str, name: str = "", site: str = "", import_id: str = ""
    ) -> None:
        """Record that a site imports a bundle's file of `path` to a file of this name, or none.

        `import_id` is empty while it is unknown.
        """
        self._database.change(
            "UPDATE bundle_files SET name = ?, site = ?, import_id = ?"
            " WHERE bundle = ? AND path = ?",
            name, site, import_id, bundle, path,
        )  # fmt: skip

    def imports(self, bundle: str, site: str) -> dict[str, tuple[str, str]]:
        """Return the name and the import's id of each file that a site imports, by path."""
        rows = self._db.execute(
            "SELECT path, name, import_id FROM bundle_files WHERE bundle = ? AND site = ?",
            (bundle, site),
        )
        return {row["path"]: (row["name"], row["import_id"]) for row in rows}

    def send_again(self, bundle: str) -> None:
        """Record that none of a bundle's parts and imports counts any more."""
        with self._database.write() as db:
            db.execute("UPDATE bundles SET size = 0, sent = 0 WHERE id = ?", (bundle,))
            db.execute(
                "UPDATE bundle_files SET name = '', site = '', import_id = '' WHERE bundle = ?",
                (bundle,),
            )

    # Numbers of contents

    def number(self, place: str, path: str, sha256: str, floor: int = 0) -> int:
        """Return the number of a content that is uploaded for `path`; newer ones have greater.

        It is 0 unless another content may still be written there, one was numbered before, or
        there is a `floor`: the highest number that another controller may have given. A new number
        exceeds the floor; one that the content already has is kept if it reaches the floor.
        """
        row = self._db.execute(
            "SELECT number, sha256 FROM numbered WHERE place = ? AND path = ?", (place, path)
        ).fetchone()
        last = 0 if row is None else int(row["number"])
        if row is not None and row["sha256"] == sha256 and last >= floor:
            return last
        if row is None and not floor and not self.conflicts(place, path, sha256):
            return 0
        number = max(last, floor) + 1
        self._database.change(
            "INSERT OR REPLACE INTO numbered VALUES (?, ?, ?, ?)", place, path, number, sha256
        )
        return number

    def outnumber(self, place: str, floors: Mapping[str, int]) -> None:
        """Let the next contents of some paths have numbers above `floors`, by path."""
        self._database.change_each(
            "INSERT INTO numbered VALUES (?, ?, ?, '') ON CONFLICT (place, path) DO UPDATE"
            " SET number = excluded.number, sha256 = '' WHERE number < excluded.number",
            [(place, path, floor) for path, floor in floors.items() if floor],
        )

    def superseded(self, place: str, file: FileRecord) -> bool:
        """Check whether another content was uploaded for the file's path since."""
        numbered = "SELECT sha256 FROM numbered WHERE place = ? AND path = ?"
        return self._database.value(numbered, place, file.path) not in (None, file.sha256)

    # Conflicts

    def carry(
        self, place: str, attempt_id: str, files: Iterable[FileRecord], makes: Iterable[str]
    ) -> None:
        """Record the files of an attempt that is about to be submitted.

        Its script carries `files` and unpacks them when it starts; `makes` are paths of the files
        and directories that it makes.
        """
        carried = [*files, *(FileRecord(path, 0, MADE) for path in makes)]
        with self._database.write() as db:
            db.execute(
                "INSERT OR IGNORE INTO bundles (id, place, state) VALUES (?, ?, 'carried')",
                (attempt_id, place),
            )
            _add_files(db, attempt_id, carried, "REPLACE")

    def conflicts(self, place: str, path: str, sha256: str = MADE) -> list[WriteConflict]:
        """Return what may still overwrite `path`, or files below it, in the workspace at `place`.

        A bundle or script that brings the content `sha256` is not included. An attempt that makes
        the file, or a directory above it, always is.
        """
        rows = self._db.execute(
            "SELECT id, state, sha256 = :made AS makes FROM bundle_files JOIN bundles"
            " ON bundle = id WHERE place = :place AND (path = :path AND sha256 < :sha256"
            " OR path = :path AND sha256 > :sha256 OR path >= :low AND path < :high"
            " OR path IN (SELECT value FROM json_each(:at_or_above)) AND sha256 = :made)",
            # "0" is the character after "/".
            {"path": path, "sha256": sha256, "place": place, "low": f"{path}/", "high": f"{path}0",
             "at_or_above": json.dumps(at_or_above(path)), "made": MADE},
        )  # fmt: skip
        return [
            WriteConflict(row["id"], row["state"] != "carried", bool(row["makes"])) for row in rows
        ]

    def landed(self, attempt_id: str) -> None:
        """Record that an attempt's script, or a bundle, writes no more files; see `mark_landed`."""
        if self._database.value("SELECT 1 FROM bundles WHERE id = ?", attempt_id):
            with self._database.write() as db:
                mark_landed(db, attempt_id)


def mark_landed(db: sqlite3.Connection, attempt_id: str) -> None:
    """Record, in the caller's transaction, that an attempt or a bundle writes no more files.

    The records of files that the attempt makes, or whose carried content differs from the recorded
    one, are deleted: either content may be there.
    """
    db.execute(
        "DELETE FROM remote_files WHERE (place, path) IN"
        " (SELECT r.place, r.path FROM bundle_files AS f JOIN bundles AS b ON b.id = f.bundle"
        " JOIN remote_files AS r ON r.place = b.place AND r.path = f.path"
        " WHERE f.bundle = ? AND r.sha256 <> f.sha256)",
        (attempt_id,),
    )
    _forget_bundle(db, attempt_id)


def _forget_bundle(db: sqlite3.Connection, bundle: str) -> None:
    db.execute("DELETE FROM bundle_files WHERE bundle = ?", (bundle,))
    db.execute("DELETE FROM bundles WHERE id = ?", (bundle,))


def _add_files(
    db: sqlite3.Connection, bundle: str, files: Iterable[FileRecord], else_: str
) -> None:
    db.executemany(
        f"INSERT OR {else_} INTO bundle_files (bundle, path, size, sha256, project)"  # noqa: S608
        " VALUES (?, ?, ?, ?, ?)",
        [(bundle, f.path, f.size, f.sha256, f.project) for f in files],
    )


def _below(directory: str) -> tuple[str, str]:
    """Return the range of paths below a directory: the first, and the first that is not."""
    return f"{directory}/", f"{directory}0"  # "0" is the character after "/"


def _file(row: sqlite3.Row) -> FileRecord:
    stored = {name: row[name] for name in ("modified", "mode") if name in row.keys()}  # noqa: SIM118
    return FileRecord(row["path"], row["size"], row["sha256"], bool(row["project"]), **stored)
