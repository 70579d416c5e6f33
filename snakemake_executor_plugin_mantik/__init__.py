"""Snakemake executor plugin `mantik`: run each rule as a job at an HPC site behind a REST API.

Snakemake reads three names from here: `ExecutorSettings`, `common_settings` and `Executor`.
Importing this module is cheap: the code that talks to sites is imported when a run starts.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from snakemake_interface_common.exceptions import ApiError
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

from .adapter import snakemake_errors
from .adapter.signals import CHOICES
from .common.errors import UserError

TRACKED = ("mlproject", "all", "none")

__all__ = ["Executor", "ExecutorSettings", "common_settings"]


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    """The executor's options: on the command line, in a profile, and in the environment."""

    # Of the list types, only this one works from all three places.
    backend_config: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Compute Backend Config files, one per site, as [NAME=]FILE; without NAME the"
            " site is named after its file. A rule chooses its site with 'resources:"
            " mantik_site=NAME'; all other rules use the first site. End the list with '--' if"
            " targets follow.",
            "nargs": "+",
            "env_var": True,
            "metavar": "[NAME=]FILE",
        },
    )
    software_deployment: list[str] = field(
        default_factory=list,
        metadata={
            "help": "The kinds of rules' own environments to deploy at the sites: 'conda',"
            " 'apptainer' (container:, an MLproject's docker_env), 'env-modules', 'venv' (an"
            " MLproject's python_env); other kinds are not used. Snakemake's own"
            " --software-deployment-method acts on this machine. End the list with '--' if targets"
            " follow.",
            "nargs": "+",
            "env_var": True,
            "metavar": "METHOD",
        },
    )
    track: str = field(
        default="mlproject",
        metadata={
            "help": "Which jobs become MLflow runs: 'mlproject' (jobs of rules that run an entry"
            " point of an MLproject), 'all', or 'none'. A rule overrides this with 'resources:"
            ' mantik_track="all"\', "none" or "one" (over retries).',
            "choices": list(TRACKED),
            "metavar": "|".join(TRACKED),
            "env_var": True,
        },
    )
    track_direct: bool = field(
        default=False,
        metadata={
            "help": "Let jobs log to the tracking server (MLFLOW_TRACKING_URI) directly, from their"
            " nodes: this uploads your tracking credentials to the sites. Without it they stay on"
            " this machine, which downloads what jobs log and forwards it to MLflow.",
            "env_var": True,
        },
    )
    presubmit: int = field(
        default=100,
        metadata={
            "help": "The most jobs per site that are submitted before their inputs exist: they wait"
            " in the site's queue for the jobs that make these, so that the pipeline goes on"
            " without this machine. 0: a job is submitted when its inputs exist.",
            "metavar": "N",
            "env_var": True,
        },
    )
    on_interrupt: str = field(
        default="ask",
        metadata={
            "help": "What Ctrl-C does to jobs that have not ended: 'cancel' them, 'detach' (the"
            " next run continues them), or 'ask' (without a terminal: 'cancel')."
            " SIGTERM and SIGHUP always detach.",
            "choices": list(CHOICES),
            "metavar": "|".join(CHOICES),
            "env_var": True,
        },
    )
    notify: Optional[str] = field(  # noqa: UP045 - the only form that Snakemake reads
        default=None,
        metadata={
            "help": "A command to run when a job has failed for good (the first one) and when the"
            " run ends, such as curl or mail. It gets JSON on its standard input. A command with a"
            " secret belongs in SNAKEMAKE_MANTIK_NOTIFY or a profile.",
            "metavar": "COMMAND",
            "env_var": True,
        },
    )

    def __post_init__(self) -> None:
        """Register what explains errors of Snakemake before there is an executor.

        Snakemake creates the settings before it checks its own lock and looks for scripts.
        """
        snakemake_errors.register_filter(self)


class Executor(RemoteExecutor):
    """What Snakemake creates when a run starts; `adapter.executor` is imported then."""

    def __new__(cls, *given: Any) -> Any:
        try:
            snakemake_errors.check_snakemake_version()
        except UserError as error:
            raise ApiError(str(error)) from None
        from .adapter.executor import SiteExecutor

        return SiteExecutor(*given)


common_settings = CommonSettings(
    non_local_exec=True,
    # Inputs are uploaded before a job starts and outputs downloaded before it is reported, so to
    # Snakemake the sites' file systems look like the local one (docs/decisions/snakemake-jobs.md).
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_default_storage_provider_args=False,
    pass_default_resources_args=False,
    pass_envvar_declarations_to_cmd=False,
    auto_deploy_default_storage_provider=False,
)
