"""A training takes ten times its walltime, and much happens to it; each epoch counts once."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.journal import AttemptRecord
from tests.real.centre.firecrest import SYSTEM
from tests.support.places import REAL, MakeProject
from tests.support.workflows import UNTRACKED, Project, Running, until

SEGMENTS, EPOCHS = 10, 20
TRAIN = """
    import json, os, signal, sys, time

    segment = int(os.environ["MANTIK_SEGMENT"])

    def note(path, *words):
        with open(path, "a") as notes:
            print(*words, file=notes, flush=True)

    def save(losses):
        text = json.dumps(losses)
        with open("ckpt/new", "w") as checkpoint:
            if segment == 2 and len(losses) == 6:  # until the walltime ends
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                print(text[: len(text) // 2], file=checkpoint, flush=True)
                time.sleep(600)
            print(text, file=checkpoint)
        os.replace("ckpt/new", "ckpt/losses")

    losses = json.load(open("ckpt/losses")) if os.path.exists("ckpt/losses") else []
    note("segments.txt", segment, len(losses))
    while len(losses) < 2 * (segment + 1):
        note("epochs.txt", len(losses))
        losses.append((losses[-1] if losses else 1.0) * 0.9 + len(losses))
        save(losses)
        while os.path.exists(f"{sys.argv[1]}/{segment}"):
            time.sleep(0.05)
    if len(losses) < 20:
        sys.exit(85)
    with open("model.json", "w") as model:
        json.dump(losses, model)
"""
"""Two epochs in each segment. The third one dies in the middle of its last checkpoint."""

SNAKEFILE = """
    rule train:
        input: "train.py"
        output: "model.json"
        resources: mantik_continue=10, mantik_checkpoint="ckpt/", mantik_warn="10s"
        shell: "python3 {input} {config[outside]}"
"""

Cancel = Callable[[str], object]
"""Cancels a job of the site, by its id there, without the executor's help."""


@pytest.fixture(params=[pytest.param("firecrest", marks=pytest.mark.nightly), *REAL])
def site(request: pytest.FixtureRequest, project_at: MakeProject) -> tuple[Project, Cancel]:
    """A project at each site, and how somebody else cancels its jobs: in another way at each."""
    get = request.getfixturevalue
    project = project_at(get(f"{request.param}_place"), dict(UNTRACKED))

    def abort_at_unicore(job: str) -> None:
        get("tsi_unicorex").ask(f"jobs/{job}/actions/abort", "POST", json={}).raise_for_status()

    def delete_at_firecrest(job: str) -> None:
        with get("real_firecrest").client() as client:
            client.delete(f"/compute/{SYSTEM}/jobs/{job}").raise_for_status()

    cancel: dict[str, Cancel] = {
        "firecrest": lambda job: project.place.end([job]),  # as scancel does
        "unicore_centre": abort_at_unicore,
        "firecrest_centre": delete_at_firecrest,
    }
    walltime = "40s" if request.param == "firecrest" else "60s"
    text = project.config.read_text()
    assert "Resources:\n" in text
    project.config.write_text(text.replace("Resources:\n", f"Resources:\n  Runtime: {walltime}\n"))
    return project, cancel[request.param]


def test_each_epoch_counts_once(site: tuple[Project, Cancel], outside: Path) -> None:
    project, cancel = site
    project.write("train.py", TRAIN)
    project.write("Snakefile", SNAKEFILE)
    train(project, outside, cancel)
    assert not project.exists("ckpt")
    ran = [(r.segment, r.reason) for r in project.attempts if r.outcome != "cancelled"]
    assert [each for each in ran if each[1]] == [(3, "cancelled")], ran
    assert [segment for segment, _ in ran] == [0, 1, 2, 3, 3, *range(4, SEGMENTS)]
    assert not [record for record in project.attempts if not record.state.final]


def train(project: Project, outside: Path, cancel: Cancel | None) -> None:
    """Run the training, kill its controllers, cancel a segment, and look at its epochs."""
    held = {number: outside / f"{number}" for number in (1, 3, 4, 8)}
    for path in held.values():
        path.touch()

    first = started(project, outside)
    begun(project, first, "1 2")
    first.kill()
    held[1].unlink()

    second = started(project, outside)
    begun(project, second, "3 5")
    until(lambda: epochs(project)[-1] == "5", "an epoch of the cancelled segment")
    until(lambda: losses(project) == 6, "its checkpoint")
    if cancel is not None:
        cancel(open_segment(project, 3).site_jobs[-1])
        begun(project, second, "3 6", "3 5")
    held[3].unlink()
    begun(project, second, "4 8")
    until(lambda: open_segment(project, 8).site_jobs, "segments in the queue")
    # All of them may have been in the queue before this controller saw the end of the third.
    second.says("segment 3 of 10 has ended (time limit)")
    second.kill()

    # Four segments go on without a controller.
    held[4].unlink()
    until(lambda: segments(project)[-1] == "8 16", "the last segment but one")
    third = started(project, outside)
    third.says("segment 8 of 10 has ended (it asked")
    third.kill()
    held[8].unlink()

    started(project, outside).end().ok()
    # What was held may have been ended by its walltime, on a slow machine.
    numbers = [int(line.split()[0]) for line in segments(project)]
    assert numbers == [0, 1, 2, *([3] * (2 if cancel else 1)), *range(4, SEGMENTS)]
    # The epoch whose checkpoint was cut is the only one that was computed again.
    assert epochs(project) == [str(n) for n in (*range(6), 5, *range(6, EPOCHS))]
    expected: list[float] = []
    for number in range(EPOCHS):
        expected.append((expected[-1] if expected else 1.0) * 0.9 + number)
    assert json.loads(project.read("model.json")) == expected


def started(project: Project, outside: Path) -> Running:
    return project.start(
        "model.json", "--nolock", "--rerun-incomplete", "--retries", "1",
        "--config", f"outside={outside}",
    )  # fmt: skip


def segments(project: Project) -> list[str]:
    """The number of each segment that has begun, and the epochs that it found."""
    return project.lines("segments.txt")


def epochs(project: Project) -> list[str]:
    return project.lines("epochs.txt")


def losses(project: Project) -> int:
    return len(json.loads((project.workspace / "ckpt/losses").read_text()))


def begun(project: Project, run: Running, *noted: str) -> None:
    """Wait until a segment computes; `noted` is what it writes, and what the one before wrote."""
    wanted = list(reversed(noted))
    until(
        lambda: run.process.poll() is not None or segments(project)[-len(wanted) :] == wanted,
        f"segment {wanted}",
    )
    assert run.process.poll() is None, run.output


def open_segment(project: Project, number: int) -> AttemptRecord:
    def look() -> list[AttemptRecord]:
        return [r for r in project.attempts if r.segment == number and not r.state.final]

    return until(look, f"an attempt for segment {number}")[-1]
