"""What a real UNICORE server does, quirk by quirk, seen over plain HTTP: a sandbox and a real one.

`only_sandbox` marks what reaches into it, and what takes minutes at a real one.
"""

import ssl
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SandboxSettings, Timing
from tests.real.centre.tsi import SOFTWARE
from tests.support.sandbox import RestClient, raw_job, wait_for
from tests.support.unicoreserver import UnicoreX

OCTETS = {"Content-Type": "application/octet-stream"}
DOWNLOAD = {"Accept": "application/octet-stream"}
SESSION = "X-UNICORE-SecuritySession"


only_sandbox = pytest.mark.parametrize("rest", ["sandbox"], indirect=True)


class RealClient(RestClient):
    """The same for a real server."""

    def __init__(self, server: UnicoreX) -> None:
        self.url = server.url
        self.http = server.client()


@pytest.fixture(
    params=[
        "sandbox",
        # What a server says is compared in test_same_answers.py.
        pytest.param("tsi_unicorex", marks=[pytest.mark.software(SOFTWARE), pytest.mark.nightly]),
    ]
)
def rest(request: pytest.FixtureRequest) -> Iterator[RestClient]:
    server = request.getfixturevalue(request.param)
    client = RealClient(server) if isinstance(server, UnicoreX) else RestClient(server)
    with client.http:
        yield client


@pytest.fixture
def storage(rest: RestClient) -> str:
    return f"{rest.url}/storages/SCRATCH"


@pytest.fixture
def files(rest: RestClient, storage: str) -> str:
    """URL of a directory of this test's own."""
    url = f"{storage}/files/{uuid.uuid4()}"
    assert rest.http.post(url).status_code == 201
    return url


# --- jobs ----------------------------------------------------------------------------------------


def test_raw_jobs_get_what_their_lines_say(rest: RestClient) -> None:
    description = raw_job(
        "echo $SLURM_CPUS_PER_TASK $SLURM_JOB_PARTITION; pwd; umask",
        "--job-name=my_job-1", "--cpus-per-task=4", "--mem=5000M", "--partition=devel",
        "--gpus-per-node=2", "--account=other", "--comment=hello",
        Name="rest name", Tags=["abc"],
    )  # fmt: skip
    url = rest.submit(description)
    job = rest.ended(url)
    assert (job["status"], job["exitCode"], job["jobType"]) == ("SUCCESSFUL", "0", "BATCH")
    assert (job["name"], job["tags"]) == ("rest name", ["abc"])
    details = rest.http.get(f"{url}/details").json()
    assert details["JobName"] == "my_job-1"
    assert (details["CPUs/Task"], details["MinMemoryNode"]) == ("4", "5000M")
    assert (details["Account"], details["Comment"]) == ("other", "hello")
    assert details["TresPerNode"] == "gres:gpu:2"
    assert rest.text(url, "stdout").startswith("4 devel\n")
    assert rest.text(url, "stdout").endswith("0027\n")


@only_sandbox
def test_other_jobs_get_what_the_server_makes_of_them(rest: RestClient) -> None:
    asked = {"Nodes": 2, "CPUsPerNode": 4, "Runtime": "90s", "MemoryPerNode": "5G",
             "GPUsPerNode": 1}  # fmt: skip
    url = rest.submit({"Executable": "true", "Name": "my_job", "Resources": asked})
    # 5 GiB arrive as 1 GiB, and as 1024 GPUs, which the scheduler refuses.
    job = rest.ended(url)
    assert job["status"] == "FAILED"
    assert "Requested node configuration is not available" in job["statusMessage"]
    assert '--ntasks-per-node="4"' in "".join(job["log"])
    del asked["GPUsPerNode"]
    url = rest.submit({"Executable": "true", "Name": "my_job", "Resources": asked})
    assert rest.ended(url)["status"] == "SUCCESSFUL"
    details = rest.http.get(f"{url}/details").json()
    assert (details["JobName"], details["MinMemoryNode"]) == ("UNICORE_job", "1024M")
    assert (details["NumTasks"], details["TimeLimit"]) == ("8", "00:01:00")


def test_arguments_are_not_quoted(rest: RestClient) -> None:
    arguments = ["a b", "$FOO", ";echo", "second"]
    url = rest.submit(
        {"Executable": "echo", "Arguments": arguments, "Environment": {"FOO": "$HOME/x"}}
    )
    assert rest.ended(url)["exitCode"] == "0"
    first, second = rest.text(url, "stdout").splitlines()
    assert first.startswith("a b /")
    assert second == "second"


