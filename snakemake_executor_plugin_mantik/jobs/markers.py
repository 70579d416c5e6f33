"""Read a marker: how an attempt ended, which files it made, and its small outputs.

A marker is a gzipped tar that a job script writes last (`outputs.sh`): `meta` (lines of
key=value), `missing` (inputs) and `lacking` (outputs), `files` (records of what the job made, all
separated by NUL), `new` (files beside the outputs), `log` (the end of the log) and small outputs.
If the file system is full, a marker holds less: no small outputs, or only `meta`, or nothing (or
the claim's content), so that only the exit code in its name is known.

A marker may hold anything, because the job's own user can write it. Nothing is unpacked to disk:
members are looked up by the paths in `files`, and only regular files count.
"""

import hashlib
import io
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, cast, get_args

from ..common.errors import TransferError
from .packs import MOST_ENTRIES, TarDamaged, read_tar
from .paths import UP

MARKER_LIMIT: Final = 256 << 20
"""Maximum size of an unpacked marker in bytes; scripts make far smaller ones."""

MOST_NEW: Final = 500
"""Most new files beside the outputs that a script lists."""

_LATEST_S: Final = 1e12
"""Times at or beyond this are invalid, in seconds since the epoch."""

_CLAIM = b"owner="
_TIMES: Final = re.compile(" ".join([r"([0-9]{1,12})m([0-9]{1,2}[.,][0-9]{1,9})s"] * 2))
_TIME: Final = re.compile(r"([0-9]{1,10})(?:\.([0-9]{1,10}))?", re.ASCII)
_MODE: Final = re.compile(r"[0-7]{1,5}", re.ASCII)
_FIELDS = 8


FilePlace = Literal["marker", "archive", "alone", "stored", "none"]


class MarkerInvalid(TransferError):  # noqa: N818 - reads as what it says
    """The marker is truncated, damaged or another attempt's; read it again."""


@dataclass(frozen=True)
class OutputEntry:
    """One file, directory or link that a job made.

    Attributes:
        path: relative to the workspace; bytes that are not UTF-8 as surrogate escapes.
        type: `f` file (also one that a declared path links to), `d` directory, `l` symbolic link
            inside a directory.
        size: bytes of a file; meaningless for the others.
        mode: permission bits.
        sha256: hexadecimal; empty for directories and links, or if the job had to end before it was
            computed.
        place: where the content is: in the `marker`, in the `archive`, `alone` at its path; `none`
            if it has no content. An output that stays at the site is `stored`, at its path.
        target: the path that a link points to.
        modified_ns: modification time in ns since the epoch by the site's clock; None if unknown.
    """

    path: str
    type: Literal["f", "d", "l"]
    size: int
    mode: int
    sha256: str
    place: FilePlace
    target: str = ""
    modified_ns: int | None = None


@dataclass(frozen=True)
class Marker:
    """How an attempt ended, as its script reports it.

    Times are seconds since the epoch on the node's clock: compare them only with each other.

    Attributes:
        exit_code: of the command, or of the step that failed before it.
        bare: whether the script had room only for the exit code and perhaps `meta`: nothing is
            known about files then.
        failed_step: the step before the command that failed (`script.STEPS`); empty if the command
            started, but `inputs` if inputs were replaced while it ran.
        signal: the signal that a job which failed had received (`TERM`, `INT`, `HUP`); empty for
            none.
        started, ended: when the attempt won its claim; when the command and the clean-up were over.
        host: name of the node, the first one of several.
        nodes: the names of all nodes of a segment, as its scheduler writes them; empty if unknown.
        scheduler_job: the scheduler's id of the job, or node and process id.
        site_job: last part of the directory that the job was started in: for UNICORE its job id.
        missing_inputs: inputs that were missing, had another content, or were replaced by another
            one while the command ran.
        missing_outputs: outputs that a successful command did not make.
        files: files that the job made, in the order of the declared outputs, each directory with
            everything below it.
        new: files beside the outputs that are new since the command began; another job may have
            made them.
        archive_size, archive_sha256: of the archive; 0 and empty if there is none.
        log: the end of the log.
        log_bytes: size of the whole log.
        cpu: CPU seconds of all processes that the script waited for; None if unknown.
        memory: the most memory at a time of its processes on the first node, in bytes, as sampled
            (`heartbeat.sh`); None if unknown.
        gpu_busy: how busy its GPUs on the first node were on average, in percent, as sampled
            (`heartbeat.sh`); None if unknown.
        go_on: why a job that may continue (`spec.Segment`) is to go on in a next segment: it
            `asked`, or its walltime ended (`time_limit`); empty if it is not to, by its script.
        changed: whether its checkpoint changed since the segment began.
    """

    exit_code: int
    bare: bool = False
    failed_step: str = ""
    signal: str = ""
    started: float | None = None
    ended: float | None = None
    host: str = ""
    nodes: str = ""
    scheduler_job: str = ""
    site_job: str = ""
    missing_inputs: tuple[str, ...] = ()
    missing_outputs: tuple[str, ...] = ()
    files: tuple[OutputEntry, ...] = ()
    new: tuple[OutputEntry, ...] = ()
    archive_size: int = 0
    archive_sha256: str = ""
    log: bytes = b""
    log_bytes: int = 0
    cpu: float | None = None
    memory: int | None = None
    gpu_busy: float | None = None
    go_on: str = ""
    changed: bool = False
    _small: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def at(self, *paths: str) -> tuple[OutputEntry, ...]:
        """Return the entries of `files` at these paths, or below them."""
        below = tuple(f"{path}/" for path in paths)
        return tuple(e for e in self.files if f"{e.path}/".startswith(below))

    def without(self, entries: Iterable[OutputEntry]) -> "Marker":
        gone = frozenset(entries)
        return replace(self, files=tuple(e for e in self.files if e not in gone))

    def small_outputs(self) -> Iterator[tuple[OutputEntry, bytes]]:
        """Yield the outputs that the marker holds, with their content."""
        for entry in self.files:
            if entry.place == "marker":
                yield entry, self._small[entry.path]


