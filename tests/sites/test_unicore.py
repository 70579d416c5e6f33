"""What UNICORE's adapter does beyond the contract, on a real UNICORE/X."""

import asyncio
import time
import uuid
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from hpc_sandbox import files
from snakemake_executor_plugin_mantik.common.errors import SiteRejected, UserError
from snakemake_executor_plugin_mantik.config.reading import read_configs
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites import make_site
from snakemake_executor_plugin_mantik.sites.authentication import Bearer, Password, SshKey
from snakemake_executor_plugin_mantik.sites.base import QueueLimits, SiteFacts, Submission
from snakemake_executor_plugin_mantik.sites.unicore import UnicoreSite
from snakemake_executor_plugin_mantik.sites.unicore.connection import (
    SESSION_EXPIRED,
    parse_server_time,
)
from tests.sites.contract.steps import content, ended, until
from tests.support.benches import Bench, in_use, open_and_close, unicore_site
from tests.support.unicoreserver import KEY_USER, PASSWORD, USER, UnicoreX


@pytest.fixture
def workspace() -> str:
    return f"ws-{uuid.uuid4()}"


@pytest.fixture
def settings() -> dict[str, Any]:
    return {}


@pytest.fixture
def made(unicorex: UnicoreX, workspace: str, settings: dict[str, Any]) -> UnicoreSite:
    return unicore_site(unicorex, workspace, **settings)


DEEP = "up3/up2/up1/workdir"


class TestWorkspace:
    async def test_is_made_in_scratch_by_default(
        self, unicorex: UnicoreX, workspace: str, facts: SiteFacts
    ) -> None:
        assert facts.workspace == f"{unicorex.directory}/scratch/mantik/{workspace}/{DEEP}"
        assert Path(facts.workspace).is_dir()

    @pytest.mark.parametrize("settings", [{"Storage": "WORK"}, {"Storage": "work"}])
    async def test_in_the_named_storage(
        self, unicorex: UnicoreX, workspace: str, site: UnicoreSite, facts: SiteFacts
    ) -> None:
        assert facts.workspace == f"{unicorex.directory}/work/mantik/{workspace}/{DEEP}"
        await site.put("f", b"1")
        assert (Path(facts.workspace) / "f").read_bytes() == b"1"

    async def test_in_a_directory_of_any_storage(self, unicorex: UnicoreX, workspace: str) -> None:
        wanted = f"{unicorex.directory}/work/some where/{workspace}"
        facts = await open_and_close(unicore_site(unicorex, workspace, Workspace=wanted))
        assert facts.workspace == f"{wanted}/{DEEP}"
        assert Path(facts.workspace).is_dir()

    @pytest.mark.parametrize(
        "settings",
        [
            {"Storage": "NOWHERE"},
            {"Workspace": "/nowhere/at/all"},
            {"Storage": "WORK", "Workspace": "/nowhere"},
        ],
    )
    async def test_that_no_storage_holds(
        self, unicorex: UnicoreX, workspace: str, settings: dict[str, Any]
    ) -> None:
        with pytest.raises(SiteRejected, match=r"storages there: .*Set Storage or Workspace"):
            await open_and_close(unicore_site(unicorex, workspace, **settings))


async def test_facts(facts: SiteFacts) -> None:
    assert facts.server == "UNICORE/X 11.0.0"
    assert facts.user == "root"
    assert facts.queues["batch"] == QueueLimits(
        runtime_s=(1, 360_000),
        nodes=(1, 8),
        cpus_per_node=(1, 64),
        memory_mib_per_node=(1, 65_536),
        gpus_per_node=(0, 4),
    )
    assert facts.queues["develop"] == QueueLimits(
        runtime_s=(1, 7_200), nodes=(1, 1), cpus_per_node=(1, 8)
    )


def repetitions(site: UnicoreSite) -> list[httpx.Response]:
    """Answers that a session has expired, as they come: others that use the server push it out."""
    expired = []

    async def note(response: httpx.Response) -> None:
        if response.status_code == SESSION_EXPIRED:
            expired.append(response)

    site._connection._client.event_hooks["response"].append(note)
    return expired


async def test_requests_of_each_act(site: UnicoreSite) -> None:
    assert site.requests.total() <= 10, "to open it, and once more where the session expired"
    repeated = repetitions(site)

    async def costs(act: Awaitable[object]) -> int:
        before, again = site.requests.total(), len(repeated)
        await act
        return site.requests.total() - before - (len(repeated) - again)

    submission = Submission(str(uuid.uuid4()), "x", "exit 0", Resources())
    submitting = asyncio.ensure_future(site.submit(submission))
    assert await costs(submitting) == 1
    job = submitting.result()
    assert await costs(site.put("f", b"1")) == 1
    assert await costs(site.put("p", b"1", private=True)) == 4
    assert await costs(site.list(".")) == 1
    assert await costs(site.stat("f")) == 1
    assert await costs(content(site, "f")) == 1
    assert await costs(content(site, "f", 1)) == 1
    assert await costs(site.make_directory("d")) == 1
    assert await costs(site.remove("d")) == 1
    assert await costs(site.states([job])) == 1
    assert await costs(site.find({submission.tag: submission.name})) == 1
    assert await costs(site.extend([job], 30 * 86_400)) == 2
    assert await costs(site.cancel([job])) == 1
    assert await costs(site.forget([job])) == 1


