"""Environment variables that jobs get from this machine: what a workflow asks for, and no more.

`envvars:` names some. A Snakefile may as well set some (`os.environ["BLIS_ARCH"] = "zen3"`); a
local job inherits these, and so does one at a site. Which ones is read from the code: by itself the
environment does not tell them from those of the user's shell and of imported libraries.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from snakemake_executor_plugin_mantik.rules.request import THREAD_VARIABLES
from snakemake_executor_plugin_mantik.tracking.masking import is_secret

_SET = re.compile(
    r"""^[^\S\n]*(?:os\.)?environ(?:\[|\.setdefault\()\s*(['"])(?P<name>[A-Za-z_]\w*)\1\s*"""
    r"""(?:\]\s*\+?=(?!=)|,)""",
    re.MULTILINE,
)
"""A line that sets a variable."""

_OF_THE_MACHINE = re.compile(
    r"PATH|\w+_PATH|PYTHONPATH|PYTHONHOME|HOME|TMPDIR|TMP|TEMP|SHELL|USER|LOGNAME|PWD|CONDA_PREFIX"
)
"""Variables that say where things are, which is somewhere else at a site."""

_OF_CONTROLLERS = ("SNAKEMAKE_", "MANTIK_", "MLFLOW_")
"""Beginnings of variables that are for this process."""


def workflow_variables(workflow: Any, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process that jobs get, by name.

    Args:
        workflow: Snakemake's. Its own list of variables has the credentials of storages as well,
            which are for this machine alone.
        environ: of this process.
    """
    names = {name for name in _set_by(workflow) if name in environ and _means_the_same(name)}
    return {name: environ[name] for name in sorted(names | set(workflow.envvars))}


def _set_by(workflow: Any) -> Iterator[str]:
    """The variables that the Snakefiles set."""
    for source in workflow.included:
        with workflow.sourcecache.open(source) as file:
            for found in _SET.finditer(file.read()):
                yield found["name"]


def _means_the_same(name: str) -> bool:
    """Whether a variable means the same at a site, and may go there unasked."""
    return not (
        _OF_THE_MACHINE.fullmatch(name)
        or name.startswith(_OF_CONTROLLERS)
        or name in THREAD_VARIABLES
        or is_secret(name)
    )
