"""What the engine may rely on, whatever the site: every site of this package passes this suite."""

import asyncio
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.errors import (
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites.base import (
    JobState,
    Phase,
    Site,
    SiteFacts,
    Submission,
    rest_safe,
)
from tests.support.benches import BENCHES, Bench

STARTS_S = 100.0
"""How long a job may take to start, or to end after it was asked to, seconds."""

WEIRD = ["a b", "c#d", "e?f&g=h", "i+j;k", "l[1]*", "m:n,o", "~p", "-q", "r(s)", "@t!", ".u"]
"""Names that every file API must carry (`rest_safe`)."""


@pytest.fixture(params=BENCHES)
def bench(request: pytest.FixtureRequest) -> Bench:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Bench)
    return found


def a_job(script: str) -> Submission:
    return Submission(str(uuid.uuid4()), "rule: a=1,b", script, Resources(runtime_s=600))


async def content(site: Site, path: str, offset: int = 0) -> bytes:
    return b"".join([chunk async for chunk in site.get(path, offset=offset)])


async def until(site: Site, job: str, wanted: Callable[[JobState], bool]) -> JobState:
    deadline = time.monotonic() + STARTS_S
    while time.monotonic() < deadline:
        state = (await site.states([job]))[job]
        if wanted(state):
            return state
        await asyncio.sleep(0.1)
    raise AssertionError(f"the job is still {state}")


def held_job(facts: SiteFacts, code: int) -> Submission:
    """A job that ends with this exit code once it may (`until_let_end`).

    One that ends while it is still being taken in has the exit code 0 at a UNICORE/X that runs jobs
    itself, whatever its own is: seen with 3.0.0, on a machine with much to do.
    """
    return a_job(f"until [ -e '{facts.workspace}/end-{code}' ]; do sleep 0.1; done; exit {code}")


async def until_let_end(site: Site, job: str, code: int) -> JobState:
    """The last state of a `held_job`."""
    await until(site, job, running)
    await site.put(f"end-{code}", b"")
    return await until(site, job, ended)


async def until_found(site: Site, tag: str, wanted: set[str]) -> None:
    """The list of a scheduler may lack a job for some seconds; it never tells one that is not."""
    deadline = time.monotonic() + STARTS_S
    while (found := set(await site.find(tag))) != wanted:
        assert found < wanted
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


def ended(state: JobState) -> bool:
    return state.phase is Phase.ENDED


def running(state: JobState) -> bool:
    return state.phase is Phase.RUNNING


class TestOpening:
    def test_tells_where_jobs_find_the_workspace(self, bench: Bench) -> None:
        async def scenario(site: Site, facts: SiteFacts) -> None:
            assert facts.workspace.startswith("/")
            assert facts.server
            await site.put("in.txt", b"from here")
            job = await site.submit(a_job(f"cd '{facts.workspace}' && cat in.txt > out.txt"))
            await until(site, job, ended)
            assert await content(site, "out.txt") == b"from here"

        bench.run_opened(scenario)

    def test_again_keeps_what_is_there(self, bench: Bench) -> None:
        async def write(site: Site) -> None:
            await site.put("kept", b"1")

        async def read(site: Site) -> None:
            await site.open()
            assert await content(site, "kept") == b"1"

        bench.run(write)
        bench.run(read)

    def test_tells_who_runs_jobs_and_what_queues_allow(self, bench: Bench) -> None:
        async def scenario(_: Site, facts: SiteFacts) -> None:
            assert facts.user
            assert facts.max_entries > 0
            for limits in facts.queues.values():
                ranges = (limits.runtime_s, limits.nodes, limits.memory_mib_per_node,
                          limits.gpus_per_node)  # fmt: skip
                assert all(0 <= r[0] <= r[1] for r in ranges if r is not None)

        bench.run_opened(scenario)

    def test_closing_changes_nothing_at_the_site(self, bench: Bench) -> None:
        async def start(site: Site) -> str:
            await site.put("kept", b"1")
            job = await site.submit(a_job("exec sleep 300"))
            await until(site, job, running)
            return job

        job = bench.run(start)

        async def look(site: Site) -> None:
            await until(site, job, running)  # its record may say otherwise for a moment
            assert await content(site, "kept") == b"1"
            await site.cancel([job])

        bench.run(look)

    def test_with_credentials_that_are_wrong(self, bench: Bench) -> None:
        with pytest.raises(SiteUnauthorized):
            asyncio.run(open_and_close(bench.stranger()))

    def test_with_a_server_that_is_away(self, bench: Bench) -> None:
        with pytest.raises(SiteUnreachable):
            asyncio.run(open_and_close(bench.away()))


