"""The `snakemake` object at a site answers as Snakemake's own does."""

import ast
import base64
import copy
import pickle
import string
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snakemake.io import IOFile
from snakemake.iocontainers import (
    InputFiles,
    Log,
    Namedlist,
    OutputFiles,
    Params,
    ResourceList,
    Snakemake,
    Wildcards,
)

from snakemake_executor_plugin_mantik.rules.kinds.scripts import RUNNER, NodeTmpdir, encode_object
from snakemake_executor_plugin_mantik.rules.onsite import mantik_script
from tests.support.scripts import named

NAMES = st.one_of(
    st.sampled_from(["index", "sort", "count_", "size_", "ü", "a"]),
    st.text(string.ascii_lowercase, min_size=1, max_size=3).filter(
        lambda name: not hasattr(InputFiles, name)
    ),
)
VALUES = st.one_of(st.text(), st.integers(), st.none(), st.booleans(), st.lists(st.text()))
TEXTS = st.text(max_size=5)


@st.composite
def lists(draw: st.DrawFn, values: st.SearchStrategy[Any] = VALUES) -> list[tuple[Any, ...]]:
    """What a list of Snakemake is made of: (value,), (name, value) or (name, [values])."""
    found = draw(st.lists(st.tuples(values), max_size=4))
    ranged = st.lists(values, max_size=3)
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    entries: list[tuple[Any, ...]] = [*found]
    for name in names:
        at = draw(st.integers(0, len(entries)))
        entries.insert(at, (name, draw(st.one_of(values, ranged)), draw(st.booleans())))
    return entries


def made(kind: type[Namedlist], entries: list[tuple[Any, ...]]) -> Any:
    """Snakemake's list of them."""
    result = kind()
    for entry in entries:
        begin = len(result)
        if len(entry) == 1:
            result.append(entry[0])
            continue
        name, value, whole = entry
        if isinstance(value, list) and not whole:
            result.extend(value)
            result._set_name(name, begin, end=len(result))
        else:
            result.append(value)
            result._set_name(name, begin)
    return result


def at_site(job: Snakemake, place: str = "/site/scripts/a.py") -> mantik_script.Snakemake:
    """The object that a script at a site finds."""
    values = mantik_script._Unpickler(BytesIO(base64.b64decode(encode_object(job)))).load()
    return mantik_script.Snakemake(values, str(Path(place).parent))


def job(**given: Any) -> Snakemake:
    """Snakemake's own object."""
    values = {
        "input_": InputFiles(), "output": OutputFiles(), "params": Params(),
        "wildcards": Wildcards(), "threads": 3, "resources": ResourceList(), "log": Log(),
        "config": {}, "rulename": "rule", "bench_iteration": None, "scriptdir": "/site/scripts",
        **given,
    }  # fmt: skip
    return Snakemake(**values)


def told(ask: Any, of: Any) -> object:
    """An answer, or the kind of its refusal."""
    try:
        answer = ask(of)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return type(error)
    if isinstance(answer, list):
        return list(answer)
    return "something to call" if callable(answer) else answer


def questions(own: Any) -> list[Any]:
    """What scripts ask of a list."""
    names = [*own.keys(), "index", "sort", "absent", "0"]
    asked: list[Any] = [
        list, str, len, bool, hash, repr,
        lambda x: list(x.keys()),
        lambda x: [(key, value) for key, value in x.items()],
        lambda x: x[0], lambda x: x[-1], lambda x: x[1:], lambda x: x[::2], lambda x: x[99],
        lambda x: list(reversed(x)), lambda x: x * 2, lambda x: "a" in x,
        lambda x: x == list(x), lambda x: x.count("a"), lambda x: x.sort(), lambda x: x.index("a"),
        lambda x: dict(x.items()), lambda x: x.copy(), lambda x: isinstance(x, list),
        lambda x: (x.append(1), x[-1])[1],
    ]  # fmt: skip
    for name in names:
        asked += [
            lambda x, name=name: x[name],
            lambda x, name=name: getattr(x, name),
            lambda x, name=name: x.get(name),
            lambda x, name=name: x.get(name, "default"),
            lambda x, name=name: hasattr(x, name),
            lambda x, name=name: x.update({name: 1}),
        ]
    return asked


