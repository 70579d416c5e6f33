"""Collect the files that a run without named outputs makes or changes in its project's folder."""

import posixpath
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from snakemake_executor_plugin_mantik.jobs.segments import START_MARK
from snakemake_executor_plugin_mantik.mlproject.bound_entry_point import ParamsFunction
from snakemake_executor_plugin_mantik.mlproject.values import path_in_folder

_TICK_S: Final = 1
"""Seconds between the time stamp and the start: parallel file systems store times in seconds."""

_SCRIPT: Final = """\
mantik_find() {{ find . -name '.?*' -prune -o -name __pycache__ -prune -o {own} \
'(' -type f -o -type l ')' "$@"; }}
mantik_named() {{ mantik_find ! -path '*
*' "$@" -print | LC_ALL=C sort; }}
[ -e {started} ] || {{
mkdir -p {out}
(cd {folder} && mantik_named) > {started}.new
mv {started}.new {started}
sleep {tick}
}}
(
{command}
)
[ ! -e "${{MANTIK_CONTINUE_FILE-}}" ] || exit 0
(
cd {folder}
{{
mantik_find -cnewer {from_folder}/{mark} -print0
mantik_named ! -cnewer {from_folder}/{mark} |
LC_ALL=C comm -13 {from_folder}/{mark} - | tr '\\n' '\\0'
}} | tar --null -T - -cf - | tar -xf - -C {from_folder}
)
find {out} -type l -exec sh -c '
out=$(cd "$1" && pwd -P) project=$(cd "$2" && pwd -P) given=$1 from=$2
shift 2
for link; do
  origin=$from${{link#"$given"}} target=$(readlink -f "$link") || target=
  case $target in "$out"/*) [ ! -e "$target" ] || continue ;; esac
  [ ! -d "$origin" ] || case $(cd "$origin" && pwd -P)/ in "$project"/?*) ;; *) continue ;; esac
  [ ! -e "$origin" ] || {{ rm "$link" && cp -RpL "$origin" "$link"; }} || exit
done
' sh {out} {folder} {{}} +
rm {started}
"""
"""New is what has another name than all that was there, or a later time of change (ctime).

The time of modification may be old (`tar -x`, `cp -p`), and a file in a directory that was moved
keeps both. A link comes as one if it leads to what comes as well, else as what it leads to. One
that leads to a directory out of the folder stays a link."""


def started_file(out: str) -> str:
    """Return the file in a directory of collected files whose time is that of the start.

    It belongs to the checkpoint of a job with segments: with it the directory stays for the next
    one, and what all of them have made is collected. It is no progress.
    """
    return f"{out}/{START_MARK}"


def collect_outputs(
    params: Mapping[str, Any], out: str, checkpoint: Sequence[str] = ()
) -> dict[str, Any]:
    """Extend an entry point's parameters to collect new and changed files after its run.

    Args:
        params: return value of `Project.entry_point`.
        out: a directory, the rule's output. It gets copies of all files and links that are
            new or changed in the project's folder, with the same relative paths, except hidden
            files and Python's caches.
        checkpoint: files and directories that are not collected.

    Raises:
        TypeError: `params` are not those of an entry point.
    """
    before: ParamsFunction = params["command"]
    given = before.given
    if given is None:
        raise TypeError("these are not the parameters of an entry point")
    project = given.project

    def command(wildcards: Any, **things: Any) -> str:
        from_folder = path_in_folder(str(project.folder), out)
        left = [path_in_folder(str(project.folder), posixpath.normpath(p)) for p in checkpoint]
        own = " ".join(
            f"-path {shlex.quote(f'./{path}')} -prune -o"
            for path in (from_folder, *left)
            if not path.startswith("../")
        )
        return _SCRIPT.format(
            out=shlex.quote(out),
            started=shlex.quote(started_file(out)),
            tick=_TICK_S,
            command=before(wildcards, **things),
            folder=shlex.quote(f"./{project.relative_folder()}"),
            own=own,
            from_folder=shlex.quote(from_folder),
            mark=START_MARK,
        )

    return {**params, "command": ParamsFunction(command, given.asks, given)}