def read_marker(content: bytes, *, attempt_id: str, exit_code: int) -> Marker:
    """Read the marker of the attempt `attempt_id`, whose name holds `exit_code`.

    Empty content, or the claim's, is a bare marker. Raises `MarkerInvalid` if the content is
    truncated, damaged, inconsistent, another attempt's or of an unknown version.
    """
    if not content or content.startswith(_CLAIM):
        return Marker(exit_code=exit_code, bare=True)
    members = _members(content)
    lines = _text(_member(members, "meta")).split("\n")
    meta = {key: value for key, _, value in (line.partition("=") for line in lines)}
    if meta.get("version") != "1":
        raise _invalid(f"it has the unknown version {meta.get('version')!r}")
    if meta.get("attempt") != attempt_id or meta.get("exit_code") != str(exit_code):
        raise _invalid("it belongs to another attempt or exit code")
    facts = Marker(
        exit_code=exit_code,
        bare="files" not in meta,
        failed_step=meta.get("failed_step", ""),
        signal=meta.get("signal", ""),
        started=_seconds(meta, "started"),
        ended=_seconds(meta, "ended"),
        host=meta.get("host", ""),
        nodes=meta.get("nodes", ""),
        scheduler_job=meta.get("scheduler_job", ""),
        site_job=meta.get("site_job", ""),
        cpu=_cpu(meta),
        gpu_busy=_gpu_busy(meta.get("gpus", "")),
        memory=int(meta["memory"]) if _is_number(meta.get("memory", "")) else None,
        go_on=meta.get("go_on", ""),
        changed=meta.get("changed") == "yes",
    )
    return facts if facts.bare else _with_files(facts, meta, members)


def _with_files(facts: Marker, meta: Mapping[str, str], members: Mapping[str, bytes]) -> Marker:
    entries = _entries(_member(members, "files"))
    lacking = _paths(_member(members, "lacking"))
    if len(entries) != _number(meta, "files") or len(lacking) != _number(meta, "lacking"):
        raise _invalid("its lists are not complete")
    small = {}
    for entry in entries:
        if entry.place != "marker":
            continue
        name = entry.path if entry.path.startswith("/") else f"./{entry.path}"
        data = _member(members, name)
        sha256 = entry.sha256 and hashlib.sha256(data).hexdigest()
        if len(data) != entry.size or sha256 != entry.sha256:
            raise _invalid(f"its copy of {entry.path!r} differs from the file")
        small[entry.path] = data
    return replace(
        facts,
        missing_inputs=_paths(_member(members, "missing")),
        missing_outputs=lacking,
        files=entries,
        new=_new_files(members.get("new", b"")),
        archive_size=_number(meta, "archive_size"),
        archive_sha256=meta.get("archive_sha256", ""),
        log=_member(members, "log"),
        log_bytes=_number(meta, "log_bytes"),
        _small=small,
    )


