"""Render the command of `script:` and `notebook:` rules for a site without Snakemake.

A preamble gives a script or notebook its job's data. Snakemake writes it in the script's language.
Writing it on this machine means that a site needs the interpreter only. Only Python's preamble, and
that of its dialects, needs Snakemake where it runs; `encode_object` replaces it. Values that only
the node knows are marks in the text, which the job's shell replaces.

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
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from snakemake import script as made
from snakemake.iocontainers import Namedlist, ResourceList, Snakemake
from snakemake.notebook import RJupyterNotebook
from snakemake.sourcecache import LocalSourceFile
from snakemake_interface_common.exceptions import WorkflowError

from ...common.errors import UserError, one_line
from ...config.model import BackendConfig
from ...engine.request import Upload
from ...jobs.paths import WORK, file_path, script_path
from .. import Job
from ..onsite import mantik_script
from ..paths.job_paths import UNKNOWN, JobPaths
from ..paths.path_rewriting import rewrite_paths, upload_named_files
from ..site_job import SiteJob
from .script_file import ScriptFile
from .shell_command import NODE_TMPDIR

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

_HOME_MARK, _CWD = "@mantik home@", "@mantik cwd@"
_MARKS = {NODE_TMPDIR: "${TMPDIR:-/tmp}", _HOME_MARK: "$mantik_home", _CWD: "$PWD"}
"""Marks for values that only the node knows, and the shell's expression for each."""

_PREAMBLE = "@mantik preamble@"
"""A preamble that is different from any real one."""

_MAYBE_NEWER: Final = re.compile(
    r"\s*type\s+\w+.*=|\s*(async\s+)?(def|class)\s+\w+\s*\[|.*\b[ft]r?[\"']|.*\brt[\"']|"
    r"\s*(except|match|case|lazy)\b",
    re.IGNORECASE,
)
"""Lines that a newer Python may accept: the site's Python may be newer than this one."""

# Bash or any POSIX shell runs these texts.
_PYTHON_SCRIPT = """\
(
  mantik_home=${{MANTIK_WORKSPACE:-$PWD}}
  mantik_python=$(command -v python3 || command -v python) || {{
    printf 'mantik: %s\\n' {lacking} >&2
    exit 127
  }}
  printf %s {data} |
    "$mantik_python" "$mantik_home"/{runner} "$mantik_home"/{source} {place} {search}
)"""
"""Runs a Python script. Its job's data comes through a pipe and may have any size."""

_SCRIPT = """\
(
  mantik_home=${{MANTIK_WORKSPACE:-$PWD}}
  {found} || {{
    printf 'mantik: %s\\n' {lacking} >&2
    exit 127
  }}
  mantik_own=$(mktemp -d "$mantik_home"/{work}/script.XXXXXX) || exit
  trap 'rm -rf -- "$mantik_own"' EXIT
  mantik_script=$mantik_own/{name}
  {{ printf %s {head} && cat -- "$mantik_home"/{rest}; }} > "$mantik_script" || exit
  {start}
)"""
"""Runs a script or notebook whose preamble describes its job. Joins the preamble and the rest on
the node: each job has its own preamble; all jobs share the rest, in the workspace."""

_NOTEBOOK = """\
export IPYTHONDIR="$mantik_own"
  if command -v papermill > /dev/null; then
    papermill --log-level ERROR "$mantik_script" {executed}
  else
    jupyter-nbconvert --log-level ERROR --execute --to notebook --ExecutePreprocessor.timeout=-1 \\
      --output {converted} "$mantik_script"
  fi"""


class NodeTmpdir(str):
    """Placeholder among the resources for the node's temporary directory."""

    __slots__ = ()


@dataclass(frozen=True)
class _ScriptContext:
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


