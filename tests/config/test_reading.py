import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from snakemake_executor_plugin_mantik.common.errors import ConfigError
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.config.reading import (
    DocumentError,
    find_duplicates,
    parse_backend_config,
    read_backend_config,
    read_configs,
    read_document,
)
from snakemake_executor_plugin_mantik.config.values import as_written

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


KEYS = [*BackendConfig.key_names(), "Apptainer", "Path", "Variables", "Queue", "Memory", "Poll"]
YAML_PIECES = st.lists(
    st.sampled_from(
        [*"{}[]:,-?!&*|>'\"%@`#~ \n\t", "\r", ": ", "- ", "\n  ", "---\n", "...", "<<: ", "!!int "]
        + ["&a ", "*a", "!x", "%YAML 1.1\n", "%YAML 1.3\n", "%TAG ! x\n", "\\U99999999", "\\x", "é"]
        + ["0o7", "1e3"]
        + [f"{key}: " for key in KEYS]
        + ["\ufeff", "\u2028", "\x85", "\x00", ".inf", "=", "2001-12-14t21:59:43.10-05:00"]
    ),
    max_size=40,
).map("".join)


def read_anything(content: bytes, suffix: str, folder: Path) -> None:
    path = folder / f"site{suffix}"
    path.write_bytes(content)
    try:
        config, _ = read_backend_config(path, folder)
    except ConfigError as error:
        found = error
    else:
        assert config.api in ("unicore", "firecrest")
        return
    assert found.mistakes
    assert str(found).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents")


@given(st.binary(max_size=300), st.sampled_from([".yaml", ".json"]))
def test_no_bytes_end_in_a_traceback(folder: Path, content: bytes, suffix: str) -> None:
    read_anything(content, suffix, folder)


@settings(deadline=None)
@given(YAML_PIECES)
@example('"\\U99999999"')
@example("? [a]\n: b")
@example("&a [*a]")
@example("a: &a {b: *a}")
@example("[" * 5000)
@example("a:\n" + "".join(" " * n + "a:\n" for n in range(1, 400)))
@example("Resources: !!int {Queue: q}")
@example("!!str {a: b}")
@example("%YAML 1.3\n---\na: b")
def test_no_yaml_ends_in_a_traceback(folder: Path, text: str) -> None:
    read_anything(text.encode(), ".yaml", folder)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "9" * 5000, '"\\ud800"', '{"Resources": {"Queue": "\\ud800"}}', "NaN"]
)
def test_json_that_breaks_parsers(folder: Path, text: str) -> None:
    read_anything(text.encode(), ".json", folder)


def test_aliases_of_aliases_are_read_in_no_time(folder: Path) -> None:
    lines = ["a0: &a0 [x]"] + [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40)
    ]
    read_anything("\n".join(lines).encode(), ".yaml", folder)


def test_a_large_file_is_refused() -> None:
    with pytest.raises(DocumentError, match="larger"):
        read_document(b" " * (1 << 20), "yaml", [])


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)


@given(JSON_LIKE)
def test_json_is_read_as_json(value: Any) -> None:
    assert read_document(json.dumps(value).encode(), "json", []) == value


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**9), 10**9)
        | st.text("ab:#-' \n\"no1.", max_size=9),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text("abc ", min_size=1, max_size=4), inner, max_size=4)
        ),
        max_leaves=15,
    )
)
def test_yaml_is_read_as_its_writer_meant(value: Any) -> None:
    stream = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False  # `{a: :1}` is written, and not read, by ruamel.yaml itself
    yaml.dump(value, stream)
    assert read_document(stream.getvalue().encode(), "yaml", []) == value


@pytest.mark.parametrize(
    "text", ["no", "yes", "on", "off", "y", "12:30:00", "2026-01-01", "1_000", "="]
)
def test_yaml_1_1_surprises_stay_texts(text: str) -> None:
    assert read_document(text.encode(), "yaml", []) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0x1F", 31),
        ("0o17", 15),
        ("017", 17),
        ("1e3", 1000.0),
        ("-.5", -0.5),
        (".inf", float("inf")),
        ("True", True),
        ("~", None),
        ("!!str 12", "12"),
        ("'12'", "12"),
    ],
)
def test_scalars_of_the_core_schema(text: str, value: Any) -> None:
    found = read_document(text.encode(), "yaml", [])
    assert found == value
    assert type(found) is type(value) or as_written(found) == text


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_duplicates_have_paths_and_the_first_value_stays(kind: str) -> None:
    found = read_document(b'{"a": {"b": 1, "b": 2}, "c": [{"d": 1, "d": 2, "d": 3}]}', kind, [])
    assert find_duplicates(found) == [("a", "b"), ("c", "1", "d")]
    assert found["a"]["b"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: b: c", "line 1, column 5"),
        ("%YAML 1.3\n---\na: b", "%YAML 1.3;"),
        ("%YAML  1.0\n---\na: b", "%YAML 1.0;"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        read_document(text.encode(), "yaml", [])
