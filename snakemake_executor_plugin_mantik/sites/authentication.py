"""Kinds of credentials: each makes the Authorization header of requests and hides its values.

Access tokens come from elsewhere, are signed with a key, or are issued by an OpenID Connect issuer:
for other credentials, or after a login that the user confirms in a browser. What takes long to
import is imported when it is needed.
"""

import asyncio
import base64
import sys
import threading
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..common.errors import (
    CredentialError,
    MantikError,
    SiteUnauthorized,
    SiteUnreachable,
    printable,
)
from ..config.values import is_confidential, is_loopback

if TYPE_CHECKING:
    import httpx

RENEW_BEFORE_S: Final = 60.0
"""A token is renewed this long before it expires, seconds."""
_SIGNED_FOR_S: Final = 300
"""How long a token signed with an SSH key is valid, seconds."""
_CLOCK_SLACK_S: Final = 30.0
"""Clock differences that are ignored, seconds."""
_FARTHEST_CLOCK_S: Final = 86_400.0
"""Largest difference from our clock for which a server's clock is believed, seconds."""
_LOOK_AGAIN_S: Final = 5.0
"""Minimum time between two searches for new credentials after a refusal, seconds."""

_FOR_ENCRYPTED_KEYS: Final = "Install the Python package bcrypt, which encrypted OpenSSH keys need"


class Moment:
    """A moment in the future; it has come when one of two clocks says so.

    The wall clock may be set while the machine runs; the monotonic one stops while it sleeps.
    """

    def __init__(self, start: tuple[float, float] = (0.0, 0.0), seconds: float = 0.0) -> None:
        self._clocks = (start[0] + seconds, start[1] + seconds)

    @staticmethod
    def now() -> tuple[float, float]:
        """Return the readings of both clocks, seconds."""
        return time.time(), time.monotonic()

    def over(self) -> bool:
        return any(now >= then for now, then in zip(self.now(), self._clocks, strict=True))


class Credential:
    """Provides the Authorization header of requests; its `repr` hides its values.

    After a site or an issuer has refused it, `renew` looks up new values at its origin. All holders
    of this object then use them.

    Attributes:
        origin: the variables and keyring entries that its values came from, for errors.
        look: finds a replacement of the same kind; returns None if there is nothing new.
        interactive: whether `login` may ask the user.
    """

    interactive: bool = False
    origin: str = ""
    look: "Callable[[], Credential | None] | None" = None
    _token: str = ""
    _is_refused: bool = False
    _next_look: float = 0.0

    def advise(self, error: MantikError) -> None:
        """Note an error of a site; name the variables in one that advises to check credentials."""
        from .http import CHECK_CREDENTIALS

        self._is_refused = self._is_refused or isinstance(error, SiteUnauthorized)
        if self.origin and error.do == CHECK_CREDENTIALS:
            error.do = f"Check {self.origin}"

    def accepted(self) -> None:
        """Note that a site accepted the credential: stop looking for another one."""
        self._is_refused = False

    def login(self) -> None:
        """Log in interactively, once, at the start of a run; most credentials do nothing.

        Raises:
            CredentialError: there is no terminal, or the login was refused or took too long.
            SiteUnreachable: the issuer does not answer.
        """

    async def renew(self) -> None:
        """Make sure that the header will be valid; called before each request."""
        now = time.monotonic()
        if self._is_refused and self.look is not None and now >= self._next_look:
            self._next_look = now + _LOOK_AGAIN_S
            newer = await asyncio.to_thread(self.look)
            if newer is not None:
                kept = {"origin": self.origin, "look": self.look}
                vars(self).update({**vars(newer), **kept, "_is_refused": False})

    def get_auth_header(self) -> str:
        """Return the value of the Authorization header; the method's name is pyunicore's."""
        return f"Bearer {self._token}"

    def headers(self) -> dict[str, str]:
        """Return the authentication headers; call `renew` before."""
        return {"Authorization": self.get_auth_header()}

    def refused(self, headers: Mapping[str, str]) -> bool:
        """Note that a server refused `headers`; return whether `renew` can get others."""
        del headers
        return False

    def set_clock(self, server: float) -> bool:
        """Note the clock of a server that refused us, seconds since the epoch.

        Returns whether that changes the credential.
        """
        del server
        return False

    def expires_at(self) -> float | None:
        """Return its end if it cannot be renewed, seconds since the epoch; None: never, unknown."""
        return None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class Password(Credential):
    """User name and password; any character is allowed, unlike in pyunicore (RFC 7617, UTF-8)."""

    def __init__(self, username: str, password: str) -> None:
        encoded = base64.b64encode(f"{username}:{password}".encode()).decode("ascii")
        self._header = f"Basic {encoded}"

    def get_auth_header(self) -> str:
        return self._header


