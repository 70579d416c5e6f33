"""Every corner case: each mistake told once, with its key; each value as it is meant."""

from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.common.errors import ConfigError
from snakemake_executor_plugin_mantik.config.reading import parse_backend_config
from tests.support.corners import FILES, RIGHT, WRONG


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def as_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


@pytest.mark.parametrize(("text", "told"), WRONG)
def test_each_mistake_is_told_once(text: str | bytes, told: dict[str, str], project: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_backend_config(as_bytes(text), "yaml", project, shown="c.yaml")
    found = {mistake.key: mistake.message for mistake in caught.value.mistakes}
    assert len(found) == len(caught.value.mistakes)
    assert set(found) == set(told), found
    for key, part in told.items():
        assert part in found[key]
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("text", "values"), RIGHT)
def test_values_are_what_is_written(text: str, values: dict[str, Any], project: Path) -> None:
    config, warnings = parse_backend_config(text.encode(), "yaml", project, shown="c.yaml")
    assert warnings == []
    for path, wanted in values.items():
        found: Any = config
        for name in path.split("."):
            found = getattr(found, name)
        assert found == wanted, path
