"""Kinds of credentials: each makes the Authorization header of requests, and shows nothing."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import jwt

from snakemake_executor_plugin_mantik.config.addresses import is_confidential, is_loopback
from snakemake_executor_plugin_mantik.errors import (
    CredentialError,
    MantikError,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.sites.addresses import distrust, tls
from snakemake_executor_plugin_mantik.sites.http import post_form

RENEW_BEFORE_S: Final = 60.0
"""A token is renewed this long before it expires, seconds."""
LEAST_LEFT_S: Final = 40.0
"""How long a token is valid at least when it is used, if its whole life is not shorter, seconds.

firecREST refuses tokens with less than 30 s left (its `min_token_ttl`)."""
TOKEN_TIMEOUT_S: Final = 30.0
"""How long the issuer of tokens may take to answer, seconds."""
SIGNED_FOR_S: Final = 300
"""How long a token signed with an SSH key is valid, seconds."""
CLOCK_SLACK_S: Final = 30.0
"""Differences between clocks that need no care, seconds."""
FARTHEST_CLOCK_S: Final = 86_400.0
"""How far a server's clock may differ from ours if it is to be believed, seconds."""
LONGEST_SPAN_S: Final = 366 * 86_400.0
"""Longer than anything that an issuer means, seconds."""
ASSUMED_LIFETIME_S: Final = 300.0
"""Lifetime of an access token whose issuer does not tell it, seconds."""

LOOK_AGAIN_S: Final = 5.0
"""How often new credentials are looked for in the place of refused ones at most, seconds."""

CHECK_CREDENTIALS: Final = (
    "Check the credentials of this site; they are read from the environment or the keyring"
)
"""What to do about credentials of which nothing more is known."""

_FOR_ENCRYPTED_KEYS: Final = "Install the Python package bcrypt, which encrypted OpenSSH keys need"
_BAD_GRANT: Final = frozenset((400, 401, 403))


def refused_by_issuer(error: CredentialError) -> SiteUnauthorized:
    """The site's error for credentials that the issuer of its tokens refuses.

    It ends a run that starts. It does not end jobs that run: the run waits until the issuer, or the
    user, thinks better of it.
    """
    return SiteUnauthorized(error.what, where=error.where, do=error.do)


@dataclass(frozen=True)
class Issuer:
    """Where a site's access tokens are got, and how that is reached: as its config says.

    Attributes:
        url: the token endpoint, None where the config does not name it.
        ca_file: certificates that its own is checked against, too.
        proxy: URL of a HTTP proxy.
    """

    url: str | None = None
    ca_file: Path | None = None
    proxy: str | None = None

    def client(self, url: str) -> httpx.Client:
        """A client for one request to `url`, the endpoint that is used in the end.

        Raises:
            UserError: `ca_file` cannot be used.
        """
        return httpx.Client(
            verify=tls(self.ca_file, url),
            proxy=self.proxy,
            trust_env=not is_loopback(url),
            timeout=TOKEN_TIMEOUT_S,
        )


class _Moment:
    """A moment to come; it is over when one of two clocks says so.

    One may be set while the machine runs, the other stands still while it sleeps.
    """

    def __init__(self) -> None:
        self._clocks = (0.0, 0.0)

    @staticmethod
    def now() -> tuple[float, float]:
        """What both clocks show, seconds."""
        return time.time(), time.monotonic()

    def set(self, start: tuple[float, float], seconds: float) -> None:
        """It comes `seconds` after `start`."""
        self._clocks = (start[0] + seconds, start[1] + seconds)

    def over(self) -> bool:
        """Whether it has come."""
        return any(now >= then for now, then in zip(self.now(), self._clocks, strict=True))


