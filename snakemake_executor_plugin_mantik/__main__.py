"""`python -m snakemake_executor_plugin_mantik` is `smk-mantik`."""

from snakemake_executor_plugin_mantik.cli import main

main()
