"""Where outputs are put together before they take their places."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import TransferError
from snakemake_executor_plugin_mantik.jobs.markers import OutputEntry
from snakemake_executor_plugin_mantik.jobs.paths import outside_path
from snakemake_executor_plugin_mantik.staging.transfers import SUFFIX, OutputStaging

NASTY = "a b'\"\n#%*$HOME`ü;-"
ATTEMPT = "3f0d7a6c-0000-4000-8000-000000000001"


def file(path: str, mode: int = 0o644) -> OutputEntry:
    return OutputEntry(path, "f", 1, mode, "", "marker")


def directory(path: str) -> OutputEntry:
    return OutputEntry(path, "d", 0, 0o755, "", "none")


def settle(workdir: Path, roots: list[str], entries: list[OutputEntry]) -> None:
    landing = OutputStaging(workdir, ATTEMPT, roots)
    for entry in entries:
        if entry.type != "l":
            landing.write(entry, [b"new"])
    landing.settle(entries)
    landing.clear()
    assert not list(workdir.rglob(f"*{SUFFIX}"))


@pytest.mark.parametrize("name", [NASTY, "x" * 255, "ü" * 127, f"d/{NASTY}/{NASTY}"])
def test_every_name(tmp_path: Path, name: str) -> None:
    settle(tmp_path, [name], [file(name)])
    assert (tmp_path / name).read_bytes() == b"new"


def test_long_names_with_the_same_beginning_do_not_meet(tmp_path: Path) -> None:
    names = ["x" * 240 + str(n) for n in range(3)]
    landing = OutputStaging(tmp_path, ATTEMPT, names)
    assert len({landing.place(file(name)) for name in names}) == 3


def test_directory_replaces_all_that_was_in_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "d/old").mkdir(parents=True)
    settle(tmp_path, ["d"], [directory("d"), directory("d/e"), file("d/e/x")])
    assert sorted(p.name for p in (tmp_path / "d").rglob("*")) == ["e", "x"]


def test_link_in_the_way_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/precious").write_text("x")
    (tmp_path / "d").symlink_to("target")
    settle(tmp_path, ["d"], [file("d")])
    assert (tmp_path / "target/precious").exists()
    assert not (tmp_path / "d").is_symlink()


def test_links_are_made_last(tmp_path: Path) -> None:
    link = OutputEntry("d/link", "l", 0, 0o777, "", "none", "/etc")
    settle(tmp_path, ["d"], [directory("d"), link, file("d/x")])
    assert os.readlink(tmp_path / "d/link") == "/etc"


@pytest.mark.parametrize(
    "path",
    ["d//etc/pwned", "d/../pwned", "d/./pwned", "d/x//pwned", "d/", "f//pwned", "../pwned", "e",
     "d/\0", "/d/x"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["f", "d", "l"])
def test_nothing_is_made_outside_of_the_outputs(tmp_path: Path, path: str, kind: str) -> None:
    (tmp_path / "work").mkdir()
    entry = OutputEntry(path, kind, 1, 0o755, "", "marker", "/etc")  # type: ignore[arg-type]
    with pytest.raises(TransferError):
        settle(tmp_path / "work", ["d", "f"], [directory("d"), entry])


@pytest.mark.parametrize("kind", ["f", "d", "l"])
@pytest.mark.parametrize("path", ["d/l/evil", "d/l"])
def test_nothing_is_made_through_a_link(tmp_path: Path, path: str, kind: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    work = tmp_path / "work"
    work.mkdir()
    link = OutputEntry("d/l", "l", 0, 0o777, "", "none", str(tmp_path / "elsewhere"))
    evil = OutputEntry(path, kind, 1, 0o755, "", "marker", "/etc/passwd")  # type: ignore[arg-type]
    if (kind, path) == ("l", "d/l"):
        settle(work, ["d"], [directory("d"), link, evil])  # the last of a name counts
    else:
        with pytest.raises(TransferError):
            settle(work, ["d"], [directory("d"), link, evil])
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_output_itself_is_no_link(tmp_path: Path) -> None:
    with pytest.raises(TransferError):
        settle(tmp_path, ["d"], [OutputEntry("d", "l", 0, 0o777, "", "none", "/etc")])


def test_what_a_killed_run_has_left_is_in_nobodys_way(tmp_path: Path) -> None:
    entries = [directory("d"), OutputEntry("d/l", "l", 0, 0o777, "", "none", "x")]
    landing = OutputStaging(tmp_path, ATTEMPT, ["d"])
    landing.write(entries[0])
    landing.place(entries[1]).symlink_to("x")
    settle(tmp_path, ["d"], entries)
    assert os.readlink(tmp_path / "d/l") == "x"


def test_modes(tmp_path: Path) -> None:
    settle(tmp_path, ["a", "b"], [file("a", 0o4755), file("b", 0o000)])
    modes = [(tmp_path / name).stat().st_mode & 0o7777 for name in "ab"]
    assert modes == [0o755, 0o400], "no set-uid, and always readable"


def test_no_mode_is_wider_than_the_umask_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "snakemake_executor_plugin_mantik.staging.transfers.read_umask", lambda: 0o027
    )
    files = [file("a", 0o777), file("d/b", 0o666), OutputEntry("d", "d", 0, 0o777, "", "none")]
    settle(tmp_path, ["a", "d"], files)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "d", "d/b")]
    assert modes == [0o750, 0o750, 0o640]


def test_times_in_a_directory_are_kept_and_outputs_are_new(tmp_path: Path) -> None:
    old, later = 1_700_000_000_123_456_789, time.time_ns() + 3600 * 10**9
    link = OutputEntry("d/e/l", "l", 0, 0o777, "", "none", "x")
    entries = [directory("d"), directory("d/e"), file("d/e/x"), file("d/e/new"), link, file("f")]
    times = [old, old, old, later, old, old]
    before = time.time_ns() - 10**9

    settle(
        tmp_path, ["d", "f"],
        [replace(entry, modified_ns=told) for entry, told in zip(entries, times, strict=True)],
    )  # fmt: skip

    found = {path: (tmp_path / path).lstat().st_mtime_ns for path in ("d/e", "d/e/x", "d/e/l")}
    assert set(found.values()) == {old}
    for path in ("d", "d/e/new", "f"):
        assert before <= (tmp_path / path).stat().st_mtime_ns <= time.time_ns()


def test_what_is_on_its_way_is_closed_to_others(tmp_path: Path) -> None:
    landing = OutputStaging(tmp_path, ATTEMPT, ["a", "d"])
    landing.write(file("a", 0o600), [b"a"])
    landing.write(directory("d/e"))
    landing.write(file("d/e/f", 0o600), [b"f"])
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o077 == 0
    landing.settle([file("a", 0o600), directory("d"), directory("d/e"), file("d/e/f", 0o640)])
    modes = {str(p.relative_to(tmp_path)): p.stat().st_mode & 0o777 for p in tmp_path.rglob("*")}
    assert modes == {"a": 0o600, "d": 0o755, "d/e": 0o755, "d/e/f": 0o640}


def test_directories_of_a_group_stay_its_own(tmp_path: Path) -> None:
    """In a project directory with setgid all files belong to its group, also those made later."""
    tmp_path.chmod(0o2770)
    settle(tmp_path, ["d"], [directory("d"), directory("d/e"), file("d/e/f")])
    for path in (tmp_path / "d", tmp_path / "d/e"):
        assert path.stat().st_mode & 0o7777 == 0o2755
    (tmp_path / "d/e/later").mkdir()
    assert (tmp_path / "d/e/later").stat().st_mode & 0o2000


def test_nothing_is_placed_before_all_is_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    landing = OutputStaging(tmp_path, ATTEMPT, ["a"])
    landing.write(file("a"), [b"new"])
    assert (tmp_path / "a").read_text() == "old"
    landing.clear()
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("path", ["b", "a/../../x", "a/../b", "/etc/passwd", ""])
def test_undeclared_paths(tmp_path: Path, path: str) -> None:
    landing = OutputStaging(tmp_path, ATTEMPT, ["a"])
    with pytest.raises(TransferError):
        landing.place(file(path))


def test_what_lies_outside_of_the_working_directory_takes_its_own_place(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "far").mkdir()
    root = outside_path(str(tmp_path / "far/d"), str(tmp_path / "work"))
    settle(tmp_path / "work", [root], [directory(root), file(f"{root}/x")])
    assert (tmp_path / "far/d/x").read_bytes() == b"new"
    assert os.listdir(tmp_path / "work") == []
    assert os.listdir(tmp_path / "far") == ["d"]


@pytest.mark.parametrize("path", ["{0}x", "{0}/../x", "{0}//x", "/etc/x", "{0}/d/../../x", ""])
def test_nothing_else_outside_is_made(tmp_path: Path, path: str) -> None:
    declared = str(tmp_path / "far/d")
    root, told = (outside_path(p, f"{tmp_path}/work") for p in (declared, path.format(declared)))
    for entry in (file(told), directory(told)):
        with pytest.raises(TransferError, match="none of the rule's outputs"):
            settle(tmp_path / "work", [root], [directory(root), entry])
    assert not (tmp_path / "far/d").exists()
