"""What the sandbox's firecREST does, held against what was measured at a real one: jobs."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_sandbox.batch import BatchState
from hpc_sandbox.firecrest.accounting import LocalAccounting
from hpc_sandbox.firecrest.compute import exported
from hpc_sandbox.sbatch import MAX_SCRIPT, BatchRequest
from hpc_sandbox.scheduler import LocalJob, LocalScheduler
from tests.support.sandbox import FAST, FirecrestClient, message, wait_for


@pytest.mark.parametrize(
    ("body", "options", "status"),
    [
        ("exit 0", (), ("COMPLETED", 0, 0)),
        ("exit 3", (), ("FAILED", 3, 0)),
        ("no-such-command", (), ("FAILED", 127, 0)),
        ("kill -SEGV $$", (), ("FAILED", 0, 11)),
        ("sleep 60", ("--time=0:01",), ("TIMEOUT", 0, 0)),
    ],
)
def test_states(
    fire: FirecrestClient, body: str, options: tuple[str, ...], status: tuple[Any, ...]
) -> None:
    found = fire.ended(fire.submit(body, *options))["status"]
    assert (found["state"], found["exitCode"], found["interruptSignal"]) == status
    assert found["stateReason"] == "None"


def test_working_directory_that_is_not_there(fire: FirecrestClient) -> None:
    number = fire.submit("true", workingDirectory=f"{fire.home}/nowhere")
    found = fire.ended(number)["status"]
    assert (found["state"], found["exitCode"], found["interruptSignal"]) == ("FAILED", 0, 53)


def test_time_above_the_partitions_waits_for_ever(fire: FirecrestClient) -> None:
    number = fire.submit("true", "--time=2-0")
    status = fire.job(number)["status"]
    assert (status["state"], status["stateReason"]) == ("PENDING", "PartitionTimeLimit")
    assert fire.http.delete(f"/compute/hpc2/jobs/{number}").status_code == 204
    assert fire.ended(number)["status"]["state"] == "CANCELLED by 1000"


def test_record(fire: FirecrestClient, there: str) -> None:
    number = fire.submit("true", "--job-name=whole", "--time=90", workingDirectory=there)
    job = fire.ended(number)
    assert list(job) == [
        "jobId", "name", "status", "tasks", "time", "account", "allocationNodes", "cluster",
        "group", "nodes", "partition", "killRequestUser", "user", "workingDirectory",
        "priority",
    ]  # fmt: skip
    assert (job["jobId"], job["name"], job["partition"]) == (number, "whole", "batch")
    assert (job["user"], job["account"]) == ("mantik", "sandbox")
    assert job["workingDirectory"] == there
    assert (job["time"]["limit"], job["time"]["suspended"]) == (5400, 0)
    assert job["tasks"][0]["id"] == f"{number}.batch"


def test_halves_of_records(tmp_path: Path) -> None:
    """The accounting is late: each job goes through all of it (0.3 to 4 s at a real site)."""
    at = 0.0
    scheduler = LocalScheduler(tmp_path / "spool", FAST, home=tmp_path, user="mantik")
    settings = replace(FAST.firecrest, accounting_lag=10.0)
    accounting = LocalAccounting(scheduler, settings, "mantik", "sandbox", clock=lambda: at)
    job = scheduler.jobs[7] = LocalJob(
        7, "halves", BatchState.RUNNING, submitted=50.0, started=100.0, directory=tmp_path,
        copy=tmp_path / "script", request=BatchRequest("batch", 3600, name="halves"),
    )  # fmt: skip

    def told(now: float) -> dict[str, Any]:
        nonlocal at
        at = now
        (record,) = asyncio.run(accounting.of_job(7))
        status = record["status"]
        by_name = bool(asyncio.run(accounting.listed(["halves"], "", 3600.0)))
        return record | {"seen": (record["name"], status["state"], status["exitCode"], by_name)}

    assert told(109.9)["seen"] == ("halves", "RUNNING", None, True)
    half = told(110.0)
    assert half["seen"] == ("allocation", "PENDING", 0, True)
    assert told(119.9)["seen"] == half["seen"]
    assert told(120.0)["seen"] == ("halves", "RUNNING", 0, True)
    job.state, job.exit_code, job.ended = BatchState.FAILED, 5, 200.0
    # The list by name misses it; the list of all has it.
    half = told(209.9)
    assert half["seen"] == ("allocation", "FAILED", 5, False)
    assert (half["partition"], half["workingDirectory"], half["group"]) == ("", "", "root")
    assert len(asyncio.run(accounting.listed([], "", 3600.0))) == 1
    assert told(210.0)["seen"] == ("halves", "FAILED", 5, True)


def test_list(fire: FirecrestClient) -> None:
    one, two = fire.submit("true", "--job-name=l1"), fire.submit("true", "--job-name=l2")
    fire.ended(one), fire.ended(two)
    assert set(fire.jobs(name="l1,l2")) == {one, two}
    assert set(fire.jobs(name="l1", time_window="1h", allusers="true")) == {one}
    assert fire.jobs(name="l1", account="other") == {}
    assert {one, two} <= set(fire.jobs())
    assert "at most 235" in message(
        fire.http.get("/compute/hpc2/jobs", params={"name": "x" * 236}), 400
    )
    assert "Input should be" in message(
        fire.http.get("/compute/hpc2/jobs", params={"time_window": "2h"}), 400
    )


def test_ids(fire: FirecrestClient) -> None:
    for bad in ("1,2", "19_1", "no-such"):
        answer = fire.http.get(f"/compute/hpc2/jobs/{bad}")
        assert "should match pattern" in message(answer, 400)
    for unknown in ("999999", "abc"):
        path = f"/compute/hpc2/jobs/{unknown}"
        assert message(fire.http.get(path), 404) == "Job not found."
        assert message(fire.http.get(f"{path}/metadata"), 404) == "Job not found."
        assert "Invalid job id specified" in message(fire.http.delete(path), 500)


def test_second_cancel(fire: FirecrestClient) -> None:
    path = f"/compute/hpc2/jobs/{fire.submit('trap : TERM; sleep 60; sleep 60')}"
    assert fire.http.delete(path).status_code == 204
    answer = fire.http.delete(path)
    assert "Job/step already completing or completed" in message(answer, 500)
    assert answer.json()["user"] == "mantik"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--reservation=nope", "Requested reservation is invalid"),
        ("--nonsense=1", "unrecognized option"),
    ],
)
def test_refused_by_sbatch(fire: FirecrestClient, options: str, words: str) -> None:
    answer = fire.post_job(f"#!/bin/bash\n#SBATCH {options}\ntrue\n")
    text = message(answer, 500)
    assert text.startswith("Unexpected Slurm command response. exit_status:1 std_err:sbatch")
    assert words in text


def test_refused_and_yet_recorded(fire: FirecrestClient) -> None:
    fire.post_job("#!/bin/bash\n#SBATCH --mem=900G\n#SBATCH --job-name=fat\ntrue\n")
    found = wait_for(lambda: fire.jobs(name="fat"))
    assert [job["status"]["state"] for job in found.values()] == ["FAILED"]


def test_scripts_that_are_none(fire: FirecrestClient) -> None:
    assert "does not look like a batch script" in message(fire.post_job("true\n"), 500)
    before = set(fire.jobs())
    began = time.monotonic()
    answer = fire.post_job("")
    assert message(answer, 408) == "Command execution timeout limit exceeded."
    assert time.monotonic() - began >= FAST.firecrest.command_timeout
    assert set(fire.jobs()) == before
    missing = {"workingDirectory": fire.home, "scriptPath": f"{fire.home}/none.sh"}
    answer = fire.http.post("/compute/hpc2/jobs", json={"job": missing})
    assert "Unable to open file" in message(answer, 500)


def test_size_of_a_script(fire: FirecrestClient) -> None:
    head = "#!/bin/bash\n#SBATCH --hold\n#"
    assert fire.post_job(head.ljust(MAX_SCRIPT, "x")).status_code == 201
    answer = fire.post_job(head.ljust(MAX_SCRIPT + 1, "x"))
    assert "parameter too long" in message(answer, 500)


def test_fields_beyond_pyfirecrests(fire: FirecrestClient, there: str) -> None:
    number = fire.submit(
        "echo out; echo err >&2",
        "--job-name=no",
        name="yes",
        workingDirectory=there,
        standardOutput="o-%j",
        standardError="e",
    )
    assert fire.ended(number)["name"] == "yes"
    view = fire.ops("GET", "view", params={"path": f"{there}/o-{number}"})
    assert view.json()["output"] == "out\n"


def test_variables_with_commas_are_cut(fire: FirecrestClient, there: str) -> None:
    env = {"A": "1,X=2", "B": "a b'\"$=;\nc", "C": "x,y"}
    assert exported(env) == {"A": "1", "X": "2", "B": "a b'\"$=;\nc", "C": "x"}
    number = fire.submit('echo "$A $X $C"; env | grep -c F7T', env=env, workingDirectory=there)
    fire.ended(number)
    view = fire.ops("GET", "view", params={"path": f"{there}/slurm-{number}.out"})
    assert view.json()["output"] == "1 2 x\n0\n"


def test_metadata_cuts_paths_at_blanks(fire: FirecrestClient) -> None:
    directory = fire.directory("with a blank")
    number = fire.submit("true", workingDirectory=directory)
    found = fire.http.get(f"/compute/hpc2/jobs/{number}/metadata").json()["jobs"][0]
    assert found["standardOutput"] == f"{fire.home}/with"
    assert found["script"] == "#!/bin/bash\ntrue\n"


@pytest.mark.parametrize("own_site", [{"record_time": 3.0}], indirect=True)
def test_a_list_that_takes_too_long(own_site: FirecrestClient) -> None:
    """Each job in it makes it longer; one by one they can be asked for all the same."""
    number, other = own_site.submit("true"), own_site.submit("true", "--job-name=other")
    for job in (number, other):
        own_site.ended(job)
    url = "/compute/hpc2/jobs"
    wait_for(lambda: own_site.http.get(url, params={"name": "other"}).json()["jobs"])
    answer = own_site.http.get(url)
    assert message(answer, 500) == "Error executing Slurm command."
    assert answer.json()["causedBy"] == ["Command execution timeout limit exceeded."]
    assert own_site.job(number)["jobId"] == number


@pytest.mark.parametrize("own_site", [{"job_memory": 0.1}], indirect=True)
def test_metadata_is_forgotten(own_site: FirecrestClient) -> None:
    number = own_site.submit("true")
    own_site.ended(number)
    path = f"/compute/hpc2/jobs/{number}/metadata"
    wait_for(lambda: own_site.http.get(path).status_code == 404)


@pytest.mark.parametrize("own_site", [{}], indirect=True)
def test_a_full_queue(own_site: FirecrestClient) -> None:
    own_site.box.limit_jobs("hpc2", 1)
    own_site.submit("true", "--hold")
    text = message(own_site.post_job("#!/bin/bash\n"), 403)
    assert text.startswith("Job submission rejected: accounting/QOS policy limit exceeded.")
    assert "AssocMaxSubmitJobLimit" in text
