"""`smk-mantik schema`: print the JSON Schema of backend configs, for editors."""

import json
from itertools import combinations
from typing import Any

import typer

from snakemake_executor_plugin_mantik.config.environment_keys import IMAGE_KEYS, LOGIN_HOOKS
from snakemake_executor_plugin_mantik.config.model import BackendConfig

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""The dialect of pydantic's schemas."""


def schema() -> None:
    """Print the JSON Schema of the Compute Backend Config, for editors that check while typing."""
    described = {"$schema": _DIALECT, **BackendConfig.model_json_schema()}
    described["title"] = "Compute Backend Config"
    keys = described["$defs"]["ResourcesConfig"]["properties"]
    keys["Memory"] = {**keys["MemoryPerNode"], "title": "Memory", "deprecated": True}
    # pydantic's schema lacks the rules between keys.
    excluded = [*combinations(IMAGE_KEYS, 2), ("Apptainer", "Python")]
    described["$defs"]["EnvironmentConfig"]["not"] = {
        "anyOf": [{"required": list(pair)} for pair in excluded]
    }
    named = described["properties"]["Environments"]
    named["additionalProperties"] = {"$ref": "#/$defs/EnvironmentConfig"}
    described["$defs"]["ContainerEngineConfig"]["oneOf"] = [
        {"required": ["File"]},
        {"required": ["Name"]},
    ]
    described["$defs"]["ResourcesConfig"]["not"] = {"required": ["Memory", "MemoryPerNode"]}
    on_login = {"anyOf": [{"required": [hook]} for hook in LOGIN_HOOKS]}
    described["if"] = {"required": ["Firecrest"]}
    described["then"] = {
        "properties": {
            "Environment": {"not": on_login},
            "Environments": {"additionalProperties": {"not": on_login}},
        }
    }
    described["oneOf"] = [{"required": ["UnicoreApiUrl"]}, {"required": ["Firecrest"]}]
    typer.echo(json.dumps(_without_null(described), indent=2, ensure_ascii=False))


def _without_null(value: Any) -> Any:
    """Remove null from a schema, also in defaults, because a key without a value is a mistake."""
    if isinstance(value, list):
        return [_without_null(item) for item in value if item != {"type": "null"}]
    if not isinstance(value, dict):
        return value
    kept = {
        key: _without_null(item)
        for key, item in value.items()
        if not (key == "default" and (item is None or isinstance(item, dict)))
    }
    return {**kept.pop("anyOf")[0], **kept} if len(kept.get("anyOf", ())) == 1 else kept
