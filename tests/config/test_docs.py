"""The example in docs/backend-config.md, and the schema for editors."""

from pathlib import Path

from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.config.reading import parse_backend_config

DOCS = (Path(__file__).parents[2] / "docs" / "backend-config.md").read_text()


def test_the_example_is_read() -> None:
    example = DOCS.partition("```yaml\n")[2].partition("```")[0]
    config, warnings = parse_backend_config(example.encode(), "yaml", shown="docs")
    assert warnings == []
    assert config.resources.memory_mib_per_node == 65536


def test_editors_get_a_schema() -> None:
    schema = BackendConfig.model_json_schema()
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["Resources"]
    assert set(schema["properties"]) == set(BackendConfig.key_names())
    site = schema["$defs"]["SiteSettings"]["properties"]
    assert site["Poll"]["default"] == "15s"
    assert site["SourcesLimit"]["default"] == "32M"
    assert "timing" not in site
