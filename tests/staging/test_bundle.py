"""Bundles carry every name, and never half of a file that changes."""

import asyncio
import errno
import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.journal import FileRecord, Journal
from snakemake_executor_plugin_mantik.staging.bundle import pack
from snakemake_executor_plugin_mantik.staging.local import LocalFile, LocalFiles, sha256_of

NASTY = "a b'\"\n#%*$HOME`ü;-"


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalFiles]:
    with closing(Journal(tmp_path / "state")) as journal:
        (tmp_path / "work").mkdir()
        yield LocalFiles(tmp_path / "work", journal.files)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "work"


def look(local: LocalFiles, *paths: str) -> list[LocalFile]:
    async def all_of_them() -> list[LocalFile]:
        return await local.look_at([(path, None) for path in paths])

    return asyncio.run(all_of_them())


def test_real_tar_unpacks_every_name(local: LocalFiles, work: Path, tmp_path: Path) -> None:
    (work / f"d/{NASTY}").mkdir(parents=True)
    (work / f"d/{NASTY}/{NASTY}").write_text("content")
    (work / "d/empty").mkdir()
    long = "long/" + "x" * 200 + "/" + "ü" * 120
    (work / long).parent.mkdir(parents=True)
    (work / long).write_bytes(b"\0\xff")
    (work / "-rf").write_text("")
    files = look(local, "d", long, "-rf")
    (tmp_path / "b.tar.gz").write_bytes(pack(files))
    into = tmp_path / "into"
    into.mkdir()

    subprocess.run(["tar", "-xzf", tmp_path / "b.tar.gz", "-C", into], check=True)

    assert (into / f"d/{NASTY}/{NASTY}").read_text() == "content"
    assert (into / long).read_bytes() == b"\0\xff"
    assert (into / "d/empty").is_dir()
    assert (into / "-rf").exists()


def test_times_and_modes_go_along_but_no_owners(local: LocalFiles, work: Path) -> None:
    (work / "run.sh").write_text("x")
    (work / "run.sh").chmod(0o755)
    os.utime(work / "run.sh", (1e9, 1e9))
    (work / "secret").write_text("x")
    (work / "secret").chmod(0o400)
    with tarfile.open(fileobj=io.BytesIO(pack(look(local, "run.sh", "secret")))) as tar:
        run, secret = tar.getmembers()
    assert (run.mode, run.mtime, run.uid, run.uname) == (0o755, 1e9, 0, "")
    assert secret.mode == 0o600, "it has to be replaced later"


def test_file_that_is_none_of_this_machine() -> None:
    file = LocalFile.holding(f".mantik/files/1/{NASTY}", b"exit 0\n")
    with tarfile.open(fileobj=io.BytesIO(pack([file]))) as tar:
        (member,) = tar.getmembers()
        content = tar.extractfile(member)
        assert (member.name, member.mode) == (file.path, 0o700)
        assert content is not None
        assert content.read() == b"exit 0\n"
    assert file.record.size == 7


@pytest.mark.parametrize("change", ["longer", "touched", "gone"])
def test_file_that_changed_since_it_was_looked_at(
    local: LocalFiles, work: Path, change: str
) -> None:
    (work / "a").write_text("content")
    files = look(local, "a")
    match change:
        case "longer":
            (work / "a").write_text("more content")
        case "touched":
            os.utime(work / "a", (1, 1))
        case _:
            (work / "a").unlink()
    with pytest.raises((UserError, FileNotFoundError)):
        pack(files)


