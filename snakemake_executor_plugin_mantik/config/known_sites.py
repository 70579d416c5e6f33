"""Public HPC sites whose APIs can be spoken to: what they publish about themselves.

For `smk-mantik init` and `check --connect` only: a run believes nothing of it. URLs and partitions
change; each entry tells where it comes from. Looked up in November 2026.
"""

from dataclasses import dataclass
from typing import Final, Literal

from snakemake_executor_plugin_mantik.config.model import BackendConfig

_JSC: Final = "https://unicore.fz-juelich.de/{}/rest/core"
_JSC_REGISTRY: Final = "https://unicore.fz-juelich.de/FZJ/rest/registries/default_registry"
_JSC_SCRATCH: Final = "files in $SCRATCH that were not used for 90 days are deleted"
_CSCS_TOKENS: Final = (
    "https://auth.cscs.ch/auth/realms/firecrest-clients/protocol/openid-connect/token"
)
_CSCS_SCRATCH: Final = "files in $SCRATCH that were not used for 30 days are deleted"


@dataclass(frozen=True)
class KnownSite:
    """What is public about a site.

    Attributes:
        name: how a config of it is called, and `--site` finds it.
        title: system and centre.
        api: which API it is reached through.
        url: of the API; empty where none is published.
        queues: partitions, the ones for production first.
        architecture: of the nodes' processors as Go names it, where all are of one kind.
        purge: which files the site deletes by itself.
        source: where this is written.
        machine: firecREST's name of the system.
        token_url: issuer of firecREST's tokens.
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


def _jsc(name: str, title: str, queues: str, architecture: str, *, url: bool = True) -> KnownSite:
    source = f"the registry {_JSC_REGISTRY}, https://apps.fz-juelich.de/jsc/hps/{name}/"
    address = _JSC.format(name.upper()) if url else ""
    found = tuple(queues.split())
    return KnownSite(name, title, "unicore", address, found, architecture, _JSC_SCRATCH, source)


def _alps(name: str, platform: str, queues: str, architecture: str, title: str) -> KnownSite:
    return KnownSite(
        name,
        f"{title}, CSCS",
        "firecrest",
        f"https://api.cscs.ch/{platform}/firecrest/v2",
        tuple(queues.split()),
        architecture,
        _CSCS_SCRATCH,
        f"https://docs.cscs.ch/access/firecrest, https://docs.cscs.ch/clusters/{name}",
        machine=name,
        token_url=_CSCS_TOKENS,
    )


KNOWN_SITES: Final = {
    site.name: site
    for site in (
        _jsc("juwels", "JUWELS, JSC", "booster develbooster batch devel", "amd64"),
        _jsc("jureca", "JURECA-DC, JSC", "dc-gpu dc-gpu-devel dc-cpu dc-cpu-devel", "amd64"),
        _jsc("jupiter", "JUPITER, JSC", "booster", "arm64"),
        # It was there in the same way; whether it still is, and under which URL, is not published.
        _jsc("jusuf", "JUSUF, JSC", "batch gpus develgpus", "amd64", url=False),
        _alps("daint", "hpc", "normal debug low", "arm64", "Daint, Alps (HPC platform)"),
        _alps("eiger", "hpc", "normal debug", "amd64", "Eiger, Alps (HPC platform)"),
        _alps("clariden", "ml", "normal debug", "arm64", "Clariden, Alps (ML platform)"),
        _alps("bristen", "ml", "normal", "amd64", "Bristen, Alps (ML platform)"),
        _alps("santis", "cw", "normal debug", "arm64", "Santis, Alps (climate and weather)"),
    )
}
"""By name."""


def known_site(config: BackendConfig) -> KnownSite | None:
    """The known site that a config is for, by API URL and machine."""
    machine = config.firecrest.machine.lower() if config.firecrest else ""
    wanted = (config.api_url, machine)
    return next((site for site in KNOWN_SITES.values() if (site.url, site.machine) == wanted), None)
