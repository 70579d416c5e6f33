"""docs/moving.md: its files are written and its commands typed, from top to bottom."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from snakemake_executor_plugin_mantik.cli import _app
from tests.support.workflows import UNTRACKED, WAIT_S, Project, tells

PAGE = (Path(__file__).parents[2] / "docs/moving.md").read_text()
REAL = {"url": "https://unicore.fz-juelich.de/JUWELS/rest/core", "queue": "booster"}

MLPROJECT = """
    entry_points:
      main:
        parameters: {epochs: int}
        command: "echo {epochs} > epochs.txt"
"""


def blocks() -> Iterator[tuple[str, str]]:
    """Yield the page's files by name, and its commands without one, in their order."""
    found = re.finditer(r"^```\w+\n# (\S+)\n(.*?)^```$|((?:^    [^\n]*\n)+)", PAGE, re.M | re.S)
    for match in found:
        yield (match[1], match[2]) if match[1] else ("", match[3])


@pytest.mark.nightly
def test_all_of_the_page_works(project: Project) -> None:
    directory, place = project.directory, project.place
    url = re.search(r"UnicoreApiUrl: (\S+)", place.config)
    assert url is not None
    known = {name.replace("HPC1", "JUWELS"): value for name, value in place.environment.items()}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**project.environment, **known, **UNTRACKED, "PATH": path}
    project.write("churn/MLproject", MLPROJECT)
    said = []
    for name, text in blocks():
        at_sandbox = text.replace(REAL["queue"], "batch")
        if name:
            project.write(name, at_sandbox)
            continue
        done = subprocess.run(
            ["bash", "-e"], input=at_sandbox, cwd=directory, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=WAIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\n{done.stdout}"
        said.append(done.stdout)
        if len(said) == 1:
            config = project.directory / "juwels.yaml"
            written = config.read_text()
            assert REAL["url"] in written
            config.write_text(written.replace(REAL["url"], url[1]))

    _, mantik, _, slurm, call = said
    tells(mantik, "run_main: done at juwels")
    (result,) = (directory / "mlproject-runs").rglob("epochs.txt")
    assert result.read_text() == "3\n"
    tells(slurm, "juwels: 3 jobs, at most 6.0 core hours", "4 of 4 steps")
    assert json.loads(project.read("scores/0.2.json"))["score"] == 0.8
    tells(call, '{"rate": 0.1, "score": 0.9, "layers": [32, 32]}')
    assert call.count("succeeded") == 5
    assert len(project.attempts) == 5


def test_commands_in_the_tables_exist() -> None:
    app = typer.main.get_command(_app())
    commands = dict(app.commands)  # type: ignore[attr-defined]
    named = re.findall(r"`smk-mantik (\w+)(?: (\w+))?([^`]*)`", PAGE)
    assert len(named) > 10
    for name, inner, rest in named:
        assert name in commands, name
        command = commands[name]
        if hasattr(command, "commands") and inner:
            assert inner in command.commands, f"{name} {inner}"
            command = command.commands[inner]
        own = rest.partition(" -- ")[0]
        options = {text for each in command.params for text in each.opts}
        assert set(re.findall(r"--?[a-z][\w-]*", own)) <= options, f"{name} {rest}"


@pytest.mark.parametrize("kind", ["Resources", "Environment", "Site"])
def test_keys_in_the_tables_exist(kind: str) -> None:
    reference = (Path(__file__).parents[2] / "docs/config-keys.md").read_text()
    keys = re.findall(rf"`{kind}:` ((?:`\w+[^`]*`(?:, | and )?)+)|`{kind}: (\w+)", PAGE)
    names = {name for listed, one in keys for name in [*re.findall(r"`(\w+)", listed), one] if name}
    assert names
    assert {name for name in names if f"`{name}" not in reference} == set()
