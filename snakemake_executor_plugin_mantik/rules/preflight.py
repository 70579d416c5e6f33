"""Refuse jobs that cannot run at a site before any job is submitted.

For each rule, render the command of one job to find misspelt names now. Snakemake formats a command
when its job is ready, which may be days after the first submission, and ends the whole run if that
fails.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias

from snakemake import __version__
from snakemake.exceptions import RuleException, format_exception_to_string
from snakemake.io import is_callable, is_flagged
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.settings import DeploymentMethod

from ..common.errors import (
    ConfigError,
    Mistake,
    MistakeCollector,
    UserError,
    did_you_mean,
    printable,
    shorten_list,
)
from ..common.state_directory import replace_file
from ..config.exclude import Exclude
from ..jobs.paths import OURS
from ..jobs.resources import foreign_resource, suggest_resource
from ..mlproject.project import folder_mistake
from ..storage.paths import find_dataset, storable_path, uses_provider, workspace_path
from .context import refuse_rules
from .deployment import conda_file_mistake, deployment_mistake, launcher_mistake
from .kinds.groups import Unit, group_obstacle
from .kinds.shell_command import format_resources, placeholder_in_group
from .make_request import SECRET_FILES, make_payload, secret_mistake
from .onsite.nested_snakemake import LACK
from .paths.job_paths import UNKNOWN, command_text, expand_params
from .paths.storage import is_unstaged, jobs_use_storage, local_mistake, stored_mistake
from .paths.workflow_code import is_source_file
from .site_job import SiteJob

_Find: TypeAlias = Callable[[Unit, SiteJob], str | None]


@dataclass(frozen=True)
class Check:
    """Something that can be wrong with jobs.

    Attributes:
        what, do: what is wrong with rules of which a job has this mistake, and what to do.
        find: returns the mistake of a member of a unit as words that follow "rule NAME", or None.
        here: the same for a job that runs on this machine.
        lines: whether the message has a line for each rule.
    """

    what: str
    do: str
    find: _Find
    here: _Find = lambda _, __: None
    lines: bool = False

    def refuse(self, units: Iterable[Unit], found: MistakeCollector | None = None) -> set[str]:
        """Refuse mistaken units, or collect that in `found`; return the mistaken rules."""
        mistakes: dict[str, str] = {}
        for unit in units:
            find = self.here if unit.job.is_local else self.find
            mistakes |= {at.rule.name: why for at in unit.members if (why := find(unit, at))}
        with found.check() if found is not None else nullcontext():
            if self.lines:
                refuse_lines(self.what, (f"rule {r}: {mistakes[r]}" for r in mistakes), self.do)
            else:
                refuse_rules(mistakes, self.what, self.do)
        return set(mistakes)


def refuse_lines(what: str, mistakes: Iterable[str], do: str = "") -> None:
    """Refuse a workflow if there are mistakes, and list several on a line each.

    Raises:
        UserError: `what` is wrong.
    """
    if listed := [mistake.replace("\n", "\n  ") for mistake in mistakes]:
        between = "\n  " if len(listed) > 1 else " "
        words = [f"nothing submitted: {what}:", *shorten_list(listed)]
        raise UserError(between.join(words), do=do)


def _obstacle(unit: Unit, at: SiteJob) -> str | None:
    """Return why a job cannot run at a site."""
    # The first two come first because the others read all values, and the script.
    return (
        placeholder_in_group(unit.job, at.job)
        or _deployed_here(at)
        or _script(at)
        or (at.entry_point and folder_mistake(at.entry_point.project.relative_folder()))
        or stored_mistake(at.job, at.nested)
        or _paths(at)
        or group_obstacle(unit, at)
    )


def _slip(_: Unit, at: SiteJob) -> str | None:
    """Return which resources have names that are one slip away from one that sites get.

    The job would run without what the rule requests. Resources that Snakemake itself limits
    (`--resources`) are the workflow's own.
    """
    limits = at.rule.workflow.global_resources
    meant = {name: suggest_resource(name) for name in at.given if name not in limits}
    slips = [f"{name}{did_you_mean(likely)}" for name, likely in meant.items() if likely]
    return f"there is no resource {' or '.join(slips)}" if slips else None


def _two_names(_: Unit, at: SiteJob) -> str | None:
    """Return which files Snakemake would take for two: others name them in the other way."""
    if not uses_provider(at.rule.workflow):
        return None
    stored, plain = _names([at.job])
    of_others = _names_of_all(at.job.dag, len(at.job.dag))
    both = [p for p in stored if p in plain or p in of_others[1]]
    both += [p for p in plain if p in of_others[0] and p not in both]
    return f"a file is named with and without storage.mantik: {', '.join(both)}" if both else None


@lru_cache(maxsize=1)
def _names_of_all(dag: Any, _: int) -> tuple[dict[str, None], dict[str, None]]:
    """Return the names of a workflow's files, anew when more of its jobs run or have ended."""
    return _names(dag.jobs)


