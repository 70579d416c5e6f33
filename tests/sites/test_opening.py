"""What a server tells of itself, quoted from a real one, and what we make of it."""

import asyncio
import json
import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.common.errors import SiteRejected, SiteUnreachable, UserError
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.jobs.paths import workspace_below, workspace_root
from snakemake_executor_plugin_mantik.sites.authentication import Bearer, Password
from snakemake_executor_plugin_mantik.sites.base import QueueLimits, Site
from snakemake_executor_plugin_mantik.sites.firecrest import (
    choose_workspace,
    parse_system,
)
from snakemake_executor_plugin_mantik.sites.firecrest.connection import (
    FileSystem,
    FirecrestConnection,
    FirecrestUser,
    zone_offset,
)
from snakemake_executor_plugin_mantik.sites.firecrest.files import read_user
from snakemake_executor_plugin_mantik.sites.unicore import UnicoreSite, queue_limits
from snakemake_executor_plugin_mantik.sites.unicore.files import find_storage
from tests.support.benches import any_site, firecrest_site, in_use, open_and_close
from tests.support.parrot import Parrot, Say

DAINT: dict[str, Any] = {
    "name": "Daint",
    "ssh": {"host": "login", "timeout": {"connection": 5, "login": 5, "commandExecution": 5}},
    "scheduler": {"type": "slurm", "version": "22.05.8"},
    "fileSystems": [
        {"path": "/users", "dataType": "users", "defaultWorkDir": False},
        {"path": "/scratch/", "dataType": "scratch", "defaultWorkDir": True},
        {"path": "/store", "dataType": "store", "defaultWorkDir": False},
    ],
    "dataOperation": {
        "max_ops_file_size": 1048576,
        "data_transfer": {"serviceType": "s3", "name": "s3", "public_url": "https://store"},
        "datatransfer_jobs_directives": ["#SBATCH --time=0-00:15:00", "#SBATCH -A {account}"],
    },
}
FILE_SYSTEMS = parse_system(DAINT, "2.x.x", "alps").file_systems


def open_at(parrot: Parrot) -> None:
    asyncio.run(open_and_close(any_site("firecrest", parrot.url, Bearer("s3cr3t"))))


def say(answer: object, status: int = 200) -> Say:
    return Say(status, json.dumps(answer).encode(), {"f7t-appversion": "2.x.x"})


def test_version_1_is_told(parrot: Parrot) -> None:
    systems = [{"description": "System ready", "status": "available", "system": "daint"}]
    parrot.answers = [
        say({"description": "List of systems with status and description.", "out": systems})
    ]
    with pytest.raises(UserError, match="version 1") as caught:
        open_at(parrot)
    assert "ApiUrl" in str(caught.value)
    assert len(parrot.asked) == 1


def test_no_firecrest_is_told(parrot: Parrot) -> None:
    parrot.answers = [
        say({"errorType": "error", "message": "Not Found", "causedBy": None, "user": None}, 404)
    ]
    with pytest.raises(UserError, match="no firecREST v2 at"):
        open_at(parrot)


@pytest.mark.parametrize(
    "answer", [Say(404), Say(200, b"<html>", {"Content-Type": "text/html"}), Say(200, b"[]")]
)
def test_a_portal_proves_nothing(parrot: Parrot, answer: Say) -> None:
    parrot.answers = [answer]
    with pytest.raises(SiteUnreachable):
        open_at(parrot)


async def test_an_empty_list_of_accounts_is_asked_for_again(parrot: Parrot) -> None:
    async def read() -> FirecrestUser:
        api = FirecrestConnection("alps", parrot.url, Bearer("s3cr3t"), SiteSettings(), Path())
        async with in_use(api):
            return await read_user(api, "Daint")

    none = say({"user": {"id": "1", "name": "me"}, "accounts": []})
    some = say({"user": {"id": "1", "name": "me"}, "accounts": [{"name": "a", "default": True}]})
    parrot.answers = [none, some]
    assert await read() == FirecrestUser("me", "a", ("a",))
    parrot.asked.clear()
    parrot.answers = [none]
    assert await read() == FirecrestUser("me")
    assert len(parrot.asked) == 2
    nameless = say({"user": {"id": "1", "name": "me"}, "accounts": [{"name": "a"}]})
    parrot.answers = [nameless, some]
    assert await read() == FirecrestUser("me", "a", ("a",))


