"""What goes into a run from its start, and what must never be in it."""

import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from ruamel.yaml import YAML

from snakemake_executor_plugin_mantik.common.secret_names import (
    credential_secrets,
    make_masker,
    secret_values,
)
from snakemake_executor_plugin_mantik.journal import TryRecord, TryState
from snakemake_executor_plugin_mantik.mlproject import Call
from snakemake_executor_plugin_mantik.sites.authentication import Bearer, Password, SshKey
from snakemake_executor_plugin_mantik.tracking import ledger, segments
from snakemake_executor_plugin_mantik.tracking.ledger import Ledger
from snakemake_executor_plugin_mantik.tracking.outbox import OUTBOX_VERSION, EventKind, Lane, Outbox
from snakemake_executor_plugin_mantik.tracking.run import (
    TrackedRun,
    git_tags,
    run_tags,
    tracking_target,
    without_user,
)
from snakemake_executor_plugin_mantik.tracking.store import (
    RunIdentity,
    store_skeleton,
    worker_variables,
)
from snakemake_executor_plugin_mantik.tracking.workflow import (
    TrackedWorkflow,
    flatten_config,
    mask_command,
)

RECORD = TryRecord(
    "11111111-2222-4333-8444-555555555555", "hpc1", 0, "job", "train", "train a=1", "f",
    TryState.PLANNED,
)  # fmt: skip


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("", ""),
        ("https://mlflow.example", "https://mlflow.example"),
        ("https://me:secret@mlflow.example/x", "https://mlflow.example/x"),
        ("postgresql://me:secret@db/mlflow", "postgresql://db/mlflow"),
        ("sqlite:///runs.db", "sqlite:////here/runs.db"),
        ("sqlite:////there/runs.db", "sqlite:////there/runs.db"),
    ],
)
def test_where_runs_go(uri: str, expected: str) -> None:
    assert tracking_target({"MLFLOW_TRACKING_URI": uri}, Path("/here")).uri == expected


def test_users_of_ssh_urls_stay() -> None:
    assert without_user("ssh://git@host/x") == "ssh://git@host/x"
    assert without_user("git@host:x") == "git@host:x"


def test_tags(tmp_path: Path) -> None:
    call = Call(PurePosixPath("churn"), "churn", "main", "abc", {})

    found = run_tags(TrackedRun(call, {"a": "ü"}), RECORD, tmp_path, "Snakefile")

    assert found["mlflow.source.name"] == str(tmp_path / "churn")
    assert found["mlflow.source.type"] == "PROJECT"
    assert found["mantik.wildcards"] == '{"a": "ü"}'
    assert found["mantik.try"] == RECORD.id
    assert "mlflow.source.git.commit" not in found


def test_secrets_are_masked() -> None:
    mask = make_masker(
        [*secret_values({"DB_PASSWORD": "hunter2", "PATH": "/usr/bin", "X_TOKEN": "a"}),
         *credential_secrets([Bearer("eyJtoken"), Password("marie", "ra:dium")])]
    )  # fmt: skip

    assert mask("hunter2 at /usr/bin with eyJtoken, a") == "*** at /usr/bin with ***, a"
    assert mask("marie has ra:dium") == "marie has ***"


