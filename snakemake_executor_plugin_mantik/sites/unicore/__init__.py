"""Sites behind UNICORE's REST API, spoken to through pyunicore."""

from snakemake_executor_plugin_mantik.sites.unicore.site import UnicoreSite

__all__ = ["UnicoreSite"]
