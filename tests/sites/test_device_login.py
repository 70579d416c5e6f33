"""Logging in in a browser, against a real HTTP server that issues tokens as RFC 8628 has it."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest

from snakemake_executor_plugin_mantik.common.errors import CredentialError, SiteUnreachable
from snakemake_executor_plugin_mantik.sites import issuers
from snakemake_executor_plugin_mantik.sites.credentials import find_credentials
from snakemake_executor_plugin_mantik.sites.issuers import DeviceLogin, Issuer

GRANT = "urn:ietf:params:oauth:grant-type:device_code"
KEPT = ("mantik:alps", "REFRESH_TOKEN")


class Ring:
    """A keyring."""

    def __init__(self, **kept: str) -> None:
        self.entries = {("mantik:alps", name): value for name, value in kept.items()}

    def get_password(self, service_name: str, username: str) -> str | None:
        return self.entries.get((service_name, username))

    def set_password(self, service_name: str, username: str, password: str) -> None:
        self.entries[service_name, username] = password


class IssuerServer:
    """Issues tokens once a person has confirmed; `says` are its answers until then."""

    def __init__(self) -> None:
        self.says = ["authorization_pending", "slow_down", "authorization_pending"]
        self.refreshable = {"good"}
        self.begun: dict[str, object] = {"interval": 0.01, "expires_in": 30}
        self.asked: list[tuple[str, dict[str, str]]] = []
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = {k: v[0] for k, v in parse_qs(body).items()}
                issuer.asked.append((self.path, form))
                status, answer = issuer.answer(self.path, form)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, path: str, form: dict[str, str]) -> tuple[int, dict[str, object]]:
        tokens: dict[str, object] = {"access_token": "at", "refresh_token": "newer"}
        tokens["expires_in"] = 300
        if path == "/device":
            page = {"verification_uri": "https://sso.example.org/device"}
            return 200, {"device_code": "dc", "user_code": "WXYZ-1", **page, **self.begun}
        if form["grant_type"] == "refresh_token":
            known = form["refresh_token"] in self.refreshable
            return (200, tokens) if known else (400, {"error": "invalid_grant"})
        assert (form["grant_type"], form["device_code"]) == (GRANT, "dc")
        return (400, {"error": self.says.pop(0)}) if self.says else (200, tokens)


@pytest.fixture
def issuer(monkeypatch: pytest.MonkeyPatch) -> Iterator[IssuerServer]:
    monkeypatch.setattr(issuers, "INTERVAL_S", 0.01)
    server = IssuerServer()
    server.thread.start()
    yield server
    server.server.shutdown()
    server.thread.join()
    server.server.server_close()


def login(issuer: IssuerServer, ring: Ring, *, terminal: bool = True) -> DeviceLogin:
    environ = {"MANTIK_FIRECREST_DEVICE_URL": f"{issuer.url}/device", "MANTIK_ALPS_CLIENT_ID": "me"}
    found = find_credentials(
        "alps", "firecrest", environ, ring, issuer=Issuer(f"{issuer.url}/token")
    )
    assert isinstance(found, DeviceLogin)
    found._terminal = lambda: terminal
    return found


def kinds(issuer: IssuerServer) -> list[str]:
    return [form.get("grant_type", path) for path, form in issuer.asked]


def test_a_person_confirms_and_the_next_run_asks_nobody(
    issuer: IssuerServer, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = Ring()
    first = login(issuer, ring)
    first.login()
    first.login()
    asyncio.run(first.renew())
    assert first.get_auth_header() == "Bearer at"
    assert kinds(issuer) == ["/device", GRANT, GRANT, GRANT, GRANT]
    told = capsys.readouterr().err
    assert "open https://sso.example.org/device and confirm the code WXYZ-1" in told
    assert ring.entries == {KEPT: "newer"}

    issuer.asked.clear()
    issuer.refreshable = {"newer"}
    second = login(issuer, ring, terminal=False)
    second.login()
    assert kinds(issuer) == ["refresh_token"]
    assert capsys.readouterr().err == ""


def test_an_earlier_login_that_has_ended_is_made_again(issuer: IssuerServer) -> None:
    ring = Ring(REFRESH_TOKEN="ended")
    login(issuer, ring).login()
    assert kinds(issuer)[:2] == ["refresh_token", "/device"]
    assert ring.entries[KEPT] == "newer"


@pytest.mark.parametrize(
    ("says", "words"),
    [("access_denied", "was refused"), ("expired_token", "in time"), ("odd", "refused")],
)
def test_what_ends_it(issuer: IssuerServer, says: str, words: str) -> None:
    issuer.says = [says]
    with pytest.raises(CredentialError, match=words):
        login(issuer, Ring()).login()


def test_nobody_confirms(issuer: IssuerServer) -> None:
    issuer.says = ["authorization_pending"] * 1000
    issuer.begun["expires_in"] = 0.1
    with pytest.raises(CredentialError, match="in time"):
        login(issuer, Ring()).login()


def test_nobody_is_there(issuer: IssuerServer) -> None:
    with pytest.raises(CredentialError, match="no terminal"):
        login(issuer, Ring(), terminal=False).login()
    assert issuer.asked == []


def test_a_client_that_may_not(issuer: IssuerServer) -> None:
    issuer.says = ["unauthorized_client"]
    with pytest.raises(CredentialError, match="unauthorized_client"):
        login(issuer, Ring()).login()


def test_urls_that_others_could_listen_to(issuer: IssuerServer) -> None:
    environ = {
        "MANTIK_FIRECREST_DEVICE_URL": "http://sso.example.org/device",
        "MANTIK_FIRECREST_CLIENT_ID": "me",
        "MANTIK_FIRECREST_TOKEN_URL": f"{issuer.url}/token",
    }
    with pytest.raises(CredentialError, match="https"):
        find_credentials("alps", "firecrest", environ, Ring())


def test_no_issuer_answers(issuer: IssuerServer) -> None:
    found = login(issuer, Ring())
    found._device_url = "http://127.0.0.1:1/device"
    with pytest.raises(SiteUnreachable, match="no answer from the issuer"):
        found.login()
