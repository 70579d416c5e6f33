"""What a firecREST site does in trouble: the sandbox's faults are those of a real server."""

import asyncio
import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_sandbox.faults import Fault
from hpc_sandbox.firecrest import store
from hpc_sandbox.firecrest.site import FirecrestServer as FirecrestSandbox
from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.common.errors import SiteBusy, SiteRejected, SiteUnreachable
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites.base import Phase, Submission
from snakemake_executor_plugin_mantik.sites.firecrest import FirecrestSite
from snakemake_executor_plugin_mantik.sites.firecrest.jobs import name_lists
from tests.sites.contract.steps import content, ended, until
from tests.support.benches import firecrest_site, in_use

SUBMIT = {"method": "POST", "path": "/compute/hpc2/jobs$"}


@pytest.fixture
def made(sandbox: Sandbox) -> FirecrestSite:
    return firecrest_site(sandbox, f"ws-{uuid.uuid4()}")


def a_job(script: str = "exit 0") -> Submission:
    return Submission(str(uuid.uuid4()), "job", script, Resources())


def served(box: Sandbox) -> FirecrestSandbox:
    site = box.site("hpc2")
    assert isinstance(site, FirecrestSandbox)
    return site


def has(site: FirecrestSite, **facts: Any) -> None:
    """Let an open site's system have other `facts`."""
    site._opened = replace(site._open, system=replace(site._open.system, **facts))


class TestSubmissions:
    @pytest.mark.parametrize("action", ["timeout_after", "drop_after"])
    async def test_that_were_made_without_an_answer_are_found(
        self, faulty: Sandbox, action: str, site: FirecrestSite
    ) -> None:
        fault = faulty.faults.add(Fault(action, **SUBMIT))  # type: ignore[arg-type]
        job = a_job("sleep 2")
        with pytest.raises(SiteUnreachable):
            await site.submit(job)
        assert fault.happened == 1
        async with asyncio.timeout(100):
            while not (found := (await site.find({job.tag: job.name}))[job.tag]):
                await asyncio.sleep(0.1)
        assert len(found) == 1

    async def test_that_were_not_made_are_told_likewise(
        self, faulty: Sandbox, site: FirecrestSite
    ) -> None:
        faulty.faults.add(Fault("timeout_before", **SUBMIT))  # type: ignore[arg-type]
        job = a_job()
        with pytest.raises(SiteUnreachable):
            await site.submit(job)
        assert await site.submit(a_job()), "though the connection goes behind that answer"
        assert await site.find({job.tag: job.name}) == {job.tag: []}

    async def test_are_made_once(self, faulty: Sandbox, site: FirecrestSite) -> None:
        fault = Fault("refuse", status=503, count=None, message="is unhealthy", **SUBMIT)  # type: ignore[arg-type]
        faulty.faults.add(fault)
        with pytest.raises(SiteBusy):
            await site.submit(a_job())
        assert fault.happened == 1


class TestFinding:
    async def test_costs_one_list_for_all_that_are_few(self, site: FirecrestSite) -> None:
        few = {str(uuid.uuid4()): "count" for _ in range(5)}
        before = site.requests["find"]
        assert await site.find(few) == {tag: [] for tag in few}
        assert site.requests["find"] - before == 1
        assert await site.find({}) == {}
        assert site.requests["find"] - before == 1

    async def test_of_many_costs_one_list_of_all_jobs(self, site: FirecrestSite) -> None:
        job = a_job()
        jobs = [await site.submit(job)]
        many = {str(uuid.uuid4()): "count" for _ in range(500)} | {job.tag: job.name}
        before = site.requests["find"]
        async with asyncio.timeout(100):
            while (await site.find(many))[job.tag] != jobs:
                before = site.requests["find"]
                await asyncio.sleep(0.1)
        assert site.requests["find"] - before == 1

    async def test_of_many_goes_on_where_the_server_cannot_list_all_jobs(
        self, monkeypatch: pytest.MonkeyPatch, site: FirecrestSite
    ) -> None:
        listed = site._list
        unnamed = 0

        async def too_many(kind: str, window: str, name: str = "") -> object:
            nonlocal unnamed
            unnamed += not name
            if not name:
                raise SiteUnreachable("Error executing Slurm command.", status=500)
            return await listed(kind, window, name)

        monkeypatch.setattr(site, "_list", too_many)
        many = {str(uuid.uuid4()): "count" for _ in range(100)}
        for _ in range(2):
            before = site.requests["find"]
            assert await site.find(many) == {tag: [] for tag in many}
            assert site.requests["find"] - before == 20
        assert unnamed == 1


