"""The journal: what is written is there, whoever dies, and nothing goes back."""

import itertools
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snakemake_executor_plugin_mantik.common.errors import JournalError, JournalLocked
from snakemake_executor_plugin_mantik.connections.connect import workspace_name
from snakemake_executor_plugin_mantik.journal import (
    BUCKET_SIZE,
    AttemptRecord,
    AttemptState,
    EventKind,
    FileRecord,
    Journal,
    RemoteOutput,
    SiteRecord,
    UndeclaredFile,
    decode_identity,
    encode_identity,
    read_events,
    read_history,
    read_undeclared,
)
from snakemake_executor_plugin_mantik.journal.schema import VERSION


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path)) as opened:
        yield opened


def new_attempt(
    journal: Journal, job: str = "job", site: str = "hpc1", makers: Mapping[str, str] | None = None
) -> AttemptRecord:
    return journal.new_attempt(
        site=site, job=job, rule="r", name=f"r {job}", fingerprint="f", makers=makers
    )


def advance(journal: Journal, attempt_id: str, state: AttemptState) -> None:
    match state:
        case AttemptState.PLANNED:
            pass
        case AttemptState.SUBMITTING:
            journal.submitting(attempt_id, "batch")
        case AttemptState.SUBMITTED:
            journal.submitted(attempt_id, "17")
        case AttemptState.ENDED:
            journal.ended(attempt_id, "succeeded", waited=1, ran=2, log="")
        case AttemptState.DONE:
            journal.done(attempt_id)
        case AttemptState.ABANDONED:
            journal.abandoned(attempt_id, "cancelled")


def state_of(journal: Journal, attempt_id: str) -> AttemptState:
    return next(r.state for r in read_history(journal.path.parent) if r.id == attempt_id)


@pytest.mark.parametrize("states", list(itertools.product(AttemptState, AttemptState)))
def test_states_never_go_back(journal: Journal, states: tuple[AttemptState, AttemptState]) -> None:
    order = list(AttemptState)
    record = new_attempt(journal)
    for state in states:
        advance(journal, record.id, state)
    assert state_of(journal, record.id) == max(states, key=order.index)


def test_what_ended_keeps_its_outcome(journal: Journal) -> None:
    record = new_attempt(journal)
    advance(journal, record.id, AttemptState.ABANDONED)
    advance(journal, record.id, AttemptState.ENDED)
    assert [r.outcome for r in read_history(journal.path.parent)] == ["cancelled"]


@pytest.mark.parametrize("kept", [True, False])
def test_an_attempt_ends_once_in_the_log(journal: Journal, kept: bool) -> None:
    """When its results are here; if they are given up later, it has ended all the same."""
    record = new_attempt(journal)
    end = {"how": "finished", "successor": ""}
    if kept:  # they could not be fetched at first
        journal.ended(record.id, "succeeded", waited=1, ran=2, log="")
    journal.ended(record.id, "succeeded", waited=1, ran=2, log="", end=end)
    journal.abandoned(record.id, "cancelled", end={"how": "killed", "successor": ""})
    ends = [e.data for e in read_events(journal.db) if e.kind is EventKind.ENDED]
    assert [facts["how"] for facts in ends] == ["finished"]


def test_a_content_outnumbers_what_its_jobs_have_found_instead(journal: Journal) -> None:
    files, content = journal.files, "0" * 64
    files.outnumber("place", {"data": 0})
    assert files.number("place", "data", content) == 0
    for _ in range(3):  # its jobs have all found the same one
        files.outnumber("place", {"data": 700})
        assert files.number("place", "data", content, 5) == 701


def test_open_attempts_are_those_of_the_job_that_are_not_final(journal: Journal) -> None:
    records = [new_attempt(journal) for _ in AttemptState]
    new_attempt(journal, "other")
    for record, state in zip(records, AttemptState, strict=True):
        advance(journal, record.id, state)
    assert [r.id for r in journal.open_attempts("job")] == [r.id for r in records[:4]]
    assert len(journal.all_open_attempts()) == 5


def test_sites_where_a_job_was_tried_in_vain_count_until_it_has_ended(journal: Journal) -> None:
    def leave(site: str, outcome: str) -> list[str]:
        journal.abandoned(new_attempt(journal, site=site).id, outcome)
        return journal.tried_sites("job")

    assert leave("a", "failed: given up before it started") == ["a"]
    assert leave("b", "failed: the scheduler took no more jobs") == ["a"]
    assert leave("b", "failed: given up before it started") == ["b", "a"]
    new_attempt(journal, site="c")
    assert journal.tried_sites("job") == ["b", "a"]
    assert leave("b", "cancelled") == []
    assert leave("a", "failed: given up before it started") == ["a"]
    failed = new_attempt(journal, site="b")
    journal.ended(failed.id, "failed: exit code 1", waited=1, ran=2, log="")
    journal.done(failed.id)
    assert journal.tried_sites("job") == journal.tried_sites("another") == []


