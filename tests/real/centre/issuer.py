"""An OpenID Connect issuer on loopback: RS256 tokens for clients with a secret."""

import json
import threading
import time
import uuid
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

LIFETIME_S = 300
"""How long a token lasts, seconds."""
_KEY_ID = "centre"


class Issuer:
    """Issues tokens and publishes the key that they are signed with.

    Attributes:
        url: base of the issuer's endpoints.
        users: the user names that clients get tokens for, by client id and secret.
    """

    def __init__(self, users: Mapping[tuple[str, str], str]) -> None:
        self.users = users
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def token_url(self) -> str:
        return f"{self.url}/token"

    @property
    def certificates_url(self) -> str:
        return f"{self.url}/certs"

    @contextmanager
    def running(self) -> Iterator["Issuer"]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def certificates(self) -> dict[str, Any]:
        """The public key as a JSON Web Key Set."""
        key = RSAAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        return {"keys": [{**key, "kid": _KEY_ID, "use": "sig", "alg": "RS256"}]}

    def token(self, user: str, client: str) -> str:
        now = int(time.time())
        claims = {
            "iss": self.url, "sub": user, "preferred_username": user, "azp": client,
            "aud": "account", "iat": now, "exp": now + LIFETIME_S, "jti": uuid.uuid4().hex,
            "scope": "openid",
        }  # fmt: skip
        return jwt.encode(claims, self._key, algorithm="RS256", headers={"kid": _KEY_ID})

    def answer(self, form: Mapping[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        """The answer to a request for a token: status and body, as RFC 6749 has them."""
        client, secret = form.get("client_id", ""), form.get("client_secret", "")
        if authorization.startswith("Basic "):
            client, _, secret = b64decode(authorization[6:]).decode().partition(":")
        if form.get("grant_type") != "client_credentials":
            return 400, {"error": "unsupported_grant_type"}
        user = self.users.get((client, secret))
        if user is None:
            return 401, {"error": "invalid_client"}
        token = {"access_token": self.token(user, client), "token_type": "Bearer"}
        return 200, {**token, "expires_in": LIFETIME_S}


def _handler(issuer: Issuer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, issuer.certificates())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            form = dict(parse_qsl(body))
            self._send(*issuer.answer(form, self.headers.get("Authorization", "")))

        def _send(self, status: int, answer: Mapping[str, Any]) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    return Handler
