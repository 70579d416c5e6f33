"""A rule with mantik_track="one" is one MLflow run over its retries."""

import json
import sys

from tests.tracking.conftest import Tracked
from tests.tracking.rules import HEAD, rule
from tests.tracking.test_replay import empty

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
