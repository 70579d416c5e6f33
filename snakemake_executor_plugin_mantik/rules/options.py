"""Snakemake's own options that concern its executors: what they mean here, or why they do not go.

Options that Snakemake's scheduler acts on by itself are not looked at.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from snakemake.common import expand_vars_and_user, get_container_image
from snakemake.settings.types import PreemptibleRules
from snakemake_interface_executor_plugins.settings import DeploymentMethod

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.rules import Job


@dataclass(frozen=True)
class WorkflowOptions:
    """What options of the `snakemake` command ask of each job.

    Attributes:
        jobname: pattern of a job's name (`--jobname`); None for our own.
        precommand: what the shell runs before a job's command (`--precommand`); None for nothing.
        keep_incomplete: whether outputs of a job that failed are fetched (`--keep-incomplete`).
    """

    jobname: str | None = None
    precommand: str | None = None
    keep_incomplete: bool = False


def read_options(workflow: Any) -> WorkflowOptions:
    """What the options of this run ask for.

    Raises:
        UserError: an option is given that cannot work here.
    """
    remote = workflow.remote_execution_settings
    if remote.immediate_submit:
        raise UserError(
            "--immediate-submit does not go with the mantik executor",
            do="Leave it out: jobs are submitted when their inputs are there",
        )
    if remote.jobscript is not None:
        raise UserError(
            "--jobscript does not go with the mantik executor, whose job scripts are its own",
            do="Leave it out; PreRunCommandOnComputeNode in the backend config, or --precommand,"
            " runs commands before each job",
        )
    if remote.preemptible_rules != PreemptibleRules() and remote.preemptible_retries is None:
        # Snakemake (9.27) takes the number for the rules' retries, and breaks when a job fails.
        raise UserError(
            "--preemptible-rules does not go without --preemptible-retries",
            do="Add --preemptible-retries NUMBER, or leave it out and give --retries",
        )
    return WorkflowOptions(
        jobname=None if remote.jobname.startswith(_JOBNAME) else remote.jobname,
        precommand=remote.precommand,
        keep_incomplete=workflow.execution_settings.keep_incomplete,
    )


def check_conda_here(workflow: Any, dag: Any) -> None:
    """See to it that jobs that run here, `all` among them, find the conda that they ask for.

    Snakemake (9.27, `Workflow.conda_base_path`) looks for it when the first of them runs, whether
    that has an environment or not, and ends the run: after all jobs at the sites, if it is `all`.

    Raises:
        UserError: one would.
    """
    if DeploymentMethod.CONDA not in workflow.deployment_settings.deployment_method:
        return
    if shutil.which("conda") is None and any(job.is_local for job in dag.needrun_jobs()):
        raise UserError(
            "nothing submitted: --software-deployment-method conda is for jobs that run here, and"
            " there is no conda on this machine",
            do="Leave it out (--use-conda, too): --mantik-software-deployment conda is for jobs at"
            " sites; or install conda here",
        )


_JOBNAME = "snakejob."
"""How Snakemake's default job names begin (`snakemake/cli.py`, `snakemake/settings/types.py`)."""

_UNUSED: tuple[tuple[str, str, str, tuple[object, ...], str], ...] = (
    (
        "--seconds-between-status-checks",
        "remote_execution_settings",
        "seconds_between_status_checks",
        (10,),
        "Site: PollMin and PollMax in the backend config say how often a site is asked",
    ),
    (
        "--max-status-checks-per-second",
        "remote_execution_settings",
        "max_status_checks_per_second",
        (10, 100),
        "one request asks for all jobs at a site, Site: PollMin says how often",
    ),
    (
        "--container-image",
        "remote_execution_settings",
        "container_image",
        (get_container_image(),),
        "Environment: Apptainer in the backend config names an image for all jobs",
    ),
    (
        "--preemptible-rules",
        "remote_execution_settings",
        "preemptible_rules",
        (PreemptibleRules(),),
        "a site's queue says whether a job may be preempted: choose it with resources: queue=…"
        " (--preemptible-retries counts)",
    ),
    (
        "--shadow-prefix",
        "execution_settings",
        "shadow_prefix",
        (None,),
        "shadow directories lie in the workspace: Site: Workspace in the backend config moves it",
    ),
    (
        "--conda-prefix",
        "deployment_settings",
        "conda_prefix",
        (None, os.environ.get("SNAKEMAKE_CONDA_PREFIX")),
        "conda environments lie in the workspace: Site: Workspace in the backend config moves it",
    ),
    (
        "--apptainer-prefix",
        "deployment_settings",
        "apptainer_prefix",
        (None, expand_vars_and_user(os.environ.get("APPTAINER_CACHEDIR"))),
        "images lie in the workspace: Site: Workspace in the backend config moves it",
    ),
)
"""Options, their settings in Snakemake, all defaults that those have, and what there is instead."""


def ignored_options(workflow: Any) -> Iterator[str]:
    """What to tell of the options that are given and that nothing here is done with."""
    for option, group, name, defaults, instead in _UNUSED:
        if getattr(getattr(workflow, group), name) not in defaults:
            yield f"{option} is not used by the mantik executor: {instead}."


def capped_options(workflow: Any, jobs: Iterable[Job]) -> Iterator[str]:
    """What to tell of rules whose jobs at sites get fewer threads than they declare.

    Snakemake (9.27, `Rule.expand_resources`) lets `--cores` limit the threads of each job, wherever
    that runs, although it limits the sum of local jobs only. What functions give is not looked at.
    """
    limit = workflow.global_resources["_cores"].value
    rules = {job.rule.name: job.rule.resources["_cores"] for job in jobs}
    more = {name: threads.value for name, threads in rules.items() if not threads.is_evaluable()}
    told = [f"{name} ({n})" for name, n in sorted(more.items()) if limit is not None and n > limit]
    if told:
        yield (
            f"--cores {limit} limits the threads of jobs at sites, too, of rules that ask for more:"
            f" {', '.join(told)}. Leave it out; --local-cores is for rules that run here."
        )
