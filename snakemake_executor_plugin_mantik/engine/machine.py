"""The machine of an attempt: how it can end, what that means, what follows. No I/O, no clock.

    planned ─▶ submitting ─▶ submitted ─▶ ended ─▶ done
       └───────────┴─────────────┴──────────┴────▶ abandoned

An attempt never goes back (`journal.AttemptState`). Until its end is known, its evidence alone says
whether it waits or runs (`evidence.judge`). The end is judged here: from the evidence, the marker
and the reason (`judge_silence`, `judge_start`, `judge_failure`), to one of the ways in `End`.
`decide` says what the engine does then, whichever part of it noticed the end.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from ..common.errors import one_line
from ..jobs.markers import Marker
from ..jobs.paths import display_path, is_at
from ..jobs.reasons import Reason
from ..jobs.script import PREDECESSORS
from ..jobs.segments import Continuation
from ..journal import GIVEN_UP, WENT_ON, AttemptRecord, AttemptState
from .evidence import Evidence, Finding
from .observer import How, Successor
from .request import JobRequest

_MOST_NAMED: Final = 5
"""Most files that a message names."""


class End(Enum):
    """How an attempt ends.

    - SUCCEEDED: its marker says 0, and its outputs are here.
    - KEPT: its marker says 0, but its outputs cannot be fetched or written now; the next run adopts
      it.
    - FAILED: the job has failed, or could not be followed to its success.
    - GOES_ON: another segment follows.
    - AGAIN: it computed nothing, or nothing of it is left: the job is submitted again at once.
    - LATER: as AGAIN, but when the site takes the job.
    - REFUSED: the site, or a mistake of the user, has kept it from being submitted.
    - STOPPED: the user or this run has no use for it any more.
    """

    SUCCEEDED = "succeeded"
    KEPT = "kept"
    FAILED = "failed"
    GOES_ON = "goes on"
    AGAIN = "again"
    LATER = "later"
    REFUSED = "refused"
    STOPPED = "stopped"


class Do(Enum):
    """What the engine does about the end of an attempt, in this order.

    - SECRETS: remove its secrets at the site, unless its script has.
    - CLOSE: let the site forget it, since nobody is to take its results.
    - FREE: submit the attempts that need its outputs.
    - WITHDRAW: end the attempts that need its outputs.
    - DOUBT: ask the site whether this controller still leads before the next submission.
    - ASSURE: ask so before anything is reported.
    """

    SECRETS = "remove secrets"
    CLOSE = "close"
    FREE = "free those behind it"
    WITHDRAW = "end those behind it"
    DOUBT = "doubt the lead"
    ASSURE = "assure the lead"


@dataclass(frozen=True)
class Decision:
    """What follows from the end of an attempt.

    Attributes:
        state: of the attempt.
        outcome: of the attempt for the journal, with a place for the reason.
        how, successor: see `JobEnd`.
        todo: what the engine does.
    """

    state: AttemptState
    outcome: str
    how: How
    todo: frozenset[Do]
    successor: Successor = ""


def _row(
    state: AttemptState, outcome: str, how: How, *todo: Do, successor: Successor = ""
) -> Decision:
    return Decision(state, outcome, how, frozenset(todo), successor)


_LOST: Final = (Do.SECRETS, Do.CLOSE, Do.WITHDRAW)
_ENDED, _ABANDONED = AttemptState.ENDED, AttemptState.ABANDONED
_TABLE: Final = {
    End.SUCCEEDED: _row(_ENDED, "succeeded", "finished", Do.FREE),
    End.KEPT: _row(_ENDED, "succeeded", "finished", Do.ASSURE),
    End.FAILED: _row(_ENDED, "failed: {}", "failed", Do.SECRETS, Do.WITHDRAW),
    End.GOES_ON: _row(
        _ENDED, f"{WENT_ON} ({{}})", "killed", Do.SECRETS, Do.CLOSE, successor="next segment"
    ),
    End.AGAIN: _row(_ABANDONED, "failed: {}", "killed", *_LOST, Do.DOUBT, successor="same segment"),
    End.LATER: _row(_ABANDONED, "failed: {}", "killed", *_LOST, successor="same segment"),
    End.REFUSED: _row(_ABANDONED, "failed: {}", "failed", Do.SECRETS, Do.WITHDRAW),
    End.STOPPED: _row(_ABANDONED, "{}", "killed", Do.SECRETS, Do.CLOSE),
}


def decide(end: End, reason: Reason | None = None) -> Decision:
    """Return what follows from the end of an attempt, whichever part of the engine noticed it.

    `reason` is why the job failed: one that was cancelled at the site has not failed by itself.
    """
    then = _TABLE[end]
    return replace(then, how="killed") if reason is Reason.CANCELLED else then


@dataclass(frozen=True)
class Verdict:
    """What the end of an attempt means for its job.

    Attributes:
        end: how the attempt ends.
        reason: why it failed, or why another segment follows.
        why: why the job is submitted again; or why a job that can go on in segments fails all the
            same, with `advice`: then no ordinary message fits.
        goes_on: how another segment can go on from its checkpoint (`AttemptRecord.goes_on`).
        say: what to tell the user now.
        missing: the inputs that the site has not with the content that the job needs.
        bundles: the bundles that the site has not any more.
        purged: whether nothing that is known of the workspace counts any more.
    """

    end: End
    reason: Reason = Reason.SUCCESS
    why: str = ""
    advice: str = ""
    goes_on: str = ""
    say: str = ""
    missing: tuple[str, ...] = ()
    bundles: tuple[str, ...] = ()
    purged: bool = False


def judge_silence(
    record: AttemptRecord, known: Evidence, continuation: Continuation | None
) -> Verdict:
    """Return what it means that an attempt has ended without a marker."""
    state = known.state
    reason = state.reason if state is not None else None
    if state is not None and state.later and not known.claimed:
        if reason is Reason.REJECTED:
            say = (
                f"it takes no more jobs just now ({state.detail}); they are submitted again until"
                " it does. Set Site: MaxJobs to keep their number below its limit"
            )
            return Verdict(End.LATER, reason, "the scheduler took no more jobs", say=say)
        say = (
            "it lost jobs before they started, because one of its services was down"
            f" ({state.detail}); they are submitted again"
        )
        return Verdict(End.LATER, Reason.LAUNCH_FAILURE, "a part of the site was away", say=say)
    if known.found is Finding.REVOKED:
        return Verdict(End.AGAIN, why=GIVEN_UP)
    if record.state is AttemptState.ENDED:
        return Verdict(End.AGAIN, why="its results are no longer at the site")
    if reason is Reason.SUCCESS and not known.claimed:
        # A script that exits 0 without a claim found no workspace, no directory for claims, or a
        # newer term, which the lease reports.
        say = f"{record.name}: the workspace at {record.site} has lost files; submitting it again."
        return Verdict(End.AGAIN, why="the workspace was purged", say=say, purged=True)
    if reason in (None, Reason.SUCCESS):  # it left no marker, so it did not succeed
        reason = Reason.UNKNOWN
    return judge_failure(record, None, reason, continuation)


def judge_start(
    record: AttemptRecord,
    marker: Marker,
    continuation: Continuation | None,
    bundles: Sequence[str] | None,
) -> Verdict | None:
    """Return why a job is to be submitted again that has not found its files; None if it has.

    `bundles` are those that it unpacks; None if that is unknown, since an earlier run submitted it.
    """
    if find_lost_checkpoint(record, marker, continuation):
        return None
    if marker.failed_step == PREDECESSORS:
        return Verdict(End.AGAIN, why="the jobs that make its inputs had not succeeded")
    if missing := marker.missing_inputs:
        others = ", ".join(map(display_path, missing[:_MOST_NAMED]))
        say = (
            f"{record.name}: its inputs changed while it waited or ran ({others}), or the site has"
            " lost them; it is submitted again with their present contents."
        )
        return Verdict(End.AGAIN, why=f"its inputs changed: {others}", say=say, missing=missing)
    if marker.failed_step != "bundles" or marker.signal or (bundles is not None and not bundles):
        return None
    why = "files were purged at the site"
    return Verdict(End.AGAIN, why=why, bundles=tuple(bundles or ()), purged=bundles is None)


# Why a job has failed

_KILLED: Final = 128 + 9
"""A shell's exit code for a command that SIGKILL ended; the kernel sends it for lack of memory,
among others."""
_ASKED: Final = frozenset({128 + 1, 128 + 2, 128 + 15})
"""The exit codes of a script or command that SIGHUP, SIGINT or SIGTERM ended."""
_LONGEST_START_S: Final = 60.0
_START_SHARE: Final = 0.02
"""How long a script may take to start, in seconds or as a share of the walltime."""


def read_reason(marker: Marker, limit: float | None) -> tuple[Reason, bool]:
    """Return why a job failed that could still write its marker; and whether to ask the scheduler.

    Only the scheduler knows who has sent a signal, and a script does not notice one that has ended
    its command a moment before. `limit` is the walltime in seconds, where known.
    """
    if marker.go_on == "time_limit":  # its script has ended it in time
        return Reason.TIME_LIMIT, False
    ran = marker.ended - marker.started if marker.started and marker.ended else 0.0
    over = limit is not None and ran >= limit - _slack(limit)
    # A marker that had room for its name only does not contain the signal.
    nameless = marker.bare and marker.started is None and marker.exit_code in _ASKED
    if marker.signal or nameless:
        return Reason.TIME_LIMIT if over else Reason.CANCELLED, True
    if marker.failed_step:
        return Reason.SET_UP, False
    # A scheduler ends one process after the other: the command may have ended, with any code,
    # before the script got the signal.
    killed = marker.exit_code == _KILLED or marker.exit_code in _ASKED
    return Reason.EXIT_CODE, (over or killed) and not marker.go_on


def _slack(limit: float) -> float:
    """Return the seconds before its walltime at which a job may already reach its time limit.

    A scheduler counts from the allocation of the nodes, the script from its own start. With a short
    walltime this must be less than a minute, or every end would count as reaching the limit.
    """
    return min(max(_LONGEST_START_S, _START_SHARE * limit), limit / 10)


# Segments

LISTED: Final = "listed"
"""The marker lists the checkpoint: the next segment runs only with these files."""
IF_CHANGED: Final = "if changed"
"""There is no list: the next segment runs only if the checkpoint has changed."""
ANYWAY: Final = "anyway"
"""There is no list, and the job need not have made progress: its node failed, or was needed."""


def judge_failure(  # noqa: PLR0911 - one for each way
    record: AttemptRecord, marker: Marker | None, reason: Reason, continuation: Continuation | None
) -> Verdict:
    """Return what it means that an attempt has failed for a reason: mostly that its job has.

    `marker` is None if it left none.
    """
    failed = Verdict(End.FAILED, reason)
    if reason is Reason.ALLOCATION_ENDED:  # no fault of the job, and it had walltime left
        say = f"{record.name}: the pool's allocation that ran it has ended; it is submitted again."
        return Verdict(End.AGAIN, reason, "the pool's allocation ended", say=say)
    if continuation is None:
        return failed
    if marker is not None and (gone := find_lost_checkpoint(record, marker, continuation)):
        return replace(
            failed,
            why=f"Before {record.part}, the checkpoint was removed or changed at the site"
            f" ({', '.join(gone[:_MOST_NAMED])})",
            advice="Check whether the workspace is purged, or another job writes there, and start"
            " again: the job begins anew",
        )
    asked = marker is not None and marker.go_on == "asked" and reason is Reason.EXIT_CODE
    if not asked and reason not in continuation.on:
        return failed
    needs_change = asked or reason is Reason.TIME_LIMIT
    listed = marker is not None and not marker.bare
    if listed and needs_change and not (marker and marker.changed):
        ended = "asked to go on" if asked else "reached its time limit"
        return replace(
            failed,
            why=f"The job {ended}, but no file of its checkpoint"
            f" ({' '.join(continuation.checkpoint)}) has changed in {record.part}",
            advice="Save the checkpoint more often, correct mantik_checkpoint, or request more"
            " time",
        )
    goes_on = LISTED if listed else IF_CHANGED if needs_change else ANYWAY
    why = "asked" if asked else reason.words
    if record.segment + 1 >= continuation.most:
        return replace(
            failed,
            goes_on=goes_on,
            why=f"The job was to go on once more ({'it asked' if asked else why}), but this was"
            f" {record.part}",
            advice="Start again, if need be with a larger mantik_continue: it goes on from its"
            f" checkpoint. To begin anew, type: snakemake --forcerun {record.rule}",
        )
    say = f"{record.part} has ended ({'it asked to go on' if asked else why})"
    say = one_line(f"{record.name}: {say}; it goes on from there.")
    return Verdict(End.GOES_ON, reason, why, goes_on=goes_on, say=say)


def find_lost_checkpoint(
    record: AttemptRecord, marker: Marker, continuation: Continuation | None
) -> list[str]:
    """Return the files of its checkpoint that a segment did not find."""
    if continuation is None or not record.follows:
        return []
    return [path for path in marker.missing_inputs if overlaps(path, continuation.paths)]


def overlaps(path: str, others: Iterable[str]) -> bool:
    """Check whether a path is one of some others, above one or below one."""
    return any(is_at(path, other) or is_at(other, path) for other in others)


# Adoption


def choose_attempts(
    request: JobRequest,
    fingerprint_for: Callable[[AttemptRecord], str],
    attempts: Sequence[AttemptRecord],
    *,
    given_up: Container[str] = (),
    already: bool = False,
) -> tuple[AttemptRecord | None, tuple[AttemptRecord, ...]]:
    """Choose the attempt to adopt: the newest that fits of a job's `attempts`, oldest first.

    Return it, and the attempts that must be over for certain before another one starts: they write
    to the same files, or have written unwanted results.

    An attempt fits if it would give the same result: it has the same command, parameters, inputs,
    site and environment. An attempt that was only planned was never submitted and can be used as it
    is. An attempt that has failed is not adopted, nor one that has ended if the user forced the
    job. An attempt that is to go on after another open one is no choice; it stays if that one is
    adopted. Nor is one after an attempt that was `given_up`: a run has died before it gave that one
    up, too. `fingerprint_for` returns the job's present fingerprint, in the terms in which that of
    an attempt names its inputs.

    With `already` the local updated outputs are as the job at the site left them: a run that
    fetched them was killed before it could record that.
    """

    def fits(record: AttemptRecord) -> bool:
        if record.site != request.site:
            return False
        if record.state is AttemptState.ENDED and (request.forced or record.outcome != "succeeded"):
            return False
        now = fingerprint_for(record)
        same = already and record.fingerprint.partition("+")[0] == now.partition("+")[0]
        return same or record.fingerprint == now

    ids = {record.id for record in attempts}
    heads = [r for r in attempts if r.follows not in ids and r.follows not in given_up]
    adopted = next(filter(fits, reversed(heads)), None)
    kept = {adopted.id} if adopted is not None else set()
    for record in attempts:  # the oldest first
        if record.follows in kept:
            kept.add(record.id)
    return adopted, tuple(record for record in attempts if record.id not in kept)
