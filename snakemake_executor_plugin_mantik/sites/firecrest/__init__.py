"""Sites behind firecREST v2: their opening, and the properties of their servers."""

import asyncio
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast, get_args

from ...common.errors import SiteNotFound, SiteRejected, SiteUnreachable, UserError
from ...jobs.paths import workspace_below
from ..base import WORKSPACES, FreeNode, QueueLimits, SiteDetails, SiteFacts
from .connection import (
    MAX_OPS_BYTES,
    FileSystem,
    FirecrestConnection,
    FirecrestOpened,
    FirecrestSystem,
)
from .files import FirecrestFiles, read_user
from .script import JOBS, SchedulerName

__all__ = ["FirecrestSite"]

_LEAST_BYTES: Final = 4 << 10
_DIRECT_BYTES: Final = 32 << 20
"""A server's limit is clamped to the range of these two: such files are in memory as a whole."""
_TAKES_JOBS: Final = {"IDLE", "MIXED"}
"""States of nodes on which jobs start; others, such as DRAIN and PLANNED, come in addition."""
_PREFERRED: Final = ("scratch", "project", "users", "store")


class FirecrestSite(FirecrestFiles):
    """One workspace at one system behind a firecREST server; implements `Site`."""

    async def open(self, *, make: bool = True) -> SiteFacts:
        system = await read_system(self._connection, self._machine)
        user, queues = await asyncio.gather(
            read_user(self._connection, system.name), read_partitions(self._connection, system.name)
        )
        root = choose_workspace(
            system.file_systems,
            user=user.name,
            where=self._where,
            name=self._workspace_name,
            workspace=self._settings.workspace,
            storage=self._settings.storage,
        )
        if not all(self.can_carry(part) for part in root.strip("/").split("/")):
            raise self._connection.refusal(
                f"firecREST cannot carry the workspace's path {root!r}",
                "Set Workspace in the backend config to a plain path",
            )
        workspace = workspace_below(root)
        self._opened = FirecrestOpened(workspace.rstrip("/"), system, user)
        if make:
            await self.make_workspace()
        return SiteFacts(
            workspace,
            system.server,
            user.name,
            queues,
            accounts=user.accounts,
            orders_jobs=True,
            upload_bytes=system.direct_bytes,
        )

    async def free_nodes(self) -> list[FreeNode] | None:
        """See `Site.free_nodes`.

        All users' jobs would tell more, but cost a large site's scheduler seconds.
        """
        path = f"/status/{self._open.system.name}/nodes"
        try:
            answer = await self._connection.get("nodes", path)
        except (SiteNotFound, SiteRejected):
            return None
        except SiteUnreachable as error:
            if error.status is None:
                raise
            return None  # the server answers; the scheduler took too long
        listed = answer.get("nodes")
        return [*map(_free_node, listed)] if isinstance(listed, list) else None

    async def describe(self) -> SiteDetails:
        opened = self._open
        return SiteDetails(
            accounts=dict.fromkeys(opened.user.accounts, ""),
            default_account=opened.user.account,
            scheduler=opened.system.scheduler,
            notes=tuple(list_known_defects(opened.system)),
        )

    async def forget(self, ids: Sequence[str], *, succeeded: bool = False) -> None:
        if succeeded and self._open.system.scheduler == "slurm":
            return
        known = [job_id for job_id in ids if job_id.isalnum()]
        await self._each(known, lambda job: self.remove(f"{JOBS}/{job}.out"))


async def read_system(connection: FirecrestConnection, name: str) -> FirecrestSystem:
    """Read the system `name` from the server; names are case-insensitive.

    Raises:
        UserError: the server is not a firecREST v2, or has no such system.
        SiteRejected: the system's scheduler is not supported.
    """
    where = connection.where
    path = "/status/systems"
    try:
        response = await connection.ask("status", "GET", path)
    except SiteNotFound as error:
        raise UserError(
            f"there is no firecREST v2 at {connection.base}: it has no /status/systems",
            where=where,
            do="Check ApiUrl: use the path for version 2 from the site's documentation",
        ) from error
    answer = connection.json_of(response)
    version = str(response.headers.get("f7t-appversion", ""))
    systems = answer.get("systems")
    if not isinstance(systems, list):
        if "out" in answer:  # version 1 answers so on the same path
            raise UserError(
                f"{connection.base} is firecREST version 1, which is not supported",
                where=where,
                do="Set the URL of the site's firecREST v2 as ApiUrl, and the system's name there "
                "as Machine",
            )
        raise connection.nonsense(path)
    found = {str(s["name"]): s for s in systems if isinstance(s, Mapping) and s.get("name")}
    for known, description in found.items():
        if known.lower() == name.lower():
            return parse_system(description, version, where)
    raise UserError(
        f"the server knows no system {name!r}, only {', '.join(sorted(found)) or 'none at all'}",
        where=where,
        do="Set Machine in the backend config to one of the server's systems",
    )


