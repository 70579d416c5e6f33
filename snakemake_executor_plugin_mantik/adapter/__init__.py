"""What Snakemake calls, and what is read and checked of its workflow before a run starts."""
