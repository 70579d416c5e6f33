"""The call of an MLproject's entry point by a job, for the executor and for tracking."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

PARAMETER: Final = "call"
"""The name of the call in a rule's `params`."""


@dataclass(frozen=True)
class Call:
    """A call of an entry point.

    Attributes:
        project: the project's folder, relative to the workflow's working directory.
        name: the project's name from its MLproject file, else the folder's.
        entry_point: the entry point's name, or the path of a script in the project.
        definition: a hash of the entry point and of the project's sources.
        arguments: the values of all parameters, defaults included, not quoted for a shell. Relative
            paths start at the workflow's working directory, those in defaults at the project's
            folder.
    """

    project: PurePosixPath
    name: str
    entry_point: str
    definition: str
    arguments: Mapping[str, str]


def read_call(params: Any) -> Call | None:
    """Return the call in a job's evaluated parameters, `job.params` or a mapping; None for none."""
    found = (
        params.get(PARAMETER) if isinstance(params, Mapping) else getattr(params, PARAMETER, None)
    )
    return found if isinstance(found, Call) else None
