"""`smk-mantik check` without and with a site."""

import json
import os
import struct
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jwt
import pytest
from typer.testing import CliRunner, Result

from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.cli import _app, check_site
from snakemake_executor_plugin_mantik.cli.check_site import Finding
from snakemake_executor_plugin_mantik.cli.sandbox import backend_config, environment_of
from snakemake_executor_plugin_mantik.common.errors import SiteRejected
from snakemake_executor_plugin_mantik.config.known_sites import KNOWN_SITES, find_known_site
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.jobs.paths import workspace_below
from snakemake_executor_plugin_mantik.sites.base import Site, SiteDetails
from snakemake_executor_plugin_mantik.sites.firecrest import FirecrestSite, list_known_defects
from snakemake_executor_plugin_mantik.sites.firecrest.connection import FirecrestSystem
from snakemake_executor_plugin_mantik.sites.unicore import read_budgets, read_condition, read_space
from snakemake_executor_plugin_mantik.sites.unicore.connection import UnicoreConnection
from tests.support import virtualtime
from tests.support.ports import free_port
from tests.support.sandbox import wait_for
from tests.support.simulated import Habits, SimulatedSite, World
from tests.support.unicoreserver import PASSWORD, USER, UnicoreX
from tests.support.workflows import place_in

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
    assert str(check().exception).startswith("neither the command nor a profile here names a")
    (tmp_path / "profiles/default").mkdir(parents=True)
    profile = "executor: mantik\nmantik-backend-config: [juwels.yaml, cscs=alps.yml]\n"
    (tmp_path / "profiles/default/config.yaml").write_text(profile)
    assert check().stdout == done.stdout, "those of the profile, before there is a Snakefile"
    (tmp_path / "Snakefile").touch()
    assert check().stdout == done.stdout, "and with one"


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
    assert "arm64" in told["image"]
    left = [path for path in (sandbox.directory / "hpc1").rglob("check-*") if path.is_file()]
    assert left == []


@pytest.mark.parametrize(("off", "verdicts"), [(-1.2, []), (9.0, ["ok"]), (-90.0, ["warning"])])
def test_a_second_is_no_difference(
    off: float, verdicts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_site, "time", SimpleNamespace(time=lambda: 0.0))
    site = SimulatedSite(World(habits=Habits(clock=off)))
    found = virtualtime.run(check_site._workspace(site, "/ws", ""))
    assert [each.verdict for each in found if each.topic == "clock"] == verdicts


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


# `smk-mantik check --connect`: the sandbox's two kinds of sites, and a real UNICORE/X.


def asked(config: Path, environment: dict[str, str]) -> Result:
    clean = {name: value for name, value in os.environ.items() if "MANTIK" not in name}
    words = ["check", "--connect", str(config), "--project", str(config.parent), "--json"]
    return CliRunner().invoke(
        _app(), words, env={**dict.fromkeys(os.environ, ""), **clean, **environment}
    )


def findings(done: Result) -> list[Finding]:
    return [Finding(**each) for each in json.loads(done.stdout)["files"][0]["findings"]]


def about(topic: str, found: list[Finding]) -> Finding:
    return next(finding for finding in found if finding.topic == topic)


def of_sandbox(box: Sandbox, name: str, folder: Path, *, more: str = "", **changed: str) -> Result:
    config = folder / f"{name}.yaml"
    config.write_text(backend_config(box, name) + more)
    return asked(config, {**environment_of(box), **changed})


def left_behind(box: Sandbox, name: str, folder: Path) -> list[Path]:
    assert list((box.directory / name).rglob("mantik")), "workspaces lie elsewhere"
    return list((box.directory / name).rglob(f"{folder.name}-*"))