FAILING: list[tuple[dict[str, Any], str]] = [
    ({"Executable": "x", "Resources": {"Queue": "zz"}}, "<Queue = zz> is out of range."),
    ({"Executable": "x", "Resources": {"CPUs": 1}}, "Resource <CPUs> is not available for"),
    ({"Executable": "x", "Resources": {"Nodes": 100}}, "<Nodes=100> is out of range."),
    ({"Executable": "x", "Resources": {"Runtime": "1.5h"}}, 'For input string: "1.5"'),
    ({"Executable": "x", "Resources": {"Memory": "1GiB"}}, "No conversion for unit 'GiB'"),
    ({"Executable": "x", "Arguments": [1]}, "JSONArray[0] is not a String"),
    ({"ApplicationName": "nope"}, "The requested Application 'nope' is not available"),
    ({"Job type": "nope"}, "No enum constant"),
    ({"Executable": "x", "Imports": [{"From": "file:///no", "To": "a"}]}, "Staging in failed"),
    ({"Executable": "x", "Imports": [{"From": "inline://", "To": "a"}]}, "Expected authority"),
    ({"Executable": "true", "User precommand": "false"}, "Pre-command(s) failed"),
    ({"Executable": "true", "User postcommand": "false"}, "Post-command(s) failed"),
]
FAILING_AT_SANDBOX: list[tuple[dict[str, Any], str]] = [
    ({"Executable": "x", "Job type": "RAW", "BSS file": "no"}, "not look like a batch script"),
    (raw_job("true", "--partition=zz"), "invalid partition specified: zz"),
]


def test_descriptions_are_accepted_first_and_fail_later(rest: RestClient) -> None:
    failing = FAILING if isinstance(rest, RealClient) else FAILING + FAILING_AT_SANDBOX
    urls = [rest.submit(description) for description, _ in failing]
    for url, (_, words) in zip(urls, failing, strict=True):
        job = rest.ended(url)
        assert job["status"] == "FAILED"
        assert words in job["statusMessage"]


def test_umask(rest: RestClient, storage: str) -> None:
    asked = {"": "0027", "077": "0077"}
    for mask, used in asked.items():
        url = rest.submit(raw_job("umask", **({"Umask": mask} if mask else {})))
        rest.ended(url)
        assert rest.text(url, "stdout") == f"{used}\n"
    (site, *_) = rest.http.get(f"{rest.url}/sites").json()["sites"]
    assert rest.http.get(site).json()["umask"] == "0027"
    assert rest.http.get(storage).json()["umask"] == "027"


def test_nothing_to_execute_is_a_success(rest: RestClient) -> None:
    for description in ({}, {"Job type": "RAW", "BSS file": "x"}):
        job = rest.ended(rest.submit(description))
        assert job["status"] == "SUCCESSFUL"
        assert "exitCode" not in job


@pytest.mark.parametrize(("body", "kind", "status"), [
    (b"{", "application/json", 500), (b"[]", "application/json", 500), (b"x", "text/plain", 415),
])  # fmt: skip
def test_what_is_no_description(rest: RestClient, body: bytes, kind: str, status: int) -> None:
    answer = rest.http.post(f"{rest.url}/jobs", content=body, headers={"Content-Type": kind})
    assert answer.status_code == status
    if status == 500:
        assert answer.json()["status"] == 500
        assert "Could not submit job" in answer.json()["errorMessage"]


def test_a_job_may_wait_for_the_client(rest: RestClient) -> None:
    url = rest.submit(raw_job("cat file", haveClientStageIn="true"))
    storage = rest.job(url)["_links"]["workingDirectory"]["href"]
    wait_for(lambda: rest.job(url)["name"] != "N/A")
    wait_for(lambda: rest.job(url)["status"] == "READY")
    rest.http.put(f"{storage}/files/file", content=b"late", headers=OCTETS)
    assert rest.http.post(f"{url}/actions/start", json={}).status_code == 204
    assert rest.ended(url)["status"] == "SUCCESSFUL"
    assert rest.text(url, "stdout") == "late"


def test_commands_on_the_login_node(rest: RestClient) -> None:
    url = rest.submit(
        raw_job(
            "cat before",
            Environment={"FOO": "bar"},
            **{
                "User precommand": "echo $FOO > before; echo lost",
                "User postcommand": "pwd > after; true",
            },
        )
    )
    assert rest.ended(url)["status"] == "SUCCESSFUL"
    assert rest.text(url, "stdout") == "bar\n"
    assert rest.text(url, "after").strip().endswith(url.rpartition("/")[2])


def test_postcommands_are_skipped_when_the_job_fails(rest: RestClient) -> None:
    url = rest.submit(raw_job("exit 1", **{"User postcommand": "touch after"}))
    assert rest.ended(url)["exitCode"] == "1"
    with pytest.raises(AssertionError):
        rest.text(url, "after")


def test_the_queue_is_shown_while_the_scheduler_tells_it(rest: RestClient) -> None:
    url = rest.submit(raw_job("sleep 300", "--partition=devel"))
    assert rest.job(url)["queue"] == "N/A"
    wait_for(lambda: rest.job(url)["queue"] == "devel")
    assert rest.http.delete(url).status_code == 204


@only_sandbox
def test_a_killed_job_is_shown_without_an_exit_code(rest: RestClient) -> None:
    url = rest.submit(raw_job("sleep 300", "--time=0:01"))
    job = rest.ended(url)
    assert job["statusMessage"].startswith("Failed: Job did not complete normally")
    assert "exitCode" not in job
    assert "JobState=TIMEOUT" in "".join(job["log"])
    details = rest.http.get(f"{url}/details", params={"fields": "Reason,ExitCode"}).json()
    assert details == {"Reason": "TimeLimit", "ExitCode": "0:15"}


@contextmanager
def one_job(directory: Path, timing: Timing) -> Iterator[tuple[Sandbox, RestClient, str]]:
    with Sandbox(directory, settings=SandboxSettings(timing=timing, slots=1)) as box:
        client = RestClient(box)
        with client.http:
            yield box, client, client.submit(raw_job("sleep 300"))


def test_a_killed_job_is_shown_late(tmp_path: Path) -> None:
    timing = Timing(status_interval=0.05, death_lag=3600.0)
    with one_job(tmp_path, timing) as (box, client, url):
        wait_for(lambda: client.job(url)["status"] == "RUNNING")
        box.cancel_job("hpc1", int(client.job(url)["batchSystemID"]))
        wait_for(lambda: box.record("hpc1")["runs"][0]["state"] == "CANCELLED")
        assert client.job(url)["status"] == "RUNNING"


@only_sandbox
@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [("cancel_job", "CANCELLED", "None"), ("fail_node", "NODE_FAIL", "NodeDown")],
)
def test_ends_behind_the_servers_back(
    rest: RestClient, sandbox: Sandbox, end: str, state: str, reason: str
) -> None:
    url = rest.submit(raw_job("sleep 300"))
    wait_for(lambda: rest.job(url)["status"] == "RUNNING")
    getattr(sandbox, end)("hpc1", int(rest.job(url)["batchSystemID"]))

    def details() -> dict[str, str]:
        shown: dict[str, str] = rest.http.get(f"{url}/details").json()
        return shown

    wait_for(lambda: details()["JobState"] != "RUNNING")
    assert (details()["JobState"], details()["Reason"]) == (state, reason)
    assert "exitCode" not in rest.ended(url)


def test_a_payload_that_is_killed_has_an_exit_code(rest: RestClient) -> None:
    job = rest.ended(rest.submit(raw_job("kill -9 $$")))
    assert job["exitCode"] == "137"


@only_sandbox
def test_delete_ends_the_job_and_removes_its_directory(rest: RestClient, sandbox: Sandbox) -> None:
    url = rest.submit(raw_job("touch started; sleep 300"))
    directory = Path(
        rest.http.get(f"{rest.job(url)['_links']['workingDirectory']['href']}").json()["mountPoint"]
    )
    wait_for((directory / "started").exists)
    number = int(rest.job(url)["batchSystemID"])
    assert rest.http.delete(url).status_code == 204
    assert rest.http.get(url).status_code == 404
    assert not directory.exists()
    wait_for(lambda: {r["scheduler_id"]: r["state"] for r in sandbox.record("hpc1")["runs"]}[
        number
    ] == "CANCELLED")  # fmt: skip


def test_lists_are_pages_of_urls(rest: RestClient) -> None:
    urls = {rest.submit({"Tags": ["page-test"]}) for _ in range(5)}
    seen: list[str] = []
    url = f"{rest.url}/jobs?tags=page-test&num=2"
    first = rest.http.get(url).json()
    assert "previous" not in first["_links"]
    seen += first["jobs"]
    second = rest.http.get(f"{url}&offset=2").json()
    assert {"previous", "next", "self"} <= second["_links"].keys()
    seen += second["jobs"] + rest.http.get(f"{url}&offset=4").json()["jobs"]
    assert set(seen) == urls
    assert rest.http.get(f"{rest.url}/jobs?tags=page%2Dtest&tags=other").json()["jobs"]


