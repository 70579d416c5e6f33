"""Who the user is at a site: credentials from the environment or the system's keyring.

They are never written anywhere by us, and never shown: no credential has its values in its text.
Each variable is looked for under the site's own name before the API's (`-` becomes `_`):
`MANTIK_<SITE>_USERNAME` before `MANTIK_UNICORE_USERNAME`. See docs/credentials.md.
"""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
from pyunicore.credentials import JWTToken

from snakemake_executor_plugin_mantik.errors import CredentialError, SiteUnreachable

RENEW_BEFORE_S: Final = 60.0
"""A token is renewed this long before it expires, seconds."""
TOKEN_TIMEOUT_S: Final = 30.0
"""How long the issuer of tokens may take to answer, seconds."""
SIGNED_FOR_S: Final = 300
"""How long a token signed with an SSH key is valid, seconds."""
ASSUMED_LIFETIME_S: Final = 300.0
"""Lifetime of an access token whose issuer does not tell it, seconds."""

_BAD_GRANT: Final = frozenset((400, 401, 403))


class Keyring(Protocol):
    """What is used of the `keyring` package."""

    def get_password(self, service_name: str, username: str) -> str | None:
        """The secret of `username` for a service, None if there is none."""
        ...


class Credential:
    """Gives the Authorization header of requests. Shows nothing of itself."""

    async def renew(self) -> None:
        """Called before each request: make sure that the header will be valid."""

    def get_auth_header(self) -> str:
        """The value of the Authorization header; the name is pyunicore's."""
        raise NotImplementedError

    def expires_at(self) -> float | None:
        """When it ends without a way to renew it, seconds since the epoch; None: never, unknown."""
        return None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class Password(Credential):
    """User name and password; unlike pyunicore's it may hold any character (RFC 7617, UTF-8)."""

    def __init__(self, username: str, password: str) -> None:
        encoded = base64.b64encode(f"{username}:{password}".encode()).decode("ascii")
        self._header = f"Basic {encoded}"

    def get_auth_header(self) -> str:
        """The Basic header."""
        return self._header


class Bearer(Credential):
    """An access token that was got elsewhere and is not renewed."""

    def __init__(self, token: str) -> None:
        self._token = _header_safe(token)

    def get_auth_header(self) -> str:
        """The Bearer header."""
        return f"Bearer {self._token}"

    def expires_at(self) -> float | None:
        """The `exp` that the token claims; its signature is the server's to check."""
        return _expiry(self._token)


class SshKey(Credential):
    """Tokens signed with a private key whose public part the site knows (UNICORE's SSHKEY)."""

    def __init__(self, username: str, key_file: Path, passphrase: str | None = None) -> None:
        key, algorithm = _private_key(key_file, passphrase)
        self._signer = JWTToken(
            username, username, key, algorithm=algorithm, lifetime=SIGNED_FOR_S, etd=False
        )
        self._token = ""
        self._renew_at = 0.0

    def get_auth_header(self) -> str:
        """The Bearer header, of a token that is signed anew before it expires."""
        now = time.time()
        if now >= self._renew_at:
            self._token = str(self._signer.get_token())
            self._renew_at = now + SIGNED_FOR_S - RENEW_BEFORE_S
        return f"Bearer {self._token}"