def test_buckets_are_filled_one_after_the_other(journal: Journal) -> None:
    buckets = [new_attempt(journal, str(n)).bucket for n in range(BUCKET_SIZE + 2)]
    first, second = dict.fromkeys(buckets)
    assert buckets == [first] * BUCKET_SIZE + [second] * 2
    assert new_attempt(journal, site="other").bucket not in buckets


def test_retired_buckets_are_never_used_again(journal: Journal) -> None:
    journal.set_site("hpc1", "url", "/ws", "p")
    journal.set_site("same", "url", "/ws", "p")
    journal.set_site("other", "url", "/ws2", "q")
    assert journal.retire_buckets("p") == []
    first = new_attempt(journal).bucket
    assert journal.retire_buckets("p") == [first]
    second = new_attempt(journal).bucket
    assert second != first
    assert new_attempt(journal, site="same").bucket == second, "they share the directory"
    assert new_attempt(journal, site="other").bucket not in (first, second)
    journal.bucket_gone("p", first)
    assert journal.retire_buckets("p") == [second]
    journal.bucket_gone("p", second)
    assert journal.retire_buckets("p") == []


def test_another_workspace_is_begun_with_nothing(journal: Journal) -> None:
    journal.set_site("hpc1", "url", "/ws", "p")
    record = new_attempt(journal)
    journal.files.set_remote_files("p", [FileRecord("a", 1, "x")])
    journal.files.begin_bundle("p", "b", "", [FileRecord("c", 1, "x")])
    assert journal.set_site("hpc1", "url", "/ws", "p") == []
    assert journal.files.remote_file("p", "a") is not None

    assert [r.id for r in journal.set_site("hpc1", "url", "/elsewhere", "q")] == [record.id]

    journal.doubt("p")
    assert journal.files.bundles("p") == {}
    assert journal.files.remote_files("q") == []
    assert journal.files.bundles("q") == {}
    assert journal.all_open_attempts() == []


def test_every_directory_is_a_workflow_even_if_its_journal_is_lost(tmp_path: Path) -> None:
    names = []
    for folder in ("a", "a", "b"):
        with closing(Journal(tmp_path / folder)) as journal:
            names.append(journal.workflow)
    assert names[0] == names[1] != names[2]
    for path in (tmp_path / "a").glob("journal*"):
        path.unlink()
    with closing(Journal(tmp_path / "a")) as journal:
        assert journal.workflow == names[0]


def test_a_moved_directory_is_the_same_workflow_and_a_copy_has_workspaces_of_its_own(
    tmp_path: Path,
) -> None:
    def opened(name: str) -> tuple[str, str, str]:
        with closing(Journal(tmp_path / name / ".snakemake/mantik")) as journal:
            said = journal.remark
            return journal.instance, workspace_name(journal.home, journal.workflow), said

    made = opened("flow")
    (tmp_path / "flow").rename(tmp_path / "renamed")
    assert opened("renamed") == made
    shutil.copytree(tmp_path / "renamed", tmp_path / "copy")
    instance, workspace, said = opened("copy")
    assert instance != made[0]
    assert workspace != made[1]
    assert f"is a copy of {tmp_path}/renamed" in said
    assert opened("copy") == (instance, workspace, "")
    shutil.rmtree(tmp_path / "renamed")  # it was moved to another file system, maybe
    (tmp_path / "copy").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "moved")
    other, same, said = opened("elsewhere")
    assert other != instance, "the user is asked whether the first one has ended"
    assert (same, said) == (workspace, "")


