"""Base URLs of APIs, and the certificates that prove who answers there."""

import re
import ssl
from pathlib import Path
from typing import Final

import certifi
import httpx

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.addresses import is_confidential


def check_url(url: str, site: str, key: str) -> str:
    """The base URL of an API without a slash at its end; plain HTTP only on this machine.

    Args:
        url: as configured.
        site: the site's name, for the error.
        key: the key of the backend config that holds the URL.

    Raises:
        UserError: if credentials would travel readably, or the URL holds more than an address.
    """
    where = f"site {site}, {key}"
    if not is_confidential(url):
        raise UserError(
            "is no https:// address, and nothing else keeps the credentials from being read",
            where=where,
            do="Give the full URL, with https://",
        )
    parsed = httpx.URL(url)
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise UserError(
            "a user name, a query or a fragment has no place in the URL",
            where=where,
            do="Credentials come from the environment or the keyring",
        )
    return url.rstrip("/")


_UNVERIFIED: Final = re.compile(
    r"CERTIFICATE_VERIFY_FAILED(?:\] certificate verify failed:?)? ?(.*)"
)
"""What OpenSSL says of a certificate, between other words."""


def explain_tls_error(error: Exception) -> tuple[str, str]:
    """Why a server's certificate was not taken, and what to do; empty if that was not the trouble.

    Nothing of the request is in it.
    """
    found = _UNVERIFIED.search(" ".join(str(error).split()))
    if found is None:
        return "", ""
    why = re.sub(r" ?\(_ssl\.c:\d+\)\.?", "", found[1]).strip(" .") or "it proves nothing"
    if "expired" in why or "not yet valid" in why:
        do = "Check the date of this machine, and tell the site"
    elif "mismatch" in why or "not valid for" in why:
        do = "Check the URL: it names another host than the certificate"
    else:
        do = "Name the certificate of the site's authority with CAFile"
    return f"the certificate was not taken: {why}", do


def tls_context(ca_file: Path | None, site: str) -> ssl.SSLContext:
    """Certificates are always checked: against the system's, certifi's, and `ca_file`.

    Raises:
        UserError: if `ca_file` cannot be used.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except (OSError, ssl.SSLError) as error:
            raise UserError(
                f"{ca_file} cannot be used: {error}",
                where=f"site {site}, CAFile",
                do="Name a file with certificates in PEM form",
            ) from error
    return context
