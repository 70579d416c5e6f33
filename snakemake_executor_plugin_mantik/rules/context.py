"""Types that all kinds of rules share: a run's context and options, and the payload of a job."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias

from snakemake.common import expand_vars_and_user, get_container_image
from snakemake.logging import logger
from snakemake.settings.types import PreemptibleRules
from snakemake_interface_executor_plugins.settings import DeploymentMethod, SharedFSUsage

from ..common.errors import UserError, shorten_list
from ..config.exclude import Exclude, Include
from ..config.model import BackendConfig
from ..config.reading import LoadedConfig
from ..engine.request import Upload
from ..jobs.paths import WORKSPACE, file_path
from ..jobs.script import PART_BYTES
from ..staging.project_files import ProjectFileFilter
from . import Job


def check_deployed_here(workflow: Any, dag: Any) -> None:
    """Check that Snakemake finds the conda and the apptainer that the user requests here.

    Snakemake (9.27, `Workflow.conda_base_path`) looks for conda when the first local job runs, even
    if that job has no environment, and ends the run without it. If that job is `all`, the run ends
    after all jobs at the sites. It looks for both where any job has an environment or image.

    Raises:
        UserError: one is requested for this machine and missing, and Snakemake needs it here.
    """
    local = any(job.is_local for job in dag.needrun_jobs())
    pulls = SharedFSUsage.SOFTWARE_DEPLOYMENT in workflow.storage_settings.shared_fs_usage
    for method, programs, needed in (
        (DeploymentMethod.CONDA, ("conda",), dag.conda_envs or local),
        (DeploymentMethod.APPTAINER, ("apptainer", "singularity"), pulls and dag.container_imgs),
    ):
        asked = method in workflow.deployment_settings.deployment_method
        if asked and needed and not any(map(shutil.which, programs)):
            raise UserError(
                f"nothing submitted: --software-deployment-method {method} applies to jobs on this"
                f" machine, which has no {method}",
                do=f"Use --mantik-software-deployment {method} for jobs at sites, and remove this"
                f" option (and --use-{method}, also from the profile), or install {method} on this"
                " machine",
            )


_IN_WORKSPACE = "are in the workspace; set Site: Workspace in the backend config to move it"

_JOBNAME = "snakejob."
"""Prefix of Snakemake's default job names (`snakemake/cli.py`, `snakemake/settings/types.py`)."""

_UNUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "remote_execution_settings.seconds_between_status_checks": (
        (10,), "set Site: Poll in the backend config instead",
    ),
    "remote_execution_settings.max_status_checks_per_second": (
        (10, 100),
        "one request checks all jobs at a site; set Site: Poll in the backend config instead",
    ),
    "remote_execution_settings.container_image": (
        (get_container_image(),),
        "set Environment: Apptainer in the backend config to use an image for all jobs",
    ),
    "remote_execution_settings.preemptible_rules": (
        (PreemptibleRules(),),
        "a site's queue decides whether a job may be preempted; choose one with resources: queue=…"
        " (--preemptible-retries is used)",
    ),
    "execution_settings.shadow_prefix": ((None,), f"shadow directories {_IN_WORKSPACE}"),
    "deployment_settings.conda_prefix": (
        (None, os.environ.get("SNAKEMAKE_CONDA_PREFIX")), f"conda environments {_IN_WORKSPACE}",
    ),
    "deployment_settings.apptainer_prefix": (
        (None, expand_vars_and_user(os.environ.get("APPTAINER_CACHEDIR"))),
        f"images {_IN_WORKSPACE}",
    ),
}  # fmt: skip
"""Ignored options by Snakemake's settings: the defaults of each, and advice."""


def ignored_options(workflow: Any) -> Iterator[str]:
    """Yield a warning for each given option that this executor ignores."""
    for setting, (defaults, instead) in _UNUSED.items():
        if attrgetter(setting)(workflow) not in defaults:
            option = setting.partition(".")[2].replace("_", "-")
            yield f"--{option} is not used by the mantik executor: {instead}."


def capped_options(workflow: Any, jobs: Iterable[Job]) -> Iterator[str]:
    """Yield a warning that lists the rules whose jobs at sites get fewer threads than declared.

    Snakemake (9.27, `Rule.expand_resources`) caps the threads of every job at `--cores`, although
    `--cores` otherwise limits the sum of local jobs only. Threads from functions are not checked.
    """
    limit = workflow.global_resources["_cores"].value
    rules = {job.rule.name: job.rule.resources["_cores"] for job in jobs}
    more = {name: threads.value for name, threads in rules.items() if not threads.is_evaluable()}
    over = [f"{name} ({n})" for name, n in sorted(more.items()) if limit is not None and n > limit]
    if over:
        yield (
            f"--cores {limit} limits the threads of jobs at sites, too. These rules request more:"
            f" {', '.join(over)}. Use --local-cores for jobs on this machine, and remove --cores."
        )


Method: TypeAlias = DeploymentMethod | Literal["venv"]
"""A way to deploy environments at a site: Snakemake's, and virtual environments of projects."""


