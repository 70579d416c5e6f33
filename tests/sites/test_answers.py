"""Answers of servers, quoted from UNICORE/X 11.0.0 and a real firecREST v2 where not a proxy's."""

import json
from pathlib import Path
from typing import Any

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
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.sites.authentication import Bearer
from snakemake_executor_plugin_mantik.sites.firecrest.connection import (
    FirecrestConnection,
    closes_connection,
)
from snakemake_executor_plugin_mantik.sites.rest import Connection
from snakemake_executor_plugin_mantik.sites.unicore.connection import UnicoreConnection

URL = "https://hpc.example.org/api"
UNICORE = UnicoreConnection("juwels", URL, Bearer("t"), SiteSettings(), Path())
FIRECREST = FirecrestConnection("alps", URL, Bearer("t"), SiteSettings(), Path())
JSON = {"Content-Type": "application/json"}
TEXT = {"Content-Type": "text/plain"}
HTML = {"Content-Type": "text/html; charset=utf-8"}
Case = tuple[Connection, httpx.Response]


def answer(
    server: Connection, status: int, text: str = "", headers: dict[str, str] | None = None
) -> Case:
    request = httpx.Request("GET", f"{URL}/f", headers={"Authorization": "Bearer s3cr3t"})
    return server, httpx.Response(status, text=text, headers=headers or {}, request=request)


def says(server: Connection, status: int, message: str, **more: Any) -> Case:
    body = {"errorMessage": message, "status": status}
    if server is FIRECREST:
        body = {"errorType": "error", "message": message, "causedBy": None, "user": "me", **more}
    return answer(server, status, json.dumps(body), JSON)


def error_of(case: Case) -> SiteError:
    server, response = case
    error = server.error_of(response)
    assert error is not None
    return error


DIRECTORY = f"/scratch/mantik/{'w' * 200}/.mantik/attempts/1/c9a0"


def of_mkdir(cause: str) -> str:
    """What a server says of a command of its TSI that failed: the whole script, then the cause."""
    return (
        f"Cannot create directory <{DIRECTORY}>: eu.unicore.xnjs.tsi.TSIProblem: TSI on "
        "<localhost>: Command failed: TSI_FAILED: Command '#!/bin/bash -l:#TSI_EXECUTESCRIPT:"
        f"#TSI_SCRIPT:/bin/mkdir -p -m 750 '{DIRECTORY}'::#TSI_IDENTITY demo demo:DEFAULT_GID::' "
        f"failed with code 1: /bin/mkdir: cannot create directory \u2018{DIRECTORY}\u2019: {cause}:"
        "\n (Command execution on TSI reported an error)"
    )


REMOTE = "Remote process failed with exit status:1 and error message:"
SBATCH = "Unexpected Slurm command response. exit_status:1 std_err:sbatch: error: "

OF_UNICORE: list[tuple[int, str, type[SiteError]]] = [
    (500, "Cannot create directory <a/f>: java.io.IOException: Cannot create directory </a/f>, "
     "file exists!", SiteRejected),
    (500, "Error uploading to '/a': java.io.FileNotFoundException: /work/a (Is a directory)",
     SiteRejected),
    (500, "Error uploading to '/a/f/g': eu.unicore.xnjs.ems.ExecutionException: Parent </a/f> is "
     "not a directory (XNJS error)", SiteRejected),
    (500, "Could not submit job: org.json.JSONException: Expected a ':' after a key at 8 ["
     "character 9 line 1]", SiteRejected),
    (500, "Error uploading to '/a': java.io.IOException: Disk quota exceeded", SiteRejected),
    (500, "TSIUnavailableException: TSI unavailable at host1", SiteUnreachable),
    (500, "Could not submit job: eu.unicore.services.exceptions.ResourceUnknownException: x",
     SiteUnreachable),
    (500, "Limit of <100> instances of JobManagement reached for <CN=Demo>", SiteBusy),
    (500, "Cannot delete <a/missing>: eu.unicore.xnjs.ems.ExecutionException: Could not delete. "
     "(Command execution on TSI reported an error)", SiteUnreachable),
    (500, "Something that nobody has seen yet", SiteUnreachable),
    # It answers so to submissions, though nothing is wrong with the credentials.
    (401, "Could not submit job: eu.unicore.security.AuthorisationException: There are no "
     "accessible targetsystem factories for: Name: CN=demo Xlogin: uid: [root]", SiteBusy),
    (500, "Could not get job details: eu.unicore.xnjs.ems.ExecutionException: TSI call failed: "
     "reply was TSI_FAILED: Command 'scontrol show jobid 6' failed with code 1: slurm_load_jobs "
     "error: Invalid job id specified:\n (XNJS error)", SiteNotFound),
    (500, "Error uploading to '/d': java.io.IOException: Execution on TSI <localhost> failed. Reply"
     " was TSI_FAILED: [Errno 21] Is a directory: '/scratch/d'\n", SiteRejected),
    (403, "Access denied for CN=Demo on resource files/x", SiteRejected),
    (503, "Job submission is currently disabled", SiteBusy),
]  # fmt: skip
OF_FIRECREST: list[tuple[int, str, type[SiteError]]] = [
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


@pytest.mark.parametrize(
    ("server", "status", "text", "kind"),
    [
        *((UNICORE, *quote) for quote in OF_UNICORE),
        *((FIRECREST, *quote) for quote in OF_FIRECREST),
    ],
)
def test_texts(server: Connection, status: int, text: str, kind: type[SiteError]) -> None:
    error = error_of(says(server, status, text))
    assert type(error) is kind
    assert error.status == status
    assert text[:40] in str(error)
    assert server.where in str(error)
    assert "s3cr3t" not in str(error)


CAUSES = ["File exists", "Not a directory", "Permission denied", "No space left on device",
          "Disk quota exceeded", "Read-only file system"]  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_causes_behind_the_script_that_a_tsi_repeats(cause: str) -> None:
    error = error_of(says(UNICORE, 500, of_mkdir(cause)))
    assert type(error) is SiteRejected
    assert "TSI_SCRIPT" not in str(error)
    assert "Cannot create directory" in str(error)
    assert cause in str(error)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("Unexpected Slurm command response. exit_status:1 std_err:sacct: error: Problem talking "
         "to the database: Connection refused", SiteUnreachable),
        ("Unable to open a new SSH channel.", SiteBusy),
    ],
)  # fmt: skip
def test_causes_count(cause: str, kind: type[SiteError]) -> None:
    case = says(FIRECREST, 500, "Error executing Slurm command.", causedBy=[cause])
    assert type(error_of(case)) is kind


