"""Addresses that secrets may be sent to."""

import ipaddress

import httpx


def is_loopback(url: str) -> bool:
    """Whether the URL's host is this machine."""
    host = httpx.URL(url).host
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
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return bool(parsed.host) and (
        parsed.scheme == "https" or (parsed.scheme == "http" and is_loopback(url))
    )
