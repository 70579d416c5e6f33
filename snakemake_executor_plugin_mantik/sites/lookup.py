"""Where the values of credentials are: in variables, in files that these name, in the keyring."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from snakemake_executor_plugin_mantik.common.errors import CredentialError

_log = logging.getLogger(__name__)


class Keyring(Protocol):
    """What is used of the `keyring` package."""

    def get_password(self, service_name: str, username: str) -> str | None:
        """The secret of `username` for a service, None if there is none."""
        ...

    def set_password(self, service_name: str, username: str, password: str) -> None:
        """Keep a secret."""
        ...


@dataclass(frozen=True)
class FoundValue:
    """A value, and the name of the variable that it came from; none for the config's own."""

    value: str
    origin: str


Values = Mapping[str, FoundValue]
"""What was found, by bare name (`USERNAME`)."""


def variable_prefix(name: str) -> str:
    """How the variables of a site, or of all sites of an API, begin."""
    return f"MANTIK_{name.upper().replace('-', '_')}"


def keyring_service(site: str) -> str:
    """The service under which the keyring holds what belongs to a site."""
    return f"mantik:{site}"


def find_in_environment(
    environ: Mapping[str, str], prefixes: Sequence[str], names: Iterable[str]
) -> dict[str, FoundValue]:
    """The values of bare `names` (`USERNAME`) that there are; empty variables count as not set.

    The first prefix wins, and a variable before the file that one names.

    Raises:
        CredentialError: such a file cannot be read, or holds no value.
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
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~ of nobody
        reason = getattr(error, "strerror", None) or "it is no text"
        raise CredentialError(
            f"the file {file} cannot be read: {reason}", do=f"Name another one with {origin}"
        ) from error
    if not value:
        raise CredentialError(f"the file {file} is empty", do="Put the credential into it")
    return value


def find_in_keyring(
    needs: Sequence[str], optional: Sequence[str], values: Values, site: str, ring: Keyring | None
) -> dict[str, FoundValue]:
    """The values, and those of the keyring for what they lack; no more once one is missing."""
    found = dict(values)
    if ring is None:
        return found
    for name in (*needs, *optional):
        if name in found:
            continue
        value = ask_keyring(ring, site, name)
        if value:
            found[name] = FoundValue(value, f"{name} in the keyring under {keyring_service(site)}")
        elif name in needs:
            break
    return found


def tell_keyring(ring: Keyring | None, site: str, refresh_token: str) -> None:
    """Keep a refresh token for the next run, where the system has a place for it."""
    from keyring.errors import KeyringError

    if ring is None:
        return
    try:
        ring.set_password(keyring_service(site), "REFRESH_TOKEN", refresh_token)
    except KeyringError as error:
        _log.info("the login at %s is not kept for the next run: %s", site, error)


def ask_keyring(ring: Keyring | None, site: str, name: str) -> str | None:
    """What the keyring holds; None if it holds nothing."""
    from keyring.errors import KeyringError

    if ring is None:
        return None
    try:
        return ring.get_password(keyring_service(site), name)
    except KeyringError:  # no backend, locked, refused: as if it held nothing
        return None


def system_keyring() -> Keyring | None:
    """The system's keyring; imported only when it is needed, it looks around on the machine."""
    import keyring

    return keyring  # the module has the method that the protocol asks for


def credential_files(environ: Mapping[str, str]) -> dict[str, Path]:
    """The files that credentials are read from, by the variables that name them.

    They need not be there. Whether a site of that name is used is not asked: the file of another
    workflow's password is as secret.
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
    except RuntimeError:  # ~ of nobody
        return path
