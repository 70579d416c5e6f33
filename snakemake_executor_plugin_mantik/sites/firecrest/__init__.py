"""Sites behind firecREST v2, reached through pyfirecrest."""

from snakemake_executor_plugin_mantik.sites.firecrest.site import FirecrestSite

__all__ = ["FirecrestSite"]