STATUSES: list[tuple[int, str, dict[str, str], type[SiteError]]] = [
    (401, "", {}, SiteUnauthorized),
    (403, "", {}, SiteUnauthorized),  # wrong password: empty body
    (404, "No service was found.", TEXT, SiteUnreachable),
    (404, "<html>No service was found.</html>", HTML, SiteUnreachable),
    (200, "<html>Please log in</html>", HTML, SiteUnreachable),
    (403, "<html>Blocked</html>", HTML, SiteUnreachable),
    (302, "", {"Location": "https://portal.example.org"}, SiteUnreachable),
    (406, "", {}, SiteRejected),  # download of a directory
    (415, "", {}, SiteRejected),
    (416, "", {}, SiteRejected),
    *((status, "Too Large", TEXT, SiteRejected) for status in (413, 414, 431)),
    *(
        (status, words, TEXT, SiteUnreachable)
        for status in (400, 402, 405, 406, 409, 412, 418, 421, 451)
        for words in ("Bad Request", "Permission denied", "No space left on device")
    ),
    (408, "", {}, SiteUnreachable),
    (429, "", {}, SiteBusy),
    (500, "", {}, SiteUnreachable),
    (500, "<html>", HTML, SiteUnreachable),
    (502, "", {}, SiteUnreachable),
    (503, "", {}, SiteUnreachable),  # of a proxy: the request may have passed it
    (503, "", {"Retry-After": "7"}, SiteBusy),
    (504, "", {}, SiteUnreachable),
]


@pytest.mark.parametrize("server", [UNICORE, FIRECREST])
def test_statuses(server: Connection) -> None:
    for status, text, headers, kind in STATUSES:
        assert type(error_of(answer(server, status, text, headers))) is kind, (status, text)
    for status in (200, 201, 204, 206):
        assert server.error_of(answer(server, status)[1]) is None
    busy = error_of(answer(server, 429, "", {"Retry-After": "12"}))
    assert isinstance(busy, SiteBusy)
    assert busy.retry_after == 12.0


def test_a_file_that_is_missing() -> None:
    """UNICORE sends no body; firecREST always does."""
    assert type(error_of(answer(UNICORE, 404))) is SiteNotFound
    assert type(error_of(answer(FIRECREST, 404))) is SiteUnreachable


def test_advice_of_a_server_that_has_just_started() -> None:
    case = says(UNICORE, 401, "There are no accessible targetsystem factories for: CN=demo")
    assert "just started" in str(error_of(case))


def test_long_text_is_cut_to_a_line() -> None:
    error = error_of(says(UNICORE, 500, "word " * 1000))
    assert len(str(error)) < 700
    assert "\n" not in str(error)


def test_answers_that_the_connection_does_not_survive() -> None:
    _, lost = says(FIRECREST, 500, "('Channel not open for sending',)", user=None)
    assert closes_connection(lost)
    assert not closes_connection(says(FIRECREST, 500, "Remote process failed")[1])
    assert not closes_connection(says(FIRECREST, 408, "x", user=None)[1])
