"""Authenticate requests with UNICORE's passwords, tokens and security sessions."""

import base64
import secrets
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

_ANONYMOUS = "CN=ANONYMOUS,O=UNKNOWN,OU=UNKNOWN"
SESSION_HEADER = "x-unicore-securitysession"
_SESSIONS_PER_USER = 5
"""Sessions of one user at a time; another one replaces the least recently used."""


@dataclass(eq=False)
class AccessRefused(Exception):  # noqa: N818
    """The request is refused with `status` and an empty body."""

    status: int


@dataclass
class SecuritySession:
    """A security session: an id that authenticates a user until `expires`."""

    id: str
    dn: str
    expires: float

    @property
    def known(self) -> bool:
        return self.dn != _ANONYMOUS


@dataclass
class Access:
    """The single user of a site, and all sessions.

    `session_lifetime` is in seconds; `trusted` is the token of servers that act for the user.
    """

    username: str
    session_lifetime: float
    password: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    trusted: str = ""
    sessions: OrderedDict[str, SecuritySession] = field(default_factory=OrderedDict)

    @property
    def dn(self) -> str:
        return f"CN={self.username}"

    def check(self, headers: Mapping[str, str]) -> SecuritySession:
        """Return the session of a request; a new one if it names none.

        The new one is anonymous if the request has no credentials.

        Raises:
            AccessRefused: 432 for an unknown or expired session, whatever the credentials; 403 for
                wrong credentials.
        """
        wanted = headers.get(SESSION_HEADER)
        if wanted is not None:
            session = self.sessions.get(wanted)
            if session is None or session.expires < time.time():
                self.sessions.pop(wanted, None)
                raise AccessRefused(432)
            self.sessions.move_to_end(wanted)
            return session
        return self._new_session(self._authenticate(headers.get("authorization", "")))

    def _authenticate(self, header: str) -> str:
        if not header:
            return _ANONYMOUS
        kind, _, given = header.partition(" ")
        basic = base64.b64encode(f"{self.username}:{self.password}".encode()).decode()
        accepted = {"basic": (basic,), "bearer": (self.token, self.trusted)}
        for secret in accepted.get(kind.lower(), ()):
            if secret and secrets.compare_digest(given.encode(), secret.encode()):
                return self.dn
        raise AccessRefused(403)

    def _new_session(self, dn: str) -> SecuritySession:
        mine = [session.id for session in self.sessions.values() if session.dn == dn]
        for old in mine[: max(0, len(mine) - _SESSIONS_PER_USER + 1)]:
            del self.sessions[old]
        session = SecuritySession(str(uuid.uuid4()), dn, time.time() + self.session_lifetime)
        self.sessions[session.id] = session
        return session

    def expire_sessions(self) -> None:
        """Forget all sessions; a request that names one gets a 432."""
        self.sessions.clear()
