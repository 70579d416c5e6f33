"""`python -m snakemake_executor_plugin_mantik` is `smk-mantik`."""

from .cli import main

main()
