"""What runs for script: rules: put together here, run by a bash of this machine."""

import importlib.util
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from snakemake import script as made
from snakemake.common.tbdstring import TBDString
from snakemake.io import AnnotatedString
from snakemake.iocontainers import Log, OutputFiles, Params, ResourceList
from snakemake.sourcecache import LocalSourceFile

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.paths import WORK
from snakemake_executor_plugin_mantik.rules.context import RuleContext
from snakemake_executor_plugin_mantik.rules.kinds.script_file import find_script_file
from snakemake_executor_plugin_mantik.rules.kinds.scripts import script_mistake
from snakemake_executor_plugin_mantik.rules.site_job import SiteJob
from tests.support.scripts import OWN_PYTHON, ScriptRule, named


@pytest.fixture(autouse=True)
def workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "work flow"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def site(tmp_path: Path) -> Path:
    directory = tmp_path / "a site ü #%$"
    directory.mkdir()
    return directory


def write(path: str, text: str) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return target


def left(site: Path) -> list[str]:
    return os.listdir(site / WORK)


def test_python_tells_where_it_failed(tmp_path: Path) -> None:
    site = tmp_path / 'it\'s a "site"'
    site.mkdir()
    write("scripts/fails.py", "import json\n\ndef f():\n    raise ValueError('told')\n\nf()\n")
    ran = ScriptRule("scripts/fails.py").run(site)
    place = f"{site}/scripts/fails.py"
    assert ran.returncode == 1
    assert ran.stderr == (
        "Traceback (most recent call last):\n"
        f'  File "{place}", line 6, in <module>\n    f()\n'
        f"  File \"{place}\", line 4, in f\n    raise ValueError('told')\nValueError: told\n"
    )


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import sys\nsys.exit(7)", 7, ""),
        ("def f(x: 1 + 1): ...\nassert f.__annotations__ == {'x': 2}", 0, ""),
        ("exit('a message')", 1, "a message\n"),
        ("x = (", 1, "SyntaxError"),
        ("# coding: latin-1\nprint('ü' == '\\xfc')\nassert 0", 1, "AssertionError"),
        ("import sys\nsys.excepthook = lambda *e: print('own', len(e))\n1/0", 1, ""),
    ],
)
def test_python_ends_as_it_says(site: Path, text: str, code: int, said: str) -> None:
    write("a.py", text)
    ran = ScriptRule("a.py").run(site)
    assert (ran.returncode, said in ran.stderr) == (code, True), ran.stderr
    assert ("own 3" in ran.stdout) == ("excepthook" in text)
    assert ("True" in ran.stdout) == ("latin" in text)
    assert "mantik" not in ran.stderr.replace(str(site), "")


def test_python_finds_what_snakemake_gives(site: Path) -> None:
    write(
        "scripts/a.py",
        "from __future__ import annotations\n"
        "from snakemake.script import snakemake as same\n"
        "from snakemake.logging import logger as l\n"
        "assert same is snakemake and l is logger and sys and pickle\n"
        "import helper\n"
        "assert isinstance(snakemake, Snakemake)\n"
        "print(snakemake.scriptdir, __file__, helper.name)\n"
        "print(snakemake.resources.tmpdir, sys.stdin.read() == '', snakemake.params.numbers)\n",
    )
    write("scripts/helper.py", "name = __name__\n")
    shutil.copytree("scripts", site / "scripts")
    ran = ScriptRule("scripts/a.py").run(site)
    assert ran.stdout.splitlines() == [
        f"{site}/scripts {site}/scripts/a.py helper",
        f"{site}/tmp True 1 2",
    ], ran.stderr