async def open_and_close(site: Site) -> None:
    try:
        await site.open()
    finally:
        await site.close()


class TestJobs:
    def test_runs_and_ends(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            job = await site.submit(a_job("exit 0"))
            state = await until(site, job, ended)
            assert state.reason is Reason.SUCCESS
            explained = await site.explain(job)
            assert (explained.phase, explained.reason) == (state.phase, state.reason)

        bench.run(scenario)

    def test_tells_the_exit_code(self, bench: Bench) -> None:
        async def scenario(site: Site, facts: SiteFacts) -> None:
            job = await site.submit(held_job(facts, 3))
            state = await until_let_end(site, job, 3)
            assert (state.reason, state.exit_code) == (Reason.EXIT_CODE, 3)
            assert (await site.explain(job)).exit_code == 3

        bench.run_opened(scenario)

    def test_script_arrives_byte_by_byte(self, bench: Bench) -> None:
        text = "'$HOME' \"$USER\" `id` $(id) \\n % # ü € 🙂 \t ${X:-y} <&>;"

        async def scenario(site: Site, facts: SiteFacts) -> None:
            script = f"cat > '{facts.workspace}/text' <<'END OF TEXT'\n{text}\nEND OF TEXT\n"
            await until(site, await site.submit(a_job(script)), ended)
            assert (await content(site, "text")).decode() == f"{text}\n"

        bench.run_opened(scenario)

    @pytest.mark.parametrize("name", ["", "a\nb", "ü 'x' \"y\" $HOME #%", "x" * 300])
    def test_name_is_any_text(self, bench: Bench, name: str) -> None:
        async def scenario(site: Site) -> None:
            job = await site.submit(replace(a_job("exit 0"), name=name))
            assert (await until(site, job, ended)).reason is Reason.SUCCESS

        bench.run(scenario)

    @pytest.mark.parametrize("login_shell", [False, True])
    def test_script_has_a_login_shell_where_it_asks(self, bench: Bench, login_shell: bool) -> None:
        async def scenario(site: Site, facts: SiteFacts) -> None:
            script = f"shopt login_shell > '{facts.workspace}/shell'; exit 0"
            job = await site.submit(replace(a_job(script), login_shell=login_shell))
            assert (await until(site, job, ended)).reason is Reason.SUCCESS
            told = (await content(site, "shell")).split()
            assert told == [b"login_shell", b"on" if login_shell else b"off"]

        bench.run_opened(scenario)

    def test_unknown_ones_are_explained_as_such(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            assert (await site.explain("no-such-job")).phase is Phase.UNKNOWN

        bench.run(scenario)

    def test_is_found_by_its_tag(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            one, other = a_job("exit 0"), a_job("exit 0")
            jobs = [await site.submit(one), await site.submit(other), await site.submit(one)]
            await until_found(site, one.tag, {jobs[0], jobs[2]})
            await until_found(site, other.tag, {jobs[1]})
            assert await site.find(str(uuid.uuid4())) == []

        bench.run(scenario)

    def test_is_cancelled(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            job = await site.submit(a_job("exec sleep 300"))
            assert (await until(site, job, running)).reason is None
            await site.cancel([job, "no-such-job"])
            assert (await until(site, job, ended)).reason is Reason.CANCELLED
            assert (await site.explain(job)).reason is Reason.CANCELLED
            await site.cancel([job])

        bench.run(scenario)

    def test_states_of_many(self, bench: Bench) -> None:
        async def scenario(site: Site, facts: SiteFacts) -> None:
            jobs = await asyncio.gather(*(site.submit(held_job(facts, n)) for n in range(8)))
            for n, job in enumerate(jobs):
                await until_let_end(site, job, n)
            found = await site.states([*jobs, "no-such-job"])
            assert [found[job].exit_code for job in jobs] == list(range(8))
            assert found["no-such-job"].phase is Phase.UNKNOWN
            assert await site.states([]) == {}

        bench.run_opened(scenario)

    def test_is_forgotten(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            job = await site.submit(a_job("exit 0"))
            await until(site, job, ended)
            await site.forget([job, "no-such-job"])
            left = Phase.UNKNOWN if bench.forgets else Phase.ENDED
            assert (await site.states([job]))[job].phase is left
            assert (await site.explain(job)).phase is left
            await site.forget([job])

        bench.run(scenario)

    def test_is_kept_longer(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            job = await site.submit(a_job("exit 0"))
            await site.extend([job, "no-such-job"], 20 * 86_400)
            await site.extend([job], 60)

        bench.run(scenario)

    def test_hooks_on_the_login_node(self, bench: Bench) -> None:
        async def scenario(site: Site, facts: SiteFacts) -> None:
            log = f"'{facts.workspace}/order'"
            hooked = Submission(
                str(uuid.uuid4()),
                "hooked",
                f"echo job >> {log}",
                Resources(),
                before_on_login=(f"echo before >> {log}", f"echo 'and before' >> {log} # note"),
                after_on_login=(f"echo after >> {log}",),
            )
            if not bench.hooks:
                with pytest.raises(SiteRejected):
                    await site.submit(hooked)
                return
            state = await until(site, await site.submit(hooked), ended)
            assert state.reason is Reason.SUCCESS
            assert await content(site, "order") == b"before\nand before\njob\nafter\n"

        bench.run_opened(scenario)

    def test_hook_that_fails_ends_the_job(self, bench: Bench) -> None:
        if not bench.hooks:
            pytest.skip("the site runs nothing on a login node")

        async def scenario(site: Site) -> None:
            failing = Submission(
                str(uuid.uuid4()), "x", "exit 0", Resources(), before_on_login=("true", "exit 4")
            )
            state = await until(site, await site.submit(failing), ended)
            assert state.reason is Reason.LAUNCH_FAILURE

        bench.run(scenario)


class TestFiles:
    def test_come_back_as_they_went(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            for data in (b"", b"text", bytes(range(256)) * 7):
                await site.put("deep/down/file", data)
                assert await content(site, "deep/down/file") == data

        bench.run(scenario)

    @pytest.mark.parametrize("name", WEIRD)
    def test_with_names_of_all_kinds(self, bench: Bench, name: str) -> None:
        assert rest_safe(name)

        async def scenario(site: Site) -> None:
            await site.put(f"d/{name}", b"1")
            await site.make_directory(f"d/{name}.dir")
            entries = await site.list("d")
            assert sorted(entries) == sorted([name, f"{name}.dir"])
            assert await site.stat(f"d/{name}") == entries[name]
            assert await content(site, f"d/{name}") == b"1"
            await site.remove(f"d/{name}")
            assert list(await site.list("d")) == [f"{name}.dir"]

        bench.run(scenario)

    @pytest.mark.parametrize("name", ["a%b", "a\nb", "a'b", "$HOME", "a\\b"])
    def test_with_names_that_cannot_be_carried(self, bench: Bench, name: str) -> None:
        assert not rest_safe(name)

        async def scenario(site: Site) -> None:
            with pytest.raises(SiteRejected):
                await site.put(name, b"1")
            with pytest.raises(SiteRejected):
                await content(site, name)
            with pytest.raises(SiteRejected):
                await site.list(name)
            with pytest.raises(SiteRejected):
                await site.stat(name)
            with pytest.raises(SiteRejected):
                await site.make_directory(name)
            with pytest.raises(SiteRejected):
                await site.remove(name)
            assert not [entry for entry in await site.list(".") if not entry.startswith(".")]

        bench.run(scenario)

    @pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "a//b", "./a"])
    def test_stay_in_the_workspace(self, bench: Bench, path: str) -> None:
        async def scenario(site: Site) -> None:
            with pytest.raises(SiteRejected):
                await site.stat(path)
            with pytest.raises(SiteRejected):
                await site.remove(path)

        bench.run(scenario)

    def test_is_replaced(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            await site.put("file", b"a longer one")
            await site.put("file", b"short")
            assert await content(site, "file") == b"short"

        bench.run(scenario)

    def test_large_one_is_replaced(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            for data in (os.urandom(6 << 20), b"short", os.urandom(7 << 20)):
                await site.put("file", data)
                assert await content(site, "file") == data

        bench.run(scenario)

    def test_in_parts(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            await site.put("file", b"0123456789")
            assert await content(site, "file", 4) == b"456789"
            assert await content(site, "file", 10) == b""

        bench.run(scenario)

    def test_large_one_from_disk(self, bench: Bench, tmp_path: Path) -> None:
        data = os.urandom(8 << 20)
        local = tmp_path / "large"
        local.write_bytes(data)

        async def scenario(site: Site) -> None:
            await site.put("large", local)
            entry = await site.stat("large")
            assert entry is not None
            assert entry.size == len(data)
            assert await content(site, "large") == data
            assert await content(site, "large", 7 << 20) == data[7 << 20 :]

        bench.run(scenario)

    def test_private(self, bench: Bench) -> None:
        async def scenario(site: Site, facts: SiteFacts) -> None:
            await site.put("work/secrets", b"export A=1", private=True)
            assert await content(site, "work/secrets") == b"export A=1"
            script = f"cd '{facts.workspace}' && cat work/secrets > seen && rm work/secrets"
            await until(site, await site.submit(a_job(script)), ended)
            assert await content(site, "seen") == b"export A=1"
            assert await site.stat("work/secrets") is None

        bench.run_opened(scenario)

    def test_listing(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            before = time.time()
            await site.put("d/file", b"12345")
            await site.put("d/sub/inner", b"1")
            entries = await site.list("d")
            assert sorted(entries) == ["file", "sub"]
            file, sub = entries["file"], entries["sub"]
            assert (file.name, file.size, file.directory) == ("file", 5, False)
            assert (sub.name, sub.size, sub.directory) == ("sub", 0, True)
            assert abs(file.modified - before) < 60
            assert await site.stat("d/sub") == sub

        bench.run(scenario)

    def test_that_are_missing(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            assert await site.stat("nothing") is None
            assert await site.stat("nothing/below") is None
            with pytest.raises(SiteNotFound):
                await site.list("nothing")
            with pytest.raises(SiteNotFound):
                await content(site, "nothing")
            with pytest.raises(SiteNotFound):
                await content(site, "nothing", 5)
            await site.remove("nothing/below")
            await site.put("file", b"1")
            with pytest.raises(SiteNotFound):
                await site.list("file")

        bench.run(scenario)

    def test_are_removed(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            await site.put("d/file", b"1")
            await site.put("d/sub/file", b"1")
            await site.remove("d/file")
            assert list(await site.list("d")) == ["sub"]
            await site.remove("d")
            assert await site.stat("d") is None
            await site.remove("d")

        bench.run(scenario)


class TestClaims:
    """A claim is a file, a revocation a directory of the same name: they exclude each other."""

    def test_directory_over_a_file(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            await site.put("tries/claim", b"1")
            with pytest.raises(SiteRejected):
                await site.make_directory("tries/claim")
            assert await content(site, "tries/claim") == b"1"

        bench.run(scenario)

    def test_directory_with_its_parents(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            await site.make_directory("new/tries/claim")
            entry = await site.stat("new/tries/claim")
            assert entry is not None
            assert (entry.name, entry.size, entry.directory) == ("claim", 0, True)
            assert await site.list("new/tries/claim") == {}

        bench.run(scenario)

    def test_file_over_a_directory(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            await site.make_directory("tries/claim")
            await site.make_directory("tries/claim")
            with pytest.raises(SiteRejected):
                await site.put("tries/claim", b"1")
            assert (await site.list("tries"))["claim"].directory

        bench.run(scenario)


class TestConcurrency:
    def test_many_requests_at_the_same_time(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            names = [f"many/{number}" for number in range(60)]
            await asyncio.gather(*(site.put(name, name.encode()) for name in names))
            found = await asyncio.gather(*(content(site, name) for name in names))
            assert found == [name.encode() for name in names]

        bench.run(scenario)

    def test_small_requests_pass_downloads_that_wait(self, bench: Bench) -> None:
        async def scenario(site: Site) -> None:
            await site.put("large", os.urandom(4 << 20))
            places = SiteSettings().concurrent_requests  # no more downloads begin at once
            streams = [site.get("large") for _ in range(places)]
            for stream in streams:
                await anext(stream)
            assert await asyncio.wait_for(site.stat("large"), STARTS_S) is not None
            for stream in streams:
                async for _ in stream:
                    pass

        bench.run(scenario)