@pytest.mark.parametrize(
    ("lengths", "lists"), [([], 0), ([42] * 5, 1), ([42] * 6, 2), ([235, 1, 233], 2), ([300], 1)]
)
def test_names_of_a_list(lengths: list[int], lists: int) -> None:
    names = [str(number) * length for number, length in enumerate(lengths)]
    made = list(name_lists(names))
    assert len(made) == lists
    assert ",".join(made).split(",") == (names or [""])
    assert all(len(text) <= 235 for text in made if "," in text)


class TestStates:
    async def test_of_many_are_one_request(self, site: FirecrestSite) -> None:
        # None of them may end meanwhile: the list would lack it for a moment.
        jobs = [await site.submit(a_job("exec sleep 300")) for _ in range(5)]
        before = site.requests["status"]
        try:
            found = await site.states(jobs)
            assert {state.phase for state in found.values()} <= {Phase.WAITING, Phase.RUNNING}
            assert site.requests["status"] == before + 1
        finally:
            await site.cancel(jobs)

    async def test_of_servers_that_list_no_window(self, site: FirecrestSite) -> None:
        jobs = [await site.submit(a_job("sleep 1")) for _ in range(2)]
        has(site, server="firecREST 2.5.4")
        found = await site.states(jobs)
        assert Phase.UNKNOWN not in {state.phase for state in found.values()}

    async def test_are_asked_for_singly_where_the_list_lacks_them(
        self, monkeypatch: pytest.MonkeyPatch, site: FirecrestSite
    ) -> None:
        jobs = [await site.submit(a_job("sleep 1")) for _ in range(2)]
        listed = site._list

        async def lacking(kind: str, window: str) -> object:
            found = await listed(kind, window)
            return {job: found[job] for job in found if job != jobs[0]}

        monkeypatch.setattr(site, "_list", lacking)
        found = await site.states([*jobs, "999999"])
        assert Phase.UNKNOWN not in {found[job].phase for job in jobs}
        assert found["999999"].phase is Phase.UNKNOWN

    async def test_of_users_with_too_many_jobs(self, faulty: Sandbox, site: FirecrestSite) -> None:
        jobs = [await site.submit(a_job("sleep 1")) for _ in range(2)]
        message = "Error executing Slurm command."
        faulty.faults.add(Fault("refuse", "GET", "/jobs$", status=500, message=message, count=4))
        found = await site.states(jobs)
        assert Phase.UNKNOWN not in {state.phase for state in found.values()}


