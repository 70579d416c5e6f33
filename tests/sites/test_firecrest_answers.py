"""Answers of servers, quoted from a real firecREST v2 where they are not a proxy's."""

import json
from typing import Any

import httpx
import pytest
import requests
from firecrest.FirecrestException import (
    ClientsCredentialsException,
    JobTimeoutException,
    MultipartUploadException,
    NotImplementedOnAPIversion,
    TransferJobFailedException,
    UnexpectedStatusException,
)

from snakemake_executor_plugin_mantik.common.errors import (
    SiteBusy,
    SiteError,
    SiteNotFound,
    SiteRejected,
    SiteUnauthorized,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.sites.firecrest.answers import (
    closes_connection,
    error_of_answer,
    firecrest_error,
)

URL = "https://api.example.org/hpc/firecrest/v2/filesystem/daint/ops/stat"


def answer(
    status: int,
    message: str | None = None,
    *,
    caused: list[str] | None = None,
    user: str | None = "me",
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    request = httpx.Request("GET", URL, headers={"Authorization": "Bearer s3cr3t"})
    body = {
        "errorType": "error",
        "message": message,
        "causedBy": caused,
        "data": None,
        "user": user,
    }
    content = json.dumps(body) if message is not None else ""
    kind = {"Content-Type": "application/json"} if message is not None else {}
    return httpx.Response(
        status, text=content, headers={**kind, **(headers or {})}, request=request
    )


REMOTE = "Remote process failed with exit status:1 and error message:"
SBATCH = "Unexpected Slurm command response. exit_status:1 std_err:sbatch: error: "

QUOTES = [
    (401, "Access token is invalid.", SiteUnauthorized),
    (401, "Access token expires too soon (less than 30s remaining).", SiteUnauthorized),
    (401, "Not authenticated", SiteUnauthorized),
    (500, "('No SSH credentials found for user:me',)", SiteUnauthorized),
    (404, "System not found", SiteRejected),
    (404, "Job not found.", SiteNotFound),
    (404, f"{REMOTE}ls: cannot access '/a': No such file or directory", SiteNotFound),
    (403, f"{REMOTE}mkdir: cannot create directory '/a': Permission denied", SiteRejected),
    (400, f"{REMOTE}mkdir: cannot create directory '/a': File exists", SiteRejected),
    (500, f"{REMOTE}bash: line 1: /a: Is a directory", SiteRejected),
    (500, f"{REMOTE}bash: line 1: /a/f/g: Not a directory", SiteRejected),
    (500, f"{REMOTE}base64: write error: No space left on device", SiteRejected),
    (500, f"{REMOTE}base64: write error: Disk quota exceeded", SiteRejected),
    (500, f"{REMOTE}stat: cannot statx '/a': Input/output error", SiteUnreachable),
    (400, "The provided path (/x) does not match any of the defined filesystem paths for the "
     "requested system (daint).", SiteRejected),
    (500, f"{SBATCH}Batch job submission failed: Invalid account or account/partition "
     "combination specified", SiteRejected),
    (500, f"{SBATCH}Batch job submission failed: invalid partition specified: x", SiteRejected),
    (500, f"{SBATCH}Batch job submission failed: Requested node configuration is not available",
     SiteRejected),
    (500, f"{SBATCH}Batch job submission failed: Socket timed out on send/recv operation",
     SiteUnreachable),
    (500, f"{SBATCH}Batch job submission failed: Unable to contact slurm controller (connect "
     "failure)", SiteUnreachable),
    (403, "Job submission rejected: accounting/QOS policy limit exceeded. sbatch: error: "
     "AssocMaxSubmitJobLimit", SiteBusy),
    (500, f"{SBATCH}QOSGrpSubmitJobsLimit", SiteBusy),
    (403, "Job submission rejected: accounting/QOS policy limit exceeded. sbatch: error: "
     "QOSMaxWallDurationPerJobLimit", SiteRejected),
    (500, "Unexpected PBS command response. exit_status:1 std_err:qsub: Unknown queue stdout:",
     SiteRejected),
    (500, "Unexpected PBS command response. exit_status:1 std_err:qsub: would exceed queue's "
     "per-user limit of jobs in 'Q' state stdout:", SiteBusy),
    (500, "Unexpected Slurm command response. exit_status:0 std_err:scancel: error: Kill job error "
     "on job id 7: Job/step already completing or completed", SiteNotFound),
    (500, "Unexpected Slurm command response. exit_status:0 std_err:scancel: error: Kill job error "
     "on job id 7: Invalid job id specified", SiteNotFound),
    (400, "Account parameter is required on this system.", SiteRejected),
    (400, "Requested transfer method is not available.", SiteRejected),
    (413, "File to upload is too large.", SiteRejected),
    (413, "Command output exceeded buffer limit.", SiteRejected),
    (408, "Command execution timeout limit exceeded.", SiteUnreachable),
    (500, "('Channel not open for sending',)", SiteUnreachable),
    (500, "(111, 'Connection refused')", SiteUnreachable),
    (500, "()", SiteUnreachable),
    (424, "Unable to open a new SSH channel.", SiteBusy),
    (503, "The scheduler service is unhealthy.", SiteBusy),
    (501, "Download cannot be performed without SSH enabled", SiteRejected),
    (500, "Something that nobody has seen yet", SiteUnreachable),
]  # fmt: skip


@pytest.mark.parametrize(("status", "message", "kind"), QUOTES)
def test_texts(status: int, message: str, kind: type[SiteError]) -> None:
    error = firecrest_error(UnexpectedStatusException([answer(status, message)], 200), "alps")
    assert type(error) is kind
    assert error.status == status
    assert message[-40:] in str(error)
    assert "site alps" in str(error)
    assert "s3cr3t" not in str(error)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("Unexpected Slurm command response. exit_status:1 std_err:sacct: error: Problem talking "
         "to the database: Connection refused", SiteUnreachable),
        ("Unable to open a new SSH channel.", SiteBusy),
    ],
)  # fmt: skip
def test_causes_count(cause: str, kind: type[SiteError]) -> None:
    error = error_of_answer(answer(500, "Error executing Slurm command.", caused=[cause]), "alps")
    assert type(error) is kind


