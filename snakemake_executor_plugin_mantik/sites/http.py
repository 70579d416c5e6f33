"""Answers of bounded size, certificates of servers, and meanings of error answers.

HTTPX reads and unpacks an answer to its end, however long it is. A broken or hostile server must
not fill the memory of the machine that watches jobs. The callers bound how long a site's answer may
take (`rest.py`).
"""

import json
import logging
import re
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Final

import certifi
import httpx

from ..common.errors import (
    SiteBusy,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
    UserError,
)

ANSWER_BYTES: Final = 64 << 20
"""Maximum size of an answer, unpacked. Outputs are streamed and have no limit here.

UNICORE's largest is a listing of 10,000 entries (2 MB), firecREST's a file of the largest size that
is transferred directly (`firecrest._DIRECT_BYTES`)."""
_ENCODINGS: Final = frozenset(("", "identity", "gzip", "x-gzip", "deflate"))
"""Each of these expands its input a thousandfold at most; two combined have no such limit."""
_NO_LONGER: Final = frozenset(("content-encoding", "content-length", "transfer-encoding"))
"""Headers that are no longer true of a body that was read and unpacked."""

# They log URLs, which give access to files of an object store, and headers of answers, in which
# firecREST repeats tokens that it refuses.
for _name in ("httpx", "httpcore"):
    logging.getLogger(_name).setLevel(logging.WARNING)


class _Answer(httpx.Response):
    """An answer whose JSON strings hold only valid text."""

    def json(self, **named: Any) -> Any:
        """Like `httpx.Response.json`.

        Raises:
            ValueError: it is not JSON, or escapes in it make lone surrogates, which no URL and no
                file can hold.
        """
        value = super().json(**named)
        if b"\\ud" in self.content.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value


def _check(response: httpx.Response, content: bytes | bytearray = b"") -> None:
    """Check an answer's encoding, and the size of what has come of its content."""
    coding, wrong = response.headers.get("Content-Encoding", "").strip().lower(), ""
    if coding not in _ENCODINGS:
        wrong = f"the answer has an unknown Content-Encoding ({coding[:40]})"
    elif len(content) > ANSWER_BYTES:
        wrong = f"the answer is longer than {ANSWER_BYTES >> 20} MiB"
    if wrong:
        raise httpx.RemoteProtocolError(wrong, request=response.request)


def _whole(response: httpx.Response, content: bytearray) -> httpx.Response:
    headers = [(k, v) for k, v in response.headers.raw if k.decode().lower() not in _NO_LONGER]
    return _Answer(
        response.status_code,
        headers=headers,
        content=bytes(content),
        request=response.request,
        extensions=response.extensions,
    )


async def read_answer(response: httpx.Response) -> httpx.Response:
    """Return a streamed answer with its body, and close the stream.

    Raises:
        httpx.RemoteProtocolError: the answer is too long or has an unknown encoding.
    """
    _check(response)
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        _check(response, content)
    await response.aclose()
    return _whole(response, content)


def post_form(
    client: httpx.Client, url: str, form: Mapping[str, str], timeout_s: float
) -> httpx.Response:
    """Post a form to a token issuer and return its answer, whose body may take `timeout_s`.

    Raises:
        httpx.HTTPError: there is no answer, or it is too long, has an unknown encoding or does
            not end in time.
    """
    with client.stream("POST", url, data=dict(form)) as response:
        _check(response)
        content, until = bytearray(), time.monotonic() + timeout_s
        for part in response.iter_bytes():
            content += part
            _check(response, content)
            if time.monotonic() > until:
                raise httpx.ReadTimeout("the answer did not end in time")
        return _whole(response, content)


_UNVERIFIED: Final = re.compile(
    r"CERTIFICATE_VERIFY_FAILED(?:\] certificate verify failed:?)? ?(.*)"
)
"""OpenSSL's message about a certificate, between other words."""


def explain_tls_error(error: Exception) -> tuple[str, str]:
    """Return why a server's certificate was rejected, and advice; empty for other errors.

    The text holds nothing of the request.
    """
    found = _UNVERIFIED.search(" ".join(str(error).split()))
    if found is None:
        return "", ""
    why = re.sub(r" ?\(_ssl\.c:\d+\)\.?", "", found[1]).strip(" .") or "verification failed"
    if "expired" in why or "not yet valid" in why:
        do = "Check the clock of this machine; if it is right, report this to the site"
    elif "mismatch" in why or "not valid for" in why:
        do = "Check the URL: the certificate names another host"
    else:
        do = "Set CAFile to the certificate of the site's certificate authority"
    return f"the server's certificate was rejected: {why}", do