def test_a_users_name_is_no_secret(tmp_path: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (tmp_path / "key").write_bytes(key)
    mask = make_masker(credential_secrets([SshKey("marie", tmp_path / "key")]))

    assert mask("EdDSA of /home/marie") == "EdDSA of /home/marie"


def test_places_with_strange_names() -> None:
    workspace = "/scratch/a b#1%2 ü"
    identity = RunIdentity("a" * 32, "7", 'it\'s: "ü"\\n')

    told = worker_variables(workspace, RECORD.id, identity)
    files = store_skeleton(workspace, RECORD.id, identity, name="n", user="u", now=1.0)

    assert told["MLFLOW_TRACKING_URI"].startswith("file:///scratch/a%20b%231%252%20%C3%BC/.snake")
    meta = YAML(typ="safe").load(files["7/meta.yaml"])
    assert meta["name"] == identity.experiment
    assert meta["artifact_location"] == f"{told['MLFLOW_TRACKING_URI']}/7"


def test_an_end_is_told_once(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.sqlite")
    assert not outbox.add("t", EventKind.END, {})  # of a try that is not tracked
    outbox.add_run("t", "", {})
    outbox.add_run("t", "", {})
    assert outbox.open_tries(Lane.MAKING) == ["t"]
    assert outbox.add("t", EventKind.SUBMITTED, {"job": "1"})
    assert outbox.add("t", EventKind.SUBMITTED, {"job": "2"})
    assert outbox.add("t", EventKind.END, {"status": "FINISHED"})
    assert not outbox.add("t", EventKind.END, {"status": "FAILED"})
    assert not outbox.add("t", EventKind.STARTED, {})

    events = outbox.events("t")

    assert [(e.kind, dict(e.data)) for e in events] == [
        (EventKind.CREATE, {}), (EventKind.SUBMITTED, {"job": "2"}),
        (EventKind.END, {"status": "FINISHED"}),
    ]  # fmt: skip
    # Jobs wait for runs to be made, and for nothing else.
    assert [outbox.open_tries(lane) for lane in Lane] == [["t"], [], [], []]
    outbox.made("t", "https://x", "1" * 32, "7", "digits")
    # An end is told after what a run has from its start.
    assert [outbox.open_tries(lane) for lane in Lane] == [[], ["t"], [], []]
    outbox.done(events[0])
    assert outbox.open_tries(Lane.ENDING) == ["t"]
    assert not outbox.settled("t")
    outbox.done(events[1])
    outbox.done(events[2])
    assert outbox.settled("t")
    assert outbox.pending() == 0
    outbox.close()


def test_a_configuration_as_parameters() -> None:
    mask = make_masker(["hunter2"])
    values: dict[str, object] = {
        "model": {"depth": 3, "layers": [1, 2], "empty": {}}, "api_token": "abc",
        "uri": "x hunter2", "no_password": None, "a b/c:d.e-f": 1, "odd(name)": "x" * 7000,
        "path": Path("/x"), **{f"n{i}": i for i in range(600)},
    }  # fmt: skip

    found = flatten_config(values, mask)

    assert {name: found[name] for name in list(found)[:8]} == {
        "model.depth": "3", "model.layers": "[1, 2]", "model.empty": "{}", "api_token": "***",
        "uri": "x ***", "no_password": "null", "a b/c:d.e-f": "1", "odd_name_": "x" * 6000,
    }  # fmt: skip
    assert found["path"] == "/x"
    assert len(found) == 500


def test_no_secret_is_in_a_command_line() -> None:
    words = ["snakemake", "--config", "db_password=abc", "n=1 2", "x=hunter2", "--until",
             "https://me:pw@host/x", "token="]  # fmt: skip

    told = mask_command(words, make_masker(["hunter2"]))

    assert told == (
        "snakemake --config 'db_password=***' 'n=1 2' 'x=***' --until https://host/x token="
    )


@pytest.mark.parametrize(
    ("snakefile", "name"),
    [
        ("/w/churn/Snakefile", "churn"),
        ("/w/churn/workflow/Snakefile", "churn"),
        ("/w/churn/rules/eval.smk", "churn: eval.smk"),
        ("/w/churn/other/Snakefile", "churn: other"),
        ("/elsewhere/Snakefile", "churn: Snakefile"),
        ("Snakefile", "churn"),
    ],
)
def test_what_a_workflow_is_called(snakefile: str, name: str) -> None:
    assert TrackedWorkflow(snakefile).name(Path("/w/churn")) == name


def test_what_the_project_is_at_in_git(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        options = ("-c", "user.name=x", "-c", "user.email=x@x")
        subprocess.run(["git", *options, *words], cwd=tmp_path, check=True, capture_output=True)

    for name in ("clean", "edited", "grown"):
        (tmp_path / name / ".snakemake").mkdir(parents=True)
        (tmp_path / name / "code.py").touch()
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    (tmp_path / "edited" / "code.py").write_text("1")
    (tmp_path / "grown" / "new.py").touch()
    (tmp_path / "clean" / ".snakemake" / "lock").touch()

    found = {n: git_tags(tmp_path / n)["mantik.git.dirty"] for n in ("clean", "edited", "grown")}

    assert found == {"clean": "false", "edited": "true", "grown": "true"}


def test_an_outbox_of_another_version_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "outbox.sqlite"
    Outbox(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {OUTBOX_VERSION + 1}")
    with pytest.raises(sqlite3.NotSupportedError, match="another version"):
        Outbox(path)


def test_attempts_and_what_they_used(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.sqlite")
    known = Ledger(outbox)
    known.begin("w", "i")
    for number, status in enumerate(["FAILED", "KILLED", "FINISHED", "FINISHED"]):
        known.add(f"t{number}", "w", job="j", rule="r", name="n", site="s")
        known.asked(f"t{number}", 4)
        known.ended(f"t{number}", status, ran=900, cpu=1.5)
    known.add("t4", "w", job="k", rule="r", name="n", site="s")
    known.started("t4")

    jobs = known.jobs("w")

    assert [job.attempt for job in jobs] == [1, 2, 3, 1, 1]
    assert segments.workflow_figures(jobs) == {
        "mantik/jobs_finished": 1, "mantik/jobs_failed": 0, "mantik/jobs_killed": 0,
        "mantik/jobs_running": 1, "mantik/jobs_queued": 0,
        "mantik/core_hours": pytest.approx(4), "mantik/cpu_seconds": 6,
    }  # fmt: skip
    outbox.close()


def test_whoever_looks_again_changes_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter(range(10, 1000, 10))
    monkeypatch.setattr(ledger, "time", SimpleNamespace(time=lambda: float(next(moments))))
    outbox = Outbox(tmp_path / "outbox.sqlite")
    known = Ledger(outbox)
    known.begin("w", "i")
    for job in "ab":
        known.add(job, "w", job=job, rule="r", name="n", site="s")
        for act in (known.queued, known.started):
            act(job)
            act(job)
    # What a job says itself of how long it ran is nearer to the truth than what was seen.
    known.ended("a", "FINISHED", ran=55)  # at 120
    known.ended("b", "KILLED")  # at 130
    known.ended("a", "FAILED")

    found = {j.try_id: (j.created, j.queued, j.started, j.ended, j.status) for j in known.jobs("w")}

    assert found == {"a": (20, 30, 65, 120, "FINISHED"), "b": (70, 80, 100, 130, "KILLED")}
    outbox.close()


def test_a_run_that_is_made_at_last_keeps_its_id(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.sqlite")
    for name in ("late", "early"):
        outbox.add_run(name, "", {})
    outbox.made("early", "https://x", "1" * 32, "7", "digits")

    for name in ("late", "early"):
        outbox.give_own_id(name, "f" * 32, "0", "Default")
    outbox.made("late", "https://x", "2" * 32, "7", "digits")

    found = {r.try_id: r for r in map(outbox.run, ("late", "early")) if r is not None}
    assert (found["late"].run_id, found["late"].own_id) == ("2" * 32, "f" * 32)
    assert (found["early"].run_id, found["early"].own_id) == ("1" * 32, "")
    # What the job was given stays, whatever MLflow says since.
    assert found["late"].given == ("f" * 32, "0")
    assert found["early"].given == ("1" * 32, "7")
    assert (found["late"].experiment_id, found["early"].experiment) == ("7", "digits")
    outbox.close()


def test_what_a_job_logs_is_told_beside_the_rest_and_again(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.sqlite")
    outbox.add_run("t", "", {})
    assert outbox.add("t", EventKind.LIVE, {})
    # Nothing can be told of a run that is not made.
    assert [outbox.open_tries(lane) for lane in Lane] == [["t"], [], [], []]
    outbox.made("t", "https://x", "1" * 32, "7", "digits")
    making, logged = outbox.events("t")
    outbox.done(making)
    assert [outbox.open_tries(lane) for lane in Lane] == [[], [], ["t"], []]
    assert not outbox.begun("t", EventKind.LIVE)

    # It logs more while it is told what it has logged.
    assert outbox.add("t", EventKind.LIVE, {})
    outbox.begin(logged)
    outbox.done(logged)

    assert outbox.begun("t", EventKind.LIVE)
    (more,) = outbox.events("t")
    assert more.attempts == 1
    # Whoever begins anew has to know that some of it may be told.
    assert outbox.add("t", EventKind.LIVE, {})
    assert outbox.begun("t", EventKind.LIVE)
    outbox.add("t", EventKind.END, {})
    assert [outbox.open_tries(lane) for lane in Lane] == [[], [], [], ["t"]]
    outbox.close()
