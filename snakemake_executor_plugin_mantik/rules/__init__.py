"""What a Snakemake rule means for a site: command, resources and files, or an obstacle."""

from typing import Any

Job = Any
"""A Snakemake job; Snakemake's own classes are not typed."""