def test_the_target_system(rest: RestClient) -> None:
    url = rest.http.get(f"{rest.url}/sites").json()["sites"][0]
    site = rest.http.get(url).json()
    assert site["resources"]["devel"]["Nodes"] in ("1-1", "1-2")
    jobs = rest.http.get(site["_links"]["jobs"]["href"]).json()["jobs"]
    assert rest.submit({}) not in jobs
    assert rest.http.get(f"{rest.url}/sites/other").status_code == 404


def test_fields(rest: RestClient) -> None:
    url = rest.submit({})
    assert set(rest.job(url, fields="status,exitCode")) == {"status"}
    assert set(rest.job(url)) - set(rest.job(url, fields="!log")) == {"log"}


def test_what_is_not_there_is_an_empty_404(rest: RestClient) -> None:
    for path in ("nope", "jobs/nope", "jobs/nope/details", "storages/nope", "storages/x/files/y"):
        answer = rest.http.get(f"{rest.url}/{path}")
        assert (answer.status_code, answer.content) == (404, b"")


@only_sandbox
def test_what_is_no_server(rest: RestClient) -> None:
    assert "No service was found" in rest.http.get(rest.url.replace("hpc1", "other")).text


def test_a_lifetime_that_is_over_removes_the_job(tmp_path: Path) -> None:
    timing = Timing(status_interval=0.05, lifetime=3.0)
    with one_job(tmp_path, timing) as (box, client, url):
        wait_for(lambda: box.record("hpc1")["runs"])
        wait_for(lambda: client.http.get(url).status_code == 404)
        wait_for(lambda: box.record("hpc1")["runs"][0]["state"] == "CANCELLED")


def test_the_status_follows_the_scheduler_slowly(tmp_path: Path) -> None:
    timing = Timing(status_interval=3600.0)
    with Sandbox(tmp_path, settings=SandboxSettings(timing=timing, slots=1)) as box:
        client = RestClient(box)
        with client.http:
            url = client.submit(raw_job("true"))
            wait_for(
                lambda: client.http.get(f"{url}/details").json().get("JobState") == "COMPLETED"
            )
            assert client.job(url)["status"] == "QUEUED"


# --- who asks -------------------------------------------------------------------------------------


@only_sandbox
def test_sessions(rest: RestClient, sandbox: Sandbox) -> None:
    url = rest.url
    first = rest.http.get(url).headers[SESSION]
    bare = {"Accept": "application/json", SESSION: first}
    answer = httpx.get(url, headers=bare)
    assert (answer.status_code, answer.headers[SESSION]) == (200, first)
    assert answer.json()["client"]["role"]["selected"] == "user"
    # The session counts, whatever the credentials say.
    assert httpx.get(url, headers=bare, auth=("mantik", "wrong")).status_code == 200
    for _ in range(4):
        assert rest.http.get(url).status_code == 200
    assert httpx.get(url, headers=bare).status_code == 200  # used: not the oldest any more
    for _ in range(5):
        rest.http.get(url)
    assert httpx.get(url, headers=bare).status_code == 432
    answer = rest.http.get(url, headers={SESSION: "made-up"})
    assert (answer.status_code, answer.content) == (432, b"")


