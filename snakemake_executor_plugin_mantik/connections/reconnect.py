"""Access to a workflow's sites without Snakemake: to tries of earlier runs, from the journal."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from snakemake_executor_plugin_mantik.common.errors import (
    JournalLocked,
    MantikError,
    UserError,
)
from snakemake_executor_plugin_mantik.common.state_directory import STATE
from snakemake_executor_plugin_mantik.config.reading import (
    LoadedConfig,
    read_configs,
)
from snakemake_executor_plugin_mantik.engine.core import OPEN_WAIT_S
from snakemake_executor_plugin_mantik.engine.place import Places
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.engine.site_runner import SiteRunner
from snakemake_executor_plugin_mantik.engine.workflow_context import WorkflowContext
from snakemake_executor_plugin_mantik.journal import (
    Journal,
    TryRecord,
    journal_path,
)
from snakemake_executor_plugin_mantik.sites.base import Site
from snakemake_executor_plugin_mantik.sites.credentials import find_account
from snakemake_executor_plugin_mantik.tracking.tracker import Tracker

from .connect import find_config, find_site_credentials, make_sites, make_tracker, workspace_name


def open_journal(directory: Path) -> Journal:
    """Open the journal of the workflow in `directory`; this process becomes its controller.

    Raises:
        JournalError: there is no journal, or it cannot be used.
        JournalLocked: another controller holds it, mostly a running Snakemake.
    """
    state = directory / STATE
    journal_path(state)
    try:
        return Journal(state)
    except JournalLocked as error:
        raise JournalLocked(
            error.what,
            where=error.where,
            do="It manages its jobs itself: press Ctrl-C there, or send it SIGINT (kill -INT),"
            " which cancels them; or wait until it ends",
        ) from None


@dataclass(frozen=True)
class ReconnectedSite:
    """Sites of an earlier run: `runners` of those that answered, and errors of those `away`."""

    journal: Journal
    workdir: Path
    runners: Mapping[str, SiteRunner]
    away: Mapping[str, str]

    def holds(self, record: TryRecord) -> bool:
        """Check whether a try is in a workspace that was reached."""
        if (runner := self.runners.get(record.site)) is None:
            return False
        return runner.place.id == record.place

    def unreached(self, record: TryRecord) -> str:
        """Return why a try's workspace was not reached."""
        return self.away.get(
            record.site,
            f"its workspace {record.left_where} is not the one in the current backend config;"
            f" use the earlier config with --site {record.site}=FILE",
        )


@asynccontextmanager
async def reach_sites(
    journal: Journal,
    names: Sequence[str],
    given: Sequence[str],
    notify: Callable[[str], None],
    *,
    new: bool = False,
) -> AsyncIterator[ReconnectedSite]:
    """Open the sites `names` as the last run reached them; close clients and journal in the end.

    `given` are backend configs to use, `[NAME=]FILE`, instead of those that the last run used.
    With `new` they may be those of sites that no run has used yet. `notify` writes a line for the
    user.

    Raises:
        MantikError: a config or credentials are missing or cannot be used; no request was sent to
            a site.
    """
    with closing(journal):
        workdir = journal.path.parents[len(STATE.parts)].resolve()
        configs = _configs(journal, names, given, new=new)
        credentials = find_site_credentials(configs, workdir)
        for credential in credentials.values():
            credential.login()
        planners = {
            name: Planner(c.config, find_account(name, os.environ), workdir)
            for name, c in configs.items()
        }
        name = workspace_name(journal.home, journal.workflow)
        sites = make_sites(configs, credentials, planners, name)
        tracker = make_tracker(configs, credentials, workdir, journal, notify)
        tracker.start(tracked=False)
        try:
            paths = {name: str(loaded.path) for name, loaded in configs.items()}
            runners, away = await _open(
                sites, paths, journal, workdir, notify=notify, tracker=tracker
            )
            yield ReconnectedSite(journal, workdir, runners, away)
        finally:
            clients = {id(site): site for site, _ in sites.values()}.values()
            await asyncio.gather(*(site.close() for site in clients), return_exceptions=True)
            tracker.settle()
            tracker.close()


def _configs(
    journal: Journal, names: Sequence[str], given: Sequence[str], *, new: bool
) -> dict[str, LoadedConfig]:
    found = read_configs(given, Path(), check_files=False)
    if not new and (strange := sorted(set(found) - set(journal.sites()))):
        raise UserError(
            f"no job was submitted to a site named {', '.join(strange)}",
            where="--site",
            do=f"Use one of the workflow's sites: {', '.join(journal.sites()) or 'none'}",
        )
    known = journal.sites()
    return {name: found.get(name) or find_config(known.get(name), name) for name in names}


async def _open(
    sites: Mapping[str, tuple[Site, Planner]],
    configs: Mapping[str, str],
    journal: Journal,
    workdir: Path,
    *,
    notify: Callable[[str], None],
    tracker: Tracker,
) -> tuple[dict[str, SiteRunner], dict[str, str]]:
    runners: dict[str, SiteRunner] = {}
    away: dict[str, str] = {}

    places = Places(WorkflowContext(journal, workdir, journal.path.parent, notify, _nobody))

    async def one(name: str, site: Site, planner: Planner) -> None:
        known, server = journal.sites().get(name), planner.config.server
        try:
            async with asyncio.timeout(OPEN_WAIT_S):
                facts = await site.open()
            place = await places.at(site, facts, planner.config.site, server)
        except TimeoutError:
            away[name] = f"site {name}: no answer within {OPEN_WAIT_S:.0f} s."
            return
        except MantikError as error:
            away[name] = str(error)
            return
        # A place that differs from the last run's is only visited.
        if known is None or known.workspace == facts.workspace:
            config = configs[name] if known is None else known.config
            journal.set_site(name, server, facts.workspace, place.id, config)
        runners[name] = SiteRunner(site, facts, planner, place, places, observer=tracker)

    await asyncio.gather(*(one(name, *found) for name, found in sites.items()))
    return runners, away


async def _nobody(records: Sequence[TryRecord]) -> None:
    """Do nothing: no job is run here, so none is given up for another."""
    del records
