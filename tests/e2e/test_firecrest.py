"""What is particular to firecREST sites, through whole workflows at the sandbox."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_sandbox.faults import Fault
from hpc_sandbox.firecrest.site import FirecrestServer
from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SiteOption
from tests.support.firecrestv1 import FirecrestV1
from tests.support.places import PATIENT
from tests.support.proxy import Exchange, Proxy, Rule, pass_on
from tests.support.workflows import SHORT, Project, place_in, tells, until

GOOD = """
    rule good:
        output: "good.txt"
        shell: "echo good > {output}"
"""


def served(sandbox: Sandbox) -> FirecrestServer:
    """The sandbox's firecREST site."""
    site = sandbox.site("hpc2")
    assert isinstance(site, FirecrestServer)
    return site


@pytest.fixture
def own_sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sandbox]:
    """A sandbox of one firecREST site; the parameter is its settings."""
    own = replace(PATIENT.firecrest, **request.param)
    sites = [SiteOption("hpc2", "firecrest")]
    with Sandbox(tmp_path / "sandbox", sites, replace(PATIENT, firecrest=own)) as box:
        yield box


@pytest.fixture
def own(own_sandbox: Sandbox, tmp_path: Path) -> Iterator[Project]:
    """A project at that site."""
    made = Project(tmp_path / "project", place_in(own_sandbox, "hpc2"))
    yield made
    made.close()


def test_unknown_account_of_a_rule_is_told_before_anything_is_sent(
    firecrest: Project, sandbox: Sandbox
) -> None:
    firecrest.write(
        "Snakefile", f"{GOOD}\n    rule bad:\n        output: 'bad'\n        input: 'good.txt'\n"
        "        resources: slurm_account='nobody'\n        shell: 'touch bad'\n",
    )  # fmt: skip
    before = len(sandbox.record("hpc2")["runs"])
    said = firecrest.run("bad").failed()
    tells(said, "nothing submitted", "bad: you have no account 'nobody' there, only sandbox")
    assert len(sandbox.record("hpc2")["runs"]) == before


def use(project: Project, prefix: str, values: dict[str, str]) -> None:
    """Let the project have these credentials and no others."""
    project.extra |= {name: "" for name in project.place.environment if "_HPC2_" in name}
    project.extra |= {f"{prefix}_{name}": value for name, value in values.items()}


class TestCredentials:
    def test_that_are_wrong_are_told_by_their_names(
        self, firecrest: Project, sandbox: Sandbox
    ) -> None:
        firecrest.write("Snakefile", GOOD)
        tokens = served(sandbox).tokens
        values = {"CLIENT_ID": tokens.client_id, "CLIENT_SECRET": "a-wrong-guess"}
        use(firecrest, "MANTIK_FIRECREST", values)
        jobs = len(sandbox.record("hpc2")["runs"])

        said = firecrest.run().failed()

        tells(said, *(f"MANTIK_FIRECREST_{name}" for name in values))
        assert said.count("Error") == 1
        assert "a-wrong-guess" not in said
        assert len(sandbox.record("hpc2")["runs"]) == jobs

    # A token is renewed when 40 s are left: here every 2 s.
    # Clients are given tokens of 42 s, which are renewed every 2 s.
    @pytest.mark.parametrize("own_sandbox", [{"token_lifetime": 42.0}], indirect=True)
    def test_an_issuer_that_refuses_for_a_while_fails_nothing(
        self, own: Project, own_sandbox: Sandbox
    ) -> None:
        own.write(
            "Snakefile",
            """
            rule long:
                output: "good.txt"
                shell: "echo run >> ran.txt; until [ -e go ]; do sleep 0.1; done; touch {output}"
            """,
        )
        running = own.start()
        until((own.workspace / "ran.txt").exists, "the job")
        fault = own_sandbox.faults.add(
            Fault("refuse", path="token$", status=401, count=None, message="Invalid client")
        )
        until(lambda: fault.happened >= 4, "refused tokens")
        running.says("has not accepted the credentials")
        (own.workspace / "go").touch()
        own_sandbox.faults.clear()

        said = running.end().ok().output

        assert "answers again" in said
        assert (own.workspace / "ran.txt").read_text() == "run\n"


class TestServers:
    def test_of_version_1_are_told(self, firecrest: Project) -> None:
        firecrest.write("Snakefile", GOOD)
        use(firecrest, "MANTIK_HPC2", {"TOKEN": "t"})
        with FirecrestV1("/hpc/api") as server:
            firecrest.config.write_text(
                firecrest.place.config.replace(_url_of(firecrest), f"ApiUrl: {server.url}\n")
            )

            said = firecrest.run().failed()

        tells(said, "firecREST version 1, which is not supported", "hpc2", "as ApiUrl", "Machine")

    def test_of_version_2_below_a_path_v1_work(self, firecrest: Project) -> None:
        firecrest.write("Snakefile", GOOD)
        line = _url_of(firecrest)
        server, name, path = line.split()[1].partition("/hpc2/")

        async def elsewhere(exchange: Exchange) -> None:
            asked = exchange.request
            target = asked.target.replace("/firecrest/v1", f"{name}{path}", 1)
            exchange.request = replace(asked, target=target)
            await pass_on(exchange)

        with Proxy(server, lambda _: "any") as proxy:
            proxy.add(Rule("elsewhere", None, elsewhere, None))
            url = f"{proxy.url}/firecrest/v1"
            firecrest.config.write_text(firecrest.place.config.replace(line, f"ApiUrl: {url}\n"))

            firecrest.run().ok()

            assert len(proxy.seen) > 5
        assert firecrest.read("good.txt") == "good\n"


