"""Sites behind UNICORE's REST API: their opening, and the properties of their servers."""

import asyncio
import posixpath
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from ...common.errors import SiteNotFound, SiteRejected, SiteUnauthorized
from ...jobs.paths import workspace_below
from ..base import WORKSPACES, QueueLimits, SiteDetails, SiteFacts
from .connection import UnicoreConnection, UnicoreOpened, last_part, urls_in
from .files import UnicoreFiles, find_storage, mount_of, read_mounts, read_storage

__all__ = ["UnicoreSite"]

_PREFERRED: Final = ("scratch", "work", "project", "home")
_MIB: Final = 1 << 20
_NO_PROJECTS: Final = ("", "__CURRENT_PROJECT__")
"""Placeholders for a project if the site has no script that reports budgets (UNICORE 11.0.0)."""
_UNKNOWN_BUDGET: Final = "-1"
_CHOICES: Final = {"qos": "QoS", "constraint": "NodeConstraints", "reservation": "Reservation"}
"""Values that a queue may list: fields of `Resources`, and UNICORE's names."""
_IN_ORDER: Final = ("OK", "N/A", "UNKNOWN")


class UnicoreSite(UnicoreFiles):
    """One workspace behind one UNICORE server; implements `Site`."""

    async def open(self, *, make: bool = True) -> SiteFacts:
        server, user = await read_base(self._connection)
        queues, (storage, below, root) = await asyncio.gather(
            _of_factories(self._connection, "resources"),
            locate_workspace(
                self._connection,
                name=self._workspace_name,
                workspace=self._settings.workspace,
                storage=self._settings.storage,
            ),
        )
        known = {queue: frozenset(ranges) for queue, ranges in queues.items()}
        self._opened = UnicoreOpened(workspace_below(below), storage, server, known)
        if make:
            await self.make_workspace()
        return SiteFacts(
            workspace_below(root), server, user,
            {queue: queue_limits(ranges) for queue, ranges in queues.items()},
            orders_jobs=self._settings.scheduler != "none",
        )  # fmt: skip

    async def free_nodes(self) -> None:
        """See `Site.free_nodes`: UNICORE knows its own jobs only."""

    async def describe(self) -> SiteDetails:
        free, budgets, notes = await asyncio.gather(
            read_space(self._connection, self._open.storage),
            read_budgets(self._connection),
            read_condition(self._connection),
        )
        return SiteDetails(free_bytes=free, accounts=budgets, notes=tuple(notes))


async def read_base(connection: UnicoreConnection) -> tuple[str, str]:
    """Read the server's product and version, and the user's login name, perhaps empty.

    Raises:
        SiteUnauthorized: the credentials are unknown: the server treats such users as `anonymous`,
            with an empty list of jobs.
    """
    for again in (False, True):
        answer = await connection.get("base", "")
        with connection.parsing("the base URL"):
            client, server = answer["client"], answer["server"]
            role = client["role"]["selected"]
            user = client.get("xlogin", {}).get("UID", "")
            version = server["version"]
        if role != "anonymous":
            return f"UNICORE/X {version}", str(user)
        if again or not connection.another_token():
            break
    raise SiteUnauthorized(
        "the site does not know the user, who is anonymous there",
        where=connection.where,
        do="Check the credentials, and whether this account may use the site",
    )


async def _of_factories(connection: UnicoreConnection, field: str) -> dict[str, Mapping[str, Any]]:
    """Return the objects, by name, that all factories report in a field."""
    urls = urls_in(await connection.get("factories", "/factories"), "factories")
    paths = [f"/factories/{last_part(url)}" for url in urls]
    found: dict[str, Mapping[str, Any]] = {}
    for answer in await asyncio.gather(
        *(connection.get("factories", path, {"fields": field}) for path in paths)
    ):
        named = answer.get(field)
        for name, each in (named if isinstance(named, dict) else {}).items():
            if isinstance(each, dict):
                found[name] = each
    return found


