"""The identity provider of a firecREST site, and firecREST's check of tokens."""

import base64
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote_plus

import jwt
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..settings import FirecrestSettings
from .answers import Failure

_API_KEY_HEADER = "x-api-key"
_ALGORITHM = "HS256"
_UNTIMED: Any = {"verify_exp": False, "verify_iat": False}


class Tokens:
    """One robot account, its access tokens, and the check of requests.

    Attributes:
        refresh_token: can be exchanged for access tokens, too.
        api_key: authenticates requests that have it as `X-API-Key`, as for service accounts.
    """

    def __init__(self, username: str, settings: FirecrestSettings) -> None:
        """Issue tokens for `username`, with the lifetime in `settings`."""
        self.username = username
        self.client_id = f"{username}-robot"
        self.client_secret = secrets.token_urlsafe(24)
        self.refresh_token = secrets.token_urlsafe(24)
        self.api_key = secrets.token_urlsafe(24)
        self.issued = 0
        self._settings = settings
        self.change_key()

    # --- the identity provider ---------------------------------------------------------------

    def issue(self, lifetime: float | None = None) -> str:
        """Return a new access token, valid for `lifetime` seconds, or the lifetime in settings."""
        self.issued += 1
        now = time.time()
        claims = {
            "iat": int(now),
            "exp": now + (self._settings.token_lifetime if lifetime is None else lifetime),
            "preferred_username": self.username,
            "azp": self.client_id,
            "jti": secrets.token_hex(8),
        }
        return jwt.encode(claims, self._key, _ALGORITHM, headers={"kid": self._key_id})

    def change_key(self) -> None:
        """Sign with a new key from now on, which invalidates all earlier tokens."""
        self._key_id = secrets.token_hex(8)
        self._key = secrets.token_bytes(32)

    async def endpoint(self, request: Request) -> Response:
        """Issue a token for client credentials (in the form or as Basic) or a refresh token."""
        if request.method != "POST":
            return _denied(405, "invalid_request", "HTTP 405 Method Not Allowed")
        form = dict(parse_qsl((await request.body()).decode()))
        client = _basic(request.headers.get("authorization", "")) or [
            form.get(name, "") for name in ("client_id", "client_secret")
        ]
        match form.get("grant_type"):
            case "client_credentials":
                if not _same(client, (self.client_id, self.client_secret)):
                    return _denied(
                        401, "unauthorized_client", "Invalid client or Invalid client credentials"
                    )
            case "refresh_token":
                if not _same([form.get("refresh_token", "")], [self.refresh_token]):
                    return _denied(400, "invalid_grant", "Invalid refresh token")
            case None:
                return _denied(400, "invalid_request", "Missing form parameter: grant_type")
            case _:
                return _denied(400, "unsupported_grant_type", "Unsupported grant_type")
        answer: dict[str, Any] = {
            "access_token": self.issue(), "expires_in": int(self._settings.token_lifetime),
            "refresh_expires_in": 0, "token_type": "Bearer", "not-before-policy": 0,
            "scope": "profile email firecrest",
        }  # fmt: skip
        if form["grant_type"] == "refresh_token":
            answer["refresh_token"] = self.refresh_token
        return JSONResponse(answer, headers={"Cache-Control": "no-store"})

    # --- firecREST ---------------------------------------------------------------------------

    def check(self, headers: Mapping[str, str]) -> None:
        """Check a request's credentials; raise a 401, which repeats a bad token (seen)."""
        if _same([headers.get(_API_KEY_HEADER, "")], [self.api_key]):
            return
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not token:
            raise Failure(401, "Not authenticated", headers={"www-authenticate": "Bearer"})
        if problem := self._problem(token):
            raise Failure(401, problem, headers={"auth-token": token})

    def _problem(self, token: str) -> str:
        try:
            if jwt.get_unverified_header(token).get("kid") != self._key_id:
                return "Token's public key not found."
            claims = jwt.decode(token, self._key, [_ALGORITHM], options=_UNTIMED)
            left = float(claims["exp"]) - time.time()
        except (jwt.InvalidTokenError, KeyError, ValueError):
            return "Access token is invalid."
        if left < 0:
            return "Access token expired"
        margin = self._settings.token_margin
        if left < margin:
            return f"Access token expires too soon (less than {margin:g}s remaining)."
        return ""


def _same(given: Sequence[str], wanted: Sequence[str]) -> bool:
    return secrets.compare_digest("\0".join(given).encode(), "\0".join(wanted).encode())


def _basic(header: str) -> tuple[str, str] | None:
    kind, _, value = header.partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        name, _, secret = base64.b64decode(value, validate=True).decode().partition(":")
    except ValueError:
        return None
    return unquote_plus(name), unquote_plus(secret)


def _denied(status: int, error: str, description: str) -> Response:
    return JSONResponse({"error": error, "error_description": description}, status)
