"""The system over firecREST's REST API: `/status/...`."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..settings import FirecrestSettings, Partition
from .accounting import USER_ID

_SLURM_VERSION = "22.05.8"
_PROBE_INTERVAL = 120
_HIDDEN = "**********"
_DIRECTIVES = ("#SBATCH --nodes=1", "#SBATCH --time=0-00:15:00")


def directives(settings: FirecrestSettings) -> list[str]:
    """Return the `#SBATCH` lines of transfer jobs, with `{account}` if they need one."""
    return [*_DIRECTIVES, *(["#SBATCH --account={account}"] if settings.account_needed else [])]


def system(
    name: str, roots: Sequence[Path], settings: FirecrestSettings, store_url: str, probed: float
) -> dict[str, Any]:
    """Return a system of `/status/systems`; the first of `roots` is the default work directory.

    The keys are in two styles, as in the real answer.
    """
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(probed)) + "Z"
    healthy = {"lastChecked": moment, "latency": 0.01, "healthy": True, "message": None}
    services: list[dict[str, Any]] = [
        {"serviceType": "scheduler", **healthy},
        {"serviceType": "ssh", **healthy},
        *({"serviceType": "filesystem", **healthy, "path": str(root)} for root in roots),
    ]
    transfer = None
    if settings.transfer_method == "s3":
        services.append({"serviceType": "s3", **healthy})
        transfer = {
            "serviceType": "s3",
            "name": "sandbox-store",
            "privateUrl": _HIDDEN,
            "publicUrl": store_url,
            "accessKeyId": _HIDDEN,
            "secretAccessKey": _HIDDEN,
            "region": "sandbox",
            "ttl": 604_800,
            "tenant": None,
            "multipart": {
                "use_split": False,
                "max_part_size": settings.max_part_size,
                "parallel_runs": 3,
                "tmp_folder": "tmp",
            },
            "bucketLifecycleConfiguration": {"days": 10},
        }
    return {
        "name": name,
        "ssh": {
            "host": "localhost",
            "port": 22,
            "proxyHost": None,
            "proxyPort": None,
            "maxClients": 100,
            "timeout": {
                "connection": 5,
                "login": 5,
                "commandExecution": settings.command_timeout,
                "idleTimeout": 60,
                "keepAlive": 5,
            },
        },
        "scheduler": {
            "type": "slurm",
            "connectionMode": "ssh",
            "version": _SLURM_VERSION,
            "apiUrl": None,
            "apiVersion": None,
            "timeout": 10,
        },
        "servicesHealth": services,
        "probing": {"services": None, "intervalCheck": _PROBE_INTERVAL},
        "fileSystems": [
            {"path": str(root), "dataType": kind, "defaultWorkDir": not index}
            for index, (root, kind) in enumerate(zip(roots, ("users", "scratch"), strict=True))
        ],
        "dataOperation": {
            "datatransfer_jobs_directives": directives(settings),
            "max_ops_file_size": settings.max_file_size,
            "data_transfer": transfer,
        },
    }


def nodes(partitions: Sequence[Partition]) -> list[dict[str, Any]]:
    """Return the nodes: this machine alone, in all partitions, with the largest one's size."""
    name, most = os.uname().nodename, max(partitions, key=lambda partition: partition.cpus)
    return [
        {
            "sockets": 2,
            "cores": 2,
            "threads": 2,
            "cpus": most.cpus,
            "cpuLoad": 0.0,
            "freeMemory": most.memory_mib,
            "features": "(null)",
            "name": name,
            "address": name,
            "hostname": name,
            "state": ["IDLE"],
            "partitions": [partition.name for partition in partitions],
            "weight": 1,
            "allocMemory": most.memory_mib,
            "allocCpus": 0,
            "idleCpus": most.cpus,
        }
    ]


def partitions_shown(partitions: Sequence[Partition], *, hidden: bool) -> list[dict[str, Any]]:
    """Return the partitions, also `hidden` ones; the key `partition` holds the state."""
    return [
        {
            "name": partition.name,
            "cpus": partition.cpus * partition.nodes,
            "totalNodes": partition.nodes,
            "partition": "UP" if partition.up else "DOWN",
        }
        for partition in partitions
        if hidden or not partition.hidden
    ]


def user_info(name: str, accounts: Sequence[str]) -> dict[str, Any]:
    """Return the user, the groups and the Slurm accounts."""
    own = {"id": str(USER_ID), "name": name}
    return {
        "user": own,
        "group": own,
        "groups": [own],
        "accounts": [
            {"name": account, "default": not index} for index, account in enumerate(accounts)
        ],
    }
