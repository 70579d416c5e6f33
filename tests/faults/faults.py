"""The faults of the matrix: what a client meets, each as one thing that is done to a request."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.support.proxy import Act, Answer, Exchange, Headers, pass_on

OUTAGE_S = 2.5
"""How long a site is away where a fault lasts for a time; longer than requests are repeated for."""

JSON: Headers = (("content-type", "application/json"),)
HTML: Headers = (("content-type", "text/html; charset=utf-8"),)
_PAGE = b"<html><head><title>%s</title></head><body><h1>%s</h1></body></html>"


@dataclass(frozen=True)
class Fault:
    """One row of the matrix.

    Attributes:
        name: what it is called.
        act: makes, for an API, what is done to a request.
        times: how many requests of each kind meet it; None: all, it ends by itself.
    """

    name: str
    act: Callable[[str], Act]
    times: int | None = 5

    def __str__(self) -> str:
        return self.name


def refusal(api: str, status: int, words: str = "") -> Answer:
    """An error in the form of the API; UNICORE's have no body without words."""
    if api == "firecrest":
        user = None if status == 500 else "me"
        told = {"errorType": "error", "message": words, "data": None, "user": user}
        return Answer(status, JSON, json.dumps(told).encode())
    said = {"errorMessage": words, "status": status}
    return Answer(status, JSON, json.dumps(said).encode()) if words else Answer(status)


def answered(
    status: int, *, headers: Headers = (), after: bool = False, **words: str
) -> Callable[[str], Act]:
    """Answer with an error of the server, before or after it acted; `words` by API."""

    def make(api: str) -> Act:
        told = refusal(api, status, words.get(api, ""))
        answer = Answer(told.status, (*told.headers, *headers), told.body)
        return _said(answer, after=after)

    return make


def page(status: int, title: str, *, after: bool = False) -> Callable[[str], Act]:
    """Answer with a web page, of a gateway or a login portal."""
    text = _PAGE % (title.encode(), title.encode())
    return lambda api: _said(Answer(status, HTML, text), after=after)


def text(status: int, words: str) -> Callable[[str], Act]:
    """Answer with plain text, of a gateway."""
    answer = Answer(status, (("content-type", "text/plain"),), words.encode())
    return lambda api: _said(answer, after=False)


async def page_as_file(exchange: Exchange) -> None:
    """A login page that has the status and the content type of the file that was asked for."""
    answer = await exchange.forward()
    await exchange.send(Answer(answer.status, answer.headers, b"<html>Please log in</html>"))


def _said(answer: Answer, *, after: bool) -> Act:
    async def act(exchange: Exchange) -> None:
        if after:
            await exchange.forward()
        await exchange.send(answer)

    return act


async def reset(exchange: Exchange) -> None:
    """The connection breaks, and nothing has happened."""
    exchange.reset()


async def lost(exchange: Exchange) -> None:
    """It happens, and the connection breaks before the answer."""
    await exchange.forward()
    exchange.reset()


async def hang(exchange: Exchange) -> None:
    """Nothing happens and nobody says anything."""
    await exchange.gone()


async def slow(exchange: Exchange) -> None:
    """It happens, later."""
    await asyncio.sleep(OUTAGE_S)
    await pass_on(exchange)


async def hang_after(exchange: Exchange) -> None:
    """It happens, and nobody says anything."""
    await exchange.forward()
    await exchange.gone()


async def cut(exchange: Exchange) -> None:
    """It happens, and the answer breaks off in the middle."""
    await exchange.send_part(await exchange.forward(), 0.5)


async def drip(exchange: Exchange) -> None:
    """It happens, and the answer comes in pieces, slowly."""
    await exchange.send_slowly(await exchange.forward(), 1.5, 10)


async def endless(exchange: Exchange) -> None:
    """It happens, and the answer comes byte by byte, so that no read ever times out."""
    answer = await exchange.forward()
    await exchange.send_slowly(answer, 600.0, 1200)


async def nonsense(exchange: Exchange) -> None:
    """It happens, and the answer is JSON of another form."""
    answer = await exchange.forward()
    await exchange.send(Answer(answer.status, JSON, b'{"detail": [{"loc": ["?"]}], "output": 7}'))


