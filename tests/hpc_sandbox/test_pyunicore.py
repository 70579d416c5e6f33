"""The unmodified pyunicore, with its blocking and its asyncio client, against the sandbox."""

import asyncio
import io
from pathlib import Path
from typing import Any

import httpx
import pytest
from pyunicore import aio, client, credentials
from pyunicore.aio import client as aio_client

from hpc_sandbox.server import Sandbox
from tests.support.sandbox import raw_job, wait_for

assert aio


@pytest.fixture
def site(sandbox: Sandbox) -> Any:
    transport = client.Transport(credentials.UsernamePassword(*sandbox.credentials("hpc1")))
    return client.Client(transport, sandbox.url("hpc1"), cache_time=0)


def finished(job: Any) -> Any:
    job.cache_time = 0
    wait_for(lambda: not job.is_running())
    return job


def test_who_am_i(site: Any) -> None:
    assert site.access_info()["role"]["selected"] == "user"
    assert site.server_version_info() == (11, 0, 0)
    queues = site.get_compute()[0].get_queues()
    assert queues["batch"]["Nodes"] == "1-8"
    assert {"batch", "devel"} < set(queues)


def test_a_job_with_uploaded_inputs(site: Any, tmp_path: Path) -> None:
    (tmp_path / "input file.txt").write_text("data")
    job = site.new_job(
        {
            "Executable": "/bin/bash",
            "Arguments": ["job.sh"],
            "Environment": {"FOO": "b a r"},
            "Imports": [
                {"From": "inline://x", "To": "job.sh", "Data": 'cat in*; echo " $FOO"; exit 3'}
            ],
        },
        inputs=[str(tmp_path / "input file.txt")],
    )
    finished(job)
    assert str(job.status) == "FAILED"
    assert job.exit_code == 3
    assert "non-zero exit code: <3>" in job.properties["statusMessage"]
    assert job.working_dir.stat("stdout").read() == b"data b a r\n"
    assert job.bss_details()["JobState"] == "COMPLETED"


def test_abort(site: Any) -> None:
    job = site.new_job(raw_job("touch started; sleep 300"))
    job.cache_time = 0
    wait_for(lambda: "started" in job.working_dir.listdir())
    job.abort()
    assert str(finished(job).status) == "FAILED"
    assert job.properties["statusMessage"] == "Job aborted."
    assert "exitCode" not in job.properties
    wait_for(lambda: job.bss_details()["JobState"] == "CANCELLED")
    job.abort()


def test_tags(site: Any) -> None:
    jobs = [site.new_job({"Tags": tags}) for tags in (["red", "big"], ["red"], [])]
    assert {job.resource_url for job in site.get_jobs(tags=["red"])} == {
        job.resource_url for job in jobs[:2]
    }
    assert [job.resource_url for job in site.get_jobs(tags=["red", "big"])] == [
        jobs[0].resource_url
    ]
    assert site.get_jobs(tags=["blue"]) == []
    for job in jobs:
        job.cache_time = 0
        job.delete()
    with pytest.raises(httpx.HTTPError, match="404 Server Error: Not Found"):
        assert jobs[0].properties


def test_storage(site: Any, tmp_path: Path) -> None:
    storages = {s.resource_url.rpartition("/")[2]: s for s in site.get_storages()}
    assert set(storages) == {"HOME", "SCRATCH"}
    scratch = storages["SCRATCH"]
    local = tmp_path / "up"
    local.write_bytes(b"0123456789" * 1000)
    scratch.upload(str(local), destination="a/b/c.bin")
    assert set(scratch.listdir("a")) == {"a/b/"}
    file = scratch.stat("a/b/c.bin")
    assert (file.isfile(), file.size()) == (True, 10_000)
    sink = io.BytesIO()
    file.download(sink)
    assert sink.getvalue() == local.read_bytes()
    assert file.read(offset=3, size=4) == b"3456"
    scratch.copy("a/b/c.bin", "a/copy")
    scratch.rename("a/copy", "a/moved")
    scratch.mkdir("a/new")
    assert set(scratch.listdir("a")) == {"a/b/", "a/moved", "a/new/"}
    scratch.rm("a/moved")
    scratch.rmdir("a")
    with pytest.raises(httpx.HTTPError, match="404"):
        scratch.stat("a")


def test_extending_a_lifetime(site: Any) -> None:
    job = site.new_job({})
    wanted = "2036-11-24T09:05:54+0000"
    assert job.set_properties({"terminationTime": wanted}) == {"terminationTime": "OK"}
    job.cache_time = 0
    assert job.properties["terminationTime"] == wanted
    assert (
        "Error setting property" in job.set_properties({"terminationTime": "x"})["terminationTime"]
    )


def test_execute_on_the_login_node(site: Any) -> None:
    job = finished(site.execute("pwd", login_node="any"))
    job.poll()
    assert (str(job.status), job.exit_code) == ("SUCCESSFUL", 0)
    assert (
        job.working_dir.stat("stdout").read().decode().strip()
        == (job.working_dir.properties["mountPoint"])
    )


async def test_asyncio_client(sandbox: Sandbox) -> None:
    transport = aio_client.Transport(credentials.UsernamePassword(*sandbox.credentials("hpc1")))
    async with aio_client.Client(transport, sandbox.url("hpc1"), cache_time=0) as site:
        await site.assert_authentication()
        jobs = await asyncio.gather(
            *(site.new_job(raw_job(f"echo {n} > out; exit {n}")) for n in range(4))
        )
        for number, job in enumerate(jobs):
            job.cache_time = 0
            async with asyncio.timeout(600):
                while await job.is_running:
                    await asyncio.sleep(0.05)
            assert await job.exit_code == (number or 0)
            file = await (await job.working_dir).stat("out")
            assert (await file.read()) == f"{number}\n".encode()
