"""The model of a site's Compute Backend Config, without I/O.

Aliases are the keys of the documents (`PascalCase`), see docs/backend-config.md; field names carry
the unit that a value is normalised to. `reading.read_backend_config` reads files.
"""

import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ..common.errors import UserError
from ..common.secret_names import secret_values
from ..jobs.quoting import find_code, find_unclosed, find_unclosed_in_word
from ..jobs.resources import pbs_features
from .environment_keys import LOGIN_HOOKS, OPTION_KEYS, SLURM_KEYS, EnvironmentConfig, not_expanded
from .section import ConfigSection, Keys, config_key
from .settings import Patterns, SiteSettings
from .values import (
    Address,
    Count,
    Duration,
    Memory,
    Name,
    Names,
    Positive,
    Text,
    describe_value,
    not_allowed,
    parse_integer,
    parse_options,
)

ENVIRONMENT_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_OF_MLFLOW_SLURM: Final = {
    "partition": "write `Resources: {Queue: …}`",
    **dict.fromkeys(("gpus_per_node", "gres"), "write `Resources: {GPUsPerNode: …}`"),
    "mem": "write `Resources: {MemoryPerNode: …}`",
    "nodes": "write `Resources: {Nodes: …}`",
    "time": "write `Resources: {Runtime: …}`",
    "ntasks": "a job has one task, whose CPUs are `Resources: {CPUsPerNode: …}`; a rule of "
    "MPI sets the resource tasks",
    "exclusive": "request all CPUs of the node with `Resources: {CPUsPerNode: …}`",
    "account": "set MANTIK_COMPUTE_BUDGET_ACCOUNT instead",
    "modules": "write `Environment: {Modules: […]}`",
    **dict.fromkeys(("environment", "exports"), "write `Environment: {Variables: {NAME: VALUE}}`"),
    "sbatch-script-file": "write its commands as `Environment: {PreRunCommandOnComputeNode: […]}`",
    "sequential_workers": "a rule goes on past its walltime with the resource mantik_continue",
}


def _whole(data: Mapping[str, Any], key: str) -> int | None:
    """Return the number of a key; None if it is not one, which the key's own validation reports."""
    try:
        return parse_integer(data.get(key), 1)
    except ValueError:
        return None


class FirecrestConfig(ConfigSection):
    """The keys of a site behind firecREST."""

    api_url: Address = config_key("ApiUrl", "URL of the firecREST API.")
    token_url: Address = config_key("TokenUrl", "URL where access tokens are issued.")
    machine: Name = config_key("Machine", "Name of the HPC system, as firecREST has it.")


class ResourcesConfig(ConfigSection):
    """The resources that a job of this site requests, unless its rule overrides them."""

    FOREIGN: ClassVar[Mapping[str, str]] = {
        "Project": "the account is not in this file; set MANTIK_COMPUTE_BUDGET_ACCOUNT, or the "
        "rule's resource slurm_account",
    }
    HINTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("gpu", "gpus", "gpus_per_node"), ("GPUsPerNode",)),
        **dict.fromkeys(("time", "walltime"), ("Runtime",)),
        "mem": ("MemoryPerNode",),
        "ntasks": ("CPUsPerNode",),
        "partition": ("Queue",),
    }

    queue: Names = config_key(
        "Queue",
        "Queue or partition; a list of Slurm's, of which the first to start a job gets it; or auto,"
        " the first that allows the job, at sites that report the walltimes of their queues.",
    )
    runtime_s: Duration | None = config_key("Runtime", "Walltime; without it the queue's.", None)
    nodes: Positive | None = config_key("Nodes", "Number of nodes.", None)
    total_cpus: Positive | None = config_key(
        "TotalCPUs", "CPUs over all nodes: Nodes times CPUsPerNode.", None
    )
    cpus_per_node: Positive | None = config_key(
        "CPUsPerNode", "CPUs on each node, for one task per node.", None
    )
    gpus_per_node: Count | None = config_key("GPUsPerNode", "GPUs on each node.", None)
    memory_mib_per_node: Memory | None = config_key(
        "MemoryPerNode",
        "Memory on each node: a number with one of K, M, G, T (also KiB, KB), "
        "1024-based; without it the queue's.",
        None,
        also="Memory",
    )
    reservation: Name | None = config_key("Reservation", "Reservation to use.", None)
    node_constraints: Name | None = config_key(
        "NodeConstraints", "Features that the nodes must have, such as gpu&a100.", None
    )
    qos: Name | None = config_key("QoS", "Quality of service.", None)
    segments: Count | None = config_key(
        "Continue",
        "How many segments a job may have that goes on past its walltime, if it has a checkpoint.",
        None,
    )
    checkpoint: Text | None = config_key(
        "Checkpoint",
        "Files and directories that the run of an entry point (smk-mantik run, runs "
        "submit, mlflow run) goes on from, separated by blanks.",
        None,
    )

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


