"""Opening of a site: the user's identity there, the workspace's path, the queues' limits."""

import asyncio
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

from snakemake_executor_plugin_mantik.common.errors import SiteNotFound, SiteRejected

from ..answers import MALFORMED
from ..base import WORKSPACES, QueueLimits
from .connection import UnicoreConnection, not_authorized
from .paths import find_storage

_MOST_STORAGES: Final = 200
"""Maximum number of storages searched for the workspace's."""

_PREFERRED: Final = ("scratch", "work", "project", "home")
_TIME: Final = "%Y-%m-%dT%H:%M:%S%z"
_MIB: Final = 1 << 20
_NO_PROJECTS: Final = ("", "__CURRENT_PROJECT__")
"""Placeholders for a project if the site has no script that reports budgets (UNICORE 11.0.0)."""
_UNKNOWN_BUDGET: Final = "-1"
_CHOICES: Final = {"qos": "QoS", "constraint": "NodeConstraints", "reservation": "Reservation"}
"""Values that a queue may list: fields of `Resources`, and UNICORE's names."""
_IN_ORDER: Final = ("OK", "N/A", "UNKNOWN")


@dataclass(frozen=True)
class UnicoreBase:
    """The server's product and version, and the user's login name, empty if it is not reported."""

    server: str
    user: str


@dataclass(frozen=True)
class UnicoreQueues:
    """The queues' limits, and the names of the resources that each supports."""

    limits: Mapping[str, QueueLimits] = field(default_factory=dict)
    known: Mapping[str, frozenset[str]] = field(default_factory=dict)


async def read_base(connection: UnicoreConnection, site: str) -> UnicoreBase:
    """Read the base URL: the server's version, and the user's login name.

    Raises:
        SiteUnauthorized: the credentials are unknown: the server treats such users as `anonymous`,
            with an empty list of jobs.
    """
    answer = await connection.get("base", "")
    if _role(answer) == "anonymous" and connection.another_token():
        answer = await connection.get("base", "")
    try:
        client, server = answer["client"], answer["server"]
        role = client["role"]["selected"]
        user = client.get("xlogin", {}).get("UID", "")
        version = server["version"]
    except (*MALFORMED, AttributeError) as error:
        raise connection.nonsense("the base URL") from error
    if role == "anonymous":
        raise not_authorized(site, "the site does not know the user, who is anonymous there")
    return UnicoreBase(f"UNICORE/X {version}", str(user))


def _role(answer: Mapping[str, Any]) -> str:
    try:
        return str(answer["client"]["role"]["selected"])
    except MALFORMED:
        return ""


async def read_queues(connection: UnicoreConnection) -> UnicoreQueues:
    """Read the limits of all queues; empty where a server does not report them."""
    urls = _urls(await connection.get("factories", "/factories"), "factories")
    limits: dict[str, QueueLimits] = {}
    known: dict[str, frozenset[str]] = {}
    paths = [f"/factories/{_last(url)}" for url in urls]
    for answer in await asyncio.gather(
        *(connection.get("factories", path, {"fields": "resources"}) for path in paths)
    ):
        resources = answer.get("resources")
        for queue, ranges in (resources if isinstance(resources, dict) else {}).items():
            if isinstance(ranges, dict):
                limits[queue] = queue_limits(ranges)
                known[queue] = frozenset(ranges)
    return UnicoreQueues(limits, known)


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
    answer = await _storage(connection, storage, "usableSpace,freeSpace")
    found = (answer.get(key) for key in ("usableSpace", "freeSpace"))
    return next((n for n in found if isinstance(n, int) and n > 0), None)


