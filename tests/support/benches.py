"""Sites for the contract suite: each bench makes sites that share one workspace of one server.

A new kind of site joins the suite with a fixture that yields a `Bench`, and its name in `BENCHES`.
"""

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import pytest

from hpc_sandbox.firecrest.site import FirecrestServer as FirecrestSandbox
from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.config.settings import SiteSettings, Timing
from snakemake_executor_plugin_mantik.sites.authentication import (
    Bearer,
    ClientCredentials,
    Credential,
    Password,
)
from snakemake_executor_plugin_mantik.sites.base import Site, SiteFacts
from snakemake_executor_plugin_mantik.sites.firecrest import FirecrestSite
from snakemake_executor_plugin_mantik.sites.firecrest.connection import (
    FirecrestOpened,
    FirecrestSystem,
    FirecrestUser,
)
from snakemake_executor_plugin_mantik.sites.rest import Connection
from snakemake_executor_plugin_mantik.sites.unicore import UnicoreSite
from snakemake_executor_plugin_mantik.sites.unicore.connection import UnicoreOpened
from tests.real.centre import USER as CENTRE_USER
from tests.real.centre import Centre, firecrest, tsi
from tests.real.centre.firecrest import Firecrest
from tests.support.clusters import Cluster, SandboxCluster, SlurmCluster
from tests.support.ports import free_port
from tests.support.unicoreserver import PASSWORD, USER, UnicoreX

BENCHES = [
    "sandbox_bench",
    "sandbox_firecrest_bench",
    pytest.param("tsi_bench", marks=pytest.mark.software(tsi.SOFTWARE)),
    pytest.param("firecrest_bench", marks=pytest.mark.software(firecrest.SOFTWARE)),
]
"""Fixtures that the contract suite runs with: a sandbox and a real server of each API."""

_S = TypeVar("_S", bound=Site | Connection)


@dataclass(frozen=True)
class Bench:
    """Makes sites of one kind.

    Attributes:
        site: a new object for the bench's server and workspace.
        stranger: one whose credentials the server does not take.
        away: one whose server is not there.
        cluster: the scheduler behind the server.
    """

    site: Callable[[], Site]
    stranger: Callable[[], Site]
    away: Callable[[], Site]
    cluster: Cluster


@asynccontextmanager
async def in_use(made: _S) -> AsyncIterator[_S]:
    try:
        yield made
    finally:
        await made.close()


def any_site(
    api: str, url: str, credential: Credential, settings: SiteSettings | None = None
) -> UnicoreSite | FirecrestSite:
    """A site at `url`, whatever is there."""
    given = settings or SiteSettings()
    if api == "unicore":
        return UnicoreSite("a", url, credential, workspace_name="ws", settings=given)
    return FirecrestSite("a", url, credential, "ws", given, machine="daint")


async def open_and_close(site: Site) -> SiteFacts:
    """What a site tells when it opens."""
    async with in_use(site):
        return await site.open()


def unicore_site(
    server: UnicoreX,
    workspace: str,
    *,
    url: str | None = None,
    credential: Credential | None = None,
    scheduler: Literal["slurm", "none"] = "slurm",
    **settings: object,
) -> UnicoreSite:
    """A site of the test server; further `settings` by their names in the config, None: not set."""
    given = {"CAFile": str(server.ca_file), "Scheduler": scheduler, **settings}
    values = {key: value for key, value in given.items() if value is not None}
    return UnicoreSite(
        "unicorex", url or server.url, credential or Password(USER, PASSWORD),
        workspace_name=workspace, settings=SiteSettings.model_validate(values),
    )  # fmt: skip


def site_at(url: str, credential: Credential, **timing: float) -> UnicoreSite:
    """A site of a server that is not asked when it opens; `timing` as in `Timing`."""
    settings = SiteSettings().model_copy(update={"timing": Timing(**timing)})  # type: ignore[arg-type]
    site = UnicoreSite("parrot", url, credential, workspace_name="ws", settings=settings)
    site._opened = UnicoreOpened("ws", "WORK", "", {})
    return site