def test_a_version_2_below_v1_is_one(parrot: Parrot) -> None:
    parrot.answers = [
        say({"systems": [DAINT]}),
        say({"user": {"id": "1", "name": "me"}, "group": {}, "groups": [], "accounts": None}),
        say({"partitions": []}),
        Say(500),
    ]
    with pytest.raises(SiteUnreachable):
        open_at(parrot)
    assert any("/Daint/userinfo" in path for _, path, _ in parrot.asked)


def test_unknown_systems_are_told_with_the_known(parrot: Parrot) -> None:
    parrot.answers = [say({"systems": [{**DAINT, "name": "eiger"}, {**DAINT, "name": "clariden"}]})]
    with pytest.raises(UserError, match="only clariden, eiger"):
        open_at(parrot)


def test_a_system() -> None:
    system = parse_system(DAINT, "2.5.7", "alps")
    assert (system.name, system.scheduler, system.server) == ("Daint", "slurm", "firecREST 2.5.7")
    assert system.file_systems[1] == FileSystem("/scratch", "scratch", True)
    assert (system.direct_bytes, system.transfer) == (1 << 20, "s3")
    assert system.directives[1] == "#SBATCH -A {account}"


def test_a_system_that_says_little() -> None:
    system = parse_system({"name": "x", "scheduler": {"type": "PBS"}}, "", "alps")
    assert (system.scheduler, system.direct_bytes, system.transfer) == ("pbs", 5 << 20, "")
    with pytest.raises(SiteRejected, match="scheduler"):
        parse_system({"name": "x", "scheduler": {"type": "lsf"}}, "", "alps")


@pytest.mark.parametrize(
    ("workspace", "storage", "path"),
    [
        (None, None, "/scratch/me/mantik/ws"),
        (None, "users", "/users/me/mantik/ws"),
        (None, "/STORE/", "/store/me/mantik/ws"),
        ("deep/er", None, "/scratch/me/deep/er"),
        ("deep", "store", "/store/me/deep"),
        ("/store/project/x/", None, "/store/project/x"),
    ],
)
def test_workspaces(workspace: str | None, storage: str | None, path: str) -> None:
    found = choose_workspace(
        FILE_SYSTEMS, user="me", where="site alps", name="ws", workspace=workspace, storage=storage
    )
    assert found == path


@pytest.mark.parametrize(
    ("workspace", "storage"),
    [
        ("/scratchy/x", None),
        ("/", None),
        (None, "nothing"),
        ("../you", None),
        ("/scratch/..", None),
    ],
)
def test_workspaces_that_cannot_be(workspace: str | None, storage: str | None) -> None:
    with pytest.raises(SiteRejected):
        choose_workspace(
            FILE_SYSTEMS,
            user="me",
            where="site alps",
            name="ws",
            workspace=workspace,
            storage=storage,
        )


@pytest.mark.parametrize(
    ("path", "storage", "below"),
    [
        ("/home/me/ws", "HOME", "ws"),
        ("/home/me", "ROOT", "home/me"),
        ("/home/merge", "ROOT", "home/merge"),
    ],
)
def test_storages_of_absolute_paths(path: str, storage: str, below: str) -> None:
    """A workspace cannot be the whole of a storage: one that holds more does as well."""
    assert find_storage({"HOME": "/home/me/", "ROOT": "/"}, path) == (storage, below)


def test_home_where_there_is_no_scratch() -> None:
    found = choose_workspace(
        FILE_SYSTEMS[:1], user="me", where="site alps", name="ws", workspace=None, storage=None
    )
    assert found == "/users/me/mantik/ws"