def test_python_gets_tables_and_arrays(site: Path) -> None:
    params = named(
        Params,
        array=np.arange(4),
        frame=pd.DataFrame({"a": [1, 2]}),
        series=pd.Series([1.5, 2]),
        number=np.float64(2.5),
        flagged=AnnotatedString("text"),
    )
    write(
        "a.py",
        "p = snakemake.params\n"
        "print(type(p.array).__name__, p[0].sum(), type(p.frame).__name__, p.frame.a.sum())\n"
        "print(type(p.series).__name__, p.series.sum(), p.number, type(p.flagged).__name__)\n",
    )
    ran = ScriptRule("a.py", given={"params": params}).run(site, OWN_PYTHON)
    expected = ["ndarray", "6", "DataFrame", "3", "Series", "3.5", "2.5", "str"]
    assert ran.stdout.split() == expected, ran.stderr


def test_numbers_of_numpy(site: Path) -> None:
    write("a.py", "print([(type(p).__module__, type(p).__name__, p) for p in snakemake.params])")
    values: list[Any] = [
        np.float64(1.5),
        np.int8(2),
        np.bool_(True),
        np.str_("ü"),
        np.complex128(1j),
    ]
    rule = ScriptRule("a.py", given={"params": named(Params, *values)})
    expected = [(type(p).__module__, type(p).__name__, p) for p in values]
    assert rule.run(site, OWN_PYTHON).stdout == f"{expected}\n"
    write("x/numpy.py", "raise ImportError('none here')")
    plain = [("builtins", type(p.item()).__name__, p.item()) for p in values]
    assert rule.run(site, {"PYTHONPATH": str(Path("x").absolute())}).stdout == f"{plain}\n"


@pytest.mark.parametrize(
    ("values", "printed", "said"),
    [
        ([np.datetime64(1, "s")], "", "mantik: params or config of the rule contain a value of a"),
        ([np.arange(2)], "2\n", "a parameter of the rule is a np.ndarray, but the site's Python"),
    ],
)
def test_python_lacks_numpy(site: Path, values: list[object], printed: str, said: str) -> None:
    write("a.py", "print(snakemake.threads)\nsnakemake.params")
    write("x/numpy.py", "raise ImportError('none here')")
    rule = ScriptRule("a.py", given={"params": named(Params, *values)})
    ran = rule.run(site, {"PYTHONPATH": str(Path("x").absolute())})
    assert (ran.returncode, ran.stdout) == (1, printed)
    assert said in ran.stderr
    assert "none here" in ran.stderr


def test_large_values(site: Path) -> None:
    write("a.py", "print(len(snakemake.config['text']))")
    assert (
        ScriptRule("a.py", given={"config": {"text": "x" * 90_000}}).run(site).stdout == "90000\n"
    )


def test_the_same_job_has_the_same_text() -> None:
    for name in ("a.py", "a.sh", "a.R"):
        write(name, "")
        assert ScriptRule(name).text() == ScriptRule(name).text()


@pytest.mark.parametrize(
    ("name", "path", "needs", "programs"),
    [
        ("a.py", "/nowhere", "Python", "python3 or python"),
        ("a.jl", "/usr/bin:/bin", "Julia", "julia"),
        ("a.ipynb", "/usr/bin:/bin", "Jupyter", "papermill or jupyter-nbconvert"),
    ],
)
def test_no_interpreter(site: Path, name: str, path: str, needs: str, programs: str) -> None:
    write(name, json.dumps(cells("1")))
    rule = ScriptRule(name, notebook=name.endswith("ipynb"))
    ran = rule.run(site, {"PATH": path}, shell=("/bin/bash", "-c"))
    assert ran.returncode == 127
    assert f"mantik: {name} needs {needs}, but on this node there is no {programs}:" in ran.stderr


@pytest.mark.parametrize("shell", [("bash", "-euo", "pipefail", "-c"), ("sh", "-c")])
def test_bash_leaves_nothing_behind(site: Path, shell: tuple[str, ...]) -> None:
    write("a.sh", 'echo "${snakemake_params[text]}|${snakemake_resources[tmpdir]}"; exit 5\n')
    ran = ScriptRule("a.sh").run(site, shell=shell)
    assert ran.returncode == 5
    assert ran.stdout == f'it\'s "quoted" $HOME ü|{site}/tmp\n'
    assert left(site) == []


