"""The keys of `Environment` in a backend config: what a job's command runs in."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, ValidationInfo, WithJsonSchema

from ..jobs.resources import is_single_word
from .named_files import NamedFileError, read_edf, read_requirements
from .section import ConfigSection, Keys, config_key, local_path, missing_file
from .values import (
    SCALAR,
    Commands,
    CommandWords,
    Modules,
    Variables,
    describe_value,
    not_allowed,
    one_of,
    parse_text,
    read_list,
    refuse_values,
    text_or_list_schema,
    words_schema,
)

_IMAGE_TYPES: Final = ("local", "remote")
_EDF_NAME: Final = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]*")
SLURM_KEYS: Final = ("ContainerEngine", "Pyxis", "Uenv")
"""Keys of environments that plugins of Slurm make."""
IMAGE_KEYS: Final = ("Apptainer", *SLURM_KEYS)
"""Keys of environments of which a job has at most one."""
OPTION_KEYS: Final = ("Apptainer", "ContainerEngine", "Pyxis")
"""Keys of environments with `Options`."""
LOGIN_HOOKS: Final = ("PreRunCommandOnLoginNode", "PostRunCommandOnLoginNode")


def _path(value: object) -> str:
    path = _site_path(value)
    if path.startswith("$"):
        raise ValueError(not_expanded(path))
    return path


def _site_path(value: object) -> str:
    """Return a path that may begin with a variable, which `Site: Expand` expands."""
    path = parse_text(value, "a path")
    if not path.isprintable():
        raise ValueError(f"may hold no control characters, found {describe_value(path)}")
    if path.startswith("~"):
        raise ValueError(not_expanded(path))
    return path


def not_expanded(path: str) -> str:
    """Return the message for a path that begins with a variable or `~`."""
    return (
        f"has to be a path that is absolute or relative to the project folder; ~ and variables "
        f"are not expanded, found {describe_value(path)}"
    )


_TEXT: Final = WithJsonSchema({"type": "string", "minLength": 1})
_ProjectPath = Annotated[str, BeforeValidator(_path), SCALAR]


class ApptainerConfig(ConfigSection):
    """An Apptainer image that the command runs in."""

    path: Annotated[str, BeforeValidator(_site_path), SCALAR] = config_key(
        "Path",
        "The image: on this machine, relative to the project folder or absolute "
        "(local); absolute at the site (remote).",
    )
    type: Annotated[
        Literal["local", "remote"], one_of(*_IMAGE_TYPES), words_schema(*_IMAGE_TYPES)
    ] = config_key(
        "Type", "Where the image is: local (here, uploaded) or remote (at the site).", "local"
    )
    options: CommandWords = config_key(
        "Options", "Options of `apptainer run`; variables in them are expanded on the node.", ()
    )

    @classmethod
    def between(cls, data: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
        path, kind = data.get("Path"), data.get("Type", "local")
        if not isinstance(kind, str) or not isinstance(path, str) or not path.strip():
            return
        kind, path = kind.strip().lower(), path.strip()
        if kind == "remote" and not path.startswith(("/", "~", "$")) and "://" not in path:
            yield ("Path",), f"must be absolute for a remote image, found {describe_value(path)}"
        if kind == "local" and ("://" in path or path.startswith("$")):
            yield (
                ("Path",),
                f"is no file on this machine, found {describe_value(path)}; set Type: remote for"
                f" {'a URL' if '://' in path else 'a path at the site'}",
            )

    @classmethod
    def missing(cls, data: Mapping[str, Any], project: Path) -> Iterator[tuple[Keys, str]]:
        path = data.get("Path")
        local = str(data.get("Type", "local")).strip().lower() == "local"
        message = missing_file(path, project, "the image")
        if local and "://" not in str(path) and message:
            yield ("Path",), f"{message} (for an image at the site, set Type: remote)"


def _edf_name(value: object) -> str:
    name = parse_text(value, "a name")
    if not _EDF_NAME.fullmatch(name):
        raise ValueError(
            "has to be the name of a definition in EDF_PATH or ~/.edf at the site, without .toml;"
            f" use File for a path; found {describe_value(name)}"
        )
    return name.removesuffix(".toml")


def _software(value: object) -> tuple[str, ...]:
    """Return the names of a text with commas, or of a list."""
    names = value.split(",") if isinstance(value, str) else value
    found = read_list(names, parse_text, "a name or a list of names")
    for name in found:
        if not is_single_word(name) or "," in name:
            raise ValueError(
                f"may hold no blanks, quotes and commas in a name, found {describe_value(name)}"
            )
    return found


def _container_image(value: object) -> str:
    image = _path(value) if str(value).startswith("./") else parse_text(value, "an image")
    if not is_single_word(image.replace("#", "")):
        raise ValueError(f"may hold no blanks and quotes, found {describe_value(image)}")
    if image.startswith(("~", "$")):
        raise ValueError(
            "has to be an image's name, an absolute path at the site, or the path of a file here"
            f" that begins with ./; found {describe_value(image)}"
        )
    return image


def _mounts(value: object) -> tuple[str, ...]:
    found = read_list(value, parse_text, "a list of SOURCE:DESTINATION")
    for mount in found:
        source, *rest = mount.split(":")
        if not source.startswith(("/", "./", "$")) or not 1 <= len(rest) <= 2 or "," in mount:
            raise ValueError(
                "has to be a list of SOURCE:DESTINATION, optionally with :FLAGS, of absolute paths"
                f" without commas; found {describe_value(mount)}"
            )
    return found


class ContainerEngineConfig(ConfigSection):
    """An environment of the Container Engine, which `srun` starts."""

    file: _ProjectPath | None = config_key(
        "File",
        "The Environment Definition File: relative to the project folder (uploaded "
        "once), or absolute at the site.",
        None,
    )
    name: Annotated[str, BeforeValidator(_edf_name), _TEXT] | None = config_key(
        "Name",
        "The name of an Environment Definition File at the site, in EDF_PATH or ~/.edf.",
        None,
    )
    options: CommandWords = config_key(
        "Options", "Further options of srun; variables in them are expanded on the node.", ()
    )

    @classmethod
    def between(cls, data: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
        if ("File" in data) == ("Name" in data):
            both = ", but both are given" if "File" in data else ""
            yield (), f"either File or Name must be provided{both}"

    @classmethod
    def missing(cls, data: Mapping[str, Any], project: Path) -> Iterator[tuple[Keys, str]]:
        path = local_path(data.get("File"))
        if path and not path.startswith("/"):
            try:
                read_edf(path, project)
            except NamedFileError as error:
                yield ("File",), error.what


class PyxisConfig(ConfigSection):
    """A container image that `srun` starts with NVIDIA's plugin pyxis."""

    image: Annotated[str, BeforeValidator(_container_image), _TEXT] = config_key(
        "Image",
        "The image: a name with its registry (nvcr.io#nvidia/pytorch:24.01-py3), an "
        "absolute path at the site, or a file here that begins with ./ and is uploaded once.",
    )
    mounts: Annotated[
        tuple[str, ...],
        BeforeValidator(_mounts),
        WithJsonSchema({"type": "array", "items": {"type": "string"}}),
    ] = config_key(
        "Mounts",
        "Directories that the container sees, as SOURCE:DESTINATION[:FLAGS]; the "
        "workspace is always among them. Variables are expanded on the node.",
        (),
    )
    options: CommandWords = config_key(
        "Options",
        "Further options of srun, such as --no-container-mount-home; variables in "
        "them are expanded on the node.",
        (),
    )

    @classmethod
    def missing(cls, data: Mapping[str, Any], project: Path) -> Iterator[tuple[Keys, str]]:
        image = data.get("Image")
        message = missing_file(image, project, "the image")
        if str(image).startswith("./") and message:
            yield ("Image",), message


