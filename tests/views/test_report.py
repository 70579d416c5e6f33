"""The report as a file: what is in it, that names are only names, and what it overwrites."""

import json
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from csv import DictReader
from hashlib import sha256
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from snakemake_executor_plugin_mantik.cli.report import report
from snakemake_executor_plugin_mantik.common.errors import JournalError, UserError
from snakemake_executor_plugin_mantik.journal import Asked, AttemptRecord, Journal, Used
from snakemake_executor_plugin_mantik.views.report import MOST_FAILURES, MOST_JOBS, MOST_RULES

STATE = Path(".snakemake", "mantik")
NASTY = "<script>alert(1)</script>&\"' {{ x }} {% y %} \x1b[31m ]]> http://evil.example/"
HTML = "mantik-report.html"
URL = "https://hpc1.example/rest"
CONFIG = f"""
UnicoreApiUrl: {URL}
Resources: {{Queue: batch, Runtime: 1h}}
Environment: {{Variables: {{API_KEY: k3y-one}}}}
Environments: {{gpu: {{Variables: {{API_KEY: k3y-two}}}}}}
"""


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    """The journal of a workflow in the current directory, in which a Snakemake runs."""
    monkeypatch.chdir(tmp_path)
    with closing(Journal(tmp_path / STATE)) as opened:
        opened.set_site("hpc1", URL, "/ws", "p")
        yield opened


ASKED = Asked(cores=4, memory_mib=8192)


def sent(
    journal: Journal, job: str, rule: str = "train", asked: Asked = ASKED, **more: Any
) -> AttemptRecord:
    record = journal.new_attempt(
        site="hpc1", job=job, rule=rule, name=f"{rule} x={job}", fingerprint="f", **more
    )
    journal.submitting(record.id, "batch", 7200, asked)
    journal.submitted(record.id, f"site-{job}")
    return record


def succeed(journal: Journal, record: AttemptRecord) -> None:
    used = Used(cpu_s=100.0, memory_bytes=1 << 30)
    journal.ended(record.id, "succeeded", waited=5.0, ran=60.0, log="", used=used)
    journal.done(record.id)


def fail(journal: Journal, record: AttemptRecord, words: str = "it", log: str = "") -> None:
    journal.ended(
        record.id, f"failed: {words}", waited=None, ran=None, log=log, reason="exit_code",
        used=Used(exit_code=7),
    )  # fmt: skip


def page() -> ElementTree.Element:
    """The report, which has to be well-formed."""
    report()
    text = Path(HTML).read_text()
    return ElementTree.fromstring(text.partition("\n")[2])


def told(part: ElementTree.Element) -> str:
    return " ".join("".join(part.itertext()).split())


def section(root: ElementTree.Element, name: str) -> str:
    [found] = [s for s in root.iter("section") if s.get("aria-labelledby") == name]
    return told(found)


