"""The start of a run: credentials, sites, engine, once nothing is wrong with the workflow."""

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from snakemake_executor_plugin_mantik.checks import Checked, check, check_jobs, products
from snakemake_executor_plugin_mantik.config.exclude import Exclude
from snakemake_executor_plugin_mantik.config.reading import LoadedConfig
from snakemake_executor_plugin_mantik.engine.core import OPEN_WAIT_S, Engine
from snakemake_executor_plugin_mantik.engine.messages import duration
from snakemake_executor_plugin_mantik.engine.observe import Several
from snakemake_executor_plugin_mantik.engine.plan import Planner
from snakemake_executor_plugin_mantik.errors import (
    MantikError,
    printable,
)
from snakemake_executor_plugin_mantik.journal import Journal
from snakemake_executor_plugin_mantik.mlproject.project import given_of
from snakemake_executor_plugin_mantik.rules.units import members_of
from snakemake_executor_plugin_mantik.running import Run
from snakemake_executor_plugin_mantik.sites import issuer_of, make_site
from snakemake_executor_plugin_mantik.sites.base import Site, SiteFacts
from snakemake_executor_plugin_mantik.sites.credentials import (
    Credential,
    expires_at,
    require_all,
)
from snakemake_executor_plugin_mantik.staging import sources
from snakemake_executor_plugin_mantik.statelog import StateLog
from snakemake_executor_plugin_mantik.tracking.masking import held_by, masker, secret_values
from snakemake_executor_plugin_mantik.tracking.run import target
from snakemake_executor_plugin_mantik.tracking.tracker import Tracker


def start(workflow: Any, dag: Any, logger: Any) -> Run:
    """Check everything, find the credentials, and open the sites.

    Raises:
        MantikError: with everything that is wrong; nothing has been submitted.
    """
    checked = check(workflow, dag, workflow.executor_settings, logger)
    workdir, configs, planners = checked.workdir, checked.configs, checked.planners
    units, used = checked.units, checked.used
    jobs = [job for unit in units for job in members_of(unit)]
    credentials = _credentials(checked)
    _tell_expiry(jobs, credentials, planners, used, logger)
    shared = any(loaded.config.site.sharing == "group" for loaded in configs.values())
    journal = Journal(checked.state, shared=shared)
    try:
        for name in used:
            credentials[name].login()
        sites = _sites(configs, credentials, planners, workspace_name(workdir, journal.workflow))
    except BaseException:
        journal.close()
        raise
    tracker = _tracker(configs, credentials, workdir, logger)
    if checked.settings.tracked:
        tracker.start(tracked=_tell_untracked(units, logger))
    states = StateLog(logger.info, workdir)
    engine = Engine(
        sites,
        journal=journal,
        workdir=workdir,
        state=checked.state,
        tell=logger.info,
        observer=Several(states, tracker),
    )
    try:
        engine.open(used, partial(sources_of, checked, products(dag), logger))
        check_jobs(units, planners, engine)
    except BaseException:
        engine.close(tidy=False)
        tracker.close(0.0)
        raise
    context = replace(checked.context, workspace=engine.workspace)
    checked = replace(checked, context=context)
    return Run(engine, checked, states, tracker, logger.info)


def facts(checked: Checked) -> dict[str, SiteFacts]:
    """What the sites that jobs will run at say of themselves; nothing is sent there.

    Raises:
        MantikError: credentials are missing, or a site cannot be used.
    """
    credentials = _credentials(checked)
    # The name of a workspace that no run has: limits do not depend on it.
    name = workspace_name(checked.workdir, "check")
    sites = _sites(checked.configs, credentials, checked.planners, name)

    async def ask(site: Site) -> SiteFacts:
        try:
            async with asyncio.timeout(OPEN_WAIT_S):
                return await site.open()
        except TimeoutError:
            raise MantikError(
                f"the site has not answered for {OPEN_WAIT_S:.0f} s", where=f"site {site.name}",
                do="Check the URL and the network",
            ) from None  # fmt: skip
        finally:
            await site.close()

    found = {}
    for name in checked.used:
        credentials[name].login()
        found[name] = asyncio.run(ask(sites[name][0]))
    return found


def _credentials(checked: Checked) -> Mapping[str, Credential]:
    return require_all(
        {name: c.config.api for name, c in checked.configs.items()},
        os.environ,
        issuers={name: issuer_of(c, checked.workdir) for name, c in checked.configs.items()},
    )


