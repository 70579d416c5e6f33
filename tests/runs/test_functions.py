"""The function that `smk-mantik call` names: mistakes are found before anything is submitted."""

import math
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.runs.functions import (
    Function,
    describe_call,
    find_function,
    parse_argument,
)

TRAIN = """
import helper, package.part
from numpy import mean as average
try:
    from fast import quick
except ImportError:
    def quick(x): ...
table = {}
def main(lr, layers=(), *, seed, name="x"): ...
def open_to_all(**options): ...
@decorate
def wrapped(): ...
def by_position(x, /): ...
class Trainer:
    def fit(self): ...
    @classmethod
    def start(cls, x): ...
class Heir(Trainer): ...
async def later(x): ...
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "helper.py").write_text("import deeper\n")
    (tmp_path / "deeper.py").touch()
    (tmp_path / "other.py").touch()
    (tmp_path / "package").mkdir()
    for name in ("__init__", "part", "beside"):
        (tmp_path / f"package/{name}.py").write_text("def f(): ...\n")
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", 0.1),
        ("1", 1),
        ("true", True),
        ("null", None),
        ('[1, "a"]', [1, "a"]),
        ('"1"', "1"),
        ("adam", "adam"),
        ("data/x.csv", "data/x.csv"),
        ("NaN", "NaN"),
        ("[1e999]", "[1e999]"),
        ("", ""),
    ],
)
def test_an_argument_is_json_or_a_text(text: str, value: Any) -> None:
    parsed = parse_argument(text)
    assert (parsed, type(parsed)) == (value, type(value))
    assert not isinstance(parsed, float) or math.isfinite(parsed)


def test_all_modules_that_it_imports_are_found() -> None:
    found = find_function("train:main", ["lr", "seed"], installed=False)
    assert found.files == (
        "deeper.py", "helper.py", "package/__init__.py", "package/beside.py", "package/part.py",
        "train.py",
    )  # fmt: skip
    inner = find_function("package.part:f", [], installed=False)
    assert (inner.module, inner.name) == ("package.part", "f")
    assert "package/part.py" in inner.files


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("train:average", ["a"]),
        ("train:quick", ["x"]),
        ("train:table.get", ["key"]),
        ("train:open_to_all", ["anything"]),
        ("train:wrapped", ["anything"]),
        ("train:Trainer.start", ["x"]),
        ("train:Trainer.mro", []),
        ("train:Heir.fit", []),
    ],
)
def test_what_cannot_be_known_is_not_refused(text: str, arguments: list[str]) -> None:
    assert str(find_function(text, arguments, installed=False)) == text


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("train.py", [], "names no function"),
        ("train:", [], "names no function"),
        ("train:main()", [], "names no function"),
        ("trian:main", [], "there is no module 'trian' in this directory"),
        ("train:mian", [], "no function 'mian' (did you mean main?)"),
        ("broken:f", [], "broken.py, line 2: it is not valid Python"),
        ("train:main", ["lr"], "its argument 'seed' is missing"),
        ("train:main", ["lr", "sede"], "'sede' is no argument of it (did you mean seed?)"),
        ("train:Trainer.fit", [], "its argument 'self' is missing"),
        ("train:Trainer.fti", [], "the class Trainer has no 'fti' (did you mean fit?)"),
        ("train:later", ["x"], "later() is a coroutine"),
        ("train:by_position", [], "takes arguments by position"),
    ],
)
def test_mistakes(text: str, arguments: list[str], expected: str) -> None:
    with pytest.raises(UserError) as raised:
        find_function(text, arguments, installed=False)
    assert expected in str(raised.value)


def test_an_installed_module_is_taken_as_it_is() -> None:
    assert find_function("torch.hub:load", ["x"], installed=True) == Function("torch.hub", "load")


def test_a_call_is_shown_as_python_has_it() -> None:
    shown = describe_call(Function("train", "main"), {"lr": 0.1, "name": "a"})
    assert shown == "train:main(lr=0.1, name='a')"
