"""Refuse what cannot run at a site before any job is submitted.

Each job's command is made once, so that a misspelt name in it shows now: Snakemake formats a
command when its job is ready, which may be days after the first one was submitted, and ends the
whole run if it cannot.
"""

import os
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Final

from snakemake.common.tbdstring import TBDString
from snakemake.exceptions import RuleException, format_exception_to_string
from snakemake.io import is_callable, is_flagged
from snakemake.settings.types import DeploymentMethod
from snakemake_interface_common.exceptions import WorkflowError

from snakemake_executor_plugin_mantik.common.errors import UserError, WorkflowNotRunnable
from snakemake_executor_plugin_mantik.jobs.paths import OURS
from snakemake_executor_plugin_mantik.mlproject.project import (
    find_bound_entry_point,
    folder_mistake,
)
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.context import RuleContext
from snakemake_executor_plugin_mantik.rules.kinds.groups import group_obstacle
from snakemake_executor_plugin_mantik.rules.kinds.shell_command import (
    NODE_TMPDIR,
    format_resources,
    job_tmpdir,
)
from snakemake_executor_plugin_mantik.rules.paths.path_rewriting import replace_resources
from snakemake_executor_plugin_mantik.rules.paths.source_files import is_source_file
from snakemake_executor_plugin_mantik.rules.paths.storage import is_unstaged, jobs_use_storage
from snakemake_executor_plugin_mantik.rules.payload import make_payload, why_full_job
from snakemake_executor_plugin_mantik.rules.resources import given_resources
from snakemake_executor_plugin_mantik.rules.units import list_members
from snakemake_executor_plugin_mantik.staging.secret_files import CredentialFiles

_UNKNOWN: Final = str(TBDString())


def find_mistakes(
    dag: Any, units: Iterable[Job], context: RuleContext, linemaps: Any
) -> dict[str, str]:
    """Why what some rules run cannot be made, by rule; found with one job of each rule.

    Args:
        dag: Snakemake's graph of jobs: those that run here end the run as well.
        units: jobs and groups that run at sites.
        context: of the run.
        linemaps: Snakemake's, which lead from its code to lines of Snakefiles.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    here = (job for job in dag.needrun_jobs() if job.is_local)
    for job in chain(here, *map(list_members, units)):
        name = job.rule.name
        if name in seen or not _determined(job):
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
    """See to it that there are no mistakes.

    Raises:
        WorkflowNotRunnable: telling all of them.
    """
    if found:
        told = "\n".join(found[name] for name in sorted(found)).replace("\n", "\n  ")
        raise WorkflowNotRunnable(
            f"nothing submitted, since what these rules run cannot be made:\n  {told}",
            do="Correct them",
        )


def _make(job: Job, context: RuleContext) -> None:
    """Make what Snakemake tells of a job, and what runs."""
    # Both are formatted when they are read, the latter other than it will run.
    job.message, job.shellcmd  # noqa: B018
    if not job.is_local:
        make_payload(job, context, job_tmpdir(job), None if job.benchmark is None else 0)


def _determined(job: Job) -> bool:
    """Whether nothing of a job follows from files that are still to be made."""
    if not _waits(job):
        return True
    try:
        values = given_resources(job)
        params = job.params
        if _UNKNOWN in str(params):  # it may be the node's directory for temporary files alone
            params = replace_resources(job, format_resources(job, NODE_TMPDIR))
    except (RuleException, WorkflowError):
        return False
    return _UNKNOWN not in str((params, values, job.threads))


def _may_change(job: Job, error: Exception) -> bool:
    """Whether what went wrong may be for want of files that are still to be made."""
    why = error.__cause__ or error.__context__
    looks = isinstance(why, OSError) or any(map(is_callable, job.rule.params))
    return looks and isinstance(why, OSError | LookupError) and _waits(job)


def _waits(job: Job) -> bool:
    """Whether inputs of a job are still to be made."""
    return not all(map(os.path.lexists, job.input))


def _obstacle(job: Job, deployment: Iterable[DeploymentMethod]) -> str | None:
    """Why a job cannot run at a site yet, in words that follow "rule NAME"; None if it can.

    A job, not a group: the members of one are asked for each by itself.
    """
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
    return _script(job) or _project(job) or _paths(job)


def _script(job: Job) -> str | None:
    """What of a script or notebook cannot run."""
    if not (job.rule.is_script or job.rule.is_notebook):
        return None
    # It imports the parts of Snakemake that know languages and notebooks.
    from snakemake_executor_plugin_mantik.rules.kinds.scripts import script_mistake

    return script_mistake(job)


def _project(job: Job) -> str | None:
    """What of an MLproject is not at a site."""
    given = find_bound_entry_point(job.rule.params)
    return folder_mistake(given.project.relative_folder()) or None if given is not None else None


def _paths(job: Job) -> str | None:
    """Which path of a job cannot be mapped to one at a site."""
    directive = why_full_job(job)
    benchmark = [job.benchmark] if job.benchmark is not None else []
    if jobs_use_storage(job.rule.workflow):
        if any(is_flagged(path, "nodelocal") for path in job.output):
            return (
                "makes a temp(…, group_jobs=True) file, which stays on the node, where with"
                " --shared-fs-usage none nothing stays (leave out group_jobs)"
            )
        if job.is_norun and job.output:
            # Snakemake (9.27) fetches no inputs for it at a site, and then misses them.
            return (
                "has no command and is in a group, where with --shared-fs-usage none nobody stores"
                ' what it touches (take it out of the group, or give it a shell: of ":")'
            )
    for path in [*job.input, *job.output, *job.log, *benchmark]:
        if os.path.relpath(path).split("/")[0] == OURS:
            return f"uses {path}: {OURS} is the executor's own directory at a site"
        if job.rule.shadow_depth is not None and ".." in path.split("/"):
            return f"has a shadow: directive and uses {path}, which has to be an absolute path"
        if directive is None or is_source_file(path) or is_unstaged(job, path):
            continue
        if os.path.isabs(path) or ".." in path.split("/"):
            return (
                f"has {directive} and uses {path}: the Snakemake at the site that runs it finds"
                " only what has a plain path in the working directory (shell: and script: take any)"
            )
    return None


def _credential(job: Job, credentials: CredentialFiles) -> str | None:
    """Which input of a job is a credential, or a directory with one in it."""
    for path in job.input:
        for file, variable in credentials.below(path).items():
            where = "" if os.path.samefile(file, path) else f", in which {file} lies"
            return (
                f"reads {path}{where}: the credential that {variable} names is never sent to a site"
                " (move it to where no job reads it)"
            )
    return None


def refuse_jobs(jobs: Iterable[Job], deployment: Iterable[DeploymentMethod]) -> None:
    """See to it that all `jobs`, groups among them, can run at a site.

    Raises:
        WorkflowNotRunnable: telling each rule that cannot, once, and why.
    """
    deployment = tuple(deployment)
    found: dict[str, str] = {}
    credentials = CredentialFiles.named_by(os.environ)
    for job in jobs:
        for member in list_members(job):
            reason = (
                _obstacle(member, deployment)
                or group_obstacle(job, member)
                or _credential(member, credentials)
            )
            if reason is not None:
                found[member.rule.name] = reason
    if found:
        raise WorkflowNotRunnable(
            "not every rule can run at a site yet (nothing submitted): "
            + "; ".join(f"rule {name} {reason}" for name, reason in sorted(found.items())),
            do="Correct these rules, or name them in localrules: to run them here",
        )
