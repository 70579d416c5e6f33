"""Load the bash templates of this package, and render what a job makes once at a site."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import jinja2

from .paths import PYTHONS

_NO_PACKAGES = (
    "what to do: where compute nodes reach no package index, make the environment on a login node",
    "and name it without Requirements; a failure that passes is tried again with the next job",
)


@dataclass(frozen=True)
class Times:
    """Times, in seconds, for jobs that wait while another job makes an environment or image.

    Attributes:
        beat_s: interval of the heartbeats of the job that makes it.
        stale_s: time without a heartbeat after which another job takes over. Network file systems
            show what another node wrote up to a minute late.
        poll_s: interval of a waiting job's checks.
    """

    beat_s: float = 10
    stale_s: int = 180
    poll_s: float = 3


def venv_text(
    path: str,
    files: Sequence[str],
    *,
    who: str,
    place: str = "",
    modules: Sequence[str] = (),
    folder: str = "",
    version: str = "",
    advice: Sequence[str] = _NO_PACKAGES,
    times: Times | None = None,
) -> str:
    """Return bash that sets `_m_python` to a virtual environment made of requirements.

    It fails if the environment cannot be made. It must run in the workspace or a shadow directory.

    Args:
        path: the directory that holds the environment of each content: absolute at the site, or
            relative to the executor's own directory for environments.
        files: paths in the workspace: the file that pip reads, then others that it names.
        place: a word of bash for `path`, if bash is to expand it.
        who: what needs the environment, for messages.
        modules: the modules that are loaded meanwhile: others need another environment.
        folder: the directory in the workspace that pip runs in.
        version: the version of Python to prefer, `3.12`.
        advice: lines that follow the end of pip's output if it fails.
        times: the times of jobs that wait.
    """
    if not place:
        own = f'"$PWD"/{PYTHONS}/'
        place = f"{'' if path.startswith('/') else own}{shlex.quote(path)}"
    return load_template("venv.sh.j2").render(
        who=shlex.quote(who),
        what=shlex.quote(f"virtual environment {path}"),
        advice=[shlex.quote(line) for line in advice],
        times=times or Times(),
        files=[shlex.quote(f"./{file.removeprefix('./')}") for file in files],
        modules=shlex.join(modules),
        folder=shlex.quote(f"./{folder}"),
        version=shlex.quote(version) if version else "",
        place=place,
    )


@cache
def load_template(name: str) -> jinja2.Template:
    """Load the template `name`; callers must quote its values for bash."""
    return _environment().get_template(name)


@cache
def _environment() -> jinja2.Environment:
    # Jinja's default delimiters occur in bash: `${#array[@]}` would begin a comment.
    return jinja2.Environment(  # noqa: S701 - bash, not HTML; values are quoted for bash
        variable_start_string="@{",
        variable_end_string="}@",
        block_start_string="@%",
        block_end_string="%@",
        comment_start_string="@#",
        comment_end_string="#@",
        line_statement_prefix="@@",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        loader=jinja2.PackageLoader(__package__, "bash"),
    )
