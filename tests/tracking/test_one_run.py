"""A rule with mantik_track="one" is one MLflow run over its retries."""

import json
import sys
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from snakemake_executor_plugin_mantik.tracking.run import TrackedRun
from snakemake_executor_plugin_mantik.tracking.worker_client import WorkerClient
from tests.tracking.conftest import Tracked
from tests.tracking.rules import HEAD, rule
from tests.tracking.test_replay import OVERLOADED, Killed, Mortal, each_death, empty
from tests.tracking.test_segment_runs import Directory

__all__ = ["empty"]

CODE = """
import sys
from pathlib import Path
import mlflow

print("trained")
first = not Path(ONCE).exists()
with mlflow.start_run():
    mlflow.log_param("first", first)
    mlflow.log_metric("accuracy", 0.1 if first else 0.9)
    for step in range(2 if first else 3):
        mlflow.log_metric("loss", step + (0.5 if first else 0.7), step=step)
    mlflow.log_text("", f"first-{first}")
if first:
    Path(ONCE).touch()
    sys.exit(4)
"""


def test_retries_go_on_in_one_run(tracked: Tracked) -> None:
    project = tracked.project
    project.write("code.py", CODE.replace("ONCE", repr(str(project.directory.parent / "once"))))
    text = rule(f"{sys.executable} code.py", arguments={"alpha": "1.50"})
    one = '    resources: mantik_track="one"\n    shell:'
    project.write("Snakefile", HEAD + text.replace("    shell:", one))

    said = project.run("--retries", "1").ok().output

    run = tracked.run()
    assert run.info.status == "FINISHED", said
    assert tracked.history(run, "loss") == [(0, 0.5), (1, 1.5), (2, 2.7)]
    assert tracked.history(run, "accuracy") == [(0, 0.1), (0, 0.9)]
    assert run.data.metrics["accuracy"] == 0.9
    assert run.data.params == {"alpha": "1.50", "first": "True"}
    assert "first is already 'True' in MLflow; the job logged 'False'" in said
    assert run.data.tags["mantik.attempt"] == "2"
    assert run.data.tags["mantik.exit_code"] == "0"
    assert "mantik.reason" not in run.data.tags
    tries = json.loads(run.data.tags["mantik.segments"])
    assert [each["segment"] for each in tries] == [1, 2]
    assert len({each["try"] for each in tries}) == 2
    assert "exit code 4" in tries[0]["end"]
    ran = [record.ran for record in project.tries if record.ran is not None]
    assert len(ran) == 2
    assert abs(run.data.metrics["mantik/running_seconds"] - sum(ran)) < 0.1
    assert {"first-True", "first-False", "mantik/log.txt", "mantik/try-1/log.txt"} <= set(
        tracked.artifacts(run)
    )
    assert "mantik/try-2/log.txt" not in tracked.artifacts(run)


class Retried(Directory):
    """A try that has failed and its retry, while nothing was published."""

    subject = TrackedRun(one=True)

    def write(self) -> None:
        for number in range(2):
            record = self.journal.new_try(
                site="hpc1", job="job", rule="train", name="train", fingerprint="f"
            )
            extras = self.prepare(record)
            self.journal.submitting(record.id, "batch")
            self.journal.submitted(record.id, f"job {number}")
            self.log(number, record, extras)
            how, code = ("finished", 0) if number else ("failed", 4)
            self.ended(record, how=how, exit_code=code, ran=60.0, cpu=30.0)

    def check(self) -> None:
        run = self.run()
        assert run.info.status == "FINISHED"
        assert self.history("loss") == list(enumerate([0.5, 0.5, 0.5, 1.5, 1.5]))
        assert self.history("accuracy") == [(0, 0.0), (0, 0.1)]
        assert self.history("mantik/cpu_seconds") == [(0, 30), (1, 60)]
        tags = run.data.tags
        assert (tags["mantik.job_id"], tags["mantik.attempt"]) == ("job 1", "2")
        assert tags["mantik.exit_code"] == "0"
        assert self.left == 0
        assert self.said == []


@each_death
def test_a_retry_is_published_once_whoever_dies(
    tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(WorkerClient, "wake", lambda _: None)
    died, alive = 0, False
    while not alive:
        each = Retried(tmp_path / str(died), empty)
        mortal = Mortal(each.client, died + 1, (Killed(), OVERLOADED)[died // 2 % 2])
        try:
            each.publish(mortal)
            alive = True
        except (Killed, MlflowException):
            each.publish(each.client)
        each.check()
        each.journal.close()
        died += 2 * step  # the other half is tested with segments
    assert died > 12
