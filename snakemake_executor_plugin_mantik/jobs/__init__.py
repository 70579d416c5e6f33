"""Describe a job, render its script and read its marker, without knowing sites or Snakemake."""
