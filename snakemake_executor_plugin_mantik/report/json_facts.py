"""The numbers of a report as a value for JSON."""

from dataclasses import asdict
from typing import Any

from .facts import ReportFacts


def facts_as_json(facts: ReportFacts) -> dict[str, Any]:
    """Return the numbers of a report; times are seconds, and seconds since the epoch."""
    run = facts.run
    return {
        "title": facts.title,
        "made": facts.now,
        "going_on": facts.going_on,
        "run": {"began": run.began, "ended": run.ended, "ending": run.ending, **run.about}
        if run is not None
        else None,
        "jobs": {state.value: number for state, number in facts.states.items()},
        "failed": facts.failed,
        "repeated": facts.repeats,
        "rules": [
            asdict(usage) | {"states": {state.value: n for state, n in usage.states.items()}}
            for usage in facts.rules
        ],
    }
