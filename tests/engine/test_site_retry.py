"""What the log says of a site that does not answer, and how often it is asked."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from snakemake_executor_plugin_mantik.common.errors import (
    SiteBusy,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.engine.evidence import list_claims
from snakemake_executor_plugin_mantik.engine.site_retry import LONGEST_BUSY_S, SiteRetry
from snakemake_executor_plugin_mantik.sites.base import Site
from tests.support import virtualtime

HOUR_S = 3600.0


class Flaky:
    """Fails until a time, and notes when it was asked."""

    def __init__(self, until: float, error: Callable[[], Exception]) -> None:
        self.until, self.error = until, error
        self.asked: list[float] = []

    async def __call__(self) -> str:
        now = asyncio.get_running_loop().time()
        self.asked.append(now)
        if now < self.until:
            raise self.error()
        return "done"


def play(act: Flaky, beside: Callable[[SiteRetry], object] | None = None) -> list[str]:
    said: list[str] = []

    async def run() -> None:
        retry = SiteRetry("hpc1", said.append, asyncio.get_running_loop().time)

        async def others() -> None:
            while beside is not None:
                beside(retry)
                await asyncio.sleep(2)

        running = asyncio.create_task(others())
        try:
            assert await retry(act) == "done"
        finally:
            running.cancel()

    virtualtime.run(run())
    return said


def unreachable() -> Exception:
    return SiteUnreachable("no answer")


def test_short_trouble_is_not_told() -> None:
    assert play(Flaky(3, unreachable)) == []


def test_long_trouble_is_told_ever_more_seldom_and_when_it_is_over() -> None:
    act = Flaky(10 * HOUR_S, unreachable)
    said = play(act)
    assert 5 < len(said) < 20, said
    assert "has not answered" in said[0]
    assert "no answer" in said[0]
    assert "answers again" in said[-1]
    pauses = [b - a for a, b in zip(act.asked, act.asked[1:], strict=False)]
    assert max(pauses) <= 75
    assert len(act.asked) < 700


def test_one_request_that_fails_while_others_succeed_is_told_too() -> None:
    said = play(Flaky(HOUR_S, lambda: SiteBusy("job limit reached")), SiteRetry.answered)
    assert 1 <= len(said) < 10, said
    assert "job limit reached" in said[0]


@pytest.mark.parametrize("asked", [300.0, 1e9])
def test_a_site_may_ask_for_a_pause_within_reason(asked: float) -> None:
    act = Flaky(200, lambda: SiteBusy("later", retry_after=asked))
    play(act)
    assert min(asked, LONGEST_BUSY_S) <= act.asked[1] <= 1.25 * min(asked, LONGEST_BUSY_S)


def test_other_errors_are_not_repeated() -> None:
    act = Flaky(10, lambda: SiteRejected("no"))
    with pytest.raises(SiteRejected):
        play(act)
    assert len(act.asked) == 1


def test_note_is_said_once() -> None:
    said: list[str] = []
    retry = SiteRetry("hpc1", said.append, lambda: 0.0)
    retry.note("look")
    retry.note("look")
    assert said == ["Site hpc1: look"]


def test_refused_credentials_are_told_with_what_to_do() -> None:
    said = play(Flaky(HOUR_S, lambda: SiteUnauthorized("no", do="Check PASSWORD")))
    assert "has not accepted the credentials for" in said[0]
    for words in ("Check PASSWORD.", "keyring set mantik:hpc1 NAME", "jobs there go on"):
        assert words in said[0]


def test_a_denial_that_is_believed_is_an_answer() -> None:
    said: list[str] = []
    act = Flaky(10, unreachable)

    async def asked() -> str:
        await act()
        raise SiteNotFound("no such file")

    async def yes() -> None:
        pass

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        retry = SiteRetry("hpc1", said.append, clock, proof=yes)
        with pytest.raises(SiteNotFound):
            await retry.found(asked, at_once=True)

    virtualtime.run(run())
    assert "has not answered" in said[0]
    assert "answers again" in said[-1]


def test_a_server_that_denies_everything_while_it_starts_is_waited_for() -> None:
    """Its denial of a directory of claims says nothing about the jobs there."""
    act = Flaky(100, lambda: SiteNotFound("no such thing"))

    async def run() -> object:
        retry = SiteRetry("hpc1", lambda line: None, asyncio.get_running_loop().time, proof=act)
        site = cast(Site, SimpleNamespace(list=lambda directory: act()))
        return await retry(lambda: list_claims(site, retry, "attempts"))

    assert virtualtime.run(run()) == "done"
    assert act.asked[-1] >= 100
