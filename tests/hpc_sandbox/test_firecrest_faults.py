"""Failures on demand at a firecREST site, as a client sees them."""

import time

import httpx
import pytest

from hpc_sandbox import faults
from hpc_sandbox.faults import Action, Fault
from hpc_sandbox.server import Sandbox
from tests.support.sandbox import FAST, FirecrestClient, message, wait_for


def named(name: str) -> str:
    return f"#!/bin/bash\n#SBATCH --job-name={name}\ntrue\n"


def test_refusals_have_the_form_of_the_api(faulty: Sandbox, fire: FirecrestClient) -> None:
    words = "The scheduler service for the requested system (hpc2) is unhealthy."
    faulty.faults.add(Fault("refuse", path="/compute/", message=words))
    answer = fire.http.get("/compute/hpc2/jobs")
    assert message(answer, 503) == words
    assert answer.json()["user"] == "mantik"
    faulty.faults.add(Fault("refuse", path="/status/", status=429, retry_after=7))
    answer = fire.http.get("/status/systems")
    assert (answer.status_code, answer.content) == (429, b"")
    assert answer.headers["retry-after"] == "7"


@pytest.mark.parametrize(
    ("action", "seconds", "jobs"), [("timeout_before", 0.0, 0), ("timeout_after", 2.0, 1)]
)
def test_a_slow_sbatch(
    faulty: Sandbox, fire: FirecrestClient, action: Action, seconds: float, jobs: int
) -> None:
    """Both answers are identical, whether the job came into being or not (measured)."""
    name = f"slow-{action}-{seconds}"
    faulty.faults.add(Fault(action, method="POST", path="/jobs$", seconds=seconds))
    began = time.monotonic()
    answer = fire.post_job(named(name))
    assert time.monotonic() - began >= FAST.firecrest.command_timeout
    assert message(answer, 500) == "('Channel not open for sending',)"
    assert answer.json()["user"] is None
    fire.wait_for_the_end_of_the_connection()
    if seconds:
        assert fire.jobs(name=name) == {}, "it comes into being later"
    wait_for(lambda: len(fire.jobs(name=name)) == jobs)


def test_the_connection_breaks_after_what_the_server_did_not_expect(
    faulty: Sandbox, fire: FirecrestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.faults.add(Fault("timeout_before", method="POST", path="/jobs$", count=2))
    monkeypatch.setattr(faults, "_LAST_WORDS", 3600.0)
    assert fire.post_job(named("x")).status_code == 500
    with pytest.raises(httpx.ReadError):
        fire.http.get("/status/systems")
    assert fire.http.get("/status/systems").status_code == 200
    monkeypatch.undo()
    assert fire.post_job(named("x")).status_code == 500
    fire.wait_for_the_end_of_the_connection()
    assert fire.http.get("/status/systems").status_code == 200


def test_slow_commands(faulty: Sandbox, fire: FirecrestClient) -> None:
    faulty.faults.add(Fault("timeout_after", path="/ops/mkdir"))
    path = f"{fire.home}/slow"
    answer = fire.ops("POST", "mkdir", json={"path": path})
    assert message(answer, 408) == "Command execution timeout limit exceeded."
    assert answer.json()["user"] == "mantik"
    assert fire.ops("GET", "stat", params={"path": path}).status_code == 200
    faulty.faults.add(Fault("timeout_before", path="/ops/upload"))
    answer = fire.upload(fire.home, "slow-upload", b"1")
    assert message(answer, 500) == "('Channel not open for sending',)"
    fire.wait_for_the_end_of_the_connection()
    faulty.faults.add(Fault("timeout_before", path="/jobs$"))
    answer = fire.http.get("/compute/hpc2/jobs")
    assert message(answer, 500) == "Error executing Slurm command."
    assert answer.json()["causedBy"] == ["Command execution timeout limit exceeded."]
    stat = fire.ops("GET", "stat", params={"path": f"{fire.home}/slow-upload"})
    assert stat.status_code == 404


@pytest.mark.parametrize(("action", "jobs"), [("drop_before", 0), ("drop_after", 1)])
def test_dropping(faulty: Sandbox, fire: FirecrestClient, action: Action, jobs: int) -> None:
    faulty.faults.add(Fault(action, method="POST", path="/jobs$"))
    with pytest.raises(httpx.TransportError):
        fire.post_job(named(action))
    wait_for(lambda: len(fire.jobs(name=action)) == jobs)


def test_jobs_that_are_denied(faulty: Sandbox, fire: FirecrestClient) -> None:
    before = len(faulty.record("hpc2")["runs"])
    faulty.faults.add(Fault("forget_job", method="POST", path="/jobs$"))
    number = fire.submit("true", "--job-name=denied")
    answer = fire.http.get(f"/compute/hpc2/jobs/{number}")
    assert message(answer, 404) == "Job not found."
    assert fire.jobs(name="denied") == {}
    assert len(faulty.record("hpc2")["runs"]) == before + 1


def test_jobs_that_the_scheduler_gets_twice(faulty: Sandbox, fire: FirecrestClient) -> None:
    faulty.faults.add(Fault("repeat_job", method="POST", path="/jobs$"))
    number = fire.submit("true", "--job-name=twice", "--hold")
    found = fire.jobs(name="twice")
    assert len(found) == 2
    assert number in found


def test_tokens_that_are_not_known_any_more(faulty: Sandbox, fire: FirecrestClient) -> None:
    faulty.faults.add(Fault("expire_sessions"))
    answer = fire.http.get("/status/systems")
    assert message(answer, 401) == "Token's public key not found."
    headers = {"Authorization": f"Bearer {fire.token()}"}
    assert fire.http.get("/status/systems", headers=headers).status_code == 200


def test_record(sandbox: Sandbox, fire: FirecrestClient) -> None:
    number = fire.submit("exit 4", "--job-name=recorded")
    fire.ended(number)
    record = sandbox.record("hpc2")
    assert record["requests"]["POST compute/jobs"] >= 1
    job = next(job for job in record["jobs"] if job["id"] == number)
    assert (job["name"], job["exit_code"], job["status"]) == ("recorded", 4, "FAILED")
    run = next(run for run in record["runs"] if run["scheduler_id"] in job["scheduler_ids"])
    assert run["starts"] == 1
