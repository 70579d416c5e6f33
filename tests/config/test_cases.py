"""Every file in `cases/` says in its first lines (`#! …`) what its reader has to find.

Either `valid` and then facts, or one line `KEY: part of the message` per mistake: no more, no less.
"""

from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import ConfigError
from snakemake_executor_plugin_mantik.config.environment import job_environment
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.config.reading import read_backend_config

CASES = sorted((Path(__file__).parent / "cases").glob("*.yaml"))


def told(case: Path) -> list[str]:
    lines = case.read_text().splitlines()
    return [line.removeprefix("#! ") for line in lines if line.startswith("#! ")]


VALID = [case for case in CASES if told(case)[0] == "valid"]
WRONG = [case for case in CASES if told(case)[0] != "valid"]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.stem)
def test_each_mistake_is_told_once(case: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_backend_config(case, tmp_path, shown=case.name)
    mistakes = sorted(caught.value.mistakes, key=str)
    wanted = sorted(line.split(": ", 1) if ": " in line else ["", line] for line in told(case))
    assert sorted(mistake.key for mistake in mistakes) == [key.rstrip(":") for key, _ in wanted]
    for key, part in wanted:
        messages = [mistake.message for mistake in mistakes if mistake.key == key.rstrip(":")]
        assert any(part in message for message in messages), (key, part, messages)
    assert {mistake.file for mistake in mistakes} == {case.name}
    assert "\n" not in "".join(mistake.message for mistake in mistakes)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("case", VALID, ids=lambda case: case.stem)
def test_values_are_what_the_file_says(case: Path, tmp_path: Path) -> None:
    config, warnings = read_backend_config(case, tmp_path)
    expected = [line.partition(" ")[2] for line in told(case) if line.startswith("warning ")]
    assert len(warnings) == len(expected)
    assert all(f"{case}: {key}: " in text for key, text in zip(expected, warnings, strict=True))
    for line in told(case)[1:]:
        if not line.startswith("warning "):
            holds(config, line)


def holds(config: BackendConfig, fact: str) -> None:
    kind, _, rest = fact.partition(" ")
    if kind == "variables":
        name, _, value = rest.partition("=")
        assert job_environment(config, Path("/project")).variables[name] == value
    elif kind == "options":
        assert config.environment.apptainer is not None
        assert list(config.environment.apptainer.options) == rest.split("|")
    else:
        found: object = config
        for field in kind.split("."):
            found = getattr(found, field)
        assert str(found) == rest.removeprefix("= ")
