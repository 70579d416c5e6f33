"""Read a rule's own environment (`conda:`, `container:`, `envmodules:`), or its MLproject's."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from snakemake.deployment.conda import CondaEnvFileSpec
from snakemake.sourcecache import LocalSourceFile
from snakemake_interface_executor_plugins.settings import DeploymentMethod

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.mlproject.project import Project, find_bound_entry_point

from . import Job
from .context import Method

OPTION: Final = "--mantik-software-deployment"

ALL_METHODS: Final[tuple[Method, ...]] = (*DeploymentMethod, "venv")

METHODS: Final[dict[str, Method]] = {
    "python_env": "venv",
    "conda_env": DeploymentMethod.CONDA,
    "docker_env": DeploymentMethod.APPTAINER,
}
"""What deploys an environment, by its key in an MLproject file."""


def parse_methods(words: Iterable[str]) -> frozenset[Method]:
    """Return the methods that the setting names.

    Raises:
        UserError: a method is unknown.
    """
    known = {str(method): method for method in ALL_METHODS}
    if unknown := [word for word in words if word not in known]:
        raise UserError(
            f"there is no software deployment {', '.join(map(repr, unknown))}",
            where=OPTION,
            do=f"Use one of {', '.join(known)}; end the list with '--' if targets follow",
        )
    return frozenset(known[word] for word in words)


def nested_options(methods: Collection[Method]) -> list[str]:
    """Return the options with which a Snakemake at the site deploys the same methods."""
    names = sorted(str(method) for method in methods if isinstance(method, DeploymentMethod))
    return ["--software-deployment-method", *names] if names else []


@dataclass(frozen=True)
class RuleEnvironment:
    """A job's own environment. A part is None if the job has none, or if it is not requested.

    Attributes:
        modules: names of modules from `envmodules:`.
        conda: Snakemake's specification from `conda:`.
        container: path or URL from `container:` or `containerized:`.
        bare: whether the rule has `container: None`, and so runs in no container, not even in the
            backend config's.
        project: the MLproject whose environment this is, if the rule itself has none.
    """

    modules: tuple[str, ...] | None = None
    conda: Any = None
    container: str | None = None
    bare: bool = False
    project: Project | None = None

    def __bool__(self) -> bool:
        return bool(self.modules or self.conda or self.container or self.bare or self.project)

    def __str__(self) -> str:
        """Describe it in words: `conda: env.yaml and container: docker://x`."""
        if self.project is not None:
            return f"{self.project.environment} of {self.project.shown}"
        return " and ".join(self.directives().values())

    def directives(self) -> dict[Method, str]:
        """Return its parts as a Snakefile has them, by what deploys each."""
        found: dict[Method, str] = {}
        if spec := self.conda:
            file = isinstance(spec, CondaEnvFileSpec)
            shown = spec.file if file else getattr(spec, "path", None)
            found[DeploymentMethod.CONDA] = f"conda: {shown or spec.name}"
        if self.container or self.bare:
            found[DeploymentMethod.APPTAINER] = f"container: {self.container}"
        if self.modules:
            found[DeploymentMethod.ENV_MODULES] = f"envmodules: {', '.join(self.modules)}"
        return found


def read_own(job: Job, methods: Collection[Method]) -> RuleEnvironment:
    """Read a job's own environment, restricted to the requested methods."""
    rule = job.rule
    bare = rule.ruleinfo.container_img is False  # the rule itself does not keep `container: None`
    if not (rule.env_modules or job.conda_env_spec or job.container_img_url or bare):
        return _of_project(job, methods)
    return RuleEnvironment(
        modules=tuple(rule.env_modules.names)
        if DeploymentMethod.ENV_MODULES in methods and rule.env_modules
        else None,
        conda=job.conda_env_spec if DeploymentMethod.CONDA in methods else None,
        container=str(job.container_img_url)
        if DeploymentMethod.APPTAINER in methods and job.container_img_url
        else None,
        bare=bare and DeploymentMethod.APPTAINER in methods,
    )


def _of_project(job: Job, methods: Collection[Method]) -> RuleEnvironment:
    """Read the environment of the MLproject whose entry point a job runs."""
    given = find_bound_entry_point(getattr(job.rule, "params", None))
    environment = given.project.environment if given is not None else None
    if given is None or environment is None or METHODS[environment.key] not in methods:
        return RuleEnvironment()
    own = RuleEnvironment(project=given.project)
    if environment.key == "conda_env":
        file = LocalSourceFile(str(given.project.folder / environment.value))
        return replace(own, conda=CondaEnvFileSpec(file))
    if environment.key == "docker_env":
        image = environment.value
        return replace(own, container=image if "://" in image else f"docker://{image}")
    return own
