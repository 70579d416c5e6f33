"""The real firecREST: what the sandbox does not do, and whole workflows."""

import asyncio
import hashlib
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteBusy, SiteError
from snakemake_executor_plugin_mantik.config.settings import Timing
from snakemake_executor_plugin_mantik.sites.base import SiteFacts
from snakemake_executor_plugin_mantik.sites.firecrest import FirecrestSite
from tests.real.centre import firecrest
from tests.real.centre.firecrest import Firecrest, OwnFirecrest
from tests.real.slurm import ACCOUNTS
from tests.support.benches import real_firecrest_site
from tests.support.places import MakeProject
from tests.support.workflows import UNTRACKED, Place, Project, tells

pytestmark = pytest.mark.software(firecrest.SOFTWARE)

DIRECT = 3_932_157
"""Bytes of the largest file that the server gives directly: three quarters of 5 MiB, as base64."""
SIZES = (0, 1, DIRECT, DIRECT + 3, 4_200_000, 5_300_000, 5_600_000, 8_000_000, 30_000_000)
"""What a server answers to a direct download changes at 3.93 and 5.5 MB: 413, then 500 and 408."""


@pytest.fixture
def at_firecrest(firecrest_centre_place: Place, project_at: MakeProject) -> Project:
    return project_at(firecrest_centre_place, dict(UNTRACKED))


@pytest.fixture
def made(real_firecrest: Firecrest) -> FirecrestSite:
    """The account is given: a busy accounting may answer the question for it with nothing."""
    return real_firecrest_site(real_firecrest, f"ws-{uuid.uuid4()}", account=ACCOUNTS[0])