def _members(content: bytes) -> dict[str, bytes]:
    """Return the regular members of the tar by name; the first one of each name counts."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        data = unpacker.decompress(content, MARKER_LIMIT + 1)
    except zlib.error as error:
        raise _invalid(f"it is not gzip, or damaged ({error})") from error
    if len(data) > MARKER_LIMIT:
        raise _invalid(f"it unpacks to more than {MARKER_LIMIT} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise _invalid("it is cut, or something follows it")
    members: dict[str, bytes] = {}
    try:
        for name, pieces in read_tar(io.BytesIO(data)):
            members.setdefault(name, b"".join(pieces))
    except TarDamaged as error:
        raise _invalid(f"it holds no tar ({error})") from error
    return members


def _member(members: Mapping[str, bytes], name: str) -> bytes:
    if name not in members:
        raise _invalid(f"it lacks {name!r}")
    return members[name]


def _entries(data: bytes) -> tuple[OutputEntry, ...]:
    if data.count(b"\0") > MOST_ENTRIES * _FIELDS:
        raise _invalid("its list of files is too long")
    fields = _text(data).split("\0")
    if fields.pop() or len(fields) % _FIELDS:
        raise _invalid("its list of files is cut")
    return tuple(_entry(fields[i : i + _FIELDS]) for i in range(0, len(fields), _FIELDS))


def _entry(fields: list[str]) -> OutputEntry:
    place, kind, size, mode, sha256, target, time, path = fields
    known = place in get_args(FilePlace) and kind in ("f", "d", "l") and _MODE.fullmatch(mode)
    if not known or not _is_number(size) or (kind == "f") == (place == "none"):
        raise _invalid(f"its record of {path!r} makes no sense")
    return OutputEntry(
        path=path,
        type=cast(Literal["f", "d", "l"], kind),
        size=int(size),
        mode=int(mode, 8),
        sha256=sha256,
        place=cast(FilePlace, place),
        target=target,
        modified_ns=_ns(time),
    )


def _new_files(data: bytes) -> tuple[OutputEntry, ...]:
    """Return the new files beside the outputs whose paths can be files of the workflow's.

    The list may be cut, where the file system was full: that is no reason to doubt the outputs.
    """
    if data.count(b"\0") > MOST_ENTRIES:
        return ()
    fields = _paths(data)
    found = []
    for i in range(0, len(fields) - 3, 4):
        size, time, mode, path = fields[i : i + 4]
        if not _is_number(size) or not _MODE.fullmatch(mode):
            break
        # A hidden or absolute path, or one with `..`, is none of the workflow's.
        parts = path.split("/")[3 if path.startswith(f"{UP}/") else 0 :]
        if parts and not any(part.startswith(".") or not part for part in parts):
            entry = OutputEntry(path, "f", int(size), int(mode, 8), "", "alone", "", _ns(time))
            found.append(entry)
    return tuple(found)


def _ns(text: str) -> int | None:
    """Convert the output of `find -printf %T@` (`1795404437.1234567890`) to nanoseconds."""
    match = _TIME.fullmatch(text)
    return int(match[1]) * 10**9 + int(f"{match[2] or ''}000000000"[:9]) if match else None


def _paths(data: bytes) -> tuple[str, ...]:
    if data.count(b"\0") > MOST_ENTRIES:
        raise _invalid("a list of paths in it is too long")
    return tuple(_text(data).split("\0")[:-1])


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _number(meta: Mapping[str, str], key: str) -> int:
    value = meta.get(key, "")
    if not _is_number(value):
        raise _invalid(f"its {key} is {value[:40]!r}, not a number")
    return int(value)


def _seconds(meta: Mapping[str, str], key: str) -> float:
    try:
        seconds = float(meta.get(key, ""))
    except ValueError:
        seconds = _LATEST_S
    if not abs(seconds) < _LATEST_S:
        raise _invalid(f"its {key} is no time")
    return seconds


def _cpu(meta: Mapping[str, str]) -> float | None:
    """Add user and system time from the output of bash's `times`: `1m2.345s 0m0.678s`."""
    match = _TIMES.fullmatch(meta.get("cpu", ""))
    if match is None:
        return None
    minutes, seconds, more_minutes, more_seconds = (t.replace(",", ".") for t in match.groups())
    return 60.0 * (int(minutes) + int(more_minutes)) + float(seconds) + float(more_seconds)


def _gpu_busy(text: str) -> float | None:
    """Divide the sum of samples by their number, which `heartbeat.sh` writes."""
    total, _, number = text.partition(" ")
    if not (_is_number(total) and _is_number(number) and int(number)):
        return None
    return int(total) / int(number)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


def _invalid(why: str) -> MarkerInvalid:
    return MarkerInvalid(f"the marker cannot be used: {why}", do="Read it again")
