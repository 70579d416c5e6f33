"""Runs from their submission to their end, through the real command, controller and site."""

import json
import shutil
from pathlib import Path

import pytest

from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.runs import controller, rerun
from tests.runs.conftest import Runs
from tests.support.clusters import OTHER_ACCOUNT
from tests.support.command import smk_mantik
from tests.support.workflows import tells
from tests.tracking.conftest import until_published

# A run takes half a dozen starts of Python, and MLflow's import in three of them.
pytestmark = pytest.mark.software("MLflow in a file")


def test_a_run(runs: Runs, sandbox: Sandbox) -> None:
    project = runs.project
    project.write("elsewhere.csv", "9\n")
    before = sorted((project.directory / "churn").rglob("*"))

    run_id = runs.submit("-P", "alpha=2", "-P", "data=elsewhere.csv", "--name", "first")
    run = runs.over(run_id)

    assert run.info.status == "FINISHED", runs.log(run_id)
    assert run.data.params == {"alpha": "2", "data": "elsewhere.csv"}
    assert run.info.run_name == "first"
    shown = runs.json("show", "first")
    (model,) = Path(shown["results"]).rglob("model.txt")
    assert model.read_text() == "2 9\n"
    assert shown["state"] == "FINISHED"
    assert shown["jobs"][0]["outcome"] == "succeeded"
    assert shown["request"]["config_source"] == str(project.config)
    assert sorted((project.directory / "churn").rglob("*")) == before
    tells(
        runs.notify("show", run_id[:6]).ok().output, "  site: hpc1", "    alpha = 2", "  results:"
    )
    tells(runs.notify("logs", "first").ok().output, "alpha 2")
    tells(runs.notify("logs", "--controller", "first").ok().output, "run_main: done at hpc1")
    (row,) = runs.json("list")
    assert (row["run_id"], row["state"], row["site"], row["here"]) == (
        run_id, "FINISHED", "hpc1", True,
    )  # fmt: skip
    assert row["ran"] > 0
    for words, count in (
        (("--site", "hpc1", "--state", "finished", "--since", "1h"), 1),
        (("--experiment", str(project.directory.parent)), 1),
        (("--site", "other"), 0),
        (("--state", "RUNNING"), 0),
        (("--since", "2999-01-01"), 0),
    ):
        assert len(runs.json("list", *words)) == count, words
    refused = runs.notify("submit", "churn", "--site", runs.site, "--extra", "a+b=1")
    assert refused.code == 2
    tells(refused.output, 'Invalid value "a+b"')
    (other,) = runs.json("list", "--state", "KILLED")
    assert other["note"] == "it was never submitted"
    missing = runs.notify("list", "--experiment", "no such one")
    assert missing.code != 0
    tells(missing.output, "there is no experiment")
    tells(runs.notify("list").ok().output, run_id[:8], "first", "FINISHED", "hpc1")
    assert runs.notify("cancel", "first").code == 2
    assert runs.notify("continue", "first").code == 2
    tells(runs.notify("continue").ok().output, "No run")
    assert runs.directory(run_id).path.stat().st_mode & 0o077 == 0
    assert runs.home.stat().st_mode & 0o077 == 0

    workspace = runs.workspace(run_id)
    assert any(path.is_file() for path in workspace.rglob("*"))
    smk_mantik(project, "schedule", "add", "daily", "--run", "first", "--cron", "@daily").ok()
    said = runs.notify("delete", "first").output
    tells(said, str(runs.directory(run_id).path), "schedule daily repeats it", "Add --yes")
    assert runs.directory(run_id).path.exists()
    said = runs.notify("delete", "first", "--yes").ok().output
    assert not runs.directory(run_id).path.exists(), said
    assert not [path for path in workspace.rglob("*") if path.is_file()]
    assert runs.client.get_run(run_id).info.lifecycle_stage == "deleted"
    assert [row["run_id"] for row in runs.json("list")] == [other["run_id"]]
    # What nobody has here is deleted in MLflow alone.
    assert runs.notify("delete", other["run_id"], "--yes").code == 0
    assert runs.json("list") == []


@pytest.mark.nightly
def test_a_run_goes_on_past_its_walltime(runs: Runs) -> None:
    config = runs.project.config
    kept = config.read_text()
    added = "Resources:\n  Runtime: 10m\n  Checkpoint: ckpt/\n"
    config.write_text(kept.replace("Resources:\n", added))
    run_id = runs.submit("-e", "trains", "--continue", "5")
    run = runs.over(run_id)
    assert run.info.status == "FINISHED", runs.log(run_id)
    assert len(json.loads(run.data.tags["mantik.segments"])) == 3
    shown = runs.notify("show", run_id).ok().output
    tells(shown, "    segment 1 of 5, ", "goes on (asked)", "    segment 3 of 5, ", "succeeded")
    tells(runs.notify("logs", run_id).ok().output, "part 2")
    (row,) = runs.json("list")
    ran = [record.ran for record in runs.directory(run_id).attempts if record.ran is not None]
    assert len(ran) == 3
    assert row["ran"] == pytest.approx(sum(ran))
    # Another one keeps that.
    again = runs.json("rerun", run_id)["run_id"]
    assert runs.directory(again).request.segments == 5
    runs.notify("cancel", again).ok()


