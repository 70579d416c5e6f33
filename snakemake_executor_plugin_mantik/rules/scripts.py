"""`script:` and `notebook:` rules: what runs at a site, where there is no Snakemake.

For each language Snakemake writes a preamble that tells the script of its job. It is a text, so it
is made here, and the site needs the interpreter alone. Only Python's needs Snakemake where it runs;
`pythonobject` takes its place. What only the node knows is a mark in the text, which the job's
shell replaces.
"""

import json
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

from snakemake import script as made
from snakemake.common.tbdstring import TBDString
from snakemake.iocontainers import ResourceList, Snakemake
from snakemake.notebook import RJupyterNotebook
from snakemake.sourcecache import LocalSourceFile

from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.errors import UserError
from snakemake_executor_plugin_mantik.jobs.paths import WORK, file_path
from snakemake_executor_plugin_mantik.jobs.templates import template
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.command import NODE_TMPDIR
from snakemake_executor_plugin_mantik.rules.imports import snakemake_imports
from snakemake_executor_plugin_mantik.rules.mirrored import mirrored
from snakemake_executor_plugin_mantik.rules.places import Places
from snakemake_executor_plugin_mantik.rules.pythonobject import RUNNER, NodeTmpdir, encoded
from snakemake_executor_plugin_mantik.rules.scriptfile import ScriptFile, script_file

# With a blank each, so that there are quotes around them in any language.
_TMPDIR, _HOME, _CWD = "@mantik tmpdir@", "@mantik home@", "@mantik cwd@"
_MARKS = {_TMPDIR: "${TMPDIR:-/tmp}", _HOME: "$mantik_home", _CWD: "$PWD"}
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
class _Told:
    """What a script is told of its job.

    Attributes:
        file: the script.
        place: what it takes for its own file: an absolute path with marks, or a URL.
        arguments: of Snakemake's classes for scripts.
        snakemake: the object that Snakemake would give it.
    """

    file: ScriptFile
    place: str
    arguments: dict[str, Any]
    snakemake: Snakemake


def _of(language: type[made.ScriptBase]) -> Callable[[_Told], str]:
    """The preamble that Snakemake makes."""
    return lambda told: str(language(**told.arguments).get_preamble())


def _python(more: str) -> Callable[[_Told], str]:
    """Our own for Python and its kin; `more` is code that follows."""

    def preamble(told: _Told) -> str:
        runner = f"{_HOME}/{_runner().path}"
        search = f"{_HOME}/{told.file.at_site}"
        return (
            f"import sys; sys.path.insert(0, {os.path.dirname(runner)!r});"
            " from mantik_script import names; sys.path.pop(0);"
            f" globals().update(names({encoded(told.snakemake)!r}, {told.place!r}, {search!r}));"
            f" {more.format(place=told.place)}\n"
        )

    return preamble


@dataclass(frozen=True)
class _Language:
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
    preamble: Callable[[_Told], str]
    programs: tuple[str, ...]
    command: str = ""


_JUPYTER = ("papermill", "jupyter-nbconvert")
_FILE = "__real_file__ = __file__; __file__ = {place!r};"
_LANGUAGES = {
    "r": _Language(
        "R",
        made.RScript,
        _of(made.RScript),
        ("Rscript",),
        'Rscript --vanilla "$mantik_script"',
    ),
    "rmarkdown": _Language(
        "R Markdown",
        made.RMarkdown,
        _of(made.RMarkdown),
        ("Rscript",),
        "Rscript --vanilla -e 'a <- commandArgs(TRUE); rmarkdown::render(a[1], output_file = a[2],"
        ' quiet = TRUE, knit_root_dir = getwd(), params = list(rmd = a[1]))\' "$mantik_script"',
    ),
    "julia": _Language(
        "Julia", made.JuliaScript, _of(made.JuliaScript), ("julia",), 'julia "$mantik_script"'
    ),
    "rust": _Language(
        "Rust",
        made.RustScript,
        _of(made.RustScript),
        ("rust-script",),
        f'rust-script -d {made.RustScript.default_dependencies()} "$mantik_script" --'
        f" --features {made.RustScript.default_features()}",
    ),
    "bash": _Language(
        "bash", made.BashScript, _of(made.BashScript), ("bash",), 'bash "$mantik_script"'
    ),
    "xonsh": _Language(
        "xonsh",
        made.XonshScript,
        _python(_FILE),
        ("xonsh",),
        'xonsh -DRAISE_SUBPROC_ERROR=true -DXONSH_SHOW_TRACEBACK=true "$mantik_script"',
    ),
    "hy": _Language("Hy", made.HyScript, _python(_FILE), ("hy",), 'hy "$mantik_script"'),
    "jupyter_python": _Language(
        "Jupyter",
        _Notebook,
        _python(f"import os; os.chdir({_CWD!r})"),
        _JUPYTER,
    ),
    "jupyter_r": _Language(
        "Jupyter",
        _Notebook,
        lambda told: f"{_of(made.RScript)(told)}setwd({_CWD!r})\n",
        _JUPYTER,
    ),
}


def mistake(job: Job) -> str | None:
    """Why the script or notebook of a job can run nowhere, in words that follow "rule NAME"."""
    file = script_file(job)
    if job.rule.is_notebook and job.dag.is_edit_notebook_job(job):
        return "has a notebook that is to be edited, which needs --executor local"
    if file.language != "python" and file.language not in _LANGUAGES:
        known = ".ipynb of Python or R" if job.rule.is_notebook else ".py .R .Rmd .jl .rs .sh .xsh"
        return f"has {file.name}, whose language Snakemake does not know: it takes {known}"
    if file.language.startswith("jupyter") is not job.rule.is_notebook:
        return f"has {file.name} under the wrong directive: notebook: takes .ipynb, script: others"
    if file.language == "rmarkdown" and len(job.output) != 1:
        return f"has {file.name}: R Markdown makes one output file, no more and no less"
    return None


