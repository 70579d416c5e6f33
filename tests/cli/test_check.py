"""`smk-mantik check` without and with a site."""

import json
import os
import struct
import time
from pathlib import Path

import jwt
import pytest
from typer.testing import CliRunner, Result

from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.cli import _app
from snakemake_executor_plugin_mantik.cli.sandbox import backend_config, environment_of
from snakemake_executor_plugin_mantik.config.reading import NoConfig
from tests.support.ports import free_port

GOOD = "UnicoreApiUrl: https://hpc.example.org/rest/core\nResources: {Queue: booster}\n"
IMAGE = f"{GOOD}Environment: {{Apptainer: {{Path: env/train.sif}}}}\n"
FIRECREST = (
    "Firecrest: {ApiUrl: https://f.example.org, TokenUrl: https://t.example.org, Machine: alp}\n"
    "Resources: {Queue: normal, Memory: 2G}\nEnvironment: {Python: /v}\n"
)


def check(*words: str, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(_app(), ["check", *words], env=environment)


def test_good_files_have_a_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "train.sif").write_text("")
    (tmp_path / "juwels.yaml").write_text(IMAGE)
    (tmp_path / "alps.yml").write_text(FIRECREST)
    done = check("juwels.yaml", "cscs=alps.yml")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "juwels.yaml: UNICORE, queue booster, Apptainer env/train.sif",
        "alps.yml: firecREST, machine alp, queue normal, Python /v",
    ]
    assert done.stderr.splitlines() == [
        "warning: alps.yml: Resources.Memory: is read as MemoryPerNode; use that name"
    ]
    assert isinstance(check().exception, NoConfig)
    (tmp_path / "profiles/default").mkdir(parents=True)
    profile = "executor: mantik\nmantik-backend-config: [juwels.yaml, cscs=alps.yml]\n"
    (tmp_path / "profiles/default/config.yaml").write_text(profile)
    (tmp_path / "Snakefile").touch()
    assert check().stdout == done.stdout, "those of the profile"


def test_commands_that_bash_cannot_read_are_a_warning(tmp_path: Path) -> None:
    hooks = {
        "PreRunCommandOnLoginNode": ["touch it; exit 3", "if true", "cat <<E\nx\nE"],
        "PostRunCommandOnComputeNode": 'echo "unclosed',
        "PreRunCommandOnComputeNode": "for i in 1 2; do\n  echo $i # $(\ndone",
    }
    document = {
        "UnicoreApiUrl": "https://x.org/rest/core",
        "Resources": {"Queue": "q"},
        "Environment": hooks,
    }
    (tmp_path / "a.json").write_text(json.dumps(document))
    done = check(str(tmp_path / "a.json"))
    assert done.exit_code == 0
    keys = [line.split(": ")[2] for line in done.stderr.splitlines()]
    assert sorted(keys) == [
        "Environment.PostRunCommandOnComputeNode",
        "Environment.PreRunCommandOnLoginNode",
    ]
    assert "command 2 is not valid bash: syntax error" in done.stderr
    assert not (tmp_path / "it").exists()


def test_what_mantik_s_own_backend_expanded_is_a_warning(tmp_path: Path) -> None:
    text = f"""{GOOD}Environment:
  Apptainer:
    Path: /p/$USER/i.sif
    Type: remote
    Options: [-B $A:/b, '--x="$(y)"', "'$(z)'"]
  Variables: {{A: $SCRATCH, B: "5 $"}}
Environments: {{ml: {{Python: "/p/${{USER}}/venv"}}}}
"""
    file = tmp_path / "a.yaml"
    file.write_text(text)
    done = check(str(file))
    assert done.exit_code == 0, done.output
    keys = [line.removeprefix(f"warning: {file}: ").split(": ")[0] for line in
            done.stderr.splitlines()]  # fmt: skip
    assert keys == ["Environment.Apptainer.Path", "Environment.Apptainer.Options",
                    "Environment.Variables.A", "Environments.ml.Python.Path"]  # fmt: skip
    file.write_text(f"{text}Site: {{Expand: true}}\n")
    assert check(str(file)).stderr == ""


def test_variables_of_slurm_that_cannot_do_what_they_say_are_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"""{GOOD}Environment:
  Variables:
    SBATCH_PARTITION: devel
    SLURM_NNODES: 4
    SLURM_NTASKS_PER_NODE: 3
    SLURM_MPI_TYPE: pmix
    SRUN_CPUS_PER_TASK: 2
""")
    done = check(str(file))
    assert done.exit_code == 0, done.output
    first, second = done.stderr.splitlines()
    assert "Environment.Variables.SBATCH_PARTITION: it has no effect" in first
    assert "set Resources: Queue instead" in first
    assert "Environment.Variables.SLURM_NNODES: it hides" in second


