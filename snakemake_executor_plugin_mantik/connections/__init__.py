"""How this process reaches the sites of a workflow, with Snakemake and without it."""
