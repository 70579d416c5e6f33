"""Values: placeholders, functions, and that a process sees what was written."""

import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from snakemake.iocontainers import InputFiles, OutputFiles, ResourceList, Wildcards

from snakemake_executor_plugin_mantik.common.errors import ConfigError
from snakemake_executor_plugin_mantik.mlproject.entry import (
    EntryPoint,
    Parameter,
    quoted_placeholders,
)
from snakemake_executor_plugin_mantik.mlproject.project import BoundEntryPoint, Project
from snakemake_executor_plugin_mantik.mlproject.reading import ProjectFile, read_project

PRINT = "printf '%s\\0'"
"""A command that shows its words, each ended by a NUL."""


def make(
    folder: Path, arguments: Mapping[str, object], extra: Mapping[str, object] | None = None,
    **types: str,
) -> BoundEntryPoint:  # fmt: skip
    kinds = dict.fromkeys(arguments, "string") | types
    parameters = {name: Parameter(name, kind) for name, kind in kinds.items()}
    command = " ".join([PRINT, *(f"{{{name}}}" for name in parameters)])
    point = EntryPoint("main", command, parameters)
    project = Project(folder, ProjectFile(entry_points={"main": point}), "proj")
    return BoundEntryPoint(project, point, arguments, extra or {})


def job(**things: Any) -> dict[str, Any]:
    return {
        "wildcards": Wildcards(fromdict=things.get("wildcards", {})),
        "input": InputFiles(fromdict=things.get("input", {})),
        "output": OutputFiles(fromdict=things.get("output", {})),
        "threads": things.get("threads", 1),
        "resources": ResourceList(fromdict=things.get("resources", {})),
    }


def run(command: str, cwd: Path | None = None) -> list[str]:
    """What the process saw of a command, run in the way that Snakemake does."""
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; {command}"],
        cwd=cwd, capture_output=True, check=True, env={"PATH": "/usr/bin:/bin", "HOME": "/h"},
    )  # fmt: skip
    return done.stdout.decode().split("\0")[:-1]


TEXTS = st.text(st.characters(exclude_characters="\0", codec="utf-8"))


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(TEXTS, TEXTS, TEXTS)
@example("it's", '"$HOME" `id` $(id) \\', "a\nb\r\n{x} {{ }} # %s !! ~ * ?")
@example("", " ", "-n")
@example("{input}", "}", "ü \x7f\x1b")
def test_the_process_sees_what_was_written(
    tmp_path: Path, first: str, second: str, third: str
) -> None:
    escaped = second.replace("{", "{{").replace("}", "}}")
    values = {"a": lambda wildcards: first, "b": escaped, "c": "{wildcards.x}"}
    found = make(tmp_path, values, {"more words": lambda wildcards: third})
    things = job(wildcards={"x": third})

    assert run(found.command(**things)) == [first, second, third, "--more words", third]
    assert found.call(**things).arguments == {
        "a": first, "b": second, "c": third, "more words": third,
    }  # fmt: skip


_FILES = st.text(
    st.characters(exclude_characters="\0/", codec="utf-8"), min_size=1, max_size=20
).filter(lambda name: name not in (".", ".."))


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(_FILES)
@example("-rf")
@example(" '\"#%ü\n{x}")
def test_files_are_found_from_the_projects_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / f"p{len(list(tmp_path.iterdir()))}" / "it's a {project} #%ü"
    folder.mkdir(parents=True)
    data = folder.parent / name if len(name.encode()) < 200 else folder.parent / "short"
    if not data.exists():
        data.write_text("found\n")
    point = EntryPoint("main", "cat -- {data}", {"data": Parameter("data", "path")})
    project = Project(folder, ProjectFile(entry_points={"main": point}), "proj")
    given = BoundEntryPoint(project, point, {"data": "{input.data}"}, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.parent)
        command = given.command(**job(input={"data": data.name}))
        raw = given.call(**job(input={"data": data.name})).arguments
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == "found\n"
    assert raw == {"data": data.name}


