"""What a Snakemake job asks of its site: resources, the site, its environment, its kind.

Each value is worked out when it is first read, and once. Snakemake evaluates a job again when its
inputs exist, and files change: all checks and forecasts before a run share one `SiteJob` for each
job, and each submission makes another.
"""

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from snakemake.common.tbdstring import TBDString
from snakemake.io import is_flagged

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.environment_keys import EnvironmentConfig
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.jobs.segments import (
    CONTINUE,
    SEGMENT_RESOURCES,
    Continuation,
    parse_continuation,
)
from snakemake_executor_plugin_mantik.mlproject.project import (
    BoundEntryPoint,
    find_bound_entry_point,
)

from . import Job
from .context import RuleContext
from .own_environment import RuleEnvironment, read_own
from .paths.job_paths import JobPaths
from .paths.storage import WORDS, jobs_use_storage
from .resources import SITE_RESOURCE, choose_environment, choose_site, given_resources

if TYPE_CHECKING:
    from .kinds.script_file import ScriptFile

_KINDS: Final = (
    ("is_wrapper", "wrapper:"),
    ("is_cwl", "cwl:"),
    ("is_template_engine", "template_engine:"),
    ("is_run", "run:"),
)


class SiteJob:
    """A single job of Snakemake, and what it asks of the site that it runs at.

    Reading a value raises `UserError` if the rule's declaration of it is wrong, and an error of
    Snakemake if it cannot be evaluated.
    """

    def __init__(self, job: Job, context: RuleContext) -> None:
        self.job = job
        self.rule: Any = job.rule
        self.context = context

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
    def _placed(self) -> tuple[str, dict[str, object]]:
        known = {name: value for name, value in self.given.items() if name not in self.later}
        return choose_site(known, self.context.sites), known

    @property
    def known(self) -> dict[str, object]:
        """The other resources, without the site."""
        return self._placed[1]

    @property
    def site(self) -> str:
        """The name of its site; of the first one if that is not known yet."""
        return self._placed[0]

    @property
    def has_site(self) -> bool:
        """Whether its site is known."""
        return SITE_RESOURCE not in self.later

    @property
    def config(self) -> BackendConfig:
        """The backend config of its site."""
        return self.context.sites[self.site].config

    @cached_property
    def environment(self) -> str:
        """The name of the config's environment that it runs in; empty for the default."""
        return choose_environment(self.known, self.config)

    @property
    def software(self) -> EnvironmentConfig:
        """The environment of the backend config in which it runs."""
        return self.config.named_environment(self.environment)

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
    def full(self) -> str | None:
        """Why it needs a Snakemake at its site, as words after "has"; None for thin jobs."""
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
        if asked is None or self.full is None:
            return asked
        if found[CONTINUE] is None:
            return None  # the site's default is for those that can
        raise UserError(
            f"the resource {CONTINUE} is not supported for a rule that has {self.full}",
            do="Use shell:, or a script: that does not import Snakemake",
        )

    def paths(self) -> JobPaths:
        """Return the mapping of paths to its site, which remembers links of this machine."""
        return JobPaths(self.context.workdir, lambda: self.context.workspace(self.site))
