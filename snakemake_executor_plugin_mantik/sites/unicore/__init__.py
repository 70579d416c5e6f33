"""Sites behind UNICORE's REST API, reached through pyunicore."""

from .site import UnicoreSite

__all__ = ["UnicoreSite"]
