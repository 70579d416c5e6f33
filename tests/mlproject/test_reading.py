"""MLproject files: what is read, and how each mistake is told."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from snakemake_executor_plugin_mantik import mlproject
from snakemake_executor_plugin_mantik.common.errors import ConfigError
from snakemake_executor_plugin_mantik.mlproject.entry import Parameter
from snakemake_executor_plugin_mantik.mlproject.reading import MAX_BYTES, ProjectFile, read_project

GOOD = """\
name: churn
python_env: env.yaml
entry_points:
  main:
    parameters:
      data: path
      alpha: {type: float, default: 0.5}
      depth: {type: int, default: 010}
      verbose: {default: yes}
      where: {type: uri, default: null}
    command: >
      python train.py --data {data} --alpha {alpha}
  "two words":
    command: "awk '{{print $1}}'"
"""


def read(
    folder: Path, text: str | bytes, name: str = "MLproject", warn: Callable[[str], object] = str
) -> ProjectFile:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (folder / "env.yaml").write_text("python: 3.11\n")
    return read_project(folder, "proj", warn)


def mistakes(folder: Path, text: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(folder, text)
    return [str(mistake) for mistake in caught.value.mistakes]


def test_a_good_file(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD, warn=pytest.fail)

    assert found.name == "churn"
    assert str(found.environment) == "python_env: env.yaml"
    assert list(found.entry_points) == ["main", "two words"]
    main = found.entry_points["main"]
    assert main.command == "python train.py --data {data} --alpha {alpha}\n"
    assert list(main.parameters.values()) == [
        Parameter("data", "path"),
        Parameter("alpha", "float", "0.5"),
        Parameter("depth", "int", "8"),  # YAML 1.1, as MLflow reads it
        Parameter("verbose", "string", "True"),
        Parameter("where", "uri", None),
    ]


@pytest.mark.parametrize("name", ["MLproject", "mlproject", "MLPROJECT", "mLpRoJeCt"])
def test_the_files_name_in_any_case(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a b'\"#%ü"
    folder.mkdir()
    found = read(folder, GOOD, name)
    assert found.path == folder / name


def test_a_folder_without_the_file_has_scripts_alone(tmp_path: Path) -> None:
    (tmp_path / "mlproject").mkdir()
    assert read_project(tmp_path) == ProjectFile()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ["proj/MLproject: is empty; it has to hold a mapping with entry_points"]),
        ("- a\n", ["proj/MLproject: has to be a mapping, found a list (line 1)"]),
        (
            "a: [",
            [
                "proj/MLproject: is not well-formed YAML: expected the node content, but found"
                " '<stream end>' (line 1, column 5)"
            ],
        ),
        (b"name: \xff", ["proj/MLproject: is not UTF-8 (byte 7)"]),
        (
            "name: a\n---\nname: b\n",
            ["proj/MLproject: is not well-formed YAML: but found another document"
             " (line 2, column 1)"],
        ),
        (
            "entry_points:\n",
            [
                "proj/MLproject: entry_points: has to be a mapping, found nothing; leave the key"
                " out (line 1)"
            ],
        ),
        (
            "entry_points:\n  main:\n    parameters: [a]\n",
            [
                "proj/MLproject: entry_points.main.parameters: has to be a mapping, found a list"
                " (line 3)",
                "proj/MLproject: entry_points.main: has no command (line 3)",
            ],
        ),
        (
            "entry_points:\n  main:\n    parameters: {a: 0.5, b: [x]}\n    command: 3\n",
            [
                "proj/MLproject: entry_points.main.parameters.a: has to be the name of a type, or a"
                " mapping with type and default, found '0.5' (line 3)",
                "proj/MLproject: entry_points.main.parameters.b: has to be the name of a type, or a"
                " mapping with type and default, found a list (line 3)",
                "proj/MLproject: entry_points.main.command: has to be a text, found '3' (line 4)",
            ],
        ),
        (
            "entry_points:\n  a:\n    command: echo ${HOME} {\n"
            "  b:\n    parameters: {alpha: float}\n    command: x {alhpa} {} {0} ${HOME}\n"
            "  c:\n    parameters: {x: string}\n    command: '{x:d} {x:>{w}}'\n"
            "  d:\n    parameters: {x: string}\n    command: '{x:d}'\n"
            "  e:\n    parameters: {x: string}\n    command: '{x:999999999999}'\n",
            [
                "proj/MLproject: entry_points.a.command: cannot be read (Single '{' encountered in"
                " format string): write {{ and }} for braces that are not placeholders (line 3)",
                "proj/MLproject: entry_points.b.command: has the placeholder {alhpa}, but there is"
                " no such parameter (did you mean alpha?): declare it, or write {{ and }} for"
                " braces (line 6)",
                "proj/MLproject: entry_points.b.command: has a placeholder without a name: write"
                " {parameter}, or {{ and }} for braces (line 6)",
                "proj/MLproject: entry_points.b.command: names the shell's variable ${HOME}: write"
                " ${{HOME}} instead (line 6)",
                "proj/MLproject: entry_points.c.command: has the placeholder {w}, but there is no"
                " such parameter (there are x): declare it, or write {{ and }} for braces (line 9)",
                "proj/MLproject: entry_points.d.command: has a placeholder that does not accept a"
                " text (Unknown format code 'd' for object of type 'str') (line 12)",
                "proj/MLproject: entry_points.e.command: has a placeholder wider than 9999"
                " characters (line 15)",
            ],
        ),
        (
            "conda_env: a\npython_env: b\n",
            [
                "proj/MLproject: conda_env: is one of 2 environments (python_env, conda_env): keep"
                " one (line 1)",
                "proj/MLproject: python_env: there is no file 'b' in the project (line 2)",
                "proj/MLproject: conda_env: there is no file 'a' in the project (line 1)",
            ],
        ),
        ("docker_env: {volumes: a}\n", ["proj/MLproject: docker_env: has no image (line 1)",
         "proj/MLproject: docker_env.volumes: has to be a list of texts, found the text 'a'"
         " (line 1)"]),
        (
            "name: 2026-99-99\n",
            ["proj/MLproject: name: cannot be read (month must be in 1..12) (line 1)"],
        ),
        (
            "name: !!python/object:os.system x\n",
            [
                "proj/MLproject: name: cannot be read (could not determine a constructor for the"
                " tag 'tag:yaml.org,2002:python/object:os.system') (line 1)"
            ],
        ),
        ("a: " + "[" * 5000, ["proj/MLproject: is nested too deep"]),
        (b" " * (MAX_BYTES + 1), ["proj/MLproject: is larger than 256 KiB"]),
    ],
)  # fmt: skip
def test_mistakes(tmp_path: Path, text: str | bytes, told: list[str]) -> None:
    assert sorted(mistakes(tmp_path, text)) == sorted(told)


def test_what_is_likely_not_meant(tmp_path: Path) -> None:
    warnings: list[str] = []
    found = read(
        tmp_path,
        "entry_point: {}\nname: a\nname: b\nentry_points:\n  main:\n    comand: x\n    command: y\n"
        "    parameters: {a: {typ: float, type: flaot}}\n",
        warn=warnings.append,
    )
    assert found.name == "b"
    assert warnings == [
        "proj/MLproject: name: is given twice; the last one counts (line 1)",
        "proj/MLproject: entry_point: is unknown to MLflow (did you mean entry_points?) (line 1)",
        "proj/MLproject: entry_points.main.comand: is unknown to MLflow (did you mean command?)"
        " (line 6)",
        "proj/MLproject: entry_points.main.parameters.a.typ: is unknown to MLflow"
        " (did you mean type?) (line 8)",
        "proj/MLproject: entry_points.main.parameters.a: has the type 'flaot', which is not checked"
        " (did you mean float?) (line 8)",
    ]


def test_warnings_of_a_file_with_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "MLproject").write_text("entry_point: {}\nentry_points: {main: {comand: x}}\n")
    monkeypatch.delitem(sys.modules, "snakemake.logging", raising=False)
    with pytest.raises(ConfigError, match="has no command"):
        mlproject.load(tmp_path)
    told = capsys.readouterr().err
    assert told.count("did you mean entry_points?") == 1
    assert told.count("did you mean command?") == 1


def test_texts_that_grow_without_end(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    laughs = "\n".join([*lines, "name: *a8"])
    assert mistakes(tmp_path, laughs) == ["proj/MLproject: holds more than 100000 values"]
    assert mistakes(tmp_path, "name: &a [*a]") == ["proj/MLproject: holds more than 100000 values"]


def test_a_folder_that_is_not_there_or_cannot_be_read(tmp_path: Path) -> None:
    for folder, told in (
        (tmp_path / "no", "there is no such folder"),
        (Path("a\0b"), "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=told):
            read_project(folder)


_WORDS = st.sampled_from(
    ["name", "entry_points", "main", "parameters", "command", "type", "default", "float", "path",
     "python_env", "conda_env", "docker_env", "image", "<<", "{x}", "{", "null", "~", "x", "1",
     "yes",
     "2026-99-99", "!!int", "&a", "*a", "databricks_spark_job", "!!binary", "0x", "1e400", "- "]
)  # fmt: skip
_VALUES = st.recursive(
    _WORDS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(st.tuples(_WORDS, inner), max_size=4).map(
            lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items) + "}"
        ),
    ),
    max_leaves=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(_VALUES, st.text(), st.binary(max_size=60)))
@example("entry_points: {main: {command: '\\uD800'}}")
@example("entry_points: {main: {parameters: {a: {default: '\\uD800'}}, command: '{a}'}}")
@example("? [a]\n: b")
@example("? {a: b}\n: b")
@example("<<: x")
@example("entry_points: &a {<<: *a}")
@example("name: " + "9" * 5000)
@example("{: }")
def test_no_broken_file_ends_in_a_traceback(tmp_path: Path, text: str | bytes) -> None:
    content = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    found, told = ProjectFile(), None
    try:
        found = read(tmp_path, content)
    except ConfigError as error:
        told = error
    if told is not None:
        assert told.mistakes
        assert all("\n" not in str(mistake) for mistake in told.mistakes)
    for point in found.entry_points.values():
        point.shell_command(dict.fromkeys(point.parameters, ("x",)), {})


def test_an_entry_point_with_a_mistake_leaves_the_others_alone(tmp_path: Path) -> None:
    text = """
entry_points:
  main: {command: echo main}
  evaluate:
    command: echo {level}
"""
    (tmp_path / "MLproject").write_text(text)
    warnings: list[str] = []
    found = read_project(tmp_path, "p", warnings.append)
    assert list(found.entry_points) == ["main"]
    assert "entry_points.evaluate.command" in warnings[-1]
    assert warnings[-1].endswith("this entry point cannot be run")
    project = mlproject.project.Project(tmp_path, found, "p")
    with pytest.raises(ConfigError, match=r"evaluate\.command"):
        project.entry("evaluate")