def script_mistake(at: SiteJob) -> str | None:
    """Return why a script or notebook cannot run, as words that follow "rule NAME", or None."""
    try:
        file = at.script
    except (WorkflowError, OSError) as error:
        why = f"cannot be read: {one_line(str(error))}"
        if isinstance(error, FileNotFoundError):
            why = f"does not exist: {error.filename}"
        return f"has {_written(at.job)}, which {why}"
    if file is None:
        return None
    if at.rule.is_notebook and at.job.dag.is_edit_notebook_job(at.job):
        return "has a notebook to edit (--edit-notebook), which needs --executor local"
    if (mistake := _language_mistake(at.job, file)) is not None:
        return mistake
    if file.language == "python" and (mistake := _syntax_mistake(file.text)) is not None:
        return f"has {_written(at.job)}, which is no valid Python: {mistake}"
    return None


def script_command(
    job: Job, file: ScriptFile, places: JobPaths, iteration: int | None, config: BackendConfig
) -> tuple[str, tuple[Upload, ...]]:
    """Return the text that runs a script or notebook, and the files that it needs.

    `script_mistake` has to return None for the job. `config` limits the files beside a script
    outside the working directory.

    Raises:
        UserError: a value cannot be passed to the script, or a limit is exceeded.
    """
    context = _script_context(job, file, places, iteration, config)
    beside = [*context.uploads, *(Upload(path, local) for path, local in file.beside(config))]
    if file.language == "python":
        content = file.text.encode()
        source = Upload(script_path(content, file.name), content=content)
        text = _PYTHON_SCRIPT.format(
            runner=shlex.quote(_runner_upload().path),
            source=shlex.quote(source.path),
            place=_quote_for_job(context.place),
            search=_quote_for_job(f"{_HOME_MARK}/{file.at_site}"),
            data=encode_object(context.snakemake),
            lacking=_lacking(file, "Python", ("python3", "python")),
        )
        return text, (_runner_upload(), source, *beside)
    language = _LANGUAGES[str(file.language)]
    head, rest = _write_preamble(language, context)
    source = _make_upload(rest, file.name)
    if language.command:
        start = language.command
        if file.language == "rmarkdown":
            start += f" {_quote_for_job(_absolute(context.snakemake.output[0]))}"
    else:
        log = context.snakemake.log.get("notebook")
        shown = _quote_for_job(_absolute(log)) if log is not None else ""
        start = _NOTEBOOK.format(
            executed=shown or '"$mantik_script"', converted=shown or '"$mantik_own"/executed.ipynb'
        )
    text = _SCRIPT.format(
        found=" || ".join(f"command -v {program} > /dev/null" for program in language.programs),
        lacking=_lacking(file, language.name, language.programs),
        work=WORK,
        name=shlex.quote(file.name),
        head=_quote_for_job(head),
        rest=shlex.quote(source.path),
        start=start,
    )
    modules = [_runner_upload()] if os.path.dirname(_runner_upload().path) in head else []
    return text, (*modules, source, *beside)


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


def _language_mistake(job: Job, file: ScriptFile) -> str | None:
    if file.language != "python" and file.language not in _LANGUAGES:
        known = (
            ".ipynb of Python or R" if job.rule.is_notebook else ".py .R .Rmd .jl .rs .sh .xsh .hy"
        )
        return f"has {file.name}, whose language Snakemake does not know: it takes {known}"
    if file.language.startswith("jupyter") is not job.rule.is_notebook:
        return f"has {file.name} under the wrong directive: notebook: takes .ipynb, script: others"
    if file.language == "rmarkdown" and len(job.output) != 1:
        return f"has {file.name}: R Markdown makes exactly one output file"
    return None


@lru_cache(maxsize=1000)
def _syntax_mistake(text: str) -> str | None:
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


def _written(job: Job) -> str:
    """Return the directive and path of a job's script, as the Snakefile has them."""
    rule = job.rule
    return f"script: {rule.script}" if rule.is_script else f"notebook: {rule.notebook}"


