"""Render the command of `script:` and `notebook:` rules for a site without Snakemake."""

import os
import shlex
from dataclasses import replace

from snakemake.iocontainers import Namedlist, ResourceList, Snakemake
from snakemake.sourcecache import LocalSourceFile
from snakemake_interface_common.exceptions import WorkflowError

from ...common.errors import UserError, one_line
from ...config.model import BackendConfig
from ...engine.request import Upload
from ...jobs.paths import WORK, script_path
from .. import Job
from ..paths.job_paths import UNKNOWN, JobPaths
from ..paths.path_rewriting import rewrite_paths, upload_named_files
from ..site_job import SiteJob
from .languages import (
    CWD,
    HOME_MARK,
    LANGUAGES,
    NodeTmpdir,
    ScriptContext,
    encode_object,
    make_upload,
    quote_for_job,
    runner_upload,
    syntax_mistake,
    write_preamble,
)
from .script_file import ScriptFile
from .shell_command import NODE_TMPDIR

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
    if file.language == "python" and (mistake := syntax_mistake(file.text)) is not None:
        return f"has {_written(at.job)}, which is no valid Python: {mistake}"
    return None


def _language_mistake(job: Job, file: ScriptFile) -> str | None:
    if file.language != "python" and file.language not in LANGUAGES:
        known = (
            ".ipynb of Python or R" if job.rule.is_notebook else ".py .R .Rmd .jl .rs .sh .xsh .hy"
        )
        return f"has {file.name}, whose language Snakemake does not know: it takes {known}"
    if file.language.startswith("jupyter") is not job.rule.is_notebook:
        return f"has {file.name} under the wrong directive: notebook: takes .ipynb, script: others"
    if file.language == "rmarkdown" and len(job.output) != 1:
        return f"has {file.name}: R Markdown makes exactly one output file"
    return None


def _written(job: Job) -> str:
    """Return the directive and path of a job's script, as the Snakefile has them."""
    rule = job.rule
    return f"script: {rule.script}" if rule.is_script else f"notebook: {rule.notebook}"


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
            runner=shlex.quote(runner_upload().path),
            source=shlex.quote(source.path),
            place=quote_for_job(context.place),
            search=quote_for_job(f"{HOME_MARK}/{file.at_site}"),
            data=encode_object(context.snakemake),
            lacking=_lacking(file, "Python", ("python3", "python")),
        )
        return text, (runner_upload(), source, *beside)
    language = LANGUAGES[str(file.language)]
    head, rest = write_preamble(language, context)
    source = make_upload(rest, file.name)
    if language.command:
        start = language.command
        if file.language == "rmarkdown":
            start += f" {quote_for_job(_absolute(context.snakemake.output[0]))}"
    else:
        log = context.snakemake.log.get("notebook")
        shown = quote_for_job(_absolute(log)) if log is not None else ""
        start = _NOTEBOOK.format(
            executed=shown or '"$mantik_script"', converted=shown or '"$mantik_own"/executed.ipynb'
        )
    text = _SCRIPT.format(
        found=" || ".join(f"command -v {program} > /dev/null" for program in language.programs),
        lacking=_lacking(file, language.name, language.programs),
        work=WORK,
        name=shlex.quote(file.name),
        head=quote_for_job(head),
        rest=shlex.quote(source.path),
        start=start,
    )
    modules = [runner_upload()] if os.path.dirname(runner_upload().path) in head else []
    return text, (*modules, source, *beside)


def _script_context(
    job: Job, file: ScriptFile, places: JobPaths, iteration: int | None, config: BackendConfig
) -> ScriptContext:
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
    scriptdir = file.origin or os.path.normpath(f"{HOME_MARK}/{file.at_site}")
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
    return ScriptContext(
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
    return path if os.path.isabs(path) else f"{CWD}/{path}"


def _lacking(file: ScriptFile, language: str, programs: tuple[str, ...]) -> str:
    return shlex.quote(
        f"{file.name} needs {language}, but on this node there is no {' or '.join(programs)}:"
        " add it to the backend config's Environment"
    )