def firecrest_site_at(url: str, credential: Credential, **timing: float) -> FirecrestSite:
    """The same behind firecREST."""
    settings = SiteSettings().model_copy(update={"timing": Timing(**timing)})  # type: ignore[arg-type]
    site = FirecrestSite("parrot", url, credential, "ws", settings, machine="hpc")
    site._opened = FirecrestOpened(
        "/scratch/me/ws",
        FirecrestSystem("hpc", "slurm", "firecREST 2.6.0", ()),
        FirecrestUser("me"),
    )
    return site


@pytest.fixture
async def facts(made: Site) -> AsyncIterator[SiteFacts]:
    """What the site that the module's fixture `made` gives tells when it opens."""
    async with in_use(made):
        yield await made.open()


@pytest.fixture
def site(made: Site, facts: SiteFacts) -> Site:
    del facts
    return made


def _bench(make: Callable[..., Site], wrong: Credential, url: str, cluster: Cluster) -> Bench:
    """Sites as `make` makes them; `url` is one of a server whose port is to be filled in."""
    nobody = url.format(free_port())
    return Bench(make, lambda: make(credential=wrong), lambda: make(url=nobody), cluster)


def _slurm(centre: Centre) -> Cluster:
    return SlurmCluster(centre.directory, centre.environment, CENTRE_USER)


@pytest.fixture
def tsi_bench(tsi_unicorex: UnicoreX, centre: Centre) -> Bench:
    make = partial(unicore_site, tsi_unicorex, f"ws-{uuid.uuid4()}")
    nobody = "https://localhost:{}/rest/core"
    return _bench(make, Password(USER, "wrong"), nobody, _slurm(centre))


@pytest.fixture
def sandbox_bench(sandbox: Sandbox) -> Bench:
    user, password = sandbox.credentials("hpc1")
    workspace, settings = f"ws-{uuid.uuid4()}", SiteSettings()

    def site(url: str = sandbox.url("hpc1"), credential: Credential | None = None) -> UnicoreSite:
        right = credential or Password(user, password)
        return UnicoreSite("sandbox", url, right, workspace_name=workspace, settings=settings)

    nobody = "http://127.0.0.1:{}/rest/core"
    return _bench(site, Password(user, "wrong"), nobody, SandboxCluster(sandbox, "hpc1"))


def firecrest_site(
    sandbox: Sandbox,
    workspace: str,
    *,
    url: str | None = None,
    credential: Credential | None = None,
    name: str = "hpc2",
    **settings: object,
) -> FirecrestSite:
    """A firecREST site of the sandbox; further `settings` by their names in the config."""
    served = sandbox.site(name)
    assert isinstance(served, FirecrestSandbox)
    client_id, secret = sandbox.credentials(name)
    return FirecrestSite(
        name,
        url or sandbox.url(name),
        credential or ClientCredentials(served.token_url, client_id, secret),
        workspace_name=workspace,
        settings=SiteSettings.model_validate(settings),
        machine=name,
    )


@pytest.fixture
def sandbox_firecrest_bench(sandbox: Sandbox) -> Bench:
    make = partial(firecrest_site, sandbox, f"ws-{uuid.uuid4()}")
    return _bench(make, Bearer("wrong"), "http://127.0.0.1:{}", SandboxCluster(sandbox, "hpc2"))


def real_firecrest_site(
    server: Firecrest,
    workspace: str,
    *,
    url: str | None = None,
    credential: Credential | None = None,
    account: str | None = None,
    **settings: object,
) -> FirecrestSite:
    """A site of a real firecREST; further `settings` by their names in the config."""
    return FirecrestSite(
        "fire",
        url or server.url,
        credential or ClientCredentials(server.token_url, firecrest.CLIENT, firecrest.SECRET),
        workspace_name=workspace,
        settings=SiteSettings.model_validate(settings),
        machine=firecrest.SYSTEM,
        account=account,
    )


@pytest.fixture
def firecrest_bench(real_firecrest: Firecrest, centre: Centre) -> Bench:
    make = partial(real_firecrest_site, real_firecrest, f"ws-{uuid.uuid4()}")
    return _bench(make, Bearer("wrong"), "http://127.0.0.1:{}", _slurm(centre))
