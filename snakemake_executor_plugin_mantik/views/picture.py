"""What pictures of a workflow show, as values and as text: its jobs, their times, their edges."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any, Final

import jinja2
from markupsafe import Markup

from ..common.errors import one_line, printable
from ..common.humanize import humanize_count, humanize_duration, humanize_size


class NodeState(StrEnum):
    """The state of a job, in the words and the order of pictures.

    SKIPPED: it did not run before Snakemake ended. ORPHANED: it may run unobserved.
    """

    SUCCEEDED = "succeeded"
    RUNNING = "running"
    QUEUED = "queued"
    WAITING = "waiting"
    SKIPPED = "skipped"
    FAILED = "failed"
    CANCELLED = "cancelled"
    ORPHANED = "orphaned"


GLYPHS: Final = dict(zip(NodeState, "✓▶…○–✗■?", strict=True))
"""A symbol for each state besides its colour."""


@dataclass(frozen=True)
class Node:
    """A job, or an attempt of it among the `earlier` ones of a `Picture`.

    Attributes:
        id: its name in edges; unique among the nodes.
        name: usually the rule with its wildcards.
        site: empty: this machine, or none yet.
        queued, started, ended, prepared, fetched, submitted: seconds since the epoch, if known:
            when only the queue kept it, not other jobs any more; when it began; ended; was taken
            up, to be uploaded; when its results were here; and when it was submitted.
        note: a line about how it ended (exit code, reason), shown in the tooltip.
        jobs: of an attempt: the identities of its job, or of the members of its group, as the
            pipeline has them.
    """

    id: str
    name: str
    rule: str
    state: NodeState
    wildcards: Mapping[str, str] = field(default_factory=dict)
    site: str = ""
    queued: float | None = None
    started: float | None = None
    ended: float | None = None
    note: str = ""
    prepared: float | None = None
    fetched: float | None = None
    submitted: float | None = None
    jobs: tuple[str, ...] = ()

    @property
    def begin(self) -> float | None:
        """Its first known time."""
        times = (self.prepared, self.submitted, self.queued, self.started, self.ended)
        return next((moment for moment in times if moment is not None), None)

    def end(self, now: float) -> float:
        """Return up to where it is drawn: its end, `now` if it is open, or its last known time."""
        open_ = self.state in (NodeState.QUEUED, NodeState.RUNNING)
        known = (self.ended, now if open_ else None, self.started, self.queued)
        return next((moment for moment in known if moment is not None), now)

    def stages(self, now: float) -> Sequence[tuple[float, float]]:
        """Return from when to when it was staged in, behind other jobs, queued, run, staged out.

        What is unknown, or was not, has no length.
        """
        end = self.end(now)
        found = [(end, end if self.fetched is None else self.fetched)]
        for begin in (self.started, self.queued, self.submitted, self.prepared):
            until = found[0][0]
            found.insert(0, (until if begin is None else begin, until))
        return found

    def behind_s(self, now: float) -> float | None:
        """Return the seconds that it has waited for other jobs; None if it was not submitted."""
        if self.submitted is None:
            return None
        ends = (self.queued, self.ended, now)
        return max(0.0, min(end for end in ends if end is not None) - self.submitted)

    def queued_s(self, now: float) -> float | None:
        """Return the seconds in the queue so far; None if it was not queued."""
        if self.queued is None:
            return None
        ends = (self.started, self.ended, now)
        return max(0.0, next(end for end in ends if end is not None) - self.queued)

    def running_s(self, now: float) -> float | None:
        """Return the running time so far, in seconds; None if it has not started."""
        if self.started is None:
            return None
        return max(0.0, (now if self.ended is None else self.ended) - self.started)

    def title(self, now: float) -> str:
        """Return its tooltip: all known facts, one per line."""
        facts = [one_line(self.name), one_line(f"{self.state} at {self.site}".removesuffix(" at "))]
        if seconds := self.behind_s(now):
            facts.append(f"waited {humanize_duration(seconds)} for other jobs")
        for word, begin, spent, seconds in (
            ("queued", self.queued, "waited", self.queued_s(now)),
            ("started", self.started, "ran", self.running_s(now)),
        ):
            if begin is not None and seconds is not None:
                moment = format_timestamp(begin)
                facts.append(f"{word} {moment}, {spent} {humanize_duration(seconds)}")
        if self.ended is not None:
            facts.append(f"ended {format_timestamp(self.ended)}")
            if (self.fetched or 0.0) > self.ended:
                later = humanize_duration((self.fetched or 0.0) - self.ended)
                facts.append(f"results here {later} later")
        return "\n".join([*facts, one_line(self.note)] if self.note else facts)


@dataclass(frozen=True)
class Picture:
    """A workflow at a moment.

    Attributes:
        title: the workflow's name.
        nodes: its jobs, by the last attempt of each.
        now: the moment, in seconds since the epoch; running jobs are drawn up to it.
        edges: (job, job that needs it) by id; may be left out if there are many.
        rule_edges: (rule, rule that needs it); empty: derived from `edges`.
        earlier: attempts that later ones have replaced; shown in the timeline.
    """

    title: str
    nodes: tuple[Node, ...]
    now: float
    edges: tuple[tuple[str, str], ...] = ()
    rule_edges: tuple[tuple[str, str], ...] = ()
    earlier: tuple[Node, ...] = ()


MAX_LISTED_JOBS: Final = 1000
"""The most jobs that a pipeline lists; of more it holds only the edges between rules."""


def make_picture(
    title: str, pipeline: Any, attempts: Iterable[Node], now: float, *, over: bool
) -> Picture:
    """Make the picture of a workflow with all `attempts` of its submitted jobs, the oldest first.

    `pipeline` is nothing, or what `adapter.workflow_metadata` describes: `jobs`, each with `id`,
    `name`, `rule`, `wildcards`, `needed` (whether it is to run) and `done`; `edges` between them;
    and `rule_edges`. Without `jobs`, the picture shows the submitted ones. `over` is whether no
    Snakemake is to run the jobs that have no attempt.
    """
    known = pipeline or {"jobs": [], "edges": [], "rule_edges": []}
    by_job: dict[str, list[Node]] = {}
    for each in attempts:
        for job in each.jobs:
            by_job.setdefault(job, []).append(each)
    nodes: dict[str, Node] = {}
    for job in known["jobs"]:
        if job["needed"] or job["id"] in by_job:
            named = {key: job[key] for key in ("id", "name", "rule", "wildcards")}
            left = NodeState.SKIPPED if over else NodeState.WAITING
            untried = Node(**named, state=NodeState.SUCCEEDED if job["done"] else left)
            nodes[job["id"]] = replace(by_job.get(job["id"], [untried])[-1], **named)
    for name, of_job in by_job.items():
        nodes.setdefault(name, replace(of_job[-1], id=name))
    return Picture(
        title,
        tuple(nodes.values()),
        now,
        tuple((a, b) for a, b in known["edges"] if a in nodes and b in nodes),
        tuple((a, b) for a, b in known["rule_edges"]),
        tuple(node for of_job in by_job.values() for node in of_job[:-1]),
    )


def shorten_text(text: str, most: int, rule: str = "") -> str:
    """Return a text as one line of `most` narrow characters, without its middle if it is longer.

    Of a job's rule, with which the text begins, nothing is left out if it is shorter. Without any
    room, nothing is left.
    """
    text = one_line(text) if most > 0 else ""
    if column_count(text) <= max(0, most):
        return text
    keep = max(len(rule), most // 2)
    # A name may have a million characters.
    start, end = text[: min(keep, most)], text[max(keep, len(text) - most) :]
    while column_count(start + end) >= most:
        start, end = (start, end[1:]) if end else (start[:-1], "")
    return f"{start}…{end}"


def column_count(text: str) -> int:
    """Return the width of a text in narrow characters."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def format_timestamp(moment: float) -> str:
    """Format a time in UTC, to the second."""
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"


def count_states(states: Iterable[NodeState]) -> Mapping[NodeState, int]:
    """Count each state that occurs, in the order of states."""
    number = Counter(states)
    return {state: number[state] for state in NodeState if number[state]}


def render_template(name: str, **values: Any) -> str:
    """Render a template beside this module; escape values for HTML."""
    return _environment().get_template(name).render(values)


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        autoescape=True,
        # XML and UTF-8 cannot hold some characters.
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"glyphs": GLYPHS, "count": humanize_count, "count_states": count_states}
    made.filters |= {
        "duration": lambda seconds: "–" if seconds is None else humanize_duration(seconds),
        "size": humanize_size, "moment": format_timestamp, "one_line": one_line,
        # A name may break behind `_` only.
        "name": lambda text: Markup("_<wbr/>").join(printable(text).split("_")),
    }  # fmt: skip
    return made
