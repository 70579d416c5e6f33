"""Python functions as jobs: `smk-mantik call`."""
