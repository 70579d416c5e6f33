"""`smk-mantik schema` against the files that `check` takes and refuses."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from snakemake_executor_plugin_mantik.cli import _app

HERE = Path(__file__).parent
GOOD = sorted((HERE / "cases").glob("*.yaml"))


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    done = CliRunner().invoke(_app(), ["schema"])
    assert done.exit_code == 0
    found: dict[str, Any] = json.loads(done.stdout)
    jsonschema.Draft202012Validator.check_schema(found)
    return found


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.stem)
def test_what_is_right_is_right_in_an_editor_too(case: Path, schema: dict[str, Any]) -> None:
    jsonschema.validate(YAML(typ="safe", pure=True).load(case.read_text()), schema)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "UnicoreApiUrl: https://x.org/rest/core",
        "{UnicoreApiUrl: https://x.org, Resources: {}}",
        "{UnicoreApiUrl: https://x.org, Resources: {Queue: q, Nodez: 1}}",
        "{UnicoreApiUrl: https://x.org, Resources: {Queue: q, Runtime: 1h30m}}",
        "{UnicoreApiUrl: https://x.org, Resources: {Queue: q, Nodes: 0}}",
        "{Resources: {Queue: q}}",
        "{UnicoreApiUrl: https://x.org, Resources: {Queue: q}, Exclude: x}",
    ],
)
def test_what_is_wrong_is_seen_while_typing(text: str, schema: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(YAML(typ="safe", pure=True).load(text), schema)