class Credential:
    """Gives the Authorization header of requests. Shows nothing of itself.

    Once a site or an issuer has refused it, it is looked for again where it came from: what the
    user changes there is taken from then on, by all who hold this object.

    Attributes:
        origin: the variables that it was made of, by their names, for errors.
        look: finds another one of the same kind in its place; None if there is none that is new.
    """

    origin: str = ""
    look: "Callable[[], Credential | None] | None" = None
    _is_refused: bool = False
    _next_look: float = 0.0

    def advise(self, error: MantikError) -> None:
        """Told of a site's error: name the variables in one that says just that it refuses."""
        self._is_refused = self._is_refused or isinstance(error, SiteUnauthorized)
        if self.origin and error.do == CHECK_CREDENTIALS:
            error.do = f"Check {self.origin}"

    def login(self) -> None:
        """Do what needs a person, once, when a run starts: nothing for most credentials.

        Raises:
            CredentialError: nobody is there, or it was refused.
        """

    async def renew(self) -> None:
        """Called before each request: make sure that the header will be valid."""
        now = time.monotonic()
        if self._is_refused and self.look is not None and now >= self._next_look:
            self._next_look = now + LOOK_AGAIN_S
            newer = await asyncio.to_thread(self.look)
            if newer is not None:
                kept = {"origin": self.origin, "look": self.look}
                vars(self).update({**vars(newer), **kept, "_is_refused": False})

    def get_auth_header(self) -> str:
        """The value of the Authorization header; the name is pyunicore's."""
        raise NotImplementedError

    def headers(self) -> dict[str, str]:
        """The headers that prove who we are; `renew` has been called before."""
        return {"Authorization": self.get_auth_header()}

    def refused(self, headers: Mapping[str, str]) -> bool:
        """Told that a server has refused `headers`; whether others can be had with `renew`."""
        del headers
        return False

    def set_clock(self, server: float) -> bool:
        """Told what the clock shows of a server that refused us; whether that makes a difference.

        Seconds since the epoch.
        """
        del server
        return False

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


class ApiKey(Credential):
    """A key of a service account, in a header of its own (firecREST behind a gateway)."""

    def __init__(self, key: str) -> None:
        self._key = _header_safe(key)

    def headers(self) -> dict[str, str]:
        """The header that pyfirecrest's `ApiKeyAuth` sends."""
        return {"X-API-Key": self._key}


class SshKey(Credential):
    """Tokens signed with a private key whose public part the site knows (UNICORE's SSHKEY)."""

    def __init__(self, username: str, key_file: Path, passphrase: str | None = None) -> None:
        self._key, self._algorithm = _private_key(key_file, passphrase)
        self._username = username
        self._token = ""
        self._renew_at = _Moment()
        self._ahead = 0.0

    def get_auth_header(self) -> str:
        """The Bearer header, of a token that is signed anew before it expires."""
        if self._renew_at.over():
            started = _Moment.now()
            signed = int(started[0] + self._ahead)
            # The claims are those of pyunicore's JWTToken, whose clock cannot be set.
            claims = {"etd": "false", "sub": self._username, "iss": self._username}
            times = {"iat": signed, "exp": signed + SIGNED_FOR_S}
            self._token = jwt.encode({**claims, **times}, self._key, algorithm=self._algorithm)
            self._renew_at.set(started, SIGNED_FOR_S - RENEW_BEFORE_S)
        return f"Bearer {self._token}"

    def set_clock(self, server: float) -> bool:
        """Sign by a server's clock if it differs, but not by one that is off by days.

        Whoever says that it is next year already must not get a token for it.
        """
        ahead = server - time.time()
        if abs(ahead) > FARTHEST_CLOCK_S or abs(ahead - self._ahead) < CLOCK_SLACK_S:
            return False
        self._ahead, self._renew_at = ahead, _Moment()
        return True


