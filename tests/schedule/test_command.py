"""`smk-mantik schedule`: what is typed, what is said; mistakes, files of others, the unit."""

import json
import os
import shutil
import sqlite3
import subprocess
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.cli import main
from snakemake_executor_plugin_mantik.cli.schedule import systemd_quote, systemd_unit
from snakemake_executor_plugin_mantik.common.state_directory import data_home
from snakemake_executor_plugin_mantik.runs.directories import (
    RunDirectory,
    RunRequest,
    runs_home,
)
from snakemake_executor_plugin_mantik.runs.schedule_store import SCHEDULES_FILE, ScheduleStore
from snakemake_executor_plugin_mantik.runs.scheduler import mark_present
from snakemake_executor_plugin_mantik.runs.schedules import FiringState

RUN = "0123456789abcdef0123456789abcdef"


class Command:
    """Types `smk-mantik schedule …`, as a user who has a run."""

    def __init__(self, patch: pytest.MonkeyPatch, read: Any) -> None:
        self._patch, self._read = patch, read

    def say(self, *words: str, code: int = 0) -> str:
        self._patch.setattr("sys.argv", ["smk-mantik", "schedule", *words])
        ended: object = 0
        try:
            main()
        except SystemExit as end:
            ended = end.code or 0
        said = self._read.readouterr()
        assert ended == code, said
        return str(said.err if code else said.out)

    def json(self, *words: str) -> Any:
        return json.loads(self.say(*words, "--json"))


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "it's here" / "data"))
    monkeypatch.delenv("MANTIK_RUNS", raising=False)
    directory = RunDirectory(runs_home() / RUN)
    directory.path.mkdir(parents=True)
    nothing = RunRequest(
        uri="churn", version="", commit="", folder="project/churn", entry_point="main",
        parameters={}, values={}, extra={}, site="hpc1", config="", config_source="", account="",
        tracking_uri="sqlite:///x.db", experiment_id="0", experiment="Default", name="first",
        created=1.0, run_id=RUN,
    )  # fmt: skip
    directory.write_request(nothing)
    return Command(monkeypatch, capsys)


def test_a_schedule_from_its_making_to_its_removal(command: Command) -> None:
    assert "There are no schedules" in command.say("list")
    said = command.say("add", "weekly", "--run", "first", "--cron", "0 6 * * 1", "--tz",
                       "Europe/Berlin", "--until", "2999-03-31")  # fmt: skip
    assert f"weekly: run {RUN}, next due Mon " in said
    assert "No scheduler is running" in said
    made = command.json("add", "nightly", "--run", RUN[:6], "--cron", "@daily", "--tz", "UTC",
                        "--account", "abc", "--missed", "once")  # fmt: skip
    assert {k: v for k, v in made.items() if k != "next"} == {
        "name": "nightly", "run": RUN, "cron": "@daily", "tz": "UTC", "until": None, "site": None,
        "account": "abc", "missed": "once", "last": None,
    }  # fmt: skip
    due = [
        datetime.fromisoformat(each["due"]) for each in command.json("list", "nightly", "-n", "3")
    ]
    assert [later - due[0] for later in due] == [timedelta(days=n) for n in range(3)]
    both = command.say("list", "-n", "8")
    assert both.count("nightly") >= 6
    assert "weekly" in both
    command.say("edit", "weekly", "--cron", "0 7 * * 2", "--until", "never", "--tz", "UTC")
    shown = command.say("list", "weekly")
    assert "cron:     0 7 * * 2  (UTC)" in shown
    assert "until:    never" in shown
    assert [each["name"] for each in command.json("list")] == ["nightly", "weekly"]
    with mark_present(data_home()):
        assert "No scheduler" not in command.say("list")
    assert command.say("remove", "weekly") == "weekly is removed.\n"
    assert "Use one of nightly" in command.say("list", "weekly", code=2)


def test_another_site(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alps.yaml").write_text(
        "UnicoreApiUrl: https://example.org/rest/core\nResources: {Queue: batch}\n"
    )
    made = command.json("add", "s", "--run", "first", "--cron", "@daily", "--site", "alps.yaml")
    assert made["site"] == f"alps={tmp_path}/alps.yaml"
    assert f"site:     alps={tmp_path}/alps.yaml" in command.say("list", "s")
    assert command.json("edit", "s", "--site", "")["site"] is None