def _script_context(
    job: Job, file: ScriptFile, places: JobPaths, iteration: int | None, config: BackendConfig
) -> _ScriptContext:
    uploads: list[Upload] = []

    def there(text: str) -> str:
        text, named = upload_named_files(job, text, places, config)
        uploads.extend(named)
        return text

    here = rewrite_paths(job, places)
    sourced = replace(here, text=there)
    lists = {
        name: type(values)(toclone=values, custom_map=sourced.value)
        for name, values in vars(here).items()
        if isinstance(values, Namedlist)
    }
    scriptdir = file.origin or os.path.normpath(f"{_HOME_MARK}/{file.at_site}")
    place = f"{scriptdir}/{file.name}"
    _see_determined(job)
    # The names are those of both of Snakemake's constructors.
    both = {
        "input_": lists["input"],
        "output": lists["output"],
        "params": lists["params"],
        "wildcards": job.wildcards,
        "threads": job.threads,
        "resources": ResourceList(
            fromdict={**here.value(dict(job.resources.items())), "tmpdir": NodeTmpdir(NODE_TMPDIR)}
        ),
        "log": lists["log"],
        "config": sourced.value(here.value(job.rule.module_globals["config"])),
        "rulename": job.rule.name,
        "bench_iteration": iteration,
    }
    nothing = dict.fromkeys(
        (
            "cache_path", "basedir", "conda_env", "conda_base_path", "container_img",
            "singularity_args", "env_modules", "bench_record", "jobid", "cleanup_scripts",
            "shadow_dir", "runtime_paths",
        )
    )  # fmt: skip
    arguments = {
        **both, **nothing,
        "path": LocalSourceFile(place), "source": file.text, "is_local": file.origin is None,
    }  # fmt: skip
    return _ScriptContext(
        file, place, arguments, Snakemake(**both, scriptdir=scriptdir), tuple(uploads)
    )


def _see_determined(job: Job) -> None:
    for name, value in job.params._allitems():
        if UNKNOWN in str(value):
            which = f"the parameter {name}" if name else "a parameter"
            raise UserError(
                f"{which} is still to be determined (<TBD>)",
                where=f"rule {job.rule.name}",
                do="Make it independent of values that only the job knows. Use"
                " snakemake.resources.tmpdir in the script for the temporary directory",
            )


def _absolute(path: str) -> str:
    return path if os.path.isabs(path) else f"{_CWD}/{path}"


def _lacking(file: ScriptFile, language: str, programs: tuple[str, ...]) -> str:
    return shlex.quote(
        f"{file.name} needs {language}, but on this node there is no {' or '.join(programs)}:"
        " add it to the backend config's Environment"
    )


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


class _Notebook(RJupyterNotebook):  # type: ignore[misc] # Snakemake's classes are not typed
    """A notebook whose first cell is the preamble, with a fixed id. Snakemake's id is random."""

    def insert_preamble_cell(self, preamble: str, notebook: Any) -> None:
        super().insert_preamble_cell(preamble, notebook)
        if "id" in notebook["cells"][0]:
            notebook["cells"][0]["id"] = "snakemake-job-properties"


def _of(language: type[made.ScriptBase]) -> Callable[[_ScriptContext], str]:
    """Return a function that renders Snakemake's own preamble of a language."""
    return lambda context: str(language(**context.arguments).get_preamble())


def _python(more: str) -> Callable[[_ScriptContext], str]:
    """Return a function that renders our preamble for Python and its dialects.

    `more` is code that follows it, in which `{place}` stands for the script's own path.
    """

    def preamble(context: _ScriptContext) -> str:
        modules = f"{_HOME_MARK}/{os.path.dirname(_runner_upload().path)}"
        search = f"{_HOME_MARK}/{context.file.at_site}"
        return (
            f"import sys; sys.path.insert(0, {modules!r});"
            " from mantik_script import names; sys.path.pop(0);"
            f" globals().update(names({encode_object(context.snakemake)!r}, {context.place!r},"
            f" {search!r}));"
            f" {more.format(place=context.place)}\n"
        )

    return preamble


