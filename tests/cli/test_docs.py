"""The documentation that each installation brings along."""

import re
from pathlib import Path

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
        for name in re.findall(r"smk-mantik docs ([\w/-]+)", file.read_text())
    }
    assert "credentials" in named
    assert named <= set(documentation_pages())