def queue_limits(ranges: Mapping[str, Any]) -> QueueLimits:
    """Parse a queue's limits from UNICORE: ranges as `1-8`, memory in bytes, choices as lists.

    The server accepts only these very values: `Short` and `fast&fast` are not `short` and `fast`.
    """
    memory = _range(ranges.get("MemoryPerNode"))
    listed = {name: ranges.get(word) for name, word in _CHOICES.items()}
    return QueueLimits(
        runtime_s=_range(ranges.get("Runtime")),
        nodes=_range(ranges.get("Nodes")),
        cpus_per_node=_range(ranges.get("CPUsPerNode")),
        memory_mib_per_node=memory and (-(-memory[0] // _MIB), memory[1] // _MIB),
        gpus_per_node=_range(ranges.get("GPUsPerNode")),
        choices={
            name: tuple(map(str, values))
            for name, values in listed.items()
            if isinstance(values, list) and values
        },
    )


async def read_space(connection: UnicoreConnection, storage: str) -> int | None:
    """Return the bytes that the user may write to a storage, where the server knows them."""
    answer = await read_storage(connection, storage, "usableSpace,freeSpace")
    found = (answer.get(key) for key in ("usableSpace", "freeSpace"))
    return next((n for n in found if isinstance(n, int) and n > 0), None)


async def read_budgets(connection: UnicoreConnection) -> dict[str, str]:
    """Read the user's projects and their remaining budgets; empty if the site reports none.

    The server runs the site's own script for them (`tsi_get_compute_budget`), so it takes a while.
    """
    budgets = await _of_factories(connection, "remainingComputeTime")
    return {name: _budget(left) for name, left in budgets.items() if name not in _NO_PROJECTS}


def _budget(left: Mapping[str, Any]) -> str:
    """Format a remaining budget with its unit; empty if the server does not know it."""
    remaining = str(left.get("remaining", _UNKNOWN_BUDGET))
    return "" if remaining == _UNKNOWN_BUDGET else f"{remaining} {left.get('units', '')}".strip()


async def read_condition(connection: UnicoreConnection) -> list[str]:
    """Return the server's problems: submission is disabled, login nodes are not connected."""
    server = (await connection.get("base", "")).get("server")
    condition = server if isinstance(server, dict) else {}
    notes: list[str] = []
    submission = condition.get("jobSubmission")
    if isinstance(submission, dict) and submission.get("enabled") is False:
        notes.append(f"takes no jobs just now: {submission.get('message') or 'no reason given'}")
    links = condition.get("externalConnections")
    for name, state in (links if isinstance(links, dict) else {}).items():
        if str(name).startswith("TSI") and not str(state).startswith(_IN_ORDER):
            notes.append(f"has no connection to the system: {name} {state}")
    return notes


async def locate_workspace(
    connection: UnicoreConnection, *, name: str, workspace: str | None, storage: str | None
) -> tuple[str, str, str]:
    """Return the workspace's storage, its path in it, and its absolute path.

    `workspace` is its path as configured: absolute, or relative to the storage; without it the
    workspace is `mantik/name` there. `storage` is the configured name of the storage, which by
    default `_preferred` chooses for relative paths.

    Raises:
        SiteRejected: no storage holds the workspace, or a relative path leads out of its storage.
    """
    relative = workspace or f"{WORKSPACES}/{name}"
    absolute = relative.startswith("/")
    there: dict[str, str] = {}
    if storage is not None and not absolute:
        # One request if the name is the storage's id, as it is for shared ones.
        with suppress(SiteNotFound):
            there = {storage: mount_of(connection, await read_storage(connection, storage))}
    there = mounts = there or await read_mounts(connection)
    if storage is not None:
        wanted = _named(storage, list(there))
        mounts = {wanted: there[wanted]} if wanted is not None else {}
    if absolute:
        located = find_storage(mounts, relative)
        if located is None or not located[1]:
            what = f"no storage holds the workspace {relative}"
            raise _no_storage(connection, what, mounts)
        return *located, relative
    chosen = _preferred(mounts)
    if chosen is None:
        what = f"there is no storage {storage!r}" if storage else "there is no storage"
        raise _no_storage(connection, what, there)
    inside = posixpath.normpath(relative)
    if inside.startswith("..") or inside == ".":
        raise connection.refusal(f"the workspace {relative!r} lies outside its storage")
    return chosen, inside, posixpath.join(mounts[chosen], relative)


def _named(name: str, storages: list[str]) -> str | None:
    """Find the storage of that name; ids of private storages have a prefix before it."""
    wanted = name.lower()
    exact = [storage for storage in storages if storage.lower() == wanted]
    private = [storage for storage in storages if storage.lower().endswith(f"-{wanted}")]
    return next(iter(exact + private), None)


def _preferred(mounts: Mapping[str, str]) -> str | None:
    """Choose scratch before work, project and home; then any storage."""
    for word in _PREFERRED:
        for storage in sorted(mounts):
            if word in storage.lower():
                return storage
    return min(mounts, default=None)


def _no_storage(
    connection: UnicoreConnection, what: str, mounts: Mapping[str, str]
) -> SiteRejected:
    there = ", ".join(f"{name} ({mount})" for name, mount in sorted(mounts.items())) or "none"
    return connection.refusal(
        f"{what}; storages there: {there}",
        "Set Storage or Workspace in the backend config to one of these",
    )


def _range(value: object) -> tuple[int, int] | None:
    match = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", str(value))
    return (int(match[1]), int(match[2])) if match else None
