"""Connections of this process to the sites of a workflow, with Snakemake and without it."""