@pytest.fixture
def stranger(rest: RestClient, request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    ca_file: Any = True
    if isinstance(rest, RealClient):
        ca_file = ssl.create_default_context(cafile=request.getfixturevalue("tsi_unicorex").ca_file)
    headers = {"Accept": "application/json"}
    with httpx.Client(verify=ca_file, headers=headers, trust_env=False) as client:
        yield client


def test_wrong_credentials(rest: RestClient, stranger: httpx.Client) -> None:
    answer = stranger.get(f"{rest.url}/jobs", auth=("mantik", "wrong"))
    assert (answer.status_code, answer.content) == (403, b"")
    assert stranger.get(rest.url, headers={"Authorization": "Basic !"}).status_code == 403
    assert stranger.get(rest.url, headers={"Authorization": "Bearer x"}).status_code == 403


def test_no_credentials_see_an_empty_list(
    rest: RestClient, stranger: httpx.Client, storage: str
) -> None:
    rest.submit({})
    answer = stranger.get(f"{rest.url}/jobs")
    assert (answer.status_code, answer.json()["jobs"]) == (200, [])
    assert stranger.post(f"{rest.url}/jobs", json={}).status_code == 403
    assert stranger.get(storage).status_code == 403


def test_the_servers_token_is_a_credential(rest: RestClient, stranger: httpx.Client) -> None:
    token = rest.http.get(f"{rest.url}/token", headers={"Accept": "text/plain"}).text
    answer = stranger.get(rest.url, headers={"Authorization": f"Bearer {token}"})
    assert answer.json()["client"]["role"]["selected"] == "user"


# --- files ----------------------------------------------------------------------------------------


def test_names_that_work_and_names_that_are_refused(rest: RestClient, files: str) -> None:
    for name in ("a b", '"', "#", "ü", "+", "&", ";", "?", "*", "[]", ":", "$(id)"):
        url = f"{files}/{quote(name, safe='')}"
        assert rest.http.put(url, content=b"x", headers=OCTETS).status_code == 204
        assert rest.http.get(url).json()["size"] == 1
        assert rest.http.get(url, headers=DOWNLOAD).content == b"x"
        assert [each.rpartition("/")[2] for each in rest.http.get(files).json()["content"]] == [
            name
        ]
        assert rest.http.delete(url).status_code == 204
        assert rest.http.get(url).status_code == 404
    for name in ("a%b", "a\nb", "a\tb", "a\\b"):
        url = f"{files}/{quote(name, safe='')}"
        for answer in (rest.http.put(url, content=b"x", headers=OCTETS), rest.http.get(url)):
            assert (answer.status_code, answer.content) == (400, b"")


def test_names_that_are_trouble(rest: RestClient, files: str) -> None:
    quoted = f"{files}/it%27s"
    assert rest.http.put(quoted, content=b"x", headers=OCTETS).status_code == 204
    assert rest.http.get(quoted).status_code == 404
    assert len(rest.http.get(files).json()["content"]) == 1
    assert rest.http.put(f"{files}/%24HOME", content=b"x", headers=OCTETS).status_code == 500


def test_no_way_out_of_a_storage(rest: RestClient, storage: str) -> None:
    path = httpx.URL(storage).raw_path + b"/files/%2e%2e/x"
    answer = rest.http.put(
        httpx.URL(storage).copy_with(raw_path=path), content=b"x", headers=OCTETS
    )
    assert answer.status_code in (400, 404) or "x" in rest.http.get(f"{storage}/files").text


def test_what_the_content_type_means(rest: RestClient, files: str) -> None:
    url = f"{files}/f"
    rest.http.put(url, content=b"x", headers={"Content-Type": "text/plain"})
    answer = rest.http.put(url, json={"permissions": "rw-------"})
    assert answer.json() == {"permissions": "OK"}
    assert rest.http.get(url).json()["permissions"] == "rw-------"
    rest.http.put(url, content=b"y", headers=OCTETS)
    assert rest.http.get(url).json()["permissions"] == "rw-r-----", "each upload sets them"
    rest.http.put(url, json={"permissions": "rw-------"})
    assert "FAILED" in rest.http.put(url, json={"permissions": "0600"}).json()["permissions"]
    assert rest.http.put(f"{files}/none", json={"permissions": "rw-------"}).status_code == 404
    assert rest.http.request("PUT", url, content=b"x").status_code == 415


RANGES = [
    ("bytes=1-3", 206, b"123"), ("bytes=7-", 206, b"789"), ("bytes=-2", 206, b"89"),
    ("bytes=10-", 206, b""), ("bytes=3-1", 416, None), ("lines=2", 416, None),
    ("bytes=x-", 416, None),
]  # fmt: skip


def test_ranges(rest: RestClient, files: str) -> None:
    url = f"{files}/f"
    rest.http.put(url, content=b"0123456789", headers=OCTETS)
    for wanted, status, content in RANGES:
        answer = rest.http.get(url, headers={**DOWNLOAD, "Range": wanted})
        assert answer.status_code == status
        assert "content-range" not in answer.headers
        if content is not None:
            assert answer.content == content


@only_sandbox
def test_listings_are_cut_at_ten_thousand(rest: RestClient, sandbox: Sandbox, files: str) -> None:
    directory = sandbox.directory / "hpc1" / "scratch" / files.rpartition("/")[2]
    for number in range(10_050):
        (directory / str(number)).touch()
    shown = rest.http.get(files).json()
    assert len(shown["content"]) == 10_000
    rest_of_it = rest.http.get(files, params={"offset": 10_000, "num": 100}).json()["content"]
    assert len(rest_of_it) == 50
    assert not rest_of_it.keys() & shown["content"].keys()
