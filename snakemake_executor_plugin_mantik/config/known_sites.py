"""Public information about HPC sites with a supported API.

Used only for `smk-mantik init`, `check --connect` and core hours; jobs do not depend on it. URLs
and partitions change, so each entry names its source. Looked up in November 2026.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from .model import BackendConfig

_JSC: Final = "https://unicore.fz-juelich.de/{}/rest/core"
_JSC_REGISTRY: Final = "https://unicore.fz-juelich.de/FZJ/rest/registries/default_registry"
_JSC_SCRATCH: Final = "files in $SCRATCH that were not used for 90 days are deleted"
_CSCS_TOKENS: Final = (
    "https://auth.cscs.ch/auth/realms/firecrest-clients/protocol/openid-connect/token"
)
_ALPS: Final = {
    "hpc": ("HPC platform", 30),
    "ml": ("ML platform", 14),
    "cw": ("climate and weather", 30),
}
"""CSCS's platforms, and after how many days they delete files."""


@dataclass(frozen=True)
class KnownSite:
    """Public information about a site.

    Attributes:
        name: name for `--site`, and of the config.
        title: system and centre.
        api: the site's API.
        url: URL of the API; empty if none is published.
        queues: partitions, those for production first.
        architecture: Go's name for the nodes' processors, if all are of one kind.
        purge: which files the site deletes by itself.
        source: URLs of this information.
        machine: firecREST's name of the system.
        token_url: issuer of firecREST's tokens.
        cores: cores of one node by partition; an empty name stands for all others. Only for sites
            where a job gets, and is billed for, whole nodes.
    """

    name: str
    title: str
    api: Literal["unicore", "firecrest"]
    url: str
    queues: tuple[str, ...]
    architecture: str
    purge: str
    source: str
    machine: str = ""
    token_url: str = ""
    cores: Mapping[str, int] = field(default_factory=dict)


def _jsc(
    name: str, title: str, queues: str, architecture: str, cores: int, *, url: bool = True
) -> KnownSite:
    source = f"the registry {_JSC_REGISTRY}, https://apps.fz-juelich.de/jsc/hps/{name}/"
    address = _JSC.format(name.upper()) if url else ""
    found = tuple(queues.split())
    return KnownSite(
        name, title, "unicore", address, found, architecture, _JSC_SCRATCH, source,
        cores={"": cores},
    )  # fmt: skip


def _alps(
    name: str, platform: str, queues: str, architecture: str, cores: int | None = None
) -> KnownSite:
    title, days = _ALPS[platform]
    return KnownSite(
        name,
        f"{name.title()}, Alps ({title}), CSCS",
        "firecrest",
        f"https://api.cscs.ch/{platform}/firecrest/v2",
        tuple(queues.split()),
        architecture,
        f"files in $SCRATCH that were not used for {days} days are deleted",
        f"https://docs.cscs.ch/access/firecrest, https://docs.cscs.ch/clusters/{name}",
        machine=name,
        token_url=_CSCS_TOKENS,
        cores=dict.fromkeys(queues.split(), cores) if cores is not None else {},
    )


KNOWN_SITES: Final = {
    site.name: site
    for site in (
        _jsc("juwels", "JUWELS, JSC", "booster develbooster batch devel", "amd64", 48),
        _jsc("jureca", "JURECA-DC, JSC", "dc-gpu dc-gpu-devel dc-cpu dc-cpu-devel", "amd64", 128),
        _jsc("jupiter", "JUPITER, JSC", "booster", "arm64", 288),
        # JUSUF had the same kind of API; whether it still has one, and its URL, is not published.
        _jsc("jusuf", "JUSUF, JSC", "batch gpus develgpus", "amd64", 128, url=False),
        _alps("daint", "hpc", "normal debug low", "arm64", 288),
        _alps("eiger", "hpc", "normal debug", "amd64", 128),
        _alps("clariden", "ml", "normal low debug", "arm64", 288),
        _alps("bristen", "ml", "normal", "amd64"),
        _alps("santis", "cw", "normal debug", "arm64", 288),
    )
}
"""Known sites by name."""


def node_cores(config: BackendConfig, queue: str | None) -> int | None:
    """Return the cores of a node if jobs get whole nodes; None if not, or not known."""
    site = find_known_site(config)
    if site is None:
        return None
    cores = {site.cores.get(name, site.cores.get("")) for name in (queue or "").split(",")}
    return cores.pop() if len(cores) == 1 else None


def find_known_site(config: BackendConfig) -> KnownSite | None:
    """Return the known site of a config, by API URL and machine."""
    machine = config.firecrest.machine.lower() if config.firecrest else ""
    wanted = (config.api_url, machine)
    return next((site for site in KNOWN_SITES.values() if (site.url, site.machine) == wanted), None)
