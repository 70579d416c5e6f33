"""Access tokens from an OpenID Connect issuer: by other credentials or a confirmed device."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from snakemake_executor_plugin_mantik.common.errors import (
    CredentialError,
    SiteUnauthorized,
    SiteUnreachable,
    printable,
)
from snakemake_executor_plugin_mantik.config.values import is_confidential, is_loopback

from .authentication import RENEW_BEFORE_S, Credential, Moment, check_header_value
from .http import explain_tls_error, post_form, tls_context

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


def issuer_error(error: CredentialError) -> SiteUnauthorized:
    """Turn an issuer's refusal of credentials into an error of the site.

    A `SiteUnauthorized` ends a run at its start but does not end running jobs: the run waits until
    the issuer accepts the credentials or the user replaces them.
    """
    return SiteUnauthorized(error.what, where=error.where, do=error.do)


@dataclass(frozen=True)
class Issuer:
    """The issuer of a site's access tokens and the way to reach it, from the site's config.

    `url` is the token endpoint, if the config names it. `ca_file` has additional certificates to
    verify the issuer's.
    """

    url: str | None = None
    ca_file: Path | None = None
    proxy: str | None = None

    def client(self, url: str) -> httpx.Client:
        """Make a client for one request to `url`, the endpoint that is finally used.

        Raises:
            UserError: `ca_file` cannot be used.
        """
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
        client: Callable[[], httpx.Client] | None = None,
    ) -> None:
        """Prepare; `renew` makes the first request, each with a new `client`.

        Raises:
            CredentialError: `token_url` would get the credentials unencrypted.
        """
        _check_url(token_url, "token URL", "TOKEN_URL")
        self._url = token_url
        form = {
            "grant_type": self.grant,
            "client_id": client_id,
            "client_secret": client_secret,
            "refresh_token": refresh_token,
        }
        self._form = {name: value for name, value in form.items() if value is not None}
        self._client = client or (lambda: Issuer().client(token_url))
        self._token = ""
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

    def get_auth_header(self) -> str:
        return f"Bearer {self._token}"

    def refused(self, headers: Mapping[str, str]) -> bool:
        """Let `renew` replace a token that was refused before its time: the clocks may differ."""
        if headers.get("Authorization") == self.get_auth_header():
            self.expire()
        return True

    def expire(self) -> None:
        """Let `renew` get a new token before the next request."""
        self._renew_at = Moment()

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
        self._renew_at.set(asked or Moment.now(), seconds - _left(seconds))

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
        if status != httpx.codes.OK:
            raise self._no_token(f"status {status}", self._url)
        return answer

    def _post(self, url: str, form: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
        """Post a form to the issuer; return the status and the JSON object that it answers."""
        try:
            with self._client() as client:
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
        client: Callable[[], httpx.Client],
        terminal: Callable[[], bool] = sys.stderr.isatty,
    ) -> None:
        """Prepare; `login` makes the first request.

        `device_url` is the issuer's device authorization endpoint. `client_id` names a client that
        may use this grant. `terminal` returns whether a user is there to log in.

        Raises:
            CredentialError: a URL would get credentials unencrypted.
        """
        super().__init__(token_url, client_id, client_secret, refresh_token="", client=client)
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
        newer.expire()
        return newer

    def login(self) -> None:
        """Get a token with the refresh token of an earlier login, or ask the user to log in.

        Raises:
            CredentialError: there is no terminal, or the login was denied or took too long.
            SiteUnreachable: the issuer does not answer.
        """
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
                f"the issuer's answer has no {error}",
                where=self._device_url,
                do="Check DEVICE_URL",
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
        if not httpx.codes.is_success(status) and "error" not in answer:
            raise self._no_token(f"status {status}", url)
        return answer

    def _keep(self, answer: Mapping[str, Any]) -> None:
        super()._keep(answer)
        if answer.get("refresh_token"):
            self._keep_token(self._form["refresh_token"])
