"""What a UNICORE server's answers mean: HTTP statuses and error texts to `SiteError`s.

UNICORE answers nearly every failure with 500 and a text (RESTRendererBase.handleError), so some
texts have to be told apart: they stand in one table, and a test holds answers of a real server
against it.
"""

import re
from typing import Final

import httpx

from snakemake_executor_plugin_mantik.common.errors import SiteError
from snakemake_executor_plugin_mantik.sites.answers import (
    MALFORMED,
    Meaning,
    Pattern,
    is_from_gateway,
    is_web_page,
    make_error,
    match_pattern,
)
from snakemake_executor_plugin_mantik.sites.authentication import CHECK_CREDENTIALS

SESSION_EXPIRED = 432
"""UNICORE's own status: the security session is unknown; pyunicore repeats without it."""


_ERROR_TEXTS = (
    # Texts of a server whose TSI (its arm on the login node) is away: it may be back soon.
    Pattern(r"TSIUnavailableException|TSI (is )?(currently )?unavailable", Meaning.UNKNOWN),
    # A server that was just restarted answers so to submissions some of which it has carried out.
    Pattern(r"ResourceUnknownException", Meaning.UNKNOWN),
    # With 401, and no word about credentials: a server that has just started knows for some seconds
    # of no system to run jobs on, and one never does for users who may not use any.
    Pattern(
        r"no accessible targetsystem factories",
        Meaning.RETRY,
        "A server that has just started says so for a while; if it goes on, ask the site whether "
        "your account may submit jobs",
    ),
    # container.services.maxInstancesPerUser: nothing was made.
    Pattern(r"Limit of <?\d+>? instances", Meaning.RETRY),
    Pattern(r"submission is (currently )?disabled|submission disabled", Meaning.RETRY),
    # Schedulers forget a job some minutes after its end.
    Pattern(r"Invalid job id specified|Unknown Job Id", Meaning.NOT_FOUND),
    Pattern(r"No space left|Disk quota exceeded", Meaning.REJECTED, "Make room at the site"),
    Pattern(r"file exists|Is a directory|is not a directory|Not a directory", Meaning.REJECTED),
    Pattern(
        r"Permission denied|Operation not permitted|Read-only file system|Access denied",
        Meaning.REJECTED,
        "Check the permissions of your account at the site",
    ),
    Pattern(r"JSONException", Meaning.REJECTED),
    Pattern(r"Illegal permissions string|URISyntaxException", Meaning.REJECTED),
)
"""Texts of `errorMessage`; the first that fits counts."""

_ECHO: Final = re.compile(r"Command '.*' failed with code (?P<code>\d+): ", re.DOTALL)
"""What a TSI puts before the output of a command that failed: the whole script that it ran, with
colons for ends of lines."""
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
    """The error that the fully read `response` stands for, None if it is none.

    An answer that is not the server's own (a web page, of a proxy or a login portal) proves
    nothing, whatever its status. A session that expired is left to pyunicore.
    """
    if response.status_code == SESSION_EXPIRED:
        return None
    if is_web_page(response):
        return make_error(
            Meaning.UNKNOWN,
            response,
            site,
            "a web page instead of an answer of UNICORE",
            "Check UnicoreApiUrl and the network (proxy, VPN, a login page)",
        )
    if response.status_code < 300:
        return None
    if response.status_code < 400:
        # What is behind the question mark may be a secret of a login.
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
        # "No service was found." while a server starts, for example.
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
    """A text of the server's on one line, without the script that a TSI repeats in it.

    The script may be as long as a job's; what went wrong stands behind it.
    """
    text = _ECHO.sub(r"command failed with code \g<code>: ", text)
    return " ".join(_REPORTED.sub("", text).split())


def _text_of(response: httpx.Response) -> str:
    """The server's own words, as long as they are."""
    text = response.text
    if _is_json(response):
        try:
            answer = response.json()
        except MALFORMED:
            answer = None
        if isinstance(answer, dict):
            text = str(answer.get("errorMessage", text))
    return root_cause(text)