async def read_budgets(connection: UnicoreConnection) -> dict[str, str]:
    """Read the user's projects and their remaining budgets; empty if the site reports none.

    The server runs the site's own script for them (`tsi_get_compute_budget`), so it takes a while.
    """
    urls = _urls(await connection.get("factories", "/factories"), "factories")
    found: dict[str, str] = {}
    for url in urls:
        fields = {"fields": "remainingComputeTime"}
        answer = await connection.get("factories", f"/factories/{_last(url)}", fields)
        budgets = answer.get("remainingComputeTime")
        for project, left in (budgets if isinstance(budgets, dict) else {}).items():
            if isinstance(left, dict) and project not in _NO_PROJECTS:
                found[str(project)] = _budget(left)
    return found


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
    connection: UnicoreConnection,
    site: str,
    *,
    name: str,
    workspace: str | None,
    storage: str | None,
) -> tuple[str, str, str]:
    """Return the workspace's storage, its path in it, and its absolute path.

    `workspace` is its path as configured: absolute, or relative to the storage; without it the
    workspace is `mantik/name` there. `storage` is the configured name of the storage, which by
    default `_preferred` chooses for relative paths.

    Raises:
        SiteRejected: no storage holds the workspace, or a relative path leads out of its storage.
    """
    relative = workspace or f"{WORKSPACES}/{name}"
    if storage is not None and not relative.startswith("/"):
        found, mount = await _named_storage(connection, site, storage)
        return found, _within(relative, site), posixpath.join(mount, relative)
    mounts = await read_mounts(connection)
    if storage is not None:
        wanted = _named(storage, list(mounts))
        mounts = {wanted: mounts[wanted]} if wanted is not None else {}
    if relative.startswith("/"):
        located = find_storage(mounts, relative)
        if located is None or not located[1]:
            raise _no_storage(f"no storage holds the workspace {relative}", site, mounts)
        return *located, relative
    preferred = _preferred(mounts)
    if preferred is None:
        raise _no_storage("there is no storage for the workspace", site, mounts)
    return preferred, _within(relative, site), posixpath.join(mounts[preferred], relative)


async def _named_storage(connection: UnicoreConnection, site: str, name: str) -> tuple[str, str]:
    """Find a storage by name: one request if the name is its id, as it is for shared ones."""
    try:
        answer = await _storage(connection, name)
    except SiteNotFound:
        mounts = await read_mounts(connection)
        found = _named(name, list(mounts))
        if found is None:
            raise _no_storage(f"there is no storage {name!r}", site, mounts) from None
        return found, mounts[found]
    return name, _mount(connection, answer)


async def read_mounts(connection: UnicoreConnection) -> dict[str, str]:
    """Return the mount points of the storages that have one."""
    answer = await connection.get("storages", "/storages", {"num": _MOST_STORAGES})
    names = [_last(url) for url in _urls(answer, "storages")]
    answers = await asyncio.gather(*(_storage(connection, name) for name in names))
    return {
        name: _mount(connection, found)
        for name, found in zip(names, answers, strict=True)
        if str(found.get("mountPoint", "")).startswith("/")
    }


async def _storage(
    connection: UnicoreConnection, name: str, fields: str = "mountPoint,resourceStatus"
) -> dict[str, Any]:
    path = f"/storages/{quote(name, safe='')}"
    return await connection.get("storages", path, {"fields": fields})


def _mount(connection: UnicoreConnection, answer: Mapping[str, Any]) -> str:
    mount = answer.get("mountPoint")
    if not isinstance(mount, str) or not mount.startswith("/"):
        raise connection.nonsense("a storage")
    return mount


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


def _within(path: str, site: str) -> str:
    normal = posixpath.normpath(path)
    if normal.startswith("..") or normal == ".":
        raise SiteRejected(f"the workspace {path!r} lies outside its storage", where=site)
    return normal


def _no_storage(what: str, site: str, mounts: Mapping[str, str]) -> SiteRejected:
    there = ", ".join(f"{name} ({mount})" for name, mount in sorted(mounts.items())) or "none"
    return SiteRejected(
        f"{what}; storages there: {there}",
        where=f"site {site}",
        do="Set Storage or Workspace in the backend config to one of these",
    )


def _urls(answer: Mapping[str, Any], key: str) -> list[str]:
    urls = answer.get(key)
    return [str(url) for url in urls] if isinstance(urls, list) else []


def _last(url: str) -> str:
    """Return the id at the end of a URL. The rest is not used: it may have another host name."""
    return url.rstrip("/").rsplit("/", 1)[-1]


def _range(value: object) -> tuple[int, int] | None:
    match = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", str(value))
    return (int(match[1]), int(match[2])) if match else None


def parse_server_time(text: str) -> float:
    """Return the seconds since the epoch of a UNICORE date (`2026-11-24T09:05:54+0000`)."""
    return datetime.fromisoformat(text).timestamp()


def format_server_time(seconds: float) -> str:
    """Format a date in the only form with a time zone that UNICORE accepts."""
    return datetime.fromtimestamp(seconds).astimezone().strftime(_TIME)
