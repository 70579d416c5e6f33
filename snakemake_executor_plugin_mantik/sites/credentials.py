"""Credentials of the user at a site, from the environment or the system's keyring.

We never show them: the text of a credential has none of its values. Nor do we write them, except
the refresh token of a login in a browser, which goes to the keyring. Each variable is looked up
under the site's own name before the API's (`-` becomes `_`): `MANTIK_<SITE>_USERNAME` before
`MANTIK_UNICORE_USERNAME`. With `_FILE` appended, it names a file that holds the value. See
docs/credentials.md.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from snakemake_executor_plugin_mantik.common.errors import CredentialError

from .authentication import ApiKey, Bearer, Credential, Password, SshKey
from .issuers import ClientCredentials, DeviceLogin, Issuer, Refreshed
from .lookup import (
    FoundValue,
    Keyring,
    Values,
    find_in_environment,
    find_in_keyring,
    keyring_service,
    read_keyring,
    store_in_keyring,
    system_keyring,
    variable_prefix,
)

__all__ = [
    "ApiKey",
    "Bearer",
    "ClientCredentials",
    "Credential",
    "Issuer",
    "Keyring",
    "Password",
    "Refreshed",
    "SshKey",
    "expires_at",
    "find_account",
    "find_credentials",
    "missing_message",
    "require_all",
]


@dataclass(frozen=True)
class _Kind:
    """A kind of credentials with its required and optional values."""

    needs: tuple[str, ...]
    make: Callable[[Mapping[str, str], Issuer], Credential]
    optional: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.needs, *self.optional)

    def made(self, found: Values, issuer: Issuer, known: "KnownCredentials") -> Credential:
        """Make the credential of these values; return the same object for the same values."""
        names = [name for name in self.names if name in found]
        values = {name: found[name].value for name in names}
        key = (issuer.ca_file, issuer.proxy, *values.items())
        if key not in known:
            known[key] = self.make(values, issuer)
            # An issuer that the config names is no variable.
            origins = (found[name].origin for name in names)
            known[key].origin = ", ".join(origin for origin in origins if origin)
        return known[key]


KnownCredentials = dict[tuple[object, ...], Credential]
"""Credentials by their values and the way to their issuer."""


def _client(values: Mapping[str, str], issuer: Issuer) -> Callable[[], httpx.Client]:
    return lambda: issuer.client(values["TOKEN_URL"])


_REFRESH: Final = _Kind(
    ("REFRESH_TOKEN", "TOKEN_URL", "CLIENT_ID"),
    lambda v, issuer: Refreshed(
        v["TOKEN_URL"],
        v["CLIENT_ID"],
        v["REFRESH_TOKEN"],
        v.get("CLIENT_SECRET"),
        client=_client(v, issuer),
    ),
    ("CLIENT_SECRET",),
)
_TOKEN: Final = _Kind(("TOKEN",), lambda v, _: Bearer(v["TOKEN"]))

_LOGIN: Final = _Kind(
    ("DEVICE_URL", "TOKEN_URL", "CLIENT_ID"),
    lambda v, issuer: DeviceLogin(
        v["DEVICE_URL"],
        v["TOKEN_URL"],
        v["CLIENT_ID"],
        v.get("CLIENT_SECRET"),
        client=_client(v, issuer),
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
        _Kind(
            ("CLIENT_ID", "CLIENT_SECRET", "TOKEN_URL"),
            lambda v, issuer: ClientCredentials(
                v["TOKEN_URL"], v["CLIENT_ID"], v["CLIENT_SECRET"], client=_client(v, issuer)
            ),
        ),
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

    def made(kind: _Kind, values: Values) -> Credential:
        credential = kind.made(values, issuer, known)
        if credential.look is None:
            used = {n: values[n].value for n in kind.names if n in values}
            look = _Look(kind, site, prefixes, environ, keyring, issuer, used)
            look.seen = look.now()
            credential.look = look
        return credential

    names = [name for kind in (*kinds, _LOGIN) for name in kind.names]
    try:
        own = named | find_in_environment(environ, prefixes[:1], names)
        every = named | find_in_environment(environ, prefixes, names)
        for values in (own, every):
            for kind in kinds:
                if all(name in values for name in kind.needs):
                    return made(kind, values)
        ring = keyring if keyring is not None else system_keyring()
        if all(name in every for name in _LOGIN.needs):
            login = _LOGIN.made(every, issuer, known)
            assert isinstance(login, DeviceLogin)
            kept = read_keyring(ring, site, "REFRESH_TOKEN")
            login.remember(kept or "", lambda token: store_in_keyring(ring, site, token))
            login.look = lambda: login.logged_in_elsewhere(
                read_keyring(ring, site, "REFRESH_TOKEN") or ""
            )
            return login
        for kind in kinds:
            with_ring = find_in_keyring(kind.needs, kind.optional, every, site, ring)
            if all(name in with_ring for name in kind.needs):
                return made(kind, with_ring)
    except CredentialError as error:
        raise CredentialError(error.what, where=f"site {site}", do=error.do) from error
    what = missing_message(site, api, every.keys() - named.keys(), issuer.url is not None)
    raise CredentialError(what, where=f"site {site}", do=_WHAT_TO_SET)


_WHAT_TO_SET: Final = (
    "Set one of these sets of variables, or put them into the keyring (smk-mantik docs credentials)"
)


def missing_message(site: str, api: str, found: Iterable[str] = (), token_url: bool = False) -> str:
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
        for kind in reversed(_KINDS[api])
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


def expires_at(credential: Credential) -> float | None:
    """Return when a credential that cannot be renewed ends, seconds since the epoch; else None.

    For a bearer token this is the token's own unverified claim: good for a warning only.
    """
    return credential.expires_at()


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
        ring = self.keyring if self.keyring is not None else system_keyring()
        values = dict(self.known)
        for name in self.kind.names:
            if now.get(name) != self.seen.get(name):
                values[name] = now.get(name, "")
            elif kept := read_keyring(ring, self.site, name):
                values[name] = kept
        return {name: value for name, value in values.items() if value}
