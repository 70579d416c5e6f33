"""HPC sites behind REST APIs: the protocol they share, their credentials, and one adapter each."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing them takes long, and most commands need no site
    from ..config.reading import LoadedConfig
    from .authentication import Credential, Issuer
    from .base import Site


def make_site(
    loaded: "LoadedConfig",
    credential: "Credential",
    workspace_name: str,
    *,
    project: Path,
    account: str | None = None,
) -> "Site":
    """Make the site that a backend config describes; send no request before it is opened.

    Args:
        loaded: the backend config.
        credential: from `credentials.find_credentials`.
        workspace_name: name of the workspace's directory, used if its path is not configured.
        project: the project folder; the CA file is relative to it.
        account: the compute budget account for the allocations of pools, and for the jobs that a
            firecREST site runs to transfer files.

    Raises:
        UserError: the CA file cannot be used.
        SiteRejected: the workspace name is not valid.
    """
    config = loaded.config
    shared = loaded.name, config.api_url, credential, workspace_name, config.site
    site: Site
    if config.firecrest is not None:
        from .firecrest import FirecrestSite

        machine = config.firecrest.machine
        site = FirecrestSite(*shared, base=project, machine=machine, account=account)
    else:
        from .unicore import UnicoreSite

        site = UnicoreSite(*shared, base=project)
    from ..config.environment import find_pools
    from .pools import with_pools

    return with_pools(site, find_pools(config, account))


def make_issuer(loaded: "LoadedConfig", project: Path) -> "Issuer":
    """Return the issuer of the site's access tokens, as its backend config describes it.

    A relative CA file is relative to `project`, the project folder.
    """
    from .authentication import Issuer

    config = loaded.config
    return Issuer(
        url=config.firecrest.token_url if config.firecrest else None,
        ca_file=project / config.site.ca_file if config.site.ca_file else None,
        proxy=config.site.proxy,
    )