def test_time_zones() -> None:
    assert zone_offset("2026-11-21T13:20:45", 1795263645) == 3600
    assert zone_offset("2026-11-21T12:20:50", 1795263645) == 0
    assert zone_offset("2026-11-21T06:50:45", 1795263645) == -5.5 * 3600


def test_ranges_and_choices() -> None:
    told = {
        "GPUsPerNode": "0-4",
        "CPUsPerNode": "1-16",
        "Runtime": "60-86400",
        "QoS": ["normal", "short"],
        "MemoryPerNode": "1048576-68719476736",
        "NodeConstraints": ["fast"],
        "Nodes": "1-2",
        "TotalCPUs": "1-32",
    }
    assert queue_limits(told) == QueueLimits(
        runtime_s=(60, 86_400),
        nodes=(1, 2),
        cpus_per_node=(1, 16),
        memory_mib_per_node=(1, 65_536),
        gpus_per_node=(0, 4),
        choices={"qos": ("normal", "short"), "constraint": ("fast",)},
    )


def test_what_is_no_list_of_choices_limits_nothing() -> None:
    assert queue_limits({"QoS": "*", "NodeConstraints": [], "Reservation": None}).choices == {}


# What is made at a site is closed to others, and a group's only where the config says so.


def site_of(box: Sandbox, name: str, **settings: Any) -> Site:
    if name == "hpc2":
        return firecrest_site(box, f"ws-{uuid.uuid4()}", **settings)
    return UnicoreSite(
        "sandbox", box.url("hpc1"), Password(*box.credentials("hpc1")),
        workspace_name=f"ws-{uuid.uuid4()}", settings=SiteSettings.model_validate(settings),
    )  # fmt: skip


async def opened(site: Site) -> Path:
    """The workspace, after a file was put into it and a directory made."""
    async with in_use(site):
        facts = await site.open()
        await site.make_directory(".mantik/attempts/1")
        await site.make_directory(".mantik/open")
        for _ in range(2):  # also one that is there, and open
            await site.make_directory(".mantik/open", private=True)
        await site.put(".mantik/open/secrets", b"x", private=True)
        return Path(workspace_root(facts.workspace))


DEEP = workspace_below("")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize(("sharing", "bits"), [("private", 0o700), ("group", 0o750)])
@pytest.mark.parametrize("name", ["hpc1", "hpc2"])
async def test_a_workspace(sandbox: Sandbox, name: str, sharing: str, bits: int) -> None:
    first = await opened(site_of(sandbox, name))
    project = first.parent
    before = mode(project)
    project.chmod(before | 0o2000)  # as centres make project directories
    try:
        workspace = await opened(site_of(sandbox, name, Sharing=sharing))
    finally:
        project.chmod(before)
    assert mode(first) == 0o700
    assert mode(workspace) == bits | 0o2000
    assert mode(workspace / DEEP / ".mantik/open") & 0o777 == 0o700
    assert mode(workspace / DEEP / ".mantik/open/secrets") == 0o600


@pytest.mark.parametrize(("sharing", "bits"), [("private", 0o700), ("group", 0o750)])
@pytest.mark.parametrize("name", ["hpc1", "hpc2"])
async def test_in_a_directory_of_the_user(
    sandbox: Sandbox, name: str, sharing: str, bits: int
) -> None:
    own = (await opened(site_of(sandbox, name))).parent / f"own-{uuid.uuid4()}"
    own.mkdir()
    own.chmod(0o755)
    site = site_of(sandbox, name, Sharing=sharing, Workspace=str(own))
    assert await opened(site) == own
    assert mode(own) == 0o755, "it is his"
    assert mode(own / DEEP / ".mantik") == bits
    os.chmod(own / DEEP / ".mantik", 0o711)
    await opened(site_of(sandbox, name, Workspace=str(own)))
    assert mode(own / DEEP / ".mantik") == 0o711, "and what he changed stays"
