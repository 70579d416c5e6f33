"""Wrap a rule's command in bash that sets up its environment: modules, conda, a container.

The bash must run in the workspace or in a shadow directory: both have `.mantik`. The first job that
needs a conda environment or an image makes it, once per workspace (`once.sh`). A job whose
environment cannot be made fails before its command.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .library import use_library
from .quoting import quote_expandable, quote_word

MACHINES = {"linux-64": "x86_64", "linux-aarch64": "aarch64", "linux-ppc64le": "ppc64le"}
"""Conda's platforms, and the output of `uname -m` on them."""


@dataclass(frozen=True)
class CondaFile:
    """A conda environment that is made from a file; paths are relative to the workspace.

    Attributes:
        label: the file as the user knows it.
        place: name of the environment's directory in `.mantik/conda`, different for each content.
        file: the environment file.
        pins: explicit lists of packages by conda's platform, preferred to the file.
        post_deploy: a script to run in the new environment, by `interpreter`.
    """

    label: str
    place: str
    file: str
    pins: Mapping[str, str] = field(default_factory=dict)
    post_deploy: str = ""
    interpreter: str = "sh"


@dataclass(frozen=True)
class Image:
    """A container image.

    Attributes:
        source: a path, relative to the workspace or absolute at the site, or a URL.
        place: for a URL: the name of its directory in `.mantik/images`.
        options: options of `apptainer` from the backend config, with bash's quotes.
        arguments: further options, as text of a command line.
        expand: whether bash expands code in `options`.
    """

    source: str
    place: str = ""
    options: tuple[str, ...] = ()
    arguments: str = ""
    expand: bool = False


def wrap_modules(modules: Sequence[str], command: str, *, rule: str) -> str:
    """Return bash that runs the command after `module purge` and `module load`, as in Snakemake."""
    words = shlex.join(word for name in modules for word in name.split())
    load = f"_m_own _m_load_modules {_who(rule)} {words}"
    return f"{use_library()} && {load} || exit 1\nunset -f $(compgen -A function _m_)\n{command}"


def wrap_conda(
    environment: CondaFile | str, command: str, *, rule: str, blocked: Iterable[str] = ()
) -> str:
    """Return bash that runs the command in a conda environment.

    `environment` is one to make, or the name or path of one at the site. `blocked` variables, which
    would lead the environment's programs elsewhere, are unset.
    """
    if isinstance(environment, str):
        call = f"_m_find_conda {_who(rule)} {shlex.quote(environment)}"
    else:
        one = environment
        pins = [word for name, pin in one.pins.items() for word in (MACHINES[name], pin)]
        words = (one.label, one.place, one.file, one.post_deploy, one.interpreter, *pins)
        call = f"_m_make_conda {_who(rule)} {shlex.join(words)}"
    unset = f"unset {shlex.join(blocked)}\n" if blocked else ""
    return f'{_assign("conda", call)}eval "$_m_conda"\nunset _m_conda\n{unset}{command}'


def wrap_venv(
    path: str, files: Sequence[str], command: str, *, rule: str, folder: str = "", version: str = ""
) -> str:
    """Return bash that runs the command in a virtual environment made of requirements.

    Args:
        path: the directory, relative to that for virtual environments, for each content of them.
        files: paths in the workspace: the file that pip reads, then others that it names.
        command: what to run.
        rule: what needs the environment, for messages.
        folder: the directory in the workspace that pip runs in.
        version: the version of Python to prefer, `3.12`.
    """
    words = shlex.join((path, path, folder or ".", version, "project", *files))
    made = _assign("python", f"_m_make_venv {_who(rule)} {words}")
    return f'{made}. "$_m_python/bin/activate"\nunset _m_python\n{command}'


def wrap_container(image: Image, start: str, *, rule: str) -> str:
    """Return bash that runs a program in a container, with the workspace as its home.

    The working directory stays the same: the workspace, or a shadow directory. `start` holds the
    program and its arguments, quoted.
    """
    arguments = list(map(quote_word if image.expand else quote_expandable, image.options))
    options = shlex.quote(" ".join([*arguments, image.arguments]).strip())
    words = shlex.join((image.source, image.place))
    enter = f"_m_own _m_enter_image {_who(rule)} {words} {start}"
    return f"{_TRAPS}\n{use_library()} && _m_options={options} && {enter}\nexit 1\n"


_TRAPS = "trap 'exit 143' TERM; trap 'exit 130' INT; trap 'exit 129' HUP"


def _assign(name: str, call: str) -> str:
    """Return bash that sets a variable to what a function of the library prints, or exits."""
    own = f"_m_{name}=$({use_library()} && _m_own {call}) || exit 1"
    return f"{_TRAPS}\n{own}\ntrap - TERM INT HUP\n"


def _who(rule: str) -> str:
    return shlex.quote(f"rule {rule}")
