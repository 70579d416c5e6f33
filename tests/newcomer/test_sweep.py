"""The example `workflows/sweep`: at the sandbox with one command, and here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.workflows import FOREIGN, UNTRACKED, tells

SWEEP = Path(__file__).parents[2] / "workflows" / "sweep"
WAIT_S = 600.0
"""How long one command may take, seconds: a job here begins with an import of scikit-learn."""


def run(sweep: Path, *words: str) -> str:
    environment = UNTRACKED | {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    # The jobs' `python` is the one that has scikit-learn.
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        words, cwd=sweep, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def results(sweep: Path) -> None:
    """See to it that the sweep has chosen two models and tested those."""
    kept = (sweep / "results/shortlist.txt").read_text().split()
    assert len(kept) == 2
    assert {path.stem for path in (sweep / "results/tested").iterdir()} == set(kept)
    for name in kept:
        assert json.loads((sweep / f"results/tested/{name}.json").read_text())["accuracy"] > 0.9
    assert all(name in (sweep / "results/report.md").read_text() for name in kept)


def test_at_the_sandbox_with_one_command_and_changed_here(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    shutil.copytree(SWEEP, sweep, ignore=shutil.ignore_patterns(".snakemake", "results"))
    config = (sweep / "config.yaml").read_text()  # a smaller sweep
    (sweep / "config.yaml").write_text(config.replace("[0.1, 1, 10]", "[1]").replace("5, 5]", "5]"))
    command = ("snakemake", "--profile", "profiles/sandbox")
    box = (sys.executable, "-m", "snakemake_executor_plugin_mantik", "sandbox", "run")

    said = run(sweep, *box, "--site", "hpc1=unicore", "--", *command)

    tells(said, "train family=svm, strength=0.5: done at hpc1", "report: done at hpc1")
    results(sweep)
    tells(run(sweep, "snakemake", "--cores", "2"), "Nothing to be done")

    file = sweep / "diagnosis/MLproject"
    file.write_text(file.read_text().replace("report.py --out", "report.py  --out"))
    said = run(sweep, "snakemake", "--cores", "2")
    tells(said, "rule report:")
    assert not [rule for rule in ("train", "evaluate") if f"rule {rule}:" in said], said

    run(sweep, "rm", "-r", "results/models", "results/tested", "results/report.md")
    said = run(sweep, "snakemake", "--executor", "local", "--cores", "2")
    tells(said, "rule train:", "rule evaluate:", "rule report:")
    results(sweep)
