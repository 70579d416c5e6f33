"""Refuse a Snakemake that is too old, before modules are imported that it lacks."""

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import UserError

MINIMUM: Final = (9, 18)
"""The first version with `snakemake.iocontainers`."""


def check_snakemake_version() -> None:
    """Check that the installed Snakemake is new enough.

    Raises:
        UserError: it is too old.
    """
    try:
        found = version("snakemake")
    except PackageNotFoundError:  # it runs from its sources
        return
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if numbers < MINIMUM:
        least = ".".join(map(str, MINIMUM))
        raise UserError(
            f"Snakemake {found} is too old for the mantik executor, which needs {least} or newer",
            do=f'Type: pip install --upgrade "snakemake>={least},<10"',
        )