def _names(jobs: Iterable[Any]) -> tuple[dict[str, None], dict[str, None]]:
    """Return the files that jobs name with `storage.mantik`, and those that they name without."""
    stored, plain = dict[str, None](), dict[str, None]()
    for path in (path for job in jobs for path in (*job.input, *job.output)):
        if (there := storable_path(path)) is not None:
            stored[there] = None
        elif not path.is_storage and not is_flagged(path, "local"):
            plain[workspace_path(str(path))] = None
    return stored, plain


def _dataset_mistake(_: Unit, at: SiteJob) -> str | None:
    sites = at.context.sites
    for dataset in filter(None, map(find_dataset, at.job.input)):
        if (there := sites.get(dataset.site)) is None:
            known = ", ".join(sites)
            return f"reads {dataset}, but there is no site {dataset.site!r}, only {known}"
        if at.config.server != there.config.server:
            return f"reads {dataset} and runs at {at.site}: datasets do not move between sites"
    return None


def _entry_point_mistake(_: Unit, at: SiteJob) -> str | None:
    """Return which values of an entry point are wrong, and whether its site gets its project."""
    if at.entry_point is None:
        return None
    mistakes: list[Mistake] = []
    try:
        at.entry_point.check(at.job.wildcards)
    except ConfigError as error:
        mistakes += error.mistakes
    folder = str(at.entry_point.project.relative_folder())
    if folder != "." and Exclude(at.config.exclude).matches(folder, is_dir=True):
        what = f"leaves out {folder}, which the entry point is in"
        mistakes.append(Mistake(str(at.context.sites[at.site].path), "Exclude", what))
    return f"cannot run its entry point: {'; '.join(map(str, mistakes))}" if mistakes else None


def _missing_snakemake(_: Unit, at: SiteJob) -> str | None:
    """Return that an earlier nested Snakemake found no fitting Snakemake at the site."""
    if not at.nested or at.environment or not (said := at.context.lacks.get(at.site)):
        return None  # the records are about `Environment`
    return f"cannot run at {at.site}, where the last such job reported: {said}"


OBSTACLES: Final = Check(
    "not every rule can run at a site yet",
    "Correct these rules, or name them in localrules: to run them here",
    _obstacle,
    here=lambda _, at: local_mistake(at.job),
)
CHECKS: Final = (
    Check(
        "sites would not get these resources",
        "Rename them. One that the workflow limits itself needs a limit, as in --resources"
        " NAME=100",
        _slip,
        lines=True,
    ),
    Check(
        "Snakemake would take a file for two",
        "Name it with storage.mantik in all rules, or in none",
        _two_names,
        here=_two_names,
        lines=True,
    ),
    Check(
        "datasets are not where they are read",
        "Name the site of the rule (resources: mantik_site) in storage.mantik, or the dataset's"
        " site in the rule",
        _dataset_mistake,
    ),
    Check(
        "the environments of some rules are not available",
        "Correct these rules",
        lambda _, at: deployment_mistake(at) or launcher_mistake(at),
        here=lambda _, at: conda_file_mistake(at.job),
    ),
    Check(*SECRET_FILES, lambda _, at: secret_mistake(at)),
    Check(
        "the entry points of some rules cannot run",
        "Correct their values, or the config",
        _entry_point_mistake,
    ),
    Check(
        "not every site has the Snakemake that rules need there",
        "If you have installed it since, run smk-mantik bootstrap SITE to check again",
        _missing_snakemake,
    ),
)
"""What each job is asked before it is submitted, once it has a site and no obstacle."""


