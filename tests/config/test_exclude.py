import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from snakemake_executor_plugin_mantik.config.exclude import Exclude, read_patterns

FILES = [
    "MLproject",
    "data.csv",
    "notes .txt",
    "data/data.csv",
    "data/deep/data.csv",
    "data/deep/p.png",
    "cache/x",
    "src/cache/y",
    "src/cache/keep/z.py",
    "weird '\"#%ü\nname",
    "#hash",
    "!bang",
    ".hidden",
    "a*b",
    "1.log",
    "run7/a-b",
    "]x",
    "[x]",
    "^x",
    "\\x",
    "A:x",
    "src/-",
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    subprocess.run(["git", "init", "-q", "--template="], cwd=root, check=True)
    return root


def git_keeps(project: Path, patterns: list[str]) -> set[str]:
    """The files that git does not ignore with `patterns` in a .gitignore at the top."""
    # In .git/info/exclude they mean the same as in a .gitignore at the top, which stays out of it.
    exclude = project / ".git" / "info" / "exclude"
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text("".join(f"{pattern}\n" for pattern in patterns))
    asked = subprocess.run(
        ["git", "-c", "core.excludesFile=/dev/null", "ls-files", "-zo", "--exclude-standard"],
        cwd=project,
        capture_output=True,
        check=True,
    )
    return set(filter(None, asked.stdout.decode().split("\0")))


@pytest.mark.parametrize(
    "patterns",
    [
        [],
        ["data.csv"],
        ["*.csv"],
        ["**/*.png"],
        ["data/data.csv"],
        ["data/*"],
        ["data/**"],
        ["data/**/data.csv"],
        ["cache"],
        ["cache/"],
        ["src/cache/"],
        ["src/cache/*", "!src/cache/keep/"],
        ["src/cache/", "!src/cache/keep/z.py"],
        ["*", "!data/", "!data/data.csv"],
        ["*", "!MLproject"],
        ["*", "!*/", "!*.py"],
        ["data/**", "!data/data.csv"],
        ["data/**/", "!data/deep"],
        ["\\#hash", "\\!bang"],
        [".*"],
        ["a\\*b"],
        ["[dM]*"],
        ["notes\\ .txt"],
        ["notes .txt "],
        ["src[!a]cache"],
        ["[[d]*", "!cache?x"],
        ["[z-a]"],
        ["[z-a]*"],
        ["[!z-a]*"],
        ["[9-0].log", "[b-a]*", "[a-\\\\]*", "[Z-\\\\]*", "[a--b]*"],
        ["[[:digit:]].log", "run[[:digit:]]/"],
        ["[\\]]x"],
        ["[^]]x"],
        ["[]]x"],
        ["[]-]x"],
        ["[\\\\]x"],
        ["[[:nothing:]]*"],
        ["[[:digit]*"],
        ["[[:]*"],
        ["[![:alpha:][:digit:]]*"],
        ["[A-[:digit:]]*"],
        ["*", "![m/]*"],
        ["src[/]cache"],
        ["[d/]*"],
        ["[.-0]*"],
    ],
)
def test_git_says_the_same(project: Path, patterns: list[str]) -> None:
    assert read_patterns(patterns) == tuple(patterns)
    exclude = Exclude(patterns)
    wanted = git_keeps(project, patterns)
    assert {name for name in FILES if not exclude.matches(name)} == wanted


PIECES = [
    *("*", "**", "**/", "?", "/", "!", "data", "cache", "src", "deep", "x", ".csv", "p.png"),
    *("[a-d]", "[!a]", "[", "]", "\\", "keep", "a", " "),
    *("[:digit:]", "[:alpha:]", "[:", ":]", "^", "-", "[z-a]", "[^", "[[", "]]", "1", "run"),
]
PATTERN = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)


@settings(max_examples=150, deadline=None)
@given(st.lists(PATTERN, min_size=1, max_size=4))
def test_git_says_the_same_of_any_patterns(project: Path, patterns: list[str]) -> None:
    try:
        read_patterns(patterns)
    except (ValueError, ValidationError):
        return
    if any(re.search(r"[^/!]\*\*.*/|/.*\*\*[^/]", each) for each in patterns):
        return  # git's manual calls such stars plain ones, git itself does not
    exclude = Exclude(patterns)
    wanted = git_keeps(project, patterns)
    assert {name for name in FILES if not exclude.matches(name)} == wanted


SET_SIGNS = [*r"[]\^!-:/", *"axAz19", "[:digit:]", "[:alpha:]", "[:punct:]", "[:", ":]"]
SET = st.lists(st.sampled_from(SET_SIGNS), max_size=6).map(lambda signs: f"[{''.join(signs)}]")


@settings(max_examples=150, deadline=None)
@given(st.tuples(st.sampled_from(["", "!", "src", "run", "*"]), SET, st.sampled_from("x*/")))
def test_git_says_the_same_of_any_set(project: Path, parts: tuple[str, str, str]) -> None:
    patterns = ["".join(parts)]
    if patterns[0].startswith("!"):
        patterns.insert(0, "*")
    try:
        read_patterns(patterns)
    except ValueError:
        return
    wanted = git_keeps(project, patterns)
    assert {name for name in FILES if not Exclude(patterns).matches(name)} == wanted


def test_our_own_folders_stay_unless_taken_back() -> None:
    ours = (".git/config", ".snakemake/log/a", ".mantik/journal", "sub/.snakemake/x")
    assert all(map(Exclude([]).matches, ours))
    assert not Exclude([]).matches("a")
    assert [name for name in ours if not Exclude(["!.git/"]).matches(name)] == [".git/config"]
    assert not any(map(Exclude([], before=[]).matches, ours))


@pytest.mark.parametrize(
    "name",
    [
        *("alnum", "alpha", "blank", "cntrl", "digit", "graph", "lower"),
        *("print", "punct", "space", "upper", "xdigit", "Digit", ""),
    ],
)
def test_classes_hold_the_characters_that_they_hold_in_git(tmp_path: Path, name: str) -> None:
    for number in set(range(1, 128)) - {ord("/")}:
        (tmp_path / f"x{chr(number)}").write_text("")
    subprocess.run(["git", "init", "-q", "--template="], cwd=tmp_path, check=True)
    for pattern in (f"x[[:{name}:]]", f"x[^[:{name}:]]", f"x[[:{name}:]-~]"):
        wanted = git_keeps(tmp_path, [pattern])
        exclude = Exclude([pattern])
        found = {p.name for p in tmp_path.iterdir() if not exclude.matches(p.name)}
        assert found - {".git"} == wanted
