"""Refuse a Snakemake that is missing or too old, before modules are imported that need it."""

import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from snakemake_executor_plugin_mantik.common.errors import UserError

MINIMUM: Final = (9, 18)
"""The first version with `snakemake.iocontainers`."""


def check_snakemake_version() -> None:
    """Check that a Snakemake is installed beside this package, and that it is new enough.

    Raises:
        UserError: it is missing or too old.
    """
    least = ".".join(map(str, MINIMUM))
    try:
        found = version("snakemake")
    except PackageNotFoundError:
        if importlib.util.find_spec("snakemake") is not None:
            return  # it runs from its sources
        raise UserError(
            "Snakemake is not installed beside the mantik executor",
            do=f'Type: pip install "snakemake>={least},<10"',
        ) from None
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if numbers < MINIMUM:
        raise UserError(
            f"Snakemake {found} is too old for the mantik executor, which needs {least} or newer",
            do=f'Type: pip install --upgrade "snakemake>={least},<10"',
        )
