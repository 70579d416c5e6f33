"""`smk-mantik put`: send files of this machine to a site before a job needs them."""

import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..common.errors import UserError, printable
from ..common.humanize import humanize_count, humanize_size
from ..common.state_directory import STATE
from ..config.exclude import Include
from ..config.model import BackendConfig
from ..config.reading import read_configs
from ..connections.connect import open_journal, reach_sites
from ..jobs.paths import display_path, is_at, local_path
from ..journal import Journal, RemoteOutput, read_stored
from ..rules.paths.job_paths import JobPaths
from ..staging.local import LocalFile
from ..staging.secret_files import SecretFiles
from .shared import NOT_DONE, Workdir, is_config, make_progress, say

_MOST_BUNDLES = 64
"""In how many bundles files are uploaded at most, if none is large: a script names all that it
needs, and of a bundle all is uploaded again if one of its files changes."""


def _split(files: Sequence[LocalFile], size: int) -> Iterator[list[LocalFile]]:
    """Split files into groups of at most `size` bytes, or of one larger file."""
    group: list[LocalFile] = []
    filled = 0
    for file in files:
        if group and filled + file.size > size:
            yield group
            group, filled = [], 0
        group.append(file)
        filled += file.size
    if group:
        yield group


def put(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH", help="Files or directories, as the Snakefile names them."),
    ] = None,
    *,
    directory: Workdir = Path(),
    site: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The site: its name in the workflow, or its backend config as [NAME=]FILE."
            " Needed before the first run, and with several sites.",
        ),
    ] = None,
) -> None:
    """Send files of this machine to a site's workspace before a job needs them.

    Jobs of the next run there find them and upload them no more. What is there already is not sent
    again, and an interrupted command continues where it stopped when you repeat it. Your files stay
    what counts: one that you change is uploaded again when a job needs it.
    """
    if not paths:
        raise UserError("there is nothing to send", where="smk-mantik put", do="Name files")
    given = [site] if site is not None and is_config(site) else []
    config = read_configs(given, Path())
    directory = directory.resolve()
    wanted = [_place(directory, path) for path in paths]
    known = read_stored(directory / STATE)
    name = next(iter(config), None) or _choose(list(known.sites), site)
    _refuse_outputs(directory, known.outputs, wanted)
    journal = open_journal(
        directory, say,
        "It uploads what its jobs need; use smk-mantik put when it has ended", new=True,
        shared=any(loaded.config.site.sharing == "group" for loaded in config.values()),
    )  # fmt: skip
    sent, size, left = asyncio.run(_put(journal, name, given, wanted))
    there = f"; {humanize_count(left, 'was', 'were')} there" * bool(left)
    typer.echo(f"Sent {humanize_count(sent, 'file')}, {humanize_size(size)}, to {name}{there}.")


def _place(directory: Path, path: str) -> str:
    """Return the path of a file in a workspace."""
    if not os.path.exists(directory / path):
        raise UserError("there is no such file", where=path, do="Correct the path")
    found = JobPaths(directory, str).place(path)
    whole = directory / STATE.parts[0]
    if found is None or whole.is_relative_to(os.path.abspath(directory / path)):
        raise UserError("it is no input of a job", where=path, do="Name the files that jobs read")
    return found


def _choose(sites: Sequence[str], name: str | None) -> str:
    """Return the one of the workflow's `sites` to send to."""
    known = f"Sites of this workflow: {', '.join(sites)}" if sites else ""
    if name is None and len(sites) == 1:
        return sites[0]
    if name is None and sites:
        raise UserError(
            "there are several sites", where="smk-mantik put", do=f"Add --site NAME. {known}"
        )
    if name is None or name not in sites:
        raise UserError(
            f"no run has used a site {'yet' if name is None else f'named {name}'}",
            where="smk-mantik put",
            do=f"Name its backend config with --site FILE. {known}".strip(),
        )
    return name


def _refuse_outputs(directory: Path, outputs: Iterable[RemoteOutput], paths: Sequence[str]) -> None:
    """Refuse to send an output that stays at a site, a part of one, or a directory with a copy."""
    for output in outputs:
        copied = os.path.lexists(local_path(output.path, directory))
        for path in paths:
            if not output.here and (
                is_at(path, output.path) or (copied and is_at(output.path, path))
            ):
                raise UserError(
                    f"{display_path(output.path)} is the output of a job and stays at a site; jobs"
                    " read it there, whatever is here under its name",
                    where=str(directory),
                    do="Leave it out; a run moves it to the site that needs it",
                )


def _refuse_secrets(config: BackendConfig, directory: Path, paths: Iterable[str]) -> None:
    """Refuse to send what must not leave this machine, or contains such a file."""
    files = SecretFiles(Include(config.site.include))
    looks = (files.look_at(path, str(local_path(path, directory))) for path in paths)
    if found := "; ".join(filter(None, looks)):
        raise UserError(
            f"files must not leave this machine (nothing sent): {found}",
            where=str(directory),
            do="Leave them out. To send one that only looks like a secret, add it to Site: Include"
            " in the backend config",
        )


async def _put(
    journal: Journal, name: str, given: Sequence[str], paths: Sequence[str]
) -> tuple[int, int, int]:
    """Send files; return how many were sent, their size, and how many were there already."""
    with make_progress() as progress:

        def notify(text: str) -> None:
            progress.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

        async with reach_sites(journal, [name], given, notify, new=True) as there:
            if name in there.away:
                notify(there.away[name])
                raise typer.Exit(NOT_DONE)
            runner = there.runners[name]
            _refuse_secrets(runner.planner.config, there.workdir, paths)
            stager = runner.place.stager
            files = await runner.local.look_at([(path, None) for path in paths])
            lacking = await stager.find_lacking(files)
            size, done = sum(file.size for file in lacking), 0
            task = progress.add_task(f"to {name}", total=size)
            for batch in _split(lacking, max(runner.facts.upload_bytes, size // _MOST_BUNDLES)):
                whole = sum(file.size for file in batch)

                def sent(share: float, before: int = done, whole: int = whole) -> None:
                    progress.update(task, completed=before + share * whole)

                await stager.keep(batch, sent)
                done += whole
            progress.update(task, completed=done)
    return len(lacking), size, len(files) - len(lacking)
