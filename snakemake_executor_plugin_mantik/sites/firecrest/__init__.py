"""Sites behind firecREST v2, spoken to through pyfirecrest."""

from snakemake_executor_plugin_mantik.sites.firecrest.site import FirecrestSite

__all__ = ["FirecrestSite"]