_NAMES: Final = text_or_list_schema()


class UenvConfig(ConfigSection):
    """A software stack that uenv mounts for the whole job."""

    image: Annotated[tuple[str, ...], BeforeValidator(_software), _NAMES] = config_key(
        "Image",
        "The uenv (prgenv-gnu/24.11:v1, a path of a squashfs file at the site, "
        "optionally with :MOUNTPOINT), or a list of several.",
    )
    view: Annotated[tuple[str, ...], BeforeValidator(_software), _NAMES] = config_key(
        "View", "The view to load, or a list; without one, PATH stays as it is.", ()
    )


def _python_path(value: object) -> str:
    path = _site_path(value)
    if not path.startswith(("/", "$")) and ".." in path.split("/"):
        raise ValueError(
            "leaves the project folder; use a path inside it, or an absolute one at the site; "
            f"found {describe_value(path)}"
        )
    return path.rstrip("/") or "/"


def _requirements(value: object) -> str:
    path = _path(value)
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(
            f"has to be a file in the project folder, which is uploaded; found "
            f"{describe_value(path)}"
        )
    return path


class PythonConfig(ConfigSection):
    """A virtual environment, at the site or to be made there."""

    path: Annotated[str, BeforeValidator(_python_path), SCALAR] = config_key(
        "Path", "The environment: relative to the project folder, or absolute at the site."
    )
    requirements: Annotated[str, BeforeValidator(_requirements), SCALAR] | None = config_key(
        "Requirements",
        "A file in the project folder, such as requirements.txt, of which the first "
        "job makes the environment at the site, once for each content.",
        None,
    )

    @classmethod
    def missing(cls, data: Mapping[str, Any], project: Path) -> Iterator[tuple[Keys, str]]:
        given = data.get("Requirements" if "Requirements" in data else "Path")
        path = local_path(given)
        if not path or path.startswith("/"):
            return
        if "Requirements" in data:
            try:
                read_requirements(path, project)
            except NamedFileError as error:
                yield ("Requirements",), error.what
        elif not missing_file(f"{path}/pyvenv.cfg", project):
            yield (
                (),
                f"{given!r} is a virtual environment of this machine, which is not uploaded: it "
                "holds absolute paths; name one at the site, or add Requirements (a file, such as "
                "requirements.txt) to make one there",
            )


