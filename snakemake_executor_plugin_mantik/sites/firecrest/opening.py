"""Opening of a site: the server's system, the user's identity there, the workspace's path."""

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import SiteNotFound, SiteRejected, UserError

from ..base import WORKSPACES, QueueLimits
from .answers import malformed_answer
from .connection import JOB_CHANNELS, FirecrestConnection
from .script import SchedulerName

_MAX_OPS_BYTES: Final = 5 << 20
"""Largest file that is transferred directly if a server reports no limit (its own default)."""
_LEAST_BYTES: Final = 4 << 10
_DIRECT_BYTES: Final = 32 << 20
"""A server's limit is clamped to the range of these two: such files are in memory as a whole."""

_LISTS_BY_TIME: Final = (2, 6)
"""First version whose lists of jobs can be limited to a span of time (its CHANGELOG)."""

_PREFERRED: Final = ("scratch", "project", "users", "store")
_ZONE_STEP_S: Final = 900


@dataclass(frozen=True)
class FileSystem:
    """A file system of a system; users have directories with their names below `path`.

    `kind` is `scratch`, `users`, `project`, `store`, ... The server puts its own files in the
    default.
    """

    path: str
    kind: str
    default: bool


@dataclass(frozen=True)
class FirecrestSystem:
    """One system, as the server describes it.

    Attributes:
        server: product and version.
        direct_bytes: largest file that is uploaded directly.
        transfer: method for larger ones (`s3`, `streamer`, `wormhole`), empty if there is none.
        directives: first lines of its transfer jobs; may hold `{account}`.
        unhealthy: the services that the server reports as unhealthy, a line each.
    """

    name: str
    scheduler: SchedulerName
    server: str
    file_systems: tuple[FileSystem, ...]
    direct_bytes: int = _MAX_OPS_BYTES
    transfer: str = ""
    directives: tuple[str, ...] = ()
    unhealthy: tuple[str, ...] = ()

    @property
    def lists_by_time(self) -> bool:
        """Whether lists of jobs can be limited by time; an unknown version counts as new."""
        version = re.search(r"(\d{1,4})\.(\d{1,4})\.\d", self.server)
        return version is None or tuple(map(int, version.groups())) >= _LISTS_BY_TIME

    @property
    def filters_jobs(self) -> bool:
        """Whether the scheduler can list jobs by name; PBS lists all, and the server filters."""
        return self.scheduler == "slurm" and self.lists_by_time


@dataclass(frozen=True)
class FirecrestUser:
    """The user's login name and accounts at the site, as far as the server reports them.

    `account` is the scheduler's default account.
    """

    name: str
    account: str = ""
    accounts: tuple[str, ...] = ()


async def read_system(connection: FirecrestConnection, name: str) -> FirecrestSystem:
    """Read the system `name` from the server; names are case-insensitive.

    Raises:
        UserError: the server is not a firecREST v2, or has no such system.
        SiteRejected: the system's scheduler is not supported.
    """
    where = f"site {connection.site}"
    try:
        answer, version = await connection.ask("status", lambda client: client.status())
    except SiteNotFound as error:
        raise UserError(
            f"there is no firecREST v2 at {connection.base}: it has no /status/systems",
            where=where,
            do="Check ApiUrl: use the path for version 2 from the site's documentation",
        ) from error
    systems = answer.get("systems")
    if not isinstance(systems, list):
        if "out" in answer:  # version 1 answers so on the same path
            raise UserError(
                f"{connection.base} is firecREST version 1, which is not supported",
                where=where,
                do="Set the URL of the site's firecREST v2 as ApiUrl, and the system's name there "
                "as Machine",
            )
        raise malformed_answer("/status/systems", connection.site)
    found = {str(s["name"]): s for s in systems if isinstance(s, Mapping) and s.get("name")}
    for known, description in found.items():
        if known.lower() == name.lower():
            return parse_system(description, version, connection.site)
    raise UserError(
        f"the server knows no system {name!r}, only {', '.join(sorted(found)) or 'none at all'}",
        where=where,
        do="Set Machine in the backend config to one of the server's systems",
    )


