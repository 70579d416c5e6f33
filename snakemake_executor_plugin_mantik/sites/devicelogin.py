"""Login in a browser: OAuth's device authorization grant (RFC 8628)."""

import sys
import time
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Final

import httpx

from snakemake_executor_plugin_mantik.common.errors import (
    CredentialError,
    SiteUnreachable,
    printable,
)
from snakemake_executor_plugin_mantik.config.addresses import is_confidential
from snakemake_executor_plugin_mantik.sites.addresses import explain_tls_error
from snakemake_executor_plugin_mantik.sites.http import post_form
from snakemake_executor_plugin_mantik.sites.issuers import (
    TOKEN_TIMEOUT_S,
    Refreshed,
    valid_lifetime,
)

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
        super().__init__(token_url, client_id, "", client_secret, client=client)
        if not is_confidential(device_url):
            raise CredentialError(
                "the device URL is not an https:// address: credentials would be sent unencrypted",
                where="DEVICE_URL",
                do="Use the full URL, starting with https://",
            )
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
        begun = self._post(self._device_url, {**who, "scope": "openid offline_access"})
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
            answer = self._post(self._url, form)
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

    def _post(self, url: str, form: Mapping[str, str]) -> dict[str, Any]:
        """Post a form to the issuer; return its answer, also that of a refusal (400)."""
        try:
            with self._client() as client:
                response = post_form(client, url, form, TOKEN_TIMEOUT_S)
            answer = response.json()
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            # Not chained: the request in the HTTP error holds the secrets.
            why, do = explain_tls_error(error)
            what = f"no answer from the issuer of tokens: {why or type(error).__name__}"
            do = do or "Check the URLs and the network"
            raise SiteUnreachable(what, where=url, do=do) from None
        if not isinstance(answer, dict) or (not response.is_success and "error" not in answer):
            what = f"the issuer of tokens answered with status {response.status_code}"
            raise SiteUnreachable(what, where=url)
        return answer

    def _keep(self, answer: Mapping[str, Any]) -> None:
        super()._keep(answer)
        if answer.get("refresh_token"):
            self._keep_token(self._form["refresh_token"])
