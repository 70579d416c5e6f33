"""Failures on demand, as a client sees them."""

import time
from pathlib import Path

import httpx
import pytest

from hpc_sandbox.faults import Fault
from hpc_sandbox.server import Sandbox
from hpc_sandbox.site import request_kind
from tests.support.sandbox import RestClient, raw_job, wait_for

OCTETS = {"Content-Type": "application/octet-stream"}
DOWNLOAD = {"Accept": "application/octet-stream"}


def test_refuse(faulty: Sandbox, rest: RestClient) -> None:
    fault = faulty.faults.add(
        Fault("refuse", path="/jobs$", count=2, skip=1, status=503, retry_after=7)
    )
    codes = [rest.http.get(f"{rest.url}/jobs").status_code for _ in range(4)]
    assert codes == [200, 503, 503, 200]
    assert fault.happened == 2
    faulty.faults.add(Fault("refuse", method="POST", status=500, message="busy", retry_after=3))
    assert rest.http.get(rest.url).status_code == 200
    answer = rest.http.post(f"{rest.url}/jobs", json=raw_job("true"))
    assert answer.json() == {"errorMessage": "busy", "status": 500}
    assert answer.headers["Retry-After"] == "3"


def test_refusing_a_large_upload_reads_it(faulty: Sandbox, rest: RestClient) -> None:
    faulty.faults.add(Fault("refuse", method="PUT", status=503))
    url = f"{rest.url}/storages/HOME/files/large"
    assert rest.http.put(url, content=bytes(5 << 20), headers=OCTETS).status_code == 503
    assert rest.http.put(url, content=bytes(5 << 20), headers=OCTETS).status_code == 204


def test_delay(faulty: Sandbox, rest: RestClient) -> None:
    faulty.faults.add(Fault("delay", seconds=0.4))
    began = time.monotonic()
    assert rest.http.get(rest.url).status_code == 200
    assert time.monotonic() - began >= 0.4


@pytest.mark.parametrize(("action", "jobs"), [("drop_before", 0), ("drop_after", 1)])
def test_dropping(faulty: Sandbox, rest: RestClient, action: str, jobs: int) -> None:
    tag = f"tag-{action}"
    faulty.faults.add(Fault(action, method="POST"))  # type: ignore[arg-type] # a parameter's text
    with pytest.raises(httpx.TransportError):
        rest.http.post(f"{rest.url}/jobs", json={"Tags": [tag]})
    assert len(rest.http.get(f"{rest.url}/jobs?tags={tag}").json()["jobs"]) == jobs


def test_cut(faulty: Sandbox, rest: RestClient) -> None:
    url = f"{rest.url}/storages/HOME/files/to-be-cut"
    rest.http.put(url, content=bytes(100_000), headers=OCTETS)
    faulty.faults.add(Fault("cut", method="GET", path="to-be-cut", bytes=70_000))
    got = bytearray()

    def download() -> None:
        with rest.http.stream("GET", url, headers=DOWNLOAD) as answer:
            for chunk in answer.iter_raw():
                got.extend(chunk)

    with pytest.raises(httpx.RemoteProtocolError):
        download()
    assert len(got) == 70_000
    assert len(rest.http.get(url, headers=DOWNLOAD).content) == 100_000


def test_expired_sessions(faulty: Sandbox, rest: RestClient) -> None:
    session = {"X-UNICORE-SecuritySession": rest.http.get(rest.url).headers[
        "X-UNICORE-SecuritySession"]}  # fmt: skip
    assert rest.http.get(rest.url, headers=session).status_code == 200
    faulty.faults.add(Fault("expire_sessions"))
    assert rest.http.get(rest.url, headers=session).status_code == 432
    assert rest.http.get(rest.url).status_code == 200


def test_a_job_that_is_acknowledged_run_and_denied(faulty: Sandbox, rest: RestClient) -> None:
    before = len(faulty.record("hpc1")["runs"])
    faulty.faults.add(Fault("forget_job", method="POST", path="/jobs$"))
    url = rest.submit(raw_job("true", Tags=["forgotten"]))
    assert rest.http.get(url).status_code == 404
    assert rest.http.get(f"{rest.url}/jobs?tags=forgotten").json()["jobs"] == []
    wait_for(lambda: len(faulty.record("hpc1")["runs"]) == before + 1)


