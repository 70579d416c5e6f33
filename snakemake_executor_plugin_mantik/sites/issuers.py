"""Access tokens from an OpenID Connect issuer, obtained with other credentials and renewed."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from snakemake_executor_plugin_mantik.common.errors import (
    CredentialError,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.config.addresses import is_confidential, is_loopback
from snakemake_executor_plugin_mantik.sites.addresses import explain_tls_error, tls_context
from snakemake_executor_plugin_mantik.sites.authentication import (
    RENEW_BEFORE_S,
    Credential,
    Moment,
    check_header_value,
)
from snakemake_executor_plugin_mantik.sites.http import post_form

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
    refusal = "the credentials were refused"
    remedy = "Check the credentials"

    def __init__(
        self,
        token_url: str,
        form: Mapping[str, str],
        *,
        client: Callable[[], httpx.Client] | None = None,
    ) -> None:
        """Prepare; `renew` makes the first request, with the fields of `form`.

        Raises:
            CredentialError: `token_url` would get the credentials unencrypted.
        """
        if not is_confidential(token_url):
            raise CredentialError(
                "the token URL is not an https:// address: credentials would be sent unencrypted",
                where="TOKEN_URL",
                do="Use the full URL, starting with https://",
            )
        self._url = token_url
        self._form = dict(form)
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
        try:
            with self._client() as client:
                response = post_form(client, self._url, form, TOKEN_TIMEOUT_S)
            answer = response.json()
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            # Not chained: the request in the HTTP error holds the secrets.
            why, do = explain_tls_error(error)
            raise SiteUnreachable(
                f"no access token from the issuer: {why or type(error).__name__}",
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
                f"no access token from the issuer: status {response.status_code}", where=self._url
            )
        return answer


class Refreshed(_Issued):
    """An OpenID Connect refresh token that access tokens are obtained with.

    Issuers may give a new refresh token each time; this process uses the newest from then on.
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


class ClientCredentials(_Issued):
    """A client with its own secret (a robot account): OAuth 2.0's client credentials grant."""

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
