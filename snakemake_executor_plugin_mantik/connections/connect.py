"""Credentials, clients and observers of a workflow's sites, for runs and for looks without one."""

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..common.errors import JournalLocked, MantikError, SiteUnreachable, UserError, printable
from ..common.secret_names import credential_secrets, make_masker, secret_values
from ..common.state_directory import STATE
from ..config.reading import LoadedConfig, read_config_named, read_configs
from ..engine.place import OPEN_WAIT_S, Places, answering
from ..engine.plan import Planner
from ..engine.site_runner import SiteRunner
from ..engine.workflow_context import WorkflowContext
from ..jobs.paths import workspace_root
from ..journal import AttemptRecord, Journal, SiteRecord, read_stored, require_journal
from ..sites import make_issuer, make_site
from ..sites.authentication import Credential
from ..sites.base import Site
from ..sites.credentials import find_account, require_all
from ..tracking.run import TrackedWorkflow, tracking_target
from ..tracking.tracker import Tracker


@asynccontextmanager
async def visit_site(
    name: str,
    loaded: LoadedConfig,
    workdir: Path,
    account: str | None = None,
    *,
    may_ask: bool = True,
) -> AsyncIterator[Site]:
    """Open a site of the workflow in `workdir` again, and close it in the end.

    Raises:
        MantikError: no job was submitted from there, or as for `open_site_again`.
    """
    workdir = workdir.resolve()
    if not read_stored(workdir / STATE).workflow:
        raise UserError(
            "no job has been submitted from here yet",
            where=str(workdir),
            do="Run snakemake first, or name the workflow's working directory with -d",
        )
    site = await open_site_again(name, loaded, workdir, account, may_ask=may_ask)
    try:
        yield site
    finally:
        await site.close()


def site_visits(
    directory: Path, given: Sequence[str]
) -> Callable[[str, bool], AbstractAsyncContextManager[Site]]:
    """Return a function that opens a site of the workflow in `directory` by its name.

    The user may be asked to log in if its second argument says so. `given` are backend configs to
    use, `[NAME=]FILE`, instead of those that the last run used.
    """

    def visit(name: str, may_ask: bool = True) -> AbstractAsyncContextManager[Site]:
        known = read_stored(directory / STATE).sites.get(name)
        return visit_site(name, find_config(known, name, given), directory, may_ask=may_ask)

    return visit


