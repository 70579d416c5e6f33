"""Coming back: which try of an earlier run is the one that is asked for now."""

from collections.abc import Sequence
from dataclasses import dataclass

from snakemake_executor_plugin_mantik.engine.request import Fingerprint, JobRequest
from snakemake_executor_plugin_mantik.journal import TryRecord, TryState


@dataclass(frozen=True)
class Choice:
    """What to do with the open tries of a job.

    Attributes:
        adopted: go on with this one instead of submitting.
        unwanted: these must be known to be over before another try starts: they write to the same
            files, or have written what is not wanted.
    """

    adopted: TryRecord | None
    unwanted: tuple[TryRecord, ...]


def choose(
    request: JobRequest,
    fingerprint: Fingerprint,
    tries: Sequence[TryRecord],
    *,
    already: bool = False,
) -> Choice:
    """Choose among a job's open tries, the oldest first.

    A try is adopted if it would give the same result: same command, parameters, inputs, site and
    environment. What was only planned has never been sent and is just the same try again. A try
    that has ended is not taken for a job that the user forced.

    With `already` its updated outputs are here as the job at the site left them: a run that fetched
    them was killed before it could say so.
    """
    adopted = None
    for record in reversed(tries):
        ended_unwanted = request.forced and record.state is TryState.ENDED
        failed = record.state is TryState.ENDED and record.outcome != "succeeded"
        same = record.site == request.site and fingerprint.is_of(
            record.fingerprint, already=already
        )
        if adopted is None and same and not ended_unwanted and not failed:
            adopted = record
    return Choice(adopted, tuple(record for record in tries if record is not adopted))
