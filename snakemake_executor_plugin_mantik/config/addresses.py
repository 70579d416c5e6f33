"""Addresses that secrets may be sent to."""

import ipaddress
from urllib.parse import urlsplit


def is_loopback(url: str) -> bool:
    """Whether the URL's host is this machine."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_confidential(url: str) -> bool:
    """Whether nobody can read what is sent to the URL: https, or http that stays on this machine.

    False also for what is no URL.
    """
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (
            parts.scheme == "https" or (parts.scheme == "http" and is_loopback(url))
        )
    except ValueError:
        return False
