"""The documentation that each installation brings along."""

import re
from pathlib import Path

import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from snakemake_executor_plugin_mantik.cli import _app
from snakemake_executor_plugin_mantik.cli.docs import documentation_pages

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "snakemake_executor_plugin_mantik"


def test_pages_are_listed_and_shown() -> None:
    listed = CliRunner().invoke(_app(), ["docs"]).output
    assert re.search(r"^credentials +Credentials", listed, re.MULTILINE)
    assert re.search(r"^further +User guide", listed, re.MULTILINE)
    for name in ("credentials", "docs/credentials.md"):
        shown = CliRunner().invoke(_app(), ["docs", name]).output
        assert shown.rstrip("\n") == (ROOT / "docs/credentials.md").read_text().rstrip("\n")
    wrong = CliRunner().invoke(_app(), ["docs", "credential"])
    assert "Did you mean credentials" in str(wrong.exception)


def test_messages_name_pages_that_exist() -> None:
    named = {
        name
        for file in PACKAGE.rglob("*.py")
        for name in re.findall(r"smk-mantik docs (\w[\w/-]*)", file.read_text())
    }
    assert "credentials" in named
    assert named <= set(documentation_pages())


def test_pages_name_commands_that_exist() -> None:
    app = typer.main.get_command(_app())
    assert isinstance(app, TyperGroup)
    groups = {
        name: command for name, command in app.commands.items() if hasattr(command, "commands")
    }
    named = {
        words
        for page in documentation_pages().values()
        for words in re.findall(
            r"(?:`|^    |^\$ )smk-mantik ([a-z]+)(?: ([a-z]+))?", page.read_text(), re.MULTILINE
        )
    }
    assert len(named) > 30
    assert {name for name, _ in named} <= set(app.commands)
    for name, inner in named:
        assert name not in groups or not inner or inner in groups[name].commands, f"{name} {inner}"
