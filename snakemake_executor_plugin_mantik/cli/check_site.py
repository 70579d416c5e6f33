"""Check a site without submitting a job: credentials, server, queues, workspace, clock.

All requests go through the Site protocol, as in a run, so this works with every API.
"""

import asyncio
import os
import posixpath
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from ..common.errors import (
    CredentialError,
    MantikError,
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    UserError,
)
from ..common.humanize import humanize_duration
from ..config.environment import describe_software, find_pools, image_upload
from ..config.environment_keys import SLURM_KEYS, EnvironmentConfig
from ..config.known_sites import find_known_site
from ..config.model import BackendConfig
from ..config.reading import LoadedConfig
from ..engine.messages import unchecked_message
from ..engine.plan import ACCOUNT, Planner, choose_queue, find_misfits, unchecked_resources
from ..jobs.paths import OURS, ROOT, path_at_site, workspace_root
from ..jobs.quoting import expands
from ..jobs.spec import Resources
from ..sites import make_issuer, make_site
from ..sites.authentication import Credential
from ..sites.base import WORKSPACES, QueueLimits, Site, SiteDetails, SiteFacts
from ..sites.credentials import find_account, find_credentials

ANSWER_WAIT_S: Final = 120.0
"""Seconds that a site has for all its answers together."""

_LITTLE_BYTES: Final = 1 << 30
"""Less free space leads to a warning."""

_CLOCK_SLACK_S: Final = 60.0
"""A larger clock difference leads to a warning: it changes the effective lifetime of tokens."""

