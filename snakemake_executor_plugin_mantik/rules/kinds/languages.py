"""Write the preamble that gives a script or notebook its job's data, in each language.

Snakemake writes a preamble in the script's language. Writing it on this machine means that a site
needs the interpreter only. Only Python's preamble, and that of its dialects, needs Snakemake where
it runs; `python_object` replaces it. Values that only the node knows are marks in the text, which
the job's shell replaces.
"""

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

from snakemake import script as made
from snakemake.iocontainers import Snakemake
from snakemake.notebook import RJupyterNotebook

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.jobs.paths import file_path

from .python_object import RUNNER, encode_object
from .script_file import ScriptFile

# Each contains a blank, so that it is quoted in any language.
TMPDIR, HOME_MARK, CWD = "@mantik tmpdir@", "@mantik home@", "@mantik cwd@"
_MARKS = {TMPDIR: "${TMPDIR:-/tmp}", HOME_MARK: "$mantik_home", CWD: "$PWD"}
"""Marks for values that only the node knows, and the shell's expression for each."""

_PREAMBLE = "@mantik preamble@"
"""A preamble that is different from any real one."""


class _Notebook(RJupyterNotebook):  # type: ignore[misc] # Snakemake's classes are not typed
    """A notebook whose first cell is the preamble, with a fixed id. Snakemake's id is random."""

    def insert_preamble_cell(self, preamble: str, notebook: Any) -> None:
        super().insert_preamble_cell(preamble, notebook)
        if "id" in notebook["cells"][0]:
            notebook["cells"][0]["id"] = "snakemake-job-properties"


@dataclass(frozen=True)
class ScriptContext:
    """A script, and the data of its job that it gets.

    Attributes:
        file: the script.
        place: the script's own path as the script sees it: absolute with marks, or a URL.
        arguments: arguments of Snakemake's classes for scripts.
        snakemake: the object that Snakemake would pass to the script.
        uploads: files of `workflow.source_path()` and files beside a Snakefile whose paths are in
            the data.
    """

    file: ScriptFile
    place: str
    arguments: dict[str, Any]
    snakemake: Snakemake
    uploads: tuple[Upload, ...]


def _of(language: type[made.ScriptBase]) -> Callable[[ScriptContext], str]:
    """Return a function that renders Snakemake's own preamble of a language."""
    return lambda told: str(language(**told.arguments).get_preamble())


def _python(more: str) -> Callable[[ScriptContext], str]:
    """Return a function that renders our preamble for Python and its dialects.

    `more` is code that follows it, in which `{place}` stands for the script's own path.
    """

    def preamble(told: ScriptContext) -> str:
        modules = f"{HOME_MARK}/{os.path.dirname(runner_upload().path)}"
        search = f"{HOME_MARK}/{told.file.at_site}"
        return (
            f"import sys; sys.path.insert(0, {modules!r});"
            " from mantik_script import names; sys.path.pop(0);"
            f" globals().update(names({encode_object(told.snakemake)!r}, {told.place!r},"
            f" {search!r}));"
            f" {more.format(place=told.place)}\n"
        )

    return preamble


@dataclass(frozen=True)
class Language:
    """How to prepare and run scripts in one language.

    Attributes:
        name: its name for users.
        made_by: Snakemake's class.
        preamble: renders the code that gives the script its job's data.
        programs: interpreters, one of which a node must have.
        command: runs `$mantik_script`; for R Markdown the output follows as an argument. Empty for
            a notebook.
    """

    name: str
    made_by: type[made.ScriptBase]
    preamble: Callable[[ScriptContext], str]
    programs: tuple[str, ...]
    command: str = ""


_JUPYTER = ("papermill", "jupyter-nbconvert")
_FILE = "__real_file__ = __file__; __file__ = {place!r};"
LANGUAGES = {
    "r": Language(
        "R",
        made.RScript,
        _of(made.RScript),
        ("Rscript",),
        'Rscript --vanilla "$mantik_script"',
    ),
    "rmarkdown": Language(
        "R Markdown",
        made.RMarkdown,
        _of(made.RMarkdown),
        ("Rscript",),
        "Rscript --vanilla -e 'a <- commandArgs(TRUE); rmarkdown::render(a[1], output_file = a[2],"
        ' quiet = TRUE, knit_root_dir = getwd(), params = list(rmd = a[1]))\' "$mantik_script"',
    ),
    "julia": Language(
        "Julia", made.JuliaScript, _of(made.JuliaScript), ("julia",), 'julia "$mantik_script"'
    ),
    "rust": Language(
        "Rust",
        made.RustScript,
        _of(made.RustScript),
        ("rust-script",),
        f'rust-script -d {made.RustScript.default_dependencies()} "$mantik_script" --'
        f" --features {made.RustScript.default_features()}",
    ),
    "bash": Language(
        "bash", made.BashScript, _of(made.BashScript), ("bash",), 'bash "$mantik_script"'
    ),
    "xonsh": Language(
        "xonsh",
        made.XonshScript,
        _python(_FILE),
        ("xonsh",),
        'xonsh -DRAISE_SUBPROC_ERROR=true -DXONSH_SHOW_TRACEBACK=true "$mantik_script"',
    ),
    "hy": Language("Hy", made.HyScript, _python(_FILE), ("hy",), 'hy "$mantik_script"'),
    "jupyter_python": Language(
        "Jupyter",
        _Notebook,
        _python(f"import os; os.chdir({CWD!r})"),
        _JUPYTER,
    ),
    "jupyter_r": Language(
        "Jupyter",
        _Notebook,
        lambda told: f"{_of(made.RScript)(told)}setwd({CWD!r})\n",
        _JUPYTER,
    ),
}


def write_preamble(language: Language, told: ScriptContext) -> tuple[str, str]:
    """Return the script with its preamble, split into the job's part and the file's part.

    Raises:
        UserError: the job's data cannot be expressed in the script's language, or an R Markdown
            file has no header.
    """

    def whole(preamble: str) -> str:
        buffer = BytesIO()
        language.made_by(**told.arguments).write_script(preamble, buffer)
        return buffer.getvalue().decode()

    try:
        text = whole(language.preamble(told))
        other = whole(_PREAMBLE)
    except StopIteration as error:
        # Snakemake writes the preamble behind the header, after the second line of `---`.
        raise UserError(
            f"{told.file.name} has no header",
            where=f"rule {told.snakemake.rule}",
            do="Add a header between two lines of --- at the beginning of the R Markdown file",
        ) from error
    except (TypeError, ValueError) as error:
        raise UserError(
            f"params or config contain a value that cannot be expressed in {language.name}"
            f" ({error})",
            where=f"rule {told.snakemake.rule}",
            do="Use plain values: text, numbers, lists, mappings",
        ) from error
    ends = zip(reversed(text), reversed(other), strict=False)
    same = next(number for number, (one, another) in enumerate(ends) if one != another)
    return text[: len(text) - same], text[len(text) - same :]


def quote_for_job(text: str) -> str:
    """Quote a text for the job's shell, and replace marks by the shell's expressions."""
    quoted = shlex.quote(text)
    for mark, value in _MARKS.items():
        quoted = quoted.replace(mark, f"'\"{value}\"'")
    return quoted


def make_upload(text: str, name: str) -> Upload:
    """Return the upload of a file `name` with the content `text`."""
    content = text.encode()
    return Upload(file_path(content, name), content=content)


@cache
def runner_upload() -> Upload:
    """Return the upload of `mantik_script.py`, which scripts in Python and its dialects need."""
    return make_upload(RUNNER.read_text(), RUNNER.name)
