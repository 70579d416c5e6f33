"""Write a workflow of one rule that runs one entry point of an MLproject."""

import hashlib
import os
import posixpath
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..common.errors import ConfigError, UserError
from ..common.state_directory import STATE, make_private
from ..config.reading import LoadedConfig, read_configs
from ..jobs.segments import START_MARK
from .command_line import (
    UNCHANGED,
    CommandFiles,
    CommandMistakes,
    ContinueOptions,
    check_command_files,
)
from .entry import escape_braces
from .project import ParamsFunction, folder_mistake, load
from .values import path_in_folder

RUNS: Final = STATE / "run"
"""Directory below the working directory with a subdirectory and Snakefile for each workflow."""

RESULTS: Final = "mlproject-runs"
"""Directory below the working directory with the collected files of runs without named outputs."""

_OURS: Final = re.compile(r"\{(?:(?:input|output)(?:[.\[][^{}]*)?|threads)\}")

_TEMPLATE: Final = """\
# Made by `smk-mantik run`, for this command line alone.
from snakemake_executor_plugin_mantik import mlproject
from snakemake_executor_plugin_mantik.mlproject.single_rule import collect_outputs

project = mlproject.load({project!r}, warn=False)
params = project.entry_point({entry!r}, {extra!r}, **{arguments!r})


module mantik:
    snakefile:
        mlproject.RULE


use rule mlproject from mantik as {rule} with:
    input:
        *{inputs!r},
        **{named_inputs!r},
    output:
        {outputs}
    params:
        **{params},
        # Run again at another site.
        mantik_site={site!r},
{resources}"""


def prepare_single_rule(
    project: Path,
    entry_point: str,
    parameters: Sequence[str],
    extra: Sequence[str],
    *,
    site: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    going_on: ContinueOptions = UNCHANGED,
    here: bool = False,
    write: bool = True,
) -> Path:
    """Check the arguments and write the workflow; return the path of its Snakefile.

    The arguments are those of the command line: parameters as NAME=VALUE, in which `{input}` and
    the like stand for files; undeclared ones (`extra`) to append to the command; paths as
    [NAME=]PATH, of which an output that is a folder ends with `/`; `site` is [NAME=]FILE, or empty.
    A project that runs `here`, on this machine, may lie anywhere. Without `write`, only return the
    path.

    Raises:
        UserError: with all mistakes.
    """
    wrong = CommandMistakes()
    given, more = wrong.pairs("-P", parameters), wrong.pairs("--extra", extra)
    read, made = wrong.files("--input", inputs), wrong.files("--output", outputs)
    with wrong.gathered():
        check_command_files(read, made)
    configs: dict[str, LoadedConfig] = {}
    with wrong.gathered():
        configs = read_configs([site], Path()) if site else {}
    try:
        loaded = load(project.absolute())
        point = loaded.entry(entry_point)
    except ConfigError as error:
        raise ConfigError([*wrong.mistakes, *error.mistakes], do=error.do) from None
    wrong.names(loaded.shown, point, given, more)
    folder = loaded.relative_folder()
    if not here and (mistake := folder_mistake(folder)):
        wrong.notify(f"entry point {entry_point}", "", f"{mistake}: run this in a folder above it")
    declared = point.parameters
    paths = [v for name, v in given.items() if name in declared and declared[name].type == "path"]
    outside = ("..", ".", "")  # or this directory
    inside = (p for p in paths if os.path.normpath(p).split("/")[0] not in outside)
    files = [path for path in inside if os.path.exists(path) and path not in read.all]
    with wrong.gathered():
        check_command_files(CommandFiles(files), made)
    found, config = [*read.plain, *files], next(iter(configs.values()), None)
    if not read.all:
        with wrong.gathered():
            found += _large(folder, config, made.all)
    found = list(dict.fromkeys(found))
    going_on = going_on.resolve(config.config.resources if config is not None else None, wrong)
    rule = "run_" + re.sub(r"\W", "_", entry_point, flags=re.ASCII)
    identity = [str(folder), entry_point, sorted(given.items()), sorted(more.items())]
    name = f"{rule[4:]}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:8]}"
    out = f"{RESULTS}/{name}"
    values = {name: _template(value) for name, value in given.items()}
    others = {name: _template(value) for name, value in more.items()}
    things = {
        "input": CommandFiles(found, read.named),
        "output": made if made.all else CommandFiles([out]),
        "threads": 1,
    }
    wrong.values({"-P": values, "--extra": others}, things)
    with wrong.gathered():
        params = loaded.entry_point(entry_point, others, **values)
        if not wrong.mistakes:
            params["command"].given.command(None, **things)
    wrong.end()
    checkpoint = f", {going_on.checkpoint.split()!r}" if going_on.segments else ""
    resources = going_on.resources([] if made.all else [started_file(out)])
    lines = [f"        {name}={value!r},\n" for name, value in resources.items()]
    text = _TEMPLATE.format(
        project=str(loaded.folder),
        entry=entry_point,
        extra=others,
        arguments=values,
        rule=rule,
        inputs=found,
        named_inputs=read.named,
        outputs=output_lines(made) if made.all else f"directory({out!r}),",
        site=config.name if config is not None else "",
        params="params" if made.all else f"collect_outputs(params, {out!r}{checkpoint})",
        resources="".join(["    resources:\n", *lines] if lines else []),
    )
    return write_snakefile(text, name, write=write)


