"""Files of the workspace."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteNotFound, SiteRejected
from snakemake_executor_plugin_mantik.config.settings import Timing
from snakemake_executor_plugin_mantik.sites.base import Site, SiteFacts, is_rest_safe
from tests.sites.contract.steps import STARTS_S, a_job, content, ended, refused, until

WEIRD = ["a b", "c#d", "e?f&g=h", "i+j;k", "l[1]*", "m:n,o", "~p", "-q", "r(s)", "@t!", ".u"]
"""Names that every file API must carry (`is_rest_safe`)."""
SIZES = [0, 1, 3_932_100, 3_932_160, 5_242_880, 5_242_881, 5_505_030, 20 << 20]
"""On both sides of what firecREST takes, gives, answers 413 to, and blocks on; and beyond all."""


class TestFiles:
    async def test_come_back_as_they_went(self, site: Site) -> None:
        for data in (b"", b"text", bytes(range(256)) * 7):
            await site.put("deep/down/file", data)
            assert await content(site, "deep/down/file") == data

    async def test_with_names_of_all_kinds(self, site: Site) -> None:
        assert all(map(is_rest_safe, WEIRD))

        for name in WEIRD:
            await site.put(f"d/{name}", name.encode())
            await site.make_directory(f"d/{name}.dir")
        entries = await site.list("d")
        assert sorted(entries) == sorted([*WEIRD, *(f"{name}.dir" for name in WEIRD)])
        for name in WEIRD:
            assert await site.stat(f"d/{name}") == entries[name]
            assert await content(site, f"d/{name}") == name.encode()
            await site.remove(f"d/{name}")
        assert sorted(await site.list("d")) == sorted(f"{name}.dir" for name in WEIRD)

    async def test_with_names_that_cannot_be_carried(self, site: Site) -> None:
        for name in ("a%b", "a\nb", "a'b", "$HOME", "a\\b"):
            assert not is_rest_safe(name)
            await refused(
                site.put(name, b"1"),
                content(site, name),
                site.list(name),
                site.stat(name),
                site.make_directory(name),
                site.remove(name),
            )
        assert not [entry for entry in await site.list(".") if not entry.startswith(".")]

    async def test_with_other_names_are_carried_or_refused(self, site: Site) -> None:
        for name in ("ü", "日本", 'a"b', "a`b"):
            assert not is_rest_safe(name)
            try:
                await site.put(f"d/{name}", b"1")
            except SiteRejected:
                await refused(content(site, f"d/{name}"), site.stat(f"d/{name}"))
                continue
            assert list(await site.list("d")) == [name]
            assert await content(site, f"d/{name}") == b"1"
            await site.remove(f"d/{name}")
            assert await site.list("d") == {}

    async def test_stay_in_the_workspace(self, site: Site) -> None:
        for path in ("../x", "a/../../x", "/etc/passwd", "a//b", "./a"):
            await refused(site.stat(path), site.remove(path))

    async def test_of_all_sizes(self, site: Site, facts: SiteFacts) -> None:
        for size in SIZES:
            data, name = os.urandom(size), f"file-{size}"
            if size <= facts.upload_bytes:
                await site.put(name, data)
            else:
                (Path(facts.workspace) / name).write_bytes(data)
            entry = await site.stat(name)
            assert entry is not None
            assert entry.size == size
            assert await content(site, name) == data
            assert await content(site, name, size // 2) == data[size // 2 :]
            assert await content(site, name, size) == b""

    async def test_made_by_a_job_of_a_size_that_nobody_knows(
        self, site: Site, facts: SiteFacts
    ) -> None:
        path = Path(facts.workspace) / "large"
        script = f"head -c 9000000 /dev/urandom > '{path}'"
        await until(site, await site.submit(a_job(script)), ended)
        assert await content(site, "large") == path.read_bytes()

    async def test_large_one_is_replaced(self, site: Site) -> None:
        for data in (os.urandom(4 << 20), b"short", os.urandom(5 << 20)):
            await site.put("file", data)
            assert await content(site, "file") == data

    async def test_private(self, site: Site, facts: SiteFacts) -> None:
        file = Path(facts.workspace) / "work" / "secrets"
        for data in (b"export A=1", b"export B=2"):
            await site.put("work/secrets", data, private=True)
            assert await content(site, "work/secrets") == data
            assert file.stat().st_mode & 0o777 == 0o600
            assert file.read_bytes() == data
        script = f"cd '{facts.workspace}' && cat work/secrets > seen && rm work/secrets"
        await until(site, await site.submit(a_job(script)), ended)
        assert await content(site, "seen") == b"export B=2"
        assert await site.stat("work/secrets") is None

    async def test_private_directory(self, site: Site, facts: SiteFacts) -> None:
        """Closed whether it was there or not, and what is put into it keeps it closed."""
        directory = Path(facts.workspace) / "closed"
        await site.make_directory("closed/there")
        directory.chmod(0o755)
        for path in ("closed", "closed", "closed/there", "closed/new"):
            await site.make_directory(path, private=True)
            at = Path(facts.workspace) / path
            assert at.stat().st_mode & 0o777 == 0o700
        await site.put("closed/secrets", b"export A=1", private=True)
        assert directory.stat().st_mode & 0o777 == 0o700

    async def test_listing(self, site: Site) -> None:
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

    async def test_listing_of_many(self, site: Site, facts: SiteFacts) -> None:
        await site.make_directory("many")
        directory = Path(facts.workspace) / "many"
        names = {str(number) for number in range(10_050)}
        for name in names:
            (directory / name).touch()
        assert set(await site.list("many")) == names

    async def test_that_are_missing(self, site: Site) -> None:
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

    async def test_are_removed(self, site: Site) -> None:
        await site.put("d/file", b"1")
        await site.put("d/sub/file", b"1")
        await site.remove("d/file")
        assert list(await site.list("d")) == ["sub"]
        await site.remove("d")
        assert await site.stat("d") is None
        await site.remove("d")

    async def test_above_the_workspace_have_paths_in_it(self, site: Site, facts: SiteFacts) -> None:
        """Jobs have links there, which the site needs not, and which lead no removal astray."""
        workspace = Path(facts.workspace)
        await site.put(".mantik/up/2/data/file", b"1")
        assert (workspace / "../../data/file").read_bytes() == b"1"
        assert sorted(await site.list(".mantik/up/2")) == ["data", "up1"]
        assert await content(site, ".mantik/up/2/data/file") == b"1"
        await site.put(".mantik/up.links/file", b"1")
        (workspace / ".mantik/up.links/2").symlink_to("../../../..")
        await site.remove(".mantik/up.links")
        assert await site.stat(".mantik/up.links") is None
        assert await content(site, ".mantik/up/2/data/file") == b"1"
        await site.remove(".mantik/up/2/data")
        assert list(await site.list(".mantik/up/2")) == ["up1"]


class TestConcurrency:
    async def test_many_requests_at_the_same_time(self, site: Site) -> None:
        names = [f"many/{number}" for number in range(60)]
        await asyncio.gather(*(site.put(name, name.encode()) for name in names))
        found = await asyncio.gather(*(content(site, name) for name in names))
        assert found == [name.encode() for name in names]

    async def test_small_requests_pass_downloads_that_wait(self, site: Site) -> None:
        await site.put("large", os.urandom(4 << 20))
        places = Timing().concurrent_requests  # no more downloads begin at once
        streams = [site.get("large") for _ in range(places)]
        for stream in streams:
            await anext(stream)
        assert await asyncio.wait_for(site.stat("large"), STARTS_S) is not None
        for stream in streams:
            async for _ in stream:
                pass


# A claim is a file, a revocation a directory of the same name: they exclude each other.


class TestClaims:
    """A claim is a file, a revocation a directory of the same name: they exclude each other."""

    async def test_directory_over_a_file(self, site: Site) -> None:
        await site.put("attempts/claim", b"1")
        with pytest.raises(SiteRejected):
            await site.make_directory("attempts/claim")
        assert await content(site, "attempts/claim") == b"1"

    async def test_directory_with_its_parents(self, site: Site) -> None:
        await site.make_directory("new/attempts/claim")
        entry = await site.stat("new/attempts/claim")
        assert entry is not None
        assert (entry.name, entry.size, entry.directory) == ("claim", 0, True)
        assert await site.list("new/attempts/claim") == {}

    async def test_file_over_a_directory(self, site: Site) -> None:
        await site.make_directory("attempts/claim")
        await site.make_directory("attempts/claim")
        with pytest.raises(SiteRejected):
            await site.put("attempts/claim", b"1")
        assert (await site.list("attempts"))["claim"].directory

    async def test_nothing_below_a_file(self, site: Site) -> None:
        await site.put("attempts/claim", b"1")
        await refused(
            site.make_directory("attempts/claim/below"), site.put("attempts/claim/below", b"1")
        )
        assert await site.stat("attempts/claim/below") is None
        assert await content(site, "attempts/claim") == b"1"

    async def test_one_of_both_at_the_same_time(self, site: Site) -> None:
        for number in range(5):
            path = f"attempts/{number}"
            acts = site.put(path, b"1"), site.make_directory(path)
            results = await asyncio.gather(*acts, return_exceptions=True)
            (loser,) = [result for result in results if result is not None]
            assert isinstance(loser, SiteRejected)
            entry = await site.stat(path)
            assert entry is not None
            assert entry.directory is (results[1] is None)