def test_firecrest_is_asked(sandbox: Sandbox, tmp_path: Path) -> None:
    done = of_sandbox(sandbox, "hpc2", tmp_path)
    assert done.exit_code == 0, done.output
    found = findings(done)
    assert {finding.verdict for finding in found} == {"ok", "note"}
    used = "ClientCredentials (MANTIK_HPC2_CLIENT_ID, MANTIK_HPC2_CLIENT_SECRET) found"
    assert about("credentials", found).text == used
    assert about("server", found).text.startswith("firecREST 2")
    assert about("user", found).text == "jobs run as mantik"
    assert "batch" in about("queues", found).text
    assert "nodes" in about("queue", found).text
    assert about("account", found) == Finding("account", "ok", "jobs are charged to sandbox")
    assert "can be written to" in about("workspace", found).text
    assert "reports neither" in about("free space", found).text
    assert "does not report" in about("purge", found).text
    assert {each.verdict for each in found if each.topic == "clock"} <= {"ok"}
    assert left_behind(sandbox, "hpc2", tmp_path) == []


def test_accounts_are_held_against_those_that_are_told(sandbox: Sandbox, tmp_path: Path) -> None:
    done = of_sandbox(sandbox, "hpc2", tmp_path, MANTIK_COMPUTE_BUDGET_ACCOUNT="nobody")
    assert done.exit_code == 2
    found = about("account", findings(done))
    assert found.verdict == "wrong"
    assert "nobody is not among those that the site reports: sandbox" in found.text
    done = of_sandbox(sandbox, "hpc2", tmp_path, MANTIK_COMPUTE_BUDGET_ACCOUNT="")
    assert (
        "so jobs are charged to sandbox, the site's default"
        in about("account", findings(done)).text
    )
    done = of_sandbox(sandbox, "hpc1", tmp_path, MANTIK_COMPUTE_BUDGET_ACCOUNT="x")
    assert "the site reports no accounts" in about("account", findings(done)).text
    assert "/mantik can be written" in about("workspace", findings(done)).text
    assert left_behind(sandbox, "hpc1", tmp_path) == []


def test_a_workspace_of_the_user_s_own_stays(sandbox: Sandbox, tmp_path: Path) -> None:
    for name in ("hpc1", "hpc2"):
        done = of_sandbox(sandbox, name, tmp_path, more=f"  Workspace: shared/{tmp_path.name}\n")
        assert f"shared/{tmp_path.name} can be written" in about("workspace", findings(done)).text
        (kept,) = (sandbox.directory / name).rglob(f"shared/{tmp_path.name}")
        assert [path for path in kept.rglob("*") if path.is_file()] == []