@pytest.mark.parametrize("how", ["missing", "empty", "older than its spare"])
def test_what_only_the_spare_knows_is_restored(tmp_path: Path, how: str) -> None:
    """A power cut may leave a journal with nothing in it, or without what was written last."""
    path = tmp_path / "journal.sqlite"
    Journal(tmp_path).close()
    old = path.read_bytes()
    with closing(Journal(tmp_path)) as journal:
        name = journal.workflow, journal.instance
        journal.set_site("hpc1", "url", "/ws", "p", "/a/config.yaml")
        journal.take_number("p", 7)
        sent, _ = new_attempt(journal), new_attempt(journal, "planned")
        journal.submitting(sent.id, "batch")
    path.unlink()
    if how != "missing":
        path.write_bytes(b"" if how == "empty" else old)
    with closing(Journal(tmp_path)) as journal:
        assert f"The journal was {how}." in journal.remark
        assert (journal.workflow, journal.instance) == name
        assert [r.id for r in journal.all_open_attempts()] == [sent.id]
        assert (journal.number("p"), journal.was_restored("p")) == (7, True)
    with closing(Journal(tmp_path)) as journal:
        assert journal.remark == ""


def test_a_submission_is_on_disk_before_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite syncs its log at each commit where `synchronous` is FULL (2), and not where it is
    NORMAL (1); of the spare Python itself is asked."""
    synced: list[str] = []
    fsync = os.fsync
    with closing(Journal(tmp_path)) as journal:
        record = new_attempt(journal)
        db = journal.db
        write, modes = journal.write, list[int]()

        @contextmanager
        def written() -> Iterator[sqlite3.Connection]:
            with write() as connection:
                yield connection
                modes.append(db.execute("PRAGMA synchronous").fetchone()[0])

        def noted(descriptor: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        monkeypatch.setattr(journal, "write", written)
        monkeypatch.setattr(os, "fsync", noted)
        assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        journal.submitting(record.id, "q")
        assert modes == [2]
        assert [Path(path).name for path in synced] == ["journal.spare"]
        journal.submitted(record.id, "1")
        assert modes == [2, 1], "what the site can tell need not be"


def test_the_first_acknowledgement_counts(journal: Journal) -> None:
    record = new_attempt(journal)
    journal.submitting(record.id, "q")
    journal.submitted(record.id, "1", 100.0)
    journal.submitted(record.id, "2", 200.0)
    [found] = journal.attempts([record.id])
    assert (found.sent, set(found.site_jobs)) == (100.0, {"1", "2"})


def test_attempts_that_wait_for_others_are_found(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        first = new_attempt(journal)
        second = new_attempt(journal, job="b", makers={"d/é": first.id, "e": first.id})
        third = new_attempt(journal, job="c", makers={"f": second.id})
        assert [r.id for r in journal.dependents(first.id)] == [second.id]
        assert [r.id for r in journal.dependents(second.id)] == [third.id]
        assert journal.dependents(third.id) == []
        asked: list[str] = []
        journal.db.set_trace_callback(asked.append)
        journal.dependents(first.id)
        journal.db.set_trace_callback(None)
        plan = journal.db.execute(f"EXPLAIN QUERY PLAN {asked[0]}").fetchall()
        assert any("USING INDEX attempts_after" in row["detail"] for row in plan), (
            "all attempts are read"
        )
        assert [r.id for r in journal.open_presubmitted()] == [second.id, third.id]
        assert journal.attempts([second.id])[0].makers == {"d/é": first.id, "e": first.id}
        journal.note_made(first.id, [FileRecord("d/é/x", 1, "1"), FileRecord("e", 2, "2")])
        journal.note_made(third.id, [FileRecord("g", 1, "3")])
        assert journal.made(first.id) == {"d/é/x": "1", "e": "2"}
        assert journal.made(third.id) == {}, "nobody reads it"
        journal.abandoned(second.id, "cancelled")
        assert journal.dependents(first.id) == []
    with closing(Journal(tmp_path)) as journal:
        assert journal.made(first.id) == {"d/é/x": "1", "e": "2"}, "one is still open"
        journal.done(third.id)
    with closing(Journal(tmp_path)) as journal:
        assert journal.made(first.id) == {}


def test_what_a_job_read_is_known_as_long_as_it_can_go_on(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        first = new_attempt(journal)
        second = new_attempt(journal, job="b", makers={"e": first.id})
        journal.note_made(first.id, [FileRecord("e", 2, "2")])
        journal.segments.keep_checkpoint(second.id, "listed")
        journal.abandoned(second.id, "failed")
    with closing(Journal(tmp_path)) as journal:
        assert journal.made(first.id) == {"e": "2"}
        third = journal.new_attempt(
            site="hpc1", job="b", rule="r", name="r b", fingerprint="f", follows=second.id
        )
        journal.ended(third.id, "succeeded", waited=1.0, ran=1.0, log="")
        journal.done(third.id)
    with closing(Journal(tmp_path)) as journal:
        assert journal.made(first.id) == {}


def test_checksum_is_known_while_size_and_time_are_the_same(journal: Journal) -> None:
    key = ("/a", 3, 100, 101, 7)
    journal.files.set_local_files([(*key, "x")])
    assert journal.files.local_file(*key) == "x"
    for number in range(1, len(key)):
        other = [part + (n == number) if isinstance(part, int) else part
                 for n, part in enumerate(key)]  # fmt: skip
        assert journal.files.local_file(*other) is None  # type: ignore[arg-type]


def test_lock_refuses_a_second_controller(journal: Journal) -> None:
    with pytest.raises(JournalLocked, match="another Snakemake") as error:
        Journal(journal.path.parent)
    assert f"process {os.getpid()} on " in str(error.value)


def test_other_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    for _ in range(2):
        with pytest.raises(JournalError, match="another version"):
            Journal(tmp_path)
        with pytest.raises(JournalError, match="another version"):
            read_history(tmp_path)


def spoil(path: Path, damage: str) -> bytes:
    content = bytearray(path.read_bytes())
    match damage:
        case "head":
            content[:100] = b"\xff" * 100
        case "middle":
            content[4096:-4096] = b"\xff" * (len(content) - 8192)
        case "cut":
            content = content[: len(content) // 2]
        case _:
            content = bytearray(b"this is no journal\n" * 1000)
    path.write_bytes(content)
    return bytes(content)


DAMAGES = ["head", "middle", "cut", "text"]


def ready_to_spoil(directory: Path) -> tuple[str, list[AttemptRecord]]:
    """A journal with attempts in all states; its name, and what may be at a site."""
    with closing(Journal(directory)) as journal:
        journal.set_site("hpc1", "url", "/ws", "p", "/a/config.yaml")
        for n in range(60):
            record = new_attempt(journal, str(n))
            for state in list(AttemptState)[: n % 5 + 1]:
                advance(journal, record.id, state)
            if n == 30:
                journal.retire_buckets("p")
    with closing(Journal(directory)) as journal:  # which writes the spare anew
        journal.retire_buckets("p")
        late = journal.new_attempt(
            site="hpc1", job="late", rule="r", name="r late", fingerprint="f",
            members={"a": "name of a"}, made_of='{"command": "x"}',
        )  # fmt: skip
        journal.submitting(late.id, "batch")
        opened = [r for r in journal.all_open_attempts() if r.state is not AttemptState.PLANNED]
        return journal.workflow, opened


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_made_anew_of_its_spare(tmp_path: Path, damage: str) -> None:
    workflow, opened = ready_to_spoil(tmp_path)
    content = spoil(tmp_path / "journal.sqlite", damage)

    with closing(Journal(tmp_path)) as journal:
        assert "was damaged" in journal.remark
        assert f"Jobs to look for at the sites: {len(opened)}." in journal.remark
        assert journal.workflow == workflow, "its workspace is the same"
        assert journal.sites() == {"hpc1": SiteRecord("hpc1", "url", "/ws", "/a/config.yaml", "p")}
        found = journal.all_open_attempts()
        settled = (
            "id",
            "site",
            "place",
            "bucket",
            "job",
            "rule",
            "name",
            "fingerprint",
            "made_of",
            "created",
        )
        assert [[getattr(r, name) for name in settled] for r in found] == [
            [getattr(r, name) for name in settled] for r in opened
        ]
        assert {r.state for r in found} == {AttemptState.SUBMITTING}, "the site has to be asked"
        assert [r.job for r in journal.open_attempts("a")] == ["late"]
        assert new_attempt(journal).bucket not in {r.bucket for r in opened}, (
            "or a stray meets its own"
        )
    assert (tmp_path / "journal.sqlite.damaged-1").read_bytes() == content
    with closing(Journal(tmp_path)) as journal:
        assert journal.remark == ""
        assert journal.workflow == workflow


def test_an_old_comparison_changes_no_output_that_was_made_since(journal: Journal) -> None:
    def made(when: float) -> RemoteOutput:
        files = (FileRecord("a", 1, "sha", modified=when, mode=0o644),)
        output = RemoteOutput("a", "p", False, when, "make", files)
        journal.files.set_remote_files("p", files)
        journal.files.set_stored([output])
        return output

    before, now = made(1.5), made(2.5)
    journal.files.renew_stored(before, replace(before, made=1.7))
    journal.files.drop_stored(before)
    assert journal.files.stored("a") == now

    renewed = replace(now, made=3.5)
    journal.files.renew_stored(now, renewed)
    assert journal.files.stored("a") == renewed
    journal.files.drop_stored(renewed)
    assert journal.files.stored("a") is None


def test_stored_outputs_are_in_the_spare(tmp_path: Path) -> None:
    def at(path: str, *names: str) -> RemoteOutput:
        files = tuple(
            FileRecord(f"{path}{name}", 1, "sha", modified=2.5, mode=0o755) for name in names
        )
        return RemoteOutput(path, "p", names != ("",), 3.5, "make", files, ((f"{path}/l", "x"),))

    with closing(Journal(tmp_path)) as journal:
        outputs = [at("a", ""), at("b", "/x", "/y"), at("gone", ""), at("unknown", "")]
        for output in outputs:
            journal.files.set_remote_files("p", output.files)
        journal.files.set_stored(outputs[1:])
    with closing(Journal(tmp_path)) as journal:  # which writes the spare anew
        journal.files.set_stored(outputs[:1])
        journal.files.lose(["gone"])
        journal.files.forget_stored(["unknown"])
        assert journal.files.all_stored("p") == outputs[:2]
    spoil(tmp_path / "journal.sqlite", "head")

    with closing(Journal(tmp_path)) as journal:
        assert "Outputs that stay there: 2." in journal.remark
        assert journal.files.all_stored("p") == outputs[:2]
        assert journal.files.has_row("gone")
        assert not journal.files.has_row("unknown")


def test_a_damaged_line_of_the_spare_is_one_fact_lost(tmp_path: Path) -> None:
    _, opened = ready_to_spoil(tmp_path)
    spoil(tmp_path / "journal.sqlite", "head")
    lines = (tmp_path / "journal.spare").read_bytes().split(b"\n")
    wrong = next(n for n, line in enumerate(lines) if opened[5].id.encode() in line)
    lines[wrong] = lines[wrong][:40] + b"\xff\x00" + lines[wrong][60:]
    (tmp_path / "journal.spare").write_bytes(
        b"\n".join([*lines, b'{"attempt": 3}', b"[]", b'{"tr'])
    )

    with closing(Journal(tmp_path)) as journal:
        assert [r.id for r in journal.all_open_attempts()] == [
            r.id for r in opened if r.id != opened[5].id
        ]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_without_a_spare_is_told(tmp_path: Path, damage: str) -> None:
    ready_to_spoil(tmp_path)
    content = spoil(tmp_path / "journal.sqlite", damage)
    (tmp_path / "journal.spare").write_bytes(b"\xff\n{\n")

    for _ in range(2):
        with pytest.raises(JournalError, match="move it away"):
            Journal(tmp_path)
    assert (tmp_path / "journal.sqlite").read_bytes() == content


def test_full_disk_is_told(journal: Journal) -> None:
    record = new_attempt(journal)
    pages = journal.db.execute("PRAGMA page_count").fetchone()[0]
    journal.db.execute(f"PRAGMA max_page_count = {pages}")
    files = [FileRecord(f"{n}", n, "x" * 64) for n in range(10_000)]
    with pytest.raises(JournalError, match="Free disk space"):
        journal.files.set_remote_files("hpc1", files)
    journal.submitting(record.id, "q")
    assert journal.files.remote_files("hpc1") == []


def test_history_without_a_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="Run snakemake first"):
        read_history(tmp_path)


def test_history_of_a_journal_that_is_just_being_made(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as db:
        db.execute("PRAGMA journal_mode = WAL")
        assert read_history(tmp_path) == []


def test_cost_of_an_attempt_does_not_grow(journal: Journal) -> None:
    steps = []
    for _ in range(3):
        count = [0]

        def tick(count: list[int] = count) -> None:
            count[0] += 1

        journal.db.set_progress_handler(tick, 100)
        for n in range(BUCKET_SIZE):
            record = new_attempt(journal, str(n))
            for state in AttemptState:
                advance(journal, record.id, state)
            journal.open_attempts(str(n))
        steps.append(count[0])
    journal.db.set_progress_handler(None, 0)
    assert steps[2] < 1.3 * steps[0], steps


def test_a_job_goes_on_from_the_checkpoint_of_its_last_segment(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.set_site("hpc1", "https://x", "/w", "p")

        def new(follows: str = "") -> str:
            return journal.new_attempt(
                site="hpc1", job="a", rule="r", name="r", fingerprint="f", follows=follows
            ).id

        def last() -> str:
            found = journal.segments.last("a", "p")
            return found.id if found is not None else ""

        first = new()
        assert last() == ""
        journal.segments.keep_checkpoint(first, "listed", [FileRecord("ckpt", 1, "sum")])
        assert last() == first
        assert journal.segments.last("a", "elsewhere") is None
        second = new(first)
        assert last() == first, "what has not ended by itself is repeated"
        journal.segments.keep_checkpoint(second, "listed", [FileRecord("ckpt", 2, "other")])
        assert last() == second
        assert journal.segments.checkpoint(first) == []
        assert [file.size for file in journal.segments.checkpoint(second)] == [2]
        third = new(second)
        assert [record.id for record in journal.segments.waiting_after(first)] == [second, third]
        again = journal.attempts([third])[0]
        assert not journal.segments.was_followed(again)
        new(second)
        assert journal.segments.was_followed(again)
        journal.segments.keep_checkpoint(second, "")
        assert last() == "", "it was lost"
        new()
        assert last() == ""


def test_undeclared_files_are_listed_up_to_a_limit(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        files = [UndeclaredFile(f"f{n}", "p", n, 1.5, 0o644, "r") for n in range(10_100)]
        journal.files.add_undeclared(files)
    found = read_undeclared(tmp_path)
    assert 9_990 <= len(found) <= 10_000
    assert found[-1] == files[9999]
    assert read_undeclared(tmp_path / "nowhere") == []


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
SHAPES = st.recursive(
    SCALARS, lambda of: st.lists(of) | st.dictionaries(st.text(max_size=5), of), max_leaves=5
)


@cache
def spares() -> tuple[bytes, bytes]:
    """The spare of a journal, and the one of its place."""
    with tempfile.TemporaryDirectory() as place, closing(Journal(Path(place))) as journal:
        journal.set_site("hpc1", "url", "/ws", "p", "")
        journal.take_number("p", 7)
        for name in ("one", "two"):
            journal.submitting(new_attempt(journal, name).id, "batch")
        return (Path(place) / "journal.spare").read_bytes(), journal.spare_of("p")


@given(data=st.data(), own=st.booleans())
@settings(max_examples=60)
def test_a_damaged_line_of_a_spare_is_left_out_and_told(data: st.DataObject, own: bool) -> None:
    """Whatever one of its values, or a part of it, has become."""
    lines = [json.loads(line) for line in spares()[not own].split(b"\n") if line]
    at = changed = data.draw(st.sampled_from(lines))
    while True:
        key = data.draw(st.sampled_from([*at] if isinstance(at, dict) else range(len(at))))
        if not (isinstance(at[key], dict | list) and at[key]) or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(SHAPES)
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    with tempfile.TemporaryDirectory() as directory:
        if own:
            (Path(directory) / "journal.spare").write_bytes(content)
        with closing(Journal(Path(directory))) as journal:
            said = journal.remark if own else journal.catch_up("p", content)
            records = journal.all_open_attempts()
            told = "1 line of the spare cannot be read" in said or (own and not said)
            assert len(records) == 2 or told or not changed[1]
            assert not [record for record in records if [*record.makers, *record.log_files]]
            assert journal.sites().keys() <= {"hpc1"}
            journal.submitting(new_attempt(journal).id, "batch")


def test_a_journal_that_is_lost_twice_knows_what_its_place_told_it(tmp_path: Path) -> None:
    _, of_place = spares()
    with closing(Journal(tmp_path)) as journal:
        assert not journal.catch_up("p", of_place)
        known = {record.id for record in journal.all_open_attempts()}
    assert known
    (tmp_path / "journal.sqlite").write_bytes(b"")
    with closing(Journal(tmp_path)) as journal:
        assert {record.id for record in journal.all_open_attempts()} == known


def test_a_claim_leaves_out_the_names_of_many_outputs_first(journal: Journal) -> None:
    basis = {"resources": {"queue": "q"}, "makes": [f"results/{n:040}" for n in range(400)]}
    many = replace(new_attempt(journal), made_of=json.dumps(basis))
    known = decode_identity(encode_identity(many, {}))
    assert known is not None
    assert json.loads(known["made_of"]) == {"resources": {"queue": "q"}}


@pytest.mark.parametrize(
    "odd",
    [{"after": []}, {"logs": "[1"}, {"created": "now"}, {"members": {"job": 1}}],
)
def test_a_damaged_identity_in_a_claim_names_no_attempt(
    journal: Journal, odd: Mapping[str, object]
) -> None:
    line = encode_identity(new_attempt(journal), {"job": "name"})
    assert decode_identity(line)
    assert decode_identity(json.dumps(json.loads(line) | odd)) is None
