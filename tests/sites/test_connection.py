"""Answers that a real server gives too seldom for a test: from a server that says what it is told.

It stands for proxies, portals and servers in trouble; what UNICORE itself does is tested on one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import pytest

from snakemake_executor_plugin_mantik.common.errors import (
    CredentialError,
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites import rest
from snakemake_executor_plugin_mantik.sites.authentication import Bearer, Credential
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, Submission
from snakemake_executor_plugin_mantik.sites.unicore import UnicoreSite
from tests.support.benches import firecrest_site_at, in_use, site_at
from tests.support.parrot import Parrot, Say

_T = TypeVar("_T")
TOKEN = "t0p-secret-token"


async def talk(
    parrot: Parrot, act: Callable[[UnicoreSite], Awaitable[_T]], *, timeout_s: float = 60.0,
    pace: float = 100.0, credential: Credential | None = None,
) -> _T:  # fmt: skip
    given = credential or Bearer(TOKEN)
    timing = {"concurrent_requests": 4, "submissions_per_second": pace}
    async with in_use(site_at(parrot.url, given, timeout_s=timeout_s, **timing)) as site:
        return await act(site)


async def read(site: UnicoreSite) -> object:
    return await site._connection.get("x", "")


async def content(site: UnicoreSite, offset: int = 0) -> bytes:
    return b"".join([chunk async for chunk in site.get("f", offset=offset)])


A_JOB = Submission("a", "job", "exit 0", Resources())


async def test_reads_again_when_a_server_is_in_trouble(parrot: Parrot) -> None:
    parrot.answers = [Say(502), Say(503), Say(body=b'{"a": 1}')]
    assert await talk(parrot, read) == {"a": 1}
    assert len(parrot.asked) == 3
    assert parrot.asked[0][2]["User-Agent"].startswith("snakemake-executor-plugin-mantik/0.")


@pytest.mark.parametrize(
    ("say", "error", "times"),
    [
        (Say(502), SiteUnreachable, rest.REPEAT_ATTEMPTS),
        (Say(404, b""), SiteNotFound, 1),  # a definite answer
        (Say(429, b"", {"Retry-After": "3600"}), SiteBusy, 1),  # nobody waits for an hour
    ],
)
async def test_how_often_it_asks_again(
    parrot: Parrot, say: Say, error: type[SiteError], times: int
) -> None:
    parrot.answers = [say]
    with pytest.raises(error) as caught:
        await talk(parrot, read)
    assert getattr(caught.value, "retry_after", None) == (3600 if say.status == 429 else None)
    assert len(parrot.asked) == times


async def test_a_list_of_jobs_is_not_asked_for_again_after_an_error(parrot: Parrot) -> None:
    """firecREST has then waited for the scheduler for five seconds, with one of few channels."""
    parrot.answers = [Say(500)]

    async with in_use(firecrest_site_at(parrot.url, Bearer(TOKEN))) as site:
        with pytest.raises(SiteUnreachable):
            await site.find({"tag": "job"})
    assert len(parrot.asked) == 1


async def test_waits_as_long_as_it_is_told(parrot: Parrot) -> None:
    parrot.answers = [Say(429, b"", {"Retry-After": "1"}), Say()]
    started = time.monotonic()
    await talk(parrot, read)
    assert time.monotonic() - started >= 1


SUBMISSIONS = [
    Say(500),
    Say(502),
    Say(201, b""),  # without a Location
    Say(200, b"<html>Log in</html>", {"Content-Type": "text/html"}),
    Say(302, b"", {"Location": "https://portal.example.org"}),
]


@pytest.mark.parametrize("say", SUBMISSIONS)
async def test_a_submission_is_made_once_and_its_fate_is_unknown(parrot: Parrot, say: Say) -> None:
    parrot.answers = [say]
    with pytest.raises(SiteUnreachable):
        await talk(parrot, lambda site: site.submit(A_JOB))
    assert len(parrot.asked) == 1


async def test_submissions_keep_to_the_pace(parrot: Parrot) -> None:
    parrot.answers = [Say(201, b"", {"Location": "https://elsewhere/rest/core/jobs/7"})]

    started = time.monotonic()
    five = await talk(
        parrot, lambda site: asyncio.gather(*(site.submit(A_JOB) for _ in range(5))), pace=20.0
    )
    assert five == ["7"] * 5
    assert time.monotonic() - started >= 4 / 20


PORTAL = Say(body=b"<html>Log in</html>", headers={"Content-Type": "text/html"})


@pytest.mark.parametrize(
    ("say", "act"),
    [
        *((Say(body=body), read) for body in (b"", b"not json", b"[1]", b'"text"', b'{"half":')),
        (Say(body=b'{"isDirectory": true}'), lambda site: site.list("d")),
        (Say(body=b"half", length=8), content),
        (PORTAL, content),
    ],
)
async def test_what_is_no_answer(
    parrot: Parrot, say: Say, act: Callable[[UnicoreSite], Awaitable[object]]
) -> None:
    parrot.answers = [say]
    with pytest.raises(SiteUnreachable):
        await talk(parrot, act)


async def test_body_that_is_cut_gives_what_came_first(parrot: Parrot) -> None:
    parrot.answers = [Say(body=b"half", length=8)]

    assert await talk(parrot, lambda site: anext(site.get("f"))) == b"half"


async def test_range_that_is_ignored(parrot: Parrot) -> None:
    entry = b'{"isDirectory": false, "size": 9, "lastAccessed": "2026-11-21T11:20:45+0000"}'
    parrot.answers = [Say(body=entry), Say(body=b"from the start")]

    with pytest.raises(SiteUnreachable, match="instead of its bytes from 4 on"):
        await talk(parrot, lambda site: content(site, 4))


async def test_time_out(parrot: Parrot) -> None:
    parrot.answers = [Say(delay_s=1.5)]
    with pytest.raises(SiteUnreachable):
        await talk(
            parrot, lambda site: site._connection.once("x", "POST", "/jobs", json={}), timeout_s=0.2
        )


class Renewing(Bearer):
    """A token that can be renewed, or is refused by its issuer."""

    def __init__(self, issuer_refuses: bool = False) -> None:
        super().__init__("0")
        self.issuer_refuses = issuer_refuses
        self.stale = False

    async def renew(self) -> None:
        if self.issuer_refuses:
            raise CredentialError("the refresh token was refused")
        if self.stale:
            self.stale, self._token = False, str(int(self._token) + 1)

    def get_auth_header(self) -> str:
        return f"Bearer {self._token}"

    def refused(self, headers: Mapping[str, str]) -> bool:
        self.stale = headers["Authorization"] == self.get_auth_header()
        return True


async def test_a_refused_token_is_renewed_once(parrot: Parrot) -> None:
    parrot.answers = [Say(401), Say(body=b'{"a": 1}')]
    assert await talk(parrot, read, credential=Renewing()) == {"a": 1}
    assert [h["Authorization"] for _, _, h in parrot.asked] == ["Bearer 0", "Bearer 1"]
    parrot.asked.clear()
    parrot.answers = [Say(401)]
    with pytest.raises(SiteUnauthorized):
        await talk(parrot, read, credential=Renewing())
    assert len(parrot.asked) == 2


async def test_an_issuer_that_refuses_is_a_site_that_refuses(parrot: Parrot) -> None:
    with pytest.raises(SiteUnauthorized, match="the refresh token was refused"):
        await talk(parrot, read, credential=Renewing(issuer_refuses=True))
    assert parrot.asked == []


async def test_requests_at_the_same_time_are_limited(parrot: Parrot) -> None:
    parrot.answers = [Say(delay_s=0.1)]

    started = time.monotonic()
    await talk(
        parrot, lambda site: asyncio.gather(*(site._connection.get("x", "") for _ in range(12)))
    )
    assert time.monotonic() - started >= 3 * 0.1


async def test_extension_that_is_refused_with_200(parrot: Parrot) -> None:
    refusal = b'{"terminationTime": "Error setting property: exceeds the maximum lifetime"}'
    parrot.answers = [
        Say(body=b'{"terminationTime": "2026-01-01T00:00:00+0000"}'),
        Say(body=refusal),
    ]
    with pytest.raises(SiteRejected, match="exceeds the maximum lifetime"):
        await talk(parrot, lambda site: site.extend(["j"], 60))


async def test_file_that_cannot_be_closed_to_others_is_not_filled(parrot: Parrot) -> None:
    parrot.answers = [Say(204, b""), Say(body=b'{"permissions": "FAILED: not supported"}')]
    with pytest.raises(SiteRejected, match="closed to others"):
        await talk(parrot, lambda site: site.put("f", b"secret", private=True))
    assert [method for method, _, _ in parrot.asked] == ["PUT", "PUT"]
    assert parrot.asked[0][2]["Content-Length"] == "0"


async def test_silence_is_not_waited_for_job_by_job(parrot: Parrot) -> None:
    parrot.answers = [Say(delay_s=1.0)]

    with pytest.raises(SiteUnreachable):
        await talk(parrot, lambda site: site.states([f"job{n}" for n in range(100)]), timeout_s=0.1)
    assert len(parrot.asked) <= 4 * rest.REPEAT_ATTEMPTS


async def test_one_job_in_trouble_hides_no_other(parrot: Parrot) -> None:
    parrot.answers = [Say(500)] * rest.REPEAT_ATTEMPTS
    parrot.answers.append(Say(body=b'{"status": "RUNNING"}'))

    async def states(site: UnicoreSite) -> dict[str, JobState]:
        site._connection.max_concurrency = 1
        return await site.states(["bad", "good"])

    found = await talk(parrot, states)
    assert [found[job].phase for job in ("bad", "good")] == [Phase.UNKNOWN, Phase.RUNNING]


class Renewable(Credential):
    """Has another token whenever one was refused; counts how often new values are looked for."""

    _next_look = float("-inf")

    def __init__(self) -> None:
        self.looked = 0
        self.look = self._look

    def _look(self) -> None:
        self.looked += 1
        self._next_look = float("-inf")

    def get_auth_header(self) -> str:
        return f"Bearer {TOKEN}"

    def refused(self, headers: Mapping[str, str]) -> bool:
        del headers
        return True


@pytest.mark.parametrize("api", ["unicore", "firecrest"])
async def test_new_credentials_are_looked_for_only_in_place_of_refused_ones(
    parrot: Parrot, api: str
) -> None:
    credential = Renewable()
    no, yes = Say(401), Say(body=b'{"systems": []}')

    async def asked() -> None:
        make = site_at if api == "unicore" else firecrest_site_at
        async with in_use(make(parrot.url, credential)) as site:
            await site._connection.get("base", "")

    parrot.answers = [no, yes, yes]
    await asked()
    await asked()
    assert credential.looked == 0, "a token that was renewed is no refused credential"
    parrot.answers = [no, no, yes, yes]
    with pytest.raises(SiteUnauthorized):
        await asked()
    await asked()
    assert credential.looked == 1
    await asked()
    assert credential.looked == 1, "what a site has taken is not looked for any more"
