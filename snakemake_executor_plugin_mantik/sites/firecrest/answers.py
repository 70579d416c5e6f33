"""Meanings of firecREST's answers and pyfirecrest's exceptions: all of them to `SiteError`s.

firecREST runs commands over ssh and answers with their output, mostly as 500, so some texts have to
be recognised: they are in one table, and a test checks it against answers of a real server.
"""

from collections.abc import Callable
from typing import Any, Final

import httpx
import requests
from firecrest.FirecrestException import (
    FirecrestException,
    JobTimeoutException,
    MultipartUploadException,
    NotImplementedOnAPIversion,
    TransferJobFailedException,
)

from snakemake_executor_plugin_mantik.common.errors import (
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnreachable,
)

from ..addresses import explain_tls_error
from ..answers import (
    LONGEST_TEXT,
    MALFORMED,
    Meaning,
    Pattern,
    is_from_gateway,
    is_web_page,
    make_error,
    match_pattern,
)
from ..authentication import CHECK_CREDENTIALS
from ..slurm import TOO_MANY_JOBS

COMMAND_TIMEOUT: Final = 408
"""A command at the site took longer than the server's time-out (5 s by default)."""
TOO_LARGE: Final = frozenset((413, COMMAND_TIMEOUT, 500))
"""Statuses of a download that is larger than the server's `max_ops_file_size`: the server stops
reading at its limit and waits for the command, which waits for the rest to be read."""

_ERROR_TEXTS: Final = (
    # A command with input (submission, upload) took longer than 5 s: it may go on.
    Pattern(r"Channel not open for sending", Meaning.UNKNOWN),
    # MaxSessions of the login node's sshd: the user's other clients count as well.
    Pattern(r"Unable to open a new SSH channel", Meaning.RETRY),
    Pattern(r"is unhealthy", Meaning.RETRY),
    Pattern(
        r"No SSH credentials found",
        Meaning.CREDENTIALS,
        "Ask the site to enable firecREST for your account",
    ),
    # scancel and qdel of jobs that are over.
    Pattern(
        r"already completing or completed|Invalid job id specified|Unknown Job.?Id|"
        r"Job has finished",
        Meaning.NOT_FOUND,
    ),
    Pattern(TOO_MANY_JOBS.pattern, Meaning.RETRY),
    Pattern(
        r"accounting/QOS policy limit exceeded|\b(QOS|Assoc)(Max|Min|Grp)\w*Limit",
        Meaning.REJECTED,
        "Request less, or use another account, queue or QoS",
    ),
    # The scheduler does not answer: a submission may have reached it.
    Pattern(
        r"Socket timed out|Unable to contact slurm controller|temporarily unable to accept|"
        r"Resource temporarily unavailable|Communication failure|cannot connect to server",
        Meaning.UNKNOWN,
    ),
    Pattern(r"sbatch: (error|fatal)|\bqsub: ", Meaning.REJECTED, "Check the job's resources"),
    Pattern(r"No space left|Disk quota exceeded", Meaning.REJECTED, "Free space at the site"),
    Pattern(r"File exists|Is a directory|Not a directory", Meaning.REJECTED),
    Pattern(r"No such file or directory|Job not found", Meaning.NOT_FOUND),
    Pattern(
        r"Permission denied|Operation not permitted|Read-only file system",
        Meaning.REJECTED,
        "Check the permissions of your account at the site",
    ),
    Pattern(r"System not found", Meaning.REJECTED, "Check Machine in the backend config"),
    Pattern(
        r"Account parameter is required",
        Meaning.REJECTED,
        "Set MANTIK_COMPUTE_BUDGET_ACCOUNT: large files go through jobs at this site",
    ),
)
"""Texts of `message` and `causedBy`; the first match counts."""

_BY_STATUS: Final = {
    401: Meaning.CREDENTIALS,
    403: Meaning.CREDENTIALS,
    404: Meaning.NOT_FOUND,
    407: Meaning.UNKNOWN,
    COMMAND_TIMEOUT: Meaning.UNKNOWN,
    424: Meaning.RETRY,
    425: Meaning.RETRY,
    429: Meaning.RETRY,
    501: Meaning.REJECTED,
    503: Meaning.RETRY,
}


