"""Snakemake executor plugin `mantik`: each rule as a job at an HPC site behind a REST API.

Snakemake reads three names from here: `ExecutorSettings`, `common_settings` and `Executor`.
Importing this module is cheap: whatever talks to a site is imported when a run starts.
"""

from dataclasses import dataclass, field

from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

from snakemake_executor_plugin_mantik.adapter import stale_lock
from snakemake_executor_plugin_mantik.adapter.executor import Executor
from snakemake_executor_plugin_mantik.adapter.signals import CHOICES
from snakemake_executor_plugin_mantik.tracking.controller.courier import MADE_WAIT_S

TRACKED = ("mlproject", "all", "none")

__all__ = ["Executor", "ExecutorSettings", "common_settings"]


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    """The executor's options: on the command line, in a profile, and in the environment."""

    # Of the list types, only this one works from all three places.
    backend_config: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Compute Backend Config files, one per site, as [NAME=]FILE; without a name"
            " the site is called as its file. A rule chooses with 'resources: mantik_site=NAME',"
            " the first site serves all others. End the list with '--' if targets follow.",
            "nargs": "+",
            "env_var": True,
            "metavar": "[NAME=]FILE",
        },
    )
    software_deployment: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Which of the rules' own environments are deployed at the sites: 'conda',"
            " 'apptainer' (container:), 'env-modules'; others are not used. Snakemake's own option"
            " of that kind acts on this machine. End the list with '--' if targets follow.",
            "nargs": "+",
            "env_var": True,
            "metavar": "METHOD",
        },
    )
    track: str = field(
        default="mlproject",
        metadata={
            "help": "Which jobs become MLflow runs: those of rules that run an entry point of an"
            " 'mlproject', 'all', or 'none'. A rule chooses for itself with 'resources:"
            ' mantik_track="all"\' or "none".',
            "choices": list(TRACKED),
            "metavar": "|".join(TRACKED),
            "env_var": True,
        },
    )
    track_direct: bool = field(
        default=False,
        metadata={
            "help": "Jobs log to the tracking server (MLFLOW_TRACKING_URI) themselves, from their"
            " nodes: your tracking credentials go to the sites. Without it they stay here, and what"
            " jobs log is carried over from here.",
            "env_var": True,
        },
    )
    track_wait: int = field(
        default=int(MADE_WAIT_S),
        metadata={
            "help": "Seconds that a job waits before it is submitted, at most, for MLflow to make"
            " its run; without it the job's MLFLOW_RUN_ID is one of ours. 0: no job waits.",
            "metavar": "SECONDS",
            "env_var": True,
        },
    )
    on_interrupt: str = field(
        default="ask",
        metadata={
            "help": "What Ctrl-C does to the jobs that are under way: 'cancel' them, 'detach'"
            " (leave them running; the next run takes them up), or 'ask', without a terminal"
            " 'cancel'. SIGTERM and SIGHUP always detach.",
            "choices": list(CHOICES),
            "metavar": "|".join(CHOICES),
            "env_var": True,
        },
    )

    def __post_init__(self) -> None:
        """Snakemake makes the settings before it looks at its own lock."""
        stale_lock.register_hint()


common_settings = CommonSettings(
    non_local_exec=True,
    # Inputs go up before a job and outputs are here before it is reported, so that for Snakemake
    # the sites' file systems look like the local one (docs/decisions/snakemake-jobs.md).
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_default_storage_provider_args=False,
    pass_default_resources_args=False,
    pass_envvar_declarations_to_cmd=False,
    auto_deploy_default_storage_provider=False,
)