def test_what_placeholders_can_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").mkdir()
    things = job(
        wildcards={"a": "w"}, input={"data": "d.csv", "all": ["x y", "z"]}, output={"model": "m"},
        threads=3, resources={"mem_mb": 1000},
    )  # fmt: skip
    for value, words in {
        "{wildcards.a}": ["w"],
        "{input.data}": ["../d.csv"],
        "{input[0]}": ["../d.csv"],
        "{input.all}": ["../x y", "../z"],
        "{input.all[1]}": ["../z"],
        "in={input.data}:{threads:02d}": ["in=../d.csv:03"],
        "{output}": ["../m"],
        "{output.model}/sub": ["../m/sub"],
        "{threads}": ["3"],
        "{resources.mem_mb}M": ["1000M"],
        "{{input}}": ["{input}"],
        "": [""],
    }.items():
        given = make(tmp_path / "p", {"v": value})
        assert run(given.command(**things), tmp_path) == words, value


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("{params.x}", "params…} is not known here; only wildcards, input"),
        ("{alpha}", "perhaps {wildcards.alpha}"),
        ("{inptu.x}", "did you mean input?"),
        ("{", "write {{ and }} for braces"),
        ("{}", "is not known here"),
        ("{wildcards}", "has to name one"),
        ("{input!r}", "cannot be converted"),
        ("a\0b", "NUL"),
        ("\ud800", "half a character"),
        (None, "has to be a text, a number, a bool or a function, found NoneType"),
        ({}, "found dict"),
        ([1, 2], "found list: join its items into a text"),
        ((1,), "found tuple"),
        (object(), "found object"),
        (lambda: 1, "has to take wildcards first"),
        (lambda wildcards, log: 1, "has to take wildcards first"),
    ],
)
def test_values_that_are_none_are_told_at_once(tmp_path: Path, value: object, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, {"v": value})
    assert told in str(caught.value)
    assert str(caught.value.mistakes[0]).startswith("proj: main.v: ")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("{input.dta}", "the job has no input.dta (did you mean input.data?)"),
        ("{wildcards.b}", "the job has no wildcards.b (did you mean wildcards.a?)"),
        ("{input[7]}", "the job has no input[7]"),
        ("x{input.all}", "names 2 files"),
        ("{input.append}", "not a file of the job"),
        ("{threads:x y}", "cannot be formatted"),
        ("{wildcards.a:999}{input.dta}", "no input.dta"),
        (lambda wildcards: None, "found NoneType"),
        (lambda wildcards: ["a", "b"], "found list"),
    ],
)
def test_values_that_are_none_for_a_job(tmp_path: Path, value: object, told: str) -> None:
    given = make(tmp_path, {"v": value})
    with pytest.raises(ConfigError) as caught:
        given.command(**job(wildcards={"a": "w"}, input={"data": "d", "all": ["x", "y"]}))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("float", ["1", "-1e-3", "inf", 0.5, 3], ["", "one", "1,5", "0x1", True]),
        ("int", ["1", "-7", 3], ["1.0", "", "1e3", 0.5]),
        ("uri", ["s3://a/b", "file:///x"], ["a/b", "", "/x"]),
        ("string", ["", "x", 1.5, True], []),
        ("anything", ["", "x"], []),
    ],
)
def test_types(tmp_path: Path, kind: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        assert run(make(tmp_path, {"v": value}, v=kind).command(**job())) == [str(value)]
    for value in bad:
        with pytest.raises(ConfigError, match="has to be"):
            make(tmp_path, {"v": value}, v=kind)
        late = make(tmp_path, {"v": "{wildcards.x}"}, v=kind)
        with pytest.raises(ConfigError, match="has to be"):
            late.check(Wildcards(fromdict={"x": str(value)}))


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").mkdir()
    (tmp_path / "there.csv").touch()

    def words(value: str, **things: Any) -> list[str]:
        return shlex.split(make(tmp_path / "p", {"v": value}, v="path").command(**job(**things)))[
            -1:
        ]

    assert words("there.csv") == ["../there.csv"]
    assert words("/at/the/site.csv") == ["/at/the/site.csv"]
    assert words("data/x.csv", input={"a": "data/x.csv"}) == ["../data/x.csv"]
    assert words("models/x/y", output={"a": "models/x"}) == ["../models/x/y"]
    with pytest.raises(ConfigError, match=r"there is no file 'gone.csv' in the working directory"):
        words("gone.csv")
    with pytest.raises(ConfigError, match="is not on this machine"):
        words("s3://bucket/x.csv")


def test_what_paths_are_relative_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/mlproject.md says: a literal to the working directory, a default to the project."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").mkdir()
    (tmp_path / "x.csv").write_text("of the working directory")
    (tmp_path / "p/x.csv").write_text("of the project")
    (tmp_path / "p/own.csv").touch()
    point = EntryPoint("main", "cat {data}", {"data": Parameter("data", "path", "x.csv")})
    project = Project(tmp_path / "p", ProjectFile(entry_points={"main": point}), "proj")

    def seen(arguments: Mapping[str, object]) -> list[str]:
        command = BoundEntryPoint(project, point, arguments, {}).command(**job())
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        return [command.split()[-1], done.stdout]

    assert seen({"data": "x.csv"}) == ["../x.csv", "of the working directory"]
    assert seen({}) == ["x.csv", "of the project"]
    with pytest.raises(ConfigError, match="in the working directory"):
        seen({"data": "own.csv"})


def test_a_project_behind_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep/er/p").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/p").symlink_to(tmp_path / "deep/er/p")
    (tmp_path / "work/data").write_text("found")
    monkeypatch.chdir(tmp_path / "work")
    given = make(tmp_path / "work/p", {"v": "{input.a}"})

    (path,) = run(given.command(**job(input={"a": "data"})), tmp_path / "work")

    assert (tmp_path / "deep/er/p" / path).read_text() == "found"


