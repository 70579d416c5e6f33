"""Find the jobs that a user means by a rule, wildcards, or an id."""

from collections.abc import Sequence
from pathlib import Path

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.journal import TryRecord, read_history
from snakemake_executor_plugin_mantik.watching.overview import present_tries

_SHORTEST_ID = 8
"""Minimum number of characters of a try's id to name it."""

_MOST_NAMED = 20
"""Most jobs that a message lists."""


def is_meant(text: str, record: TryRecord) -> bool:
    """Return whether a text names a try.

    It does by the job's name, its rule, its rule and some of its wildcards (`train sample=a`), an
    id at the site, or at least eight characters of the try's own id.
    """
    ids = {part for job in record.site_jobs for part in (job, job.rstrip("/").rsplit("/", 1)[-1])}
    short = len(text) >= _SHORTEST_ID and record.id.startswith(text)
    return short or text in {record.name, record.rule, *ids} or _has_wildcards(text, record)


def _has_wildcards(text: str, record: TryRecord) -> bool:
    rule, *given = text.replace(",", " ").split() or [""]
    known = record.name.removeprefix(record.rule).replace(",", " ").split()
    return rule == record.rule and bool(given) and set(given) <= set(known)


def find_try(directory: Path, text: str) -> TryRecord:
    """Return the last try of the one job that a text names; `directory` is the state directory.

    A name of a member of a group means the group.

    Raises:
        UserError: it names no job, or several, which are listed.
        JournalError: there is no journal, or it cannot be read.
    """
    records = read_history(directory)
    found = [r for r in records if r.id.startswith(text)] if len(text) >= _SHORTEST_ID else []
    found = found[:1] or [r for r in present_tries(records) if is_meant(text, r)]
    # A job may have the name of a rule whose other jobs have wildcards.
    exact = [record for record in found if text == record.name]
    found = exact or found or read_history(directory, text)[-1:]
    names = dict.fromkeys(record.name for record in found)
    if len(names) == 1:
        return found[-1]
    if not names:
        known = _listed(list(dict.fromkeys(record.name for record in records)))
        raise UserError(
            f"no job is named {text!r}; these were submitted:{known or ' none'}",
            do="Use a name, a rule or an id that smk-mantik jobs shows",
        )
    raise UserError(
        f"{text!r} names {len(names)} jobs:{_listed(list(names))}",
        do="Name one of them, with its wildcards or its id at the site",
    )


def _listed(names: Sequence[str]) -> str:
    shown = "".join(f"\n  {name}" for name in names[:_MOST_NAMED])
    left = len(names) - _MOST_NAMED
    return f"{shown}\n  and {left} more" if left > 0 else shown
