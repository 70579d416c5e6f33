"""Read the resources of a rule that let its jobs go on past their walltime, in segments."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..common.errors import UserError
from ..common.humanize import humanize_duration
from .reasons import Reason
from .resources import refuse_resource

CONTINUE: Final = "mantik_continue"
CHECKPOINT_PATHS: Final = "mantik_checkpoint"
WARN: Final = "mantik_warn"
CONTINUE_ON: Final = "mantik_continue_on"
SEGMENT_RESOURCES: Final = (CONTINUE, CHECKPOINT_PATHS, WARN, CONTINUE_ON)

GO_ON_CODE: Final = 85
"""The exit code by which a command asks to go on in a next segment."""

START_MARK: Final = ".mantik-started"
"""The name of a file that the first segment makes in its checkpoint: kept, but no progress."""

_REASONS: Final[Mapping[str, Reason]] = {
    "time_limit": Reason.TIME_LIMIT,
    "preempted": Reason.PREEMPTED,
    "node_failure": Reason.NODE_FAILURE,
    "node_fail": Reason.NODE_FAILURE,  # as Slurm writes it
}
_DURATION: Final = re.compile(r"\s*([0-9]{1,6})\s*([smh])\s*")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600}
_DEFAULT_ON: Final = frozenset({Reason.TIME_LIMIT})
_WARN_S: Final = 120.0
"""The default of `mantik_warn`; with short walltimes a tenth of these."""


@dataclass(frozen=True)
class Continuation:
    """How a job goes on past its walltime.

    Attributes:
        most: how many segments it may have.
        checkpoint: what the next segment goes on from, relative to the workspace (`Segment`).
        on: the ends after which it goes on.
        warn_s: seconds before the walltime ends at which it is warned; None for the default.
    """

    most: int
    checkpoint: tuple[str, ...]
    on: frozenset[Reason] = _DEFAULT_ON
    warn_s: int | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the checkpoint, without the slash that marks a directory."""
        return tuple(path.rstrip("/") for path in self.checkpoint)

    def warning_s(self, runtime_s: int) -> float:
        """Return the seconds before the end of a walltime at which the job is warned."""
        return min(_WARN_S, runtime_s / 10) if self.warn_s is None else self.warn_s

    def check_walltime(self, runtime_s: int | None) -> int:
        """Return a job's walltime in seconds, which has to be longer than its warning.

        Raises:
            UserError: it does not.
        """
        if runtime_s is None:
            raise UserError(
                f"the resource {CONTINUE}={self.most} needs a walltime, and there is none",
                do="Add runtime=MINUTES to the rule or --default-resources, or Resources: Runtime"
                " to the backend config",
            )
        if self.warn_s is not None and 2 * self.warn_s > runtime_s:
            raise UserError(
                f"the resource {WARN}={humanize_duration(self.warn_s)!r} leaves less than half of"
                f" the walltime of {humanize_duration(runtime_s)}",
                do=f"Set {WARN} to a shorter time, or request more",
            )
        return runtime_s


def parse_continuation(
    rule: Mapping[str, object], updated: Sequence[str], default: int = 0
) -> Continuation | None:
    """Return how a job goes on past its walltime; None if it does not.

    Args:
        rule: the rule's resources, of which only `SEGMENT_RESOURCES` are read.
        updated: the paths of its `update()` outputs, which are its checkpoint unless it names one.
        default: how many segments a rule with a checkpoint may have, unless it says so itself.

    Raises:
        UserError: a value is invalid, or there is no checkpoint.
    """
    most = rule.get(CONTINUE)
    if most is None and default and (updated or rule.get(CHECKPOINT_PATHS) is not None):
        most = default
    if most is None or most == 0:
        for name in SEGMENT_RESOURCES[1:]:
            if most is None and rule.get(name) is not None:
                raise refuse_resource(
                    name, rule[name], f"needs {CONTINUE}", f"Add {CONTINUE}=SEGMENTS"
                )
        return None
    if isinstance(most, str) and most.strip().isdecimal():
        most = int(most)
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise refuse_resource(
            CONTINUE, most, "has to be a number of segments", "Use a whole number, 0 for none"
        )
    checkpoint = _paths(rule.get(CHECKPOINT_PATHS)) or tuple(updated)
    if not checkpoint:
        raise refuse_resource(
            CONTINUE, most, "needs a checkpoint to go on from",
            f"Name the files or directories that the job saves its state in with"
            f' {CHECKPOINT_PATHS}="DIRECTORY/", or flag an output with update()',
        )  # fmt: skip
    warn = rule.get(WARN)
    warn_s = parse_time(WARN, warn) if warn is not None else None
    return Continuation(most, checkpoint, _on(rule.get(CONTINUE_ON)), warn_s)


def _paths(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    paths = value.split() if isinstance(value, str) else ()
    wrong = [p for p in paths if p.startswith(("/", "~", "$", ".mantik")) or ".." in p.split("/")]
    if wrong or not paths or any(not path.strip("./") for path in paths):
        raise refuse_resource(
            CHECKPOINT_PATHS, value,
            "has to name files or directories below the working directory",
            "Write paths relative to it, separated by blanks",
        )  # fmt: skip
    return tuple(path.removeprefix("./") for path in paths)


def _on(value: object) -> frozenset[Reason]:
    if value is None:
        return _DEFAULT_ON
    names = value.replace(",", " ").split() if isinstance(value, str) else []
    if not names or any(name not in _REASONS for name in names):
        raise refuse_resource(
            CONTINUE_ON, value, "has to name ends after which the job goes on",
            f"Use one or more of {', '.join(list(_REASONS)[:3])}",
        )  # fmt: skip
    return frozenset(_REASONS[name] for name in names)


def parse_time(name: str, value: object) -> int:
    """Return the seconds in a value of the resource `name`, such as `5m`.

    Raises:
        UserError: it is no time.
    """
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or not int(match[1]):
        advice = "Write a whole number with one of s, m, h, such as '5m'"
        raise refuse_resource(name, value, "has to be a time", advice)
    return int(match[1]) * _UNITS[match[2]]