@pytest.mark.parametrize("status", [500, 502, 504, 404, 200, 302])
def test_what_a_proxy_says_proves_nothing(status: int) -> None:
    assert type(error_of_answer(answer(status), "alps")) is SiteUnreachable
    page = answer(status, headers={"Content-Type": "text/html; charset=utf-8"})
    assert type(error_of_answer(page, "alps")) is SiteUnreachable


def test_told_to_come_later() -> None:
    error = error_of_answer(answer(429, headers={"Retry-After": "7"}), "alps")
    assert isinstance(error, SiteBusy)
    assert error.retry_after == 7


REQUEST = httpx.Request("GET", URL)
TRANSFER: dict[str, Any] = {"transferDirectives": {"downloadUrl": "https://store/s3cr3t"}}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx.ReadError("[Errno 104] Connection reset by peer", request=REQUEST), SiteUnreachable),
        (httpx.ReadTimeout("", request=REQUEST), SiteUnreachable),
        (httpx.ConnectError("all attempts failed"), SiteUnreachable),
        (httpx.InvalidURL("no"), SiteUnreachable),
        (requests.exceptions.ConnectionError("issuer"), SiteUnreachable),
        (requests.exceptions.Timeout("issuer"), SiteUnreachable),
        (ClientsCredentialsException([answer(401, "invalid_client")]), SiteUnauthorized),
        (FileNotFoundError("File not found: /a on system daint"), SiteNotFound),
        (MultipartUploadException(TRANSFER, "part 1"), SiteUnreachable),
        (TransferJobFailedException(TRANSFER), SiteUnreachable),
        (JobTimeoutException("7"), SiteUnreachable),
        (NotImplementedOnAPIversion("no"), SiteRejected),
        (KeyError("jobs"), SiteUnreachable),
        (json.JSONDecodeError("no", "", 0), SiteUnreachable),
    ],
)
def test_exceptions(error: Exception, kind: type[SiteError]) -> None:
    found = firecrest_error(error, "alps")
    assert type(found) is kind
    assert "s3cr3t" not in str(found)


def test_mistakes_of_our_own_stay_what_they_are() -> None:
    assert firecrest_error(AttributeError("x"), "alps") is None
    assert firecrest_error(SiteRejected("x"), "alps") is None


def test_certificates() -> None:
    error = firecrest_error(httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] no"), "alps")
    assert error is not None
    assert "CAFile" in error.do


def test_answers_that_the_connection_does_not_survive() -> None:
    assert closes_connection(answer(500, "('Channel not open for sending',)", user=None))
    assert not closes_connection(answer(500, "Remote process failed"))
    assert not closes_connection(answer(408, "x", user=None))