@settings(deadline=None)
@given(lists(), lists(TEXTS))
def test_lists_answer_alike(values: list[Any], texts: list[Any]) -> None:
    theirs = job(
        params=made(Params, values), input_=made(InputFiles, texts),
        wildcards=made(Wildcards, texts), log=made(Log, texts), output=made(OutputFiles, texts),
        resources=made(ResourceList, values),
    )  # fmt: skip
    ours = at_site(theirs)
    for name in ("params", "input", "wildcards", "log", "output", "resources"):
        for number, ask in enumerate(questions(getattr(theirs, name))):
            expected = told(ask, getattr(theirs, name))
            assert told(ask, getattr(ours, name)) == expected, (name, number)
        assert type(getattr(ours, name)).__name__ == type(getattr(theirs, name)).__name__


@settings(deadline=None)
@given(lists())
def test_copies_are_the_same(values: list[Any]) -> None:
    ours = at_site(job(params=made(Params, values))).params
    for other in (copy.copy(ours), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is type(ours)
        assert (list(other), list(other.items())) == (list(ours), list(ours.items()))
        assert told(lambda x: x.sort(), other) == told(lambda x: x.sort(), ours)


def test_files_and_lists_within_are_plain(tmp_path: Path) -> None:
    inputs = named(InputFiles, IOFile("a.txt"), two=[IOFile("b"), IOFile("c")])
    params = named(Params, first=inputs[0], all=inputs, deep={"x": [inputs.two]})
    ours = at_site(job(params=params, input_=inputs)).params
    assert type(ours.first) is str
    assert [type(each) for each in ours.all] == [str] * 3
    assert ours.all.two == ours.deep["x"][0] == ["b", "c"]


@pytest.mark.parametrize("log", [Log(), named(Log, "a b"), named(Log, "a", out="b")])
@pytest.mark.parametrize("stdout", [True, False])
@pytest.mark.parametrize("stderr", [True, False])
@pytest.mark.parametrize("append", [True, False])
def test_log_for_a_shell(log: Any, stdout: bool, stderr: bool, append: bool) -> None:
    theirs = job(log=log)
    ours = at_site(theirs)
    assert told(lambda x: x.log_fmt_shell(stdout, stderr, append), ours) == told(
        lambda x: x.log_fmt_shell(stdout, stderr, append), theirs
    )


@settings(deadline=None)
@given(st.text(min_size=1), st.dictionaries(NAMES, TEXTS), TEXTS, TEXTS)
def test_links_to_the_report(path: str, args: dict[str, str], child: str, anchor: str) -> None:
    theirs, ours = job(), at_site(job())
    for ask in (
        lambda x: x.report_href(path),
        lambda x: x.report_href(Path(path)).url_args(**args),
        lambda x: x.report_href(path).child_path(child).anchor(anchor).url_args(**args),
        lambda x: x.report_href(path).url_args(**args).anchor(anchor),
    ):
        assert told(lambda x, ask=ask: str(ask(x)), ours) == told(
            lambda x, ask=ask: str(ask(x)), theirs
        )


def test_the_rest_of_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/node/tmp")
    theirs = job(
        config={"a": [1, {"b": None}], "p": Path("x")},
        bench_iteration=2,
        resources=ResourceList(fromdict={"tmpdir": NodeTmpdir("mark"), "mem_mb": 5}),
    )
    ours = at_site(theirs)
    for name in ("threads", "config", "rule", "bench_iteration", "scriptdir"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.resources.tmpdir == ours.resources[0] == "/node/tmp"
    public = {name for name in dir(theirs) if not name.startswith("_")}
    assert public == {name for name in dir(ours) if not name.startswith("_")}
    monkeypatch.delenv("TMPDIR")
    assert at_site(theirs).resources.tmpdir == "/tmp"


def test_lists_have_what_snakemakes_have() -> None:
    for name in ("Namedlist", "OutputFiles", "Wildcards", "Params", "ResourceList", "Log"):
        own = mantik_script._LISTS[name]
        theirs = getattr(sys.modules[Snakemake.__module__], name)
        assert {n for n in dir(theirs) if n[0] != "_"} == {n for n in dir(own) if n[0] != "_"}


def test_it_is_python_3_7_without_anything_else() -> None:
    tree = ast.parse(RUNNER.read_text(), feature_version=(3, 7))
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
    }
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported = {name.partition(".")[0] for name in imported}
    assert imported <= set(sys.stdlib_module_names)