def parse_system(description: Mapping[str, Any], version: str, where: str) -> FirecrestSystem:
    """Parse the server's description of a system; its keys are in two spellings."""
    operation = _mapping(_pick(description, "data_operation"))
    transfer = _mapping(_pick(operation, "data_transfer"))
    directives = _pick(operation, "datatransfer_jobs_directives")
    largest = _pick(operation, "max_ops_file_size")
    kind = str(_mapping(description.get("scheduler")).get("type", "")).lower()
    if kind not in get_args(SchedulerName):
        raise SiteRejected(
            f"the system's scheduler {kind!r} is not supported",
            where=where,
            do="Use a system with Slurm or PBS",
        )
    systems = _pick(description, "file_systems")
    return FirecrestSystem(
        name=str(description["name"]),
        scheduler=cast(SchedulerName, kind),
        server=f"firecREST {version or 'v2'}",
        file_systems=tuple(
            FileSystem(
                path=posixpath.normpath(str(found["path"])),
                kind=str(_pick(found, "data_type") or ""),
                default=bool(_pick(found, "default_work_dir")),
            )
            for found in (systems if isinstance(systems, list) else [])
            if isinstance(found, Mapping) and str(found.get("path", "")).startswith("/")
        ),
        direct_bytes=min(max(largest, _LEAST_BYTES), _DIRECT_BYTES)
        if isinstance(largest, int)
        else MAX_OPS_BYTES,
        transfer=str(_pick(transfer, "service_type") or ""),
        directives=tuple(map(str, directives)) if isinstance(directives, list) else (),
        unhealthy=tuple(_unhealthy(_pick(description, "services_health"))),
    )


def list_known_defects(system: FirecrestSystem) -> Iterator[str]:
    """List a system's reported problems, and the known defects of its server's version."""
    yield from system.unhealthy
    if not system.lists_by_time:
        yield "lists all jobs of a week at each look (before 2.6): slow for users with many jobs"
    if system.transfer == "streamer":
        yield "moves large files with its streamer, which has been seen to append bytes to them"


async def read_partitions(connection: FirecrestConnection, system: str) -> dict[str, QueueLimits]:
    """Read the system's partitions; of their limits firecREST reports the number of nodes only.

    Servers since 2.5.4 leave hidden ones out by default.
    """
    path = f"/status/{system}/partitions"
    answer = await connection.get("partitions", path, {"show_hidden": "true"})
    listed = answer.get("partitions")
    queues = {}
    for found in listed if isinstance(listed, list) else []:
        if isinstance(found, Mapping) and found.get("name"):
            nodes = _pick(found, "total_nodes")
            known = isinstance(nodes, int) and nodes > 0
            queues[str(found["name"])] = QueueLimits(nodes=(1, nodes) if known else None)
    return queues


def _free_node(listed: object) -> FreeNode:
    """Return what of a node is free: nothing if it has a state that keeps jobs of others away."""
    node = _mapping(listed)
    said, queues, cpus = node.get("state"), node.get("partitions"), _pick(node, "idle_cpus")
    states = {said} if isinstance(said, str) else set(said if isinstance(said, list) else ())
    takes = states and {str(state).upper() for state in states} <= _TAKES_JOBS
    return FreeNode(
        frozenset(map(str, queues if isinstance(queues, list) else ())),
        cpus if takes and isinstance(cpus, int) else 0,
    )


def choose_workspace(
    file_systems: Sequence[FileSystem],
    *,
    user: str,
    where: str,
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
        if not any(path.startswith(f"{each.path.rstrip('/')}/") for each in file_systems):
            raise _no_storage(f"{path} is in none of the file systems", where, file_systems)
        return path
    chosen = _chosen(file_systems, storage)
    if chosen is None:
        what = f"there is no file system {storage!r}" if storage else "there is no file system"
        raise _no_storage(what, where, file_systems)
    own = f"{chosen.path.rstrip('/')}/{user}"
    path = posixpath.normpath(f"{own}/{workspace or f'{WORKSPACES}/{name}'}")
    if not path.startswith(f"{own}/"):
        raise SiteRejected(f"the workspace {workspace!r} lies outside {own}", where=where)
    return path


def _chosen(file_systems: Sequence[FileSystem], storage: str | None) -> FileSystem | None:
    if storage:
        wanted = storage.lower().rstrip("/")
        for found in file_systems:
            if wanted in (found.kind.lower(), found.path.lower(), found.path.lower().strip("/")):
                return found
        return None
    ranks = {kind: rank for rank, kind in enumerate(_PREFERRED)}
    return min(
        file_systems,
        key=lambda each: (ranks.get(each.kind.lower(), len(ranks)), not each.default),
        default=None,
    )


def _no_storage(what: str, where: str, file_systems: Sequence[FileSystem]) -> SiteRejected:
    there = ", ".join(f"{found.kind} ({found.path})" for found in file_systems) or "none"
    return SiteRejected(
        f"{what}; file systems there: {there}",
        where=where,
        do="Set Storage or Workspace in the backend config to one of these",
    )


def _unhealthy(services: object) -> Iterator[str]:
    for service in services if isinstance(services, list) else []:
        if isinstance(service, Mapping) and service.get("healthy") is False:
            kind = _pick(service, "service_type") or "a service"
            path = f" {service['path']}" if service.get("path") else ""
            reason = " ".join(str(service.get("message") or "no reason given").split())
            yield f"reports {kind}{path} as unhealthy: {reason}"


def _pick(found: Mapping[str, Any], name: str) -> Any:
    """Return a value by its name, which servers write as `two_words` or as `twoWords`."""
    first, *more = name.split("_")
    other = found.get("".join([first, *map(str.title, more)]))
    return found.get(name) if other is None else other


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
