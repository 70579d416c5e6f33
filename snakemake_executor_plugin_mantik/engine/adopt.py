"""Coming back: which try of an earlier run is the one that is asked for now, and what changed."""

import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snakemake_executor_plugin_mantik.engine.request import UPDATED, JobRequest
from snakemake_executor_plugin_mantik.jobs.paths import display_path
from snakemake_executor_plugin_mantik.journal import TryRecord, TryState


@dataclass(frozen=True)
class TakeoverChoice:
    """What to do with the open tries of a job.

    Attributes:
        adopted: go on with this one instead of submitting.
        unwanted: these must be known to be over before another try starts: they write to the same
            files, or have written what is not wanted.
    """

    adopted: TryRecord | None
    unwanted: tuple[TryRecord, ...]


def choose_tries(
    request: JobRequest,
    fingerprint: str,
    tries: Sequence[TryRecord],
    *,
    already: bool = False,
) -> TakeoverChoice:
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
        same = record.site == request.site and (
            record.fingerprint == fingerprint
            or (already and _but_updated(record.fingerprint) == _but_updated(fingerprint))
        )
        if adopted is None and same and not ended_unwanted and not failed:
            adopted = record
    return TakeoverChoice(adopted, tuple(record for record in tries if record is not adopted))


def _but_updated(fingerprint: str) -> str:
    """A fingerprint without what the job changes itself."""
    return fingerprint.partition("+")[0]


_CHANGES = {
    "command": "its command",
    "parameters": "its parameters",
    "site": "its site",
    "environment": "the environment in the backend config",
    "variables": "its environment variables",
    "outputs": "what it makes",
    "inputs": "its inputs",
    UPDATED: "what it is to update",
    "code": "files that its command names",
}
"""The parts of `JobRequest.made_of` for people; files have their own names."""
_RESOURCES = {
    "runtime_s": "walltime in s",
    "memory_mib_per_node": "memory per node in MiB",
    "memory_mib_per_cpu": "memory per CPU in MiB",
}
"""Fields of `jobs.spec.Resources` that people call otherwise."""
_WORD = re.compile(r"[^\s'\"`=:;|&<>(){}$,]+")
_MOST_TOLD = 5


def encode_basis(made_of: Mapping[str, str], resources: Mapping[str, str], sources: str) -> str:
    """What the journal keeps of a try, to tell later what changed since.

    Args:
        made_of: what its fingerprint is of.
        resources: what the scheduler is asked for; a change of that makes no other job.
        sources: digest of all files of the working directory that went up without being named.
    """
    return json.dumps({"made_of": made_of, "resources": resources, "sources": sources})


def why_unwanted(request: JobRequest, record: TryRecord, made_of: Mapping[str, str]) -> str:
    """What to tell of an open try that is not taken up; empty if the user knows already."""
    if record.left_behind:
        why = "since it was left there when the workflow used another site"
    elif record.state is TryState.PLANNED or record.outcome not in ("", "succeeded"):
        return ""
    elif record.job != request.job:
        why = "since jobs are grouped in another way now"
    elif changed := _changes(record, made_of):
        why = f"since these changed: {changed}"
    elif request.forced:
        why = "as it is forced"
    else:
        return ""
    return ended_since_message(record, why)


def ended_since_message(record: TryRecord, why: str) -> str:
    """What to tell of an open try of an earlier run that is given up."""
    return (
        f"{record.name}: what an earlier run sent to {record.site} is ended and its outputs are not"
        f" used, {why}."
    )


def kept_message(record: TryRecord, resources: Mapping[str, str]) -> str:
    """What to tell of a try that is taken up although it asks for other resources, else empty."""
    before = _noted(record).get("resources", resources)
    names = [n for n in {**before, **resources} if before.get(n) != resources.get(n)]
    if record.state is TryState.PLANNED or not names:
        return ""
    others = ", ".join(
        f"{_RESOURCES.get(n, n.replace('_', ' '))} {before.get(n, 'none')} instead of"
        f" {resources.get(n, 'none')}"
        for n in names
    )
    return (
        f"{record.name}: it keeps the resources that it was sent with ({others}). To send it with"
        f" the new ones end this run and type: smk-mantik cancel {record.id}"
    )


def stale_message(record: TryRecord, sources: str) -> str:
    """What to tell of a try that was sent when files of the working directory were others."""
    if record.state is TryState.PLANNED or _noted(record).get("sources", sources) == sources:
        return ""
    return (
        "files of the working directory changed since jobs of an earlier run were sent. Jobs whose"
        " commands name these run anew; if others that are taken up use them, end this run and"
        " type: smk-mantik cancel JOB"
    )


def _changes(record: TryRecord, made_of: Mapping[str, str]) -> str:
    """What is another than when a try was sent; empty if nothing is."""
    before = _noted(record).get("made_of")
    if before is None:
        return "the executor's version"
    names = [n for n in {**before, **made_of} if before.get(n) != made_of.get(n)]
    told = [_CHANGES.get(name) or display_path(name.partition(" ")[2]) for name in names]
    more = ["…"] if len(told) > _MOST_TOLD else []
    return ", ".join([*told[:_MOST_TOLD], *more])


def _noted(record: TryRecord) -> dict[str, Any]:
    try:
        noted = json.loads(record.made_of)
    except ValueError:
        return {}
    return noted if isinstance(noted, dict) else {}


def named_checksums(text: str, sources: Mapping[str, str]) -> dict[str, str]:
    """Those of `sources` that a command names: a file, a directory that it is in, a Python module.

    They are code of the job as much as the command is.
    """
    words = {posixpath.normpath(word) for word in _WORD.findall(text)}
    modules = {word.replace(".", "/") for word in words}
    wanted = words | {f"{m}.py" for m in modules} | modules
    wanted -= {".", "/"}
    return {
        path: found
        for path, found in sources.items()
        if path in wanted or any(parent in wanted for parent in _parents(path))
    }


def _parents(path: str) -> Iterator[str]:
    while path := posixpath.dirname(path):
        yield path
