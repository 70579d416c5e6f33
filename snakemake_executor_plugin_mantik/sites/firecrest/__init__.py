"""Sites behind firecREST v2, reached through pyfirecrest."""

from .site import FirecrestSite

__all__ = ["FirecrestSite"]