def _url_of(project: Project) -> str:
    lines = project.place.config.splitlines(keepends=True)
    return next(line.lstrip() for line in lines if "ApiUrl" in line)


class TestModules:
    def test_are_loaded_in_a_login_shell(self, firecrest: Project) -> None:
        profile = firecrest.place.server / "home" / "mantik" / ".bash_profile"
        profile.write_text("export PROFILE=read\n")
        shown = "echo ${{PROFILE:-none}} ${{LOADEDMODULES:-none}}"
        firecrest.write("Snakefile", GOOD.replace("echo good", shown))
        try:
            firecrest.run().ok()
            assert firecrest.read("good.txt") == "none none\n"

            environment = "Environment:\n  Modules: [Sandbox/1.0]\n"
            firecrest.config.write_text(firecrest.place.config + environment)
            firecrest.run("--forceall").ok()
            assert firecrest.read("good.txt") == "read Sandbox/1.0\n"
        finally:
            profile.unlink()


LARGE = """
    rule copy:
        input: "in.bin", "d/müde.bin"
        output: "out/large.bin", directory("many"), "out/gröss er.bin"
        shell:
            "rev() {{ tail -c +2 \\"$1\\"; head -c 1 \\"$1\\"; }}; rev {input[0]} > {output[0]}; "
            "mkdir {output[1]}; cp {input[1]} {output[1]}/1; cp {input[0]} {output[1]}/2; "
            "cp {input[1]} {output[2]:q}"
"""


class TestLargeFiles:
    """Above 5 MiB they cannot go directly."""

    def fill(self, project: Project) -> dict[str, bytes]:
        contents = {"in.bin": os.urandom(7 << 20), "d/müde.bin": os.urandom((6 << 20) + 11)}
        for name, content in contents.items():
            project.write(name).write_bytes(content)
        project.write("Snakefile", LARGE)
        return contents

    def check(self, project: Project, contents: dict[str, bytes]) -> None:
        first, second = contents.values()
        assert (project.directory / "out/large.bin").read_bytes() == first[1:] + first[:1]
        assert (project.directory / "out/gröss er.bin").read_bytes() == second
        assert (project.directory / "many/1").read_bytes() == second
        assert (project.directory / "many/2").read_bytes() == first

    @pytest.mark.nightly
    def test_by_the_sites_object_store(self, firecrest: Project, sandbox: Sandbox) -> None:
        contents = self.fill(firecrest)
        before = Counter(sandbox.record("hpc2")["requests"])

        firecrest.run().ok()

        self.check(firecrest, contents)
        new = Counter(sandbox.record("hpc2")["requests"]) - before
        assert new["POST filesystem/transfer/upload"] == 0, "no job is needed for it"
        assert new["POST filesystem/transfer/download"] >= 1

    @pytest.mark.parametrize(
        "own_sandbox", [{"transfer_method": None, "account_needed": True}], indirect=True
    )
    def test_in_parts_where_there_is_none(self, own: Project) -> None:
        contents = self.fill(own)

        own.run().ok()

        self.check(own, contents)
        transfers = own.workspace / ".mantik" / "transfers"
        assert not [path for path in transfers.rglob("*") if path.is_file()]


def test_submission_with_a_slow_sbatch_runs_once(firecrest: Project, sandbox: Sandbox) -> None:
    firecrest.write(
        "Snakefile",
        """
        rule once:
            output: "out.txt"
            shell: "echo ran >> ran.txt; sleep 1; cp ran.txt {output}"
        """,
    )
    firecrest.place = firecrest.place.timed(replace(SHORT, unknown_wait_s=4))
    fault = sandbox.faults.add(Fault("timeout_after", method="POST", path="/compute/hpc2/jobs$"))
    try:
        said = firecrest.run().ok().output
    finally:
        sandbox.faults.clear()

    assert fault.happened == 1
    assert firecrest.read("out.txt") == "ran\n", said
    assert (firecrest.workspace / "ran.txt").read_text() == "ran\n"
    assert len(firecrest.tries) == 1


def test_a_job_beyond_its_queues_limit_fails_with_the_schedulers_reason(firecrest: Project) -> None:
    """Slurm takes it and lets it wait for ever; nobody else would say so."""
    firecrest.write(
        "Snakefile",
        """
        rule long:
            output: "long.txt"
            resources: runtime="72h"
            shell: "touch {output}"
        """,
    )
    said = firecrest.run().failed()
    assert said.count("cannot start: PartitionTimeLimit") == 1
    tells(said, "it would wait for ever in the queue: PartitionTimeLimit", "reason: rejected")
    [record] = firecrest.tries
    assert (record.reason, record.waits) == ("rejected", "PartitionTimeLimit")


def test_a_command_that_no_script_could_hold_travels_as_a_file(firecrest: Project) -> None:
    """Slurm takes scripts of up to 4 MiB."""
    firecrest.write(
        "Snakefile",
        """
        NAMES = [f"a/sample/with/a/name/that/is/rather/long/as/usual/{n:06}.fastq.gz" for n in range(70_000)]
        rule all:
            input: "text.txt", "script.txt"
        rule text:
            output: "text.txt"
            params: names=NAMES
            shell: "echo {params.names} | wc -w > {output}"
        rule script:
            output: "script.txt"
            params: names=NAMES
            script: "count.py"
        """,  # noqa: E501
    )
    firecrest.write(
        "count.py", 'open(snakemake.output[0], "w").write(f"{len(snakemake.params.names)}\\n")\n'
    )
    firecrest.run().ok()
    assert [firecrest.read(f"{each}.txt") for each in ("text", "script")] == ["70000\n"] * 2
