"""Sites behind UNICORE's REST API, reached through pyunicore."""

from snakemake_executor_plugin_mantik.sites.unicore.site import UnicoreSite

__all__ = ["UnicoreSite"]
