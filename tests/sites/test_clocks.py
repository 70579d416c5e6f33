"""The clocks of a site, of the issuer of its tokens and of this machine may be hours apart."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from snakemake_executor_plugin_mantik.common.errors import SiteUnauthorized
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.sites import authentication
from snakemake_executor_plugin_mantik.sites.authentication import ClientCredentials, SshKey
from snakemake_executor_plugin_mantik.sites.http import retry_after, server_time
from snakemake_executor_plugin_mantik.sites.unicore import read_base
from snakemake_executor_plugin_mantik.sites.unicore.connection import UnicoreConnection
from tests.support.benches import in_use
from tests.support.parrot import Parrot, Say

HOURS = 3600.0


class StrictSite(Parrot):
    """Takes tokens that are valid by its own clock, which is `ahead` of ours.

    Others are refused, or let in as anonymous where it is `polite`.
    """

    def __init__(self, key: ed25519.Ed25519PublicKey, ahead: float, polite: bool) -> None:
        super().__init__("/rest/core")
        self.key, self.ahead, self.polite = key, ahead, polite

    def say(self, path: str, headers: dict[str, str], body: bytes) -> Say:
        now = time.time() + self.ahead
        token = headers["Authorization"].removeprefix("Bearer ")
        claims = jwt.decode(token, self.key, ["EdDSA"], options={"verify_signature": True,
                            "verify_exp": False, "verify_iat": False})  # fmt: skip
        valid = claims["iat"] <= now + 60 and now < claims["exp"]
        role = "user" if valid else "anonymous"
        answer = {
            "client": {"role": {"selected": role}, "xlogin": {"UID": claims["sub"]}},
            "server": {"version": "11.1.0"},
        }
        date = {"Date": formatdate(now, usegmt=True)}
        if valid or self.polite:
            return Say(200, json.dumps(answer).encode(), date)
        return Say(403, b"", date)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    key = ed25519.Ed25519PrivateKey.generate()
    file = tmp_path / "id"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )
    return file


@pytest.fixture
def strict(key_file: Path) -> Iterator[Callable[[float, bool], StrictSite]]:
    with ExitStack() as running:

        def make(ahead: float, polite: bool) -> StrictSite:
            key = serialization.load_ssh_private_key(key_file.read_bytes(), None)
            assert isinstance(key, ed25519.Ed25519PrivateKey)
            return running.enter_context(StrictSite(key.public_key(), ahead, polite).running())

        yield make


async def user_at(site: StrictSite, key_file: Path, times: int = 1) -> str:
    key = SshKey("ada", key_file)
    async with in_use(
        UnicoreConnection("strict", site.url, key, SiteSettings(), Path())
    ) as connection:
        for _ in range(times):
            _, user = await read_base(connection)
        return user


@pytest.mark.parametrize("polite", [True, False])
@pytest.mark.parametrize("ahead", [-5 * HOURS, -90.0, 0.0, 10 * 60.0, 5 * HOURS])
async def test_tokens_are_signed_by_the_sites_clock(
    strict: Callable[[float, bool], StrictSite], key_file: Path, ahead: float, polite: bool
) -> None:
    site = strict(ahead, polite)
    assert await user_at(site, key_file, times=3) == "ada"
    assert len(site.asked) == (3 if ahead == 0 else 4), "it is learnt once"


@pytest.mark.parametrize("ahead", [-400 * 24 * HOURS, 400 * 24 * HOURS])
async def test_no_token_for_next_year(
    strict: Callable[[float, bool], StrictSite], key_file: Path, ahead: float
) -> None:
    with pytest.raises(SiteUnauthorized):
        await user_at(strict(ahead, False), key_file)


class TestTokensOfAnIssuer:
    """The time that a token lasts is told as a span: when it began is our own business."""

    @pytest.fixture
    def answers(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        given: list[str] = []

        def ask(self: ClientCredentials, form: dict[str, str]) -> dict[str, Any]:
            given.append(f"token-{len(given)}")
            return {"access_token": given[-1], "expires_in": 600}

        monkeypatch.setattr(ClientCredentials, "_ask", ask)
        return given

    @pytest.mark.parametrize(
        ("wall", "steady", "asked"),
        [
            (500, 500, 1),
            (600, 600, 2),
            (-5 * HOURS, 500, 1),  # set back
            (-5 * HOURS, 600, 2),
            (600, 0, 2),  # the machine slept
            (5 * HOURS, 0, 2),  # set forward: early is no harm
        ],
    )
    def test_are_renewed_whatever_is_done_to_ours(
        self, monkeypatch: pytest.MonkeyPatch, answers: list[str], wall: float, steady: float,
        asked: int,
    ) -> None:  # fmt: skip
        credential = ClientCredentials("https://issuer.example.org/token", "id", "secret")
        asyncio.run(credential.renew())
        clock, tick = time.time, time.monotonic
        # Not those of the whole process: the event loops of servers in other threads go by them.
        clocks = SimpleNamespace(time=lambda: clock() + wall, monotonic=lambda: tick() + steady)
        monkeypatch.setattr(authentication, "time", clocks)
        asyncio.run(credential.renew())
        asyncio.run(credential.renew())
        assert len(answers) == asked


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("12", 12.0),
        ("Sat, 21 Nov 2026 07:02:00 GMT", 120.0),
        ("Sat, 21 Nov 2026 06:00:00 GMT", 0.0),
        ("soon", None),
        ("-5", None),
        ("", None),
        (None, None),
    ],
)
def test_a_pause_is_measured_by_the_clock_of_who_asks(
    header: str | None, seconds: float | None
) -> None:
    answer = httpx.Response(429, headers={"Date": "Sat, 21 Nov 2026 07:00:00 GMT"})
    assert retry_after(header, server_time(answer)) == seconds


@pytest.mark.parametrize("date", ["", "now", "Sat, 99 Nov 9999 99:00:00 GMT"])
def test_servers_without_a_clock(date: str) -> None:
    assert server_time(httpx.Response(429, headers={"Date": date})) is None
    assert retry_after("Sat, 21 Nov 2026 07:02:00 GMT", None) is None
