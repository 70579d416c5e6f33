"""`smk-mantik get` and `ls`: bring or show outputs that stay at sites, and undeclared files."""

import os
import posixpath
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.errors import UserError, printable
from ..common.humanize import humanize_count, humanize_duration, humanize_size
from ..common.state_directory import STATE
from ..engine.compare import is_same_file
from ..engine.messages import describe_os_error, lost_error
from ..jobs.paths import display_path, is_at, local_path
from ..journal import RemoteOutput, UndeclaredFile, read_stored, read_undeclared
from ..sites.base import is_rest_safe
from ..staging.transfers import move_beside, remove_path
from ..storage.access import find_workspace_files
from ..storage.catalog import Catalog
from ..storage.copies import is_here
from ..storage.paths import workspace_path
from ..views.picture import shorten_text
from . import shared
from .shared import (
    ALL_TARGETS,
    NEEDED_BY,
    NOT_DONE,
    AsJson,
    Workdir,
    make_progress,
    read_files,
    say,
    warn,
)

if TYPE_CHECKING:
    from ..adapter.workflow_metadata import GraphFiles


def find_undeclared(
    catalog: Catalog, names: Sequence[str], directory: Path, site: str, *, force: bool
) -> tuple[list[RemoteOutput], int]:
    """Return the files to bring, and the number of those that are here.

    `names` are paths or patterns; none stands for all files that the journal lists. A file here is
    replaced with `force` only: one that is named by its own path is then refused, others are left.

    Raises:
        UserError: there is no file of a name, or it lies at several sites, or another one is here.
    """
    found: dict[str, RemoteOutput] = {}
    exact = {workspace_path(name, directory) for name in names}
    for name in names or _listed(directory, catalog, site):
        there = find_workspace_files(catalog.access, name, site)
        if names and not there:
            raise UserError(
                f"there is no file {name} at a site",
                where=str(directory.resolve()),
                do="See smk-mantik ls for outputs, and smk-mantik ls --undeclared for other files",
            )
        for file in there:
            other = found.setdefault(file.path, file)
            if other.place != file.place:
                sites = " and ".join(map(catalog.site, (other, file)))
                raise UserError(
                    f"there is a file {display_path(file.path)} at {sites}",
                    where="smk-mantik get", do="Choose one with --site NAME",
                )  # fmt: skip
    unsafe = [path for path in found if not is_rest_safe(path) and path not in exact]
    for path in unsafe:
        del found[path]
    if unsafe:
        typer.echo(
            f"Left at the site: {humanize_count(len(unsafe), 'file')} with names that its file API"
            f" cannot carry, such as {unsafe[0]!r}."
        )
    if force:
        return list(found.values()), 0
    here = [f for f in found.values() if os.path.lexists(local_path(f.path, directory))]
    named = [f for f in here if f.path in exact]
    _refuse_others(
        directory,
        [f for f in named if not is_same_file(local_path(f.path, directory), f.size, f.made)],
    )
    return [file for file in found.values() if file not in here], len(here)


def _listed(directory: Path, catalog: Catalog, site: str) -> Iterable[str]:
    """Yield the paths that the journal lists, of one site if it is named."""
    places = catalog.access.places(site)
    known = read_undeclared(directory.resolve() / STATE)
    return dict.fromkeys(display_path(file.path) for file in known if file.place in places)


def bring_undeclared(
    catalog: Catalog,
    directory: Path,
    files: Sequence[RemoteOutput],
    fetch: Callable[[RemoteOutput, Path], None],
    *,
    force: bool,
) -> None:
    """Bring files that may still be written: each is compared with its site before it counts.

    `fetch` makes a path a copy of a file. With `force` it replaces a file, but no directory.

    Raises:
        UserError: files changed meanwhile, or others were made here. They were not brought, the
            others were.
    """
    parts = {}
    kept: list[RemoteOutput] = []
    targets = {file.path: local_path(file.path, directory) for file in files}
    try:
        for file in files:
            target = targets[file.path]
            parts[file.path] = target.with_name(f".{target.name}.mantik-new")
            fetch(file, parts[file.path])
        changed = catalog.changed_files(files)
        for file in files:
            if file not in changed and not _move(parts[file.path], targets[file.path], force):
                kept.append(file)
    finally:
        for part in parts.values():
            remove_path(part)
    if changed:
        raise UserError(
            f"files changed while they were brought: {_names([f.path for f in changed])}",
            where=f"site {catalog.site(changed[0])}",
            do="Bring them again when no job writes to them",
        )
    if kept:
        raise UserError(
            f"there are other local files or directories now: {_names([f.path for f in kept])}",
            where=str(directory),
            do="Move them away and bring these again",
        )


def _move(part: Path, target: Path, force: bool) -> bool:
    """Move a file to its final path; return whether that was free, or may be replaced."""
    if force and not (target.is_dir() and not target.is_symlink()):
        part.replace(target)
        return True
    return move_beside(part, target)


