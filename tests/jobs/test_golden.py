"""Whole scripts, as they are sent. `MANTIK_GOLDEN=write` writes them anew: read the difference."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.jobs import group
from snakemake_executor_plugin_mantik.jobs.library import library_checksum
from snakemake_executor_plugin_mantik.jobs.paths import AttemptPaths
from snakemake_executor_plugin_mantik.jobs.script import render_script
from snakemake_executor_plugin_mantik.jobs.spec import InputFile, JobSpec, OutputFile

GOLDEN = Path(__file__).parent / "golden"

PLAIN = JobSpec(
    paths=AttemptPaths(12, "0b5e5b3e-5f0e-4c1e-9d55-0d3c2a1b4f60"),
    workspace="/p/scratch/me/flow",
    name="evaluate: seed=1",
    command="set -euo pipefail; python main.py 1 > 'results/it'\"'\"'s ü.txt'",
    variables={"OMP_NUM_THREADS": "1"},
    outputs=(OutputFile("results/it's ü.txt"),),
)

SCRIPTS = {
    "plain": PLAIN,
    "staged": replace(
        PLAIN,
        inputs=(InputFile("data.csv", 17), InputFile("a b", directory=True), InputFile("m.pt")),
        outputs=(
            OutputFile("model/-best.pt", keep=True),
            OutputFile("plots", directory=True),
            OutputFile("logs/train.txt", "log"),
            OutputFile("done", "touched"),
        ),
        bundles=("b-17", "b-18"),
        inline=bytes(range(256)),
        secrets=("TOKEN", "KEY"),
    ),
}

GROUP = group.GroupProgram(
    members=[
        group.GroupMember("split s=1", ("set -e; ./split 'a b'",), 0, outputs=("parts/1",)),
        group.GroupMember(
            "left s=1",
            ("./left 0", "./left 1"),
            1,
            variables={"OMP_NUM_THREADS": "2", "TMPDIR": "/scratch"},
            settled=("TMP",),
            touches=("done/left",),
            measured="bench/left",
            benchmark="left.tsv",
        ),
        group.GroupMember("serve", ("./serve",), 2, service=True),
        group.GroupMember("ask", ("./ask",), 2, shell="sh", waits=("socket",)),
        group.GroupMember("all", (), 3),
    ],
    teams=[
        ((), (1, 100)),
        ((0,), (2, 100)),
        ((0,), (2, 0)),
        ((1, 3), ()),
    ],
    report="reports/1",
    limits=(3, 150),
    pipes=("-pipe",),
    temporary=(("parts/1", (0, 1)), ("socket", (2, 3))),
    keep_going=True,
    service_wait_s=7,
)

SCRIPTS_AS_TEXT = {name: render_script(spec).text for name, spec in SCRIPTS.items()}
SCRIPTS_AS_TEXT["group"] = group.render_group(GROUP)


@pytest.mark.parametrize("name", ["plain", "staged", "group"])
def test_scripts_are_as_they_were(name: str) -> None:
    path = GOLDEN / f"{name}.sh"
    script = SCRIPTS_AS_TEXT[name].replace(library_checksum(), "CHECKSUM")
    if os.environ.get("MANTIK_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(script, encoding="utf-8")
    assert script == path.read_text(encoding="utf-8")


def test_a_thin_jobs_script_is_short() -> None:
    assert len(SCRIPTS_AS_TEXT["plain"].splitlines()) <= 80
