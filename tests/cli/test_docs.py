"""The documentation that each installation brings along."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from ruamel.yaml import YAML
from typer.core import TyperGroup
from typer.testing import CliRunner

from snakemake_executor_plugin_mantik.cli import _app
from snakemake_executor_plugin_mantik.cli.docs import documentation_pages
from snakemake_executor_plugin_mantik.common.errors import ConfigError
from snakemake_executor_plugin_mantik.config.reading import (
    DocumentError,
    parse_backend_config,
    read_document,
)
from tests.support.corners import RIGHT, WRONG

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


# `smk-mantik docs --schema` against the files that `check` takes and refuses.


HERE = Path(__file__).parent
GOOD = sorted((HERE / "cases").glob("*.yaml"))


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    done = CliRunner().invoke(_app(), ["docs", "--schema"])
    assert done.exit_code == 0
    found: dict[str, Any] = json.loads(done.stdout)
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.stem)
def test_what_is_right_is_right_in_an_editor_too(
    case: Path, schema: jsonschema.Draft202012Validator
) -> None:
    schema.validate(YAML(typ="safe", pure=True).load(case.read_text()))


@pytest.mark.parametrize(("text", "values"), RIGHT)
def test_corners_that_are_right(
    text: str, values: dict[str, Any], schema: jsonschema.Draft202012Validator
) -> None:
    assert values
    schema.validate(plain(read_document(text.encode(), "yaml", [])))


# What a schema cannot know, or tells only of the whole document.
BEYOND = re.compile(
    r"duplicate|was not found|cannot be divided|not a multiple|unquoted|backslash"
    r"|not closed|NUL|credentials in it|nothing clear|comment|has \. as a part|leaves the"
    r"|is absolute|control characters|may hold no|PBS|is longer"
    r"|URL that begins|is empty; it has|a path at the site|cannot be none|longer than zero"
    r"|more than zero|found the number (3\.0|1e3)|not expanded|must be absolute"
    r"|is no file on|set by bash|of type str or list"
)


@pytest.mark.parametrize(("text", "told"), WRONG)
def test_corners_that_are_wrong(
    text: str | bytes, told: dict[str, str], schema: jsonschema.Draft202012Validator
) -> None:
    content = text if isinstance(text, bytes) else text.encode()
    odd: list[str] = []
    try:
        document = read_document(content, "yaml", odd)
    except DocumentError:
        return
    with pytest.raises(ConfigError) as caught:
        parse_backend_config(content, "yaml", Path("/no/such"), shown="c")
    if odd or all(BEYOND.search(mistake.message) for mistake in caught.value.mistakes):
        return
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(plain(document))


def plain(value: Any) -> Any:
    """The document as an editor has it: numbers are plain numbers."""
    return json.loads(json.dumps(value))


U = "UnicoreApiUrl: https://x.org/rest/core"
Q = "Resources: {Queue: q}"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        *((f"{{UnicoreApiUrl: {value}, {Q}}}", True)
          for value in ("HTTPS://x.org/rest/core", "'  https://x.org/rest/core '",
                        "Https://x.org", "http://LOCALHOST/rest/core", "'http://127.0.0.1:80/a'", "'http://[::1]/a'",
                        "'HTTP://localhost '")),
        *((f"{{UnicoreApiUrl: {value}, {Q}}}", False)
          for value in ("http://localhost.example.org/", "http://x.org", "https://", "ftp://x.org",
                        "http://127.evil.org")),
        *((f"{{{U}, {Q}, Site: {{Scheduler: '{value}'}}}}", True)
          for value in ("slurm", " Slurm ", "PBS", "none\t")),
        (f"{{{U}, {Q}, Site: {{Scheduler: 's lurm'}}}}", False),
        (f"{{{U}, {Q}, Site: {{Proxy: ' HTTP://p.org:80'}}}}", True),
        (f"{{{U}, {Q}, Environment: {{Apptainer: {{Path: /i, Type: ' Remote '}}}}}}", True),
        (f"{{{U}, {Q}, Environment: {{Apptainer: {{Path: /i, Type: remotes}}}}}}", False),
    ],
)  # fmt: skip
def test_an_editor_says_what_check_says(
    text: str, right: bool, schema: jsonschema.Draft202012Validator
) -> None:
    try:
        parse_backend_config(text.encode(), "yaml", shown="c")
        taken = True
    except ConfigError:
        taken = False
    document = plain(read_document(text.encode(), "yaml", []))
    assert (taken, schema.is_valid(document)) == (right, right)
