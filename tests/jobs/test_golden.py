"""Whole scripts, as they are sent. `MANTIK_GOLDEN=write` writes them anew: read the difference."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.jobs import group
from snakemake_executor_plugin_mantik.jobs.library import library_checksum, read_library
from snakemake_executor_plugin_mantik.jobs.paths import TryPaths
from snakemake_executor_plugin_mantik.jobs.script import render_script
from snakemake_executor_plugin_mantik.jobs.spec import (
    Apptainer,
    Container,
    Environment,
    InputFile,
    JobSpec,
    LiveDirectory,
    OutputFile,
    Segment,
)

GOLDEN = Path(__file__).parent / "golden"

PLAIN = JobSpec(
    paths=TryPaths(12, "0b5e5b3e-5f0e-4c1e-9d55-0d3c2a1b4f60"),
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
    "apptainer": replace(
        PLAIN,
        datasets=("/p/data/a:b", "/p/data/c"),
        environment=Environment(
            apptainer=Apptainer("env/train.sif", ("--nv", "-B", "$DATA_DIR:/data")),
            modules=("Stages/2025", "Apptainer"),
            variables={"DATA_DIR": "/p/data", "QUOTE": "it's $HOME"},
            before_on_compute=("echo c1", "echo c2"),
            after_on_compute=("echo c3", "echo c4"),
            before_on_login=("echo l1",),
            after_on_login=("echo l2",),
        ),
    ),
    "live": replace(PLAIN, live=LiveDirectory(".snakemake/mantik/tracking/t/mlruns", "^a/[^/]+/")),
    "segment": replace(
        PLAIN,
        segment=Segment(1, 3, ("ckpt/", "state.pt"), 3600, 120, TryPaths(12, "before")),
        outputs=(
            OutputFile("model.pt"),
            OutputFile("ckpt", "checkpoint", directory=True, keep=True),
            OutputFile("state.pt", "checkpoint", directory=True, keep=True),
        ),
    ),
    "python": replace(PLAIN, environment=Environment(python="/p/venvs/ml")),
    "pyxis": replace(
        PLAIN,
        secrets=("TOKEN",),
        datasets=("/p/data/c",),
        segment=Segment(0, 3, ("ckpt/",), 3600, 120),
        environment=Environment(
            container=Container(
                "Pyxis",
                "nvcr.io#nvidia/pytorch:24",
                mounts=("$DATA:/data:ro",),
                options=("--mpi=pmix",),
            ),
            python="/p/venvs/ml",
            variables={"DATA": "/p/data"},
        ),
    ),
    "containerengine": replace(
        PLAIN,
        launches=True,
        environment=Environment(
            container=Container("ContainerEngine", "env/pytorch.toml", is_file=True)
        ),
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
        group.GroupTeam((), (1, 100)),
        group.GroupTeam((0,), (2, 100)),
        group.GroupTeam((0,), (2, 0)),
        group.GroupTeam((1, 3)),
    ],
    report="reports/1",
    limits=(3, 150),
    pipes=("-pipe",),
    temporary=(group.TemporaryFile("parts/1", (0, 1)), group.TemporaryFile("socket", (2, 3))),
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


@pytest.mark.parametrize("name", [*SCRIPTS_AS_TEXT, "library"])
def test_bash_takes_the_script(name: str) -> None:
    text = SCRIPTS_AS_TEXT[name].encode() if name != "library" else read_library()
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