class Bearer(Credential):
    """An access token from elsewhere, which is not renewed."""

    def __init__(self, token: str) -> None:
        self._token = check_header_value(token)

    def expires_at(self) -> float | None:
        """Return the token's `exp` claim; only the server verifies its signature."""
        import jwt

        try:
            expiry = jwt.decode(self._token, options={"verify_signature": False}).get("exp")
        except jwt.InvalidTokenError:
            return None
        return float(expiry) if isinstance(expiry, int | float) else None


class ApiKey(Credential):
    """A key of a service account, in a header of its own (firecREST behind a gateway)."""

    def __init__(self, key: str) -> None:
        self._key = check_header_value(key)

    def headers(self) -> dict[str, str]:
        """Return the header that pyfirecrest's `ApiKeyAuth` sends."""
        return {"X-API-Key": self._key}


class SshKey(Credential):
    """Tokens signed with a private key whose public part the site knows (UNICORE's SSHKEY)."""

    def __init__(self, username: str, key_file: Path, passphrase: str | None = None) -> None:
        self._signed_with = _private_key(key_file, passphrase)
        # The claims are those of pyunicore's JWTToken, whose clock cannot be set.
        self._claims = {"etd": "false", "sub": username, "iss": username}
        self._renew_at = Moment()
        self._ahead = 0.0

    def get_auth_header(self) -> str:
        import jwt

        if self._renew_at.over():
            started = Moment.now()
            signed = int(started[0] + self._ahead)
            times = {"iat": signed, "exp": signed + _SIGNED_FOR_S}
            key, algorithm = self._signed_with
            self._token = jwt.encode({**self._claims, **times}, key, algorithm=algorithm)
            self._renew_at = Moment(started, _SIGNED_FOR_S - RENEW_BEFORE_S)
        return super().get_auth_header()

    def set_clock(self, server: float) -> bool:
        """Sign by a server's clock if it differs, but not by one that is off by more than a day.

        A server that claims to be in the next year must not get a token that is valid then.
        """
        ahead = server - time.time()
        if abs(ahead) > _FARTHEST_CLOCK_S or abs(ahead - self._ahead) < _CLOCK_SLACK_S:
            return False
        self._ahead, self._renew_at = ahead, Moment()
        return True


def _private_key(file: Path, passphrase: str | None) -> tuple[Any, str]:
    """Read the private key in `file`, OpenSSH or PEM, and choose its signature algorithm."""
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
        reason, do = f"cannot be read: {error.strerror}", "Set SSH_KEY to a private key file"
    except UnsupportedAlgorithm as error:
        reason, do = f"has an unsupported encryption: {error}", _FOR_ENCRYPTED_KEYS
    except (ValueError, TypeError) as error:
        reason, do = f"is not a usable private key: {error}", "Check SSH_KEY_PASSWORD"
    else:
        if isinstance(key, rsa.RSAPrivateKey):
            return key, "RS256"
        if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name == "secp256r1":
            return key, "ES256"
        if isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey):
            return key, "EdDSA"
        reason, do = "has a type that UNICORE does not accept", "Use RSA, Ed25519 or ECDSA P-256"
    raise CredentialError(f"the key {file} {reason}", do=do)


def check_header_value(token: str) -> str:
    """Return the token if a header can carry it; the HTTP client's own error would show it."""
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise CredentialError(
            "the access token contains characters that no token has", do="Set the token again"
        )
    return token


_LEAST_LEFT_S: Final = 40.0
"""Minimum remaining life of a token that is used, unless its whole life is shorter, seconds.

firecREST refuses tokens with less than 30 s left (its `min_token_ttl`)."""
TOKEN_TIMEOUT_S: Final = 30.0
"""Time-out for requests to a token issuer, seconds."""
_LONGEST_SPAN_S: Final = 366 * 86_400.0
"""Longer lifetimes and intervals from an issuer are not believed, seconds."""
_ASSUMED_LIFETIME_S: Final = 300.0
"""Lifetime of an access token if the issuer does not report it, seconds."""

_BAD_GRANT: Final = frozenset((400, 401, 403))


@dataclass(frozen=True)
class Issuer:
    """The issuer of a site's access tokens and the way to reach it, from the site's config.

    `url` is the token endpoint, if the config names it. `ca_file` has additional certificates to
    verify the issuer's.
    """

    url: str | None = None
    ca_file: Path | None = None
    proxy: str | None = None

    def client(self, url: str) -> "httpx.Client":
        """Make a client for one request to `url`, the endpoint that is finally used."""
        import httpx

        from .http import tls_context

        return httpx.Client(
            verify=tls_context(self.ca_file, url),
            proxy=self.proxy,
            trust_env=not is_loopback(url),
            timeout=TOKEN_TIMEOUT_S,
        )


class _Issued(Credential):
    grant: str
    refusal: str
    remedy: str

    def __init__(
        self,
        token_url: str,
        client_id: str,
        client_secret: str | None = None,
        *,
        refresh_token: str | None = None,
        issuer: Issuer | None = None,
    ) -> None:
        """Prepare; `renew` makes the first request. `issuer` says how it is reached."""
        _check_url(token_url, "token URL", "TOKEN_URL")
        self._url = token_url
        form = {
            "grant_type": self.grant,
            "client_id": client_id,
            "client_secret": client_secret,
            "refresh_token": refresh_token,
        }
        self._form = {name: value for name, value in form.items() if value is not None}
        self._issuer = issuer or Issuer()
        self._renew_at = Moment()
        self._lock = threading.Lock()

    async def renew(self) -> None:
        """Get a new access token if the old one ends soon; concurrent requests wait for it.

        Raises:
            CredentialError: the issuer does not accept the credentials (any more).
            SiteUnreachable: the issuer does not answer, or its answer is not valid.
        """
        await super().renew()
        if self._renew_at.over():
            await asyncio.to_thread(self._renew)

    def refused(self, headers: Mapping[str, str]) -> bool:
        """Let `renew` replace a token that was refused before its time: the clocks may differ."""
        if headers.get("Authorization") == self.get_auth_header():
            self._renew_at = Moment()
        return True

    def _renew(self) -> None:
        with self._lock:
            if not self._renew_at.over():
                return  # another request has done it meanwhile
            asked = Moment.now()
            self._adopt(self._ask(self._form), asked)

    def _adopt(self, answer: Mapping[str, Any], asked: tuple[float, float] | None = None) -> None:
        """Use the token of an issuer's answer; `asked` is the time of the request, default now."""
        token, lifetime = answer.get("access_token"), answer.get("expires_in")
        if not isinstance(token, str):
            raise SiteUnreachable("the issuer's answer has no access token", where=self._url)
        self._token = check_header_value(token)
        self._keep(answer)
        seconds = valid_lifetime(lifetime, _ASSUMED_LIFETIME_S)
        self._renew_at = Moment(asked or Moment.now(), seconds - _left(seconds))

    def _keep(self, answer: Mapping[str, Any]) -> None:
        """Keep other parts of an answer for the next request; a hook for subclasses."""

    def _ask(self, form: Mapping[str, str]) -> dict[str, Any]:
        status, answer = self._post(self._url, form)
        if status in _BAD_GRANT:
            self._is_refused = True
            raise CredentialError(
                f"{self.refusal} ({status})",
                where=self._url,
                do=f"{self.remedy} ({self.origin})" if self.origin else self.remedy,
            )
        if status != 200:
            raise self._no_token(f"status {status}", self._url)
        return answer

    def _post(self, url: str, form: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
        """Post a form to the issuer; return the status and the JSON object that it answers."""
        import httpx

        from .http import explain_tls_error, post_form

        try:
            with self._issuer.client(url) as client:
                response = post_form(client, url, form, TOKEN_TIMEOUT_S)
            answer = response.json()
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            # Not chained: the request in the HTTP error holds the secrets.
            why, do = explain_tls_error(error)
            do = do or "Check TokenUrl and the network"
            raise self._no_token(why or type(error).__name__, url, do) from None
        if not isinstance(answer, dict):
            raise self._no_token(f"status {response.status_code}", url)
        return response.status_code, answer

    def _no_token(self, why: str, url: str, do: str = "") -> SiteUnreachable:
        return SiteUnreachable(f"no access token from the issuer: {why}", where=url, do=do)


class Refreshed(_Issued):
    """An OpenID Connect refresh token that access tokens are obtained with.

    Issuers may give a new refresh token each time; this process uses the newest from then on.
    """

    grant = "refresh_token"
    refusal = "the refresh token was refused"
    remedy = "Log in again and set the new REFRESH_TOKEN"

    def _keep(self, answer: Mapping[str, Any]) -> None:
        if newer := answer.get("refresh_token"):
            self._form["refresh_token"] = str(newer)


class ClientCredentials(_Issued):
    """A client with its own secret (a robot account): OAuth 2.0's client credentials grant."""

    grant = "client_credentials"
    refusal = "the client and its secret were refused"
    remedy = "Check CLIENT_ID and CLIENT_SECRET"


def _check_url(url: str, name: str, key: str) -> None:
    """Check that an issuer's address gets no credentials unencrypted."""
    if not is_confidential(url):
        raise CredentialError(
            f"the {name} is not an https:// address: credentials would be sent unencrypted",
            where=key,
            do="Use the full URL, starting with https://",
        )


def valid_lifetime(told: object, otherwise: float) -> float:
    """Return the seconds that an issuer reports, or `otherwise` if they are not valid."""
    if isinstance(told, int | float) and 0 < told <= _LONGEST_SPAN_S:
        return float(told)
    return otherwise


def _left(lifetime: float) -> float:
    """Return how long before its end a token of `lifetime` seconds is renewed, seconds.

    A token that cannot be valid for `_LEAST_LEFT_S` at all is used for half of its life.
    """
    if lifetime <= _LEAST_LEFT_S:
        return lifetime / 2
    return min(RENEW_BEFORE_S, max(_LEAST_LEFT_S, lifetime / 2))


INTERVAL_S: Final = 5.0
"""Seconds between two polls if the issuer names none; `slow_down` adds as much."""
_LONGEST_S: Final = 900.0
"""Seconds that the user has to log in if the issuer names none."""
_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"


class DeviceLogin(Refreshed):
    """A login that the user confirms in a browser; afterwards its refresh token is used.

    Call `login` at the start of a run, where a terminal is available.
    """

    interactive = True
    remedy = "Start again and log in again"

    def __init__(
        self,
        device_url: str,
        token_url: str,
        client_id: str,
        client_secret: str | None = None,
        *,
        issuer: Issuer | None = None,
        terminal: Callable[[], bool] = sys.stderr.isatty,
    ) -> None:
        """Prepare; `login` makes the first request.

        `device_url` is the issuer's device authorization endpoint. `client_id` names a client that
        may use this grant. `terminal` returns whether a user is there to log in.

        Raises:
            CredentialError: a URL would get credentials unencrypted.
        """
        super().__init__(token_url, client_id, client_secret, refresh_token="", issuer=issuer)
        _check_url(device_url, "device URL", "DEVICE_URL")
        self._device_url = device_url
        self._keep_token: Callable[[str], None] = lambda _: None
        self._terminal = terminal

    def remember(self, refresh_token: str, keep: Callable[[str], None]) -> None:
        """Try the refresh token of an earlier login first, if any; `keep` stores the newest."""
        self._form["refresh_token"] = refresh_token
        self._keep_token = keep

    def logged_in_elsewhere(self, refresh_token: str) -> "DeviceLogin | None":
        """Return this login with another process's newer refresh token; None if it is not new."""
        if not refresh_token or refresh_token == self._form["refresh_token"]:
            return None
        newer = copy(self)
        newer._form = {**self._form, "refresh_token": refresh_token}
        newer._renew_at = Moment()
        return newer

    def login(self) -> None:
        """Get a token with the refresh token of an earlier login, or ask the user to log in."""
        if self._token:
            return
        if self._form["refresh_token"]:
            try:
                self._renew()
            except CredentialError:
                self._form["refresh_token"] = ""  # it has ended: log in again
            else:
                return
        if not self._terminal():
            raise CredentialError(
                "a login in a browser is needed, and there is no terminal to ask at",
                where=self._device_url,
                do="Start once at a terminal, or set REFRESH_TOKEN",
            )
        who = {k: v for k, v in self._form.items() if k in ("client_id", "client_secret")}
        begun = self._poll(self._device_url, {**who, "scope": "openid offline_access"})
        try:
            code, shown = str(begun["device_code"]), str(begun["user_code"])
            page = str(begun.get("verification_uri_complete") or begun["verification_uri"])
        except KeyError as error:
            raise SiteUnreachable(
                f"the issuer's answer has no {error}", where=self._device_url, do="Check DEVICE_URL"
            ) from None
        lasts = valid_lifetime(begun.get("expires_in"), _LONGEST_S)
        words = (
            f"To log in, open {page} and confirm the code {shown} (within {lasts / 60:.0f} min)."
        )
        print(printable(words), file=sys.stderr, flush=True)  # noqa: T201 - the user waits for it
        form = {**who, "grant_type": _GRANT, "device_code": code}
        self._adopt(self._wait(form, valid_lifetime(begun.get("interval"), INTERVAL_S), lasts))

    def _wait(self, form: Mapping[str, str], interval_s: float, lasts_s: float) -> dict[str, Any]:
        end = time.monotonic() + lasts_s
        while time.monotonic() < end:
            time.sleep(interval_s)
            answer = self._poll(self._url, form)
            match answer.get("error"):
                case None:
                    return answer
                case "authorization_pending":
                    pass
                case "slow_down":
                    interval_s += INTERVAL_S
                case "expired_token":
                    break
                case error:
                    raise CredentialError(
                        f"the login was refused ({error})", where=self._url, do=self.remedy
                    )
        raise CredentialError(
            "the login was not confirmed in time", where=self._url, do=self.remedy
        )

    def _poll(self, url: str, form: Mapping[str, str]) -> dict[str, Any]:
        """Post a form to the issuer; return its answer, also that of a refusal (400)."""
        status, answer = self._post(url, form)
        if not 200 <= status < 300 and "error" not in answer:
            raise self._no_token(f"status {status}", url)
        return answer

    def _keep(self, answer: Mapping[str, Any]) -> None:
        super()._keep(answer)
        if answer.get("refresh_token"):
            self._keep_token(self._form["refresh_token"])
