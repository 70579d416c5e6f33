"""Let jobs log to the tracking server directly (`--mantik-track-direct`).

The variables that they need travel like secrets: in a file that only the user can read, which the
job removes.
"""

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from snakemake_executor_plugin_mantik.common.errors import UserError

from ..run import without_user

_OPTION: Final = "--mantik-track-direct"
_URI: Final = "MLFLOW_TRACKING_URI"
_CREDENTIALS: Final = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
_SETTINGS: Final = ("MLFLOW_TRACKING_INSECURE_TLS", "MLFLOW_WORKSPACE")
"""Further settings of MLflow's client, except those that name files of this machine."""


def sent_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the user's environment to pass to a job.

    Raises:
        UserError: the tracking URI is none that a site's nodes could reach.
    """
    uri = environ.get(_URI, "")
    _check(uri)
    names = (*_CREDENTIALS, *_SETTINGS)
    return {_URI: uri} | {name: environ[name] for name in names if environ.get(name)}


def direct_remark(environ: Mapping[str, str]) -> str:
    """Return the note to show before credentials leave the machine."""
    uri = environ.get(_URI, "")
    held = [name for name in _CREDENTIALS if environ.get(name)]
    held += [f"the password in {_URI}"] if without_user(uri) != uri else []
    what = f"so these credentials go to the sites: {', '.join(held)}" if held else "without any"
    what += "" if held else " credential: none is set"
    return f"{_OPTION}: jobs log to {without_user(uri)} directly, {what}."


def _check(uri: str) -> None:
    url = urlsplit(uri)
    if url.scheme not in ("http", "https") or not url.hostname:
        what = f"{_URI} is {without_user(uri)}" if uri else f"{_URI} is not set"
        raise UserError(
            f"{_OPTION} needs a tracking server that the sites' nodes can reach, but {what}",
            do=f"Set {_URI} to the URL of one (https://…), or leave the option out: then this"
            " machine forwards what jobs log",
        )
    if _is_here(url.hostname):
        raise UserError(
            f"{_OPTION}: for a job, {url.hostname} means the node that it runs on",
            where=f"{_URI}={without_user(uri)}",
            do="Use an address at which nodes can reach the server, or leave the option out: then"
            " this machine forwards what jobs log",
        )


def _is_here(host: str) -> bool:
    """Return whether a name or address refers to the machine that uses it."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified
