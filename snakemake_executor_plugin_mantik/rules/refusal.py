"""Which jobs cannot run at a site, and why."""

import os
from collections.abc import Callable, Iterable

from snakemake.settings.types import DeploymentMethod

from snakemake_executor_plugin_mantik.errors import WorkflowNotRunnable
from snakemake_executor_plugin_mantik.mlproject.project import folder_mistake, given_of
from snakemake_executor_plugin_mantik.rules import Job
from snakemake_executor_plugin_mantik.rules.identity import plain

_NOT_THIN: tuple[tuple[Callable[[Job], bool], str], ...] = (
    (lambda job: job.is_pipe, "writes to a pipe()"),
    (lambda job: job.is_service, "is a service()"),
)


def obstacle(job: Job, deployment: Iterable[DeploymentMethod]) -> str | None:
    """Why a job cannot run at a site yet, in words that follow "rule NAME"; None if it can."""
    if job.is_group():
        return "belongs to a group or pipe"
    for found, words in _NOT_THIN:
        if found(job):
            return words
    # Snakemake gathers the jobs of a group later, just before they are sent.
    if job.group is not None:
        return "belongs to a group or pipe"
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
    return _script(job) or _outside(job)


def _script(job: Job) -> str | None:
    """What of a script or notebook cannot run."""
    if not (job.rule.is_script or job.rule.is_notebook):
        return None
    # It imports the parts of Snakemake that know languages and notebooks.
    from snakemake_executor_plugin_mantik.rules.scripts import mistake, needs_snakemake

    return None if needs_snakemake(job) else mistake(job)


def _outside(job: Job) -> str | None:
    """What of a job is not in the working directory and so not at a site."""
    given = given_of(job.rule.params)
    if given is not None and (mistake := folder_mistake(given.project.relative_folder())):
        return mistake
    for path in [*job.input, *job.output, *job.log]:
        if os.path.isabs(path) or plain(path).split("/")[0] == "..":
            return f"uses {path}, which is outside of the working directory or absolute"
        if ".." in str(path).split("/"):
            return f"uses {path}: at a site a path may not go up and down again, write it plainly"
    return None


def refuse(jobs: Iterable[Job], deployment: Iterable[DeploymentMethod]) -> None:
    """See to it that all `jobs` can run at a site.

    Raises:
        WorkflowNotRunnable: telling each rule that cannot, once, and why.
    """
    deployment = tuple(deployment)
    found: dict[str, str] = {}
    for job in jobs:
        members = job.jobs if job.is_group() else (job,)
        reason = obstacle(job, deployment)
        if reason is not None:
            found.update({member.rule.name: reason for member in members})
    if found:
        raise WorkflowNotRunnable(
            "not every rule can run at a site yet (nothing was sent): "
            + "; ".join(f"rule {name} {reason}" for name, reason in sorted(found.items())),
            do="Rewrite these rules with shell: and with files in the working directory, or name"
            " them in localrules: to run them here",
        )