def tls_context(ca_file: Path | None, site: str) -> ssl.SSLContext:
    """Make a TLS context that trusts the system's and certifi's certificates, and `ca_file`.

    Raises:
        UserError: `ca_file` cannot be used.
    """
    if ca_file is None:
        return _public_context()
    context = _make_context()
    try:
        context.load_verify_locations(ca_file)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"cannot load {ca_file}: {error}",
            where=f"site {site}, CAFile",
            do="Set CAFile to a file with certificates in PEM format",
        ) from error
    return context


def _make_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


_public_context = cache(_make_context)
"""All clients share it: reading 300 certificates takes longer than all else that opens a site."""

MALFORMED: Final = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""Errors raised when parsing an answer of unexpected structure: JSON may hold anything."""

CHECK_CREDENTIALS: Final = (
    "Check the credentials of this site; they are read from the environment or the keyring"
)
"""Advice for a refusal without a known cause."""

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


OF_FILES: Final = (
    Pattern(r"No space left|Disk quota exceeded", Meaning.REJECTED, "Free space at the site"),
    Pattern(r"File exists|Is a directory|Not a directory", Meaning.REJECTED),
    Pattern(
        r"Permission denied|Operation not permitted|Read-only file system|Access denied",
        Meaning.REJECTED,
        "Check the permissions of your account at the site",
    ),
)
"""Texts of commands that deal with files."""


_BY_STATUS: Final = {
    401: Meaning.CREDENTIALS,
    403: Meaning.CREDENTIALS,
    404: Meaning.NOT_FOUND,
    407: Meaning.UNKNOWN,
    408: Meaning.UNKNOWN,
    410: Meaning.NOT_FOUND,
    423: Meaning.RETRY,
    424: Meaning.RETRY,
    425: Meaning.RETRY,
    429: Meaning.RETRY,
    432: Meaning.UNKNOWN,  # UNICORE: the security session is unknown, though none was named
    501: Meaning.REJECTED,
    505: Meaning.REJECTED,
}
"""Meanings of statuses; other 4xx are refusals, other 5xx leave the outcome unknown."""


def judge(
    response: httpx.Response, text: str, patterns: Iterable[Pattern], *, foreign: bool
) -> tuple[Meaning, str]:
    """Return what an error answer means, and advice.

    `text` is the server's; the first of the `patterns` that matches it counts. With `foreign` the
    answer is that of a gateway, which knows no files and no jobs: for example "No service was
    found." while a server starts.
    """
    status = response.status_code
    meaning = _BY_STATUS.get(status, Meaning.UNKNOWN if status >= 500 else Meaning.REJECTED)
    if status == 503:
        own = is_json(response) or "Retry-After" in response.headers
        meaning = Meaning.RETRY if own else Meaning.UNKNOWN
    if foreign:
        if meaning not in (Meaning.RETRY, Meaning.CREDENTIALS):
            meaning = Meaning.UNKNOWN
    else:
        for pattern in patterns:
            if re.search(pattern.text, text, re.IGNORECASE):
                return pattern.meaning, pattern.do
    return meaning, CHECK_CREDENTIALS if meaning is Meaning.CREDENTIALS else ""


def shorten(text: str, longest: int = LONGEST_TEXT) -> str:
    """Cut the middle out of a server's text that is longer than `longest` characters.

    Such texts begin with the action and end with the cause.
    """
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} … {text[-half:]}"


def retry_after(header: str | None, now: float | None) -> float | None:
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
    """Check whether an answer is a 4xx of a gateway; the servers' own errors are JSON."""
    status, own = response.status_code, is_json(response)
    return 400 <= status < 500 and status not in _DEFINITE and bool(response.content) and not own


def is_json(response: httpx.Response) -> bool:
    """Check whether the body is JSON, by the answer's own word."""
    return "json" in response.headers.get("Content-Type", "")


def body_of(response: httpx.Response) -> dict[str, Any] | None:
    """Return the JSON object in an answer; None if there is none."""
    try:
        answer = response.json()
    except MALFORMED:
        return None
    return answer if isinstance(answer, dict) else None