def snakemake_command(snakefile: Path, site: str, options: Sequence[str]) -> list[str]:
    """Return the command line that runs such a workflow, with further `options`.

    It names the backend config `site`, unless that is empty, and the executor, unless the options
    name one.
    """
    # -P: modules of the project must not shadow Snakemake's.
    words = [sys.executable, "-P", "-m", "snakemake", "--snakefile", str(snakefile)]
    words += ["--mantik-backend-config", site] if site else []
    words += ["--nolock", "--rerun-incomplete"]
    if not any(word == "-e" or word.startswith("--executor") for word in options):
        words += ["--executor", "mantik", "--jobs", "1"]
    return [*words, *options]


def write_snakefile(text: str, name: str, *, write: bool = True) -> Path:
    """Write a workflow for one command line; return its path, which `write=False` returns alone."""
    directory = RUNS / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    snakefile = directory / "Snakefile"
    if not write:
        return snakefile
    try:
        make_private(STATE)
        directory.mkdir(parents=True, exist_ok=True)
        snakefile.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the workflow cannot be written ({error.strerror or error})", where=str(snakefile),
            do="Run this in a directory that you can write to",
        ) from None  # fmt: skip
    return snakefile


def _template(value: str) -> str:
    """Escape the braces of a value for the Snakefile, except placeholders of files and threads."""
    ours = [*_OURS.findall(value), ""]
    parts = zip(_OURS.split(value), ours, strict=True)
    return "".join(escape_braces(text) + placeholder for text, placeholder in parts)


def _large(folder: os.PathLike[str], config: LoadedConfig | None, made: list[str]) -> list[str]:
    """Return the project's files that are too large to upload as sources.

    Raise ConfigError if a name has braces. `made` are outputs, which are left out.
    """
    from ..config.exclude import Exclude, Include
    from ..staging.project_files import FILE_BYTES, list_candidates

    include = Include(config.config.site.include if config else ())
    exclude = Exclude(config.config.exclude if config else ())
    products = {*map(os.path.normpath, made), RESULTS}
    found = []
    for path, size in list_candidates(Path(folder), Exclude(()), (), include):
        at = os.path.normpath(os.path.join(folder, path))
        parents = [str(parent) for parent in Path(at).parents]
        if size > FILE_BYTES and not exclude.matches(at) and not products & {at, *parents}:
            found.append(at)
    check_command_files(CommandFiles(found), CommandFiles())
    return found


def output_lines(made: CommandFiles) -> str:
    """Return the lines below `output:`; a path with a trailing slash is a directory."""
    lines = [*map(_output, made.plain), *(f"{n}={_output(p)}" for n, p in made.named.items())]
    return "\n        ".join(f"{line}," for line in lines)


def _output(path: str) -> str:
    text = repr(path.rstrip("/"))
    return f"directory({text})" if path.endswith("/") or os.path.isdir(path) else text


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
    """
    before: ParamsFunction = params["command"]
    given = before.given
    assert given is not None, "it has the call of an entry point"
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