def write(facts: SiteFacts, size: int) -> str:
    """Write a file of `size` bytes to the workspace, behind the server's back; its checksum."""
    pattern = bytes(range(251)) * 4177
    content = (pattern * (size // len(pattern) + 1))[:size]
    (Path(facts.workspace) / "file").write_bytes(content)
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(("number", "whole"), [(10_000, True), (30_000, False)])
async def test_a_listing_comes_whole_or_not_at_all(
    site: FirecrestSite, facts: SiteFacts, number: int, whole: bool
) -> None:
    """One that does not fit into the server's buffer of 5 MiB is an error, not a part of it."""
    names = {f"{n:0200}" for n in range(number)}
    await site.make_directory("many")
    for name in names:
        (Path(facts.workspace) / "many" / name).touch()
    if whole:
        assert set(await site.list("many")) == names
    else:
        with pytest.raises(SiteError):
            await site.list("many")


async def fetched_by_one_request(site: FirecrestSite, size: int | None, made: str) -> None:
    """See that no way is tried in vain, where none was refused."""
    asked = []
    for _ in range(5):
        before = site.requests["download"]
        assert await checksum(site, size) == made
        asked.append(site.requests["download"] - before)
        if asked[-1] == 1:
            return
    pytest.fail(f"requests: {asked}")


async def checksum(site: FirecrestSite, size: int | None) -> str:
    """A busy server may refuse a download, which the engine repeats."""
    while True:
        digest = hashlib.sha256()
        with suppress(SiteBusy):
            async for chunk in site.get("file", size=size):
                digest.update(chunk)
            return digest.hexdigest()
        await asyncio.sleep(2.0)


class TestDownloads:
    async def test_of_any_size(self, site: FirecrestSite, facts: SiteFacts) -> None:
        """Also where the size is unknown, or that of a file that has grown since."""
        for size in (*SIZES, 300_000_000):
            await fetched_by_one_request(site, size, write(facts, size))
        for size in (10, DIRECT + 3, 5_600_000):
            await fetched_by_one_request(site, None, write(facts, size))
        for size in (DIRECT + 3, 5_600_000, 30_000_000):
            written = write(facts, size)
            assert await checksum(site, 10) == written


class TestWithoutObjectStore:
    @pytest.fixture
    def made(self, real_firecrest: Firecrest) -> Iterator[FirecrestSite]:
        with real_firecrest.twin(stores=False) as server:
            yield real_firecrest_site(server, f"ws-{uuid.uuid4()}")

    async def test_large_files_come_in_parts(self, site: FirecrestSite, facts: SiteFacts) -> None:
        for size in (DIRECT + 3, 5_600_000, 12_000_000):
            written = write(facts, size)
            assert await checksum(site, size) == written
        assert not list(Path(facts.workspace).glob(".mantik/transfers/*"))


class TestWorkflows:
    def test_outputs_of_any_size_come_back(self, at_firecrest: Project) -> None:
        at_firecrest.write(
            "Snakefile",
            f"""
            SIZES = {list(SIZES)}

            rule all:
                input: expand("{{size}}.out", size=SIZES), "together"

            rule one:
                output: "{{size}}.out"
                shell: "head -c {{wildcards.size}} /dev/urandom > {{output}}"

            rule together:
                output: directory("together")
                shell:
                    "mkdir {{output}}; cd {{output}}; "
                    "for n in 1 2 3 4; do head -c 2000000 /dev/urandom > $n; done; "
                    "sha256sum ? > sums"
            """,
        )
        at_firecrest.run().ok()
        for size in SIZES:
            name = f"{size}.out"
            there = (at_firecrest.workspace / name).read_bytes()
            assert len(there) == size
            assert (at_firecrest.directory / name).read_bytes() == there
        for line in at_firecrest.read("together/sums").splitlines():
            digest, name = line.split()
            content = (at_firecrest.directory / "together" / name).read_bytes()
            assert hashlib.sha256(content).hexdigest() == digest

    def test_a_long_log_of_a_failed_job_comes_back(self, at_firecrest: Project) -> None:
        at_firecrest.write(
            "Snakefile",
            """
            rule loud:
                output: "never"
                shell: "echo it begins; head -c 6000000 /dev/zero | tr '\\\\0' x; echo; exit 3"
            """,
        )
        said = at_firecrest.run().failed()
        tells(said, "exit code 3")
        (record,) = at_firecrest.attempts
        log = (at_firecrest.directory / record.log).read_bytes()
        assert b"it begins" in log
        assert len(log) > 6_000_000


COUNTED = """
    rule all:
        input: expand("{n}.out", n=range(8))

    rule one:
        output: "{n}.out"
        shell: "echo $SLURM_JOB_ID >> ran.{wildcards.n}; sleep 3; touch {output}"
"""
"""Each job says in the workspace that it ran."""


def all_ran_once(project: Project) -> None:
    ran = {path.name: path.read_text() for path in project.workspace.glob("ran.*")}
    assert sorted(ran) == [f"ran.{n}" for n in range(8)]
    assert all(len(text.splitlines()) == 1 for text in ran.values()), ran


@pytest.fixture
def at_own(own_firecrest: OwnFirecrest, project_at: MakeProject) -> Project:
    place = own_firecrest.place().timed(Timing(unknown_wait_s=5))
    made = project_at(place, dict(UNTRACKED))
    made.write("Snakefile", COUNTED)
    return made


class TestChecks:
    def test_unknown_account_of_a_rule_is_told_before_anything_is_sent(
        self, at_firecrest: Project
    ) -> None:
        at_firecrest.write(
            "Snakefile",
            """
            rule good:
                output: "good"
                shell: "touch {output}"

            rule bad:
                input: "good"
                output: "bad"
                resources: slurm_account="nobody"
                shell: "touch {output}"
            """,
        )
        said = at_firecrest.run("bad").failed()
        tells(said, "nothing submitted", "bad: you have no account 'nobody' there, only")
        assert not at_firecrest.attempts

    def test_known_account_of_a_rule_in_capital_letters(self, at_firecrest: Project) -> None:
        account = ACCOUNTS[1].upper()
        at_firecrest.write(
            "Snakefile",
            f"""
            rule good:
                output: "good"
                resources: slurm_account="{account}"
                shell: "touch {{output}}"
            """,
        )
        at_firecrest.run().ok()


def test_a_success_costs_two_requests_and_no_end_leaves_a_file(
    own_firecrest: OwnFirecrest, at_own: Project
) -> None:
    at_own.run().ok()
    found = firecrest.requests(own_firecrest.files / firecrest.LOG)
    assert (found["POST jobs"], found["GET ops/download"], found["GET jobs/ID"]) == (8, 8, 0)
    assert found["DELETE ops/rm"] <= 4  # what the whole run leaves
    assert not list(at_own.workspace.glob(".mantik/jobs/*"))
    at_own.write("Snakefile", "rule bad:\n    output: 'x'\n    shell: 'exit 3'\n")
    tells(at_own.run().failed(), "exit code 3")
    assert not list(at_own.workspace.glob(".mantik/jobs/*"))


class TestTrouble:
    @pytest.mark.parametrize(
        ("sacct", "words"),
        [
            ('sleep 12; exec /usr/bin/sacct "$@"', "no trace of it"),
            ("sleep 1; echo too many jobs >&2; exit 1", "cannot list your jobs"),
        ],
    )
    def test_submissions_lost_where_lists_of_jobs_are_slow_or_fail(
        self, own_firecrest: OwnFirecrest, at_own: Project, sacct: str, words: str
    ) -> None:
        """Two are made without an answer, two are not made."""
        asked = own_firecrest.files / "asked"
        asked.mkdir()
        asked.chmod(0o777)
        own_firecrest.program(
            "sbatch",
            f"""for number in 1 2 3 4; do
  mkdir {asked}/$number 2>/dev/null || continue
  [ $number -gt 2 ] || /usr/bin/sbatch "$@" > {asked}/$number/job
  sleep 8
  exit 1
done
exec /usr/bin/sbatch "$@" """,
        )
        own_firecrest.program("sacct", sacct)
        said = at_own.run().ok().output
        tells(said, words)
        assert len(list(asked.glob("*/job"))) == 2
        assert len(list(asked.iterdir())) == 4
        all_ran_once(at_own)
