"""MLproject files as rules."""

from snakemake_executor_plugin_mantik.mlproject.call import Call, call_of

__all__ = ["Call", "call_of"]
