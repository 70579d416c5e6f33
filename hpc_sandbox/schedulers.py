"""Choose the scheduler that runs a site's jobs."""

from pathlib import Path

from .batch import BatchScheduler
from .sbatch import SlurmVariant
from .scheduler import LocalScheduler
from .settings import SandboxSettings
from .slurm import SlurmScheduler


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
