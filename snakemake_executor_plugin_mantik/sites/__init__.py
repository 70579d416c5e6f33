"""The sites: one protocol, an adapter per API, credentials. Knows no Snakemake."""
