"""Data that are too long for a script: they lie beside it, and count only if they are whole."""

import gzip
import hashlib
from dataclasses import replace

import pytest

from snakemake_executor_plugin_mantik.jobs.script import PART_BYTES, render_script
from snakemake_executor_plugin_mantik.jobs.spec import InputFile, JobSpec, OutputFile
from tests.support.trial import NASTY, QUICK, Trial

MANY = 1200
"""So many names make each list of files too long for the script."""


def job(trial: Trial, *, upload_bytes: int = 4 << 20) -> JobSpec:
    names = [f"{NASTY}/{'long' * 20}-{n}" for n in range(MANY)]
    for name in names:
        trial.write(f"in/{name}", "data")
    sha256 = hashlib.sha256(b"data").hexdigest()
    return trial.spec(
        "echo ran >> ran; cp -r in/. out",
        inputs=tuple(InputFile(f"in/{name}", 4, sha256=sha256) for name in names),
        outputs=tuple(OutputFile(f"out/{name}") for name in names),
        limits=replace(QUICK, upload_bytes=upload_bytes),
    )


@pytest.mark.parametrize("upload_bytes", [4 << 20, 1000])
def test_long_lists_lie_beside_the_script(trial: Trial, upload_bytes: int) -> None:
    spec = job(trial, upload_bytes=upload_bytes)
    rendered = render_script(spec)
    assert len(rendered.text.encode()) < PART_BYTES
    assert all(len(content) <= upload_bytes for content in rendered.beside.values())
    ended = trial.run(spec)
    assert ended.returned == 0, ended.log
    assert len(ended.sure.files) >= MANY
    # They are checked: one that is missing is noticed by its name.
    gone = spec.inputs[-1].path
    (trial.workspace / gone).unlink()
    again = trial.run(replace(spec, paths=trial.spec().paths))
    assert again.sure.failed_step == "inputs"
    assert list(again.sure.missing_inputs) == [gone]


def test_a_short_job_has_nothing_beside_its_script(trial: Trial) -> None:
    assert not render_script(trial.spec()).beside


def damaged(trial: Trial, spec: JobSpec, damage: str) -> None:
    """Put the lists of a job in place, not all of them as they should be."""
    files = dict(render_script(spec).beside)
    *_, last = files
    cut = files[last][: len(files[last]) // 2]
    files[last] = {"empty": b"", "cut": cut, "another": gzip.compress(b"_m_inputs=()\n")}[damage]
    for path, content in files.items():
        trial.write(path).write_bytes(content)


@pytest.mark.parametrize("damage", ["empty", "cut", "another"])
def test_a_job_without_its_whole_lists_does_not_start(trial: Trial, damage: str) -> None:
    """It ends as one does that finds no workspace: it is submitted again, with new lists."""
    spec = job(trial, upload_bytes=1000)
    damaged(trial, spec, damage)
    ended = trial.run(spec)
    assert (ended.returned, ended.entries) == (0, ())
    assert "missing or damaged: the job did not start" in ended.output
    assert not (trial.workspace / "ran").exists()


def test_lists_may_appear_late_on_a_node(trial: Trial) -> None:
    spec = job(trial)
    spec = replace(spec, limits=replace(spec.limits, visible_s=300))
    damaged(trial, spec, "cut")
    process = trial.start(spec)
    for path, content in render_script(spec).beside.items():
        trial.write(path).write_bytes(content)
    assert trial.end(spec, process).returned == 0
    assert trial.workspace.joinpath("ran").read_text() == "ran\n"
