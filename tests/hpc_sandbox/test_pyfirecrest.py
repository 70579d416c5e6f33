"""The unmodified pyfirecrest, with its blocking and its asyncio client, against the sandbox."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from firecrest import (
    ApiKeyAuth,
    ClientCredentialsAuth,
    ClientsCredentialsException,
    UnexpectedStatusException,
)
from firecrest.FirecrestException import TransferJobFailedException
from firecrest.v2 import AsyncFirecrest, Firecrest

from hpc_sandbox.firecrest.site import FirecrestServer
from hpc_sandbox.server import Sandbox
from tests.support.places import PATIENT
from tests.support.sandbox import wait_for

SYSTEM = "hpc2"

# pyfirecrest completes an upload in a way that httpx does not like.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def authorization(box: Sandbox, secret: str | None = None, **more: Any) -> Any:
    site = box.site(SYSTEM)
    assert isinstance(site, FirecrestServer)
    client_id, right = box.credentials(SYSTEM)
    return ClientCredentialsAuth(
        client_id, secret or right, site.token_url, min_token_validity=60, **more
    )


@pytest.fixture
def client(sandbox: Sandbox) -> Iterator[Any]:
    found = Firecrest(sandbox.url(SYSTEM), authorization(sandbox))
    yield found
    found.close_session()


@pytest.fixture
def home(client: Any, tmp_path: Path) -> str:
    system = client.systems()[0]
    root = next(fs["path"] for fs in system["fileSystems"] if fs["defaultWorkDir"])
    path = f"{root}/{client.userinfo(SYSTEM)['user']['name']}/{tmp_path.name}"
    client.mkdir(SYSTEM, path, create_parents=True)
    return path


def ended(client: Any, number: str) -> dict[str, Any]:
    def over() -> Any:
        job = client.job_info(SYSTEM, number)[0]
        return None if job["status"]["state"] in ("PENDING", "RUNNING") else job

    found: dict[str, Any] = wait_for(over)
    return found


def test_the_system(client: Any) -> None:
    assert client.server_version() == "2"
    system = client.systems()[0]
    assert system["name"] == SYSTEM
    assert system["scheduler"]["type"] == "slurm"
    assert system["dataOperation"]["max_ops_file_size"] == 5_242_880
    assert system["dataOperation"]["data_transfer"]["serviceType"] == "s3"
    assert system["ssh"]["timeout"]["commandExecution"] == PATIENT.firecrest.command_timeout
    assert all(service["healthy"] for service in system["servicesHealth"])
    assert [p["name"] for p in client.partitions(SYSTEM)] == ["batch", "devel", "closed", "fragile"]
    assert client.nodes(SYSTEM)[0]["partitions"][:2] == ["batch", "devel"]
    assert client.reservations(SYSTEM) == []
    assert client.userinfo(SYSTEM)["accounts"][0] == {"name": "sandbox", "default": True}


def test_kinds_of_authorization(sandbox: Sandbox) -> None:
    site = sandbox.site(SYSTEM)
    assert isinstance(site, FirecrestServer)
    basic = authorization(sandbox, client_auth_method="client_secret_basic")
    for kind in (basic, ApiKeyAuth(site.tokens.api_key)):
        found = Firecrest(sandbox.url(SYSTEM), kind)
        assert found.systems()[0]["name"] == SYSTEM
        found.close_session()
    with pytest.raises(ClientsCredentialsException, match="401"):
        authorization(sandbox, "wrong").get_access_token()


def test_a_job(client: Any, home: str) -> None:
    script = "#!/bin/bash\n#SBATCH --job-name=py\necho $GREETING; exit 3\n"
    number = client.submit(SYSTEM, home, script_str=script, env_vars={"GREETING": "hello"})["jobId"]
    job = ended(client, number)
    assert (job["status"]["state"], job["status"]["exitCode"]) == ("FAILED", 3)
    wait_for(lambda: [j for j in client.job_info(SYSTEM, name="py") if j["jobId"] == number])
    assert client.job_metadata(SYSTEM, number)[0]["script"] == script
    assert client.view(SYSTEM, f"{home}/slurm-{number}.out") == "hello\n"


def test_a_job_from_a_script_at_the_site(client: Any, home: str, tmp_path: Path) -> None:
    local = tmp_path / "job.sh"
    local.write_text("#!/bin/bash\ntouch done\n")
    client.upload(SYSTEM, local, home, "job.sh")
    number = client.submit(SYSTEM, home, script_remote_path=f"{home}/job.sh")["jobId"]
    assert ended(client, number)["status"]["state"] == "COMPLETED"
    assert "done" in [file["name"] for file in client.list_files(SYSTEM, home)]


def test_cancelling(client: Any, home: str) -> None:
    number = client.submit(SYSTEM, home, script_str="#!/bin/bash\nsleep 300\n")["jobId"]
    client.cancel_job(SYSTEM, number)
    assert ended(client, number)["status"]["state"] == "CANCELLED by 1000"
    with pytest.raises(UnexpectedStatusException, match="already completing"):
        client.cancel_job(SYSTEM, number)


def test_attaching(client: Any, home: str) -> None:
    script = "#!/bin/bash\nuntil [ -e attached ]; do sleep 0.05; done\n"
    number = client.submit(SYSTEM, home, script_str=script)["jobId"]
    wait_for(lambda: client.job_info(SYSTEM, number)[0]["time"]["start"])
    client.attach_to_job(SYSTEM, number, "touch attached")
    assert ended(client, number)["status"]["state"] == "COMPLETED"


def test_small_files(client: Any, home: str, tmp_path: Path) -> None:
    content = bytes(range(256)) * 40
    (tmp_path / "up").write_bytes(content)
    assert client.upload(SYSTEM, tmp_path / "up", home, "file") is None
    client.download(SYSTEM, f"{home}/file", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == content
    client.chmod(SYSTEM, f"{home}/file", "600")
    client.symlink(SYSTEM, f"{home}/file", f"{home}/link")
    files = {file["name"]: file for file in client.list_files(SYSTEM, home)}
    assert files["file"]["permissions"] == "rw-------"
    assert files["file"]["size"] == "10240"
    assert (files["link"]["type"], files["link"]["linkTarget"]) == ("l", f"{home}/file")
    assert client.stat(SYSTEM, f"{home}/link", dereference=True)["size"] == len(content)
    assert client.file_type(SYSTEM, home) == "directory"
    assert len(client.checksum(SYSTEM, f"{home}/file")["checksum"]) == 64
    (tmp_path / "lines").write_text("".join(f"{n}\n" for n in range(20)))
    client.upload(SYSTEM, tmp_path / "lines", home, "lines")
    assert client.head(SYSTEM, f"{home}/lines", num_lines=2)["content"] == "0\n1\n"
    assert client.tail(SYSTEM, f"{home}/lines", num_bytes=3)["content"] == "19\n"
    client.rm(SYSTEM, f"{home}/file")
    with pytest.raises(FileNotFoundError):
        client.download(SYSTEM, f"{home}/file", tmp_path / "down")


def test_large_files(client: Any, home: str, tmp_path: Path) -> None:
    content = os.urandom((3 << 20) + 17)
    (tmp_path / "up").write_bytes(content)
    client.upload(SYSTEM, tmp_path / "up", home, "large file")
    assert client.stat(SYSTEM, f"{home}/large file")["size"] == len(content)
    client.download(SYSTEM, f"{home}/large file", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == content


def test_a_large_upload_into_a_missing_directory_says_nothing(
    client: Any, home: str, tmp_path: Path
) -> None:
    (tmp_path / "up").write_bytes(bytes(2 << 20))
    client.upload(SYSTEM, tmp_path / "up", f"{home}/nowhere", "file")
    with pytest.raises(UnexpectedStatusException, match="No such file"):
        client.stat(SYSTEM, f"{home}/nowhere/file")


def test_copying_moving_and_packing(client: Any, home: str, tmp_path: Path) -> None:
    (tmp_path / "up").write_text("x")
    client.mkdir(SYSTEM, f"{home}/dir")
    client.upload(SYSTEM, tmp_path / "up", f"{home}/dir", "file")
    client.cp(SYSTEM, f"{home}/dir", f"{home}/copy")
    client.mv(SYSTEM, f"{home}/copy/file", f"{home}/copy/moved")
    client.compress(SYSTEM, f"{home}/copy", f"{home}/copy.tar.gz")
    client.mkdir(SYSTEM, f"{home}/new")
    client.extract(SYSTEM, f"{home}/copy.tar.gz", f"{home}/new")
    found = client.list_files(SYSTEM, f"{home}/new", recursive=True)
    assert [file["name"] for file in found] == ["copy", "copy/moved"]
    with pytest.raises(TransferJobFailedException):
        client.mv(SYSTEM, f"{home}/nothing", f"{home}/else")


async def test_asyncio_client(sandbox: Sandbox, home: str, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(os.urandom(2 << 20))
    site = AsyncFirecrest(sandbox.url(SYSTEM), authorization(sandbox))
    submitted = await asyncio.gather(
        *(
            site.submit(SYSTEM, home, script_str=f"#!/bin/bash\n#SBATCH -J aio\nexit {n}\n")
            for n in range(4)
        )
    )
    ids = [job["jobId"] for job in submitted]
    async with asyncio.timeout(600):
        while True:
            jobs = {job["jobId"]: job for job in await site.job_info(SYSTEM, name="aio")}
            if all(jobs.get(i, {}).get("time", {}).get("end") for i in ids):
                break
            await asyncio.sleep(0.05)
    await site.upload(SYSTEM, str(tmp_path / "large"), home, "large")
    await site.download(SYSTEM, f"{home}/large", str(tmp_path / "back"))
    await site.close_session()
    assert (tmp_path / "back").read_bytes() == (tmp_path / "large").read_bytes()
