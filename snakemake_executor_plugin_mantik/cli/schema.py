"""`smk-mantik schema`: the JSON Schema of backend configs, for editors."""

import json

import typer

from snakemake_executor_plugin_mantik.config.model import BackendConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""What pydantic writes its schemas in."""


def schema() -> None:
    """Print the JSON Schema of the Compute Backend Config, for editors that check while typing."""
    described = {"$schema": DIALECT, **BackendConfig.model_json_schema()}
    described["title"] = "Compute Backend Config"
    asked = described["$defs"]["Resources"]["properties"]
    asked["Memory"] = {**asked["MemoryPerNode"], "title": "Memory", "deprecated": True}
    # What stands between keys pydantic cannot tell.
    described["oneOf"] = [{"required": ["UnicoreApiUrl"]}, {"required": ["Firecrest"]}]
    typer.echo(json.dumps(described, indent=2, ensure_ascii=False))
