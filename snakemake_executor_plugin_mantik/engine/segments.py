"""Let jobs go on past their walltime: decide what follows a segment, and plan the next one.

Each segment is a try of its own, with the same fingerprint. The journal keeps what the checkpoint
of the last one consists of; the next one runs only if it finds that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import one_line
from snakemake_executor_plugin_mantik.jobs.markers import Marker
from snakemake_executor_plugin_mantik.jobs.paths import TryPaths, is_at
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.segments import Continuation
from snakemake_executor_plugin_mantik.jobs.spec import InputFile, OutputFile, Segment
from snakemake_executor_plugin_mantik.journal import FileRecord, TryRecord

from .request import JobRequest

LISTED: Final = "listed"
"""The marker lists the checkpoint: the next segment runs only with these files."""
IF_CHANGED: Final = "if changed"
"""There is no list: the next segment runs only if the checkpoint has changed."""
ANYWAY: Final = "anyway"
"""There is no list, and the job need not have made progress: its node failed, or was needed."""


_MOST_NAMED: Final = 5
"""Most files that a message names."""


class GoesOn:
    """The result of a segment that another one follows."""


@dataclass(frozen=True)
class SegmentEnd:
    """What follows the end of a segment.

    Attributes:
        goes_on: how another segment can go on (`TryRecord.goes_on`); empty if none can.
        failure: why the job fails all the same; empty if another segment follows now.
        advice: what to do about that.
    """

    goes_on: str
    failure: str = ""
    advice: str = ""


def judge_segment(
    continuation: Continuation, record: TryRecord, marker: Marker | None, reason: Reason
) -> SegmentEnd | None:
    """Return what follows a segment that has not succeeded; None if it is an ordinary failure.

    `marker` is None if it left none.
    """
    asked = marker is not None and marker.go_on == "asked" and reason is Reason.EXIT_CODE
    if not asked and reason not in continuation.on:
        return None
    needs_change = asked or reason is Reason.TIME_LIMIT
    listed = marker is not None and not marker.bare
    if listed and needs_change and not (marker and marker.changed):
        ended = "asked to go on" if asked else "reached its time limit"
        return SegmentEnd(
            "",
            f"The job {ended}, but no file of its checkpoint"
            f" ({' '.join(continuation.checkpoint)}) has changed in {record.part}",
            "Save the checkpoint more often, correct mantik_checkpoint, or request more time",
        )
    goes_on = LISTED if listed else IF_CHANGED if needs_change else ANYWAY
    if record.segment + 1 >= continuation.most:
        return SegmentEnd(
            goes_on,
            f"The job was to go on once more ({'it asked' if asked else reason.words}), but this"
            f" was {record.part}",
            "Start again, if need be with a larger mantik_continue: it goes on from its"
            f" checkpoint. To begin anew, type: snakemake --forcerun {record.rule}",
        )
    return SegmentEnd(goes_on)


def without_checkpoint(
    continuation: Continuation, marker: Marker
) -> tuple[Marker, list[FileRecord]]:
    """Split the files of a marker into those to fetch and the checkpoint."""
    kept = marker.at(*continuation.paths)
    return marker.without(kept), [
        FileRecord(e.path, e.size, e.sha256) for e in kept if e.type == "f"
    ]


def lost_checkpoint(
    continuation: Continuation | None, record: TryRecord, marker: Marker
) -> SegmentEnd | None:
    """Return the failure of a segment that did not find its checkpoint; None for any other end."""
    if continuation is None or not record.follows:
        return None
    gone = [path for path in marker.missing_inputs if _overlaps(path, continuation.paths)]
    if not gone:
        return None
    return SegmentEnd(
        "",
        f"Before {record.part}, the checkpoint was removed or changed at the site"
        f" ({', '.join(gone[:_MOST_NAMED])})",
        "Check whether the workspace is purged, or another job writes there, and start again: the"
        " job begins anew",
    )


@dataclass(frozen=True)
class Resumed:
    """What a segment goes on from.

    Attributes:
        files: the checkpoint, if its content is known.
        before: the paths of the previous segment, if the checkpoint must differ from what that one
            found.
    """

    files: tuple[FileRecord, ...] = ()
    before: TryPaths | None = None


NOTHING: Final = Resumed()
"""What a job finds that begins anew, or that has begun to change what it goes on from."""


def plan_segment(
    request: JobRequest, record: TryRecord, runtime_s: int | None, resumed: Resumed
) -> tuple[Segment | None, tuple[OutputFile, ...], tuple[InputFile, ...]]:
    """Return a try's segment, its outputs and those of its inputs that the checkpoint consists of.

    A job that begins anew finds no checkpoint, except what it updates. One that goes on finds
    its logs as well, and outputs that hold a part of the checkpoint.

    Raises:
        UserError: the job has no walltime that is long enough.
    """
    continuation = request.continuation
    if continuation is None:
        return None, request.outputs, ()
    runtime_s = continuation.check_walltime(runtime_s)
    paths = continuation.paths
    updated = {output.path for output in request.updated}
    outputs = [
        replace(o, keep=True)
        if record.follows and (o.kind == "log" or _overlaps(o.path, paths))
        else o
        for o in request.outputs
    ]
    outputs += [
        OutputFile(path, "checkpoint", directory=True, keep=bool(record.follows) or path in updated)
        for path in paths
    ]
    segment = Segment(
        record.segment, continuation.most, continuation.checkpoint, runtime_s,
        continuation.warning_s(runtime_s), resumed.before,
    )  # fmt: skip
    files = [InputFile(f.path, f.size, sha256=f.sha256, changed=True) for f in resumed.files]
    return segment, tuple(outputs), tuple(files)


def _overlaps(path: str, others: Sequence[str]) -> bool:
    return any(is_at(path, other) or is_at(other, path) for other in others)


def goes_on_message(record: TryRecord, reason: Reason) -> str:
    """Return the message that another segment follows."""
    why = "it asked to go on" if reason is Reason.EXIT_CODE else reason.words
    return one_line(f"{record.name}: {record.part} has ended ({why}); it goes on from there.")
