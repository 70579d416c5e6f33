"""Credentials of the user at a site, from the environment or the system's keyring.

We never show them: the text of a credential has none of its values. Nor do we write them, except
the refresh token of a login in a browser, which goes to the keyring. Each variable is looked up
under the site's own name before the API's (`-` becomes `_`): `MANTIK_<SITE>_USERNAME` before
`MANTIK_UNICORE_USERNAME`. With `_FILE` appended, it names a file that holds the value. See
docs/credentials.md.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from ..common.errors import CredentialError
from .authentication import (
    ApiKey,
    Bearer,
    ClientCredentials,
    Credential,
    DeviceLogin,
    Issuer,
    Password,
    Refreshed,
    SshKey,
)

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
        value = Path(os.path.expanduser(file)).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise CredentialError(
            f"the file {file} cannot be read: {reason}", do=f"Set {origin} to a readable file"
        ) from error
    if not value:
        raise CredentialError(f"the file {file} is empty", do="Write the credential into it")
    return value


def read_keyring(ring: Keyring | None, site: str, name: str) -> str:
    """Return a value from the keyring, by default the system's; empty if it has none."""
    import keyring  # on demand: the import probes the machine
    from keyring.errors import KeyringError

    try:
        return (ring or keyring).get_password(keyring_service(site), name) or ""
    except KeyringError:  # no backend, locked, refused
        return ""


def store_in_keyring(ring: Keyring | None, site: str, refresh_token: str) -> None:
    """Store a refresh token for the next run, if the system has a keyring."""
    import keyring
    from keyring.errors import KeyringError

    try:
        (ring or keyring).set_password(keyring_service(site), "REFRESH_TOKEN", refresh_token)
    except KeyringError as error:
        _log.info("cannot store the login at %s in the keyring for the next run: %s", site, error)


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
    return {origin: Path(os.path.expanduser(path)) for origin, path in found.items()}


@dataclass(frozen=True)
class _Kind:
    needs: tuple[str, ...]
    make: Callable[[Mapping[str, str], Issuer], Credential]
    optional: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.needs, *self.optional)


KnownCredentials = dict[tuple[object, ...], Credential]
"""Credentials by their values and the way to their issuer."""


def _issued(
    kind: type[ClientCredentials | Refreshed],
) -> Callable[[Mapping[str, str], Issuer], Credential]:
    return lambda v, issuer: kind(
        v["TOKEN_URL"], v["CLIENT_ID"], v.get("CLIENT_SECRET"),
        refresh_token=v.get("REFRESH_TOKEN"), issuer=issuer,
    )  # fmt: skip


_TOKEN: Final = _Kind(("TOKEN",), lambda v, _: Bearer(v["TOKEN"]))
_REFRESH: Final = _Kind(
    ("REFRESH_TOKEN", "TOKEN_URL", "CLIENT_ID"), _issued(Refreshed), ("CLIENT_SECRET",)
)
_LOGIN: Final = _Kind(
    ("DEVICE_URL", "TOKEN_URL", "CLIENT_ID"),
    lambda v, issuer: DeviceLogin(
        v["DEVICE_URL"], v["TOKEN_URL"], v["CLIENT_ID"], v.get("CLIENT_SECRET"), issuer=issuer
    ),
    ("CLIENT_SECRET",),
)
"""A login in a browser: used if no other kind is complete in the environment."""

# In this order: the first kind whose required values are all set is used.
_KINDS: Final[Mapping[str, tuple[_Kind, ...]]] = {
    "unicore": (
        _TOKEN,
        _REFRESH,
        _Kind(
            ("USERNAME", "SSH_KEY"),
            lambda v, _: SshKey(
                v["USERNAME"], Path(v["SSH_KEY"]).expanduser(), v.get("SSH_KEY_PASSWORD")
            ),
            ("SSH_KEY_PASSWORD",),
        ),
        _Kind(("USERNAME", "PASSWORD"), lambda v, _: Password(v["USERNAME"], v["PASSWORD"])),
    ),
    "firecrest": (
        _TOKEN,
        _REFRESH,
        _Kind(("API_KEY",), lambda v, _: ApiKey(v["API_KEY"])),
        _Kind(("CLIENT_ID", "CLIENT_SECRET", "TOKEN_URL"), _issued(ClientCredentials)),
    ),
}


