"""What the sandbox's firecREST does, held against what was measured at a real one."""

import base64
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from hpc_sandbox.settings import FirecrestSettings
from tests.support.sandbox import FirecrestClient, message


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