def find_mistakes(units: Iterable[Unit], linemaps: Any) -> dict[str, str]:
    """Render the command of one job of each rule, and return the errors by rule.

    Jobs that run on this machine are checked, too, because they also end a run. Snakemake's
    `linemaps` map its generated code to lines of Snakefiles.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    for at in chain.from_iterable(unit.members for unit in units):
        name = at.rule.name
        if name in seen or not is_determined(at):
            continue
        seen.add(name)
        try:
            # Reading these formats them. `shellcmd` differs from the command that will run.
            at.job.message, at.job.shellcmd  # noqa: B018
            if not at.job.is_local:
                make_payload(at, None if at.job.benchmark is None else 0)
        except (UserError, RuleException, WorkflowError) as error:
            if not _may_change(at, error):
                found[name] = describe_error(error, linemaps)
    return found


def describe_error(error: Exception, linemaps: Any) -> str:
    """Return the message of an error of ours or of Snakemake, with its line in the Snakefile."""
    if isinstance(error, UserError):
        return str(error)
    return str(format_exception_to_string(error, linemaps).strip())


def refuse_mistakes(found: Mapping[str, str]) -> None:
    """Refuse the workflow if `find_mistakes` has found any mistake."""
    what = "the commands of these rules cannot be made"
    refuse_lines(what, (found[name] for name in sorted(found)), "Correct these rules")


def is_determined(at: SiteJob) -> bool:
    """Return whether no value of a job depends on files that are not made yet."""
    if not _waits(at):
        return True
    job = at.job
    try:
        params = job.params
        if UNKNOWN in str(params):  # perhaps only the node's temporary directory is unknown
            params = expand_params(job, (job.input, job.output), format_resources(job))
        # A script gets all resources, such as the memory that is a default for the sizes of inputs.
        given = dict(job.resources.items()) if job.is_script or job.is_notebook else {}
        given.pop("tmpdir", None)
        return UNKNOWN not in str((params, at.given, given, job.threads))
    except (RuleException, WorkflowError):
        return False


def _may_change(at: SiteJob, error: Exception) -> bool:
    """Return whether files that are not made yet may be the cause of an error."""
    why = error.__cause__ or error.__context__
    looks = isinstance(why, OSError) or any(map(is_callable, at.rule.params))
    return looks and isinstance(why, OSError | LookupError) and _waits(at)


def _waits(at: SiteJob) -> bool:
    return not all(find_dataset(path) or os.path.lexists(path) for path in at.job.input)


def _deployed_here(at: SiteJob) -> str | None:
    """Return that a job's environment would be deployed on this machine alone."""
    deployed = {
        DeploymentMethod.CONDA: at.rule.conda_env,
        DeploymentMethod.APPTAINER: at.rule.container_img,
        DeploymentMethod.ENV_MODULES: at.rule.env_modules,
    }
    for method in at.context.deployed_here:
        if deployed.get(method):
            return (
                f"has an environment that --software-deployment-method {method} deploys on this"
                f" machine and not at a site (use --mantik-software-deployment {method} instead,"
                f" also of use-{str(method).replace('-', '')} in a profile)"
            )
    return None


def _script(at: SiteJob) -> str | None:
    if not (at.rule.is_script or at.rule.is_notebook):
        return None
    # Imported here because it imports Snakemake's support for languages and notebooks.
    from .kinds.scripts import script_mistake

    return script_mistake(at)


