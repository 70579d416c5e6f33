from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import ConfigError
from snakemake_executor_plugin_mantik.config.reading import (
    parse_backend_config,
    read_backend_config,
    read_configs,
)

GOOD = "UnicoreApiUrl: https://hpc.example.org/rest/core\nResources: {Queue: q}\n"
IMAGE = f"{GOOD}Environment: {{Apptainer: {{Path: ../img.sif}}}}\n"


def messages(error: ConfigError) -> list[tuple[str, str, str]]:
    return [(each.file, each.key, each.message) for each in error.mistakes]


def test_names_are_given_or_the_file_s_own(tmp_path: Path) -> None:
    (tmp_path / "juwels.yaml").write_text(GOOD)
    (tmp_path / "a=b.json").write_text(
        '{"UnicoreApiUrl": "https://x.org/rest/core", "Resources": {"Queue": "j"}}'
    )
    loaded = read_configs(["juwels.yaml", "big=juwels.yaml", "alps-2=./a=b.json"], tmp_path)
    assert list(loaded) == ["juwels", "big", "alps-2"]
    assert loaded["alps-2"].config.resources.queue == "j"
    assert loaded["big"].path == tmp_path / "juwels.yaml"
    assert loaded["big"].name == "big"
    assert loaded["big"].config == loaded["juwels"].config


def test_all_mistakes_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("Resources: {}\n")
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "2.yaml").write_text(GOOD)
    (tmp_path / "max.yaml").write_text(GOOD)
    (tmp_path / "x.toml").write_text(GOOD)
    (tmp_path / "folder.yaml").mkdir()
    specs = ["a.yaml", "b.json", "good.yaml", "good=2.yaml", "2.yaml", "max.yaml", "x.toml"]
    specs += ["alps", "good", "x.toml.d"]
    (tmp_path / "x.toml.d").mkdir()
    specs += ["no.yaml", "folder.yaml", "~nobody-of-this-name/x.yaml", "", "y=", "a b=good.yaml"]
    with pytest.raises(ConfigError) as caught:
        read_configs(specs, tmp_path)
    said = [f"{file}|{key}|{message}" for file, key, message in messages(caught.value)]
    for file, key, part in [
        ("a.yaml", "UnicoreApiUrl", "either"),
        ("a.yaml", "Resources.Queue", "missing"),
        ("b.json", "", "line 1"),
        ("2.yaml", "", "is named good, as is good.yaml"),
        ("2.yaml", "", "'2' cannot be the name"),
        ("max.yaml", "", "Snakemake"),
        ("x.toml", "", "'.toml' is not supported"),
        ("alps", "", "there is no such file: "),
        ("alps", "", "(put targets of Snakemake after '--')"),
        ("good", "", "is not a backend config: did you mean good.yaml?"),
        ("x.toml.d", "", "'.d' is not supported"),
        ("no.yaml", "", "no such file: correct the path, or create one with smk-mantik init"),
        ("folder.yaml", "", "directory"),
        ("good.yaml", "", "'a b' cannot be the name"),
    ]:
        assert any(line.startswith(f"{file}|{key}|") and part in line for line in said), said
    assert str(caught.value).startswith("Nothing submitted: ")


def test_the_image_is_looked_for_only_if_asked(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "site.yaml").write_text(IMAGE)
    with pytest.raises(ConfigError, match="not found"):
        read_configs(["site.yaml"], project)
    assert read_configs(["site.yaml"], project, check_files=False)
    assert read_backend_config(project / "site.yaml")[1] == []
    (tmp_path / "img.sif").write_text("")
    assert read_configs(["site.yaml"], project)


def test_an_unreadable_file_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.symlink_to(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_backend_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_backend_config(tmp_path / "nul\0.yaml")


def test_json_and_yaml_mean_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("\ufeff" + GOOD)
    (tmp_path / "a.json").write_text(
        '{"UnicoreApiUrl": "https://hpc.example.org/rest/core", "Resources": {"Queue": "q"}}'
    )
    assert read_backend_config(tmp_path / "a.yaml") == read_backend_config(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (
            "Resources: {Queue: !x q, Node: 3, Runtime: 5h}",
            "has the tag !x, which is not supported",
        ),
        ("Resources: {Queue: q, Node: 3, ? [a] : {b: c}}", "key that is not a text"),
        ("Resources: {Queue: q, Node: 3, ? {a: b} : c}", "key that is not a text"),
    ],
)
def test_odd_yaml_is_told_with_all_other_mistakes(odd: str, told: str) -> None:
    text = f"UnicoreApiUrl: https://u.org\n{odd}\nFoo: 1\n"
    with pytest.raises(ConfigError) as caught:
        parse_backend_config(text.encode(), "yaml", shown="site.yaml")
    found = {each.key: each.message for each in caught.value.mistakes}
    assert set(found) == {"", "Resources.Node", "Foo"}
    assert told in found[""]
    assert "line 2, column" in found[""]


@pytest.mark.parametrize(
    ("name", "warned"),
    [
        *((name, True) for name in (
            "MANTIK_UNICORE_PASSWORD", "HF_TOKEN", "HF_TOKEN_READ", "TOKEN2", "github_token",
            "MY_SECRETS", "SSH_PASSPHRASE", "DB_PASS", "AWS_CREDENTIALS", "WANDB_API_KEY",
        )),
        *((name, False) for name in (
            "TOKENIZERS_PARALLELISM", "MAX_TOKENS", "TOKEN_FILE", "BYPASS", "PASSES", "KEY",
        )),
    ],
)  # fmt: skip
def test_variables_that_by_their_names_are_secret(name: str, warned: bool) -> None:
    text = f"{GOOD}\nEnvironment: {{Variables: {{{name}: y}}}}\n"
    _, warnings = parse_backend_config(text.encode(), "yaml", shown="c")
    told = [f"c: Environment.Variables.{name}: looks like a secret"] if warned else []
    assert [warning.partition(", and everyone")[0] for warning in warnings] == told


def test_a_virtual_environment_of_this_machine_is_refused(tmp_path: Path) -> None:
    text = b"UnicoreApiUrl: https://u.org/rest/core\nResources: {Queue: q}\n"
    text += b"Environment: {Python: {Path: venv}}\n"
    parse_backend_config(text, "yaml", tmp_path, shown="c")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/pyvenv.cfg").touch()
    with pytest.raises(ConfigError, match="virtual environment of this machine"):
        parse_backend_config(text, "yaml", tmp_path, shown="c")
