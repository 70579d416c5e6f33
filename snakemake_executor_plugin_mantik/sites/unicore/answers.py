"""Meanings of a UNICORE server's answers: HTTP statuses and error texts to `SiteError`s.

UNICORE answers nearly every failure with 500 and a text (RESTRendererBase.handleError), so some
texts have to be recognised: they are in one table, and a test checks it against answers of a real
server.
"""

import re
from typing import Final

import httpx

from snakemake_executor_plugin_mantik.common.errors import SiteError

from ..answers import (
    MALFORMED,
    Meaning,
    Pattern,
    is_from_gateway,
    is_web_page,
    make_error,
    match_pattern,
)
from ..authentication import CHECK_CREDENTIALS

SESSION_EXPIRED = 432
"""UNICORE's own status for an unknown security session; pyunicore repeats without the session."""


_ERROR_TEXTS = (
    # The TSI (UNICORE's daemon on the login node) is away: it may be back soon.
    Pattern(r"TSIUnavailableException|TSI (is )?(currently )?unavailable", Meaning.UNKNOWN),
    # A restarted server answers so to submissions, some of which it has carried out.
    Pattern(r"ResourceUnknownException", Meaning.UNKNOWN),
    # With 401, and without a text about credentials. For some seconds after its start a server
    # knows no system to run jobs on; for users who may not use any, this never ends.
    Pattern(
        r"no accessible targetsystem factories",
        Meaning.RETRY,
        "A server that has just started reports this for a while; if it goes on, ask the site "
        "whether your account may submit jobs",
    ),
    # container.services.maxInstancesPerUser: no instance was made.
    Pattern(r"Limit of <?\d+>? instances", Meaning.RETRY),
    Pattern(r"submission is (currently )?disabled|submission disabled", Meaning.RETRY),
    # Schedulers forget a job some minutes after its end.
    Pattern(r"Invalid job id specified|Unknown Job Id", Meaning.NOT_FOUND),
    Pattern(r"No space left|Disk quota exceeded", Meaning.REJECTED, "Free space at the site"),
    Pattern(r"file exists|Is a directory|is not a directory|Not a directory", Meaning.REJECTED),
    Pattern(
        r"Permission denied|Operation not permitted|Read-only file system|Access denied",
        Meaning.REJECTED,
        "Check the permissions of your account at the site",
    ),
    Pattern(r"JSONException", Meaning.REJECTED),
    Pattern(r"Illegal permissions string|URISyntaxException", Meaning.REJECTED),
)
"""Texts of `errorMessage`; the first match counts."""

_ECHO: Final = re.compile(r"Command '.*' failed with code (?P<code>\d+): ", re.DOTALL)
"""A TSI's prefix of the output of a failed command: the whole script, with colons for newlines."""
_REPORTED: Final = re.compile(r"[:\s]*\(Command execution on TSI reported an error\)\s*$")
_BY_STATUS = {
    401: Meaning.CREDENTIALS,
    403: Meaning.CREDENTIALS,
    404: Meaning.NOT_FOUND,
    407: Meaning.UNKNOWN,
    408: Meaning.UNKNOWN,
    410: Meaning.NOT_FOUND,
    423: Meaning.RETRY,
    425: Meaning.RETRY,
    429: Meaning.RETRY,
    501: Meaning.REJECTED,
    505: Meaning.REJECTED,
}


def unicore_error(response: httpx.Response, site: str) -> SiteError | None:
    """Return the error in a `response`, which is fully read unless it is a success.

    None for a success, and for an expired session, which pyunicore handles. An answer that is not
    the server's own (a web page of a proxy or a login portal) proves nothing, whatever its status.
    """
    if response.status_code == SESSION_EXPIRED:
        return None
    if is_web_page(response):
        return make_error(
            Meaning.UNKNOWN,
            response,
            site,
            "a web page instead of an answer from UNICORE",
            "Check UnicoreApiUrl and the network (proxy, VPN, a login page)",
        )
    if response.status_code < 300:
        return None
    if response.status_code < 400:
        # The query may hold a secret of a login.
        target = response.headers.get("Location", "elsewhere").partition("?")[0]
        return make_error(
            Meaning.UNKNOWN, response, site, f"a redirect to {target}", "Check UnicoreApiUrl"
        )
    text = _text_of(response)
    meaning, do = _meaning(response, text)
    return make_error(meaning, response, site, text, do)


def _meaning(response: httpx.Response, text: str) -> tuple[Meaning, str]:
    status = response.status_code
    meaning = _BY_STATUS.get(status, Meaning.UNKNOWN if status >= 500 else Meaning.REJECTED)
    if is_from_gateway(response):
        # For example "No service was found." while a server starts.
        passes = meaning in (Meaning.RETRY, Meaning.CREDENTIALS)
        return (meaning if passes else Meaning.UNKNOWN), ""
    if status >= 400 and (pattern := match_pattern(_ERROR_TEXTS, text)) is not None:
        return pattern.meaning, pattern.do
    if status == 503:
        own = _is_json(response) or "Retry-After" in response.headers
        return (Meaning.RETRY if own else Meaning.UNKNOWN), ""
    return meaning, CHECK_CREDENTIALS if meaning is Meaning.CREDENTIALS else ""


def _is_json(response: httpx.Response) -> bool:
    return "json" in response.headers.get("Content-Type", "")


def root_cause(text: str) -> str:
    """Return a server's text on one line, without the script that a TSI repeats in it.

    The script may be as long as a job's; the cause comes after it.
    """
    text = _ECHO.sub(r"command failed with code \g<code>: ", text)
    return " ".join(_REPORTED.sub("", text).split())


def _text_of(response: httpx.Response) -> str:
    text = response.text
    if _is_json(response):
        try:
            answer = response.json()
        except MALFORMED:
            answer = None
        if isinstance(answer, dict):
            text = str(answer.get("errorMessage", text))
    return root_cause(text)
