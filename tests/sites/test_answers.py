"""Answers of servers, quoted from UNICORE/X 11.0.0 where they are not a proxy's."""

import json

import httpx
import pytest

from snakemake_executor_plugin_mantik.common.errors import (
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.sites.answers import retry_after
from snakemake_executor_plugin_mantik.sites.unicore.answers import unicore_error

JSON = {"Content-Type": "application/json"}
HTML = {"Content-Type": "text/html; charset=utf-8"}
URL = "https://unicore.example.org/rest/core/storages/WORK/files/f"


def answer(
    status: int, text: str = "", headers: dict[str, str] | None = None, method: str = "GET"
) -> httpx.Response:
    request = httpx.Request(method, URL)
    return httpx.Response(status, text=text, headers=headers or {}, request=request)


def said(message: str, status: int = 500) -> httpx.Response:
    text = json.dumps({"errorMessage": message, "status": status})
    return answer(status, text, JSON, "POST")


@pytest.mark.parametrize("status", [400, 402, 405, 406, 409, 412, 418, 421, 451])
@pytest.mark.parametrize("words", ["Bad Request", "Permission denied", "No space left on device"])
def test_plain_text_of_gateways_says_nothing(status: int, words: str) -> None:
    error = unicore_error(answer(status, words, {"Content-Type": "text/plain"}), "hpc")
    assert isinstance(error, SiteUnreachable)


@pytest.mark.parametrize("status", [413, 414, 431])
def test_too_large_is_too_large_whoever_says_so(status: int) -> None:
    error = unicore_error(answer(status, "Too Large", {"Content-Type": "text/plain"}), "hpc")
    assert isinstance(error, SiteRejected)


DIRECTORY = f"/scratch/mantik/{'w' * 200}/.mantik/tries/1/c9a0"


def of_mkdir(cause: str) -> str:
    """What a server says of a command of its TSI that failed: the whole script, then the cause."""
    return (
        f"Cannot create directory <{DIRECTORY}>: eu.unicore.xnjs.tsi.TSIProblem: TSI on "
        "<localhost>: Command failed: TSI_FAILED: Command '#!/bin/bash -l:#TSI_EXECUTESCRIPT:"
        f"#TSI_SCRIPT:/bin/mkdir -p -m 750 '{DIRECTORY}'::#TSI_IDENTITY demo demo:DEFAULT_GID::' "
        f"failed with code 1: /bin/mkdir: cannot create directory \u2018{DIRECTORY}\u2019: {cause}:"
        "\n (Command execution on TSI reported an error)"
    )


CAUSES = ["File exists", "Not a directory", "Permission denied", "No space left on device",
          "Disk quota exceeded", "Read-only file system"]  # fmt: skip

QUOTES = [
    ("Cannot create directory <a/f>: java.io.IOException: Cannot create directory </a/f>, file "
     "exists!", SiteRejected),
    ("Error uploading to '/a': java.io.FileNotFoundException: /work/a (Is a directory)",
     SiteRejected),
    ("Error uploading to '/a/f/g': eu.unicore.xnjs.ems.ExecutionException: Parent </a/f> is not a "
     "directory (XNJS error)", SiteRejected),
    ("Could not submit job: org.json.JSONException: Expected a ':' after a key at 8 [character 9 "
     "line 1]", SiteRejected),
    ("Error uploading to '/a': java.io.IOException: Disk quota exceeded", SiteRejected),
    ("TSIUnavailableException: TSI unavailable at host1", SiteUnreachable),
    ("Could not submit job: eu.unicore.services.exceptions.ResourceUnknownException: x",
     SiteUnreachable),
    ("Limit of <100> instances of JobManagement reached for <CN=Demo>", SiteBusy),
    ("Cannot delete <a/missing>: eu.unicore.xnjs.ems.ExecutionException: Could not delete. "
     "(Command execution on TSI reported an error)", SiteUnreachable),
    ("Something that nobody has seen yet", SiteUnreachable),
]  # fmt: skip


def test_server_that_has_just_started() -> None:
    """It answers 401 to submissions, though nothing is wrong with the credentials."""
    error = unicore_error(
        said(
            "Could not submit job: eu.unicore.security.AuthorisationException: There are no "
            "accessible targetsystem factories for: Name: CN=demo Xlogin: uid: [root]",
            401,
        ),
        "juwels",
    )
    assert type(error) is SiteBusy
    assert "just started" in str(error)


@pytest.mark.parametrize(("text", "kind"), QUOTES)
def test_texts_of_500(text: str, kind: type[SiteError]) -> None:
    error = unicore_error(said(text), "juwels")
    assert type(error) is kind
    assert error.status == 500
    assert text[:40] in str(error)
    assert "site juwels" in str(error)


@pytest.mark.parametrize("cause", CAUSES)
def test_causes_behind_the_script_that_a_tsi_repeats(cause: str) -> None:
    error = unicore_error(said(of_mkdir(cause)), "juwels")
    assert type(error) is SiteRejected
    assert "TSI_SCRIPT" not in str(error)
    assert "Cannot create directory" in str(error)
    assert cause in str(error)


def test_details_of_a_job_that_slurm_has_forgotten() -> None:
    text = (
        "Could not get job details: eu.unicore.xnjs.ems.ExecutionException: TSI call failed: reply "
        "was TSI_FAILED: Command 'scontrol show jobid 6' failed with code 1: slurm_load_jobs error:"
        " Invalid job id specified:\n (XNJS error)"
    )
    assert type(unicore_error(said(text), "juwels")) is SiteNotFound


def test_texts_of_a_tsi_that_repeat_no_script() -> None:
    text = (
        "Error uploading to '/d': java.io.IOException: Execution on TSI <localhost> failed. Reply "
        "was TSI_FAILED: [Errno 21] Is a directory: '/scratch/d'\n"
    )
    assert type(unicore_error(said(text), "juwels")) is SiteRejected


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (answer(403), SiteUnauthorized),  # wrong password: empty body
        (answer(401), SiteUnauthorized),
        (said("Access denied for CN=Demo on resource files/x", 403), SiteRejected),
        (answer(404), SiteNotFound),  # a missing file: empty body
        (answer(404, "No service was found.", {"Content-Type": "text/plain"}), SiteUnreachable),
        (answer(404, "<html>No service was found.</html>", HTML), SiteUnreachable),
        (answer(200, "<html>Please log in</html>", HTML), SiteUnreachable),
        (answer(403, "<html>Blocked</html>", HTML), SiteUnreachable),
        (answer(302, "", {"Location": "https://portal.example.org"}), SiteUnreachable),
        (answer(406), SiteRejected),  # download of a directory
        (answer(415), SiteRejected),
        (answer(416), SiteRejected),
        (answer(413), SiteRejected),
        (answer(408), SiteUnreachable),
        (answer(429), SiteBusy),
        (answer(500), SiteUnreachable),
        (answer(502), SiteUnreachable),
        (answer(503), SiteUnreachable),  # of a proxy: the request may have passed it
        (said("Job submission is currently disabled", 503), SiteBusy),
        (answer(503, "", {"Retry-After": "7"}), SiteBusy),
        (answer(504), SiteUnreachable),
    ],
)
def test_statuses(response: httpx.Response, kind: type[SiteError]) -> None:
    assert type(unicore_error(response, "juwels")) is kind


@pytest.mark.parametrize("response", [answer(200), answer(201), answer(204), answer(206)])
def test_no_error(response: httpx.Response) -> None:
    assert unicore_error(response, "juwels") is None


def test_expired_session_is_left_to_pyunicore() -> None:
    assert unicore_error(answer(432), "juwels") is None


def test_asks_to_come_back() -> None:
    error = unicore_error(answer(429, "", {"Retry-After": "12"}), "juwels")
    assert isinstance(error, SiteBusy)
    assert error.retry_after == 12.0
    assert retry_after("Wed, 21 Oct 2026 07:28:00 GMT") is None
    assert retry_after(None) is None


def test_long_text_is_cut_to_a_line() -> None:
    error = unicore_error(said("word " * 1000), "juwels")
    assert error is not None
    assert len(str(error)) < 700
    assert "\n" not in str(error)
