"""Choose the scheduler that runs a site's jobs."""

from pathlib import Path

from snakemake_executor_plugin_mantik.sandbox.batch import BatchScheduler
from snakemake_executor_plugin_mantik.sandbox.sbatch import SlurmVariant
from snakemake_executor_plugin_mantik.sandbox.scheduler import LocalScheduler
from snakemake_executor_plugin_mantik.sandbox.settings import SandboxSettings
from snakemake_executor_plugin_mantik.sandbox.slurm import SlurmScheduler


def scheduler_of(
    settings: SandboxSettings,
    directory: Path,
    *,
    home: Path,
    user: str,
    rules: SlurmVariant | None = None,
) -> BatchScheduler:
    """Return the scheduler that `settings` name; `directory` and `rules` are for the local one."""
    if settings.scheduler == "slurm":
        return SlurmScheduler(settings, home=home, user=user)
    return LocalScheduler(directory, settings, home=home, user=user, rules=rules)
