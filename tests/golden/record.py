"""Record what small workflows leave in the journal and ask of their sites.

Only what no machine's speed can change is recorded: of each attempt its steps in order, not how
those of several attempts interleave; of requests how many of each kind, and of kinds that repeat
until something is over only that they occur.
"""

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby

from starlette.requests import Request
from starlette.responses import Response

from hpc_sandbox.server import Sandbox
from hpc_sandbox.site import request_kind
from snakemake_executor_plugin_mantik.jobs.paths import workspace_below
from snakemake_executor_plugin_mantik.journal import Journal
from tests.support.workflows import Project

_STEPS = {
    "attempts": ("id", "rtrim(new.state || ' ' || new.outcome || ' ' || new.reason)"),
    "submissions": ("attempt", "'acknowledged'"),
    "made": ("attempt", "'made ' || new.path"),
    "kept": ("attempt", "'kept ' || new.path"),
}
"""Tables whose rows are steps of attempts: the column with the attempt, and what the step is
called."""

_NAMES = (
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "UUID"),
    (re.compile(r"mantik/(bundles|attempts|work)/[0-9a-f]+\b"), r"mantik/\1/BUCKET"),
    (re.compile(rf"\S*/project-\w+(?:/{workspace_below('')})?"), "WORKSPACE"),
    (re.compile(r"(?<=/place/)\S+"), "LEASE"),
    (re.compile(r"(?<=mantik/lib-)\w+"), "DIGEST"),
    (re.compile(r"(?<=mantik/jobs/)\d+"), "JOB"),
    (re.compile(r"(?<=mantik/files/)\w+"), "DIGEST"),
    (re.compile(r"\(hpc\d, \w+\)"), "(SITE, JOB)"),
)
"""What differs in each run, and what stands for it."""

_RARE = re.compile(r"GET (jobs|compute/jobs)|POST token")
"""Requests that are made only if something takes long, or again after a while."""

_REPEATED = re.compile(r"\S+ (\S+ \S+/place\b|jobs/\S+/abort|compute/jobs/)")
"""Requests whose number depends on how long something takes."""


class RecordingSandbox(Sandbox):
    """A sandbox that notes the requests and the statuses of their answers."""

    wire: list[str]

    async def _site_request(self, request: Request) -> Response:
        response = await super()._site_request(request)
        kind = request_kind(request.method, request.url.path)
        path = request.query_params.get("path") or request.url.path.partition("/files/")[2]
        self.wire.append(" ".join((*kind.split(), *path.split(), str(response.status_code))))
        return response


def watch_steps(project: Project) -> None:
    """Make the journal of a project that did not run yet, and have it note each step."""
    state = project.directory / ".snakemake/mantik"
    Journal(state).close()
    with closing(sqlite3.connect(state / "journal.sqlite")) as db:
        db.execute("CREATE TABLE steps (attempt TEXT, step TEXT)")
        for table, (owner, step) in _STEPS.items():
            for event in ("INSERT", "UPDATE OF state, outcome")[: 1 + (table == "attempts")]:
                db.execute(
                    f"CREATE TRIGGER {table}_{event[:6]} AFTER {event} ON {table} BEGIN"
                    f" INSERT INTO steps VALUES (new.{owner}, {step}); END"
                )
        db.commit()


def history(project: Project) -> Iterator[str]:
    """Yield each attempt's steps, and what the journal knows of files in the end."""
    with closing(sqlite3.connect(project.directory / ".snakemake/mantik/journal.sqlite")) as db:
        attempts = db.execute(
            "SELECT id, name, after FROM attempts ORDER BY name, rowid"
        ).fetchall()
        names: dict[str, str] = {}
        for name, same in groupby(attempts, key=lambda row: row[1]):
            names |= {row[0]: f"{name} #{n}" for n, row in enumerate(same, start=1)}
        for one, _, after in attempts:
            before = {names[other] for other in json.loads(after or "{}").values()}
            yield " after ".join((names[one], *sorted(before)))
            steps = db.execute("SELECT step FROM steps WHERE attempt = ? ORDER BY rowid", (one,))
            for step, _ in groupby(row[0] for row in steps):
                yield f"  {_normalised(step)}"
        for path, directory in db.execute("SELECT path, directory FROM stored ORDER BY path"):
            yield f"stored {path}{'/' * directory}"
        for (path,) in db.execute("SELECT path FROM remote_files ORDER BY path"):
            yield f"there {_normalised(path)}"
        for state, number in db.execute("SELECT state, count(*) FROM bundles GROUP BY state"):
            yield f"bundles {state}: {number}"


def transcript(wire: list[str]) -> Iterator[str]:
    """Yield the kinds of requests that only read, then how often each other one was made."""
    told = [line for line in wire if not _RARE.match(line)]
    yield "GET " + ", ".join(sorted({line.split()[1] for line in told if line.startswith("GET ")}))
    counts = Counter(_normalised(line) for line in told if not line.startswith("GET "))
    for line, number in sorted(counts.items()):
        yield f"{'*' if _REPEATED.match(line) else number} {line}"


def _normalised(text: str) -> str:
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text
