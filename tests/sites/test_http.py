"""No answer takes more memory or time than it is worth."""

import asyncio
import gzip
import tracemalloc
import zlib

import httpx
import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteUnreachable
from snakemake_executor_plugin_mantik.config.settings import SiteSettings, Timing
from snakemake_executor_plugin_mantik.sites import authentication, http, rest
from snakemake_executor_plugin_mantik.sites.authentication import Bearer, ClientCredentials
from tests.support.benches import any_site, in_use, open_and_close, site_at
from tests.support.parrot import Parrot, Say

MIB = 1 << 20


def bomb(size: int) -> bytes:
    """So many MiB of blanks, packed; its checksum is wrong, which nobody should get to."""
    packer = zlib.compressobj(9, wbits=31)
    first, another = (
        packer.compress(b" " * MIB) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2)
    )
    return first + another * (size - 1)


BOMB = bomb(256)
TOO_MUCH = {
    "long": Say(body=b" " * (3 * MIB)),
    "long error": Say(500, body=b" " * (3 * MIB)),
    "endless": Say(body=b" " * 65536, again_s=0.0),
    "bomb": Say(body=BOMB, headers={"Content-Encoding": "gzip"}),
    "bomb in an error": Say(403, body=BOMB, headers={"Content-Encoding": "GZIP"}),
    "bomb of bombs": Say(body=gzip.compress(BOMB), headers={"Content-Encoding": "gzip, gzip"}),
    "unknown": Say(body=b"x", headers={"Content-Encoding": "\x1b[31mzstd"}),
    "drip": Say(body=b" ", again_s=0.05),
    "damaged": Say(body=zlib.compress(b"{}")[:5], headers={"Content-Encoding": "deflate"}),
    "half a character": Say(body=b'{"a\\uD800": 1}'),
    "deep": Say(body=b"[" * 100_000),
}


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "REPEAT_ATTEMPTS", 1)
    monkeypatch.setattr(http, "ANSWER_BYTES", 2 * MIB)


@pytest.mark.parametrize(
    ("kind", "trouble"), [*(("unicore", trouble) for trouble in TOO_MUCH), ("firecrest", "bomb")]
)
def test_answers_of_sites(parrot: Parrot, kind: str, trouble: str) -> None:
    parrot.answers = [TOO_MUCH[trouble]]
    timing = Timing(timeout_s=1 if trouble == "drip" else 120)
    settings = SiteSettings().model_copy(update={"timing": timing})
    site = any_site(kind, parrot.url, Bearer("t"), settings)
    tracemalloc.start()
    try:
        with pytest.raises(SiteUnreachable) as caught:
            asyncio.run(open_and_close(site))
        assert tracemalloc.get_traced_memory()[1] < 192 * MIB
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("trouble", ["bomb", "drip", "endless", "deep"])
def test_answers_of_issuers(parrot: Parrot, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    parrot.answers = [TOO_MUCH[trouble]]
    if trouble == "drip":
        monkeypatch.setattr(authentication, "TOKEN_TIMEOUT_S", 1.0)
    with pytest.raises(SiteUnreachable):
        asyncio.run(ClientCredentials(parrot.url, "id", "secret").renew())


async def asked(parrot: Parrot) -> httpx.Response:
    async with in_use(site_at(parrot.url, Bearer("t"))) as site:
        return await site._connection.once("x", "GET", "")


@pytest.mark.parametrize("coding", ["gzip", "deflate", "identity", ""])
async def test_what_is_packed_once_is_unpacked(parrot: Parrot, coding: str) -> None:
    body = b'{"a": 1}'
    packed = {"gzip": gzip.compress(body), "deflate": zlib.compress(body)}.get(coding, body)
    parrot.answers = [Say(body=packed, headers={"Content-Encoding": coding})]

    answer = await asked(parrot)
    assert answer.json() == {"a": 1}
    assert answer.request.url == parrot.url
    assert answer.headers["Content-Type"] == "application/json"


async def test_escapes_that_make_sense(parrot: Parrot) -> None:
    parrot.answers = [Say(body=b'{"pair": "\\uD83D\\uDE00", "none": "\\\\ud800"}')]
    assert (await asked(parrot)).json() == {"pair": "\U0001f600", "none": "\\ud800"}


async def test_a_file_may_hold_what_no_answer_may(parrot: Parrot) -> None:
    content = b'{"half": "\\ud83d"}'
    parrot.answers = [Say(body=content, headers={"Content-Type": "application/octet-stream"})]
    answer = await asked(parrot)
    assert answer.content == content
    with pytest.raises(ValueError, match="surrogates"):
        answer.json()
