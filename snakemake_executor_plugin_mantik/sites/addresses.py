"""Base URLs of APIs, and the certificates that prove who answers there."""

import ssl
from pathlib import Path

import certifi
import httpx

from snakemake_executor_plugin_mantik.config.addresses import is_confidential
from snakemake_executor_plugin_mantik.errors import UserError


def checked_url(url: str, site: str, key: str) -> str:
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


def tls(ca_file: Path | None, site: str) -> ssl.SSLContext:
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
