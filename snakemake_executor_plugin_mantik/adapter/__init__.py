"""Implement the executor that Snakemake calls, and check the workflow before a run starts."""
