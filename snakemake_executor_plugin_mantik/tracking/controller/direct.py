"""Jobs that log to the tracking server themselves (`--mantik-track-direct`): what they need for it.

It goes the way of secrets: into a file that only the user can read, which the job removes.
"""

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.tracking.run import without_user

_OPTION: Final = "--mantik-track-direct"
_URI: Final = "MLFLOW_TRACKING_URI"
_CREDENTIALS: Final = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
_SETTINGS: Final = ("MLFLOW_TRACKING_INSECURE_TLS", "MLFLOW_WORKSPACE")
"""What else MLflow's client has to know of a server, but for names of files, which are here."""


def sent_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What a job is given of the user's environment.

    Raises:
        UserError: no node of a site can reach the tracking server.
    """
    uri = environ.get(_URI, "")
    _check(uri)
    names = (*_CREDENTIALS, *_SETTINGS)
    return {_URI: uri} | {name: environ[name] for name in names if environ.get(name)}


def direct_remark(environ: Mapping[str, str]) -> str:
    """What the user is told before credentials leave the machine."""
    uri = environ.get(_URI, "")
    held = [name for name in _CREDENTIALS if environ.get(name)]
    held += [f"the password in {_URI}"] if without_user(uri) != uri else []
    what = f"so these credentials go to the sites: {', '.join(held)}" if held else "without any"
    what += "" if held else " credential: none is set"
    return f"{_OPTION}: jobs log to {without_user(uri)} themselves, {what}."


def _check(uri: str) -> None:
    url = urlsplit(uri)
    if url.scheme not in ("http", "https") or not url.hostname:
        what = f"{_URI} is {without_user(uri)}" if uri else f"{_URI} is not set"
        raise UserError(
            f"{_OPTION} needs a tracking server that the sites' nodes can reach, but {what}",
            do=f"Set {_URI} to the URL of one (https://…), or leave the option out: then what jobs"
            " log is carried over from here",
        )
    if _is_here(url.hostname):
        raise UserError(
            f"{_OPTION}: {url.hostname} is another machine for each node that asks for it",
            where=f"{_URI}={without_user(uri)}",
            do="Name the server as the nodes can reach it, or leave the option out: then what jobs"
            " log is carried over from here",
        )


def _is_here(host: str) -> bool:
    """Whether a name or address means the machine that asks for it."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified
