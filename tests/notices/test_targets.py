"""Where notices go, and what does not get there."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.notices import targets
from snakemake_executor_plugin_mantik.notices.courier import Courier
from snakemake_executor_plugin_mantik.notices.notice import FailedJob, Notice, RunOutcome
from snakemake_executor_plugin_mantik.notices.targets import (
    CommandTarget,
    compose_request,
    parse_target,
)

FAILED = [FailedJob(f"train <{n}>", "train", "hpc", "17", Reason.OUT_OF_MEMORY) for n in range(5)]
NOTICE = Notice(RunOutcome.FAILED, Path("/home/me/wf"), ["hpc"], 9, 4, 0, FAILED, 1e9, 125.0)
TEXT = (
    "wf: failed after 2 min 5 s; 4 of 9 jobs done, 5 failed: train <0> at hpc (out of memory),"
    " train <1> at hpc (out of memory), train <2> at hpc (out of memory) and 2 more."
)
SECRET = "T0/B0/s3cr3t"


def test_each_service_gets_what_it_takes() -> None:
    assert NOTICE.text == TEXT
    headers, body = compose_request(f"https://hooks.slack.com/services/{SECRET}", NOTICE)
    escaped = TEXT.replace("<", "&lt;").replace(">", "&gt;")
    assert json.loads(body) == {"text": escaped}
    assert headers["Content-Type"] == "application/json"
    headers, body = compose_request(f"https://chat.example.org/hooks/{SECRET}", NOTICE)
    assert json.loads(body) == {"text": TEXT}
    for host in ("ntfy.sh", "ntfy.example.org:8080"):
        headers, body = compose_request(f"https://me:p%40ss@{host}/topic", NOTICE)
        assert body.decode() == TEXT
        assert headers["Title"] == "Workflow failed"
        assert headers["Authorization"] == "Basic bWU6cEBzcw=="
    headers, body = compose_request("https://other.example.org/x", NOTICE)
    values = json.loads(body)
    assert (values["text"], values["event"], values["outcome"]) == (TEXT, "finished", "failed")
    assert (values["done"], values["total"], values["failed"]) == (4, 9, 5)
    assert values["failed_jobs"][0]["reason"] == "out_of_memory"
    assert (headers["Template"], headers["Message"]) == ("yes", "{{.text}}")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("ftp://host/x", "cannot be sent by ftp"),
        ("slack://T0/B0", "cannot be sent by slack"),
        ("https://", "has no host"),
        ("https://host:port/x", "has no host"),
        ("https://host/a b", "characters that an address cannot have"),
        ("no-such-command --now", "there is no command 'no-such-command'"),
        ("./script", "there is no command './script'"),
        ("echo 'x", "cannot be read"),
    ],
)
def test_what_takes_no_notices_is_refused(setting: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/bin/sh\n")  # not executable
    with pytest.raises(UserError) as refused:
        parse_target(setting, tmp_path)
    assert words in str(refused.value)


def delivered(target: Any, notice: Notice = NOTICE) -> list[str]:
    warned: list[str] = []
    courier = Courier(target, warned.append)
    courier.send(notice)
    courier.wait()
    return warned


def test_a_command_gets_json_and_its_failures_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "my notify"
    script.write_text('#!/bin/sh\n[ "$1" = "a b" ] && cat > got.json\n')
    script.chmod(0o755)
    assert delivered(parse_target("'./my notify' 'a b'", tmp_path)) == []
    assert json.loads((tmp_path / "got.json").read_text()) == NOTICE.as_json()

    [warning] = delivered(parse_target("sh -c 'echo one; echo why >&2; exit 3'", tmp_path))
    assert warning == (
        "A notice (Workflow failed) could not be delivered: sh ended with exit code 3: why."
    )
    monkeypatch.setattr(targets, "COMMAND_WAIT_S", 0.5)
    [warning] = delivered(parse_target("sh -c 'sleep 1000 & wait'", tmp_path))
    assert "sh did not end within 0 s and was ended" in warning
    [warning] = delivered(CommandTarget(["/no/such"], tmp_path))
    assert "such cannot be run (No such file or directory)" in warning


class Hook(BaseHTTPRequestHandler):
    got: ClassVar[list[tuple[str, Any]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.path, json.loads(body)))
        code = int(self.path.rpartition("/")[2])
        self.send_response(code)
        self.send_header("Location", "/elsewhere/200")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[str]:
    Hook.got.clear()
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_address_gets_a_post_and_is_not_shown(hook: str, tmp_path: Path) -> None:
    assert delivered(parse_target(f"{hook}/hooks/{SECRET}/200", tmp_path)) == []
    assert Hook.got == [(f"/hooks/{SECRET}/200", {"text": TEXT})]

    for code in (302, 404, 500):
        [warning] = delivered(parse_target(f"{hook}/{SECRET}/{code}", tmp_path))
        assert warning.endswith(f"could not be delivered: 127.0.0.1 answered {code}.")
    assert len(Hook.got) == 4  # no redirect was followed

    for host in ("127.0.0.1:9", "no-such-host.invalid"):
        target = parse_target(f"https://me:{SECRET[3:5]}word@{host}/{SECRET}", tmp_path)
        [warning] = delivered(target)
        assert f"{host.partition(':')[0]} cannot be reached" in warning
        assert SECRET not in warning + repr(target)
        assert "word" not in warning + repr(target)


def test_the_desktop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [warning] = delivered(parse_target("desktop", tmp_path))
    assert "there is neither notify-send nor osascript on this machine" in warning
    command = tmp_path / "notify-send"
    command.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > shown.txt\n')
    command.chmod(0o755)
    assert delivered(parse_target("desktop", tmp_path)) == []
    shown = (tmp_path / "shown.txt").read_text().splitlines()
    assert shown == ["--app-name=Snakemake", "--", "Workflow failed", TEXT]
