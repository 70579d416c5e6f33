"""Compare attempts of earlier runs with a request, and explain what changed."""

import json
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..jobs.paths import display_path, is_at, nearest
from ..journal import TIMESTAMP, AttemptRecord, AttemptState
from ..staging.local import LocalFile
from .request import UPDATED, JobRequest


def name_by_makers(
    inputs: Mapping[str, str], makers: Mapping[str, str], made: Callable[[str], Mapping[str, str]]
) -> dict[str, str]:
    """Return the inputs in the terms of an attempt that was submitted before some of them existed.

    Such an input is named by the attempt that was to make it, if that attempt has made what lies
    there now.

    Args:
        inputs: checksums of the inputs, by path.
        makers: ids of the attempts that were to make inputs, files or directories, by path.
        made: returns the checksums of the files that an attempt has made, by path.
    """
    named = dict(inputs)
    for path, maker in makers.items():
        here, there = _contents_at(inputs, path), _contents_at(made(maker), path)
        if here == there:
            named = {p: sha for p, sha in named.items() if not is_at(p, path)}
            named[path] = name_of_maker(maker)
    return named


def name_of_maker(attempt_id: str) -> str:
    """Return what a fingerprint has for the checksum of an input that an attempt is to make."""
    return f"attempt {attempt_id}"


def _contents_at(files: Mapping[str, str], path: str) -> dict[str, str]:
    """Return those of `files` that are `path` or below it, without directories.

    Snakemake adds a file with the time to each directory that a job has made.
    """
    return {
        p: sha
        for p, sha in files.items()
        if sha and is_at(p, path) and posixpath.basename(p) != TIMESTAMP
    }


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
"""Names of the parts of `JobRequest.made_of` in messages; files go by their paths."""
_RESOURCES = {
    "runtime_s": "walltime in s",
    "memory_mib_per_node": "memory per node in MiB",
    "memory_mib_per_cpu": "memory per CPU in MiB",
}
"""Fields of `jobs.spec.Resources` that have other names in messages."""
_WORD = re.compile(r"[^\s'\"`=:;|&<>(){}$,]+")
_MOST_TOLD = 5
_MOST_NOTED = 1000
"""Most outputs of an attempt that its basis names."""


def encode_basis(
    made_of: Mapping[str, str],
    resources: Mapping[str, str],
    project_files: str,
    makes: Sequence[str] = (),
) -> str:
    """Encode the basis of an attempt for the journal, so that a later run can report what changed.

    Args:
        made_of: the parts of its fingerprint.
        resources: the requested resources; a change of these does not make another job.
        project_files: digest of all uploaded files of the working directory that no rule names.
        makes: paths of its outputs and log files, by which users name it; the first ones count.
    """
    facts = {"made_of": made_of, "resources": resources, "project_files": project_files}
    return json.dumps(facts | {"makes": makes[:_MOST_NOTED]})


def named_paths(basis: Mapping[str, Any]) -> list[str]:
    """Return the inputs, code and outputs that the basis of an attempt names one by one."""
    read = (name.partition(" ")[2] for name in basis.get("made_of", ()))
    return [*filter(None, read), *basis.get("makes", ())]


def why_unwanted(request: JobRequest, record: AttemptRecord, made_of: Mapping[str, str]) -> str:
    """Return the message about an attempt that is not adopted but given up.

    Empty if the attempt was never submitted, or if the user knows already.
    """
    if record.left_behind:
        why = "since it was left there when the workflow used another site"
    elif record.state is AttemptState.PLANNED or record.outcome not in ("", "succeeded"):
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


def ended_since_message(record: AttemptRecord, why: str) -> str:
    """Return the message about an open attempt of an earlier run that is given up."""
    return (
        f"{record.name}: the job that an earlier run submitted to {record.site} is ended and its"
        f" outputs are not used, {why}."
    )


def kept_message(record: AttemptRecord, resources: Mapping[str, str]) -> str:
    """Return the message about an adopted attempt that requested other resources, else empty."""
    before = record.basis.get("resources", resources)
    names = [n for n in {**before, **resources} if before.get(n) != resources.get(n)]
    if record.state is AttemptState.PLANNED or not names:
        return ""
    others = ", ".join(
        f"{_RESOURCES.get(n, n.replace('_', ' '))} {before.get(n, 'none')} instead of"
        f" {resources.get(n, 'none')}"
        for n in names
    )
    return (
        f"{record.name}: it keeps the resources that it was submitted with ({others}). To submit it"
        f" with the new ones, end this run and type: smk-mantik cancel {record.id}"
    )


def stale_message(
    record: AttemptRecord, project_files: str, files: Iterable[LocalFile] = ()
) -> str:
    """Return the message about an adopted attempt whose project files have changed, else empty.

    `project_files` is the digest of the `files` that are the project files now.
    """
    if (
        record.state is AttemptState.PLANNED
        or record.basis.get("project_files", project_files) == project_files
    ):
        return ""
    since = record.created * 1e9
    new = sorted(display_path(f.path) for f in files if f.key is not None and f.key[3] > since)
    return (
        "files of the working directory changed since an earlier run submitted jobs"
        f"{f' ({_some(new)})' if new else ''}. Jobs whose commands name these files run again. If"
        " other jobs that are reattached use the files, end this run and type: smk-mantik cancel"
        " JOB"
    )


def _changes(record: AttemptRecord, made_of: Mapping[str, str]) -> str:
    """List the parts that have changed since an attempt was submitted; empty if none has."""
    before = record.basis.get("made_of")
    if before is None:
        return "the executor's version"
    names = [n for n in {**before, **made_of} if before.get(n) != made_of.get(n)]
    return _some(_CHANGES.get(name) or display_path(name.partition(" ")[2]) for name in names)


def _some(parts: Iterable[str]) -> str:
    named = list(parts)
    return ", ".join([*named[:_MOST_TOLD], *(["…"] if len(named) > _MOST_TOLD else [])])


def named_checksums(text: str, project_files: Mapping[str, str]) -> dict[str, str]:
    """Return those of `project_files` that a command names by path, directory or Python module.

    They are code of the job as much as the command is.
    """
    words = {posixpath.normpath(word) for word in _WORD.findall(text)}
    modules = {word.replace(".", "/") for word in words}
    wanted = words | {f"{m}.py" for m in modules} | modules
    wanted -= {".", "/"}
    return {
        path: found for path, found in project_files.items() if nearest(path, wanted) is not None
    }