def _paths(at: SiteJob) -> str | None:
    """Return why a path of a job cannot be mapped to one at a site, or None."""
    job, directive = at.job, at.nested
    benchmark = [job.benchmark] if job.benchmark is not None else []
    if jobs_use_storage(job.rule.workflow):
        if any(is_flagged(path, "nodelocal") for path in job.output):
            return (
                "makes a temp(…, group_jobs=True) file, which would have to stay on the node, but"
                " with --shared-fs-usage none no file stays there (remove group_jobs)"
            )
        if job.is_norun and job.output:
            # Snakemake (9.27) fetches no inputs for such a job at a site, and then misses them.
            return (
                "has no command and is in a group, but with --shared-fs-usage none the files that"
                ' it touches are not stored (take it out of the group, or add shell: ":")'
            )
    for file in [*job.input, *job.output, *job.log, *benchmark]:
        path = str(file) if find_dataset(file) is not None else command_text(file)
        if os.path.relpath(path).split("/")[0] == OURS:
            return (
                f"uses {path}: {OURS} is the executor's own directory at a site (use another"
                " directory)"
            )
        if job.rule.shadow_depth is not None and ".." in path.split("/"):
            return (
                f"has a shadow: directive and uses {path}, a relative path out of the working"
                " directory (use an absolute path)"
            )
        if directive is None or is_source_file(file) or is_unstaged(job, file):
            continue
        if os.path.isabs(path) or ".." in path.split("/"):
            return (
                f"has {directive} and uses {path}: the Snakemake at the site that runs it finds"
                " only files with a plain path in the working directory (use such a path; shell:"
                " and script: accept any)"
            )
    return None


def foreign_resources(jobs: Iterable[SiteJob]) -> str:
    """Return a line about resources that sites do not get, though their names say that they should.

    Many workflows have them for other systems (`mem_gb`), or beside the one that is meant. Empty if
    there are none, apart from those that Snakemake itself limits.
    """
    rules: dict[tuple[str, str], dict[str, None]] = {}
    for at in jobs:
        limits = at.rule.workflow.global_resources
        for name in at.given:
            meant = foreign_resource(name)
            if meant and meant.partition(",")[0] not in at.given and name not in limits:
                rules.setdefault((name, meant), {})[at.rule.name] = None
    listed = [
        f"{name} of {', '.join(shorten_list(of))} (sites get {meant})"
        for (name, meant), of in sorted(rules.items())
    ]
    return f"Sites do not get these resources: {'; '.join(listed)}." if listed else ""


class MissingSnakemake:
    """Records, by site, the message of a nested Snakemake that found no fitting Snakemake.

    The next run refuses early then. A record does not count any more if the backend config's
    environment (image, modules, Python, variables, hooks) or the Snakemake on this machine changes.
    `smk-mantik bootstrap` removes it, and so does a nested Snakemake that succeeds.
    """

    def __init__(self, state: Path, environments: Mapping[str, str]) -> None:
        """Read the records. `environments` has the environment of each site as text."""
        self._path = state / "lacks.json"
        self._environments = {
            name: hashlib.sha256(f"{__version__}\0{text}".encode()).hexdigest()[:16]
            for name, text in environments.items()
        }
        try:
            self._known: dict[str, dict[str, str]] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            self._known = {}  # the next nested Snakemake will report the lack again

    @property
    def said(self) -> dict[str, str]:
        """The messages that still count, by site."""
        return {
            site: self._known[site]["said"]
            for site, environment in self._environments.items()
            if self._known.get(site, {}).get("environment") == environment
        }

    def note(self, site: str, log: Path) -> None:
        """Record the message of a failed job if it found no fitting Snakemake."""
        try:
            lines = log.read_text(errors="replace").splitlines()
        except OSError:
            return
        # In a group the member's name precedes the message.
        said = next((line.partition(LACK)[2] for line in lines if LACK in line), None)
        if said is not None:
            message = printable(f"{LACK}{said}".removeprefix("mantik:").strip())
            self._known[site] = {"environment": self._environments[site], "said": message}
            replace_file(self._path, json.dumps(self._known))

    def forget(self, site: str) -> None:
        if self._known.pop(site, None) is not None:
            replace_file(self._path, json.dumps(self._known))