def numbers(capsys: pytest.CaptureFixture[str], *, every: bool = False) -> dict[str, object]:
    capsys.readouterr()
    report(as_json=True, every=every)
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_all_kinds_of_attempts_are_shown(
    journal: Journal,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2-hunter2")
    (tmp_path / "site.yaml").write_text(CONFIG)
    journal.set_site("hpc1", URL, "/ws", "p", str(tmp_path / "site.yaml"))
    pipeline = {
        "jobs": [
            {"id": each, "name": each, "rule": rule, "wildcards": {}, "needed": True, "done": False}
            for each, rule in (("a", "train"), ("m1", "one"), ("m2", "two"), ("all", "all"))
        ],
        "edges": [("a", "all"), ("m1", "m2")],
        "rule_edges": [],
    }
    journal.begin_run({"name": "digits", "command": "snakemake -j", "python": "3.13"}, pipeline)
    first = sent(journal, "a")
    fail(journal, first, "the node died")
    succeed(journal, sent(journal, "a"))
    group = sent(journal, "g", "group", members={"m1": "one", "m2": "two"})
    gpu = sent(journal, "gpu", "tune", Asked(cores=4, gpus=2))
    seen = Used(gpu_busy=37.4)
    journal.ended(gpu.id, "succeeded", waited=1.0, ran=60.0, log="", used=seen)
    log = tmp_path / "a.log"
    log.write_text(
        "line\n" * 5000 + "password hunter2-hunter2, keys k3y-one, k3y-two\nKeyError: <x>\n"
    )
    fail(journal, group, "exit code 3, k3y-two", str(log))
    segment = sent(journal, "s", "long", segment=2, segments=10)
    journal.ended(segment.id, "goes on (time limit)", waited=1.0, ran=7200.0, log="")
    journal.done(segment.id)
    fourth = sent(journal, "s", "long", segment=3, segments=10, follows=segment.id)
    sent(journal, "s", "long", segment=4, segments=10, follows=fourth.id)
    ahead = sent(journal, "b", makers={"a.txt": "elsewhere"})
    journal.started(sent(journal, "c").id, ahead.created)
    journal.left_behind(sent(journal, "d").id, "/old")

    root = page()
    header = told(next(root.iter("header")))
    assert header.startswith("digits It is still going on: this is a snapshot.")
    assert "1 attempt repeated" in header
    failures = section(root, "failures")
    assert "group x=g exit code: exit code 3, *** at hpc1, attempt 1; the end of a.log" in failures
    assert "KeyError: <x>" in failures
    assert "password ***, keys ***, ***" in failures
    assert not re.search("hunter2|k3y", Path(HTML).read_text())
    assert failures.count("line") < 40
    assert "the node died" in failures
    bars = section(root, "timeline")
    for part in ("long x=s (segment 3 of 10)", "long x=s (segment 4 of 10)", "left in /old"):
        assert part in bars
    assert "segment 5" not in bars, "it waits behind the fourth"
    boxes = section(root, "pipeline")
    for part in ("one", "two", "all", "✗ failed", "✓ succeeded", "▶ running", "… queued"):
        assert part in boxes
    assert "train" in section(root, "resources")
    assert "1.0 GiB of 8.0 GiB" in section(root, "resources")
    assert "37 % of 2 GPUs" in section(root, "resources")
    environment = section(root, "environment")
    for part in ("snakemake -j", "3.13", "https://hpc1.example/rest", "queues batch"):
        assert part in environment
    assert not capsys.readouterr().err
    (tmp_path / "site.yaml").unlink()
    report()
    assert "site.yaml are not masked" in capsys.readouterr().err


def test_jobs_are_listed_and_those_with_equal_ends_share_a_box(
    journal: Journal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in range(3):
        succeed(journal, sent(journal, f"m{n}", "make_it"))
        log = tmp_path / f"{n}.log"
        log.write_text(f"step {n}\nTraceback (most recent call last):\nKeyError at /v1/a.py\n")
        fail(journal, sent(journal, f"{n}"), f"exit code 7 (hpc1, site-{n})", str(log))
    for other in ("a", "b"):
        (tmp_path / other).write_text(f"no file in/{other}.txt")
        fail(journal, sent(journal, other), log=str(tmp_path / other))
    root = page()
    both = [told(article) for article in root.iter("article")]
    assert "3 jobs with the same end train x=0 · train x=1 · train x=2 exit code: " in both[0]
    assert "step 0" in both[0]
    assert both[1].startswith("2 jobs with the same end train x=a · train x=b")
    assert "1.0 GiB · 1.0 GiB · 1.0 GiB" in section(root, "resources"), "least, median and most"
    listed = [[told(cell) for cell in row] for row in root.iter("tr")]
    assert ["train x=0", "✗failed", "hpc1", "1", "", "", "", "4", "", "7"] in listed
    done = ["make_it x=m0", "✓succeeded", "hpc1", "1", "", "5.0 s", "1 min", "4", "1.0 GiB", ""]
    assert done in listed
    assert "make_<wbr/>it x=m0" in Path(HTML).read_text(), "a name may break here only"
    capsys.readouterr()
    report(as_csv=True)
    rows = list(DictReader(capsys.readouterr().out.splitlines()))
    assert [row["exit_code"] for row in rows] == ["", "7", "", "7", "", "7", "7", "7"]
    assert {"job": "make_it x=m0", "memory_used": f"{1 << 30}", "ran": "60.0"}.items() <= rows[
        0
    ].items()


def test_names_are_only_names_and_nothing_is_fetched(journal: Journal, tmp_path: Path) -> None:
    journal.begin_run({"name": NASTY, "command": NASTY}, {})
    (tmp_path / "log").write_text(NASTY)
    for n in range(3):
        fail(journal, sent(journal, f"{NASTY}{n}", NASTY), NASTY, str(tmp_path / "log"))
    journal.set_site("hpc1", NASTY, NASTY, "p", NASTY)
    root = page()
    text = Path(HTML).read_text()
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)
    assert "alert(1)" in told(root)
    [script] = root.iter("script")
    allowed = b64encode(sha256((script.text or "").encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}'" in text
    assert "alert" not in (script.text or "")
    known = {"link", "img", "image", "iframe", "object", "form", "use", "base"}
    assert not [e for e in root.iter() if e.tag.rpartition("}")[2] in known]
    for element in root.iter():
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            if name == "href":
                assert value.startswith("#")
    assert not re.search(r"url\((?!#)|@import", text)
    assert "default-src 'none'" in text


def test_each_table_has_headings_and_each_picture_a_name(journal: Journal) -> None:
    fail(journal, sent(journal, "a"))
    root = page()
    for table in root.iter("table"):
        assert {th.get("scope") for th in table.iter("th")} <= {"col", "row"}
        assert table.find("thead") is not None
    svgs = list(root.iter("{http://www.w3.org/2000/svg}svg"))
    assert [svg.get("aria-label") for svg in svgs] == ["Pipeline", "Timeline"]
    linked = {a.get("href") for a in root.iter("a")}
    assert linked <= {f"#{h2.get('id')}" for h2 in root.iter("h2")}


def test_ten_thousand_jobs_make_a_small_file(journal: Journal) -> None:
    journal.begin_run({}, {"jobs": [], "edges": [], "rule_edges": [("rule0", "rule1")]})
    first = sent(journal, "first", "rule0")
    with journal.write() as db:
        columns = "site, place, bucket, job, name, fingerprint, state, outcome, created, submitted"
        for n in range(10_000):
            failed = n % 100 == 0
            db.execute(
                f"INSERT INTO attempts (id, rule, {columns}, finished, waited, ran, asked, reason)"
                f" SELECT ?, ?, site, place, bucket, ?, ?, 'f', 'done', ?, created, submitted,"
                " created + ?, 9, 60, asked, ? FROM attempts WHERE id = ?",
                (f"{n}", f"rule{n % (MOST_RULES + 5)}", f"{n}", f"job {n}",
                 f"failed: {n}" if failed else "succeeded", n, "exit_code" if failed else "",
                 first.id),
            )  # fmt: skip
    root = page()
    assert len(Path(HTML).read_bytes()) < 1_000_000
    failures = section(root, "failures")
    assert f"100 jobs have failed with 100 different ends, of which {MOST_FAILURES}" in failures
    assert len([a for a in root.iter("article") if a.get("class") == "failure"]) == MOST_FAILURES
    assert "5 more rules" in section(root, "resources")
    listed = section(root, "jobs")
    assert f"{MOST_JOBS:,} of 10,001 attempts are here" in listed
    assert listed.count("✗failed") == 100


def test_the_last_run_is_shown_unless_all_are_wanted(
    journal: Journal, capsys: pytest.CaptureFixture[str]
) -> None:
    journal.begin_run({}, {})
    succeed(journal, sent(journal, "a"))
    journal.end_run("finished", {})
    journal.begin_run({}, {})
    assert numbers(capsys)["jobs"] == {"succeeded": 1}, "the last one with jobs"
    succeed(journal, sent(journal, "b"))
    succeed(journal, sent(journal, "c"))
    assert numbers(capsys)["jobs"] == {"succeeded": 2}
    assert numbers(capsys, every=True)["jobs"] == {"succeeded": 3}


def test_only_reports_are_overwritten(journal: Journal, tmp_path: Path) -> None:
    succeed(journal, sent(journal, "a"))
    report()
    report()
    other = tmp_path / "notes.html"
    other.write_text("mine")
    with pytest.raises(UserError, match="is no report"):
        report(output=other)
    assert other.read_text() == "mine"
    report(output=other, force=True)
    assert other.read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(UserError, match="cannot be written"):
        report(output=tmp_path / HTML / "below")
    assert not list(tmp_path.glob(".*.html*")), "no temporary file is left"
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/config.yaml").write_text("jobs: 1\n")
    with pytest.raises(UserError, match="exists already"):
        report(profile=tmp_path / "profile")
    assert (tmp_path / "profile/config.yaml").read_text() == "jobs: 1\n"


def test_without_a_journal_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no job has been submitted"):
        report(tmp_path, output=tmp_path / HTML)


@pytest.mark.parametrize("number", [3, 2])
def test_snakemake_takes_the_profile(journal: Journal, tmp_path: Path, number: int) -> None:
    for n in range(number):
        succeed(journal, sent(journal, f"{n}"))
    report(profile=tmp_path / "advised")
    (tmp_path / "Snakefile").write_text(
        "rule train:\n output: 'x'\n resources: mem_mb=8192, runtime=120\n shell: 'touch x'\n"
    )
    command = ["snakemake", "--profile", "advised", "--cores", "1", "-n"]
    ended = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, text=True, capture_output=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    wanted = "mem_mb=1536" if number == 3 else "mem_mb=8192"
    assert wanted in ended.stdout + ended.stderr
    assert ("runtime=10" if number == 3 else "runtime=120") in ended.stdout + ended.stderr