class Issued(Credential):
    """Access tokens that are got from an OpenID Connect issuer, and renewed in time."""

    refusal = "the credentials were refused"
    remedy = "Check the credentials"

    def __init__(
        self,
        token_url: str,
        form: Mapping[str, str],
        *,
        client: Callable[[], httpx.Client] | None = None,
    ) -> None:
        """Prepare; nothing is sent before `renew`.

        Args:
            token_url: the issuer's token endpoint.
            form: what it is sent, without what `_ask` adds.
            client: makes the HTTP client.

        Raises:
            CredentialError: if others could read what is sent to `token_url`.
        """
        if not is_confidential(token_url):
            raise CredentialError("the token URL has to be an https:// address", where="TOKEN_URL")
        self._url = token_url
        self._form = dict(form)
        self._client = client or (lambda: Issuer().client(token_url))
        self._token = ""
        self._renew_at = _Moment()
        self._lock = threading.Lock()

    async def renew(self) -> None:
        """Get a new access token where the old one ends soon; requests in between wait.

        Raises:
            CredentialError: if the issuer does not take the credentials (any more).
            SiteUnreachable: if it does not answer as an issuer does.
        """
        await super().renew()
        if self._renew_at.over():
            await asyncio.to_thread(self._renew)

    def get_auth_header(self) -> str:
        """The Bearer header; `renew` has been called before."""
        return f"Bearer {self._token}"

    def refused(self, headers: Mapping[str, str]) -> bool:
        """A token that a server refused before its time is renewed; the clocks may differ."""
        if headers.get("Authorization") == self.get_auth_header():
            self.expire()
        return True

    def expire(self) -> None:
        """Have a new token got before the next request."""
        self._renew_at = _Moment()

    def _renew(self) -> None:
        with self._lock:
            if not self._renew_at.over():
                return  # another request has done it meanwhile
            asked = _Moment.now()
            self._adopt(self._ask(self._form), asked)

    def _adopt(self, answer: Mapping[str, Any], asked: tuple[float, float] | None = None) -> None:
        """Use the token of an issuer's answer; `asked` is when it was asked for, by default now."""
        token, lifetime = answer.get("access_token"), answer.get("expires_in")
        if not isinstance(token, str):
            raise SiteUnreachable("the answer has no access token", where=self._url)
        self._token = _header_safe(token)
        self._keep(answer)
        seconds = span(lifetime, ASSUMED_LIFETIME_S)
        self._renew_at.set(asked or _Moment.now(), seconds - _left(seconds))

    def _keep(self, answer: Mapping[str, Any]) -> None:
        """Keep what else an answer brings for the next request."""

    def _ask(self, form: Mapping[str, str]) -> dict[str, Any]:
        try:
            with self._client() as client:
                response = post_form(client, self._url, form, TOKEN_TIMEOUT_S)
            answer = response.json()
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            # Not chained: the request in the HTTP error holds the secrets.
            why, do = distrust(error)
            raise SiteUnreachable(
                f"no token from its issuer: {why or type(error).__name__}",
                where=self._url,
                do=do or "Check TokenUrl and the network",
            ) from None
        if response.status_code in _BAD_GRANT:
            self._is_refused = True
            raise CredentialError(
                f"{self.refusal} ({response.status_code})",
                where=self._url,
                do=f"{self.remedy} ({self.origin})" if self.origin else self.remedy,
            )
        if response.status_code != httpx.codes.OK or not isinstance(answer, dict):
            raise SiteUnreachable(
                f"no token from its issuer: status {response.status_code}", where=self._url
            )
        return answer


class Refreshed(Issued):
    """An OpenID Connect refresh token: access tokens are got with it and renewed in time.

    Issuers may give a new refresh token each time; the newest is used from then on, in this process
    only.
    """

    refusal = "the refresh token was refused"
    remedy = "Log in again and set the new REFRESH_TOKEN"

    def __init__(
        self,
        token_url: str,
        client_id: str,
        refresh_token: str,
        client_secret: str | None = None,
        *,
        client: Callable[[], httpx.Client] | None = None,
    ) -> None:
        form = {
            "grant_type": "refresh_token",
            "client_id": client_id,
            "refresh_token": refresh_token,
        }
        if client_secret:
            form["client_secret"] = client_secret
        super().__init__(token_url, form, client=client)

    def _keep(self, answer: Mapping[str, Any]) -> None:
        if newer := answer.get("refresh_token"):
            self._form["refresh_token"] = str(newer)


class ClientCredentials(Issued):
    """A client with a secret of its own (a robot account), as OAuth 2.0 has it."""

    refusal = "the client and its secret were refused"
    remedy = "Check CLIENT_ID and CLIENT_SECRET"

    def __init__(
        self,
        token_url: str,
        client_id: str,
        client_secret: str,
        *,
        client: Callable[[], httpx.Client] | None = None,
    ) -> None:
        form = {
            "grant_type": "client_credentials",
            "client_id": client_id,
            "client_secret": client_secret,
        }
        super().__init__(token_url, form, client=client)


def span(told: object, otherwise: float) -> float:
    """Seconds that an issuer tells, or `otherwise` where that is none or no such span."""
    if isinstance(told, int | float) and 0 < told <= LONGEST_SPAN_S:
        return float(told)
    return otherwise


def _left(lifetime: float) -> float:
    """How long before its end a token of `lifetime` seconds is renewed, seconds.

    One that cannot be valid for `LEAST_LEFT_S` at all is used for half of its life.
    """
    if lifetime <= LEAST_LEFT_S:
        return lifetime / 2
    return min(RENEW_BEFORE_S, max(LEAST_LEFT_S, lifetime / 2))


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
    except UnsupportedAlgorithm as error:
        reason, do = f"is encrypted in a way that cannot be read: {error}", _FOR_ENCRYPTED_KEYS
    except (ValueError, TypeError) as error:
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
