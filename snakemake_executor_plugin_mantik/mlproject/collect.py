"""For a run whose outputs nobody names: what it makes or changes in its project's folder."""

import shlex
from collections.abc import Mapping
from typing import Any, Final

from snakemake_executor_plugin_mantik.mlproject.bound_entry_point import ParamsFunction
from snakemake_executor_plugin_mantik.mlproject.values import path_in_folder

_TICK_S: Final = 1
"""Seconds between the mark and the start: parallel file systems keep whole seconds of a change."""

_SCRIPT: Final = """\
mkdir -p {out}
touch {out}/.started
sleep {tick}
(
{command}
)
(
cd {folder}
find . -name '.?*' -prune -o -name __pycache__ -prune -o {own} \
-type f -newer {from_folder}/.started -print0 | tar --null -T - -cf - \
| tar -xf - -C {from_folder}
)
rm {out}/.started
"""


def collect_outputs(params: Mapping[str, Any], out: str) -> dict[str, Any]:
    """Parameters of an entry point that also gather what it makes.

    Args:
        params: what `Project.entry_point` returned.
        out: a directory, the rule's output: copies of all files that are new or changed in the
            project's folder after the entry point has run, under the same relative paths. Hidden
            files and Python's caches are left out.
    """
    before: ParamsFunction = params["command"]
    given = before.given
    if given is None:
        raise TypeError("these are no parameters of an entry point")
    project = given.project

    def command(wildcards: Any, **things: Any) -> str:
        from_folder = path_in_folder(str(project.folder), out)
        inside = not from_folder.startswith("../")
        own = f"-path {shlex.quote(f'./{from_folder}')} -prune -o" if inside else ""
        return _SCRIPT.format(
            out=shlex.quote(out),
            tick=_TICK_S,
            command=before(wildcards, **things),
            folder=shlex.quote(f"./{project.relative_folder()}"),
            own=own,
            from_folder=shlex.quote(from_folder),
        )

    return {**params, "command": ParamsFunction(command, given.asks, given)}
