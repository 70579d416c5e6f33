"""Wrap a rule's command in bash that sets up its environment: modules, conda, a container.

The bash must run in the workspace or in a shadow directory: both have `.mantik`. The first job that
needs a conda environment or an image makes it, once per workspace (`once.sh.j2`). A job whose
environment cannot be made fails before its command.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .expansion import quote_word
from .paths import BELOW_TOP, CONDA, IMAGES
from .script import quote_expandable
from .templates import Times, load_template, venv_text

MACHINES = {
    "linux-64": "x86_64",
    "linux-aarch64": "aarch64",
    "linux-ppc64le": "ppc64le",
}
"""Conda's platforms, and the output of `uname -m` on them."""

_NO_TOOL = (
    "what to do: load a module that brings one (Environment: Modules in the backend config), or",
    "name one in the variable MANTIK_CONDA (Environment: Variables in the backend config)",
)
_NO_ENVIRONMENT = (
    "what to do: name one that is at the site, by its path if its tool is not found by itself, or",
    "an environment file (conda: envs/NAME.yaml), of which one is made there",
)
_NOT_MADE = {
    "environment": (
        "what to do: where compute nodes reach no package server, name an environment that is at",
        "the site (conda: NAME or PATH); a failure that passes is tried again with the next job",
    ),
    "python": (
        "what to do: where compute nodes reach no package index, make the environment on a login",
        "node, name it in the backend config (Environment: Python), and do not deploy the",
        "project's; a failure that passes is tried again with the next job",
    ),
    "image": (
        "what to do: where compute nodes reach no registry, fetch the image to a file here",
        "(apptainer pull FILE.sif URL) and name the file in container:",
    ),
}


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
    words = [word for name in modules for word in name.split()]
    setup = load_template("envmodules.sh.j2").render(
        who=_who(rule),
        modules=shlex.join(words),
        failed=shlex.quote(f"not all modules could be loaded: {' '.join(words)}"),
    )
    return setup + command


def wrap_conda(
    environment: CondaFile | str,
    command: str,
    *,
    rule: str,
    blocked: Iterable[str] = (),
    times: Times | None = None,
) -> str:
    """Return bash that runs the command in a conda environment.

    `environment` is one to make, or the name or path of one at the site. `blocked` variables, which
    would lead the environment's programs elsewhere, are unset.
    """
    values: dict[str, object]
    label = environment if isinstance(environment, str) else environment.label
    if isinstance(environment, str):
        values = {
            "created": False,
            "no_environment": _lines(_NO_ENVIRONMENT),
        }
    else:
        values = {
            "created": True,
            "no_tool": _lines(_NO_TOOL),
            "turn": shlex.quote(f"{CONDA}/turn"),
            "place": shlex.quote(f"{CONDA}/{environment.place}"),
            "file": shlex.quote(environment.file),
            "pins": [
                (MACHINES[platform], shlex.quote(path))
                for platform, path in environment.pins.items()
            ],
            "post_deploy": environment.post_deploy and shlex.quote(environment.post_deploy),
            "interpreter": environment.interpreter,
        }
    setup = load_template("conda.sh.j2").render(
        who=_who(rule),
        label=shlex.quote(label),
        what=shlex.quote(f"conda environment {label}"),
        advice=_lines(_NOT_MADE["environment"]),
        times=times or Times(),
        blocked=shlex.join(blocked),
        **values,
    )
    return setup + command


def wrap_venv(
    path: str,
    files: Sequence[str],
    command: str,
    *,
    rule: str,
    folder: str = "",
    version: str = "",
    times: Times | None = None,
) -> str:
    """Return bash that runs the command in a virtual environment made of requirements.

    For the arguments see `venv_text`.
    """
    made = venv_text(
        path, files, who=f"rule {rule}", folder=folder, version=version,
        advice=_NOT_MADE["python"], times=times,
    )  # fmt: skip
    return load_template("own_venv.sh.j2").render(venv=made.rstrip()) + command


def wrap_container(image: Image, start: str, *, rule: str, times: Times | None = None) -> str:
    """Return bash that runs a program in a container, with the workspace as its home.

    The working directory stays the same: the workspace, or a shadow directory. `start` holds the
    program and its arguments, quoted.
    """
    arguments = list(map(quote_word if image.expand else quote_expandable, image.options))
    if image.arguments:
        arguments.append(image.arguments)
    return load_template("container.sh.j2").render(
        who=_who(rule),
        what=shlex.quote(f"image {image.source}"),
        advice=_lines(_NOT_MADE["image"]),
        times=times or Times(),
        fetched=bool(image.place),
        url=shlex.quote(image.source),
        place=shlex.quote(f"{IMAGES}/{image.place}"),
        absolute=image.source.startswith("/"),
        image=shlex.quote(image.source),
        options="".join(f" {word}" for word in arguments),
        below_top=BELOW_TOP,
        start=start,
    )


def _who(rule: str) -> str:
    return shlex.quote(f"rule {rule}")


def _lines(lines: Iterable[str]) -> list[str]:
    return [shlex.quote(line) for line in lines]
