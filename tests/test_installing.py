"""Every place says the same about how this package is installed."""

import re
import tomllib
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import PACKAGE, SOURCE, install_command

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HERE = "snakemake_executor_plugin_mantik/common/errors.py"
PLACES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "workflows/**/*.md", "snakemake_*/**/*.py")
    for path in ROOT.glob(pattern)
    if str(path.relative_to(ROOT)) != HERE
)


def commands(text: str) -> list[str]:
    """Return the commands of a text that install this package, without what else they install."""
    found = re.findall(r"pip install (?:snakemake )?('[^']*mantik[^']*'|\S*mantik\S*)", text)
    return [f"pip install {requirement}" for requirement in found]


def extras(command: str) -> list[str]:
    found = re.search(r"\[([^]]*)\]", command)
    return found[1].split(",") if found else []


def test_pages_and_messages_install_the_same() -> None:
    said = {path: commands(path.read_text()) for path in PLACES}
    pages = {path.name for path, found in said.items() if found}
    assert {"README.md", "runs.md", "sandbox.md", "schedule.md", "tracking.md"} <= pages
    for path, found in said.items():
        assert path.suffix == ".md" or not found, f"{path} repeats what {HERE} says"
        assert found == [install_command(*extras(command)) for command in found], path


def test_what_is_said_exists() -> None:
    assert PROJECT["name"] == PACKAGE
    assert f"git+{PROJECT['urls']['Repository']}" == SOURCE
    for path in PLACES:
        for command in commands(path.read_text()):
            assert set(extras(command)) <= set(PROJECT["optional-dependencies"]), command


@pytest.mark.parametrize("file", ["CITATION.cff", "CHANGELOG.md"])
def test_a_version_is_named_everywhere(file: str) -> None:
    assert re.search(rf"^(version:|##) {PROJECT['version']}\b", (ROOT / file).read_text(), re.M)