def parse_system(description: Mapping[str, Any], version: str, site: str) -> FirecrestSystem:
    """Parse the server's description of a system; its keys are in two spellings."""
    operation = _mapping(_pick(description, "dataOperation", "data_operation"))
    transfer = _mapping(_pick(operation, "data_transfer", "dataTransfer"))
    directives = _pick(operation, "datatransfer_jobs_directives", "datatransferJobsDirectives")
    largest = _pick(operation, "max_ops_file_size", "maxOpsFileSize")
    kind = str(_mapping(description.get("scheduler")).get("type", "")).lower()
    scheduler: SchedulerName
    if kind == "slurm":
        scheduler = "slurm"
    elif kind == "pbs":
        scheduler = "pbs"
    else:
        raise SiteRejected(
            f"the system's scheduler {kind!r} is not supported",
            where=f"site {site}",
            do="Use a system with Slurm or PBS",
        )
    systems = _pick(description, "fileSystems", "file_systems")
    return FirecrestSystem(
        name=str(description["name"]),
        scheduler=scheduler,
        server=f"firecREST {version or 'v2'}",
        file_systems=tuple(
            FileSystem(
                path=posixpath.normpath(str(found["path"])),
                kind=str(_pick(found, "dataType", "data_type") or ""),
                default=bool(_pick(found, "defaultWorkDir", "default_work_dir")),
            )
            for found in (systems if isinstance(systems, list) else [])
            if isinstance(found, Mapping) and str(found.get("path", "")).startswith("/")
        ),
        direct_bytes=min(max(largest, _LEAST_BYTES), _DIRECT_BYTES)
        if isinstance(largest, int)
        else _MAX_OPS_BYTES,
        transfer=str(_pick(transfer, "serviceType", "service_type") or ""),
        directives=tuple(map(str, directives)) if isinstance(directives, list) else (),
        unhealthy=tuple(_unhealthy(_pick(description, "servicesHealth", "services_health"))),
    )


async def read_user(connection: FirecrestConnection, system: str) -> FirecrestUser:
    """Read the user's login name and accounts at the system.

    An empty list of accounts is asked for once more: Slurm's database may have been away.
    """

    async def ask() -> Mapping[str, Any]:
        return await connection.ask(
            "userinfo", lambda client: client.userinfo(system), channels=JOB_CHANNELS
        )

    answer = await ask()
    if answer.get("accounts") == []:
        answer = await ask()
    user = answer.get("user")
    name = user.get("name") if isinstance(user, Mapping) else user
    if not isinstance(name, str) or not name or "/" in name:
        raise malformed_answer("userinfo", connection.site)
    accounts = answer.get("accounts")
    known = [
        account
        for account in (accounts if isinstance(accounts, list) else [])
        if isinstance(account, Mapping) and account.get("name")
    ]
    default = next((str(account["name"]) for account in known if account.get("default")), "")
    names = dict.fromkeys(str(account["name"]) for account in known)
    return FirecrestUser(name, default, tuple(names))


def list_known_defects(system: FirecrestSystem) -> Iterator[str]:
    """List a system's reported problems, and the known defects of its server's version."""
    yield from system.unhealthy
    if not system.lists_by_time:
        yield "lists all jobs of a week at each look (before 2.6): slow for users with many jobs"
    if system.transfer == "streamer":
        yield "moves large files with its streamer, which has been seen to append bytes to them"


