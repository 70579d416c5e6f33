"""The TSI of the sandbox's UNICORE: its errors, its outages, and what it leaves to jobs."""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_sandbox.batch import BatchJob
from hpc_sandbox.faults import Fault
from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import REAL_TIMING, SiteOption, Timing
from hpc_sandbox.tsi import Tsi, TsiError
from hpc_sandbox.unicore import UnicoreServer
from tests.support.sandbox import (
    FAST,
    FirecrestClient,
    RestClient,
    held_workers,
    message,
    raw_job,
    wait_for,
)

OCTETS = {"Content-Type": "application/octet-stream"}
AWAY = "eu.unicore.xnjs.tsi.TSIUnavailableException: Error communicating to the TSI"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[Sandbox, RestClient]]:
    """A sandbox of a test's own, and a client of it."""
    with Sandbox(tmp_path / "box", [SiteOption("hpc1")], FAST) as box:
        client = RestClient(box)
        with client.http:
            yield box, client


class TestErrors:
    def test_say_what_was_run_and_the_cause_at_the_end(self, tmp_path: Path) -> None:
        """As UNICORE/X 3.0.0 with the TSI 11.2.0 says it."""
        tsi = Tsi(tmp_path / "tsi", {"USER": "me", "HOME": "/home/me"}, 0.0)
        (tmp_path / "file").touch()
        with pytest.raises(TsiError) as error:
            tsi.make_directory(tmp_path / "file")
        assert str(error.value) == (
            "eu.unicore.xnjs.tsi.TSIProblem: TSI on <localhost>: Command failed: TSI_FAILED: "
            "Command '#!/bin/bash -l:#TSI_EXECUTESCRIPT:#TSI_SCRIPT:"
            f"/bin/mkdir -p -m 750 '{tmp_path}/file'::#TSI_IDENTITY me me:DEFAULT_GID::' failed "
            f"with code 1: /bin/mkdir: cannot create directory ‘{tmp_path}/file’: File exists:\n"
            " (Command execution on TSI reported an error)"
        )

    @pytest.mark.parametrize(
        "cause", ["Permission denied", "No space left on device", "Disk quota exceeded"]
    )
    @pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
    def test_on_demand(self, faulty: Sandbox, rest: RestClient, method: str, cause: str) -> None:
        url = f"{rest.url}/storages/SCRATCH/files/{uuid.uuid4()}"
        faulty.faults.add(Fault("fail_command", path="/files/", message=cause))
        answer = rest.http.request(method, url, content=b"1", headers=OCTETS)
        assert (answer.status_code, cause in answer.json()["errorMessage"]) == (500, True)
        assert rest.http.request(method, url, content=b"1", headers=OCTETS).is_success

    def test_on_demand_at_firecrest(
        self, faulty: Sandbox, fire: FirecrestClient, there: str
    ) -> None:
        cause = "Disk quota exceeded"
        faulty.faults.add(Fault("fail_command", path="/ops/mkdir", message=cause))
        answer = fire.ops("POST", "mkdir", json={"path": f"{there}/d"})
        assert message(answer, 500).endswith(f"cannot create directory '{there}/d': {cause}")

    def test_of_a_full_disk(self, rest: RestClient, sandbox: Sandbox) -> None:
        full = sandbox.directory / "hpc1" / "scratch" / f"full-{uuid.uuid4()}"
        full.symlink_to("/dev/full")
        url = f"{rest.url}/storages/SCRATCH/files/{full.name}"
        answer = rest.http.put(url, content=b"1", headers=OCTETS)
        assert answer.json()["errorMessage"] == (
            f"Error uploading to '/{full.name}': "
            "java.io.IOException: TSI_FAILED: [Errno 28] No space left on device"
        )