class PoolConfig(ConfigSection):
    """Allocations that stay, and run the jobs of rules that name the pool."""

    queue: Name | None = config_key("Queue", "Queue or partition.", None)
    runtime_s: Duration = config_key("Runtime", "Walltime of an allocation.")
    nodes: Positive = config_key(
        "Nodes", "Nodes of an allocation; each of them runs jobs. More than 1 need Slurm.", 1
    )
    cpus_per_node: Positive = config_key("CPUsPerNode", "CPUs of each node.")
    memory_mib_per_node: Memory | None = config_key(
        "MemoryPerNode",
        "Memory of each node; without it, all that it has is handed out.",
        None,
    )
    gpus_per_node: Count | None = config_key("GPUsPerNode", "GPUs of each node.", None)
    reservation: Name | None = config_key("Reservation", "Reservation to use.", None)
    node_constraints: Name | None = config_key(
        "NodeConstraints", "Features that the node must have, such as gpu&a100.", None
    )
    qos: Name | None = config_key("QoS", "Quality of service.", None)
    count: Positive = config_key(
        "Count", "The most allocations at a time; as many are requested as there is work for.", 1
    )
    idle_s: Duration = config_key(
        "Idle", "Time after which an allocation ends in which nothing runs.", "5m"
    )
    takes_s: Duration | None = config_key(
        "Takes",
        "Jobs of at most this walltime that fit run here even if their rule names no pool.",
        None,
    )


def _environment_name(name: str) -> str:
    if not ENVIRONMENT_NAME.fullmatch(name):
        raise ValueError("is no name: use a letter, then letters, digits, - and _")
    return name


def _names_to(what: str) -> BeforeValidator:
    def check(value: object) -> object:
        if not isinstance(value, Mapping):
            raise not_allowed(f"a mapping of names to {what}", value)
        return value

    return BeforeValidator(check)


_Name = Annotated[str, AfterValidator(_environment_name)]


def _written_environments(data: Mapping[str, Any]) -> Iterator[tuple[Keys, Mapping[str, Any]]]:
    """Yield each environment of a document as written, with its keys."""
    named = data.get("Environments")
    several = named if isinstance(named, Mapping) else {}
    for keys, value in (
        (("Environment",), data.get("Environment")),
        *((("Environments", str(name)), item) for name, item in several.items()),
    ):
        if isinstance(value, Mapping):
            yield keys, value


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
        **dict.fromkeys(("SSH", "Ssh"), "SSH is not supported; use UnicoreApiUrl or Firecrest"),
        **{
            key: f"{key} belongs under Environment; write `Environment: {{{key}: …}}`"
            for key in ("Apptainer", "Modules", "Python", "Variables")
        },
        **{
            key: f"{key} is a key of mlflow-slurm; {hint}" for key, hint in _OF_MLFLOW_SLURM.items()
        },
        "Include": "Include belongs under Site; write `Site: {Include: [...]}`",
    }

    unicore_api_url: Address | None = config_key(
        "UnicoreApiUrl", "URL of the site's UNICORE API, ends with /rest/core.", None
    )
    firecrest: FirecrestConfig | None = config_key("Firecrest", "The site's firecREST API.", None)
    environment: EnvironmentConfig = config_key(
        "Environment",
        "The environment of a job's command, and commands to run before and after it.",
        EnvironmentConfig(),
    )
    environments: Annotated[dict[_Name, EnvironmentConfig], _names_to("environments")] = config_key(
        "Environments",
        "Further environments by name, each with the keys of Environment. A rule uses "
        "one instead of Environment with resources: mantik_environment=NAME.",
        {},
    )
    resources: ResourcesConfig = config_key(
        "Resources", "What a job requests, unless its rule overrides it."
    )
    pools: Annotated[dict[_Name, PoolConfig], _names_to("pools")] = config_key(
        "Pools",
        "Allocations by name that run many jobs. A rule's jobs run in one with resources:"
        " mantik_pool=NAME.",
        {},
    )
    exclude: Patterns = config_key(
        "Exclude",
        "Files that are not uploaded: patterns as in .gitignore, relative to the project folder.",
        (),
    )
    site: SiteSettings = Field(
        default_factory=SiteSettings,
        alias="Site",
        description="Limits and paths of the site; never credentials.",
    )

    @property
    def all_environments(self) -> Mapping[str, EnvironmentConfig]:
        """Return all environments by name; that of `Environment` is empty."""
        # A view: the environments of an invalid config's stand-in have no list of names.
        return ChainMap(self.environments, {"": self.environment})

    @property
    def keyed_environments(self) -> Iterator[tuple[str, EnvironmentConfig]]:
        """All environments with their keys, `Environment` or `Environments.NAME`."""
        return (
            (f"Environments.{name}" if name else "Environment", environment)
            for name, environment in self.all_environments.items()
        )

    @property
    def secrets(self) -> Iterator[str]:
        """The secret values in the variables of its environments."""
        for environment in self.all_environments.values():
            yield from secret_values(environment.variables)

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
        site = data.get("Site")
        expand = isinstance(site, Mapping) and site.get("Expand") is True
        environments = list(_written_environments(data))
        yield from expansion_mistakes(environments, expand=expand)
        scheduler = _scheduler(data)
        if scheduler in {"pbs", "none"}:
            pools, instead = data.get("Pools"), f"but Site: Scheduler is {scheduler}"
            for name, pool in pools.items() if isinstance(pools, Mapping) else ():
                if isinstance(pool, Mapping) and pool.get("Nodes", 1) != 1:
                    yield ("Pools", name, "Nodes"), f"needs Slurm to start agents, {instead}"
            for keys, environment in environments:
                for key in (key for key in SLURM_KEYS if key in environment):
                    yield (*keys, key), f"needs Slurm, which starts it, {instead}"
        if "Firecrest" not in data or "UnicoreApiUrl" in data:
            return
        if scheduler == "none":
            yield ("Site", "Scheduler"), "cannot be none for firecREST; use slurm or pbs"
        for keys, environment in environments:
            for hook in (hook for hook in LOGIN_HOOKS if hook in environment):
                yield (
                    (*keys, hook),
                    "is not supported by firecREST, which runs nothing on a login node; use"
                    f" {hook.replace('Login', 'Compute')} instead if possible",
                )