def test_json_has_it_all(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("{}")
    (tmp_path / "b.yaml").write_text(FIRECREST)
    done = check("--json", str(tmp_path / "a.yaml"), f"alps={tmp_path}/b.yaml")
    assert done.exit_code == 2
    one, two = json.loads(done.stdout)["files"]
    assert (one["valid"], one["site"], two["valid"], two["site"]) == (False, None, True, "alps")
    assert {mistake["key"] for mistake in one["mistakes"]} == {"UnicoreApiUrl", "Resources"}
    assert (two["api"], two["queue"], len(two["warnings"])) == ("firecrest", "normal", 1)


def sif(path: Path, code: bytes) -> None:
    """The beginning of a SIF file."""
    path.write_bytes(struct.pack("32s10s3s3s", b"#!/usr/bin/env run\n", b"SIF_MAGIC", b"01", code))


def connected(
    box: Sandbox, project: Path, more: str = "", *, token: str = "", **changes: str
) -> Result:
    text = backend_config(box, "hpc1")
    for old, new in changes.items():
        text = text.replace(f"{old}: ", f"{old}: {new} #", 1)
    (project / "hpc1.yaml").write_text(text + more)
    environment = {name: value for name, value in os.environ.items() if "MANTIK" not in name}
    environment |= {"MANTIK_HPC1_TOKEN": token} if token else environment_of(box)
    return check(
        "--connect", str(project / "hpc1.yaml"), "--project", str(project), environment=environment
    )


def test_a_site_is_asked(sandbox: Sandbox, tmp_path: Path) -> None:
    sif(tmp_path / "i.sif", b"04")
    done = connected(sandbox, tmp_path, "Environment: {Apptainer: {Path: i.sif}}\n")
    assert done.exit_code == 0, done.output
    lines = dict(line.strip().split(": ", 1) for line in done.stdout.splitlines()[1:])
    told = {key: value.strip() for key, value in lines.items()}
    assert told["credentials"].startswith("Password (MANTIK_HPC1_USERNAME, ")
    assert "can be written to" in told["workspace"]
    assert told["server"] == "UNICORE/X 11.0.0"
    assert "RAW" not in done.stdout, "what the server does to other requests concerns no job"
    assert "batch" in told["queues"]
    assert "runtime up to" in told["queue"]
    assert "reported limits" in told["resources"]
    assert told["clock"].startswith("the site's file times are ")
    assert "arm64" in told["image"]
    left = [path for path in (sandbox.directory / "hpc1").rglob("check-*") if path.is_file()]
    assert left == []


def test_a_queue_that_is_not_listed_is_a_warning(sandbox: Sandbox, tmp_path: Path) -> None:
    done = connected(sandbox, tmp_path, Queue="nowhere")
    assert done.exit_code == 0, done.output
    assert "Resources.Queue: the site lists no queue 'nowhere'" in done.stdout


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"Queue": "batch\n  Nodes: 999"}, "Resources.Nodes: nodes: 999 requested"),
        ({"Queue": "batch\n  GPUsPerNode: 99\n  Runtime: 99d"}, "Resources.GPUsPerNode"),
        (
            {"Queue": "batch\n  GPUsPerNode: 1", "Scheduler": "none"},
            "server: UNICORE/X 11.0.0 loses GPUsPerNode of 1",
        ),
    ],
)
def test_what_the_site_has_not_is_told(
    sandbox: Sandbox, tmp_path: Path, changes: dict[str, str], told: str
) -> None:
    done = connected(sandbox, tmp_path, **changes)
    assert done.exit_code == 2
    assert told in done.stderr
    assert "can be written to" in done.stdout


def test_credentials_that_nobody_takes_are_told(sandbox: Sandbox, tmp_path: Path) -> None:
    key = "k" * 32
    old = jwt.encode({"exp": int(time.time()) - 60}, key)
    soon = jwt.encode({"exp": int(time.time()) + 600}, key)
    done = connected(sandbox, tmp_path, token=old)
    assert done.exit_code == 2
    assert "credentials: Bearer (MANTIK_HPC1_TOKEN) expired at" in done.stderr
    done = connected(sandbox, tmp_path, token=soon, Queue="batch\n  Runtime: 1h")
    assert "(!) Bearer (MANTIK_HPC1_TOKEN) expires at" in done.stdout
    assert "credentials: " in done.stderr  # the sandbox does not know it
    (tmp_path / "lonely.yaml").write_text(GOOD)
    environment = dict.fromkeys((name for name in os.environ if "MANTIK" in name), "")
    done = check("--connect", str(tmp_path / "lonely.yaml"), environment=environment)
    assert done.exit_code == 2
    assert "credentials: site lonely: no credentials" in done.stderr


def test_a_site_that_is_not_there_is_told(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snakemake_executor_plugin_mantik.cli.check_site.ANSWER_WAIT_S", 3.0)
    url = f"http://127.0.0.1:{free_port()}/rest/core"
    done = connected(sandbox, tmp_path, UnicoreApiUrl=url)
    assert done.exit_code == 2
    assert ".yaml: server: " in done.stderr


@pytest.mark.parametrize("name", ["1x.yaml", "max.yaml", "a b.yaml", "2=max.yaml"])
def test_a_file_whose_name_no_site_can_have_is_warned_of(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A file that is there is meant, also if it looks like NAME=FILE.
    (tmp_path / name).write_text(GOOD)
    done = check(name)
    assert (done.exit_code, done.stdout) == (0, f"{name}: UNICORE, queue booster\n")
    assert done.stderr.startswith(f"warning: {name}: ")
    assert "write NAME=FILE" in done.stderr
    done = check(f"x1={name}")
    assert (done.exit_code, done.stderr) == (0, "")


def test_a_name_that_is_given_and_no_site_can_have_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text(GOOD)
    done = check("1=good.yaml")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("good.yaml: '1' cannot be the name of a site")
