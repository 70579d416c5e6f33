"""What the sandbox's firecREST does, held against what was measured at a real one."""

import base64
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from hpc_sandbox import faults
from hpc_sandbox.faults import Action, Fault
from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import FirecrestSettings
from tests.support.sandbox import FAST, FirecrestClient, message, wait_for


class TestTokens:
    @pytest.mark.parametrize(
        ("lifetime", "words"),
        [
            (-1, "Access token expired"),
            (29, "Access token expires too soon (less than 30s remaining)."),
        ],
    )
    def test_that_end_soon(self, fire: FirecrestClient, lifetime: float, words: str) -> None:
        token = fire.token(lifetime)
        headers = {"Authorization": f"Bearer {token}"}
        answer = fire.http.get("/status/systems", headers=headers)
        assert message(answer, 401) == words
        assert answer.headers["auth-token"] == token
        assert answer.json()["user"] is None

    def test_with_just_enough_time(self, fire: FirecrestClient) -> None:
        headers = {"Authorization": f"Bearer {fire.token(45)}"}
        assert fire.http.get("/status/systems", headers=headers).status_code == 200

    def test_that_are_none(self, fire: FirecrestClient) -> None:
        good = fire.token()
        signed, _, signature = good.rpartition(".")
        bad = signature[:-2] + ("AA" if signature[-2:] != "AA" else "BB")
        for token in ("garbage", "a.b.c", f"{signed}.{bad}", f"{signed}."):
            headers = {"Authorization": f"Bearer {token}"}
            answer = fire.http.get("/status/systems", headers=headers)
            assert message(answer, 401) == "Access token is invalid."
        for header in ("", "Basic eDp5", "Bearer"):
            answer = fire.http.get("/status/systems", headers={"Authorization": header})
            assert message(answer, 401) == "Not authenticated"

    def test_endpoint(self, fire: FirecrestClient) -> None:
        client_id, secret = fire.box.credentials("hpc2")
        url = fire.site.token_url
        form = {"grant_type": "client_credentials", "client_id": client_id}
        answer = httpx.post(url, data={**form, "client_secret": secret}).json()
        assert (answer["token_type"], answer["expires_in"]) == ("Bearer", 300)
        wrong = httpx.post(url, data={**form, "client_secret": "wrong"})
        assert (wrong.status_code, wrong.json()["error"]) == (401, "unauthorized_client")
        other = httpx.post(url, data={"grant_type": "password"})
        assert (other.status_code, other.json()["error"]) == (400, "unsupported_grant_type")
        again = httpx.post(
            url,
            data={"grant_type": "refresh_token", "refresh_token": fire.site.tokens.refresh_token},
        )
        assert again.json()["refresh_token"] == fire.site.tokens.refresh_token

    def test_liveness_wants_none(self, fire: FirecrestClient) -> None:
        url = f"{fire.site.url}/status/liveness"
        assert httpx.get(url).status_code == 307
        assert "hpc2" in httpx.get(f"{url}/").json()["healthcheckRuns"]


class TestAnswers:
    def test_headers(self, fire: FirecrestClient) -> None:
        answer = fire.http.get("/status/systems", headers={"X-Request-ID": "r-1"})
        assert answer.headers["f7t-appversion"] == "2.x.x"
        assert answer.headers["f7t-authusername"] == "mantik"
        assert answer.headers["x-request-id"] == "r-1"

    def test_names_of_systems_have_no_case(self, fire: FirecrestClient) -> None:
        assert fire.http.get("/compute/HPC2/jobs").status_code == 200
        answer = fire.http.get("/compute/hpc3/jobs")
        assert message(answer, 404) == "System not found"
        assert answer.json()["user"] == "mantik"

    def test_what_is_not_there(self, fire: FirecrestClient) -> None:
        for path in ("/nothing", "/compute/hpc2/else", "/filesystem/hpc2/ops/format"):
            assert message(fire.http.get(path), 404) == "Not Found"
        assert message(fire.http.put("/compute/hpc2/jobs"), 405) == "Method Not Allowed"

    def test_validation(self, fire: FirecrestClient) -> None:
        answer = fire.http.post("/compute/hpc2/jobs", json={"job": {"script": "x"}})
        assert "Field required" in message(answer, 400)
        fields = answer.json()["data"]["fields"]
        assert fields[0]["name"] == "workingDirectory"
        assert message(fire.http.post("/compute/hpc2/jobs", content=b"{"), 400)


class TestSessions:
    @pytest.mark.nightly
    @pytest.mark.parametrize(
        "own_site", [{"command_time": 3.0, "command_timeout": 60.0}], indirect=True
    )
    def test_too_many_commands_at_the_same_time(self, own_site: FirecrestClient) -> None:
        """Ten sessions: ten commands, or five questions for jobs, which take two each."""
        job = own_site.submit("true")

        def together(number: int, url: str) -> list[httpx.Response]:
            with ThreadPoolExecutor(number) as pool:
                return list(pool.map(lambda _: own_site.http.get(url), range(number)))

        stat = f"/filesystem/hpc2/ops/stat?path={own_site.home}"
        refused = [answer for answer in together(12, stat) if answer.status_code != 200]
        assert len(refused) == 2
        assert message(refused[0], 424) == "Unable to open a new SSH channel."
        refused = [
            answer
            for answer in together(6, f"/compute/hpc2/jobs/{job}")
            if answer.status_code != 200
        ]
        assert len(refused) == 1
        assert message(refused[0], 500) == "Error executing Slurm command."
        assert refused[0].json()["causedBy"] == ["Unable to open a new SSH channel."]


def test_secrets_of_the_token_are_none(fire: FirecrestClient) -> None:
    claims = fire.token().split(".")[1]
    text = base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)).decode()
    assert fire.site.tokens.client_secret not in text


def test_real_values_are_the_defaults_where_it_costs_nothing() -> None:
    own = FirecrestSettings()
    assert (own.token_margin, own.command_timeout, own.max_sessions) == (30, 5, 10)
    assert (own.max_file_size, own.max_part_size, own.job_memory) == (5 << 20, 2 << 30, 300)


# Failures on demand at a firecREST site, as a client sees them.


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