class Refreshed(Credential):
    """An OpenID Connect refresh token: access tokens are got with it and renewed in time.

    Issuers may give a new refresh token each time; the newest is used from then on, in this process
    only.
    """

    def __init__(
        self,
        token_url: str,
        client_id: str,
        refresh_token: str,
        client_secret: str | None = None,
        *,
        client: Callable[[], httpx.Client] | None = None,
    ) -> None:
        if not token_url.startswith(("https://", "http://localhost", "http://127.0.0.1")):
            raise CredentialError("the token URL has to be an https:// address", where="TOKEN_URL")
        self._url = token_url
        self._form = {"grant_type": "refresh_token", "client_id": client_id}
        if client_secret:
            self._form["client_secret"] = client_secret
        self._refresh_token = refresh_token
        self._client = client or (lambda: httpx.Client(timeout=TOKEN_TIMEOUT_S))
        self._token = ""
        self._renew_at = 0.0
        self._lock = threading.Lock()

    async def renew(self) -> None:
        """Get a new access token where the old one ends soon; requests in between wait.

        Raises:
            CredentialError: if the issuer does not take the refresh token any more.
            SiteUnreachable: if it does not answer as an issuer does.
        """
        if time.time() >= self._renew_at:
            await asyncio.to_thread(self._renew)

    def get_auth_header(self) -> str:
        """The Bearer header; `renew` has been called before."""
        return f"Bearer {self._token}"

    def _renew(self) -> None:
        with self._lock:
            if time.time() < self._renew_at:
                return  # another request has done it meanwhile
            answer = self._ask()
            token, lifetime = answer.get("access_token"), answer.get("expires_in")
            if not isinstance(token, str):
                raise SiteUnreachable("the answer has no access token", where=self._url)
            self._token = _header_safe(token)
            self._refresh_token = str(answer.get("refresh_token") or self._refresh_token)
            seconds = float(lifetime) if isinstance(lifetime, int | float) else ASSUMED_LIFETIME_S
            # A token that lives shorter than the margin is used for half of its life.
            self._renew_at = time.time() + max(seconds - RENEW_BEFORE_S, seconds / 2)

    def _ask(self) -> dict[str, Any]:
        form = {**self._form, "refresh_token": self._refresh_token}
        try:
            with self._client() as client:
                response = client.post(self._url, data=form)
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            # Not chained: the request in the HTTP error holds the refresh token.
            raise SiteUnreachable(
                f"no token from its issuer: {type(error).__name__}", where=self._url
            ) from None
        if response.status_code in _BAD_GRANT:
            raise CredentialError(
                f"the refresh token was refused ({response.status_code})",
                where=self._url,
                do="Log in again and set the new REFRESH_TOKEN",
            )
        if response.status_code != httpx.codes.OK or not isinstance(answer, dict):
            raise SiteUnreachable(
                f"no token from its issuer: status {response.status_code}", where=self._url
            )
        return answer


@dataclass(frozen=True)
class _Kind:
    """A kind of credentials: what it needs, and what it may have."""

    needs: tuple[str, ...]
    make: Callable[[Mapping[str, str]], Credential]
    optional: tuple[str, ...] = ()


# In this order; the first whose needs are all there is taken.
_KINDS: Final = (
    _Kind(("TOKEN",), lambda v: Bearer(v["TOKEN"])),
    _Kind(
        ("REFRESH_TOKEN", "TOKEN_URL", "CLIENT_ID"),
        lambda v: Refreshed(
            v["TOKEN_URL"], v["CLIENT_ID"], v["REFRESH_TOKEN"], v.get("CLIENT_SECRET")
        ),
        ("CLIENT_SECRET",),
    ),
    _Kind(
        ("USERNAME", "SSH_KEY"),
        lambda v: SshKey(v["USERNAME"], Path(v["SSH_KEY"]).expanduser(), v.get("SSH_KEY_PASSWORD")),
        ("SSH_KEY_PASSWORD",),
    ),
    _Kind(("USERNAME", "PASSWORD"), lambda v: Password(v["USERNAME"], v["PASSWORD"])),
)


def find_credentials(
    site: str, api: str, environ: Mapping[str, str], keyring: Keyring | None = None
) -> Credential:
    """The credentials of a site.

    For each kind of credentials the environment is asked before the keyring; a kind that is
    complete under the site's own name comes before one under the API's name.

    Args:
        site: name of the site.
        api: `unicore`.
        environ: the environment's variables.
        keyring: where to look for what the environment lacks, under the service `mantik:<site>`;
            by default the system's, if it has one.

    Raises:
        CredentialError: if there are none, or if what is there cannot be used.
    """
    own = _from_environment(environ, (_variable(site),))
    every = _from_environment(environ, (_variable(site), _variable(api)))
    try:
        for values in (own, every):
            for kind in _KINDS:
                if all(name in values for name in kind.needs):
                    return kind.make(values)
        ring = keyring if keyring is not None else _system_keyring()
        for kind in _KINDS:
            with_ring = _with_keyring(kind, every, site, ring)
            if all(name in with_ring for name in kind.needs):
                return kind.make(with_ring)
    except CredentialError as error:
        raise CredentialError(error.what, where=f"site {site}", do=error.do) from error
    raise CredentialError(missing(site, api, every), where=f"site {site}", do=_WHAT_TO_SET)


_WHAT_TO_SET: Final = (
    "Set one of these sets of variables, or put them into the keyring (see docs/credentials.md)"
)


def missing(site: str, api: str, found: Iterable[str] = ()) -> str:
    """What was looked for in vain, as a text without any value."""
    names = "; ".join(
        " and ".join(f"{_variable(api)}_{name}" for name in kind.needs) for kind in reversed(_KINDS)
    )
    there = ", ".join(sorted(found))
    some = f" (found only {there})" if there else ""
    return (
        f"no credentials{some}; looked for {names}, each also as {_variable(site)}_…, and in the "
        f"keyring under the service {_service(site)}"
    )


