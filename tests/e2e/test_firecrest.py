"""What is particular to firecREST sites, through whole workflows at the sandbox."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_sandbox.faults import Fault
from hpc_sandbox.firecrest.site import FirecrestServer
from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SiteOption
from tests.support.places import PATIENT
from tests.support.workflows import Project, place_in, tells

GOOD = """
    rule good:
        output: "good.txt"
        shell: "echo good > {output}"
"""


def served(sandbox: Sandbox) -> FirecrestServer:
    site = sandbox.site("hpc2")
    assert isinstance(site, FirecrestServer)
    return site


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Project]:
    """A project at a site without an object store; it is opened without a default account."""
    settings = replace(PATIENT.firecrest, transfer_method=None, account_needed=True)
    sites = [SiteOption("hpc2", "firecrest")]
    with Sandbox(tmp_path / "sandbox", sites, replace(PATIENT, firecrest=settings)) as box:
        box.faults.add(Fault("fail_command", path="/userinfo$", count=2))
        made = Project(tmp_path / "project", place_in(box, "hpc2"))
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
    project.extra |= {name: "" for name in project.place.environment if "_HPC2_" in name}
    project.extra |= {f"{prefix}_{name}": value for name, value in values.items()}


def test_credentials_that_are_wrong_are_told_by_their_names(
    firecrest: Project, sandbox: Sandbox
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


def test_modules_are_loaded_in_a_login_shell(firecrest: Project) -> None:
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


def test_large_files_go_and_come_in_parts_where_there_is_no_object_store(
    own: Project,
) -> None:
    """Above 5 MiB they cannot go directly."""
    first, second = os.urandom(7 << 20), os.urandom((6 << 20) + 11)
    own.write("in.bin").write_bytes(first)
    own.write("d/müde.bin").write_bytes(second)
    own.write("Snakefile", LARGE)
    own.run().ok()
    assert (own.directory / "out/large.bin").read_bytes() == first[1:] + first[:1]
    assert (own.directory / "out/gröss er.bin").read_bytes() == second
    assert (own.directory / "many/1").read_bytes() == second
    assert (own.directory / "many/2").read_bytes() == first
    transfers = own.workspace / ".mantik" / "transfers"
    assert not [path for path in transfers.rglob("*") if path.is_file()]


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
