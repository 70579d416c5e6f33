"""Backend configs as runs are given them, and where runs lie."""

import json
import stat
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import MantikError, UserError
from snakemake_executor_plugin_mantik.runs import local_runs
from snakemake_executor_plugin_mantik.runs.directories import (
    config_of_file,
    config_of_values,
    make_runs_home,
    runs_home,
)

KEYS = {"UnicoreApiUrl": "https://x.org/rest/core", "Resources": {"Queue": "q"}}
MLFLOW: dict[str, object] = {
    "ENV_MANAGER": None, "SYNCHRONOUS": False, "DOCKER_ARGS": {}, "STORAGE_DIR": None,
    "build_image": False, "docker_auth": None,
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "alps.json"
    made.write_text(json.dumps(KEYS))
    return made


def test_what_mlflow_hands_over(file: Path) -> None:
    named = config_of_values({"config": str(file), "account": "a1", "wait": True, **MLFLOW}, {})
    assert (named.site, named.source, named.account, named.wait) == ("alps", str(file), "a1", True)
    assert named.content == file.read_bytes()
    assert config_of_values({"config": str(file), "site": "other"}, {}).site == "other"
    itself = config_of_values({**KEYS, **MLFLOW, "extra": {"n": 3}}, {})
    assert (itself.site, itself.source, itself.extra) == ("site", "", {"n": "3"})
    assert json.loads(itself.content) == KEYS
    assert config_of_values({**KEYS, "site": "alps"}, {}).site == "alps"
    environ = {"SNAKEMAKE_MANTIK_BACKEND_CONFIG": f"daint={file}"}
    assert config_of_values(MLFLOW, environ).site == "daint"
    assert config_of_file(f"todi={file}", environ).site == "todi"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "a run needs one backend config, found none"),
        ({"config": "gone.yaml"}, "gone.yaml: there is no such file"),
        ({"config": 3}, "config: has to be a text, found 3"),
        (
            {"config": "{file}", **KEYS},
            "keys of a config are given as well: UnicoreApiUrl, Resources",
        ),
        ({**KEYS, "site": "1x"}, "'1x' cannot be the name of a site"),
        ({**KEYS, "wait": "yes"}, "wait: has to be true or false"),
        ({**KEYS, "extra": [1]}, "extra: has to be a mapping"),
        ({"UnicoreApiUrl": "https://x.org/rest/core"}, "Resources"),
        ({**KEYS, "Enviroment": {}}, "Enviroment"),
    ],
)
def test_mistakes(given: dict[str, object], told: str) -> None:
    with pytest.raises(UserError) as caught:
        config_of_values(given, {})
    assert told in str(caught.value)


def test_several_in_the_environment(file: Path) -> None:
    with pytest.raises(UserError, match="found 2 in SNAKEMAKE_MANTIK_BACKEND_CONFIG"):
        config_of_file("", {"SNAKEMAKE_MANTIK_BACKEND_CONFIG": f"{file} b={file}"})


def test_where_runs_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_home({"MANTIK_RUNS": str(tmp_path)}) == tmp_path
    assert runs_home({"XDG_DATA_HOME": "/data"}) == Path("/data/mantik/runs")
    assert runs_home({"XDG_DATA_HOME": "relative"}) == Path.home() / ".local/share/mantik/runs"
    made = make_runs_home({"MANTIK_RUNS": str(tmp_path / "a" / "b")})
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="MANTIK_RUNS"):
        make_runs_home({"MANTIK_RUNS": str(tmp_path / "file" / "b")})
    monkeypatch.setenv("MANTIK_RUNS", str(made))
    (made / "broken").mkdir()
    (made / "broken" / "request.json").write_text("{")
    assert local_runs.list_local_runs() == []
    with pytest.raises(MantikError, match="cannot be read"):
        local_runs.find_local_run("broken")
