"""Scripts and notebooks in each language, told of their job, and what runs them.

For each language Snakemake writes a preamble that tells the script of its job. It is a text, so it
is made here, and the site needs the interpreter alone. Only Python's needs Snakemake where it runs;
`pythonobject` takes its place. What only the node knows is a mark in the text, which the job's
shell replaces.
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
from snakemake_executor_plugin_mantik.rules.kinds.python_object import RUNNER, encode_object
from snakemake_executor_plugin_mantik.rules.kinds.script_file import ScriptFile

# With a blank each, so that there are quotes around them in any language.
TMPDIR, HOME_MARK, CWD = "@mantik tmpdir@", "@mantik home@", "@mantik cwd@"
_MARKS = {TMPDIR: "${TMPDIR:-/tmp}", HOME_MARK: "$mantik_home", CWD: "$PWD"}
"""What stands in a text for what only the node knows, and how the shell there says it."""

_PREAMBLE = "@mantik preamble@"
"""A preamble unlike any other."""


class _Notebook(RJupyterNotebook):  # type: ignore[misc] # Snakemake's classes are not typed
    """A notebook whose first cell is the preamble; its id is no random one, as Snakemake's is."""

    def insert_preamble_cell(self, preamble: str, notebook: Any) -> None:
        super().insert_preamble_cell(preamble, notebook)
        if "id" in notebook["cells"][0]:
            notebook["cells"][0]["id"] = "snakemake-job-properties"


@dataclass(frozen=True)
class ScriptContext:
    """What a script is told of its job.

    Attributes:
        file: the script.
        place: what it takes for its own file: an absolute path with marks, or a URL.
        arguments: of Snakemake's classes for scripts.
        snakemake: the object that Snakemake would give it.
        uploads: the files that lie beside a Snakefile and that it is told of.
    """

    file: ScriptFile
    place: str
    arguments: dict[str, Any]
    snakemake: Snakemake
    uploads: tuple[Upload, ...]


def _of(language: type[made.ScriptBase]) -> Callable[[ScriptContext], str]:
    """The preamble that Snakemake makes."""
    return lambda told: str(language(**told.arguments).get_preamble())


def _python(more: str) -> Callable[[ScriptContext], str]:
    """Our own for Python and its kin; `more` is code that follows."""

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
    """How scripts in one language begin and run.

    Attributes:
        name: as users call it.
        made_by: Snakemake's class.
        preamble: what tells the script of its job.
        programs: one of these has to be there.
        command: runs `$mantik_script`, with the output as its argument; empty for a notebook.
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
    """The script as it runs, in two parts: the first is the job's own, the rest the file's.

    Raises:
        UserError: what it is told cannot be said in its language, or it has no place for it.
    """

    def whole(preamble: str) -> str:
        buffer = BytesIO()
        language.made_by(**told.arguments).write_script(preamble, buffer)
        return buffer.getvalue().decode()

    try:
        text = whole(language.preamble(told))
        other = whole(_PREAMBLE)
    except StopIteration as error:
        # Snakemake writes behind the header, the second line of `---`.
        raise UserError(
            f"{told.file.name} has no header",
            where=f"rule {told.snakemake.rule}",
            do="Begin the R Markdown with one, between two lines of ---",
        ) from error
    except (TypeError, ValueError) as error:
        raise UserError(
            f"params or config hold a value that cannot be said in {language.name} ({error})",
            where=f"rule {told.snakemake.rule}",
            do="Give the rule plain values: text, numbers, lists, mappings",
        ) from error
    ends = zip(reversed(text), reversed(other), strict=False)
    same = next(number for number, (one, another) in enumerate(ends) if one != another)
    return text[: len(text) - same], text[len(text) - same :]


def quote_for_job(text: str) -> str:
    """A text as the job's shell gets it: quoted, marks replaced by what the node says."""
    quoted = shlex.quote(text)
    for mark, value in _MARKS.items():
        quoted = quoted.replace(mark, f"'\"{value}\"'")
    return quoted


def make_upload(text: str, name: str) -> Upload:
    """A file of this text."""
    content = text.encode()
    return Upload(file_path(content, name), content=content)


@cache
def runner_upload() -> Upload:
    """The module that scripts of Python and its kin need."""
    return make_upload(RUNNER.read_text(), RUNNER.name)