def test_killed_continued_and_submitted_again(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = runs.submit("-e", "waits")
    runs.started(run_id)
    # A second one is refused while the first is there.
    assert runs.directory(run_id).alive
    assert not controller.start_controller(runs.directory(run_id))
    # The job's output is still at the site.
    assert runs.notify("logs", run_id).ok().output == "begun\n"

    runs.kill(run_id)

    (row,) = runs.json("list")
    assert row["note"] == "its controller is gone: smk-mantik runs continue"
    assert row["state"] not in ("FINISHED", "FAILED", "KILLED")
    said = runs.notify("delete", run_id, "--yes")
    assert said.code == 2, said.output
    tells(said.output, "it is not over")
    tells(runs.notify("continue").ok().output, f"Run {run_id}: continues")
    runs.let_go(run_id)
    run = runs.over(run_id)
    assert run.info.status == "FINISHED", runs.log(run_id)
    (tried,) = runs.directory(run_id).attempts
    assert tried.outcome == "succeeded"
    assert run.data.tags["mantik.attempt_id"] == tried.id

    # Again, from Python, by two who do not know of each other.
    for name, value in {**runs.project.environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MANTIK_RUNS", str(runs.home))
    other = rerun(
        run_id, name="second", account=OTHER_ACCOUNT, tags={"who": "cron"}, key="due at six"
    )
    assert rerun(run_id, key="due at six") == other != run_id
    runs.started(other)
    assert runs.json("show", "second")["request"]["again_of"] == run_id
    runs.kill(other)
    assert rerun(run_id, key="due at six") == other
    runs.let_go(other)
    run = runs.over(other)
    assert run.info.status == "FINISHED", runs.log(other)
    assert run.data.tags["who"] == "cron"
    assert run.data.tags["mantik.account"] == OTHER_ACCOUNT
    assert len(runs.directory(other).attempts) == 1


@pytest.mark.nightly
def test_cancelled_with_and_without_a_controller(runs: Runs) -> None:
    run_id = runs.submit("-e", "waits")
    runs.started(run_id)
    tells(runs.notify("cancel", run_id).ok().output, "KILLED")
    assert runs.over(run_id).info.status == "KILLED"
    assert [t.outcome for t in runs.directory(run_id).attempts] == ["cancelled"]

    other = runs.json("rerun", run_id, "--name", "other")["run_id"]
    runs.started(other)
    runs.kill(other)
    said = runs.notify("cancel", "other").ok().output
    assert runs.over(other).info.status == "KILLED", said
    assert [t.outcome for t in runs.directory(other).attempts] == ["cancelled"]
    assert runs.directory(other).end is not None


@pytest.mark.nightly
def test_a_run_that_fails_and_one_with_changed_values(served: Runs) -> None:
    served.project.write("churn/train.py", "import sys; sys.exit(float(sys.argv[1]) > 1)\n")
    said = served.notify("submit", "churn", "--site", served.site, "-P", "alpha=2", "--wait")
    assert said.code == 1, said.output
    tells(said.output, "submitted to hpc2", "FAILED")
    # The snapshot counts, not what becomes of the folder.
    served.project.write("churn/train.py", "raise SystemError\n")

    until_published(served.home)
    (row,) = served.json("list", "--state", "FAILED", "--experiment", served.experiment)
    assert "exit code 1" in row["note"]
    run_id = row["run_id"]
    said = served.notify("rerun", run_id, "-P", "alhpa=0.5")
    assert said.code == 2
    tells(said.output, "main.alhpa: is not a parameter of main")

    for words in (("rerun", run_id), ("submit", "churn", "--site", served.site)):
        said = served.notify(*words, "-P", "alpha=x", "--account", "a b")
        assert said.code == 2
        tells(said.output, "--account: may hold no blanks", "found 'a b'", "has to be a number")
    assert len(served.json("list", "--experiment", served.experiment)) == 1, "none was made"

    elsewhere = f"{served.experiment} again"
    again_id = served.json(
        "rerun", run_id, "-P", "alpha=0.5", "--extra", "seed=1", "--experiment", elsewhere,
        "--wait",
    )["run_id"]  # fmt: skip

    run = served.over(again_id)
    assert run.info.status == "FINISHED", served.log(again_id)
    assert (run.data.params["alpha"], run.data.params["seed"]) == ("0.5", "1")
    assert served.client.get_experiment_by_name(elsewhere).experiment_id == run.info.experiment_id
    assert run.data.tags["mantik.again_of"] == run_id
    shutil.rmtree(served.directory(run_id).path)
    said = served.notify("rerun", run_id)
    assert said.code == 2
    tells(said.output, "or its directory is gone", "smk-mantik runs submit", "--forcerun")