async def read_partitions(connection: FirecrestConnection, system: str) -> dict[str, QueueLimits]:
    """Read the system's partitions; of their limits firecREST reports the number of nodes only."""
    answer = await connection.ask("partitions", lambda client: client.all_partitions(system))
    queues = {}
    for found in answer if isinstance(answer, list) else []:
        if isinstance(found, Mapping) and found.get("name"):
            nodes = _pick(found, "totalNodes", "total_nodes")
            known = isinstance(nodes, int) and nodes > 0
            queues[str(found["name"])] = QueueLimits(nodes=(1, nodes) if known else None)
    return queues


def choose_workspace(
    file_systems: Sequence[FileSystem],
    *,
    user: str,
    site: str,
    name: str,
    workspace: str | None,
    storage: str | None,
) -> str:
    """Choose the workspace's absolute path.

    `workspace` is its path as configured: absolute, or relative to the directory that `user` has in
    each file system; without it the workspace is `mantik/name` there. `storage` is the configured
    kind or path of a file system; by default the first of the kinds scratch, project, users and
    store that exists, else the server's default.

    Raises:
        SiteRejected: no file system fits, or `workspace` lies outside all of them or, if it is
            relative, outside the user's directory.
    """
    if workspace and workspace.startswith("/"):
        path = posixpath.normpath(workspace)
        if not any(_inside(path, found.path) for found in file_systems):
            raise _no_storage(f"{path} is in none of the file systems", site, file_systems)
        return path
    chosen = _chosen(file_systems, storage)
    if chosen is None:
        what = f"there is no file system {storage!r}" if storage else "there is no file system"
        raise _no_storage(what, site, file_systems)
    own = f"{chosen.path.rstrip('/')}/{user}"
    path = posixpath.normpath(f"{own}/{workspace or f'{WORKSPACES}/{name}'}")
    if not path.startswith(f"{own}/"):
        raise SiteRejected(f"the workspace {workspace!r} lies outside {own}", where=site)
    return path


def zone_offset(told: str, modified: int) -> float:
    """Return the seconds that the site's local time is ahead of UTC.

    firecREST lists times in local time without a zone; `told` and `modified` are the times of the
    same file, local and since the epoch.
    """
    difference = local_time(told) - modified
    return float(round(difference / _ZONE_STEP_S) * _ZONE_STEP_S)


def local_time(told: str) -> float:
    """Return the seconds since the epoch of a listing's time as if it were UTC."""
    return datetime.fromisoformat(told).replace(tzinfo=UTC).timestamp()


def _chosen(file_systems: Sequence[FileSystem], storage: str | None) -> FileSystem | None:
    if storage:
        wanted = storage.lower().rstrip("/")
        for found in file_systems:
            if wanted in (found.kind.lower(), found.path.lower(), found.path.lower().strip("/")):
                return found
        return None
    for kind in _PREFERRED:
        of_kind = [found for found in file_systems if found.kind.lower() == kind]
        if of_kind:
            return next((found for found in of_kind if found.default), of_kind[0])
    return next((found for found in file_systems if found.default), next(iter(file_systems), None))


def _inside(path: str, root: str) -> bool:
    return path.startswith(f"{root.rstrip('/')}/")


def _no_storage(what: str, site: str, file_systems: Sequence[FileSystem]) -> SiteRejected:
    there = ", ".join(f"{found.kind} ({found.path})" for found in file_systems) or "none"
    return SiteRejected(
        f"{what}; file systems there: {there}",
        where=f"site {site}",
        do="Set Storage or Workspace in the backend config to one of these",
    )


def _unhealthy(services: object) -> Iterator[str]:
    for service in services if isinstance(services, list) else []:
        if isinstance(service, Mapping) and service.get("healthy") is False:
            kind = _pick(service, "serviceType", "service_type") or "a service"
            path = f" {service['path']}" if service.get("path") else ""
            reason = " ".join(str(service.get("message") or "no reason given").split())
            yield f"reports {kind}{path} as unhealthy: {reason}"


def _pick(found: Mapping[str, Any], *names: str) -> Any:
    return next((found[name] for name in names if found.get(name) is not None), None)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
