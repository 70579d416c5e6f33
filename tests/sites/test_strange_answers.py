"""Answers of real shape with strange contents: whatever a server says, there is an error for it.

A proxy between the client and the sandbox changes some values of the JSON that comes back.
`MANTIK_STRANGE_SEEDS=700-899` attempts others.
"""

import asyncio
import json
import random
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.common.errors import MantikError, printable
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites import rest
from snakemake_executor_plugin_mantik.sites.authentication import Password
from snakemake_executor_plugin_mantik.sites.base import Entry, Site, Submission
from snakemake_executor_plugin_mantik.sites.firecrest import jobs
from tests.support.benches import any_site, firecrest_site, in_use
from tests.support.proxy import Answer, Exchange, Proxy, Rule
from tests.support.seeds import seeds

STRANGE: list[Any] = [
    None, True, -1, 10**30, float("inf"), float("nan"), 0.5, "", "..", ".", "../../etc/passwd", "/",
    "\x1b[2J\x1b]0;owned\x07", "a\0b", "\ud800", "a\nb", "9" * 5000, "0001-01-01T00:00:00+0000",
    "9999-12-31T23:59:59", [], {}, [[]], [None], {"a": {}}, {"../x": {}}, [{"name": 7}],
]  # fmt: skip
"""What takes the place of values."""


def nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Each place in a JSON value, as its container and key."""
    found = []
    for key, value in (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    ):
        found += [(tree, key), *nodes(value)]
    return found


def changer(seed: int, when: Callable[[], bool]) -> Callable[[bytes], bytes]:
    """Changes about every other answer, in one place or two, from `when` on."""
    dice = random.Random(seed)

    def change(body: bytes) -> bytes:
        try:
            tree = json.loads(body)
        except ValueError:
            return body
        places = nodes(tree)
        if not places or not when() or dice.random() < 0.5:
            return body
        for container, key in dice.sample(places, min(len(places), dice.randint(1, 2))):
            container[key] = dice.choice(STRANGE)
        return json.dumps(tree).encode()

    return change


async def everything(site: Site) -> list[Entry]:
    """Ask an open site for all it can do; errors of sites are answers, too."""
    seen: list[Entry] = []
    said: list[str] = []
    tag = str(uuid.uuid4())
    ids = ["17"]

    async def read(path: str, offset: int = 0) -> None:
        size = 0
        async for part in site.get(path, offset=offset):
            size += len(part)
        assert size < 1 << 20

    async def submit() -> None:
        ids.append(await site.submit(Submission(tag, "job", "exit 0", Resources())))

    async def find() -> None:
        ids.extend((await site.find({tag: "job"})).get(tag, []))

    async def look(path: str) -> None:
        seen.extend((await site.list(path)).values())

    for act in (
        site.describe,
        lambda: site.put("d/f", b"content", private=True),
        lambda: site.make_directory("d/e"),
        lambda: look("d"),
        lambda: site.stat("d/f"),
        lambda: read("d/f"),
        lambda: read("d/f", 3),
        submit,
        find,
        lambda: site.states(ids),
        lambda: site.explain(ids[-1]),
        lambda: site.extend(ids, 100_000.0),
        lambda: site.cancel(ids),
        lambda: site.forget(ids),
        lambda: site.remove("d"),
    ):
        try:
            await act()
        except MantikError as error:
            said.append(str(error))
    assert [printable(text) for text in said] == said
    return seen


@pytest.mark.parametrize("seed", seeds(8, "MANTIK_STRANGE_SEEDS"))
@pytest.mark.parametrize("name", ["hpc1", "hpc2"])
def test_no_answer_surprises_us(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    monkeypatch.setattr(rest, "REPEAT_FIRST_S", 0.001)
    monkeypatch.setattr(rest, "REPEAT_LONGEST_S", 0.01)
    monkeypatch.setattr(rest, "REPEAT_ATTEMPTS", 2)
    monkeypatch.setattr(jobs, "FIRST_LOOK_S", 0.05)
    monkeypatch.setattr(jobs, "UNSEEN_S", 0.2)

    opened = seed % 5 == 0

    change = changer(seed, lambda: opened)

    async def act(exchange: Exchange) -> None:
        answer = await exchange.forward()
        await exchange.send(Answer(answer.status, answer.headers, change(answer.body)))

    async def scenario(url: str) -> list[Entry]:
        nonlocal opened
        site: Site = (
            any_site("unicore", url, Password(*sandbox.credentials("hpc1")))
            if name == "hpc1"
            else firecrest_site(sandbox, "ws", url=url)
        )
        async with in_use(site), asyncio.timeout(250):
            try:
                await site.open()
            except MantikError:
                return []
            opened = True
            return await everything(site)

    server, slash, path = sandbox.url(name).partition(f"/{name}/")
    with Proxy(server, lambda _: "any") as proxy:
        proxy.add(Rule("strange", None, act, None))
        for entry in asyncio.run(scenario(f"{proxy.url}{slash}{path}")):
            assert isinstance(entry.size, int)
