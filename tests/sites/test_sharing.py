"""What is made at a site is closed to others, and a group's only where the config says so."""

import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.jobs.paths import workspace_below, workspace_root
from snakemake_executor_plugin_mantik.sites.authentication import Password
from snakemake_executor_plugin_mantik.sites.base import Site
from snakemake_executor_plugin_mantik.sites.unicore import UnicoreSite
from tests.support.benches import firecrest_site, in_use


def site_of(box: Sandbox, name: str, **settings: Any) -> Site:
    if name == "hpc2":
        return firecrest_site(box, f"ws-{uuid.uuid4()}", **settings)
    return UnicoreSite(
        "sandbox", box.url("hpc1"), Password(*box.credentials("hpc1")),
        workspace_name=f"ws-{uuid.uuid4()}", settings=SiteSettings.model_validate(settings),
    )  # fmt: skip


async def opened(site: Site) -> Path:
    """The workspace, after a file was put into it and a directory made."""
    async with in_use(site):
        facts = await site.open()
        await site.make_directory(".mantik/tries/1")
        await site.make_directory(".mantik/open")
        for _ in range(2):  # also one that is there, and open
            await site.make_directory(".mantik/open", private=True)
        await site.put(".mantik/open/secrets", b"x", private=True)
        return Path(workspace_root(facts.workspace))


DEEP = workspace_below("")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize(("sharing", "bits"), [("private", 0o700), ("group", 0o750)])
@pytest.mark.parametrize("name", ["hpc1", "hpc2"])
async def test_a_workspace(sandbox: Sandbox, name: str, sharing: str, bits: int) -> None:
    first = await opened(site_of(sandbox, name))
    project = first.parent
    before = mode(project)
    project.chmod(before | 0o2000)  # as centres make project directories
    try:
        workspace = await opened(site_of(sandbox, name, Sharing=sharing))
    finally:
        project.chmod(before)
    assert mode(first) == 0o700
    assert mode(workspace) == bits | 0o2000
    assert mode(workspace / DEEP / ".mantik/open") & 0o777 == 0o700
    assert mode(workspace / DEEP / ".mantik/open/secrets") == 0o600


@pytest.mark.parametrize(("sharing", "bits"), [("private", 0o700), ("group", 0o750)])
@pytest.mark.parametrize("name", ["hpc1", "hpc2"])
async def test_in_a_directory_of_the_user(
    sandbox: Sandbox, name: str, sharing: str, bits: int
) -> None:
    own = (await opened(site_of(sandbox, name))).parent / f"own-{uuid.uuid4()}"
    own.mkdir()
    own.chmod(0o755)
    site = site_of(sandbox, name, Sharing=sharing, Workspace=str(own))
    assert await opened(site) == own
    assert mode(own) == 0o755, "it is his"
    assert mode(own / DEEP / ".mantik") == bits
    os.chmod(own / DEEP / ".mantik", 0o711)
    await opened(site_of(sandbox, name, Workspace=str(own)))
    assert mode(own / DEEP / ".mantik") == 0o711, "and what he changed stays"