async def half_json(exchange: Exchange) -> None:
    """It happens, and the answer is well framed and its JSON is not."""
    answer = await exchange.forward()
    # What a busy server did not do stays refused, or the fault would claim that it was done.
    status = 200 if answer.status < 400 else answer.status
    await exchange.send(Answer(status, JSON, answer.body[: len(answer.body) // 2] + b'{"'))


async def refused(exchange: Exchange) -> None:
    """Nobody listens for a while."""
    exchange.proxy.shut(OUTAGE_S)


@dataclass
class _Lasting:
    """A fault of all requests for a time from the first one on, then none."""

    seconds: float
    act: Act
    ends: float = field(default=0.0)

    async def __call__(self, exchange: Exchange) -> None:
        now = time.monotonic()
        self.ends = self.ends or now + self.seconds
        await (self.act if now < self.ends else pass_on)(exchange)


@dataclass
class _Restart:
    """The server goes away, denies everything while it starts, and knows no session any more."""

    api: str
    steps: list[float] = field(default_factory=list)

    async def __call__(self, exchange: Exchange) -> None:
        now = time.monotonic()
        if not self.steps:
            self.steps = [now + 1.0, now + 3.0]
            exchange.proxy.shut(1.0)
        elif now < self.steps[1] and self.api == "unicore":
            await exchange.send(refusal(self.api, 404))
        elif now < self.steps[1]:
            await page(502, "Bad Gateway")(self.api)(exchange)
        else:
            await pass_on(exchange)


def _plain(act: Callable[[Exchange], Awaitable[None]]) -> Callable[[str], Act]:
    return lambda api: act


def then(do: Callable[[], None]) -> Act:
    """Call `do`, and pass the request on."""

    async def act(exchange: Exchange) -> None:
        await asyncio.to_thread(do)
        await pass_on(exchange)

    return act


def calling(do: Callable[[], None], *, after: bool) -> Act:
    """Call `do`, before or after the server acts, and let nobody hear of it."""

    async def act(exchange: Exchange) -> None:
        if after:
            await exchange.forward()
        await asyncio.to_thread(do)
        exchange.reset()

    return act


FAULTS = (
    Fault("429", answered(429, headers=(("retry-after", "1"),))),
    Fault("401", answered(401, firecrest="Access token is invalid."), 2),
    Fault("403", answered(403, firecrest="Forbidden"), 2),
    Fault("404", answered(404, firecrest="No such file or directory"), 2),
    Fault("404-of-a-gateway", page(404, "Not Found")),
    Fault("500", answered(500, unicore="Internal error", firecrest="Internal error")),
    Fault("500-after-acting", answered(500, unicore="?", firecrest="Error", after=True)),
    Fault("503", lambda api: _Lasting(OUTAGE_S, page(503, "Maintenance")(api)), None),
    Fault("503-of-the-site", answered(503, unicore="busy", firecrest="is unhealthy")),
    Fault("refused", _plain(refused), 1),
    Fault("reset", _plain(reset)),
    Fault("hang", _plain(hang), 2),
    Fault("hang-after-acting", _plain(hang_after), 2),
    Fault("cut", _plain(cut)),
    Fault("lost-after-acting", _plain(lost)),
    Fault("wrong-json", _plain(nonsense)),
    Fault("half-json", _plain(half_json)),
    Fault("html-502-after-acting", page(502, "Bad Gateway", after=True)),
    Fault("login-page", page(200, "Please log in")),
    Fault("drip", _plain(drip)),
    Fault("slow", _plain(slow)),
    Fault("endless-drip", _plain(endless), 2),
    Fault("restart", _Restart, None),
)
"""What the proxy does; the other faults are done to the controller and to the file systems."""

ODD = (
    Fault("400-of-a-gateway", text(400, "Bad Request"), 3),
    Fault("418-of-a-gateway", text(418, "I'm a teapot"), 3),
    Fault("400", answered(400, unicore="Odd", firecrest="Odd"), 3),
    Fault(
        "permission-denied",
        answered(500, unicore="Permission denied", firecrest="cat: x: Permission denied"), 3,
    ),
    Fault("page-as-file", _plain(page_as_file), 3),
)  # fmt: skip
"""Answers to a request for a file that would be a definite no, if they were true."""