def _tracker(
    configs: Mapping[str, LoadedConfig],
    credentials: Mapping[str, Credential],
    workdir: Path,
    logger: Any,
) -> Tracker:
    secrets = [*secret_values(os.environ), *held_by(credentials.values())]
    for loaded in configs.values():
        secrets += secret_values(loaded.config.environment.variables)
    texts = {n: c.path.read_text(errors="replace") for n, c in configs.items()}
    return Tracker(
        workdir,
        target(os.environ, workdir),
        texts,
        mask=masker(secrets),
        tell=lambda text: logger.info(printable(text)),
    )


def _tell_untracked(units: list[Any], logger: Any) -> bool:
    """Whether jobs are tracked; entry points in groups are not, and that is told."""
    tracked, grouped = False, set()
    for unit in units:
        members = members_of(unit)
        rules = {job.rule.name for job in members if given_of(job.rule.params) is not None}
        tracked = tracked or bool(rules and len(members) == 1)
        grouped |= rules if len(members) > 1 else set()
    if grouped:
        logger.warning(
            f"Entry points that run as members of a group are no MLflow runs of their own and are"
            f" not tracked: rule {', '.join(sorted(grouped))}. Take them out of the group for that."
        )
    return tracked


def _sites(
    configs: Mapping[str, LoadedConfig],
    credentials: Mapping[str, Credential],
    planners: Mapping[str, Planner],
    workspace: str,
) -> dict[str, tuple[Site, Planner]]:
    """The sites by name. Names for one workspace, reached as one user, share a client and it."""
    made: dict[object, Site] = {}
    sites: dict[str, tuple[Site, Planner]] = {}
    for name, loaded in configs.items():
        config, credential = loaded.config, credentials[name]
        key = (
            config.api_url, config.firecrest, config.site.workspace, config.site.storage,
            id(credential),
        )  # fmt: skip
        if key not in made:
            made[key] = make_site(
                loaded, credential, workspace, project=planners[name].project,
                account=planners[name].account,
            )  # fmt: skip
        sites[name] = (made[key], planners[name])
    return sites


def workspace_name(workdir: Path, workflow: str) -> str:
    """The name of the workflow's own workspace: readable, and another one for each directory.

    Args:
        workdir: the workflow's directory. A copy of it, journal included, is another workflow.
        workflow: its name in its journal (`Journal.workflow`).
    """
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", workdir.name).strip("-.")[:40] or "workflow"
    identity = f"{workflow}\0{workdir.resolve()}"
    return f"{readable}-{hashlib.sha256(identity.encode(errors='surrogateescape')).hexdigest()[:8]}"


def _tell_expiry(
    jobs: list[Any],
    credentials: Mapping[str, Any],
    planners: Mapping[str, Planner],
    used: list[str],
    logger: Any,
) -> None:
    """Say which tokens will expire before the requested walltimes can be over."""
    for name in used:
        expiry = expires_at(credentials[name])
        if expiry is None:
            continue
        walltimes = [planners[name].config.resources.runtime_s or 0]
        asked = [str(job.resources.get("runtime", "")) for job in jobs]
        walltimes += [int(minutes) * 60 for minutes in asked if minutes.isdigit()]
        left = expiry - time.time()
        if left < max(walltimes):
            logger.warning(
                f"The token for site {name} expires in {duration(max(0.0, left))}, but jobs ask for"
                f" up to {duration(max(walltimes))}. Give one that lasts, or a refresh token; jobs"
                " that run then are taken up by the next run."
            )


def sources_of(checked: Checked, made: frozenset[str], logger: Any, name: str) -> sources.Sources:
    """What goes up to a site besides the jobs' inputs and what is `made` of them.

    Raises:
        UserError: that is too much.
    """
    config = checked.configs[name].config
    chosen = sources.select(
        checked.workdir, Exclude(config.exclude), products=made,
        file_limit=config.site.source_file_limit_bytes, total_limit=config.site.sources_limit_bytes,
    )  # fmt: skip
    left_out = f", {len(chosen.too_large)} too large ones do not" if chosen.too_large else ""
    logger.info(
        f"Sources: {len(chosen.paths)} files ({max(1, chosen.size >> 10)} KiB) of the working"
        f" directory go to {name}{left_out} (Exclude in the backend config leaves out more)."
    )
    return chosen