def find_credentials(
    site: str,
    api: str,
    environ: Mapping[str, str],
    keyring: Keyring | None = None,
    *,
    issuer: Issuer | None = None,
    known: KnownCredentials | None = None,
) -> Credential:
    """Find the credentials of a site.

    For each kind of credentials the environment is read before the keyring. A kind that is complete
    under the site's own name precedes one under the API's name.

    Args:
        site: name of the site.
        api: `unicore` or `firecrest`.
        environ: the environment's variables.
        keyring: read for values that the environment lacks, under the service `mantik:<site>`; by
            default the system's, if it has one.
        issuer: of tokens, from the site's config; the variable TOKEN_URL precedes its URL.
        known: credentials of other sites: equal values share one credential, which is then renewed
            once for all of them.

    Raises:
        CredentialError: no credentials were found, or they cannot be used.
    """
    kinds = _KINDS[api]
    known = {} if known is None else known
    issuer = issuer or Issuer()
    named = {"TOKEN_URL": FoundValue(issuer.url, "")} if issuer.url else {}
    prefixes = (variable_prefix(site), variable_prefix(api))

    def made(kind: _Kind, found: Values) -> Credential:
        """Make the credential of these values; return the same object for the same values."""
        used = {name: found[name].value for name in kind.names if name in found}
        key = (issuer.ca_file, issuer.proxy, *used.items())
        if key not in known:
            known[key] = credential = kind.make(used, issuer)
            # An issuer that the config names is no variable.
            credential.origin = ", ".join(found[n].origin for n in used if found[n].origin)
            look = _Look(kind, site, prefixes, environ, keyring, issuer, used)
            look.seen = look.now()
            credential.look = look
        return known[key]

    names = [name for kind in (*kinds, _LOGIN) for name in kind.names]
    try:
        own = named | find_in_environment(environ, prefixes[:1], names)
        every = named | find_in_environment(environ, prefixes, names)
        for values in (own, every):
            for kind in kinds:
                if all(name in values for name in kind.needs):
                    return made(kind, values)
        if all(name in every for name in _LOGIN.needs):
            login = made(_LOGIN, every)
            assert isinstance(login, DeviceLogin)
            kept = partial(read_keyring, keyring, site, "REFRESH_TOKEN")
            login.remember(kept(), lambda token: store_in_keyring(keyring, site, token))
            login.look = lambda: login.logged_in_elsewhere(kept())
            return login
        for kind in kinds:
            values = dict(every)
            for name in kind.names:
                if name not in values and (value := read_keyring(keyring, site, name)):
                    origin = f"{name} in the keyring under {keyring_service(site)}"
                    values[name] = FoundValue(value, origin)
                elif name not in values and name in kind.needs:
                    break  # look for nothing more of this kind
            else:
                return made(kind, values)
    except CredentialError as error:
        raise CredentialError(error.what, where=f"site {site}", do=error.do) from error
    what = _missing(site, api, every.keys() - named.keys(), issuer.url is not None)
    raise CredentialError(what, where=f"site {site}", do=_WHAT_TO_SET)


_WHAT_TO_SET: Final = (
    "Set one of these sets of variables, or put them into the keyring (smk-mantik docs credentials)"
)


def _missing(site: str, api: str, found: Iterable[str], token_url: bool) -> str:
    """Describe which credentials were not found, as a text without any value.

    `found` has the bare names of the variables that are set. With `token_url` the site's config
    names the issuer of tokens.
    """
    names = "; ".join(
        " and ".join(
            f"{variable_prefix(api)}_{name}"
            for name in kind.needs
            if not (token_url and name == "TOKEN_URL")
        )
        for kind in (*_KINDS[api], _LOGIN)
    )
    there = ", ".join(sorted(found))
    some = f" (found only {there})" if there else ""
    return (
        f"no credentials{some}; looked for {names}, each also as {variable_prefix(site)}_…, and in"
        f" the keyring under the service {keyring_service(site)}"
    )


def require_all(
    sites: Mapping[str, str],
    environ: Mapping[str, str],
    keyring: Keyring | None = None,
    *,
    issuers: Mapping[str, Issuer] | None = None,
) -> dict[str, Credential]:
    """Find the credentials of all `sites` (API by site name).

    `issuers` are the token issuers from the sites' configs, by site name.

    Raises:
        CredentialError: lists everything that is missing at any of them.
    """
    found: dict[str, Credential] = {}
    known: KnownCredentials = {}
    errors: list[CredentialError] = []
    for site, api in sites.items():
        try:
            issuer = (issuers or {}).get(site)
            found[site] = find_credentials(site, api, environ, keyring, issuer=issuer, known=known)
        except CredentialError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        listed = "\n".join(f"  {error.where}: {error.what}" for error in errors)
        raise CredentialError(
            f"credentials of {len(errors)} sites cannot be used:\n{listed}", do=_WHAT_TO_SET
        )
    return found


def find_account(site: str, environ: Mapping[str, str]) -> str | None:
    """Return the account: `MANTIK_<SITE>_COMPUTE_BUDGET_ACCOUNT` or the one for all sites."""
    return (
        environ.get(f"{variable_prefix(site)}_COMPUTE_BUDGET_ACCOUNT")
        or environ.get("MANTIK_COMPUTE_BUDGET_ACCOUNT")
        or None
    )


@dataclass
class _Look:
    """Finds new values that replace refused ones: in files, and in the keyring.

    The environment of a process does not change, so a value in the keyring precedes a variable
    whose value was refused. If that is refused as well, the variable is used again: a site in
    trouble refuses valid credentials, and the keyring may hold outdated ones.

    `known` has the last used values; `seen` those of the environment and its files at that time.
    """

    kind: _Kind
    site: str
    prefixes: tuple[str, ...]
    environ: Mapping[str, str]
    keyring: Keyring | None
    issuer: Issuer
    known: Mapping[str, str] = field(default_factory=dict, repr=False)
    seen: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __call__(self) -> Credential | None:
        """Make a credential of new values; None if there are none."""
        try:
            now = self.now()
            for values in (self._newest(now), {**self.known, **now}):
                if values != self.known:
                    made = self.kind.make(values, self.issuer)
                    self.known, self.seen = values, now
                    return made
        except CredentialError:
            pass  # for example half written
        return None

    def now(self) -> dict[str, str]:
        found = find_in_environment(self.environ, self.prefixes, self.kind.names)
        return {name: value.value for name, value in found.items()}

    def _newest(self, now: Mapping[str, str]) -> dict[str, str]:
        values = dict(self.known)
        for name in self.kind.names:
            if now.get(name) != self.seen.get(name):
                values[name] = now.get(name, "")
            elif kept := read_keyring(self.keyring, self.site, name):
                values[name] = kept
        return {name: value for name, value in values.items() if value}
