"""One call of an MLproject's entry point by a job, as the executor and the tracking see it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

PARAMETER: Final = "call"
"""The name under which a rule's `params` hold the call."""


@dataclass(frozen=True)
class Call:
    """What a job runs of which project.

    Attributes:
        project: the project's folder, relative to the workflow's working directory.
        name: the project's name: as its MLproject file says, else the folder's.
        entry_point: the entry point's name, or the path of a script in the project.
        definition: a hash of the entry point and of the project's sources.
        arguments: the value of every parameter, defaults included, raw: not quoted for a shell,
            and paths as the workflow has them (relative to its working directory).
    """

    project: PurePosixPath
    name: str
    entry_point: str
    definition: str
    arguments: Mapping[str, str]


def read_call(params: Any) -> Call | None:
    """The call that a job makes, if it runs an entry point.

    Args:
        params: the job's evaluated parameters (`job.params`), or a mapping of them.
    """
    found = (
        params.get(PARAMETER) if isinstance(params, Mapping) else getattr(params, PARAMETER, None)
    )
    return found if isinstance(found, Call) else None