def stand_in(directory: Path, name: str) -> None:
    """A program that writes down its arguments and the scripts among them, in ./record."""
    directory.mkdir()
    program = directory / name
    program.write_text(
        "#!/bin/bash\n"
        "{ for word; do\n"
        "  case $word in\n"
        '    */script.*/* | */.snakemake/scripts/*) cat -- "$word"; word=SCRIPT ;;\n'
        "  esac\n"
        '  printf "<%s>" "$word"\n'
        "done; } > record\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


LANGUAGES = {
    "a.R": (made.RScript, "Rscript", "print(1)\n"),
    "a.jl": (made.JuliaScript, "julia", "print(1)\n"),
    "a.rs": (
        made.RustScript,
        "rust-script",
        "#!/usr/bin/env rust-script\n//! ```cargo\n//! [dependencies]\n//! ```\nfn main() {}\n",
    ),
    "a.sh": (made.BashScript, "bash", "#!/bin/bash -e\necho\n"),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_same_text_and_command_as_snakemake(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where Julia and Rust say ü in other letters, it is the same path all the same.
    site = tmp_path / "a site #%$"
    site.mkdir()
    kind, program, text = LANGUAGES[name]
    write(f"scripts/{name}", text)
    given: dict[str, Any] = {"config": {"a": [1, "b"], "c": {"d": None}}}
    if name == "a.rs":
        given["params"] = named(Params, text="it's")
    rule = ScriptRule(f"scripts/{name}", given=given)
    stand_in(tmp_path / "bin", program)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    ran = rule.run(site, {"PATH": os.environ["PATH"]}, shell=("/bin/bash", "-c"))
    assert ran.returncode == 0, ran.stderr
    record = (site / "record").read_text()

    # Snakemake itself runs it, where ours ran.
    job = rule.job
    resources = ResourceList(fromdict={**dict(job.resources.items()), "tmpdir": f"{site}/tmp"})
    monkeypatch.chdir(site)
    theirs = kind(
        LocalSourceFile(f"{site}/{rule.path}"), None, text, None, job.input, job.output,
        job.params, job.wildcards, job.threads, resources, job.log, given["config"], "tested",
        *[None] * 6, None, None, True, None, True, None,
    )  # fmt: skip
    theirs.evaluate()
    assert record == Path("record").read_text()
    assert "<SCRIPT>" in record


def test_r_markdown(site: Path, tmp_path: Path) -> None:
    write("a.Rmd", "---\ntitle: it\n---\n\ntext `r 1` ---\n")
    stand_in(tmp_path / "bin", "Rscript")
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    assert ScriptRule("a.Rmd").run(site, environment).returncode == 0
    words, _, script = (site / "record").read_text().partition("---\n")
    assert words.startswith("<--vanilla><-e><a <- commandArgs(TRUE); rmarkdown::render(a[1]")
    assert script.startswith("title: it\n---\n            ```{r, echo=FALSE")
    assert script.endswith(f"\n            ```\n\n\ntext `r 1` ---\n<SCRIPT><{site}/out.txt>")

    write("b.Rmd", "no header")
    with pytest.raises(UserError, match=r"b\.Rmd has no header"):
        ScriptRule("b.Rmd").text()


LATER = f"{TBDString()}/x"


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("a.R", {"config": {"a": object()}}, r"cannot be expressed in R \(Unsupported value"),
        ("a.py", {"params": named(Params, f=lambda: 1)}, r"rule tested.*plain values"),
        ("a.py", {"params": named(Params, x=LATER)}, "parameter x is still to be determined"),
        ("a.py", {"params": named(Params, [LATER])}, "a parameter is still to be determined"),
    ],
)
def test_what_cannot_travel_is_told(name: str, given: dict[str, Any], told: str) -> None:
    write(name, "")
    with pytest.raises(UserError, match=told):
        ScriptRule(name, given=given).text()


@pytest.mark.parametrize(
    ("name", "notebook", "words"),
    [
        ("a.pl", False, "a.pl, whose language Snakemake does not know: it takes .py .R .Rmd"),
        ("a.ipynb", False, "under the wrong directive: notebook: takes .ipynb"),
        ("a.py", True, "under the wrong directive"),
        ("a.py", False, None),
        ("a.Rmd", False, "one output file"),
        ("a.ipynb", True, None),
        ("b.ipynb", True, "b.ipynb, whose language Snakemake does not know: it takes .ipynb of"),
    ],
)
def test_languages(name: str, notebook: bool, words: str | None) -> None:
    language = {"a.ipynb": "python", "b.ipynb": "julia"}.get(name)
    write(name, json.dumps(cells(language=language)) if language else "")
    rule = ScriptRule(name, notebook, {"output": named(OutputFiles, "a", "b")})
    said = script_mistake(SiteJob(rule.job, RuleContext({}, Path.cwd())))
    assert said == words if words is None else words in str(said)


def cells(*project_files: str, language: str | None = "python") -> dict[str, Any]:
    return {
        "cells": [
            {
                "cell_type": "code", "id": f"c{number}", "execution_count": None, "metadata": {},
                "outputs": [], "source": source,
            }
            for number, source in enumerate(project_files)
        ],
        "metadata": {
            "language_info": {"name": language},
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("import snakemake", ["snakemake"]),
        ("def f():\n  from snakemake.shell import shell", ["snakemake.shell.shell"]),
        ("from snakemake.utils import a, b", ["snakemake.utils.a", "snakemake.utils.b"]),
        ("from snakemake import shell", ["snakemake.shell"]),
        ("import snakemake.script", ["snakemake.script"]),
        ("from snakemake.script import snakemake", []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n import snakemake.io", []),
        ("import typing\nif typing.TYPE_CHECKING: pass\nelse: import snakemake", ["snakemake"]),
        ("import snakemake_wrapper_utils, json", []),
        ("x = (", []),
        ("import one", ["snakemake.io.expand"]),
        ("from package.deep import x", ["snakemake.io.expand"]),
    ],
)
@pytest.mark.parametrize("notebook", [False, True])
def test_what_is_only_to_be_had_of_snakemake(
    text: str, imported: list[str], notebook: bool
) -> None:
    write("s/one.py", "import two")
    write("s/two.py", "import one\nfrom snakemake.io import expand")
    write("s/package/__init__.py", "")
    write("s/package/deep.py", "from . import other")
    write("s/package/other.py", "import two")
    write("s/a.py", text)
    write("s/a.ipynb", json.dumps(cells("%matplotlib inline\n" + text)))
    rule = ScriptRule("s/a.ipynb" if notebook else "s/a.py", notebook)
    assert find_script_file(rule.job).needs_snakemake() == imported


def test_scripts_from_elsewhere(site: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    for name, text in {
        "a.py": "import lib.part, one\nprint(lib.part.x, one.y, __file__, snakemake.scriptdir)\n",
        "one.py": "y = 2",
        "lib/__init__.py": "",
        "lib/part.py": "x = 1",
        "other/secret.py": "",
        ".hidden": "",
        "large": "x" * (1 << 21),
        "a.sh": '. "${snakemake[scriptdir]}/lib.sh"; echo "${snakemake[scriptdir]}"',
        "lib.sh": "echo lib",
    }.items():
        write(str(elsewhere / name), text)
    rule = ScriptRule(str(elsewhere / "a.py"))
    ran = rule.run(site)
    place = ran.stdout.split("2 ")[1].partition("/a.py")[0]
    assert ran.stdout == f"1 2 {place}/a.py {place}\n", ran.stderr
    assert place.startswith(f"{site}/.mantik/files/")
    assert place.endswith("/else where")
    sent = sorted(upload.path.rpartition("else where/")[2] for upload in rule.text()[1][2:])
    assert sent == ["a.py", "a.sh", "lib.sh", "lib/__init__.py", "lib/part.py", "one.py"]
    assert str(tmp_path) not in rule.text()[0]

    ran = ScriptRule(str(elsewhere / "a.sh")).run(site)
    assert ran.stdout == f"lib\n{place}\n", ran.stderr

    for number in range(5):
        write(str(elsewhere / f"{number}.bin"), "x" * (1 << 20))
    with pytest.raises(UserError, match=r"else where: .* more than 4.0 MiB.*directory of its own"):
        rule.text()


def test_the_cache_of_a_run_has_the_same_place_in_all_runs(tmp_path: Path) -> None:
    texts = []
    for run in ("one", "two"):
        path = tmp_path / f"snakemake-runtime-cache/{run}/file/x/a.sh"
        write(str(path), "echo")
        texts.append(ScriptRule(str(path)).text()[0])
    assert texts[0] == texts[1]


def test_files_that_snakemake_cached(site: Path) -> None:
    source = LocalSourceFile(str(write("a b.txt", "beside").absolute()))
    write("a.py", "p = snakemake.params\nprint(p.path, p.deep[0][1], open(p.path).read(), sep='|')")
    rule = ScriptRule("a.py")
    cached = rule.job.rule.workflow.sourcecache.get_path(source)
    rule.given["params"] = named(Params, path=cached, deep=(("", cached),))
    ran = rule.run(site)
    first, second, text = ran.stdout.strip().split("|")
    assert (first, text) == (second, "beside"), ran.stderr
    assert first.startswith(f"{site}/.mantik/files/")
    assert first.endswith("/a b.txt")


def test_notebook(site: Path) -> None:
    # nbconvert comes with Jupyter, papermill is one more program that a site may have.
    assert importlib.util.find_spec("nbconvert") is not None
    source = cells(
        "old preamble",
        "from helper import said",
        "open(snakemake.output[0], 'w').write(f'{said} {snakemake.params.text} {os.getcwd()}')",
        "print(snakemake.scriptdir, logger.name, Snakemake.__name__, sys.stdin is None, pickle)",
    )
    source["cells"][0]["metadata"]["tags"] = ["snakemake-job-properties"]
    write("note books/a.ipynb", json.dumps(source))
    write("note books/helper.py", "said = 'helped'")
    shutil.copytree("note books", site / "note books")
    log = named(Log, notebook="logs/ü executed.ipynb")
    (site / "logs").mkdir()
    rule = ScriptRule("note books/a.ipynb", notebook=True, given={"log": log})
    ran = rule.run(site, OWN_PYTHON)
    assert ran.returncode == 0, ran.stderr
    assert (site / "out.txt").read_text() == f'helped it\'s "quoted" $HOME ü {site}'
    executed = json.loads((site / "logs/ü executed.ipynb").read_text())["cells"]
    assert [cell["metadata"].get("tags") for cell in executed] == [
        ["snakemake-job-properties"], None, None, None,
    ]  # fmt: skip
    assert executed[3]["outputs"][0]["text"][0].startswith(f"{site}/note books snakemake.logging")
    assert left(site) == []
    assert rule.text() == rule.text()

    source["cells"][1]["source"] = "1 / 0"
    write("b.ipynb", json.dumps(source))
    ran = ScriptRule("b.ipynb", notebook=True).run(site, OWN_PYTHON)
    assert ran.returncode == 1
    assert "ZeroDivisionError" in ran.stderr


def first_json(text: str) -> Any:
    """The value that the first brace begins."""
    return json.JSONDecoder().raw_decode(text, text.index("{"))[0]


def test_papermill_runs_a_notebook_of_r_where_it_is(site: Path, tmp_path: Path) -> None:
    write("n/a.ipynb", json.dumps(cells("1", language="R")))
    stand_in(tmp_path / "bin", "papermill")
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    log = {"log": named(Log, notebook="a b.ipynb")}
    assert ScriptRule("n/a.ipynb", True, log).run(site, environment).returncode == 0
    record = (site / "record").read_text()
    preamble, own = first_json(record)["cells"]
    assert own["id"] == "c0"
    assert record.startswith("<--log-level><ERROR>")
    assert record.endswith(f"<SCRIPT><{site}/a b.ipynb>")
    assert f"scriptdir = '{site}/n'" in "".join(preamble["source"])
    assert preamble["source"][-1].endswith(f"setwd('{site}')\n")