def test_what_is_asked_beyond_limits_that_are_not_told_is_said(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    text = backend_config(sandbox, "hpc2")
    asked_for = "Queue: batch\n  Runtime: 999d\n  Nodes: 1\n  MemoryPerNode: 900G\n"
    config = tmp_path / "hpc2.yaml"
    config.write_text(text.replace("Queue: batch\n", asked_for))
    found = findings(asked(config, environment_of(sandbox)))
    fits, unchecked = [finding for finding in found if finding.topic == "resources"]
    assert fits == Finding("resources", "ok", "are within the queue's reported limits")
    assert unchecked.verdict == "note"
    assert unchecked.text.startswith("runtime, memory: not checked")


def test_pools_are_held_against_the_queues(sandbox: Sandbox, tmp_path: Path) -> None:
    config = tmp_path / "hpc1.yaml"
    pool = "Pools:\n  big: {Queue: batch, CPUsPerNode: 2, Runtime: 9999d}\n"
    config.write_text(backend_config(sandbox, "hpc1") + pool)
    found = about("pool", findings(asked(config, environment_of(sandbox))))
    assert found.verdict == "wrong"
    assert found.text.startswith("Pools.big.Runtime: runtime: 9999 days requested")


@pytest.mark.parametrize(
    ("site", "variable"), [("hpc1", "MANTIK_HPC1_PASSWORD"), ("hpc2", "MANTIK_HPC2_CLIENT_SECRET")]
)
def test_a_wrong_credential_names_its_variables(
    sandbox: Sandbox, tmp_path: Path, site: str, variable: str
) -> None:
    done = of_sandbox(sandbox, site, tmp_path, **{variable: "hunter2"})
    assert done.exit_code == 2
    wrong = [finding for finding in findings(done) if finding.verdict == "wrong"]
    assert [finding.topic for finding in wrong] == ["credentials"]
    assert variable in wrong[0].text
    assert "hunter2" not in done.output


def test_another_scheduler_than_the_config_says_is_told(sandbox: Sandbox, tmp_path: Path) -> None:
    config = tmp_path / "hpc2.yaml"
    text = backend_config(sandbox, "hpc2")
    config.write_text(text.replace("Scheduler: slurm", "Scheduler: pbs"))
    found = about("scheduler", findings(asked(config, environment_of(sandbox))))
    assert found.verdict == "warning"
    assert "set Site: Scheduler to slurm" in found.text


def test_a_site_that_tells_no_more_is_good_enough(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_site: Site) -> SiteDetails:
        raise SiteRejected("no")

    monkeypatch.setattr(FirecrestSite, "describe", refuse)
    done = of_sandbox(sandbox, "hpc2", tmp_path)
    assert done.exit_code == 0
    assert any("does not provide details" in finding.text for finding in findings(done))
    assert about("workspace", findings(done)).verdict == "ok"


def unicorex_config(server: UnicoreX, folder: Path, more: str = "") -> Path:
    config = folder / "real.yaml"
    config.write_text(
        f"UnicoreApiUrl: {server.url}\nResources: {{Queue: batch, Nodes: 1{more}}}\n"
        f"Site: {{CAFile: {server.ca_file}, Storage: SCRATCH}}\n"
    )
    return config


def test_a_real_server_is_asked(unicorex: UnicoreX, tmp_path: Path) -> None:
    variables = {"MANTIK_UNICORE_USERNAME": USER, "MANTIK_REAL_PASSWORD": PASSWORD}
    config = unicorex_config(unicorex, tmp_path)

    def told() -> Result | None:
        done = asked(config, variables)
        return done if "does not report its queues" not in done.stdout else None

    done = wait_for(told)  # a server that has just started tells none for a while
    assert done is not None
    assert done.exit_code == 0, done.output
    found = findings(done)
    assert "(MANTIK_UNICORE_USERNAME, MANTIK_REAL_PASSWORD)" in about("credentials", found).text
    assert about("server", found).text == "UNICORE/X 11.0.0"
    assert about("user", found).text == "jobs run as root"
    assert about("queues", found).verdict == "ok"
    assert "GiB" in about("free space", found).text
    assert float(about("free space", found).text.split()[0]) > 0
    assert {each.verdict for each in found if each.topic == "clock"} <= {"ok"}
    assert about("workspace", found).verdict == "ok"
    assert not [finding for finding in found if "connection to the system" in finding.text]
    assert "runtime up to 4 days 4 h" in about("queue", found).text


class Told:
    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    async def get(self, kind: str, path: str, _params: object = None) -> Any:
        return self.answers[path.strip("/").split("/")[-1] or kind]


async def test_what_unicore_tells_of_itself() -> None:
    """Forms of its source: `IDBContentRendering.budgetToMap`, `Storages`, `Base`."""
    budget = {"remaining": "1200", "units": "core-h", "rel": "40"}
    # Of a UNICORE/X 11.0.0 whose TSI has no script that tells budgets.
    unknown = {"rel": "-1%", "units": "core-h", "remaining": "-1"}
    budgets = {"g34": budget, "bad": 3, "__CURRENT_PROJECT__": unknown, "other": unknown}
    server = {
        "jobSubmission": {"enabled": False, "message": "maintenance"},
        "externalConnections": {"TSI 1": "FAILED: refused", "Registry": "down", "TSI 2": "OK"},
    }
    told: Any = Told(
        factories={"factories": ["https://x/rest/core/factories/one"]},
        one={"remainingComputeTime": budgets},
        base={"server": server},
        SCRATCH={"usableSpace": -1, "freeSpace": 7},
        HOME={"usableSpace": -1, "freeSpace": None},
    )
    connection: UnicoreConnection = told
    assert await read_budgets(connection) == {"g34": "1200 core-h", "other": ""}
    assert await read_condition(connection) == [
        "takes no jobs just now: maintenance",
        "has no connection to the system: TSI 1 FAILED: refused",
    ]
    assert await read_space(connection, "SCRATCH") == 7
    assert await read_space(connection, "HOME") is None


def test_what_is_known_of_firecrests_versions() -> None:
    system = FirecrestSystem("s", "slurm", "firecREST 2.x.x", ())
    assert list(list_known_defects(system)) == []
    assert list(list_known_defects(replace(system, server="firecREST 2.6.0"))) == []
    assert "before 2.6" in next(list_known_defects(replace(system, server="firecREST 2.5.6")))
    assert "streamer" in next(list_known_defects(replace(system, transfer="streamer")))
    assert list(list_known_defects(replace(system, unhealthy=("a", "b")))) == ["a", "b"]


@pytest.mark.parametrize("name", ["hpc1", "hpc2"])
def test_what_has_to_lie_at_the_site_is_looked_for(
    sandbox: Sandbox, tmp_path: Path, name: str
) -> None:
    at = place_in(sandbox, name).storage / tmp_path.name
    (at / "venv/bin").mkdir(parents=True)
    (at / "venv/bin/activate").touch()
    more = f"""
Environment: {{Python: {at}/venv}}
Environments:
  lost: {{Python: {at}/lost}}
  image: {{Apptainer: {{Path: {at}/image.sif, Type: remote}}}}
  relative: {{Python: venv}}
"""
    done = of_sandbox(sandbox, name, tmp_path, more=more)
    assert done.exit_code == 0, done.output
    found = [finding for finding in findings(done) if finding.topic == "environment"]
    assert [finding.verdict for finding in found] == ["ok", "warning", "warning", "note"]
    assert found[0].text == f"virtual environment with {at}/venv/bin/activate is there"
    assert found[1].text.startswith(f"no virtual environment with {at}/lost/bin/activate")
    assert found[2].text.startswith(f"no image {at}/image.sif")
    assert found[3].text.startswith("virtual environment with venv/bin/activate has to lie in each")

    more = f"  Workspace: {at}/own\nEnvironment: {{Python: venv}}\n"
    missing = about("environment", findings(of_sandbox(sandbox, name, tmp_path, more=more)))
    assert missing.text.startswith("no virtual environment with venv/bin/activate")
    there = Path(workspace_below(str(at / "own")), "venv/bin/activate")
    there.parent.mkdir(parents=True)
    there.touch()
    made = about("environment", findings(of_sandbox(sandbox, name, tmp_path, more=more)))
    assert made.text == "virtual environment with venv/bin/activate is there"


@pytest.mark.parametrize("site", KNOWN_SITES.values(), ids=lambda site: site.name)
def test_images_are_held_against_the_processors_of_known_sites(site: Any, tmp_path: Path) -> None:
    api: dict[str, Any] = {"UnicoreApiUrl": site.url or "https://x.org"}
    if site.machine:
        api = {"Firecrest": {"ApiUrl": f"{site.url}/", "TokenUrl": site.token_url}}
        api["Firecrest"]["Machine"] = site.machine.upper()
    config = BackendConfig.model_validate({**api, "Resources": {"Queue": "q"}})
    assert find_known_site(config) == (site if site.url else None)
    loaded: Any = type("Loaded", (), {"config": config})()
    image = {"Environment": {"Apptainer": {"Path": "i.sif"}}}
    loaded.config = BackendConfig.model_validate({**api, **image, "Resources": {"Queue": "q"}})
    for code, name in ((b"02", "amd64"), (b"04", "arm64")):
        sif(tmp_path / "i.sif", code)
        (found,) = check_site._images(loaded, tmp_path)
        fits = "ok" if name == site.architecture else "wrong"
        assert found.verdict == (fits if site.url else "note")
        assert name in found.text
    (purge,) = check_site._purge("/p/scratch/me", loaded)
    assert ("deleted" in purge.text) == bool(site.url)
