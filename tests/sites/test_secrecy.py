"""No credential is in an error, its traceback or a log, whatever a server does with it."""

import logging
import traceback
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.sites import rest
from snakemake_executor_plugin_mantik.sites.authentication import Issuer
from snakemake_executor_plugin_mantik.sites.base import Site
from snakemake_executor_plugin_mantik.sites.credentials import find_credentials
from tests.support.benches import any_site, open_and_close
from tests.support.parrot import Parrot, Say
from tests.support.ports import free_port

MARK = "marked-4711"
KINDS = {
    "unicore": [
        {"USERNAME": "ada", "PASSWORD": f"{MARK}-p"},
        {"TOKEN": f"{MARK}-t"},
        {"TOKEN": f"{MARK}-t\n{MARK}-u"},
        {"TOKEN_URL": "URL", "CLIENT_ID": "id", "REFRESH_TOKEN": f"{MARK}-r",
         "CLIENT_SECRET": f"{MARK}-c"},
        {"USERNAME": "ada", "SSH_KEY": "KEY", "SSH_KEY_PASSWORD": f"{MARK}-k"},
    ],
    "firecrest": [
        {"TOKEN_URL": "URL", "CLIENT_ID": "id", "CLIENT_SECRET": f"{MARK}-c"},
        {"API_KEY": f"{MARK}-a"},
        {"API_KEY": f"{MARK}-a\r\nx: y"},
        {"TOKEN": f"{MARK}-t"},
    ],
}  # fmt: skip
ECHO = {"Content-Type": "application/json", "auth-token": f"{MARK}-t", "Date": "x"}
TROUBLE = {
    "away": None,
    "refused": Say(401, b"{}", ECHO),
    "forbidden": Say(403, b"", ECHO),
    "error": Say(500, b"{}", ECHO),
    "nonsense": Say(200, b"[]", ECHO),
    "page": Say(200, b"<html>", ECHO | {"Content-Type": "text/html"}),
    "elsewhere": Say(302, b"", ECHO | {"Location": "https://portal.example.org/?code=marked"}),
    "cut": Say(200, b"{", ECHO, length=10),
    "token": Say(200, b'{"access_token": "marked-4711-x", "expires_in": 600}', ECHO),
}


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private key whose passphrase is another one than what is told."""
    key = tmp_path_factory.mktemp("keys") / "id"
    key.write_bytes(
        ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"another"),
        )
    )
    return key


def site_of(api: str, url: str, variables: dict[str, str], key: Path) -> Site:
    environ = {
        f"MANTIK_{api.upper()}_{name}": value.replace("URL", url).replace("KEY", str(key))
        for name, value in variables.items()
    }
    return any_site(api, url, find_credentials("s", api, environ, None, issuer=Issuer()))


@pytest.mark.parametrize("trouble", TROUBLE)
@pytest.mark.parametrize(
    "kind", [f"{api} {number}" for api, kinds in KINDS.items() for number in range(len(kinds))]
)
async def test_nothing_is_told(
    parrot: Parrot, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, key: Path,
    kind: str, trouble: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(rest, "REPEAT_ATTEMPTS", 1)
    caplog.set_level(logging.DEBUG)
    api, number = kind.split()
    url, say = parrot.url, TROUBLE[trouble]
    if say is None:
        url = f"http://127.0.0.1:{free_port()}/rest/core"
    else:
        parrot.answers = [say]

    with pytest.raises(MantikError) as caught:
        await open_and_close(site_of(api, url, KINDS[api][int(number)], key))
    told = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    told += caplog.text
    assert MARK not in told
    assert "marked" not in told
