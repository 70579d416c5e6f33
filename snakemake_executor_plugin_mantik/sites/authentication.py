"""Kinds of credentials: each makes the Authorization header of requests and hides its values."""

import asyncio
import base64
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import jwt

from snakemake_executor_plugin_mantik.common.errors import (
    CredentialError,
    MantikError,
    SiteUnauthorized,
)

from .http import CHECK_CREDENTIALS

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

    def __init__(self) -> None:
        self._clocks = (0.0, 0.0)

    @staticmethod
    def now() -> tuple[float, float]:
        """Return the readings of both clocks, seconds."""
        return time.time(), time.monotonic()

    def set(self, start: tuple[float, float], seconds: float) -> None:
        self._clocks = (start[0] + seconds, start[1] + seconds)

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
    _is_refused: bool = False
    _next_look: float = 0.0

    def advise(self, error: MantikError) -> None:
        """Note an error of a site; name the variables in one that advises to check credentials."""
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
        raise NotImplementedError

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

    def get_auth_header(self) -> str:
        return f"Bearer {self._token}"

    def expires_at(self) -> float | None:
        """Return the token's `exp` claim; only the server verifies its signature."""
        return _expiry(self._token)


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
        self._token = ""
        self._renew_at = Moment()
        self._ahead = 0.0

    def get_auth_header(self) -> str:
        if self._renew_at.over():
            started = Moment.now()
            signed = int(started[0] + self._ahead)
            times = {"iat": signed, "exp": signed + _SIGNED_FOR_S}
            key, algorithm = self._signed_with
            self._token = jwt.encode({**self._claims, **times}, key, algorithm=algorithm)
            self._renew_at.set(started, _SIGNED_FOR_S - RENEW_BEFORE_S)
        return f"Bearer {self._token}"

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
    """Read the private key in `file`, OpenSSH or PEM, and choose its signature algorithm.

    Raises:
        CredentialError: it cannot be read or used.
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
