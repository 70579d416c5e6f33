"""Access to a site for a process that only looks: it holds no lock and changes no job's files."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath

from snakemake_executor_plugin_mantik.common.errors import SiteUnreachable, UserError
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.config.reading import (
    LoadedConfig,
    read_config_named,
    read_configs,
)
from snakemake_executor_plugin_mantik.connections.connect import (
    find_site_credentials,
    make_sites,
    workspace_name,
)
from snakemake_executor_plugin_mantik.engine.core import OPEN_WAIT_S
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.journal import SiteRecord, StoredOutputs, read_stored
from snakemake_executor_plugin_mantik.sites.base import Site
from snakemake_executor_plugin_mantik.sites.credentials import find_account


@asynccontextmanager
async def visit_site(
    name: str,
    loaded: LoadedConfig,
    workdir: Path,
    account: str | None = None,
    *,
    may_ask: bool = True,
) -> AsyncIterator[Site]:
    """Open a site of the workflow in `workdir`, and close it in the end.

    `account` is the compute budget account, by default the one in the environment. `may_ask` says
    whether the user may be asked to log in.

    Raises:
        MantikError: the user would have to log in, credentials are missing or refused, the site
            does not answer, or the config leads to another workspace than the last run's.
    """
    workdir = workdir.resolve()
    known = read_stored(workdir / STATE)
    if not known.workflow:
        raise UserError(
            "no job has been submitted from here yet",
            where=str(workdir),
            do="Run snakemake first, or name the workflow's working directory with -d",
        )
    site = await open_site_again(
        name, loaded, workdir, known,
        account=account or find_account(name, os.environ), may_ask=may_ask,
    )  # fmt: skip
    try:
        yield site
    finally:
        await site.close()


async def open_site_again(
    name: str,
    loaded: LoadedConfig,
    workdir: Path,
    known: StoredOutputs,
    *,
    account: str | None,
    may_ask: bool = True,
) -> Site:
    """Open a site in the workspace that the last run used there, according to the journal.

    `may_ask` says whether the user may be asked to log in.

    Raises:
        MantikError: credentials are missing or refused, the site does not answer, or the config
            leads to another workspace.
    """
    credentials = find_site_credentials({name: loaded}, workdir)
    if credentials[name].interactive and not may_ask:
        raise UserError(
            "it needs a login in a browser", where=f"site {name}",
            do="smk-mantik logs shows a job's output after you have logged in",
        )  # fmt: skip
    await asyncio.to_thread(credentials[name].login)
    before = known.sites.get(name)
    workspace = (
        PurePosixPath(before.workspace).name  # also if the directory was moved since
        if before is not None
        else workspace_name(known.home, known.workflow)
    )
    planner = Planner(loaded.config, account, workdir)
    site, _ = make_sites({name: loaded}, credentials, {name: planner}, workspace)[name]
    try:
        try:
            async with asyncio.timeout(OPEN_WAIT_S):
                facts = await site.open()
        except TimeoutError:
            raise SiteUnreachable(
                f"the site has not answered for {OPEN_WAIT_S:.0f} s",
                where=f"site {name}",
                do="Check the URL and the network, and try again",
            ) from None
        if before is not None and before.workspace != facts.workspace:
            raise UserError(
                f"the last run used the workspace {before.workspace}, but the backend config leads"
                f" to {facts.workspace}",
                where=str(loaded.path),
                do=f"Set Site: Workspace to {before.workspace} in it",
            )
    except BaseException:
        await site.close()
        raise
    return site


def find_config(record: SiteRecord | None, name: str, given: Sequence[str] = ()) -> LoadedConfig:
    """Return a site's backend config: the one in `given` (`[NAME=]FILE`), or the last run's.

    Raises:
        UserError: the last run's is unknown or gone, or a config is invalid.
    """
    if name in (found := read_configs(given, Path(), check_files=False)):
        return found[name]
    path = record.config if record is not None else ""
    if not path or not Path(path).exists():
        raise UserError(
            f"its backend config {path} no longer exists"
            if path
            else "the path of its backend config is unknown",
            where=f"site {name}",
            do=f"Set it with --site {name}=FILE",
        )
    return read_config_named(name, path, Path(), project=None)