_PATH_OR_MAPPING: Final = WithJsonSchema(
    {"anyOf": [{"type": "string"}, PythonConfig.model_json_schema()]}
)


def _python(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str):
        if info.context is not None:
            refuse_values(PythonConfig.missing({"Path": value}, info.context))
        return PythonConfig.model_construct(path=_python_path(value))
    if not isinstance(value, Mapping | PythonConfig):
        raise not_allowed("the path of a virtual environment, or a mapping with its Path", value)
    return value


class EnvironmentConfig(ConfigSection):
    """The environment of a job's command, and the commands to run before and after it."""

    FOREIGN: ClassVar[Mapping[str, str]] = {
        **{
            key: f"{key} is now Apptainer; write `Apptainer: {{Path: FILE}}`"
            for key in ("Singularity", "SingularityImage")
        },
        "Options": "Options belongs under Apptainer; write `Apptainer: {Options: …}`",
        "DockerImage": "DockerImage is not supported; write `Apptainer: {Path: docker://IMAGE, "
        "Type: remote}`",
    }
    HINTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "prerun": ("PreRunCommandOnComputeNode", "PreRunCommandOnLoginNode"),
        "preruncommand": ("PreRunCommandOnComputeNode", "PreRunCommandOnLoginNode"),
        "postrun": ("PostRunCommandOnComputeNode", "PostRunCommandOnLoginNode"),
        "postruncommand": ("PostRunCommandOnComputeNode", "PostRunCommandOnLoginNode"),
    }

    apptainer: ApptainerConfig | None = config_key(
        "Apptainer", "Run the command in an Apptainer image.", None
    )
    container_engine: ContainerEngineConfig | None = config_key(
        "ContainerEngine", "Run the command in an environment of CSCS's Container Engine.", None
    )
    pyxis: PyxisConfig | None = config_key(
        "Pyxis", "Run the command in a container image, started by Slurm's plugin pyxis.", None
    )
    uenv: UenvConfig | None = config_key("Uenv", "Mount a software stack with CSCS's uenv.", None)
    python: Annotated[PythonConfig, BeforeValidator(_python), _PATH_OR_MAPPING] | None = config_key(
        "Python",
        "Run the command in this virtual environment: its path, or a mapping with "
        "Path and Requirements.",
        None,
    )
    modules: Modules = config_key("Modules", "Environment modules to load, in this order.", ())
    variables: Variables = config_key(
        "Variables",
        "Environment variables of the command; not for secrets, because everyone who "
        "can read the job can read them.",
        {},
    )
    before_on_login: Commands = config_key(
        "PreRunCommandOnLoginNode",
        "Commands to run on the login node before a job; not for firecREST.",
        (),
    )
    before_on_compute: Commands = config_key(
        "PreRunCommandOnComputeNode",
        "Commands to run on the compute node before the job's command.",
        (),
    )
    after_on_compute: Commands = config_key(
        "PostRunCommandOnComputeNode",
        "Commands to run on the compute node after the job's command, even if it failed.",
        (),
    )
    after_on_login: Commands = config_key(
        "PostRunCommandOnLoginNode",
        "Commands to run on the login node after a job; not for firecREST.",
        (),
    )

    @classmethod
    def _about_unknown(cls, key: str) -> str:
        if key.isupper():
            return f"is not a key; a variable belongs under Variables: `Variables: {{{key}: …}}`"
        return super()._about_unknown(key)

    @classmethod
    def between(cls, data: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
        images = [key for key in IMAGE_KEYS if key in data]
        given = [*images, *(["Python"] if images == ["Apptainer"] and "Python" in data else [])]
        if len(given) > 1:
            yield (
                (),
                f"Only one execution environment is allowed, but {' and '.join(given)} are given",
            )
        python = data.get("Python")
        containers = [key for key in ("ContainerEngine", "Pyxis") if key in data]
        if containers and isinstance(python, Mapping) and "Requirements" in python:
            yield (
                ("Python", "Requirements"),
                f"is not possible with {containers[0]}: make the environment with the Python of "
                "the container, and give its Path alone",
            )
