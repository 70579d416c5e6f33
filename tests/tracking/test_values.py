"""What goes into a run from its start, and what must never be in it."""

from pathlib import Path, PurePosixPath

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from ruamel.yaml import YAML

from snakemake_executor_plugin_mantik.journal import TryRecord, TryState
from snakemake_executor_plugin_mantik.mlproject import Call
from snakemake_executor_plugin_mantik.sites.credentials import Bearer, Password, SshKey
from snakemake_executor_plugin_mantik.tracking.masking import held_by, masker, secret_values
from snakemake_executor_plugin_mantik.tracking.outbox import Kind, Lane, Outbox
from snakemake_executor_plugin_mantik.tracking.run import TrackedRun, tags, target, without_user
from snakemake_executor_plugin_mantik.tracking.store import Identity, variables, write_skeleton

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
    assert target({"MLFLOW_TRACKING_URI": uri}, Path("/here")).uri == expected


def test_users_of_ssh_urls_stay() -> None:
    assert without_user("ssh://git@host/x") == "ssh://git@host/x"
    assert without_user("git@host:x") == "git@host:x"


def test_tags(tmp_path: Path) -> None:
    call = Call(PurePosixPath("churn"), "churn", "main", "abc", {})

    found = tags(TrackedRun(call, {"a": "ü"}), RECORD, tmp_path, "Snakefile")

    assert found["mlflow.source.name"] == str(tmp_path / "churn")
    assert found["mlflow.source.type"] == "PROJECT"
    assert found["mantik.wildcards"] == '{"a": "ü"}'
    assert found["mantik.try"] == RECORD.id
    assert "mlflow.source.git.commit" not in found


def test_secrets_are_masked() -> None:
    mask = masker(
        [*secret_values({"DB_PASSWORD": "hunter2", "PATH": "/usr/bin", "X_TOKEN": "a"}),
         *held_by([Bearer("eyJtoken"), Password("marie", "ra:dium")])]
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
    mask = masker(held_by([SshKey("marie", tmp_path / "key")]))

    assert mask("EdDSA of /home/marie") == "EdDSA of /home/marie"


def test_places_with_strange_names(tmp_path: Path) -> None:
    workspace = "/scratch/a b#1%2 ü"
    identity = Identity("a" * 32, "7", 'it\'s: "ü"\\n')

    told = variables(workspace, RECORD.id, identity)
    write_skeleton(tmp_path, workspace, RECORD.id, identity, name="n", user="u", now=1.0)

    assert told["MLFLOW_TRACKING_URI"].startswith("file:///scratch/a%20b%231%252%20%C3%BC/.snake")
    meta = YAML(typ="safe").load(tmp_path / "7" / "meta.yaml")
    assert meta["name"] == identity.experiment
    assert meta["artifact_location"] == f"{told['MLFLOW_TRACKING_URI']}/7"


def test_an_end_is_told_once(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path / "outbox.sqlite")
    assert not outbox.add("t", Kind.END, {})  # of a try that is not tracked
    outbox.add_run("t", "", {})
    outbox.add_run("t", "", {})
    assert outbox.open_tries(Lane.MAKING) == ["t"]
    assert outbox.add("t", Kind.SUBMITTED, {"job": "1"})
    assert outbox.add("t", Kind.SUBMITTED, {"job": "2"})
    assert outbox.add("t", Kind.END, {"status": "FINISHED"})
    assert not outbox.add("t", Kind.END, {"status": "FAILED"})
    assert not outbox.add("t", Kind.STARTED, {})

    events = outbox.events("t")

    assert [(e.kind, dict(e.data)) for e in events] == [
        (Kind.CREATE, {}), (Kind.SUBMITTED, {"job": "2"}), (Kind.END, {"status": "FINISHED"}),
    ]  # fmt: skip
    outbox.done(events[0])
    assert outbox.open_tries(Lane.ENDING) == ["t"]
    assert not outbox.settled("t")
    outbox.done(events[1])
    outbox.done(events[2])
    assert outbox.settled("t")
    assert outbox.pending() == 0
    outbox.close()
