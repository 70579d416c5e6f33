"""What a job is, its script, and how it says that it ended. Knows no site and no Snakemake."""
