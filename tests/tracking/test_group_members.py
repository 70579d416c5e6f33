"""Entry points in a group: each is an MLflow run of its own, below the group's."""

from mlflow.entities import Run

from snakemake_executor_plugin_mantik.jobs.script import export_lines
from snakemake_executor_plugin_mantik.tracking.run import PARENT_RUN_TAG
from snakemake_executor_plugin_mantik.tracking.store import member_variables
from tests.tracking.conftest import HEAD, Tracked

CODE = """
import sys
import mlflow
from pathlib import Path
with mlflow.start_run():
    mlflow.log_param("seen", sys.argv[1])
    mlflow.log_metric("loss", float(sys.argv[2]))
    mlflow.log_text(sys.argv[1], "name.txt")
once = Path(sys.argv[3])
if sys.argv[1] == "test" and not once.exists():
    once.touch()
    sys.exit(4)
"""
SNAKEFILE = """
rule train:
    output: "train.txt"
    group: "pair"
    params: call=Call(PurePosixPath("."), "demo", "main", "abc", dict(alpha="0.5"))
    shell: "PYTHON code.py train 1 ONCE && echo > {output}"

rule convert:
    input: "train.txt"
    output: "converted.txt"
    group: "pair"
    shell: "cp {input} {output}"

rule test:
    input: "converted.txt"
    output: "test.txt"
    group: "pair"
    params: call=Call(PurePosixPath("."), "demo", "test", "abc", dict(beta="2"))
    shell: "PYTHON code.py test 2 ONCE && echo > {output}"
"""


def test_members_have_runs_also_over_retries(tracked: Tracked) -> None:
    project = tracked.project
    project.write("code.py", CODE)
    once = str(project.directory.parent / "once")
    text = SNAKEFILE.replace("PYTHON", tracked.python).replace("ONCE", once)
    project.write("Snakefile", HEAD + text)

    said = project.run("test.txt", "--retries", "1").ok().output

    whole = tracked.workflow()
    experiment = [whole.info.experiment_id]

    def below(run: Run) -> dict[str, Run]:
        wanted = f"tags.`{PARENT_RUN_TAG}` = '{run.info.run_id}'"
        return {each.info.run_name: each for each in tracked.client.search_runs(experiment, wanted)}

    wanted = f"tags.`{PARENT_RUN_TAG}` = '{whole.info.run_id}'"
    groups = {run.info.status: run for run in tracked.client.search_runs(experiment, wanted)}
    assert set(groups) == {"FAILED", "FINISHED"}, said
    for status, group in groups.items():
        members = below(group)
        assert set(members) == {"train", "test"}
        train, test = members["train"], members["test"]
        assert (train.info.status, test.info.status) == ("FINISHED", status)
        assert train.data.params == {"alpha": "0.5", "seen": "train"}
        assert test.data.params == {"beta": "2", "seen": "test"}
        assert tracked.history(train, "loss") == [(0, 1.0)]
        assert tracked.history(test, "loss") == [(0, 2.0)]
        assert "loss" not in group.data.metrics
        assert tracked.artifacts(test) == ["name.txt"]
        assert test.data.tags["mlflow.project.entryPoint"] == "test"
        assert test.data.tags["mantik.rule"] == "test"
        assert test.data.tags["mantik.exit_code"] == ("4" if status == "FAILED" else "0")
        assert "mantik/log.txt" in tracked.artifacts(group)
    assert groups["FINISHED"].data.tags["mantik.retry_of"] == groups["FAILED"].info.run_id


def test_a_group_of_thousands_is_submitted() -> None:
    few = member_variables("/at/site", "an-attempt", {0: "first", 2: "third"})
    assert few["MANTIK_MEMBER_RUNS"] == "first - third"
    many = member_variables("/at/site", "an-attempt", dict.fromkeys(range(5000), "0" * 32))
    assert [name for name, _ in export_lines(many)] == ["MANTIK_MEMBER_ENDS"]