def expansion_mistakes(
    environments: Iterable[tuple[Keys, Mapping[str, Any]]], *, expand: bool
) -> Iterator[tuple[Keys, str]]:
    """Yield what bash is to expand and cannot, which a job would find out late, or does not expand.

    Args:
        environments: as written, each with its keys.
        expand: whether bash expands their paths, options and variables.
    """
    switch = "; set Site: Expand to true to expand it on the node"
    for keys, environment in environments:
        texts: list[tuple[Keys, object]] = [*_paths_at_site(keys, environment)]
        variables = environment.get("Variables")
        if not expand:
            for place, path in _paths_at_site(keys, environment):
                if path.strip().startswith("$"):
                    yield place, f"{not_expanded(path.strip())}{switch}"
        elif isinstance(variables, Mapping):
            texts += [((*keys, "Variables", str(name)), text) for name, text in variables.items()]
        for place, text in texts if expand else ():
            if isinstance(text, str) and (opening := find_unclosed(text)):
                yield place, f"has a {opening} that is not closed, found {describe_value(text)}"
        for place, word in _written_options(keys, environment):
            if expand and (opening := find_unclosed_in_word(word)):
                yield place, f"has a {opening} that is not closed, found {describe_value(word)}"
            if not expand and (code := find_code(word)):
                shown = describe_value(code)
                yield place, f"has code in it that is not expanded, found {shown}{switch}"


def _paths_at_site(keys: Keys, environment: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
    apptainer, python = environment.get("Apptainer"), environment.get("Python")
    found = [((*keys, "Python"), python)]
    if isinstance(python, Mapping):
        found = [((*keys, "Python", "Path"), python.get("Path"))]
    if isinstance(apptainer, Mapping) and str(apptainer.get("Type")).lower() == "remote":
        found.append(((*keys, "Apptainer", "Path"), apptainer.get("Path")))
    for place, path in found:
        if isinstance(path, str) and path.strip().startswith(("/", "$")):
            yield place, path


def _written_options(keys: Keys, environment: Mapping[str, Any]) -> Iterator[tuple[Keys, str]]:
    """Yield the words of options, with their keys; none of those that their own keys report."""
    for key in OPTION_KEYS:
        section = environment.get(key)
        with suppress(ValueError):
            given = section.get("Options", "") if isinstance(section, Mapping) else ""
            yield from (((*keys, key, "Options"), word) for word in parse_options(given))
