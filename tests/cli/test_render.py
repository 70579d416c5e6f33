"""`smk-mantik render`: each file of `cases/` says in its first lines (`#! …`) what it becomes."""

import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from snakemake_executor_plugin_mantik.cli import _app
from snakemake_executor_plugin_mantik.common.errors import UserError
from tests.support.trial import NASTY

CASES = sorted((Path(__file__).parent / "cases").glob("*.yaml"))
COMMAND = "python main.py 1"
GOOD = "UnicoreApiUrl: https://hpc.example.org/rest/core\nResources: {Queue: q, CPUsPerNode: 2}\n"
KEYS = {
    "job", "site", "api", "resources", "environment", "image_type", "variables", "submission",
    "script", "uploads", "warnings",
}  # fmt: skip


def run(*words: str, account: str = "") -> Result:
    environment = {"MANTIK_COMPUTE_BUDGET_ACCOUNT": account}
    return CliRunner().invoke(_app(), ["render", *words], env=environment)


def render(config: Path, project: Path, *words: str, account: str = "") -> dict[str, Any]:
    done = run(
        str(config), "--project", str(project), "--command", COMMAND, "--json", *words,
        account=account,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_tasks_that_a_variable_sets_are_requested(tmp_path: Path) -> None:
    """Else Slurm tells `srun` that there is one, whatever `SLURM_NTASKS_PER_NODE` says."""
    config = tmp_path / "hpc.yaml"
    config.write_text(
        f"{GOOD.replace('2}', '6, Nodes: 2}')}Environment:\n"
        '  Variables: {SLURM_NTASKS_PER_NODE: "3"}\n'
    )
    found = render(config, tmp_path)
    sent = str(found["submission"])
    for option in ("--ntasks=6", "--ntasks-per-node=3", "--cpus-per-task=2"):
        assert option in sent
    assert found["variables"]["SRUN_CPUS_PER_TASK"] == "2"
    assert found["resources"]["cpus_per_node"] == 6


def told(case: Path) -> list[tuple[str, str]]:
    lines = [line for line in case.read_text().splitlines() if line.startswith("#! ")]
    return [(verb, rest) for _, verb, rest in (line.split(" ", 2) for line in lines)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_what_is_sent_is_what_the_file_says(case: Path, tmp_path: Path) -> None:
    project = tmp_path / "around" / "project"
    project.mkdir(parents=True)
    for name in ["main.py", *(rest for verb, rest in told(case) if verb == "file")]:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(name)
    found = render(case, project)
    assert set(found) == KEYS
    assert found["site"] == case.stem
    for verb, rest in told(case):
        assert holds(found, verb, rest), (verb, rest, found)
    if not any(verb == "warns" for verb, _ in told(case)):
        assert found["warnings"] == []


def holds(found: dict[str, Any], verb: str, rest: str) -> bool:  # noqa: PLR0911, PLR0912 - a table
    code = [line for line in found["script"].splitlines() if not line.strip().startswith("# ")]
    script = "\n".join(code)
    name, _, value = rest.rpartition(" ")
    match verb:
        case "file":
            return True
        case "api" | "environment":
            return bool(found[verb] == rest)
        case "image":
            return bool(found["image_type"] == rest)
        case "resource":
            return str(found["resources"][name]) == value
        case "unicore":
            return bool(found["submission"]["Resources"][name] == value)
        case "job":
            return any(rest == f"{key} {value}" for key, value in found["submission"].items())
        case "hook":
            return any(rest in each["Data"] for each in found["submission"]["Imports"])
        case "variable":
            variable, _, text = rest.partition("=")
            return bool(found["variables"][variable] == text)
        case "script":
            return rest in script
        case "never":
            return rest not in script
        case "order":
            places = [script.index(text) for text in rest.split(" | ")]
            return places == sorted(places)
        case "uploads" | "keeps":
            return (rest in found["uploads"]) == (verb == "uploads")
        case "uploads-like":
            return any(fnmatchcase(path, rest) for path in found["uploads"])
        case "warns":
            return any(rest in warning for warning in found["warnings"])
    raise AssertionError(verb)


def test_what_is_submitted_is_what_is_shown(tmp_path: Path) -> None:
    """The batch file of a RAW job writes the script, the request of firecREST has all in one."""
    cases = Path(__file__).parent / "cases"
    found = render(cases / "queue-only.yaml", tmp_path)
    (batch,) = (each["Data"] for each in found["submission"]["Imports"])
    head, _, script = found["script"].partition("# Job: ")
    assert batch.startswith(head)
    assert f"\n#!/bin/bash\n# Job: {script}" in batch
    found = render(cases / "firecrest-everything.yaml", tmp_path, account="me-2026")
    assert found["submission"] == {
        "job": {"working_directory": "/WORKSPACE", "script": found["script"]}
    }
    assert "#SBATCH --account=me-2026\n" in found["script"]
    subprocess.run(["bash", "-n"], input=found["script"], text=True, check=True)


def test_people_see_facts_and_the_script(tmp_path: Path) -> None:
    config = tmp_path / f"{NASTY}.yaml"
    config.write_text(GOOD)
    (tmp_path / "new\nline").write_text("")
    done = run(f"big={config}", "--project", str(tmp_path), "--command", COMMAND, account="acc")
    assert done.exit_code == 0, done.output
    for text in (
        "big (UNICORE)", "queue q, cpus_per_node 2", "SRUN_CPUS_PER_TASK=2", "'new\\nline'",
        '"Project": "acc"', "#SBATCH --account=acc", "_m_commands=('python main.py 1')",
    ):  # fmt: skip
        assert text in done.stdout
    assert done.stdout.count("_m_commands=('python main.py 1')") == 1


@pytest.mark.parametrize(
    ("text", "words", "what"),
    [
        (GOOD, ("--project", "/no/such/folder"), "no such folder"),
        (GOOD, ("--unicore-version", "newest"), "'newest' is not a version"),
        (
            f"{GOOD}Site: {{Scheduler: none}}\n".replace("q,", "q, GPUsPerNode: 1,"),
            ("--unicore-version", "3.0.0"),
            "loses GPUsPerNode",
        ),
        (
            (Path(__file__).parent / "cases" / "firecrest-pbs.yaml").read_text(),
            ("--unicore-version", "3.0.0"),
            "does not apply",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused(
    tmp_path: Path, text: str, words: tuple[str, ...], what: str
) -> None:
    (tmp_path / "a.yaml").write_text(text)
    folder = () if "--project" in words else ("--project", str(tmp_path))
    done = run(str(tmp_path / "a.yaml"), "--command", COMMAND, *folder, *words)
    assert isinstance(done.exception, UserError)
    assert what in str(done.exception)


def test_what_is_too_large_is_said(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text(f"{GOOD}Site: {{ProjectFilesLimit: 100}}\n")
    (tmp_path / "large").write_bytes(b"x" * ((1 << 20) + 1))
    for name in "bcd":
        (tmp_path / name).write_bytes(b"x" * 60)
    found = render(config, tmp_path)
    assert found["uploads"] == ["a.yaml", "b", "c", "d"]
    assert "1.0 MiB" in found["warnings"][0]
    assert "large" in found["warnings"][0]
    assert "ProjectFilesLimit" in found["warnings"][1]


def test_the_command_itself_says_it_on_its_streams(tmp_path: Path) -> None:
    """Also names that are no text, on a terminal that knows ASCII only."""
    name = os.fsdecode(b"\xff.yaml")
    (tmp_path / name).write_text(GOOD)
    (tmp_path / os.fsdecode(b"\xfe")).write_text("")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for words in (["render", name, "--command", "echo ü"], ["check", name, "no-such.yaml"]):
        done = subprocess.run(
            [sys.executable, "-m", "snakemake_executor_plugin_mantik", *words],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == (0 if words[0] == "render" else 2)
        assert "Traceback" not in done.stderr
        assert "yaml" in done.stdout + done.stderr
