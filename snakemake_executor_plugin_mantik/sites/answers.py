"""Meanings of error answers, common to all APIs: one of five, whatever the status is.

Each API has its own tables of texts and statuses; the error for a meaning is the same for all.
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
"""Errors raised when parsing an answer of unexpected structure: JSON may hold anything."""

LONGEST_TEXT: Final = 400
"""Characters of a server's text that go into an error."""


class Meaning(Enum):
    """What an error answer means for the request; the value is the error to raise."""

    UNKNOWN = SiteUnreachable
    RETRY = SiteBusy
    CREDENTIALS = SiteUnauthorized
    NOT_FOUND = SiteNotFound
    REJECTED = SiteRejected


@dataclass(frozen=True)
class Pattern:
    """A case-insensitive regular expression for texts of error answers, with meaning and advice."""

    text: str
    meaning: Meaning
    do: str = ""


def match_pattern(patterns: Iterable[Pattern], text: str) -> Pattern | None:
    """Return the first pattern that matches an error's text."""
    return next((p for p in patterns if re.search(p.text, text, re.IGNORECASE)), None)


def make_error(
    meaning: Meaning, response: httpx.Response, site: str, text: str, do: str = ""
) -> SiteError:
    """Make the error for an answer that means `meaning`; `do` is advice for the user.

    `response` is fully read. `text` is the server's text, which is shortened here, so that callers
    can classify all of it first.
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
    """Cut the middle out of a server's text that is longer than `longest` characters.

    Such texts begin with the action and end with the cause.
    """
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} … {text[-half:]}"


def retry_after(header: str | None, now: float | None = None) -> float | None:
    """Return the seconds to wait according to a Retry-After header; None if it names no time.

    A date is compared with `now`, the server's own clock, because ours may be off; without `now` it
    counts as no time.
    """
    if header is None:
        return None
    if re.fullmatch(r"\d{1,9}", header.strip()):
        return float(header)
    until = _date(header)
    return None if until is None or now is None else max(0.0, until - now)


def server_time(response: httpx.Response) -> float | None:
    """Return the server's clock, seconds since the epoch; None if the answer has no valid Date."""
    return _date(response.headers.get("Date", ""))


def _date(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None


_DEFINITE: Final = frozenset({413, 414, 431})
"""Statuses that call the request itself too large, whoever answers."""


def is_from_gateway(response: httpx.Response) -> bool:
    """Check whether an answer is a 4xx of a gateway, which knows no files and no jobs.

    The servers' own errors are JSON.
    """
    own = "json" in response.headers.get("Content-Type", "")
    status = response.status_code
    return 400 <= status < 500 and status not in _DEFINITE and bool(response.content) and not own


def is_web_page(response: httpx.Response) -> bool:
    """Check whether the body is HTML; downloads always have another content type."""
    return str(response.headers.get("Content-Type", "")).startswith("text/html")