def test_what_became_of_due_times_is_told(command: Command) -> None:
    command.say("add", "s", "--run", "first", "--cron", "0 6 * * *", "--tz", "Europe/Berlin")
    store = ScheduleStore(data_home())
    schedule = store.get("s")
    assert schedule is not None
    day = int(datetime.fromisoformat("2999-01-01T05:00Z").timestamp())
    rows = [(day + n * 86400, FiringState.FIRING, "") for n in range(-1, 4)]
    rows.append((day + 4 * 86400, FiringState.MISSED, "no scheduler was running"))
    assert store.claim(schedule, rows[-1][0], rows, day)
    first, fired, failed, interrupted, waiting = store.open()
    store.fired(first, RUN, day)
    store.fired(fired, "a" * 32, day)
    store.put_off(failed, "MLflow: [bold]no\x1b[31m answer.", day, give_up=True)
    store.begin(interrupted, day, day + 60)
    store.begin(waiting, day, day + 120)
    store.put_off(waiting, "no answer", day, give_up=False)
    store.close()
    lines = command.say("list", "s").splitlines()
    told = [line.partition("CET  ")[2].strip() for line in lines if "CET  " in line]
    assert told == [
        "missed: no scheduler was running",
        "not submitted yet, again after Tue 2999-01-01 06:02 CET: no answer",
        "its submission was interrupted, and continues after Tue 2999-01-01 06:01 CET",
        "not submitted, given up: MLflow: [bold]no[31m answer.",
        f"run {'a' * 32} (not here any more)",
        f"run {RUN} (its controller is gone: smk-mantik runs continue)",
    ]
    shown = command.json("list", "s")
    assert [each["state"] for each in shown["history"]] == [
        "missed", "firing", "firing", "failed", "fired", "fired",
    ]  # fmt: skip
    assert shown["last"]["due"] == "2999-01-05T06:00:00+01:00"
    assert "missed: no scheduler" in command.say("list")
    assert "may have started" in command.say("remove", "s")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--run", "nope"], "no run 'nope' was submitted from here"),
        (["--cron", "0 25 * * *"], "the crontab line '0 25 * * *': bad hour"),
        (["--cron", "0 0 */31 2 1#2"], "'0 0 */31 2 1#2' is never due"),
        (["--tz", "Europe/Berln"], "there is no time zone 'Europe/Berln'. Use Europe/Berlin"),
        (["--tz", "../../etc/passwd"], "there is no time zone"),
        (["--until", "2020-01-01"], "2020-01-01 is in the past"),
        (["--until", "31.3.2027"], "'31.3.2027' is not a date"),
        (["--until", "2027-02-30"], "'2027-02-30' is not a date"),
        (["--site", "alps=nowhere.yaml"], "nowhere.yaml"),
        (["--account", "a b"], "--account: 'a b' is not a valid account name"),
        (
            ["--cron", "0 0 29 2 *", "--until", "2027-12-31"],
            "it would never be due: first on Tue 2028",
        ),
    ],
)
def test_mistakes_are_told_at_once(command: Command, words: list[str], told: str) -> None:
    good = ["--run", "first", "--cron", "0 6 * * 1", "--tz", "UTC"]
    assert told in command.say("add", "bad", *good, *words, code=2)
    command.say("add", "good", *good)
    assert told in command.say("edit", "good", *words, code=2)
    (left,) = command.json("list")
    assert (left["name"], left["cron"], left["run"]) == ("good", "0 6 * * 1", RUN)
    assert "there is a schedule 'good' already" in command.say("add", "good", *good, code=2)
    assert "is not a valid schedule name" in command.say("add", "a b", *good, code=2)
    assert "there is nothing to change" in command.say("edit", "good", code=2)
    both = command.say("add", "x/y", *good, "--cron", "* * *", "--run", "nope", code=2)
    assert "3 mistakes" in both


def test_the_store_is_private_and_one_of_another_version_is_refused(command: Command) -> None:
    command.say("add", "s", "--run", "first", "--cron", "0 6 * * *")
    path = data_home() / SCHEDULES_FILE
    assert path.stat().st_mode & 0o077 == 0
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    assert "the file has version 99" in command.say("list", code=2)
    path.write_bytes(b"this is no data base" * 100)
    assert "cannot use the schedules" in command.say("list", code=2)


def test_the_unit_is_one_that_systemd_reads(tmp_path: Path) -> None:
    environ = {
        "XDG_DATA_HOME": "/a 100% \"good\" \\ $HOME",
        "PATH": "/usr/bin", "MLFLOW_TRACKING_TOKEN": "t0k",
        "MLFLOW_TRACKING_URI": "https://me:secret@mlflow.example.org",
    }  # fmt: skip
    text = systemd_unit(environ)
    assert "secret" not in text
    assert "t0k" not in text
    assert 'Environment="XDG_DATA_HOME=/a 100%% \\"good\\" \\\\ $HOME"' in text
    assert "KillMode=process" in text
    assert systemd_quote("a") == '"a"'
    if shutil.which("systemd-analyze") is None:
        return
    path = tmp_path / "mantik-schedule.service"
    path.write_text(text)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(path)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert path.name not in checked.stderr, checked.stderr