def test_a_job_that_the_scheduler_gets_twice(faulty: Sandbox, rest: RestClient) -> None:
    faulty.faults.add(Fault("repeat_job", method="POST", path="/jobs$"))
    url = rest.submit(raw_job("true"))
    assert rest.ended(url)["status"] == "SUCCESSFUL"
    name = url.rpartition("/")[2]
    record = next(job for job in faulty.record("hpc1")["jobs"] if job["id"] == name)
    assert len(record["scheduler_ids"]) == 2


def test_an_abort_that_ends_nothing(faulty: Sandbox, rest: RestClient, tmp_path: Path) -> None:
    url = rest.submit(
        raw_job(f"touch {tmp_path}/begun; until [ -e {tmp_path}/go ]; do sleep 0.1; done")
    )
    wait_for((tmp_path / "begun").exists)
    faulty.faults.add(Fault("ignore_abort", method="POST", path="/actions/abort$"))
    assert rest.http.post(f"{url}/actions/abort").status_code == 204
    assert rest.job(url)["statusMessage"] == "Job aborted."
    run = faulty.record("hpc1")["runs"][-1]
    assert run["ended"] is None, "it goes on"
    (tmp_path / "go").touch()
    wait_for(lambda: faulty.record("hpc1")["runs"][-1]["exit_code"] == 0)


def test_control_over_http(faulty: Sandbox, rest: RestClient) -> None:
    base = rest.url.partition("/hpc1")[0] + "/sandbox"
    assert httpx.get(f"{base}/record").status_code == 403
    headers = {"Authorization": f"Bearer {faulty.token}"}
    wanted = {"action": "refuse", "path": "/factories", "status": 429}
    assert httpx.post(f"{base}/faults", json=wanted, headers=headers).status_code == 200
    assert rest.http.get(f"{rest.url}/factories").status_code == 429
    listed = httpx.get(f"{base}/faults", headers=headers).json()
    assert listed[0]["happened"] == 1
    bad = httpx.post(f"{base}/faults", json={"action": "refuse", "sattus": 1}, headers=headers)
    assert "status" in bad.json()["allowed"]
    assert httpx.delete(f"{base}/faults", headers=headers).json() == []
    url = rest.submit(raw_job("exit 4", Tags=["recorded"]))
    rest.ended(url)
    record = httpx.get(f"{base}/record", headers=headers).json()["hpc1"]
    assert record["requests"]["POST jobs"] >= 1
    job = next(job for job in record["jobs"] if job["tags"] == ["recorded"])
    assert job["exit_code"] == 4
    run = next(run for run in record["runs"] if run["scheduler_id"] in job["scheduler_ids"])
    assert run["starts"] == 1


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/s/rest/core", "GET core"),
        ("/s/rest/core/jobs", "GET jobs"),
        ("/s/rest/core/jobs/x1", "GET jobs/*"),
        ("/s/rest/core/jobs/x1/details", "GET jobs/*/details"),
        ("/s/rest/core/jobs/x1/actions/abort", "GET jobs/*/actions/abort"),
        ("/s/rest/core/storages/HOME/files/a/b", "GET storages/*/files"),
        ("/s/firecrest/v2/compute/s/jobs", "GET compute/jobs"),
        ("/s/firecrest/v2/compute/s/jobs/12", "GET compute/jobs/*"),
        ("/s/firecrest/v2/compute/s/jobs/12/metadata", "GET compute/jobs/*/metadata"),
        ("/s/firecrest/v2/filesystem/s/ops/ls", "GET filesystem/ops/ls"),
        ("/s/firecrest/v2/filesystem/s/transfer/upload", "GET filesystem/transfer/upload"),
        ("/s/firecrest/v2/status/systems", "GET status/systems"),
        ("/s/firecrest/v2/status/liveness/", "GET status/liveness"),
        ("/s/firecrest/v2/status/s/userinfo", "GET status/userinfo"),
        ("/s/auth/realms/sandbox/protocol/openid-connect/token", "GET token"),
        ("/s/store/1/2", "GET store"),
        ("/s/else", "GET other"),
    ],
)
def test_request_kinds(path: str, kind: str) -> None:
    assert request_kind("GET", path) == kind