def firecrest_error(error: Exception, site: str) -> SiteError | None:
    """Return the site error for an exception of a request; None for other exceptions."""
    where = f"site {site}"
    if isinstance(error, FirecrestException):
        return error_of_answer(error.responses[-1], site)
    if isinstance(error, TimeoutError):
        return SiteUnreachable("no answer in time", where=where, do="Check the network")
    if isinstance(error, FileNotFoundError):
        return SiteNotFound(str(error), where=where)  # pyfirecrest's download()
    if isinstance(error, httpx.HTTPError | httpx.InvalidURL | requests.RequestException):
        return _no_answer(error, where)
    for kinds, make in _OF_PYFIRECREST:
        if isinstance(error, kinds):
            return make(site)
    return None


_OF_PYFIRECREST: Final[
    tuple[tuple[tuple[type[Exception], ...], Callable[[str], SiteError]], ...]
] = (
    (
        (TransferJobFailedException, JobTimeoutException),
        lambda site: SiteUnreachable("a transfer job of firecREST failed", where=f"site {site}"),
    ),
    (
        (MultipartUploadException,),  # its text holds URLs that give access to the file
        lambda site: SiteUnreachable(
            "the site's object store did not accept a file", where=f"site {site}"
        ),
    ),
    (
        (NotImplementedOnAPIversion,),
        lambda site: SiteRejected("the site's firecREST is too old for this", where=f"site {site}"),
    ),
    # pyfirecrest parses an answer without checking it; JSON errors are ValueErrors.
    (MALFORMED, lambda site: malformed_answer("a request", site)),
)


def malformed_answer(path: str, site: str) -> SiteUnreachable:
    """Make the error for an answer that cannot come from firecREST v2."""
    return SiteUnreachable(
        f"the answer to {path} is not a valid answer from firecREST v2",
        where=f"site {site}",
        do="Check ApiUrl and the network (proxy, VPN, a login page)",
    )


def _no_answer(error: Exception, where: str) -> SiteUnreachable:
    reason = " ".join(str(error).split()) or type(error).__name__
    do = explain_tls_error(error)[1] or "Check ApiUrl and the network"
    request = getattr(error, "_request", None)  # httpx raises where there is none
    path = f" to {request.method} {request.url.path}" if isinstance(request, httpx.Request) else ""
    return SiteUnreachable(f"no answer{path}: {reason}", where=where, do=do)


def error_of_answer(response: httpx.Response, site: str) -> SiteError:
    """Return the error for a `response` that was not expected.

    An answer that is not the server's own (a web page of a proxy or a login portal) proves nothing,
    whatever its status.
    """
    status = response.status_code
    if is_web_page(response):
        return make_error(
            Meaning.UNKNOWN,
            response,
            site,
            "a web page instead of an answer from firecREST",
            "Check ApiUrl and the network (proxy, VPN, a login page)",
        )
    if status < 400:
        return make_error(
            Meaning.UNKNOWN, response, site, "not an answer from firecREST v2", "Check ApiUrl"
        )
    body = answer_body(response)
    text = _text_of(response, body)
    gateways = is_from_gateway(response)
    if not gateways and (pattern := match_pattern(_ERROR_TEXTS, text)) is not None:
        return make_error(pattern.meaning, response, site, text, pattern.do)
    meaning = _BY_STATUS.get(status, Meaning.UNKNOWN if status >= 500 else Meaning.REJECTED)
    if gateways and meaning is Meaning.REJECTED:
        meaning = Meaning.UNKNOWN
    if meaning is Meaning.NOT_FOUND and "errorType" not in body:
        meaning = Meaning.UNKNOWN  # from a gateway: it proves nothing about the file or the job
    do = CHECK_CREDENTIALS if meaning is Meaning.CREDENTIALS else ""
    return make_error(meaning, response, site, text, do)


def answer_body(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object in `response`; empty if there is none."""
    try:
        answer = response.json()
    except MALFORMED:
        return {}
    return answer if isinstance(answer, dict) else {}


def closes_connection(response: httpx.Response) -> bool:
    """Check whether the server closes the connection after this answer (measured).

    After an error that it did not handle itself (its own 500 names no user), uvicorn drops the
    connection a little later: the next request on it is reset.
    """
    return response.status_code == 500 and answer_body(response).get("user") is None


def _text_of(response: httpx.Response, body: dict[str, Any]) -> str:
    """Return the server's own words on one line, shortened at the front: the reason comes last."""
    caused = body.get("causedBy")
    parts = [body.get("message"), *(caused if isinstance(caused, list) else [])]
    text = " ".join(" ".join(str(part).split()) for part in parts if part)
    if not body:
        text = " ".join(response.text.split())
    return text if len(text) <= LONGEST_TEXT else f"…{text[-LONGEST_TEXT:]}"
