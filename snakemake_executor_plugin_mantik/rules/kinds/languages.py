"""Write the preamble that gives a script or notebook its job's data, in each language.

Snakemake writes a preamble in the script's language. Writing it on this machine means that a site
needs the interpreter only. Only Python's preamble, and that of its dialects, needs Snakemake where
it runs; `encode_object` replaces it. Values that only the node knows are marks in the text, which
the job's shell replaces.

Snakemake pickles its own object, which needs Snakemake to load. Here only its values are pickled,
and `onsite/mantik_script.py` builds an equivalent object from them. As in Snakemake, tables and
arrays among the parameters are converted to plain values, since a site may have other versions of
their packages. So are NumPy's numbers (from rows of tables), which stay plain at a site without
NumPy. Other values are pickled as they are.
"""

import base64
import os
import pickle
import re
import shlex
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from snakemake import script as made
from snakemake.iocontainers import Namedlist, Snakemake
from snakemake.notebook import RJupyterNotebook

from ...common.errors import UserError
from ...engine.request import Upload
from ...jobs.paths import file_path
from ..onsite import mantik_script
from .script_file import ScriptFile
from .shell_command import NODE_TMPDIR

_MAYBE_NEWER: Final = re.compile(
    r"\s*type\s+\w+.*=|\s*(async\s+)?(def|class)\s+\w+\s*\[|.*\b[ft]r?[\"']|.*\brt[\"']|"
    r"\s*(except|match|case|lazy)\b",
    re.IGNORECASE,
)
"""Lines that a newer Python may accept: the site's Python may be newer than this one."""


@lru_cache(maxsize=1000)
def syntax_mistake(text: str) -> str | None:
    """Return line and message of a syntax error in a Python script; None if there is none.

    An error that a newer Python may not find is left to the job.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the job's own Python repeats them
            compile(text, "script", "exec", dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").rstrip()
        if error.lineno is None or _MAYBE_NEWER.match(line) or "f-string" in error.msg:
            return None
        return f"line {error.lineno}: {error.msg} ({line.strip()})"
    except (ValueError, RecursionError, MemoryError):  # too deep for this Python
        return None
    return None


RUNNER = Path(mantik_script.__file__)
"""The file that builds the object from the data."""

_GIVEN = (
    "input", "output", "wildcards", "threads", "resources", "log", "config", "rule",
    "bench_iteration", "_params_store", "_params_types",
)  # fmt: skip
"""Attributes of the object; of tables and arrays it has plain values, and notes their types."""

_NUMBERS = (bool, int, float, complex, str)
_PROTOCOL = 4
"""The latest protocol of Python 3.7."""


class NodeTmpdir(str):
    """Placeholder among the resources for the node's temporary directory."""

    __slots__ = ()


class _Pickler(pickle.Pickler):
    """Pickles Snakemake's lists and strings so that loading them needs no module of Snakemake.

    `mantik_script._Unpickler` loads them.
    """

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        if isinstance(obj, NodeTmpdir):
            return ("tmpdir",)
        if isinstance(obj, Namedlist):
            return type(obj).__name__, list(obj), list(obj._get_names())
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(obj, numpy.generic):
            plain = obj.item()
            if type(plain) in _NUMBERS:
                return "numpy", obj.dtype.str, plain
        if isinstance(obj, str) and type(obj).__module__.startswith("snakemake"):
            return "str", str(obj)
        return None


def encode_object(job: Snakemake) -> str:
    """Encode a job's data as base64, which needs no quoting in a shell.

    `job` is the object that Snakemake would pass to a script.

    Raises:
        UserError: a value cannot be pickled.
    """
    values = {name: getattr(job, name) for name in _GIVEN}
    buffer = BytesIO()
    try:
        _Pickler(buffer, _PROTOCOL).dump(values)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(
            f"params or config contain a value that cannot be passed to a script ({error})",
            where=f"rule {job.rule}",
            do="Use plain values: text, numbers, lists, mappings",
        ) from error
    return base64.b64encode(buffer.getvalue()).decode()


HOME_MARK, CWD = "@mantik home@", "@mantik cwd@"
_MARKS = {NODE_TMPDIR: "${TMPDIR:-/tmp}", HOME_MARK: "$mantik_home", CWD: "$PWD"}
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
        command: runs `$mantik_script`; for R Markdown the output follows as an argument. Empty for
            a notebook.
    """

    name: str
    made_by: type[made.ScriptBase]
    preamble: Callable[[ScriptContext], str]
    command: str = ""

    @property
    def programs(self) -> tuple[str, ...]:
        """Interpreters, one of which a node must have."""
        return (self.command.split()[0],) if self.command else ("papermill", "jupyter-nbconvert")


_FILE = "__real_file__ = __file__; __file__ = {place!r};"
LANGUAGES = {
    "r": Language("R", made.RScript, _of(made.RScript), 'Rscript --vanilla "$mantik_script"'),
    "rmarkdown": Language(
        "R Markdown", made.RMarkdown, _of(made.RMarkdown),
        "Rscript --vanilla -e 'a <- commandArgs(TRUE); rmarkdown::render(a[1], output_file = a[2],"
        ' quiet = TRUE, knit_root_dir = getwd(), params = list(rmd = a[1]))\' "$mantik_script"',
    ),
    "julia": Language("Julia", made.JuliaScript, _of(made.JuliaScript), 'julia "$mantik_script"'),
    "rust": Language(
        "Rust", made.RustScript, _of(made.RustScript),
        f'rust-script -d {made.RustScript.default_dependencies()} "$mantik_script" --'
        f" --features {made.RustScript.default_features()}",
    ),
    "bash": Language("bash", made.BashScript, _of(made.BashScript), 'bash "$mantik_script"'),
    "xonsh": Language(
        "xonsh", made.XonshScript, _python(_FILE),
        'xonsh -DRAISE_SUBPROC_ERROR=true -DXONSH_SHOW_TRACEBACK=true "$mantik_script"',
    ),
    "hy": Language("Hy", made.HyScript, _python(_FILE), 'hy "$mantik_script"'),
    "jupyter_python": Language("Jupyter", _Notebook, _python(f"import os; os.chdir({CWD!r})")),
    "jupyter_r": Language(
        "Jupyter", _Notebook, lambda told: f"{_of(made.RScript)(told)}setwd({CWD!r})\n"
    ),
}  # fmt: skip


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
