"""Pass environment variables of this machine to jobs: those that a workflow requests, no others.

`envvars:` names variables. A Snakefile may also set variables (`os.environ["BLIS_ARCH"] = "zen3"`).
Local jobs inherit these, and so do jobs at a site. Their names are read from the Snakefiles' code,
because the environment does not distinguish them from variables of the user's shell and of
imported libraries.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from snakemake_executor_plugin_mantik.common.secret_names import is_secret

from ..make_request import THREAD_VARIABLES

_SET = re.compile(
    r"""^[^\S\n]*(?:os\.)?environ(?:\[|\.setdefault\()\s*(['"])(?P<name>[A-Za-z_]\w*)\1\s*"""
    r"""(?:\]\s*\+?=(?!=)|,)""",
    re.MULTILINE,
)
"""Pattern of a line that sets a variable."""

_OF_THE_MACHINE = re.compile(
    r"PATH|\w+_PATH|PYTHONPATH|PYTHONHOME|HOME|TMPDIR|TMP|TEMP|SHELL|USER|LOGNAME|PWD|CONDA_PREFIX"
)
"""Variables with paths and names that are different at a site."""

_OF_CONTROLLERS = ("SNAKEMAKE_", "MANTIK_", "MLFLOW_")
"""Prefixes of variables that are meant for this process."""


def workflow_variables(workflow: Any, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process's environment that the workflow passes to jobs.

    Snakemake's own list of variables also has the credentials of storages. These stay on this
    machine unless jobs use the storage themselves (`rules/paths/storage.py`).
    """
    names = {name for name in _set_by(workflow) if name in environ and _means_the_same(name)}
    return {name: environ[name] for name in sorted(names | set(workflow.envvars))}


def _set_by(workflow: Any) -> Iterator[str]:
    """Yield the names of the variables that the Snakefiles set."""
    for source in workflow.included:
        with workflow.sourcecache.open(source) as file:
            for found in _SET.finditer(file.read()):
                yield found["name"]


def _means_the_same(name: str) -> bool:
    """Return whether a variable means the same at a site, and may be passed without `envvars:`."""
    return not (
        _OF_THE_MACHINE.fullmatch(name)
        or name.startswith(_OF_CONTROLLERS)
        or name in THREAD_VARIABLES
        or is_secret(name)
    )
