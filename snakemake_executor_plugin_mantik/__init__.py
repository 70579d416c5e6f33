"""Snakemake executor plugin: each rule as a job at an HPC site behind a REST API."""
