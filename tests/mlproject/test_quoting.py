"""Placeholders inside of quotes: told, and no other command lets a value run as code."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from snakemake_executor_plugin_mantik.common.errors import ConfigError
from snakemake_executor_plugin_mantik.mlproject.entry import EntryPoint, quoted_placeholders
from snakemake_executor_plugin_mantik.mlproject.reading import read_project


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
         ";", "{{", "}}"]
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
        assert not (tmp_path / "ran").exists()
