"""What a Snakemake job asks of its site: resources, the site, its environments, its kind.

Each value is worked out when it is first read, and once. Snakemake evaluates a job again when its
inputs exist, and files change: all checks and forecasts before a run share one `SiteJob` for each
job, and each submission makes another.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from snakemake.common.tbdstring import TBDString
from snakemake.deployment.conda import CondaEnvFileSpec
from snakemake.io import is_flagged
from snakemake.sourcecache import LocalSourceFile
from snakemake_interface_executor_plugins.settings import DeploymentMethod

from ..common.errors import UserError
from ..config.environment_keys import EnvironmentConfig
from ..config.model import BackendConfig
from ..jobs.segments import (
    CONTINUE,
    SEGMENT_RESOURCES,
    Continuation,
    parse_continuation,
    parse_time,
)
from ..mlproject.project import BoundEntryPoint, Project, find_bound_entry_point
from ..storage.paths import find_dataset, storable_path
from . import Job
from .context import Method, RuleContext
from .paths.job_paths import JobPaths
from .paths.storage import WORDS, jobs_use_storage
from .resources import (
    ANY_SITE,
    SITE_RESOURCE,
    WAIT_RESOURCE,
    choose_environment,
    choose_sites,
    given_resources,
)

if TYPE_CHECKING:
    from .kinds.script_file import ScriptFile

_KINDS: Final = (
    ("is_wrapper", "wrapper:"),
    ("is_cwl", "cwl:"),
    ("is_template_engine", "template_engine:"),
    ("is_run", "run:"),
)

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
    modules, image = job.rule.env_modules, job.container_img_url
    bare = job.rule.ruleinfo.container_img is False  # the rule does not keep `container: None`
    if not (modules or job.conda_env_spec or image or bare):
        return _of_project(job, methods)
    in_image = DeploymentMethod.APPTAINER in methods
    with_modules = modules and DeploymentMethod.ENV_MODULES in methods
    return RuleEnvironment(
        modules=tuple(modules.names) if with_modules else None,
        conda=job.conda_env_spec if DeploymentMethod.CONDA in methods else None,
        container=str(image) if in_image and image else None,
        bare=bare and in_image,
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


class SiteJob:
    """A single job of Snakemake, and what it asks of the site that it runs at.

    Reading a value raises `UserError` if the rule's declaration of it is wrong, and an error of
    Snakemake if it cannot be evaluated.
    """

    def __init__(self, job: Job, context: RuleContext, left: tuple[str, ...] = ()) -> None:
        """Prepare; `left` are the sites that it may still go to, in order; empty for all its."""
        self.job = job
        self.rule: Any = job.rule
        self.context = context
        self._left = left

    @cached_property
    def given(self) -> dict[str, object]:
        """The resources that the user requested: see `resources.given_resources`."""
        return given_resources(self.job)

    @cached_property
    def later(self) -> frozenset[str]:
        """The names of resources that depend on files not made yet.

        Snakemake uses a placeholder for a function of `input` (`input.size_mb`) until these exist.
        """
        return frozenset(name for name, value in self.given.items() if isinstance(value, TBDString))

    @cached_property
    def _placed(self) -> tuple[tuple[str, ...], dict[str, object]]:
        known = {name: value for name, value in self.given.items() if name not in self.later}
        return choose_sites(known, self.context.sites), known

    @property
    def known(self) -> dict[str, object]:
        """The other resources, without the site."""
        return self._placed[1]

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """The names of the sites that it may run at, in order; the first one if none is known yet.

        A job whose inputs may stay at a site runs at the first one; one that may run anywhere runs
        where they are, which for outputs of other jobs is known when they exist.
        """
        names, _ = self._placed
        if len(names) > 1 and not self.anywhere and (self._datasets or self.storable):
            names = names[:1]
        elif self.anywhere:
            names = tuple(name for name in names if name in self._datasets)[:1] or names
        return tuple(name for name in self._left if name in names) or names

    @property
    def anywhere(self) -> bool:
        """Whether it leaves the choice of its site to the executor."""
        return self.given.get(SITE_RESOURCE) == ANY_SITE

    @property
    def _datasets(self) -> set[str]:
        """The names of the sites whose datasets it reads."""
        return {found.site for path in self.job.input if (found := find_dataset(path))}

    @property
    def storable(self) -> list[str]:
        """The paths of those of its inputs that may be remote outputs."""
        return [path for given in self.job.input if (path := storable_path(given)) is not None]

    @property
    def site(self) -> str:
        return self.sites[0]

    @property
    def patience_s(self) -> int | None:
        """How long it may wait to start at its site; None at the last of its sites.

        Raises:
            UserError: the value is no time.
        """
        wait = self.known.get(WAIT_RESOURCE)
        patience_s = None if wait is None else parse_time(WAIT_RESOURCE, wait)
        return patience_s if len(self.sites) > 1 else None

    @property
    def waits_in_vain(self) -> bool:
        """Whether it says how long it may wait to start at a site, and names no other to go to."""
        one = not self.anywhere and len(self._placed[0]) == 1
        return one and self.has_site and self.known.get(WAIT_RESOURCE) is not None

    @property
    def has_site(self) -> bool:
        return SITE_RESOURCE not in self.later

    @property
    def config(self) -> BackendConfig:
        return self.context.sites[self.site].config

    @cached_property
    def environment(self) -> str:
        """The name of the config's environment that it runs in; empty for the default."""
        return choose_environment(self.known, self.config)

    @property
    def software(self) -> EnvironmentConfig:
        """The environment of the backend config in which it runs."""
        return self.config.all_environments[self.environment]

    @cached_property
    def own(self) -> RuleEnvironment:
        """Its own environment, as far as that is deployed at sites."""
        return read_own(self.job, self.context.deployment)

    @cached_property
    def entry_point(self) -> BoundEntryPoint | None:
        """The entry point of an MLproject that it runs."""
        return find_bound_entry_point(self.rule.params)

    @cached_property
    def script(self) -> "ScriptFile | None":
        """Its script or notebook.

        Raises:
            WorkflowError: the file does not exist, or cannot be read.
        """
        if not (self.rule.is_script or self.rule.is_notebook):
            return None
        # Imported here because it imports Snakemake's support for languages and notebooks.
        from .kinds.script_file import find_script_file

        return find_script_file(self.job)

    @cached_property
    def nested(self) -> str | None:
        """Why it needs a Snakemake at its site, as words after "has"; None for plain scripts."""
        if jobs_use_storage(self.rule.workflow):
            return WORDS
        if self.script is not None:
            imported = self.script.needs_snakemake()
            return f"a script that imports {', '.join(imported)}" if imported else None
        return next((name for kind, name in _KINDS if getattr(self.rule, kind)), None)

    @cached_property
    def continuation(self) -> Continuation | None:
        """How it goes on past its walltime; None if it does not, or if that is not known yet."""
        found = {name: self.job.resources.get(name) for name in SEGMENT_RESOURCES}
        if any(isinstance(value, TBDString) for value in found.values()):
            return None
        paths = self.paths()
        updated = [p for p in self.job.output if is_flagged(p, "update")]
        places = [place for p in updated if (place := paths.place(p)) is not None]
        asked = parse_continuation(found, places, self.config.resources.segments or 0)
        if asked is None or self.nested is None:
            return asked
        if found[CONTINUE] is None:
            return None  # the site's default is for those that can
        raise UserError(
            f"the resource {CONTINUE} is not supported for a rule that has {self.nested}",
            do="Use shell:, or a script: that does not import Snakemake",
        )

    def paths(self) -> JobPaths:
        """Return the mapping of paths to its site, which remembers links of this machine."""
        return JobPaths(self.context.workdir, lambda: self.context.workspace(self.site))
