"""Remote outputs as Snakemake sees them: what lies at which place, and how to get it from there."""
