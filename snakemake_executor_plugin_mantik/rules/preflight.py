"""Refuse jobs that cannot run at a site before any job is submitted.

For each rule, render the command of one job to find misspelt names now. Snakemake formats a command
when its job is ready, which may be days after the first submission, and ends the whole run if that
fails.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from snakemake import __version__
from snakemake.exceptions import RuleException, format_exception_to_string
from snakemake.io import is_callable, is_flagged
from snakemake.settings.types import DeploymentMethod
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_mantik.common.errors import (
    UserError,
    printable,
    shorten_list,
)
from snakemake_executor_plugin_mantik.jobs.paths import OURS
from snakemake_executor_plugin_mantik.mlproject.project import (
    find_bound_entry_point,
    folder_mistake,
)
from snakemake_executor_plugin_mantik.storage.paths import find_dataset

from . import Job
from .context import RuleContext, refuse_rules
from .kinds.groups import group_obstacle
from .kinds.shell_command import format_resources, placeholder_in_group
from .make_request import make_payload, why_full_job
from .onsite.full_job import LACK
from .paths.job_paths import UNKNOWN, command_text, expand_params
from .paths.storage import is_unstaged, jobs_use_storage, local_mistake, stored_mistake
from .paths.workflow_code import is_source_file
from .resources import ENVIRONMENT_RESOURCE, choose_site, given_resources, split_undetermined
from .units import list_members


def find_mistakes(
    dag: Any, units: Iterable[Job], context: RuleContext, linemaps: Any
) -> dict[str, str]:
    """Render the command of one job of each rule, and return the errors by rule.

    `units` run at sites. Local jobs of `dag` are checked too, because they also end a run.
    Snakemake's `linemaps` map its generated code to lines of Snakefiles.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    here = (job for job in dag.needrun_jobs() if job.is_local)
    for job in chain(here, *map(list_members, units)):
        name = job.rule.name
        if name in seen or not is_determined(job):
            continue
        seen.add(name)
        try:
            _make(job, context)
        except UserError as error:
            if not _may_change(job, error):
                found[name] = str(error)
        except (RuleException, WorkflowError) as error:
            if not _may_change(job, error):
                found[name] = format_exception_to_string(error, linemaps).strip()
    return found


def refuse_mistakes(found: Mapping[str, str]) -> None:
    """Refuse the workflow if `find_mistakes` has found any mistake.

    Raises:
        UserError: lists all mistakes.
    """
    if found:
        listed = shorten_list(found[name] for name in sorted(found))
        mistakes = "\n".join(listed).replace("\n", "\n  ")
        raise UserError(
            f"nothing submitted: the commands of these rules cannot be made:\n  {mistakes}",
            do="Correct these rules",
        )


def _make(job: Job, context: RuleContext) -> None:
    """Render a job's message and Snakemake's own command, and the command that runs at a site."""
    # Reading these formats them. `shellcmd` differs from the command that will run.
    job.message, job.shellcmd  # noqa: B018
    if not job.is_local:
        make_payload(job, context, None if job.benchmark is None else 0)


def is_determined(job: Job) -> bool:
    """Return whether no value of a job depends on files that are not made yet."""
    if not _waits(job):
        return True
    try:
        values = given_resources(job)
        params = job.params
        if UNKNOWN in str(params):  # perhaps only the node's temporary directory is unknown
            lists = job.input, job.output
            params = expand_params(job, lists, format_resources(job))
    except (RuleException, WorkflowError):
        return False
    return UNKNOWN not in str((params, values, job.threads))


def _may_change(job: Job, error: Exception) -> bool:
    """Return whether files that are not made yet may be the cause of an error."""
    why = error.__cause__ or error.__context__
    looks = isinstance(why, OSError) or any(map(is_callable, job.rule.params))
    return looks and isinstance(why, OSError | LookupError) and _waits(job)


def _waits(job: Job) -> bool:
    return not all(find_dataset(path) or os.path.lexists(path) for path in job.input)


def _obstacle(job: Job, deployment: Iterable[DeploymentMethod]) -> str | None:
    """Return why a single job cannot run at a site, as words that follow "rule NAME", or None."""
    deployed = {
        DeploymentMethod.CONDA: job.rule.conda_env,
        DeploymentMethod.APPTAINER: job.rule.container_img,
        DeploymentMethod.ENV_MODULES: job.rule.env_modules,
    }
    for method in deployment:
        if deployed.get(method):
            return (
                f"has an environment that --software-deployment-method {method} deploys on this"
                f" machine and not at a site (use --mantik-software-deployment {method} instead)"
            )
    return (
        _script(job)  # first: the others read the script
        or _project(job)
        or stored_mistake(job, why_full_job(job))
        or _paths(job)
    )


