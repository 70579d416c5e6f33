"""`smk-mantik sandbox`, as a process of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpc_sandbox import processes
from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SandboxError
from snakemake_executor_plugin_mantik.cli import sandbox as command
from snakemake_executor_plugin_mantik.common.errors import UserError
from tests.support.sandbox import wait_for

PROGRAM = "from snakemake_executor_plugin_mantik.cli import main; main()"
CLIENT = """
import os, sys, time, httpx
url = next(line.split()[1] for line in open(os.environ["MANTIK_SANDBOX_DIR"] + "/hpc1.yaml")
           if line.startswith("UnicoreApiUrl"))
auth = os.environ["MANTIK_HPC1_USERNAME"], os.environ["MANTIK_HPC1_PASSWORD"]
http = httpx.Client(auth=auth, headers={"Accept": "application/json"})
def submit(script):
    return http.post(url + "/jobs", json={"Executable": "bash", "Arguments": ["job.sh"],
        "Imports": [{"From": "inline://x", "To": "job.sh", "Data": script}]}).headers["Location"]
"""


def start(*arguments: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "sandbox", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def alive(pid: int) -> bool:
    return any(process.pid == pid for process in processes.processes())


def test_run_returns_the_commands_exit_code_and_leaves_nothing(tmp_path: Path) -> None:
    body = (
        CLIENT
        + """
job = submit("env > env; echo $$ > pid; sleep 300 & wait")
storage = http.get(job).json()["_links"]["workingDirectory"]["href"]
while True:
    answer = http.get(storage + "/files/pid", headers={"Accept": "application/octet-stream"})
    if answer.text.strip().isdigit():
        break
    time.sleep(0.05)
env = http.get(storage + "/files/env", headers={"Accept": "application/octet-stream"}).text
print(answer.text.strip(), "MANTIK_HPC1" in env, os.environ["MANTIK_COMPUTE_BUDGET_ACCOUNT"])
sys.exit(23)
"""
    )
    variables = {"MANTIK_SANDBOX_DIR": str(tmp_path / "box"), "MANTIK_HPC1_SECRET": "x"}
    process = start("run", "--", sys.executable, "-c", body, environment=variables)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 23, errors
    pid, leaked, account = output.split()
    assert (leaked, account) == ("False", "sandbox")
    assert f"hpc1 (unicore) until the command ends. Backend configs: {tmp_path}/box/hpc1" in errors
    assert not alive(int(pid))
    assert (tmp_path / "box" / "hpc1" / "home").is_dir()
    assert not (tmp_path / "box" / "hpc1" / "spool").exists()


def test_two_apis_for_one_command(tmp_path: Path) -> None:
    body = """
import os, re, httpx
directory, values = os.environ["MANTIK_SANDBOX_DIR"], os.environ
config = dict(re.findall(r"(\\w+): (http.*|hpc2)", open(f"{directory}/hpc2.yaml").read()))
token = httpx.post(config["TokenUrl"], data={
    "grant_type": "client_credentials", "client_id": values["MANTIK_HPC2_CLIENT_ID"],
    "client_secret": values["MANTIK_HPC2_CLIENT_SECRET"]}).json()
headers = {"Authorization": "Bearer " + token["access_token"]}
system = httpx.get(config["ApiUrl"] + "/status/systems", headers=headers).json()["systems"][0]
print(system["name"], config["Machine"], token["expires_in"])
assert os.path.exists(f"{directory}/hpc1.yaml")
"""
    arguments = ("run", "--site", "hpc1=unicore", "--site", "hpc2=firecrest", "--token-lifetime=60")
    variables = {"MANTIK_SANDBOX_DIR": str(tmp_path / "box")}
    process = start(*arguments, "--", sys.executable, "-c", body, environment=variables)
    output, errors = process.communicate(timeout=600)
    assert output.split() == ["hpc2", "hpc2", "60"], errors
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_command(tmp_path: Path, number: signal.Signals) -> None:
    body = f"echo $MANTIK_SANDBOX_DIR; trap 'exit 9' {number.name[3:]}; touch {tmp_path}/on; " + (
        "while :; do sleep 0.05; done"
    )
    process = start("run", "--", "bash", "-c", body, environment={"MANTIK_SANDBOX_DIR": ""})
    wait_for((tmp_path / "on").exists)
    process.send_signal(number)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 9
    # A directory of the sandbox's own goes with it.
    assert not Path(output.strip()).exists()


def test_a_command_that_a_signal_ended(tmp_path: Path) -> None:
    variables = {"MANTIK_SANDBOX_DIR": str(tmp_path)}
    process = start("run", "--", "bash", "-c", "kill -9 $$", environment=variables)
    process.communicate(timeout=600)
    assert process.returncode == 137


def test_without_a_command_it_prints_what_another_terminal_needs(tmp_path: Path) -> None:
    variables = {"MANTIK_SANDBOX_DIR": str(tmp_path)}
    sites = ("hpc1", "other-site=unicore", "hpc2=firecrest")
    arguments = ("run", *(word for site in sites for word in ("--site", site)))
    process = start(*arguments, environment=variables)
    assert process.stdout
    lines: list[str] = []
    while not lines or not lines[-1].startswith("#"):
        lines.append(process.stdout.readline())
    text = "".join(lines)
    for name in (
        "MANTIK_SANDBOX_DIR",
        "MANTIK_HPC1_PASSWORD",
        "MANTIK_OTHER_SITE_USERNAME",
        "MANTIK_HPC2_CLIENT_ID",
        "MANTIK_HPC2_CLIENT_SECRET",
    ):
        assert f"export {name}=" in text
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("text", "words"), [("x=ssh", "no API 'ssh'"), ("=unicore", "name"), ("=", "name")]
)
def test_sites_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        command._site_option(text)


def test_schedulers_that_cannot_be(tmp_path: Path) -> None:
    box = start("run", "--scheduler", "pbs", "--", "true", environment={})
    assert "there is no scheduler 'pbs'" in box.communicate(timeout=600)[1]

    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "true").symlink_to("/bin/true")
    box = start("run", "--scheduler", "slurm", "--", "true", environment={"PATH": str(programs)})
    assert "this machine has no sbatch" in box.communicate(timeout=600)[1]


def test_one_directory_serves_one_sandbox(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="another sandbox runs"), Sandbox(sandbox.directory):
        pass


def test_the_extra_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hpc_sandbox.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UserError, match=r"\[sandbox\]") as caught:
        command._sandbox_class()
    assert caught.value.do.startswith("Install it with: pip install")