@dataclass(frozen=True)
class _Language:
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
    preamble: Callable[[_ScriptContext], str]
    command: str = ""

    @property
    def programs(self) -> tuple[str, ...]:
        """Interpreters, one of which a node must have."""
        return (self.command.split()[0],) if self.command else ("papermill", "jupyter-nbconvert")


_FILE = "__real_file__ = __file__; __file__ = {place!r};"
_LANGUAGES = {
    "r": _Language("R", made.RScript, _of(made.RScript), 'Rscript --vanilla "$mantik_script"'),
    "rmarkdown": _Language(
        "R Markdown", made.RMarkdown, _of(made.RMarkdown),
        "Rscript --vanilla -e 'a <- commandArgs(TRUE); rmarkdown::render(a[1], output_file = a[2],"
        ' quiet = TRUE, knit_root_dir = getwd(), params = list(rmd = a[1]))\' "$mantik_script"',
    ),
    "julia": _Language("Julia", made.JuliaScript, _of(made.JuliaScript), 'julia "$mantik_script"'),
    "rust": _Language(
        "Rust", made.RustScript, _of(made.RustScript),
        f'rust-script -d {made.RustScript.default_dependencies()} "$mantik_script" --'
        f" --features {made.RustScript.default_features()}",
    ),
    "bash": _Language("bash", made.BashScript, _of(made.BashScript), 'bash "$mantik_script"'),
    "xonsh": _Language(
        "xonsh", made.XonshScript, _python(_FILE),
        'xonsh -DRAISE_SUBPROC_ERROR=true -DXONSH_SHOW_TRACEBACK=true "$mantik_script"',
    ),
    "hy": _Language("Hy", made.HyScript, _python(_FILE), 'hy "$mantik_script"'),
    "jupyter_python": _Language("Jupyter", _Notebook, _python(f"import os; os.chdir({_CWD!r})")),
    "jupyter_r": _Language(
        "Jupyter", _Notebook, lambda context: f"{_of(made.RScript)(context)}setwd({_CWD!r})\n"
    ),
}  # fmt: skip


def _write_preamble(language: _Language, context: _ScriptContext) -> tuple[str, str]:
    """Return the script with its preamble, split into the job's part and the file's part.

    Raises:
        UserError: the job's data cannot be expressed in the script's language, or an R Markdown
            file has no header.
    """

    def whole(preamble: str) -> str:
        buffer = BytesIO()
        language.made_by(**context.arguments).write_script(preamble, buffer)
        return buffer.getvalue().decode()

    try:
        text = whole(language.preamble(context))
        other = whole(_PREAMBLE)
    except StopIteration as error:
        # Snakemake writes the preamble behind the header, after the second line of `---`.
        raise UserError(
            f"{context.file.name} has no header",
            where=f"rule {context.snakemake.rule}",
            do="Add a header between two lines of --- at the beginning of the R Markdown file",
        ) from error
    except (TypeError, ValueError) as error:
        raise UserError(
            f"params or config contain a value that cannot be expressed in {language.name}"
            f" ({error})",
            where=f"rule {context.snakemake.rule}",
            do="Use plain values: text, numbers, lists, mappings",
        ) from error
    ends = zip(reversed(text), reversed(other), strict=False)
    same = next(number for number, (one, another) in enumerate(ends) if one != another)
    return text[: len(text) - same], text[len(text) - same :]


def _quote_for_job(text: str) -> str:
    """Quote a text for the job's shell, and replace marks by the shell's expressions."""
    quoted = shlex.quote(text)
    for mark, value in _MARKS.items():
        quoted = quoted.replace(mark, f"'\"{value}\"'")
    return quoted


def _make_upload(text: str, name: str) -> Upload:
    """Return the upload of a file `name` with the content `text`."""
    content = text.encode()
    return Upload(file_path(content, name), content=content)


@cache
def _runner_upload() -> Upload:
    """Return the upload of `mantik_script.py`, which scripts in Python and its dialects need."""
    return _make_upload(RUNNER.read_text(), RUNNER.name)