class TestOutage:
    def test_of_files(self, own: tuple[Sandbox, RestClient]) -> None:
        box, rest = own
        url = f"{rest.url}/storages/SCRATCH/files/x"
        with box.tsi_down("hpc1"):
            for method, doing in (
                ("GET", "Error listing '/x'"),
                ("PUT", "Error uploading to '/x'"),
                ("POST", "Cannot create directory <x>"),
                ("DELETE", "Cannot delete <x>"),
            ):
                answer = rest.http.request(method, url, content=b"1", headers=OCTETS)
                assert answer.status_code == 500
                assert answer.json()["errorMessage"] == f"{doing}: {AWAY}"
        assert rest.http.put(url, content=b"1", headers=OCTETS).status_code == 204

    def test_of_jobs(self, own: tuple[Sandbox, RestClient]) -> None:
        box, rest = own
        old = rest.submit(raw_job("sleep 300"))
        wait_for(lambda: rest.job(old)["status"] == "RUNNING")
        with box.tsi_down("hpc1"):
            box.cancel_job("hpc1", int(rest.job(old)["batchSystemID"]))
            answer = rest.http.get(f"{old}/details")
            said = f"Could not get job details: {AWAY}"
            assert (answer.status_code, answer.json()["errorMessage"]) == (500, said)
            new = rest.ended(rest.submit(raw_job("true")))
            assert (new["status"], new["statusMessage"]) == ("FAILED", f"Processing failed: {AWAY}")
            assert sum("Problem creating working directory" in line for line in new["log"]) == 3
            assert rest.job(old)["status"] == "RUNNING"
        assert rest.ended(old)["status"] == "FAILED"

    def test_while_files_are_brought(self, own: tuple[Sandbox, RestClient]) -> None:
        box, rest = own
        with held_workers(box):
            url = rest.submit(raw_job("true"))
            wait_for(lambda: rest.job(url)["status"] == "STAGINGIN")
            box.tsi("hpc1").up = False
        said = rest.ended(url)["statusMessage"]
        assert said.startswith("Staging in failed. Reason: Filetransfer FAILED: [inline://")
        assert said.endswith(f"//bss.sh' failed: {AWAY}")


class TestJobs:
    def test_start_when_all_have_their_files(self, own: tuple[Sandbox, RestClient]) -> None:
        box, rest = own
        site = box.site("hpc1")
        assert isinstance(site, UnicoreServer)
        seen: list[set[str]] = []

        def look(_: BatchJob) -> None:
            seen.append({job.status for job in site.jobs.values()})

        box.local_scheduler("hpc1").listen(look)
        with held_workers(box):
            urls = [rest.submit(raw_job("true")) for _ in range(4)]
            for url in urls:
                wait_for(lambda url=url: rest.job(url)["status"] == "STAGINGIN")  # type: ignore[misc]
        for url in urls:
            assert rest.ended(url)["status"] == "SUCCESSFUL"
        assert "STAGINGIN" not in seen[0]

    def test_find_the_modules_of_the_tsi(self, rest: RestClient) -> None:
        url = rest.submit(raw_job("echo $PYTHONPATH; python3 -c 'import Utils'"))
        job = rest.ended(url)
        assert job["exitCode"] == "1"
        assert rest.text(url, "stdout").endswith("/tsi\n")
        assert "a module of yours" in rest.text(url, "stderr")


class TestCommandsOnTheLoginNode:
    def test_lose_what_they_write_to_a_file(self, rest: RestClient) -> None:
        url = rest.submit(raw_job("true", **{"User precommand": "echo x > file"}))
        assert rest.ended(url)["status"] == "SUCCESSFUL"
        assert rest.text(url, "file") == ""
        assert rest.text(url, ".UNICORE_PRE_0/stdout") == "x\n"

    def test_run_in_part_where_they_are_only_quoted(self, rest: RestClient) -> None:
        command = 'echo "a; echo ran >> twice; true"; true'
        url = rest.submit(raw_job("true", **{"User precommand": command}))
        assert rest.ended(url)["status"] == "SUCCESSFUL"
        assert rest.text(url, "twice") == "ran\n"


def test_the_real_times_are_slower_than_ours() -> None:
    ours, real = vars(Timing()), vars(replace(REAL_TIMING, lifetime=Timing().lifetime))
    assert all(real[name] >= value for name, value in ours.items())