def require_all(
    sites: Mapping[str, str], environ: Mapping[str, str], keyring: Keyring | None = None
) -> dict[str, Credential]:
    """The credentials of all `sites` (API by site name).

    Raises:
        CredentialError: with everything that is missing at any of them.
    """
    found: dict[str, Credential] = {}
    errors: list[CredentialError] = []
    for site, api in sites.items():
        try:
            found[site] = find_credentials(site, api, environ, keyring)
        except CredentialError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        told = "\n".join(f"  {error.where}: {error.what}" for error in errors)
        raise CredentialError(
            f"credentials of {len(errors)} sites cannot be used:\n{told}\n", do=_WHAT_TO_SET
        )
    return found


def expires_at(credential: Credential) -> float | None:
    """When a credential ends that cannot be renewed, seconds since the epoch; None if it does not.

    For a bearer token it is what the token itself claims, unverified: good for a warning only.
    """
    return credential.expires_at()


def find_account(site: str, environ: Mapping[str, str]) -> str | None:
    """The compute budget account: `MANTIK_<SITE>_COMPUTE_BUDGET_ACCOUNT` before the general one."""
    return (
        environ.get(f"{_variable(site)}_COMPUTE_BUDGET_ACCOUNT")
        or environ.get("MANTIK_COMPUTE_BUDGET_ACCOUNT")
        or None
    )


def _variable(name: str) -> str:
    return f"MANTIK_{name.upper().replace('-', '_')}"


def _service(site: str) -> str:
    return f"mantik:{site}"


def _from_environment(environ: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """Values by bare name (`USERNAME`); empty variables count as not set, first prefix wins."""
    found: dict[str, str] = {}
    for kind in _KINDS:
        for name in (*kind.needs, *kind.optional):
            for prefix in prefixes:
                if value := environ.get(f"{prefix}_{name}"):
                    found.setdefault(name, value)
    return found


def _with_keyring(
    kind: _Kind, values: Mapping[str, str], site: str, ring: Keyring | None
) -> dict[str, str]:
    found = dict(values)
    if ring is None:
        return found
    for name in (*kind.needs, *kind.optional):
        if name in found:
            continue
        value = _ask_keyring(ring, site, name)
        if value:
            found[name] = value
        elif name in kind.needs:
            break
    return found


def _ask_keyring(ring: Keyring, site: str, name: str) -> str | None:
    from keyring.errors import KeyringError

    try:
        return ring.get_password(_service(site), name)
    except KeyringError:  # no backend, locked, refused: as if it held nothing
        return None


def _system_keyring() -> Keyring | None:
    """The system's keyring; imported only when it is needed, it looks around on the machine."""
    import keyring

    return keyring  # the module has the method that the protocol asks for


def _private_key(file: Path, passphrase: str | None) -> tuple[Any, str]:
    """The private key in `file`, OpenSSH or PEM, and the algorithm that its tokens are signed with.

    Raises:
        CredentialError: if it cannot be read.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa

    secret = passphrase.encode() if passphrase else None
    try:
        data = file.read_bytes()
        if b"OPENSSH PRIVATE KEY" in data:
            key: object = serialization.load_ssh_private_key(data, password=secret)
        else:
            key = serialization.load_pem_private_key(data, password=secret)
    except OSError as error:
        reason, do = f"cannot be read: {error.strerror}", "Name the file of a private key"
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        reason, do = f"is no private key that can be used: {error}", "Check SSH_KEY_PASSWORD"
    else:
        if isinstance(key, rsa.RSAPrivateKey):
            return key, "RS256"
        if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp256r1":
            return key, "ES256"
        if isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey):
            return key, "EdDSA"
        reason, do = "has a type that UNICORE does not take", "Use RSA, Ed25519 or ECDSA P-256"
    raise CredentialError(f"the key {file} {reason}", do=do)


def _header_safe(token: str) -> str:
    """The token, if a header can carry it: the HTTP client's own error would show it."""
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise CredentialError(
            "the access token holds characters that no token has", do="Set the token again"
        )
    return token


def _expiry(token: str) -> float | None:
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        padded = parts[1] + "=" * (-len(parts[1]) % 4)
        claims = json.loads(base64.urlsafe_b64decode(padded))
    except ValueError:
        return None
    expiry = claims.get("exp") if isinstance(claims, dict) else None
    return float(expiry) if isinstance(expiry, int | float) else None