@dataclass(frozen=True)
class RuleContext:
    """Values that are the same for all jobs of a run.

    Attributes:
        sites: the sites' configs by name. The first site is the default.
        workdir: the workflow's working directory.
        deployment: which kinds of rules' own environments are deployed at the sites.
        workspace: returns the absolute path of the workspace at a site, and opens the site if
            necessary; before the run has started, a placeholder.
        jobname: pattern of a job's name (`--jobname`), or None for the plugin's default.
        precommand: command that runs before a job's command (`--precommand`), or None.
        keep_incomplete: whether to download outputs of a failed job (`--keep-incomplete`).
        deployed_here: the methods that Snakemake deploys on this machine and not at sites.
        lacks: by site, what a nested Snakemake said that found no fitting Snakemake there.
    """

    sites: Mapping[str, LoadedConfig]
    workdir: Path
    deployment: frozenset[Method] = frozenset()
    workspace: Callable[[str], str] = lambda _: WORKSPACE
    jobname: str | None = None
    precommand: str | None = None
    keep_incomplete: bool = False
    deployed_here: frozenset[Method] = frozenset()
    lacks: Mapping[str, str] = field(default_factory=dict)


def read_context(
    workflow: Any, sites: Mapping[str, LoadedConfig], workdir: Path, deployment: frozenset[Method]
) -> RuleContext:
    """Read the options of this run; the other arguments are those of `RuleContext`.

    Raises:
        UserError: an option cannot work with this executor.
    """
    remote = workflow.remote_execution_settings
    if remote.immediate_submit:
        raise UserError(
            "--immediate-submit does not work with the mantik executor",
            do="Remove the option: --mantik-presubmit submits jobs before their inputs exist",
        )
    if remote.jobscript is not None:
        raise UserError(
            "--jobscript does not work with the mantik executor, which writes its own job scripts",
            do="Remove the option. Use --precommand, or PreRunCommandOnComputeNode in the backend"
            " config, to run commands before each job",
        )
    if remote.preemptible_rules != PreemptibleRules() and remote.preemptible_retries is None:
        # Snakemake (9.27) uses the number as the rules' retries, and breaks when a job fails.
        raise UserError(
            "--preemptible-rules does not work without --preemptible-retries",
            do="Add --preemptible-retries NUMBER, or use --retries instead of --preemptible-rules",
        )
    return RuleContext(
        sites,
        workdir,
        deployment,
        jobname=None if remote.jobname.startswith(_JOBNAME) else remote.jobname,
        precommand=remote.precommand,
        keep_incomplete=workflow.execution_settings.keep_incomplete,
        deployed_here=frozenset(workflow.deployment_settings.deployment_method) - deployment,
    )


@dataclass(frozen=True)
class Payload:
    """A command, and the files that it needs in addition to the rule's inputs.

    Attributes:
        command: the shell's argument after `-c`.
        shell: base name of the shell.
        uploads: files generated for the command, or from outside the workflow's directory.
        inputs: further files of the workflow's directory.
        own_environment: whether the rule's own environment applies, so that the backend config's
            image is not used.
        nested: whether the command runs a Snakemake at the site, which also writes the benchmark
            file.
    """

    command: str
    shell: str = "bash"
    uploads: tuple[Upload, ...] = ()
    inputs: tuple[str, ...] = ()
    own_environment: bool = False
    nested: bool = False

    def around(
        self, command: str, uploads: tuple[Upload, ...] = (), inputs: tuple[str, ...] = ()
    ) -> "Payload":
        """Return a payload with `command`, a bash text that wraps this payload's command."""
        return replace(  # noqa: S604 - a value
            self, command=command, shell="bash",
            uploads=(*self.uploads, *uploads), inputs=(*self.inputs, *inputs),
        )  # fmt: skip


def start_words(payload: Payload) -> tuple[list[str], tuple[Upload, ...]]:
    """Return the words that start the payload's shell, and a file if the command is too long."""
    content = f"{payload.command}\n".encode("utf-8", "surrogateescape")
    if len(content) <= PART_BYTES:
        return [payload.shell, "-c", payload.command], ()
    upload = Upload(file_path(content, "command"), content=content)
    return [payload.shell, upload.path], (upload,)


@cache
def report_withheld(directory: str, withheld: str) -> None:
    """Warn once that files of a directory are not uploaded, unless `withheld` is empty.

    `withheld` says which files, why, and what to do, as `ProjectFiles.withheld` does.
    """
    if withheld:
        logger.warning(f"Files of {directory}: {withheld}.")


def select_small_files(directory: Path, workdir: Path, config: BackendConfig) -> list[Path]:
    """Return the files to upload of a directory outside the working directory, chosen as sources.

    Raises:
        UserError: they are too large together.
    """
    chosen = ProjectFileFilter(
        directory, Exclude(config.exclude), {os.path.relpath(workdir, directory)},
        Include(config.site.include),
    ).select(config.site.project_files_limit_bytes)  # fmt: skip
    report_withheld(str(directory), chosen.withheld)
    return [directory / path for path in chosen.paths]


def refuse_rules(found: Mapping[str, str], what: str, do: str) -> None:
    """Refuse a workflow if mistakes were found; `found` has them by rule, as words after its name.

    Raises:
        UserError: `what` is wrong. Lists each rule, once, with its mistake.
    """
    if found:
        listed = shorten_list(f"rule {name} {found[name]}" for name in sorted(found))
        raise UserError(f"{what} (nothing submitted): {'; '.join(listed)}", do=do)
