"""How this package is installed: the one place that says so, for messages."""

from typing import Final

PACKAGE: Final = "snakemake-executor-plugin-mantik"
SOURCE: Final = f"git+https://github.com/mantik-ai/{PACKAGE}"
"""What pip installs the package from; with a release on the package index, its name."""


def install_command(*extras: str) -> str:
    """Return the command that installs this package with these extras."""
    if not extras:
        return f"pip install {SOURCE}"
    return f"pip install '{PACKAGE}[{','.join(extras)}] @ {SOURCE}'"