_Verdict = Literal["ok", "note", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        verdict: what it means for jobs; with `wrong` they cannot run.
    """

    topic: str
    verdict: _Verdict
    text: str


def check_connection(loaded: LoadedConfig, project: Path) -> list[Finding]:
    """Check the site of a config with the user's credentials from the environment or keyring."""
    config, findings = loaded.config, list[Finding]()
    issuer = make_issuer(loaded, project)
    try:
        credential = find_credentials(loaded.name, config.api, os.environ, issuer=issuer)
        credential.login()
    except MantikError as error:
        return [Finding("credentials", "wrong", str(error))]
    findings += _credentials(credential, config.resources.runtime_s)
    account = find_account(loaded.name, os.environ)
    planner = Planner(loaded.config, account, project)
    try:
        from ..connections.connect import workspace_name

        # No run and no other check uses this name; the results do not depend on it.
        own = workspace_name(project.absolute(), f"check {uuid.uuid4()}")
        directory, opened = "", loaded
        if loaded.config.site.workspace is None:
            # A site removes everything below its workspace, not that itself: open the one above.
            above = loaded.config.site.model_copy(update={"workspace": WORKSPACES})
            directory, config = f"{ROOT}/{own}", loaded.config.model_copy(update={"site": above})
            opened = replace(loaded, config=config)
        site = make_site(opened, credential, own, project=project, account=account)
        resources = planner.resources({}, 1)
    except MantikError as error:
        return [*findings, Finding("site", "wrong", str(error))]
    findings += asyncio.run(
        _ask(site, planner, loaded, resources, credential.origin, directory=directory)
    )
    findings += _images(loaded, project)
    return findings


async def _ask(
    site: Site,
    planner: Planner,
    loaded: LoadedConfig,
    resources: Resources,
    used: str,
    *,
    directory: str,
) -> list[Finding]:
    """Ask a site; `directory` is a workspace's below the one opened, empty if it is that one."""
    findings: list[Finding] = []
    topic = "server"
    try:
        async with asyncio.timeout(ANSWER_WAIT_S):
            facts = await site.open(make=not directory)
            if directory:
                facts = replace(facts, workspace=path_at_site(facts.workspace, directory))
            findings += _facts(facts, loaded, resources)
            findings += _mounts(facts, planner)
            details = await _details(site, findings)
            findings += _scheduler(loaded.config.site.scheduler, details.scheduler)
            findings += _account(resources.account, details)
            topic = "workspace"
            findings += await _workspace(site, facts.workspace, directory)
            topic = "environment"
            findings += await _software(site, loaded.config, own=bool(directory))
            findings += _space(details.free_bytes)
            findings += _purge(facts.workspace, loaded)
    except TimeoutError:
        text = f"the site did not answer within {ANSWER_WAIT_S:.0f} s; check the URL and network"
        findings.append(Finding(topic, "wrong", text))
    except MantikError as error:
        text = str(error)
        if isinstance(error, SiteUnauthorized | CredentialError):
            topic = "credentials"
            text = text if used in text else f"{text} (used: {used})"
        elif isinstance(error, SiteRejected):
            topic = "workspace"
        findings.append(Finding(topic, "wrong", text))
    finally:
        await site.close()
    return findings


async def _details(site: Site, findings: list[Finding]) -> SiteDetails:
    """Return further details of the site; a site that cannot report them may still run jobs."""
    try:
        details = await site.describe()
    except SiteUnauthorized:
        raise
    except SiteError as error:
        findings.append(Finding("server", "warning", f"it does not provide details: {error}"))
        return SiteDetails()
    findings += [Finding("server", "warning", f"it {note}") for note in details.notes]
    return details


def _scheduler(configured: str, told: str) -> Iterator[Finding]:
    if told and told != configured:
        text = f"the system uses {told}, but the backend config says {configured}"
        yield Finding("scheduler", "warning", f"{text}: set Site: Scheduler to {told}")


def _credentials(credential: Credential, runtime_s: int | None) -> Iterator[Finding]:
    kind = f"{type(credential).__name__} ({credential.origin})"
    expiry = credential.expires_at()
    if expiry is None:
        yield Finding("credentials", "ok", f"{kind} found")
        return
    when = datetime.fromtimestamp(expiry, UTC).astimezone().isoformat(" ", "minutes")
    left = expiry - time.time()
    if left <= 0:
        yield Finding("credentials", "wrong", f"{kind} expired at {when}; get a new one")
    elif left < (runtime_s or 0):
        yield Finding(
            "credentials",
            "warning",
            f"{kind} expires at {when}, before the end of a job of"
            f" {humanize_duration(runtime_s or 0)} that starts now",
        )
    else:
        yield Finding("credentials", "ok", f"{kind} found, expires at {when}")


def _facts(facts: SiteFacts, loaded: LoadedConfig, resources: Resources) -> Iterator[Finding]:
    yield Finding("server", "ok", facts.server)
    yield from _known_defects(facts.server, loaded, resources)
    if facts.user:
        yield Finding("user", "ok", f"jobs run as {facts.user}")
    else:
        yield Finding("user", "note", "the server does not report which user jobs run as")
    for pool in find_pools(loaded.config, None):
        for misfit in find_misfits(pool.resources, facts):
            text = f"Pools.{pool.name}.{misfit.key}: {misfit.what}. {misfit.do}."
            yield Finding("pool", "wrong" if misfit.certain else "warning", text)
    resources = choose_queue(resources, facts)
    # `_account` reports on the account.
    found = [misfit for misfit in find_misfits(resources, facts) if misfit.key != ACCOUNT]
    for misfit in found:
        text = f"Resources.{misfit.key}: {misfit.what}. {misfit.do}."
        yield Finding("resources", "wrong" if misfit.certain else "warning", text)
    if not facts.queues:
        yield Finding("queue", "note", "the site does not report its queues")
        return
    yield Finding("queues", "ok", ", ".join(facts.queues))
    for queue in resources.queues:
        limits = facts.queues.get(queue)
        if limits is None:
            continue
        allowed, left = _limits(limits), unchecked_resources(resources, limits)
        text = f"{queue} allows {allowed}" if allowed else f"{queue} exists"
        yield Finding("queue", "ok", text)
        if not found and allowed:
            yield Finding("resources", "ok", "are within the queue's reported limits")
        if left:
            yield Finding("resources", "note", unchecked_message(left))


def _account(account: str | None, details: SiteDetails) -> Iterator[Finding]:
    known = ", ".join(
        f"{name} ({left})" if left else name for name, left in details.accounts.items()
    )
    if account is None:
        text, default = "none is set (MANTIK_COMPUTE_BUDGET_ACCOUNT)", details.default_account
        if default:
            text += f", so jobs are charged to {default}, the site's default"
        yield Finding("account", "note", text)
        if known:
            yield Finding("accounts", "note", f"the site reports {known}")
    elif not known:
        text = f"jobs are charged to {account}; not checked, because the site reports no accounts"
        yield Finding("account", "note", text)
    elif account in details.accounts:
        left = details.accounts[account]
        yield Finding("account", "ok", f"jobs are charged to {account}{left and f', {left} left'}")
    else:
        text = f"{account} is not among those that the site reports: {known}"
        yield Finding(
            "account", "wrong",
            f"{text}; correct MANTIK_COMPUTE_BUDGET_ACCOUNT, or the variable of this site alone",
        )  # fmt: skip


def _space(free_bytes: int | None) -> Iterator[Finding]:
    if free_bytes is None:
        yield Finding("free space", "note", "the API reports neither free space nor a quota")
    else:
        verdict: _Verdict = "warning" if free_bytes < _LITTLE_BYTES else "ok"
        text = f"{free_bytes / (1 << 30):.1f} GiB; a quota may allow less"
        yield Finding("free space", verdict, text)


def _purge(workspace: str, loaded: LoadedConfig) -> Iterator[Finding]:
    site = find_known_site(loaded.config)
    if site is None:
        yield Finding("purge", "note", "the API does not report whether the site deletes old files")
    elif "scratch" in workspace.lower():
        yield Finding("purge", "note", f"{site.purge} ({site.source})")
    else:
        yield Finding("purge", "note", f"unknown for {workspace}; see {site.source}")


def _known_defects(server: str, loaded: LoadedConfig, resources: Resources) -> Iterator[Finding]:
    if loaded.config.api != "unicore" or loaded.config.site.scheduler != "none":
        return  # other jobs carry the scheduler's own directives
    from ..sites.unicore.description import lost_resources

    if lost := lost_resources(resources, server):
        text = f"{server} loses {' and '.join(lost)}; set Site: Scheduler to slurm or pbs"
        yield Finding("server", "wrong", text)


def _limits(limits: QueueLimits) -> str:
    runtime = limits.runtime_s
    parts = [f"runtime up to {humanize_duration(runtime[1])}"] if runtime else []
    for allowed, words in (
        (limits.nodes, "{} to {} nodes"),
        (limits.cpus_per_node, "{} to {} CPUs per node"),
        (limits.memory_mib_per_node, "memory {} to {} MiB per node"),
        (limits.gpus_per_node, "{} to {} GPUs per node"),
    ):
        parts += [words.format(*allowed)] if allowed else []
    parts += [f"{name} {' or '.join(values)}" for name, values in limits.choices.items()]
    return ", ".join(parts)


async def _workspace(site: Site, workspace: str, directory: str) -> list[Finding]:
    """Write, stat, read and remove a small file; its mtime shows the site's clock."""
    path = posixpath.join(directory, OURS, f"check-{uuid.uuid4()}")
    content = b"smk-mantik check\n"
    try:
        before = time.time()
        await site.put(path, content)
        entry = await site.stat(path)
        middle = (before + time.time()) / 2
        back = b"".join([chunk async for chunk in site.get(path, size=len(content))])
    finally:
        await site.remove(directory or path)
    if back != content:
        raise SiteRejected("a file was read back with different content", where=workspace)
    there = (
        posixpath.dirname(workspace) if directory else workspace_root(workspace)
    )  # the rest is for this check
    found = [Finding("workspace", "ok", f"{there} can be written to")]
    if entry is not None and entry.modified:
        ahead = round(entry.modified - middle)  # servers tell whole seconds
        off = abs(ahead) > _CLOCK_SLACK_S
        text = f"the site's file times are {abs(ahead)} s {'ahead' if ahead > 0 else 'behind'}"
        if abs(ahead) > 1:
            found.append(Finding("clock", "warning" if off else "ok", text))
    return found


async def _software(site: Site, config: BackendConfig, *, own: bool) -> list[Finding]:
    """Look for virtual environments and images that have to lie at the site.

    `own` is whether each workflow has a workspace of its own, so that the opened site is no
    workflow's.
    """
    found = []
    for environment in config.all_environments.values():
        for what, path in _expected(environment):
            if config.site.expand and expands(path):
                continue  # only known on the node
            if own and not path.startswith("/"):
                text = f"{what} {path} has to lie in each workflow's own workspace, since its path"
                found.append(Finding("environment", "note", f"{text} is relative"))
                continue
            folder, name = posixpath.split(path)
            try:
                there = name in await site.list(folder or ".")
            except SiteNotFound:
                there = False
            except SiteError as error:
                text = f"{path} cannot be looked for: {error.what}"
                found.append(Finding("environment", "note", text))
                continue
            text = f"{what} {path}"
            verdict: _Verdict = "ok" if there else "warning"
            found.append(
                Finding("environment", verdict, f"{text} is there" if there else f"no {text}: jobs"
                        " fail unless compute nodes see other directories than the API")
            )  # fmt: skip
    return found


def _expected(environment: EnvironmentConfig) -> Iterator[tuple[str, str]]:
    """Yield what an environment expects at the site, and the path of a file of it."""
    apptainer, python = environment.apptainer, environment.python
    if apptainer is not None and apptainer.type == "remote" and "://" not in apptainer.path:
        yield "image", apptainer.path
    within = apptainer or environment.container_engine or environment.pyxis or environment.uenv
    if python is not None and python.requirements is None and within is None:
        yield "virtual environment with", f"{python.path}/bin/activate"


def _mounts(facts: SiteFacts, planner: Planner) -> Iterator[Finding]:
    for name in planner.config.all_environments:
        try:
            planner.mounts_fit(name, facts)
        except UserError as error:
            yield Finding("mounts", "wrong", f"{error.where}: {error.what}. {error.do}.")


def _images(loaded: LoadedConfig, project: Path) -> Iterator[Finding]:
    for environment in loaded.config.all_environments.values():
        if (image := image_upload(environment, project)) is not None:
            yield _architecture(image[0], loaded)
        # A plugin of Slurm fetches it, or it lies at the site.
        for other in describe_software(environment):
            if other.startswith(SLURM_KEYS):
                site = find_known_site(loaded.config)
                nodes = f"; {site.title} has {site.architecture}" if site is not None else ""
                yield Finding("image", "note", f"{other}: its processors cannot be checked{nodes}")


def _architecture(image: Path, loaded: LoadedConfig) -> Finding:
    """Compare the processors that an Apptainer image is built for with those of a known site."""
    built_for, site = _read_architecture(image), find_known_site(loaded.config)
    if built_for is None:
        text = f"{image} does not name a processor architecture: is it a SIF file?"
        return Finding("image", "warning", text)
    if site is None:
        text = f"{image} is for {built_for} processors; the API does not report those of the nodes"
        return Finding("image", "note", text)
    if built_for == site.architecture:
        text = f"{image} is for {built_for} processors, like those of {site.title}"
        return Finding("image", "ok", text)
    text = f"{image} is for {built_for} processors, {site.title} has {site.architecture}"
    return Finding("image", "wrong", f"{text} ({site.source}); build it for {site.architecture}")


_MAGIC: Final = b"SIF_MAGIC\0"
_LAUNCH_BYTES: Final = 32
_ARCHITECTURE: Final = slice(45, 47)
_ARCHITECTURES: Final = {
    b"01": "386",
    b"02": "amd64",
    b"03": "arm",
    b"04": "arm64",
    b"05": "ppc64",
    b"06": "ppc64le",
    b"11": "s390x",
    b"12": "riscv64",
}
"""Codes of the global header of the Singularity Image Format (sylabs/sif, pkg/sif/arch.go)."""


def _read_architecture(image: Path) -> str | None:
    """Return Go's name of the processor architecture of an image; None if unknown."""
    try:
        with image.open("rb") as file:
            header = file.read(_ARCHITECTURE.stop)
    except (OSError, ValueError):
        return None
    if header[_LAUNCH_BYTES:][: len(_MAGIC)] != _MAGIC:
        return None
    return _ARCHITECTURES.get(header[_ARCHITECTURE])