async def test_key(unicorex: UnicoreX, workspace: str) -> None:
    key = SshKey(KEY_USER, unicorex.key_file)
    await open_and_close(unicore_site(unicorex, workspace, credential=key))


async def test_session_that_expired(site: UnicoreSite) -> None:
    """A session ends after 8 h, or earlier when others push it out: 432, and once again without."""
    connection = site._connection

    def expire() -> None:
        assert connection._session
        connection._session = "no-such-session"

    expire()
    await site.put("f", b"uploaded")
    expire()
    assert await content(site, "f") == b"uploaded"
    assert connection._session != "no-such-session"
    expire()
    assert sorted(await site.list(".")) == ["f"]


async def test_download_keeps_the_session(site: UnicoreSite) -> None:
    """A server keeps five sessions of a user: one more for each download would push out others."""
    await site.put("f", b"1")
    repeated = repetitions(site)
    session = site._connection._session
    await content(site, "f")
    assert repeated or site._connection._session == session


async def test_listing_of_more_than_a_server_tells_at_once(
    site: UnicoreSite, facts: SiteFacts
) -> None:
    names = {f"f{number}" for number in range(10_050)}
    directory = Path(facts.workspace) / "many"
    directory.mkdir()
    for name in names:
        (directory / name).touch()
    repeated = repetitions(site)
    assert set(await site.list("many")) == names
    assert site.requests["list"] - len(repeated) == 2


@pytest.mark.parametrize("off", [-5 * 3600.0, 5 * 3600.0])
async def test_extends_by_the_servers_clock(
    monkeypatch: pytest.MonkeyPatch, off: float, site: UnicoreSite
) -> None:
    clock = time.time

    async def ends() -> float:
        answer = await site._connection.get("x", f"/jobs/{job}", {"fields": "terminationTime"})
        return parse_server_time(answer["terminationTime"])

    job = await site.submit(Submission("tag", "x", "exit 0", Resources()))
    # Ours is set meanwhile.
    monkeypatch.setattr(time, "time", lambda: clock() + off)
    await site.extend([job], 10 * 86_400)
    assert await ends() == pytest.approx(clock() + 10 * 86_400, abs=600)
    await site.extend([job], 60)
    assert await ends() == pytest.approx(clock() + 10 * 86_400, abs=600)


@pytest.mark.parametrize("settings", [{"scheduler": "none"}])
class TestWithoutAScheduler:
    async def test_runs(self, site: UnicoreSite) -> None:
        resources = Resources(
            queue="batch", runtime_s=600, nodes=1, cpus_per_task=2, memory_mib_per_node=1024,
            qos="unknown here",
        )  # fmt: skip
        job = await site.submit(Submission("tag", "x", "exit 0", resources))
        assert (await until(site, job, ended)).reason is Reason.SUCCESS
        # This server would lose it on the way.
        with pytest.raises(UserError, match="2 GiB or more"):
            await site.submit(Submission("x", "x", "", Resources(memory_mib_per_node=4096)))

    async def test_too_many_resources(self, site: UnicoreSite) -> None:
        job = await site.submit(
            Submission("tag", "x", "exit 0", Resources(queue="develop", runtime_s=100_000))
        )
        assert (await until(site, job, ended)).reason is Reason.REJECTED
        state = await site.explain(job)
        assert state.reason is Reason.REJECTED
        assert "Runtime=100000" in state.detail


def test_ca_file_that_is_none(unicorex: UnicoreX, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="CAFile"):
        unicore_site(unicorex, "x", CAFile=str(tmp_path / "none.pem"))


async def test_made_from_a_backend_config(
    unicorex: UnicoreX, tmp_path: Path, workspace: str
) -> None:
    (tmp_path / "site.yaml").write_text(
        f"UnicoreApiUrl: {unicorex.url}\nResources: {{Queue: batch}}\n"
        f"Site: {{CAFile: {unicorex.ca_file}}}\n"
    )
    (tmp_path / "other.yaml").write_text(
        "Firecrest: {ApiUrl: 'https://a.example.org', TokenUrl: 'https://a.example.org/t', "
        "Machine: x}\nResources: {Queue: batch}\n"
    )
    configs = read_configs(["site.yaml", "other.yaml"], tmp_path)
    credential = Password(USER, PASSWORD)
    site = make_site(configs["site"], credential, workspace, project=tmp_path)
    await open_and_close(site)
    other = make_site(configs["other"], Bearer("t"), workspace, project=tmp_path, account="g34")
    assert cast(Any, other).connection.product == "firecREST v2"
    await other.close()


@pytest.mark.parametrize("limit", [100, 150])
@pytest.mark.parametrize("more", [-1, 0, 1, 220])
async def test_a_limit_below_the_one_that_is_asked_for(
    sandbox_bench: Bench, monkeypatch: pytest.MonkeyPatch, limit: int, more: int
) -> None:
    """The server says nothing of the entries that it leaves out."""
    monkeypatch.setattr(files, "_MAX_ENTRIES", limit)
    async with in_use(sandbox_bench.site()) as site:
        facts = await site.open()
        names = {f"{n}" for n in range(limit + more)}
        await site.make_directory("many")
        for name in names:
            (Path(facts.workspace) / "many" / name).touch()
        for _ in range(2):
            assert set(await site.list("many")) == names
