"""The keys of `Environment` in a backend config: what a job's command runs in. Without I/O."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from snakemake_executor_plugin_mantik.config.section import ConfigSection, Keys
from snakemake_executor_plugin_mantik.config.values import (
    Commands,
    CommandWords,
    Modules,
    Variables,
    describe_value,
    not_allowed,
    parse_text,
    words_schema,
)

_IMAGE_TYPES: Final = ("local", "remote")
LOGIN_HOOKS: Final = ("PreRunCommandOnLoginNode", "PostRunCommandOnLoginNode")


def _image_type(value: object) -> str:
    name = parse_text(value).lower()
    if name not in _IMAGE_TYPES:
        raise ValueError(f"{describe_value(value)} is not supported; it has to be local or remote")
    return name


def _path(value: object) -> str:
    path = parse_text(value, "a path")
    if not path.isprintable():
        raise ValueError(f"may hold no control characters, found {describe_value(path)}")
    if path.startswith(("~", "$")):
        raise ValueError(
            f"has to be a path that is absolute or relative to the project folder; ~ and variables "
            f"are not expanded, found {describe_value(path)}"
        )
    return path


_ProjectPath = Annotated[
    str, BeforeValidator(_path), WithJsonSchema({"type": ["string", "number"]})
]


class ApptainerConfig(ConfigSection):
    """An Apptainer image that the command runs in."""

    path: _ProjectPath = Field(
        alias="Path",
        description="The image: on this machine, relative to the project folder or absolute "
        "(local); absolute at the site (remote).",
    )
    type: Annotated[
        Literal["local", "remote"], BeforeValidator(_image_type), words_schema(*_IMAGE_TYPES)
    ] = Field(
        default="local",
        alias="Type",
        description="Where the image is: local (here, uploaded) or remote (at the site).",
    )
    options: CommandWords = Field(
        default=(),
        alias="Options",
        description="Options of `apptainer run`; variables in them are expanded on the node.",
    )

    @classmethod
    def between(cls, data: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
        path, kind = data.get("Path"), data.get("Type", "local")
        if not isinstance(kind, str) or not isinstance(path, str) or not path.strip():
            return
        kind, path = kind.strip().lower(), path.strip()
        if kind == "remote" and not path.startswith(("/", "~", "$")) and "://" not in path:
            yield ("Path",), f"must be absolute for a remote image, found {describe_value(path)}"
        if kind == "local" and "://" in path:
            yield (
                ("Path",),
                f"is no file on this machine, found {describe_value(path)}; set Type: remote for"
                " a URL",
            )


class _PythonEnvironment(ConfigSection):
    path: _ProjectPath = Field(alias="Path")


def _python(value: object) -> str:
    if isinstance(value, Mapping):
        path = _PythonEnvironment.model_validate(value).path
    elif isinstance(value, str):
        path = _path(value)
    else:
        raise not_allowed("the path of a virtual environment, or a mapping with its Path", value)
    if not path.startswith("/") and ".." in path.split("/"):
        raise ValueError(
            "leaves the project folder; use a path inside it, or an absolute one at the site; "
            f"found {describe_value(path)}"
        )
    return path.rstrip("/") or "/"


class EnvironmentConfig(ConfigSection):
    """The environment of a job's command, and the commands to run before and after it."""

    HINTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "prerun": ("PreRunCommandOnComputeNode", "PreRunCommandOnLoginNode"),
        "preruncommand": ("PreRunCommandOnComputeNode", "PreRunCommandOnLoginNode"),
        "postrun": ("PostRunCommandOnComputeNode", "PostRunCommandOnLoginNode"),
        "postruncommand": ("PostRunCommandOnComputeNode", "PostRunCommandOnLoginNode"),
    }

    apptainer: ApptainerConfig | None = Field(
        default=None, alias="Apptainer", description="Run the command in an Apptainer image."
    )
    python: (
        Annotated[
            str,
            BeforeValidator(_python),
            WithJsonSchema(
                {
                    "anyOf": [
                        {"type": "string"},
                        {
                            "type": "object",
                            "properties": {"Path": {"type": ["string", "number"]}},
                            "required": ["Path"],
                            "additionalProperties": False,
                        },
                    ]
                }
            ),
        ]
        | None
    ) = Field(
        default=None,
        alias="Python",
        description="Run the command in this virtual environment: absolute at the site, or "
        "relative to the project folder.",
    )
    modules: Modules = Field(
        default=(), alias="Modules", description="Environment modules to load, in this order."
    )
    variables: Variables = Field(
        default_factory=dict,
        alias="Variables",
        description="Environment variables of the command; not for secrets, because everyone who "
        "can read the job can read them.",
    )
    before_on_login: Commands = Field(
        default=(),
        alias="PreRunCommandOnLoginNode",
        description="Commands to run on the login node before a job; not for firecREST.",
    )
    before_on_compute: Commands = Field(
        default=(),
        alias="PreRunCommandOnComputeNode",
        description="Commands to run on the compute node before the job's command.",
    )
    after_on_compute: Commands = Field(
        default=(),
        alias="PostRunCommandOnComputeNode",
        description="Commands to run on the compute node after the job's command, even if it "
        "failed.",
    )
    after_on_login: Commands = Field(
        default=(),
        alias="PostRunCommandOnLoginNode",
        description="Commands to run on the login node after a job; not for firecREST.",
    )

    @classmethod
    def between(cls, data: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
        if "Apptainer" in data and "Python" in data:
            yield (
                (),
                "Only one execution environment is allowed, but Apptainer and Python are given",
            )