def test_content_is_read_once(
    local: LocalFiles, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snakemake_executor_plugin_mantik.staging.local.SETTLED_NS", -(10**12))
    (work / "a").write_text("1")
    (first,) = look(local, "a")
    monkeypatch.setattr("snakemake_executor_plugin_mantik.staging.local.sha256_of", lambda _: "new")
    (again,) = look(local, "a")
    assert again.sha256 == first.sha256
    local.settled([again.record])
    os.utime(work / "a")
    local.touched([again.record])
    (touched,) = look(local, "a")
    assert touched.sha256 == first.sha256, "Snakemake has touched what came here"


def test_content_that_was_written_just_now_is_read_again(
    local: LocalFiles, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be written once more before its file system's clock goes on."""
    monkeypatch.setattr("snakemake_executor_plugin_mantik.staging.local.SETTLED_NS", 10**13)
    (work / "a").write_text("1")
    look(local, "a")
    monkeypatch.setattr("snakemake_executor_plugin_mantik.staging.local.sha256_of", lambda _: "new")
    assert look(local, "a")[0].sha256 == "new"


@pytest.mark.parametrize("how", ["in place", "replaced", "linked", "at once"])
def test_content_of_the_same_size_and_time_is_seen(local: LocalFiles, work: Path, how: str) -> None:
    for path in ("a", "b"):
        (work / path).write_text(path)
        os.utime(work / path, (1e9, 1e9))
    if how == "linked":
        (work / "b").rename(work / "c")
        (work / "a").rename(work / "b")
        (work / "c").rename(work / "a")
    (first,) = look(local, "a")
    match how:
        case "replaced":
            (work / "b").replace(work / "a")
        case "linked":
            (work / "a").unlink()
            os.link(work / "b", work / "a")
        case _:
            (work / "a").write_text("c")
            os.utime(work / "a", (1e9, 1e9))
    (changed,) = look(local, "a")
    assert changed.sha256 != first.sha256
    assert (changed.size, changed.local.stat().st_mtime) == (first.size, 1e9)


def test_what_was_edited_just_before_it_was_touched_is_read(local: LocalFiles, work: Path) -> None:
    (work / "a").write_text("made")
    (made,) = look(local, "a")
    local.settled([made.record])
    (work / "b").write_text("mine")
    (work / "b").replace(work / "a")
    local.touched([made.record])
    (now,) = look(local, "a")
    assert now.sha256 != made.sha256


def test_many_who_ask_at_once_read_once(local: LocalFiles, work: Path) -> None:
    (work / "a").write_bytes(os.urandom(1_000_000))

    async def all_at_once() -> list[list[LocalFile]]:
        return await asyncio.gather(*(local.look_at([("a", None)]) for _ in range(30)))

    assert len({file.sha256 for (file,) in asyncio.run(all_at_once())}) == 1


def test_a_file_that_cannot_be_read_is_only_its_own_jobs_trouble(
    local: LocalFiles, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (work / name).write_text(name)

    def read(path: Path) -> str:
        if path.name == "b":
            raise PermissionError(errno.EACCES, "no")
        return sha256_of(path)

    monkeypatch.setattr("snakemake_executor_plugin_mantik.staging.local.sha256_of", read)

    async def at_once() -> list[list[LocalFile] | BaseException]:
        wanted = [("a", None), ("b", None), ("c", None)], [("c", None), ("a", None)], [("b", None)]
        return await asyncio.gather(*map(local.look_at, wanted), return_exceptions=True)

    first, second, third = asyncio.run(at_once())

    assert isinstance(second, list)
    assert [file.sha256 for file in second] == [sha256_of(work / name) for name in "ca"]
    for failed in (first, third):
        assert isinstance(failed, UserError)
        assert "cannot be read (no)" in str(failed)
        assert str(work / "b") in str(failed)


def test_a_file_behind_a_link_is_packed_once(local: LocalFiles, work: Path, tmp_path: Path) -> None:
    (work / "data/deep").mkdir(parents=True)
    (work / "data/big").write_bytes(os.urandom(100_000))
    (work / "data/deep/link").symlink_to("../big")
    (work / "copy").write_bytes((work / "data/big").read_bytes())

    packed = pack(look(local, "data/deep/link", "data"))

    assert len(packed) < 110_000
    subprocess.run(["tar", "-xz", "-C", tmp_path], input=packed, check=True)
    for name in ("data/big", "data/deep/link"):
        assert (tmp_path / name).read_bytes() == (work / "copy").read_bytes()
    # What is the same by chance may have other permissions and another time.
    assert len(pack(look(local, "copy", "data/big"))) > 200_000


def test_links(local: LocalFiles, work: Path) -> None:
    (work / "d/sub").mkdir(parents=True)
    (work / "d/sub/x").write_text("x")
    (work / "d/link").symlink_to("sub/x")
    (work / "d/loop").symlink_to(".")
    (work / "d/dangling").symlink_to("nowhere")
    (work / "d/itself").symlink_to("itself")
    (work / "d/again").symlink_to("sub")
    os.mkfifo(work / "d/pipe")
    assert {file.path for file in look(local, "d")} == {"d/sub/x", "d/link", "d/again/x"}


def test_a_pipe_as_input_is_refused_and_not_read(local: LocalFiles, work: Path) -> None:
    os.mkfifo(work / "pipe")
    with pytest.raises(UserError, match="neither a file nor a directory"):
        look(local, "pipe")


def test_links_that_jobs_made_do_not_lead_to_files_of_this_machine(
    local: LocalFiles, work: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("x")
    (work / "d").mkdir()
    (work / "d/x").write_text("x")
    targets = {"d/a": str(tmp_path / "secret"), "d/b": "../../secret", "d/c": "x", "d/e": "/"}
    for path, target in targets.items():
        (work / path).symlink_to(target)
    local._ledger.set_links(list(targets.items()))
    assert {file.path for file in look(local, "d")} == {"d/x", "d/c"}
    assert look(local, "d/a") == []
    # One that the user puts in its place is the user's.
    (work / "d/a").unlink()
    (work / "d/a").symlink_to("../../secret")
    assert {file.path for file in look(local, "d")} == {"d/x", "d/c", "d/a"}


@pytest.mark.parametrize("trouble", ["missing", "name"])
def test_what_cannot_be_sent_is_told(local: LocalFiles, work: Path, trouble: str) -> None:
    (work / "d").mkdir()
    if trouble == "name":
        (work / "d" / os.fsdecode(b"\xff\xfe")).write_text("x")
    with pytest.raises(UserError, match="UTF-8" if trouble == "name" else "cannot be read"):
        look(local, "d" if trouble == "name" else "d/nowhere")


def test_touched_is_not_read_again(local: LocalFiles, work: Path) -> None:
    (work / "a").write_text("1")
    known = [FileRecord("a", 1, "known"), FileRecord("gone", 1, "known")]
    local.settled(known)
    local.touched(known)
    assert look(local, "a")[0].sha256 == "known"
    other = [FileRecord("a", 2, "another size"), FileRecord("a", 1, "")]
    local.settled(other)
    local.touched(other)
    assert look(local, "a")[0].sha256 == "known"
