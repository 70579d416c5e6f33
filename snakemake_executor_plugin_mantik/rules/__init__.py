"""Turn Snakemake rules into requests for a site (command, resources, files), or refuse them."""

from typing import Any

Job = Any
"""A Snakemake job. Snakemake's own classes are not typed."""