def get(
    context: typer.Context,
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH", help="Files or directories, as the Snakefile names them."),
    ] = None,
    *,
    directory: Workdir = Path(),
    every: Annotated[bool, typer.Option("--all", help="Bring all outputs.")] = False,
    targets: Annotated[
        bool,
        typer.Option(
            ALL_TARGETS,
            help="Bring the workflow's targets. Arguments for snakemake follow after --.",
        ),
    ] = False,
    undeclared: Annotated[
        bool,
        typer.Option("--undeclared", help="Bring all new files that jobs left beside outputs."),
    ] = False,
    site: Annotated[
        str, typer.Option(metavar="NAME", help="Look for undeclared files at this site only.")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Replace local files that have another content.")
    ] = False,
) -> None:
    """Bring files from sites: outputs that stay there, and files that no rule declares.

    A PATH that is no output is looked for in the workspaces; its last part may be a pattern. Each
    file comes whole or not at all, and outputs are verified; a broken transfer of an output
    continues where it stopped. The outputs stay at their sites, too, and later runs use them there.
    """
    if bool(paths) + every + targets + undeclared != 1:
        raise UserError(
            "it is not clear what to bring"
            if paths or every or undeclared
            else "there is nothing to bring",
            where="smk-mantik get",
            do=f"Name files, or add --all, {ALL_TARGETS} or --undeclared",
        )
    lacking, own, others, here = list[str](), list[str](), list[RemoteOutput](), 0
    files = read_files(context, directory) if targets else None
    directory = directory if files is None else files.workdir
    with closing(Catalog(directory.resolve(), say)) as c:
        if files is None:
            stored, names = _chosen(c, paths or []) if not undeclared else ([], [])
            if names or undeclared:
                others, here = find_undeclared(c, names, directory, site, force=force)
        else:
            stored, lacking, own = _find(c, files.targets)
        odd = {output.path: c.access.uncarried(output) for output in stored}
        chosen = [part for o in stored if (part := o.without(odd[o.path])) is not None]
        missing = [output for output in chosen if not is_here(output, directory)]
        if not force:
            _refuse_others(directory, missing)
        for output in missing:
            _bring_one(c, output, local_path(output.path, directory))
        bring_undeclared(c, directory, others, partial(_bring_one, c), force=force)
        for output in stored:
            _report_left(c, output, "are not UTF-8", c.unnamed(output))
            _report_left(c, output, "its file API cannot carry", odd[output.path])
    size = humanize_size(sum(output.size for output in [*missing, *others]))
    left = len(chosen) - len(missing) + here
    counts = [humanize_count(len(missing), "output")] if missing or not others else []
    counts += [humanize_count(len(others), "file")] if others else []
    typer.echo(
        f"Brought {' and '.join(counts)}, {size}"
        + f"; {humanize_count(left, 'was', 'were')} here." * bool(left)
    )
    if own:
        warn(
            f"No site has {_names(own)}: the local files count as these targets. If they are older"
            " results, such as git brings, remove them and run the workflow: it makes them again."
        )
    if lacking:
        raise UserError(
            f"there are targets that do not exist: {_names(lacking)}",
            where=str(directory),
            do="Run the workflow: it makes them",
        )
    if any(odd.values()):
        raise typer.Exit(NOT_DONE)


def _chosen(catalog: Catalog, paths: Sequence[str]) -> tuple[list[RemoteOutput], list[str]]:
    """Return the outputs at `paths`, all if there are none, and the paths without an output."""
    known = [output for output in catalog.outputs() if not output.here]
    wanted = [] if paths else known
    others = []
    for name in map(posixpath.normpath, paths):
        path = workspace_path(name, catalog.home("."))
        there = [o for o in known if is_at(o.path, path)]
        if not there:
            others.append(name)
        wanted += [output for output in there if output not in wanted]
    found = [catalog.find(output.path) for output in wanted]
    for output, now in zip(wanted, found, strict=True):
        if now is None:
            raise lost_error(output.path, f"site {catalog.site(output)}")
    return [output for output in found if output is not None], others


def _find(
    catalog: Catalog, paths: Iterable[str]
) -> tuple[list[RemoteOutput], list[str], list[str]]:
    """Return which of `paths` are outputs at a site, do not exist, or are files of the user's."""
    found, lacking, own = [], [], []
    for path in paths:
        output = catalog.find(path)
        if output is not None and not output.here:
            found.append(output)
        elif catalog.is_lost(path) or not os.path.lexists(catalog.home(path)):
            lacking.append(path)
        elif output is None:
            own.append(path)
    return found, lacking, own


def _report_left(catalog: Catalog, output: RemoteOutput, why: str, paths: Sequence[str]) -> None:
    """Name the files of an output that cannot come; `why` says so of their names."""
    if paths:
        warn(
            f"{display_path(output.path)}: left at {catalog.site(output)}:"
            f" {humanize_count(len(paths), 'file')} with names that {why}, such as"
            f" {paths[0]!r}. Let the rule pack its files, for example with tar."
        )


