"""The spare: what must not be forgotten with a damaged journal, in a second file.

A line of JSON for each fact, only ever added to; a damaged line is one fact lost and no other. It
holds what no site can tell: the workflow's name, where its workspaces are, and which tries may be
there. How far these are is asked of the sites again. Written anew at each start, so that it holds
what is open and little else.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FILE = "journal.spare"

Fact = Mapping[str, Any]


@dataclass
class BackupContents:
    """What a spare tells.

    Attributes:
        workflow: the workflow's name; empty if that is lost.
        instance: the name of the journal's file (`Database.instance`).
        seat: where that file was, as a digest.
        sites: the columns of the table `sites`, by site.
        tries: the columns of `tries` that are settled before a try is submitted, and `members`, of
            the tries that are not known to be over, by id.
    """

    workflow: str = ""
    instance: str = ""
    seat: str = ""
    sites: dict[str, dict[str, Any]] = field(default_factory=dict)
    tries: dict[str, dict[str, Any]] = field(default_factory=dict)


class JournalBackup:
    """An open spare, to be added to. Belongs to who holds the journal's lock."""

    def __init__(self, directory: Path, facts: Iterable[Fact]) -> None:
        """Write the spare in `directory` anew: it holds `facts`, and the old one goes last.

        Raises:
            OSError: it cannot be written.
        """
        path = directory / _FILE
        new = directory / f"{_FILE}.new"
        with new.open("wb") as file:
            file.writelines(map(_line, facts))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        self._file = path.open("ab", buffering=0)

    def add(self, fact: Fact, *, lasting: bool = False) -> None:
        """Add a fact; on disk when it returns if it is to be `lasting`.

        Raises:
            OSError: it cannot be written.
        """
        # What was cut off before by a full disk spoils its own line only.
        self._file.write(b"\n" + _line(fact))
        if lasting:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def try_fact(columns: Fact, members: Mapping[str, str]) -> Fact:
    """The fact that a try may be at its site from now on."""
    return {"try": dict(columns), "members": dict(members)}


def end_fact(try_id: str) -> Fact:
    """The fact that a try is final."""
    return {"over": try_id}


def site_fact(columns: Fact) -> Fact:
    """The fact where a site's workspace is."""
    return {"site": dict(columns)}


def workflow_fact(name: str, instance: str, seat: str) -> Fact:
    """The fact which workflow it is, and which of its journals."""
    return {"workflow": name, "instance": instance, "seat": seat}


def read_backup(directory: Path) -> BackupContents:
    """What the spare in `directory` tells; nothing if there is none."""
    known = BackupContents()
    over: set[str] = set()
    for fact in _facts(directory / _FILE):
        try:
            if "workflow" in fact:
                known.workflow = str(fact["workflow"])
                known.instance, known.seat = fact.get("instance", ""), fact.get("seat", "")
            elif "site" in fact:
                known.sites[str(fact["site"]["site"])] = dict(fact["site"])
            elif "over" in fact:
                over.add(str(fact["over"]))
            else:
                found = dict(fact["try"]) | {"members": dict(fact["members"])}
                known.tries[str(found["id"])] = found
        except (KeyError, TypeError, ValueError):
            continue
    for try_id in over:
        known.tries.pop(try_id, None)
    return known


def _facts(path: Path) -> Iterator[dict[str, Any]]:
    try:
        content = path.read_bytes()
    except OSError:
        return
    for line in content.split(b"\n"):
        try:
            fact = json.loads(line)
        except ValueError:
            continue
        if isinstance(fact, dict):
            yield fact


def _line(fact: Fact) -> bytes:
    return json.dumps(fact).encode() + b"\n"
