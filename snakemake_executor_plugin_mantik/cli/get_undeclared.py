"""Bring files that no rule declares, for `smk-mantik get`."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import typer

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.common.humanize import humanize_count
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.engine.compare import same_time
from snakemake_executor_plugin_mantik.jobs.paths import display_path, local_path
from snakemake_executor_plugin_mantik.journal import StoredOutput, read_undeclared
from snakemake_executor_plugin_mantik.sites.base import is_rest_safe
from snakemake_executor_plugin_mantik.staging.transfers import move_beside
from snakemake_executor_plugin_mantik.storage.catalog import Catalog
from snakemake_executor_plugin_mantik.storage.copies import remove_path


def find_undeclared(
    catalog: Catalog, names: Sequence[str], directory: Path, site: str, *, force: bool
) -> tuple[list[StoredOutput], int]:
    """Return the files to bring, and the number of those that are here.

    `names` are paths or patterns; none stands for all files that the journal lists. A file here is
    replaced with `force` only: one that is named by its own path is then refused, others are left.

    Raises:
        UserError: there is no file of a name, or it lies at several sites, or another one is here.
    """
    found: dict[str, StoredOutput] = {}
    exact = set(names)
    for name in names or _listed(directory, catalog, site):
        there = catalog.files_at(name, site)
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
    here = [f for f in found.values() if os.path.lexists(local_path(f.path, directory))]
    if force:
        return list(found.values()), 0
    if others := [f for f in here if display_path(f.path) in exact and not _is_same(f, directory)]:
        raise UserError(
            f"there are other files here: {', '.join(display_path(f.path) for f in others[:5])}",
            where=str(directory),
            do="Move them away, or replace them with --force",
        )
    return [file for file in found.values() if file not in here], len(here)


def _listed(directory: Path, catalog: Catalog, site: str) -> Iterable[str]:
    """Yield the paths that the journal lists, of one site if it is named."""
    places = catalog.places(site)
    known = read_undeclared(directory.resolve() / STATE)
    return dict.fromkeys(display_path(file.path) for file in known if file.place in places)


def _is_same(file: StoredOutput, directory: Path) -> bool:
    """Return whether a file here has the size and the time of the one at the site."""
    path = local_path(file.path, directory)
    if not path.is_file():
        return False
    status = path.stat()
    return status.st_size == file.size and same_time(status.st_mtime, file.made)


def bring_undeclared(
    catalog: Catalog,
    directory: Path,
    files: Sequence[StoredOutput],
    fetch: Callable[[StoredOutput, Path], None],
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
    kept: list[StoredOutput] = []
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
            f"files changed while they were brought: "
            f"{', '.join(display_path(file.path) for file in changed[:5])}",
            where=f"site {catalog.site(changed[0])}",
            do="Bring them again when no job writes to them",
        )
    if kept:
        raise UserError(
            f"there are other files or directories here now:"
            f" {', '.join(display_path(file.path) for file in kept[:5])}",
            where=str(directory),
            do="Move them away and bring these again",
        )


def _move(part: Path, target: Path, force: bool) -> bool:
    """Move a file to its final path; return whether that was free, or may be replaced."""
    if force and not (target.is_dir() and not target.is_symlink()):
        part.replace(target)
        return True
    return move_beside(part, target)
