"""docs/backend-config.md names every key, and every default of `Site` as it is."""

import re
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.config.environment_keys import (
    ApptainerConfig,
    ContainerEngineConfig,
    EnvironmentConfig,
    PythonConfig,
    PyxisConfig,
    UenvConfig,
)
from snakemake_executor_plugin_mantik.config.model import (
    BackendConfig,
    FirecrestConfig,
    ResourcesConfig,
)
from snakemake_executor_plugin_mantik.config.reading import parse_backend_config
from snakemake_executor_plugin_mantik.config.section import ConfigSection
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.config.units import parse_duration, parse_size

DOCS = (Path(__file__).parents[2] / "docs" / "backend-config.md").read_text()


@pytest.mark.parametrize(
    "part",
    [
        BackendConfig,
        FirecrestConfig,
        ResourcesConfig,
        EnvironmentConfig,
        ApptainerConfig,
        ContainerEngineConfig,
        PythonConfig,
        PyxisConfig,
        UenvConfig,
        SiteSettings,
    ],
)
def test_every_key_is_described(part: type[ConfigSection]) -> None:
    for key in part.key_names():
        assert re.search(
            rf"`(?:Apptainer\.|ContainerEngine\.|Pyxis\.|Python\.|Uenv\.)?{key}`|^###? {key}$",
            DOCS,
            re.M,
        ), key


def test_the_defaults_of_site_are_the_real_ones() -> None:
    rows = dict(
        re.findall(
            r"^\| `(\w+)` \| (.*?) \| .* \|$",
            DOCS.partition("## Site\n")[2].partition("\n## ")[0],
            re.M,
        )
    )
    assert list(rows) == SiteSettings.key_names()
    settings = SiteSettings.model_validate({})
    for name, field in SiteSettings.model_fields.items():
        value, told = getattr(settings, name), rows[str(field.alias)].strip("`")
        if name.endswith("_s"):
            assert parse_duration(told) == value
        elif name.endswith("_bytes"):
            assert parse_size(told) == value
        elif value:
            assert told in (str(value), f"{value:g}" if isinstance(value, float) else "")


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
    assert site["Timeout"]["default"] == "120s"
    assert site["InlineLimit"]["default"] == "256K"
