"""The spare: a second file with the facts that must survive a damaged journal.

One line of JSON per fact, append-only; a damaged line loses one fact and no other. It holds the
facts that no site can report: the workflow's name, the paths of its workspaces, the tries that may
be there, and the stored outputs. The progress of tries is queried from the sites again. The file is
rewritten at each start, so that it holds little more than open tries and stored outputs.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .records import FileRecord, StoredOutput

_FILE = "journal.spare"

Fact = Mapping[str, Any]
"""A line of a spare; `read_facts` reads all kinds of them."""


@dataclass
class BackupContents:
    """The facts in a spare.

    Attributes:
        workflow: the workflow's name; empty if it is lost.
        instance: the name of the journal's file (`Database.instance`).
        seat: where that file was, as JSON (`journal.database.Seat`).
        home: the directory that its workspaces are named after.
        numbers: by place, the last number that it has taken there (`engine.leases`).
        sites: the columns of the table `sites`, by site.
        tries: by id, for the tries not known to be over: the columns of `tries` that are settled
            before submission, `members`, `uses`: place and path of what it uses, and whether that
            is its checkpoint, and `tracked`: table and columns of what tracking knows of it.
        stored: by path, the stored outputs; None for those that do not exist.
    """

    workflow: str = ""
    instance: str = ""
    seat: str = ""
    home: str = ""
    numbers: dict[str, int] = field(default_factory=dict)
    sites: dict[str, dict[str, Any]] = field(default_factory=dict)
    tries: dict[str, dict[str, Any]] = field(default_factory=dict)
    stored: dict[str, StoredOutput | None] = field(default_factory=dict)


class JournalBackup:
    """An open spare, for appending. Belongs to the holder of the journal's lock."""

    def __init__(self, directory: Path, facts: Iterable[Fact]) -> None:
        """Write a new spare with `facts` to `directory`, then replace the old one.

        Raises:
            OSError: it cannot be written.
        """
        path = directory / _FILE
        new = directory / f"{_FILE}.new"
        with new.open("wb") as file:
            file.writelines(map(as_line, facts))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        self._file = path.open("ab", buffering=0)

    def add(self, fact: Fact, *, lasting: bool = False) -> None:
        """Add a fact; with `lasting` it is on disk when the method returns.

        Raises:
            OSError: it cannot be written.
        """
        # A line that a full disk cut off before spoils only itself.
        self._file.write(b"\n" + as_line(fact))
        if lasting:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def stored_fact(output: StoredOutput) -> Fact:
    """Make the fact that an output is stored, with its files."""
    return {"stored": output.path, "output": asdict(output)}


def lost_fact(path: str) -> Fact:
    """Make the fact that an output does not exist, whatever lies here under its name."""
    return {"stored": path, "output": None}


def _stored_output(columns: Mapping[str, Any]) -> StoredOutput:
    files = tuple(FileRecord(**file) for file in columns["files"])
    links = tuple((path, target) for path, target in columns["links"])
    return StoredOutput(**{**columns, "files": files, "links": links})


def number_fact(place: str, number: int) -> Fact:
    """Make the fact that a run has taken a number at a place."""
    return {"number": number, "place": place}


def read_backup(directory: Path) -> BackupContents:
    """Read the spare in `directory`, without damaged lines; empty if it cannot be read."""
    try:
        return read_facts((directory / _FILE).read_bytes())
    except OSError:
        return BackupContents()


def has_backup(directory: Path) -> bool:
    """Return whether there is a spare in `directory` from which a journal can be restored."""
    return bool(read_backup(directory).workflow)


def read_facts(content: bytes) -> BackupContents:
    """Read the facts in a spare, without damaged lines."""
    known = BackupContents()
    over: set[str] = set()
    for fact in _facts(content):
        try:
            if "workflow" in fact:
                known.workflow = str(fact["workflow"])
                known.instance, known.seat = str(fact["instance"]), str(fact["seat"])
                known.home = str(fact["home"])
            elif "number" in fact:
                known.numbers[str(fact["place"])] = int(fact["number"])
            elif "site" in fact:
                known.sites[str(fact["site"]["site"])] = dict(fact["site"])
            elif "stored" in fact:
                output = fact["output"]
                known.stored[str(fact["stored"])] = output and _stored_output(output)
            elif "forgotten" in fact:
                known.stored.pop(str(fact["forgotten"]), None)
            elif "over" in fact:
                over.add(str(fact["over"]))
            else:
                found = dict(fact["try"]) | {"members": dict(fact["members"])}
                found["uses"] = [(*map(str, use[:2]), bool(use[2])) for use in fact["uses"]]
                found["tracked"] = [(str(table), dict(row)) for table, row in fact["tracked"]]
                known.tries[str(found["id"])] = found
        except (KeyError, TypeError, ValueError):
            continue
    for try_id in over:
        known.tries.pop(try_id, None)
    return known


def _facts(content: bytes) -> Iterator[dict[str, Any]]:
    for line in content.split(b"\n"):
        try:
            fact = json.loads(line)
        except ValueError:
            continue
        if isinstance(fact, dict):
            yield fact


def as_line(fact: Fact) -> bytes:
    """Return a fact as a line of a spare."""
    return json.dumps(fact).encode() + b"\n"
