"""Public HPC sites whose APIs can be spoken to: what they publish about themselves.

For `smk-mantik init`, `check --connect` and core hours only: no job that is sent depends on it.
URLs and partitions change; each entry tells where it comes from. Looked up in November 2026.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
        cores: of one node, by partition, or under an empty name those of all others. Only where a
            job gets, and is billed for, whole nodes.
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
    name: str,
    platform: str,
    queues: str,
    architecture: str,
    title: str,
    *,
    cores: int | None = None,
) -> KnownSite:
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
        cores=dict.fromkeys(queues.split(), cores) if cores is not None else {},
    )


KNOWN_SITES: Final = {
    site.name: site
    for site in (
        _jsc("juwels", "JUWELS, JSC", "booster develbooster batch devel", "amd64", 48),
        _jsc("jureca", "JURECA-DC, JSC", "dc-gpu dc-gpu-devel dc-cpu dc-cpu-devel", "amd64", 128),
        _jsc("jupiter", "JUPITER, JSC", "booster", "arm64", 288),
        # It was there in the same way; whether it still is, and under which URL, is not published.
        _jsc("jusuf", "JUSUF, JSC", "batch gpus develgpus", "amd64", 128, url=False),
        _alps("daint", "hpc", "normal debug low", "arm64", "Daint, Alps (HPC platform)", cores=288),
        _alps("eiger", "hpc", "normal debug", "amd64", "Eiger, Alps (HPC platform)", cores=128),
        _alps("clariden", "ml", "normal debug", "arm64", "Clariden, Alps (ML platform)", cores=288),
        _alps("bristen", "ml", "normal", "amd64", "Bristen, Alps (ML platform)"),
        _alps(
            "santis", "cw", "normal debug", "arm64", "Santis, Alps (climate and weather)", cores=288
        ),
    )
}
"""By name."""


def node_cores(config: BackendConfig, queue: str | None) -> int | None:
    """The cores of a node that a job gets whole, where that is known of its site and queue."""
    site = find_known_site(config)
    if site is None:
        return None
    return site.cores.get(queue or "", site.cores.get(""))


def find_known_site(config: BackendConfig) -> KnownSite | None:
    """The known site that a config is for, by API URL and machine."""
    machine = config.firecrest.machine.lower() if config.firecrest else ""
    wanted = (config.api_url, machine)
    return next((site for site in KNOWN_SITES.values() if (site.url, site.machine) == wanted), None)
