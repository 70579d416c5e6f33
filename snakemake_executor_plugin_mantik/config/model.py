"""The model of a site's Compute Backend Config, without I/O.

Aliases are the keys of the documents (`PascalCase`), see docs/backend-config.md; field names carry
the unit that a value is normalised to. `reading.read_backend_config` reads files.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AliasChoices, BeforeValidator, Field, WithJsonSchema

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.exclude import read_patterns
from snakemake_executor_plugin_mantik.config.section import ConfigSection, Keys
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.config.values import (
    Address,
    Commands,
    CommandWords,
    Count,
    Duration,
    Memory,
    Modules,
    Name,
    Positive,
    Variables,
    describe_value,
    list_schema,
    not_allowed,
    parse_integer,
    parse_text,
    words_schema,
)
from snakemake_executor_plugin_mantik.jobs.pbs import pbs_features

_IMAGE_TYPES: Final = ("local", "remote")
LOGIN_HOOKS: Final = ("PreRunCommandOnLoginNode", "PostRunCommandOnLoginNode")

_SSH: Final = "SSH is not supported; use UnicoreApiUrl or Firecrest"


def _whole(data: Mapping[str, Any], key: str) -> int | None:
    """Return the number of a key; None if it is not one, which the key's own validation reports."""
    try:
        return parse_integer(data.get(key), 1)
    except ValueError:
        return None


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


class FirecrestConfig(ConfigSection):
    """The keys of a site behind firecREST."""

    api_url: Address = Field(alias="ApiUrl", description="URL of the firecREST API.")
    token_url: Address = Field(alias="TokenUrl", description="URL where access tokens are issued.")
    machine: Name = Field(
        alias="Machine", description="Name of the HPC system, as firecREST has it."
    )


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


