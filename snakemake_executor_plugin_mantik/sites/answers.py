"""What error answers of any API mean: one of five things, whatever the status says.

Each API has its own tables of texts and statuses; what becomes of a meaning is the same for all.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Final

import httpx

from snakemake_executor_plugin_mantik.common.errors import (
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
)

MALFORMED: Final = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""What taking an answer apart raises where it is not what it should be: JSON may hold anything."""

LONGEST_TEXT: Final = 400
"""Characters of a server's text that go into an error."""


class Meaning(Enum):
    """What an error answer says about the act."""

    UNKNOWN = SiteUnreachable
    RETRY = SiteBusy
    CREDENTIALS = SiteUnauthorized
    NOT_FOUND = SiteNotFound
    REJECTED = SiteRejected


@dataclass(frozen=True)
class Pattern:
    """A text in an error answer, and its meaning.

    Attributes:
        text: regular expression, searched for without regard to case.
        meaning: what it says.
        do: what the user may do.
    """

    text: str
    meaning: Meaning
    do: str = ""


def match_pattern(patterns: Iterable[Pattern], text: str) -> Pattern | None:
    """The first of the patterns that fits an error's text."""
    return next((p for p in patterns if re.search(p.text, text, re.IGNORECASE)), None)


def make_error(
    meaning: Meaning, response: httpx.Response, site: str, text: str, do: str = ""
) -> SiteError:
    """The error for an answer that means `meaning`.

    Args:
        meaning: what it says about the act.
        response: the answer, fully read.
        site: the site's name.
        text: the server's own words; shortened here, so that all of them can be classified before.
        do: what the user may do.
    """
    request = response.request
    text = shorten(text)
    what = f"{request.method} {request.url.path} was answered with {response.status_code}"
    what = f"{what}: {text}" if text else what
    where = f"site {site}"
    status = response.status_code
    if meaning is Meaning.RETRY:
        wait = retry_after(response.headers.get("Retry-After"), server_time(response))
        return SiteBusy(what, where=where, do=do, status=status, retry_after=wait)
    kind: type[SiteError] = meaning.value
    return kind(what, where=where, do=do, status=status)


def shorten(text: str, longest: int = LONGEST_TEXT) -> str:
    """A server's text with its middle left out if it is longer than `longest` characters.

    It begins with what was to be done and ends with the cause.
    """
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} … {text[-half:]}"


def retry_after(header: str | None, now: float | None = None) -> float | None:
    """The seconds that a Retry-After header asks to wait; None if it asks for nothing.

    A date is compared with the server's own clock, which shows `now`: ours may be off.
    """
    if header is None:
        return None
    if re.fullmatch(r"\d{1,9}", header.strip()):
        return float(header)
    until = _date(header)
    return None if until is None or now is None else max(0.0, until - now)


def server_time(response: httpx.Response) -> float | None:
    """What the server's clock showed, seconds since the epoch; None if it does not tell."""
    return _date(response.headers.get("Date", ""))


def _date(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None


_DEFINITE: Final = frozenset({413, 414, 431})
"""Statuses that say of the request itself that it is too large, whoever answers."""


def is_from_gateway(response: httpx.Response) -> bool:
    """Whether a 4xx is the word of something in between, which knows no file and no job.

    The servers' own errors are JSON.
    """
    own = "json" in response.headers.get("Content-Type", "")
    status = response.status_code
    return 400 <= status < 500 and status not in _DEFINITE and bool(response.content) and not own


def is_web_page(response: httpx.Response) -> bool:
    """Whether the body is HTML; downloads have another content type, whatever is in the file."""
    return str(response.headers.get("Content-Type", "")).startswith("text/html")
