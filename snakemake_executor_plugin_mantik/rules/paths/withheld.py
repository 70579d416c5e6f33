"""Report once what stays here of directories beside the workflow's, since it may hold secrets."""

from functools import cache

from snakemake.logging import logger


@cache
def report_withheld(directory: str, withheld: str) -> None:
    """Warn that files of a directory stay here; the same again is not repeated.

    Args:
        directory: where they lie.
        withheld: which, why, and what to do (`Sources.withheld`); nothing is reported if empty.
    """
    if withheld:
        logger.warning(f"Files of {directory}: {withheld}.")