class ResourcesConfig(ConfigSection):
    """The resources that a job of this site requests, unless its rule overrides them."""

    HINTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "gpu": ("GPUsPerNode",),
        "gpus": ("GPUsPerNode",),
        "partition": ("Queue",),
        "time": ("Runtime",),
        "walltime": ("Runtime",),
    }

    queue: Name = Field(alias="Queue", description="Queue or partition.")
    runtime_s: Duration | None = Field(
        default=None, alias="Runtime", description="Walltime: a number with one of s, m, h, d."
    )
    nodes: Positive | None = Field(default=None, alias="Nodes", description="Number of nodes.")
    total_cpus: Positive | None = Field(
        default=None, alias="TotalCPUs", description="CPUs over all nodes: Nodes times CPUsPerNode."
    )
    cpus_per_node: Positive | None = Field(
        default=None, alias="CPUsPerNode", description="CPUs on each node, for one task per node."
    )
    gpus_per_node: Count | None = Field(
        default=None, alias="GPUsPerNode", description="GPUs on each node."
    )
    memory_mib_per_node: Memory | None = Field(
        default=None,
        alias="MemoryPerNode",
        validation_alias=AliasChoices("MemoryPerNode", "Memory"),
        description="Memory on each node: a number with one of K, M, G, T (also KiB, KB), "
        "1024-based.",
    )
    reservation: Name | None = Field(
        default=None, alias="Reservation", description="Reservation to use."
    )
    node_constraints: Name | None = Field(
        default=None, alias="NodeConstraints", description="Features that the nodes must have."
    )
    qos: Name | None = Field(default=None, alias="QoS", description="Quality of service.")

    @classmethod
    def between(cls, data: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
        if "Memory" in data and "MemoryPerNode" in data:
            yield (
                ("Memory",),
                "is another name of Resources.MemoryPerNode, and both are given; keep one",
            )
        total, nodes, cpus = (_whole(data, key) for key in ("TotalCPUs", "Nodes", "CPUsPerNode"))
        if total and nodes and "CPUsPerNode" not in data and total % nodes:
            yield ("TotalCPUs",), f"{total} CPUs cannot be divided among {nodes} Nodes"
        if total and cpus and "Nodes" not in data and total % cpus:
            yield ("TotalCPUs",), f"{total} CPUs are not a multiple of CPUsPerNode ({cpus})"

    @classmethod
    def one_name_each(cls, data: dict[str, Any]) -> dict[str, Any]:
        both = "Memory" in data and "MemoryPerNode" in data
        return {key: data[key] for key in data if key != "Memory"} if both else data


def _scheduler(data: Mapping[str, Any]) -> str:
    site = data.get("Site")
    return str(site.get("Scheduler", "")).strip().lower() if isinstance(site, Mapping) else ""


def _not_for_pbs(data: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
    """Yield mistakes about resources that PBS does not support, if the site has PBS."""
    resources = data.get("Resources")
    if not isinstance(resources, Mapping) or _scheduler(data) != "pbs":
        return
    if "QoS" in resources:
        yield ("Resources", "QoS"), "is not supported by PBS; use the Queue that stands for it"
    constraints = resources.get("NodeConstraints")
    try:
        pbs_features(constraints if isinstance(constraints, str) else "")
    except UserError as error:
        yield ("Resources", "NodeConstraints"), f"is not supported by PBS: {error.do}"


class BackendConfig(ConfigSection):
    """A Compute Backend Config: a site's API, environment, resources, and files not to upload."""

    FOREIGN: ClassVar[Mapping[str, str]] = {
        "SSH": _SSH,
        "Ssh": _SSH,
        "Include": "Include belongs under Site; write `Site: {Include: [...]}`",
    }

    unicore_api_url: Address | None = Field(
        default=None,
        alias="UnicoreApiUrl",
        description="URL of the site's UNICORE API, ends with /rest/core.",
    )
    firecrest: FirecrestConfig | None = Field(
        default=None, alias="Firecrest", description="The site's firecREST API."
    )
    environment: EnvironmentConfig = Field(
        default=EnvironmentConfig(),
        alias="Environment",
        description="The environment of a job's command, and commands to run before and after it.",
    )
    resources: ResourcesConfig = Field(
        alias="Resources", description="What a job requests, unless its rule overrides it."
    )
    exclude: Annotated[tuple[str, ...], BeforeValidator(read_patterns), list_schema()] = Field(
        default=(),
        alias="Exclude",
        description="Files that are not uploaded: patterns as in .gitignore, relative to the "
        "project folder.",
    )
    site: SiteSettings = Field(
        default=SiteSettings(),
        alias="Site",
        description="Time-outs, limits and paths of the site; never credentials.",
    )

    @property
    def api(self) -> Literal["unicore", "firecrest"]:
        return "unicore" if self.firecrest is None else "firecrest"

    @property
    def server(self) -> str:
        """The scope of the ids of jobs: the API's URL, for firecREST together with the machine."""
        return f"{self.api_url}#{self.firecrest.machine}" if self.firecrest else self.api_url

    @property
    def api_url(self) -> str:
        return self.firecrest.api_url if self.firecrest else str(self.unicore_api_url)

    @classmethod
    def between(cls, data: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
        either = "either UnicoreApiUrl or Firecrest details must be provided"
        if "UnicoreApiUrl" not in data and "Firecrest" not in data:
            yield ("UnicoreApiUrl",), f"is missing: {either}"
        if "UnicoreApiUrl" in data and "Firecrest" in data:
            yield ("UnicoreApiUrl",), f"{either}, but both are given"
        yield from _not_for_pbs(data)
        if "Firecrest" not in data or "UnicoreApiUrl" in data:
            return
        if _scheduler(data) == "none":
            yield ("Site", "Scheduler"), "cannot be none for firecREST; use slurm or pbs"
        environment = data.get("Environment")
        if isinstance(environment, Mapping):
            for hook in LOGIN_HOOKS:
                if hook in environment:
                    instead = hook.replace("Login", "Compute")
                    yield (
                        ("Environment", hook),
                        f"is not supported by firecREST, which runs nothing on a login node; "
                        f"use {instead} instead if possible",
                    )