def needs_snakemake(job: Job) -> list[str]:
    """What the Python script or notebook of a job imports that is only to be had of Snakemake."""
    file = script_file(job)
    text = file.text
    if file.language == "jupyter_python":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        text = re.sub(r"^[%!].*", "", text, flags=re.MULTILINE)
    elif file.language != "python":
        return []
    return snakemake_imports(text, file.directory)


def script(
    job: Job,
    places: Places,
    tmpdir: str,
    iteration: int | None,
    limits: tuple[int, int],
) -> tuple[str, tuple[Upload, ...]]:
    """The text that runs a script or notebook, and the files that it needs.

    Args:
        job: with a script that `mistake` says nothing of.
        places: where its paths are at its site.
        tmpdir: its directory for temporary files, `NODE_TMPDIR` for the node's.
        iteration: which run of a script that is measured it is, from 0.
        limits: bytes up to which a file beside a script elsewhere goes along, and bytes that all of
            them may have.

    Raises:
        UserError: a value cannot be given to the script, or the limit is exceeded.
    """
    told = _told(job, places, tmpdir, iteration)
    file = told.file
    beside = [Upload(path, local) for path, local in file.beside(*limits)]
    if file.language == "python":
        source = _upload(file.text, file.name)
        text = template("pythonscript.sh.j2").render(
            runner=shlex.quote(_runner().path),
            source=shlex.quote(source.path),
            place=_said(told.place),
            search=_said(f"{_HOME}/{file.at_site}"),
            data=encoded(told.snakemake),
            lacking=_lacking(file, "Python", ("python3", "python")),
        )
        return text, (_runner(), source, *beside)
    language = _LANGUAGES[str(file.language)]
    head, rest = _written(language, told)
    source = _upload(rest, file.name)
    log = told.snakemake.log.get("notebook")
    text = template("anyscript.sh.j2").render(
        programs=language.programs,
        lacking=_lacking(file, language.name, language.programs),
        work=WORK,
        name=shlex.quote(file.name),
        head=_said(head),
        rest=shlex.quote(source.path),
        command=language.command,
        output=_said(_absolute(told.snakemake.output[0])) if file.language == "rmarkdown" else "",
        log=_said(_absolute(log)) if log is not None else "",
    )
    runner = [_runner()] if os.path.dirname(_runner().path) in head else []
    return text, (*runner, source, *beside)


def _told(job: Job, places: Places, tmpdir: str, iteration: int | None) -> _Told:
    file = script_file(job)
    here = mirrored(job, places)
    scriptdir = file.origin or os.path.normpath(f"{_HOME}/{file.at_site}")
    place = f"{scriptdir}/{file.name}"
    at_node = NodeTmpdir(_TMPDIR) if tmpdir == NODE_TMPDIR else tmpdir
    _see_determined(job)
    # The names are those of both of Snakemake's constructors.
    both = {
        "input_": here.input,
        "output": here.output,
        "params": here.params,
        "wildcards": job.wildcards,
        "threads": job.threads,
        "resources": ResourceList(fromdict={**dict(job.resources.items()), "tmpdir": at_node}),
        "log": here.log,
        "config": here.value(job.rule.module_globals["config"]),
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
    return _Told(file, place, arguments, Snakemake(**both, scriptdir=scriptdir))


def _see_determined(job: Job) -> None:
    unknown = str(TBDString())
    for name, value in job.params.items():
        if unknown in str(value):
            raise UserError(
                f"the parameter {name} is still to be determined (<TBD>)",
                where=f"rule {job.rule.name}",
                do="Make it independent of what is only known inside the job; a script finds the"
                " directory for temporary files in snakemake.resources",
            )


def _written(language: _Language, told: _Told) -> tuple[str, str]:
    """The script as it runs, in two parts: the first is the job's own, the rest the file's."""

    def written(preamble: str) -> str:
        buffer = BytesIO()
        language.made_by(**told.arguments).write_script(preamble, buffer)
        return buffer.getvalue().decode()

    try:
        whole = written(language.preamble(told))
        other = written(_PREAMBLE)
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
    ends = zip(reversed(whole), reversed(other), strict=False)
    same = next(number for number, (one, another) in enumerate(ends) if one != another)
    return whole[: len(whole) - same], whole[len(whole) - same :]


def _absolute(path: str) -> str:
    return path if os.path.isabs(path) else f"{_CWD}/{path}"


def _said(text: str) -> str:
    """A text as the job's shell gets it: quoted, marks replaced by what the node says."""
    quoted = shlex.quote(text)
    for mark, said in _MARKS.items():
        quoted = quoted.replace(mark, f"'\"{said}\"'")
    return quoted


def _lacking(file: ScriptFile, language: str, programs: tuple[str, ...]) -> str:
    return shlex.quote(
        f"{file.name} needs {language}, but on this node there is no {' or '.join(programs)}:"
        " put it into the backend config's Environment"
    )


def _upload(text: str, name: str) -> Upload:
    content = text.encode()
    return Upload(file_path(content, name), content=content)


@cache
def _runner() -> Upload:
    return _upload(RUNNER.read_text(), RUNNER.name)
