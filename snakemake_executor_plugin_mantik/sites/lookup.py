"""Lookup of credential values in variables, in files that these name, and in the keyring."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from snakemake_executor_plugin_mantik.common.errors import CredentialError

_log = logging.getLogger(__name__)


class Keyring(Protocol):
    """The functions used of the `keyring` package."""

    def get_password(self, service_name: str, username: str) -> str | None: ...

    def set_password(self, service_name: str, username: str, password: str) -> None: ...


@dataclass(frozen=True)
class FoundValue:
    """A value and its origin: a variable or a keyring entry, empty for the config's own values."""

    value: str
    origin: str


Values = Mapping[str, FoundValue]
"""Values by bare name (`USERNAME`)."""


def variable_prefix(name: str) -> str:
    """Return the prefix of the variables of a site, or of all sites of an API."""
    return f"MANTIK_{name.upper().replace('-', '_')}"


def keyring_service(site: str) -> str:
    """Return the keyring service of a site."""
    return f"mantik:{site}"


def find_in_environment(
    environ: Mapping[str, str], prefixes: Sequence[str], names: Iterable[str]
) -> dict[str, FoundValue]:
    """Return the values of bare `names` (`USERNAME`) that are set and not empty.

    The first prefix wins, and a variable precedes a file that a `_FILE` variable names.

    Raises:
        CredentialError: such a file cannot be read, or is empty.
    """
    found: dict[str, FoundValue] = {}
    for name in dict.fromkeys(names):
        for origin in (f"{prefix}_{name}" for prefix in prefixes):
            if value := environ.get(origin):
                found[name] = FoundValue(value, origin)
            elif file := environ.get(f"{origin}_FILE"):
                found[name] = FoundValue(_held_by(Path(file), f"{origin}_FILE"), f"{origin}_FILE")
            else:
                continue
            break
    return found


def _held_by(file: Path, origin: str) -> str:
    try:
        value = file.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        reason = getattr(error, "strerror", None) or "it is not text"
        raise CredentialError(
            f"the file {file} cannot be read: {reason}", do=f"Set {origin} to a readable file"
        ) from error
    if not value:
        raise CredentialError(f"the file {file} is empty", do="Write the credential into it")
    return value


def find_in_keyring(
    needs: Sequence[str], optional: Sequence[str], values: Values, site: str, ring: Keyring | None
) -> dict[str, FoundValue]:
    """Complete `values` from the keyring; stop at the first needed value that is missing."""
    found = dict(values)
    if ring is None:
        return found
    for name in (*needs, *optional):
        if name in found:
            continue
        value = read_keyring(ring, site, name)
        if value:
            found[name] = FoundValue(value, f"{name} in the keyring under {keyring_service(site)}")
        elif name in needs:
            break
    return found


def store_in_keyring(ring: Keyring | None, site: str, refresh_token: str) -> None:
    """Store a refresh token for the next run, if the system has a keyring."""
    from keyring.errors import KeyringError

    if ring is None:
        return
    try:
        ring.set_password(keyring_service(site), "REFRESH_TOKEN", refresh_token)
    except KeyringError as error:
        _log.info("cannot store the login at %s in the keyring for the next run: %s", site, error)


def read_keyring(ring: Keyring | None, site: str, name: str) -> str | None:
    """Return a value from the keyring; None if it has none."""
    from keyring.errors import KeyringError

    if ring is None:
        return None
    try:
        return ring.get_password(keyring_service(site), name)
    except KeyringError:  # no backend, locked, refused: treated as empty
        return None


def system_keyring() -> Keyring | None:
    """Return the system's keyring; imported on demand, because the import probes the machine."""
    import keyring

    return keyring  # the module has the protocol's functions


def credential_files(environ: Mapping[str, str]) -> dict[str, Path]:
    """Return the files that hold credentials, by the variables that name them.

    The files may be missing. Sites that are not used count, too: the file of another workflow's
    password is as secret.
    """
    found: dict[str, Path] = {}
    for origin, value in environ.items():
        if not origin.startswith("MANTIK_") or not value:
            continue
        if origin.endswith("_FILE"):
            found[origin] = Path(value)
            if origin.endswith("_SSH_KEY_FILE"):  # it holds the path of the key
                with suppress(CredentialError):
                    found[origin.removesuffix("_FILE")] = Path(_held_by(Path(value), origin))
        elif origin.endswith("_SSH_KEY"):
            found[origin] = Path(value)
    return {origin: _expanded(path) for origin, path in found.items()}


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # ~ of an unknown user
        return path
