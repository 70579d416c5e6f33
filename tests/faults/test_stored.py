"""Faults while outputs that stay at a site are brought to this machine and to another site."""

import hashlib
from collections import Counter
from pathlib import Path

import pytest

from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SiteOption
from tests.faults.cell import SITE, cell_in, settings
from tests.faults.faults import FAULTS, ODD, Fault
from tests.support.command import smk_mantik
from tests.support.turns import in_turn
from tests.support.workflows import FILES_STAY, place_in

APIS = {"unicore": "firecrest", "firecrest": "unicore"}
"""What the site behind the proxy speaks, and what the other site does."""
MET = {"404", "503", "reset", "cut", "page-as-file"}
"""Faults that a download may meet, one of each kind."""

SNAKEFILE = r"""
    OUTSIDE = config["outside"]
    localrules: all, here

    rule all:
        input: "here.txt", "there.txt"

    rule make:
        input: "data/big.bin"
        output: "out/middle.bin", "out/large.bin", directory("out/more")
        shell:
            "echo begin make >> {OUTSIDE}/ran; mkdir {output[2]}; echo 1 > {output[2]}/1;"
            "head -c 8000 {input} > {output[0]}; cat {input} {input} > {output[1]}"

    rule here:
        input: "out/middle.bin", "out/more"
        output: "here.txt"
        shell:
            "echo begin here >> {OUTSIDE}/ran;"
            " cat {input[0]} {input[1]}/1 | sha256sum > {output}"

    rule there:
        input: "out/large.bin"
        output: "there.txt"
        resources: mantik_site="other"
        shell: "echo begin there >> {OUTSIDE}/ran; sha256sum < {input} > {output}"
"""


def sum_of(content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}  -\n".encode()


@pytest.mark.parametrize(
    ("fault", "api"), in_turn([(f, api) for api in APIS] for f in (*FAULTS, *ODD) if f.name in MET)
)
def test_fault_while_stored_outputs_are_brought(fault: Fault, api: str, tmp_path: Path) -> None:
    sites = [SiteOption(SITE, api), SiteOption("other", APIS[api])]
    with (
        Sandbox(tmp_path / "sandbox", sites, settings(2)) as box,
        cell_in(box, SITE, api, tmp_path, snakefile=SNAKEFILE) as cell,
    ):
        second = tmp_path / "other.yaml"
        second.write_text(place_in(box, "other").config)
        cell.project.sites = [str(second)]
        cell.options = FILES_STAY
        rules = cell.meet(fault, "fetch")

        ran = cell.end(cell.start())

        met = [rule.name for rule in rules if rule.taken]
        assert met, f"nothing met the fault: {cell.proxy.counted()}"
        assert ran.code == 0, ran.output
        assert cell.noted("begin") == Counter(make=1, here=1, there=1)
        big = (cell.project.directory / "data/big.bin").read_bytes()
        assert cell.project.read("here.txt").encode() == sum_of(big[:8000] + b"1\n")
        smk_mantik(cell.project, "get", "--all").ok()
        assert cell.project.read("there.txt").encode() == sum_of(big + big)
        assert (cell.project.directory / "out/large.bin").read_bytes() == big + big
        assert not list(cell.project.directory.rglob("*.mantik-part"))
