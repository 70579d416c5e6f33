"""Base URLs of APIs, and the certificates that verify their servers."""

import re
import ssl
from functools import cache
from pathlib import Path
from typing import Final

import certifi
import httpx

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.values import is_confidential


def check_url(url: str, site: str, key: str) -> str:
    """Return the base URL of an API without a final slash; allow http:// on this machine only.

    `key` is the key of the backend config that holds the URL.

    Raises:
        UserError: credentials would be sent unencrypted, or the URL has a user, query or fragment.
    """
    where = f"site {site}, {key}"
    if not is_confidential(url):
        raise UserError(
            "the URL is not an https:// address: credentials would be sent unencrypted",
            where=where,
            do="Use the full URL, starting with https://",
        )
    parsed = httpx.URL(url)
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise UserError(
            "the URL contains a user name, a query or a fragment",
            where=where,
            do="Remove them; set credentials in the environment or the keyring",
        )
    return url.rstrip("/")


_UNVERIFIED: Final = re.compile(
    r"CERTIFICATE_VERIFY_FAILED(?:\] certificate verify failed:?)? ?(.*)"
)
"""OpenSSL's message about a certificate, between other words."""


def explain_tls_error(error: Exception) -> tuple[str, str]:
    """Return why a server's certificate was rejected, and advice; empty for other errors.

    The text holds nothing of the request.
    """
    found = _UNVERIFIED.search(" ".join(str(error).split()))
    if found is None:
        return "", ""
    why = re.sub(r" ?\(_ssl\.c:\d+\)\.?", "", found[1]).strip(" .") or "verification failed"
    if "expired" in why or "not yet valid" in why:
        do = "Check the clock of this machine; if it is right, report this to the site"
    elif "mismatch" in why or "not valid for" in why:
        do = "Check the URL: the certificate names another host"
    else:
        do = "Set CAFile to the certificate of the site's certificate authority"
    return f"the server's certificate was rejected: {why}", do


def tls_context(ca_file: Path | None, site: str) -> ssl.SSLContext:
    """Make a TLS context that trusts the system's and certifi's certificates, and `ca_file`.

    Raises:
        UserError: `ca_file` cannot be used.
    """
    if ca_file is None:
        return _public_context()
    context = _make_context()
    try:
        context.load_verify_locations(ca_file)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"cannot load {ca_file}: {error}",
            where=f"site {site}, CAFile",
            do="Set CAFile to a file with certificates in PEM format",
        ) from error
    return context


def _make_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


_public_context = cache(_make_context)
"""All clients share it: reading 300 certificates takes longer than all else that opens a site."""