def _names(paths: Sequence[str]) -> str:
    return ", ".join(map(display_path, paths[:5])) + ", …" * (len(paths) > 5)


def _refuse_others(directory: Path, outputs: Iterable[RemoteOutput]) -> None:
    """Refuse to replace files that are here at the paths of outputs."""
    if others := [o.path for o in outputs if os.path.lexists(local_path(o.path, directory))]:
        raise UserError(
            f"nothing was brought: there are local files with other contents: {_names(others)}",
            where=str(directory),
            do="Move them away, or replace them with --force",
        )


def _bring_one(catalog: Catalog, output: RemoteOutput, target: Path) -> None:
    """Make `target` a copy of an output, with a progress bar if there is a terminal."""
    with make_progress() as progress:
        task = progress.add_task(printable(display_path(output.path)), total=output.size)
        try:
            catalog.bring(output, target, partial(progress.advance, task))
        except OSError as error:
            raise UserError(
                f"the file cannot be written here ({describe_os_error(error)})",
                where=display_path(output.path),
                do=f"Check {shared.WRITABLE}, and bring it again",
            ) from error
        progress.update(task, completed=output.size)


def ls(
    context: typer.Context,
    *,
    directory: Workdir = Path(),
    needed_by: Annotated[
        bool,
        typer.Option(
            NEEDED_BY,
            help="Also show which rules of the Snakefile read them. Arguments for snakemake follow"
            " after --.",
        ),
    ] = False,
    undeclared: Annotated[
        bool,
        typer.Option(
            "--undeclared", help="Show the new files that jobs left beside their outputs instead."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the outputs that stay at sites, as last known: where, how big, how old, of which job.

    To bring them here, use smk-mantik get.
    """
    files = read_files(context, directory) if needed_by else None
    directory = directory if files is None else files.workdir
    known = read_stored(directory / STATE)
    names = {site.place: site.site for site in known.sites.values()}
    if undeclared:
        _show_undeclared(read_undeclared(directory / STATE), names, directory, as_json=as_json)
        return
    outputs = [output for output in known.outputs if not output.here]
    found = [_describe(output, names, directory, files) for output in outputs]
    if as_json:
        shared.print_json(found)
        return
    if not outputs:
        typer.echo("No output stays at a site.")
        return
    needed = [] if files is None else ["needed by"]
    titles = ["file", "site", "size", "age", "made by", *needed, "here"]
    shared.print_table(titles, _shortened(map(_row, found), 4), right=("size", "age"))
    total = humanize_size(sum(output.size for output in outputs))
    typer.echo(f"{humanize_count(len(outputs), 'output')}, {total}")


def _show_undeclared(
    files: Sequence[UndeclaredFile], names: Mapping[str, str], directory: Path, *, as_json: bool
) -> None:
    found: list[dict[str, Any]] = [
        {
            "file": display_path(file.path),
            "site": names.get(file.place, file.place),
            "size": file.size,
            "job": file.job,
            "here": os.path.lexists(local_path(file.path, directory)),
        }
        for file in files
    ]
    if as_json:
        shared.print_json(found)
    elif not found:
        typer.echo("No job has left a new file that no rule declares.")
    else:
        rows = (
            [f["file"], f["site"], humanize_size(f["size"]), f["job"], "yes" * f["here"]]
            for f in found
        )
        titles = ["file", "site", "size", "seen by", "here"]
        shared.print_table(titles, _shortened(rows, 3), right=("size",))


def _shortened(rows: Iterable[list[str]], by: int) -> Iterable[list[str]]:
    """Shorten for a terminal the files in rows, and the jobs in column `by`, but no rule."""
    rows, width = list(rows), shared.make_console().width
    rules = [row[by].partition(" ")[0] for row in rows]
    files = shared.shorten_paths([row[0] for row in rows], rules, width // 2)
    for row, file, rule in zip(rows, files, rules, strict=True):
        row[0], row[by] = file, shorten_text(row[by], width * 3 // 10, rule)
    return rows


def _row(found: Mapping[str, Any]) -> list[str]:
    needed = ", ".join(found.get("needed_by", ())) or "(target)" * found.get("target", False)
    return [
        found["file"] + "/" * found["directory"],
        found["site"],
        humanize_size(found["size"]),
        humanize_duration(max(0.0, time.time() - found["made"])),
        found["job"],
        *([needed] if "needed_by" in found else []),
        "a file of this name" if found["here"] else "",
    ]


def _describe(
    output: RemoteOutput, names: Mapping[str, str], directory: Path, files: "GraphFiles | None"
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "file": display_path(output.path),
        "directory": output.directory,
        "site": names.get(output.place, output.place),
        "size": output.size,
        "made": output.made,
        "job": output.job,
        "here": os.path.lexists(local_path(output.path, directory)),
    }
    if files is not None:
        found["needed_by"] = list(files.readers.get(output.path, ()))
        found["target"] = output.path in files.targets
    return found