class TestFiles:
    async def test_with_tokens_that_expired_behind_our_back(
        self, faulty: Sandbox, site: FirecrestSite
    ) -> None:
        served(faulty).tokens.change_key()
        await asyncio.gather(*(site.put(f"d/{n}", b"1") for n in range(10)))
        assert len(await site.list("d")) == 10

    async def test_directory_that_somebody_removed_is_made_again(
        self, sandbox: Sandbox, site: FirecrestSite
    ) -> None:
        await site.put("d/e/one", b"1")
        async with in_use(firecrest_site(sandbox, site._workspace_name)) as other:
            await other.open()
            await other.remove("d")
        await site.put("d/e/two", b"2")
        assert list(await site.list("d/e")) == ["two"]

    async def test_small_ones_are_one_request(self, site: FirecrestSite) -> None:
        await site.put("f", b"1")
        before = site.requests.copy()
        await site.put("f", b"2")
        assert [chunk async for chunk in site.get("f", size=1)] == [b"2"]
        assert site.requests - before == {"upload": 1, "download": 1}

    async def test_many_at_once_keep_to_the_ssh_channels_of_a_user(
        self, site: FirecrestSite
    ) -> None:
        """The site has ten: one request more is refused, and repeated."""
        before = site.requests.copy()
        job = await site.submit(a_job())
        await asyncio.gather(
            *(site.put(f"many/{n}", bytes(100_000)) for n in range(40)),
            *(site.states([job]) for _ in range(10)),
        )
        assert site.requests - before == {"submit": 1, "mkdir": 1, "upload": 40, "status": 10}

    async def test_names_that_jobs_made(self, site: FirecrestSite) -> None:
        root = site._open.root
        job = await site.submit(a_job(f"mkdir '{root}/d' && touch '{root}/d/größer €'"))
        await until(site, job, ended)
        assert list(await site.list("d")) == ["größer €"]

    async def test_the_workspace_itself_stays(self, site: FirecrestSite) -> None:
        with pytest.raises(SiteRejected):
            await site.remove(".")

    async def test_too_long_for_the_server_to_remove(
        self, faulty: Sandbox, site: FirecrestSite
    ) -> None:
        await site.put("d/e/f", b"1")
        faulty.faults.add(Fault("timeout_before", "DELETE", "/ops/rm"))
        await site.remove("d")
        assert await site.stat("d") is None


def write(site: FirecrestSite, name: str, data: bytes) -> None:
    """Make a file of the workspace as a job does."""
    target = Path(site._at(name))
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(data)


class TestLarge:
    @pytest.mark.parametrize("way", ["s3", ""])
    @pytest.mark.parametrize("name", ["large", "d/a b&c<d>"])
    async def test_come(self, way: str, name: str, site: FirecrestSite) -> None:
        has(site, transfer=way)
        data = os.urandom((9 << 20) + 17)
        write(site, name, data)
        assert await content(site, name) == data
        for offset in (1, 5_000_000, len(data) - 1, len(data)):
            assert await content(site, name, offset) == data[offset:]
        with pytest.raises(SiteRejected):
            await content(site, name, len(data) + 1)
        if not way:
            assert await site.list(".mantik/transfers") == {}

    async def test_goes_on_where_it_broke(self, faulty: Sandbox, site: FirecrestSite) -> None:
        data = os.urandom(9 << 20)
        write(site, "large", data)
        faulty.faults.add(Fault("cut", "GET", "large", bytes=3 << 20))
        came = b""

        async def fetch() -> None:
            nonlocal came
            async for chunk in site.get("large"):
                came += chunk

        with pytest.raises(SiteUnreachable):
            await fetch()
        assert 0 < len(came) < len(data)
        before = site.requests["transfer"]
        assert came + await content(site, "large", len(came)) == data
        assert site.requests["transfer"] == before

    async def test_are_shared_with_time_left(
        self, monkeypatch: pytest.MonkeyPatch, site: FirecrestSite
    ) -> None:
        write(site, "large", os.urandom(9 << 20))
        shared = await site.share("large")
        assert shared is not None
        assert await site.share("large") == shared
        monkeypatch.setattr(store, "STORE_LIFETIME", 0)
        write(site, "other", os.urandom(9 << 20))
        shared = await site.share("other")
        assert shared is not None
        assert await site.share("other") != shared, "it has expired meanwhile"

    async def test_are_imported_although_the_answer_is_lost(
        self, faulty: Sandbox, site: FirecrestSite
    ) -> None:
        data = os.urandom(9 << 20)
        write(site, "large", data)
        shared = await site.share("large")
        assert shared is not None
        faulty.faults.add(Fault("drop_after", **SUBMIT))  # type: ignore[arg-type]
        begun = await site.start_import(shared, "copy")
        assert begun is not None
        assert (await site.import_state(begun)).phase is Phase.UNKNOWN
        async with asyncio.timeout(100):
            while (entry := await site.stat("copy")) is None or entry.size < len(data):
                await asyncio.sleep(0.1)
        await site.end_import(begun)
        assert await site.list(".mantik/transfers") == {}, "the URL stays nowhere"