async def open_site_again(
    name: str,
    loaded: LoadedConfig,
    workdir: Path,
    account: str | None = None,
    *,
    may_ask: bool = True,
) -> Site:
    """Open a site in the workspace that the last run used there, according to the journal.

    `account` is the compute budget account, by default the one in the environment. `may_ask` says
    whether the user may be asked to log in.

    Raises:
        MantikError: the user would have to log in, credentials are missing or refused, the site
            does not answer, or the config leads to another workspace.
    """
    credentials = find_site_credentials({name: loaded}, workdir)
    if credentials[name].interactive and not may_ask:
        raise UserError(
            "it needs a login in a browser", where=f"site {name}",
            do="smk-mantik logs shows a job's output after you have logged in",
        )  # fmt: skip
    await asyncio.to_thread(credentials[name].login)
    known = read_stored(workdir / STATE)
    before = known.sites.get(name)
    # Its name stays the same if the directory was moved since.
    workspace = (
        PurePosixPath(workspace_root(before.workspace)).name
        if before is not None
        else workspace_name(known.home, known.workflow)
    )
    planner = Planner(loaded.config, account or find_account(name, os.environ), workdir)
    site, _ = make_sites({name: loaded}, credentials, {name: planner}, workspace)[name]
    try:
        async with answering(name, error=SiteUnreachable), asyncio.timeout(OPEN_WAIT_S):
            facts = await site.open()
        if before is not None and before.workspace != facts.workspace:
            raise UserError(
                f"the last run used the workspace {before.workspace}, but the backend config leads"
                f" to {facts.workspace}",
                where=str(loaded.path),
                do=f"Set Site: Workspace to {workspace_root(before.workspace)} in it",
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


_OF_CLIENTS = ("workspace", "storage", "sharing", "scheduler", "ca_file", "proxy")
"""The settings of a site that its client uses; the others are the engine's."""


def find_site_credentials(
    configs: Mapping[str, LoadedConfig], workdir: Path
) -> dict[str, Credential]:
    """Find the credentials of the sites in `configs`, in the environment or the keyring.

    Raises:
        CredentialError: lists everything that is missing at any of them.
    """
    return require_all(
        {name: c.config.api for name, c in configs.items()},
        os.environ,
        issuers={name: make_issuer(c, workdir) for name, c in configs.items()},
    )


def find_secrets(
    configs: Mapping[str, LoadedConfig], credentials: Mapping[str, Credential]
) -> Callable[[str], str]:
    """Return a function that masks all secrets known here in a text."""
    secrets = [*secret_values(os.environ), *credential_secrets(credentials.values())]
    for loaded in configs.values():
        secrets += loaded.config.secrets
    return make_masker(secrets)


def make_tracker(
    configs: Mapping[str, LoadedConfig],
    credentials: Mapping[str, Credential],
    workdir: Path,
    journal: Journal,
    notify: Callable[[str], None],
    *,
    workflow: TrackedWorkflow | None = None,
    direct: Mapping[str, str] | None = None,
) -> Tracker:
    """Make the tracker of jobs' MLflow runs, not started; it masks all secrets known here.

    `notify` writes a line to the user's log. `workflow` is the one whose jobs are run, if any.
    `direct` has variables for jobs that log to the tracking server themselves; such jobs wait
    for MLflow to make their runs, some seconds at most beyond what the site's pace delays them.
    """
    texts = {n: c.path.read_text(errors="replace") for n, c in configs.items()}
    return Tracker(
        workdir,
        journal,
        tracking_target(os.environ, workdir),
        texts,
        mask=find_secrets(configs, credentials),
        notify=lambda text: notify(printable(text)),
        workflow=workflow,
        direct=direct,
    )


def make_sites(
    configs: Mapping[str, LoadedConfig],
    credentials: Mapping[str, Credential],
    planners: Mapping[str, Planner],
    workspace: str,
) -> dict[str, tuple[Site, Planner]]:
    """Make the sites by name; names for one workspace, user and connection share a client."""
    made: dict[object, Site] = {}
    sites: dict[str, tuple[Site, Planner]] = {}
    for name, loaded in configs.items():
        config, credential = loaded.config, credentials[name]
        key = (
            config.api_url, config.firecrest, *(getattr(config.site, k) for k in _OF_CLIENTS),
            id(credential), planners[name].account, str(config.pools),
        )  # fmt: skip
        if key not in made:
            made[key] = make_site(
                loaded, credential, workspace, project=planners[name].project,
                account=planners[name].account,
            )  # fmt: skip
        sites[name] = (made[key], planners[name])
    return sites


def workspace_name(home: Path, workflow: str) -> str:
    """Return the name of the workflow's own workspace: readable, and unique to each directory.

    `home` and `workflow` are those of its journal (`Journal`).
    """
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", home.name).strip("-.")[:40] or "workflow"
    identity = f"{workflow}\0{home.resolve()}"
    return f"{readable}-{hashlib.sha256(identity.encode(errors='surrogateescape')).hexdigest()[:8]}"


def open_journal(
    directory: Path,
    notify: Callable[[str], None],
    do: str = "It manages its jobs itself: press Ctrl-C there, or send it SIGINT (kill -INT), which"
    " cancels them; or wait until it ends",
    *,
    new: bool = False,
    shared: bool = False,
) -> Journal:
    """Open the journal of the workflow in `directory`; this process becomes its controller.

    With `new` begin it if there is none, for a group if `shared`. `notify` writes a line for the
    user.

    Raises:
        JournalError: there is no journal, or it cannot be used.
        JournalLocked: another controller holds it, mostly a running Snakemake; `do` says what then.
    """
    if not new:
        require_journal(directory / STATE)
    try:
        journal = Journal(directory / STATE, shared=shared)
    except JournalLocked as error:
        raise JournalLocked(error.what, where=error.where, do=do) from None
    if journal.remark:
        notify(journal.remark)
    return journal


@dataclass(frozen=True)
class ReconnectedSite:
    """Sites of an earlier run: `runners` of those that answered, and errors of those `away`."""

    journal: Journal
    workdir: Path
    runners: Mapping[str, SiteRunner]
    away: Mapping[str, str]

    def holds(self, record: AttemptRecord) -> bool:
        """Check whether an attempt is in a workspace that was reached."""
        runner = self.runners.get(record.site)
        return runner is not None and runner.place.id == record.place

    def unreached(self, record: AttemptRecord) -> str:
        """Return why an attempt's workspace was not reached."""
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
    known = journal.sites()
    runners: dict[str, SiteRunner] = {}
    away: dict[str, str] = {}

    async def open_one(name: str, site: Site, planner: Planner) -> None:
        try:
            facts, place = await places.open(name, site, planner)
        except MantikError as error:
            away[name] = str(error)
            return
        # A place that differs from the last run's is only visited.
        before = known.get(name)
        if before is None or before.workspace == facts.workspace:
            config = str(configs[name].path) if before is None else before.config
            journal.set_site(name, planner.config.server, facts.workspace, place.id, config)
        runners[name] = SiteRunner(site, facts, planner, place, places, observer=tracker)

    with closing(journal):
        workdir = journal.path.parents[len(STATE.parts)].resolve()
        found = read_configs(given, Path(), check_files=False)
        if not new and (strange := sorted(set(found) - set(known))):
            raise UserError(
                f"no job was submitted to a site named {', '.join(strange)}",
                where="--site",
                do=f"Use one of the workflow's sites: {', '.join(known) or 'none'}",
            )
        configs = {name: found.get(name) or find_config(known.get(name), name) for name in names}
        credentials = find_site_credentials(configs, workdir)
        for credential in credentials.values():
            credential.login()
        planners = {
            name: Planner(c.config, find_account(name, os.environ), workdir)
            for name, c in configs.items()
        }
        workspace = workspace_name(journal.home, journal.workflow)
        sites = make_sites(configs, credentials, planners, workspace)
        tracker = make_tracker(configs, credentials, workdir, journal, notify)
        tracker.start(tracked=False)
        # No job is run here, so none is given up for another.
        places = Places(
            WorkflowContext(
                journal, workdir, journal.path.parent, notify, lambda _: asyncio.sleep(0)
            )
        )
        try:
            await asyncio.gather(*(open_one(name, *site) for name, site in sites.items()))
            yield ReconnectedSite(journal, workdir, runners, away)
        finally:
            clients = {id(site): site for site, _ in sites.values()}.values()
            await asyncio.gather(*(site.close() for site in clients), return_exceptions=True)
            tracker.settle()
            tracker.close()