def _script(job: Job) -> str | None:
    if not (job.rule.is_script or job.rule.is_notebook):
        return None
    # Imported here because it imports Snakemake's support for languages and notebooks.
    from .kinds.scripts import script_mistake

    return script_mistake(job)


def _project(job: Job) -> str | None:
    """Return what is wrong with the folder of the job's MLproject, or None."""
    given = find_bound_entry_point(job.rule.params)
    return folder_mistake(given.project.relative_folder()) or None if given is not None else None


def _paths(job: Job) -> str | None:
    """Return why a path of a job cannot be mapped to one at a site, or None."""
    directive = why_full_job(job)
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


def find_obstacles(jobs: Iterable[Job], deployment: Iterable[DeploymentMethod]) -> dict[str, str]:
    """Return why jobs and members of groups cannot run at a site, or here if local, by rule.

    `deployment` holds the methods that Snakemake deploys on this machine and not at sites.
    """
    deployment = tuple(deployment)
    found: dict[str, str] = {}
    for job in jobs:
        for member in list_members(job):
            reason = (
                local_mistake(member)
                if member.is_local
                else (
                    placeholder_in_group(job, member)  # first: the others read all values
                    or _obstacle(member, deployment)
                    or group_obstacle(job, member)
                )
            )
            if reason is not None:
                found[member.rule.name] = reason
    return found


def refuse_jobs(jobs: Iterable[Job], deployment: Iterable[DeploymentMethod]) -> None:
    """Refuse the jobs for which `find_obstacles` finds an obstacle.

    Raises:
        UserError: there is one.
    """
    refuse_obstacles(find_obstacles(jobs, deployment))


def refuse_obstacles(found: Mapping[str, str]) -> None:
    """Refuse the workflow if `find_obstacles` has found any obstacle.

    Raises:
        UserError: lists each rule, once, with the reason.
    """
    refuse_rules(
        found,
        "not every rule can run at a site yet",
        do="Correct these rules, or name them in localrules: to run them here",
    )


class MissingSnakemake:
    """Records, by site, the message of a full job that found no fitting Snakemake.

    The next run refuses early then. A record does not count any more if the backend config's
    environment (image, modules, Python, variables, hooks) or the Snakemake on this machine changes.
    `smk-mantik bootstrap` removes it, and so does a full job that succeeds.
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
            self._known = {}  # the next full job will report the lack again

    def refuse(self, jobs: Iterable[Job]) -> None:
        """Refuse full jobs at sites where an earlier one found no fitting Snakemake.

        Raises:
            UserError: there are such jobs. Quotes the message of the last one.
        """
        rules: dict[str, dict[str, None]] = {}
        for job in jobs:
            if why_full_job(job) is None:
                continue
            try:
                given, _ = split_undetermined(given_resources(job))
                site = choose_site(given, self._environments)
                if given.get(ENVIRONMENT_RESOURCE) is not None:
                    continue  # the records are about `Environment`
            except UserError:
                continue  # reported with all other mistakes in resources
            if self._lack(site):
                rules.setdefault(site, {})[job.rule.name] = None
        if rules:
            raise UserError(
                "nothing submitted: "
                + "; ".join(
                    f"{'rule' if len(names) == 1 else 'rules'} {', '.join(names)} cannot run at"
                    f" {site}, where the last such job reported: {self._lack(site)}"
                    for site, names in rules.items()
                ),
                do="If you have installed it since, run smk-mantik bootstrap SITE to check again",
            )

    def _lack(self, site: str) -> str:
        known = self._known.get(site, {})
        same = known.get("environment") == self._environments[site]
        return known.get("said", "") if same else ""

    def note(self, site: str, log: Path) -> None:
        """Record the message of a failed job if it found no fitting Snakemake."""
        try:
            lines = log.read_text(errors="replace").splitlines()
        except OSError:
            return
        for line in lines:
            # In a group the member's name precedes the message.
            _, found, more = line.partition(LACK)
            if found:
                message = printable(f"{LACK}{more}".removeprefix("mantik:").strip())
                self._known[site] = {"environment": self._environments[site], "said": message}
                self._write()
                return

    def forget(self, site: str) -> None:
        """Remove the record of a site that has a Snakemake now."""
        if self._known.pop(site, None) is not None:
            self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._known))
        os.replace(new, self._path)
