"""What goes into a run from its start, and what must never be in it."""

import subprocess
from pathlib import Path, PurePosixPath

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from ruamel.yaml import YAML

from snakemake_executor_plugin_mantik.common.secret_names import (
    credential_secrets,
    make_masker,
    secret_values,
)
from snakemake_executor_plugin_mantik.journal import AttemptRecord, AttemptState
from snakemake_executor_plugin_mantik.mlproject import Call
from snakemake_executor_plugin_mantik.sites.authentication import Bearer, Password, SshKey
from snakemake_executor_plugin_mantik.tracking.run import (
    TrackedRun,
    TrackedWorkflow,
    flatten_config,
    git_tags,
    mask_command,
    run_tags,
    tracking_target,
)
from snakemake_executor_plugin_mantik.tracking.store import (
    RunIdentity,
    store_skeleton,
    worker_variables,
)

RECORD = AttemptRecord(
    "11111111-2222-4333-8444-555555555555", "hpc1", 0, "job", "train", "train a=1", "f",
    AttemptState.PLANNED,
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
        ("ssh://git@host/x", "ssh://git@host/x"),
        ("git@host:x", "git@host:x"),
    ],
)
def test_where_runs_go(uri: str, expected: str) -> None:
    assert tracking_target({"MLFLOW_TRACKING_URI": uri}, Path("/here")).uri == expected


def test_tags(tmp_path: Path) -> None:
    call = Call(PurePosixPath("churn"), "churn", "main", "abc", {})

    found = run_tags(TrackedRun(call, {"a": "ü"}), RECORD, tmp_path, "Snakefile")

    assert found["mlflow.source.name"] == str(tmp_path / "churn")
    assert found["mlflow.source.type"] == "PROJECT"
    assert found["mantik.wildcards"] == '{"a": "ü"}'
    assert found["mantik.attempt_id"] == RECORD.id
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