def test_parameters_that_are_missing_unknown_or_defaulted(tmp_path: Path) -> None:
    point = EntryPoint(
        "main",
        "x",
        {
            "data": Parameter("data"),
            "alpha": Parameter("alpha", "float", "0.5"),
            "bad": Parameter("bad", "float", "auto"),
        },
    )
    project = Project(tmp_path, ProjectFile(entry_points={"main": point}), "proj")
    with pytest.raises(ConfigError) as caught:
        BoundEntryPoint(project, point, {"dta": 1}, {"alpha": 2})
    assert [str(mistake) for mistake in caught.value.mistakes] == [
        "proj: main.dta: is not a parameter of main (did you mean data?): correct the name, or pass"
        " it in the mapping after the entry point's name to append it to the command",
        "proj: main.alpha: is a parameter of the entry point: pass it as one",
        "proj: main.data: has no value and no default: pass a value",
        "proj: main.bad: has to be a number, found 'auto', its default: pass a value",
    ]

    given = BoundEntryPoint(project, point, {"data": "d", "bad": "{threads}"}, {})
    assert given.outline(SimpleNamespace()) == {"alpha": "0.5", "bad": "{threads:}", "data": "d"}
    assert given.asks == ("wildcards", "input", "output", "threads")


def test_a_function_of_more_than_wildcards(tmp_path: Path) -> None:
    given = make(tmp_path, {"v": lambda w, input, threads: f"{input.a}{threads}"})  # noqa: A006
    assert given.asks == ("wildcards", "input", "output", "threads")
    assert run(given.command(**job(input={"a": "x"}, threads=2))) == ["x2"]


# Placeholders inside of quotes: told, and no other command lets a value run as code.


@pytest.mark.parametrize(
    "command",
    [
        "x {a}",
        "x --a={a} 'b'{a}\"c\"{a}$'d'",
        "x \"$(y {a})\" $(z '('{a})",
        "x \"it's\" {a} \\' {a} $'\\'' {a} '\\' {a}",
        "# don't\nx {a}",
        "x ${{#b}} $# $$'c' a#'b' {a}",
        'x <<< "y" {a}',
        "cat <<E >b\nit's {a}\nE\nx {a}",
        "cat <<-'E' <<\"F g\"; y\n'\n\t\tE\n\"{a}\nF g\nx {a}",
        "x $((1 << 2)) {a}",
        "case $b in y) x {a};; esac",
        "x '{{a}}'",
        "x >&2 {a}; y &>to/{a}",
        "(x) # it's\ny >(z) {a}",
    ],
)
def test_outside_of_quotes(command: str) -> None:
    assert list(quoted_placeholders(command)) == []


@pytest.mark.parametrize(
    ("command", "where"),
    [
        ("x '{a}'", "inside quotes"),
        ("x 'b\n {a[0]!r:>5} {a}'", "inside quotes"),
        ('x "{a}"', "inside quotes"),
        ('x "\\"{a}"', "inside quotes"),
        ('x "\\{a}"', "inside quotes"),
        ("x $'it\\'s {a}'", "inside quotes"),
        ("it's {a}", "inside quotes"),
        ("x \"$(y '{a}')\"", "inside quotes"),
        ('x "$(y b) {a}"', "inside quotes"),
        ('x "# {a}"', "inside quotes"),
        ("cat <<E\n'\nE\nx '{a}'", "inside quotes"),
        ("x <<E '{a}'", "inside quotes"),
        ("x \\{a}", "after a backslash"),
        ("x \\)#'{a}", "inside quotes"),
        ("x \\ #'{a}", "inside quotes"),
        ("x $(y)#'{a}", "inside quotes"),
        ("x ${{y/ #/}}'{a}", "inside quotes"),
        ("x >&{a}", "after >& (write &> instead)"),
        ("x >& to/{a}.log", "after >& (write &> instead)"),
        ("x `y {a}`", "inside backquotes"),
        ("x `y $(z {a})`", "inside backquotes"),
    ],
)
def test_inside_of_quotes(command: str, where: str) -> None:
    assert list(quoted_placeholders(command)) == [("a", where)]


def test_told_with_line_and_key(tmp_path: Path) -> None:
    (tmp_path / "MLproject").write_text(
        "entry_points:\n  main:\n    parameters: {t: string, u: string}\n"
        "    command: \"x '{t}' {u} '{t}'\"\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_project(tmp_path, "proj")
    assert [str(mistake) for mistake in caught.value.mistakes] == [
        "proj/MLproject: entry_points.main.command: {t} stands inside quotes, but values are quoted"
        " already: write only {t} (line 4)"
    ]


_PIECES = st.lists(
    st.sampled_from(
        ["'", '"', "\\", "$'", "`", "{a}", "{a}", "x", " ", " ", "\n", "$(: ", "(", ")", "#", "$",
         ";", "{{", "}}", "${{x", "/", ">", ">&", "<(: ", "\t"]
    ),
    max_size=12,
).map("".join)  # fmt: skip


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(_PIECES)
@example('"$(: \'")"{a}')
def test_no_value_of_an_accepted_command_runs(tmp_path: Path, pieces: str) -> None:
    command = f": {pieces}"
    if list(quoted_placeholders(command)):
        return
    values = ["$(>ran)`>ran`;>ran;' >ran '", '">ran;"']
    for value in values:
        line = EntryPoint("main", command).shell_command({"a": (value,)}, {})
        subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, check=False)
        assert not (tmp_path / "ran").exists(), line
