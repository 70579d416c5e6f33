"""Bundles come in whole, outputs are told of and travel as they should."""

import gzip
import hashlib
import os
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.jobs.markers import Marker, OutputEntry
from snakemake_executor_plugin_mantik.jobs.paths import (
    IMPORTED,
    OURS,
    bundle_done_path,
    bundle_path,
    imported_path,
)
from snakemake_executor_plugin_mantik.jobs.script import PART_BYTES, render_script
from snakemake_executor_plugin_mantik.jobs.spec import InputFile, JobSpec, OutputFile
from tests.support.trial import NASTY, QUICK, Trial, packed

ODD = [
    NASTY,
    "-rf",
    "--",
    "*",
    "a b",
    "new\nline\n",
    " ",
    "tab\t",
    "back\\slash",
    "é%20",
    "\x01\x7f",
]


def by_path(marker: Marker) -> dict[str, OutputEntry]:
    return {entry.path: entry for entry in marker.files}


def small(marker: Marker) -> dict[str, bytes]:
    return {entry.path: data for entry, data in marker.small_outputs()}


def archived(trial: Trial, archive: str) -> dict[str, bytes]:
    found = {}
    with tarfile.open(trial.workspace / archive) as tar:
        for member in tar:
            data = tar.extractfile(member)
            assert data is not None
            found[member.name.removeprefix("./")] = data.read()
    return found


@pytest.mark.parametrize("inline", [False, True])
def test_a_bundle_with_odd_names_comes_in(trial: Trial, inline: bool) -> None:
    content: dict[str, bytes | None] = {name: name.encode() for name in ODD}
    content |= {f"deep/{name}/{name}": b"deep" for name in ODD}
    content |= {"empty/folder": None, "empty": None}
    bundle = packed(content, {"deep/link": "../a b"})
    spec = trial.spec(
        "ls", inputs=tuple(InputFile(name, len(name.encode())) for name in ODD), inline=bundle
    )
    if not inline:
        trial.upload("b-1", bundle)
        spec = replace(spec, inline=b"", bundles=("b-1",))
    trial.write("a b", "replaced")
    ended = trial.run(spec)
    assert ended.returned == 0, ended.log
    for name in ODD:
        assert (trial.workspace / name).read_bytes() == name.encode()
        assert (trial.workspace / "deep" / name / name).read_bytes() == b"deep"
    assert (trial.workspace / "empty/folder").is_dir()
    # A link in a bundle stands for a copy.
    assert not (trial.workspace / "deep/link").is_symlink()
    assert (trial.workspace / "deep/link").read_bytes() == b"a b"
    assert (trial.workspace / "deep/link").stat().st_nlink == 1
    assert (trial.workspace / bundle_done_path("b-1")).exists() != inline
    assert not (trial.workspace / spec.paths.work / "unpack").exists()


def test_a_bundle_is_unpacked_once(trial: Trial) -> None:
    trial.upload("b", packed({"x": b"sent"}))
    assert trial.run(trial.spec(bundles=("b",))).returned == 0
    trial.write("x", "made later")
    assert trial.run(trial.spec("cat x", bundles=("b",))).log == "made later"


@pytest.mark.parametrize("count", [1, 12])
def test_a_bundle_in_parts_comes_in_and_goes(trial: Trial, count: int) -> None:
    content = os.urandom(300_000)
    parts = trial.upload_parts("17/b", packed({NASTY: content, "y": b"y"}), count)
    inputs = (InputFile(NASTY, len(content), sha256=hashlib.sha256(content).hexdigest()),)
    assert trial.run(trial.spec("cat y", bundles=("17/b",), inputs=inputs)).log == "y"
    assert (trial.workspace / NASTY).read_bytes() == content
    assert not parts[0].parent.exists(), "a large one would count twice against a quota"
    assert trial.run(trial.spec("cat y", bundles=("17/b",))).log == "y"


@pytest.mark.parametrize("how", ["empty", "short", "gone", "cut", "all"])
def test_a_damaged_bundle_fails_and_is_not_taken_for_done(trial: Trial, how: str) -> None:
    whole = packed({"x": os.urandom(50_000), "y": b"y"})
    one = how in ("empty", "short")
    parts = [] if one else trial.upload_parts("b", whole, 12)
    match how:
        case "empty" | "short":
            trial.upload("b", whole[: 0 if how == "empty" else -1])
        case "gone":
            parts[5].unlink()
        case "cut":
            parts[11].write_bytes(parts[11].read_bytes()[:-1])
        case _:
            shutil.rmtree(parts[0].parent)
    ended = trial.run(trial.spec(bundles=("b",)))
    assert ended.sure.failed_step == "bundles"
    assert not (trial.workspace / "x").exists()
    trial.upload("b", whole) if one else trial.upload_parts("b", whole, 12)
    assert trial.run(trial.spec("cat y", bundles=("b",))).log == "y"


def test_many_jobs_unpack_one_bundle_at_once(trial: Trial) -> None:
    files: dict[str, bytes | None] = {f"d{n % 7}/f{n}": b"x" * n for n in range(300)}
    trial.upload_parts("b", packed(files), 30)
    inputs = tuple(InputFile(name, len(data or b"")) for name, data in files.items())
    check = "stat -c '%s %n' d*/* | while read -r n f; do [ $n = ${f##*/f} ] || exit 1; done"
    specs = [trial.spec(check, bundles=("b",), inputs=inputs) for _ in range(8)]
    started = [trial.start(spec) for spec in specs]
    ended = [trial.end(spec, process) for spec, process in zip(specs, started, strict=True)]
    assert [(one.returned, one.log) for one in ended] == [(0, "")] * 8


def with_imported(trial: Trial, contents: dict[str, bytes]) -> list[Path]:
    """A bundle of which a site's server has fetched files; returns these."""
    links = {path: f"{OURS}/{IMPORTED}/755/{number}" for number, path in enumerate(contents)}
    files: dict[str, bytes | None] = {"z": b"z", f"{IMPORTED}/644/0": b"own"}
    links |= {"plain": "z", "alias": f"{IMPORTED}/644/0"}
    trial.upload_parts("b", packed(files, links), 2)
    fetched = []
    for number, content in enumerate(contents.values()):
        fetched.append(trial.workspace / imported_path("b", str(number)))
        fetched[-1].parent.mkdir(exist_ok=True)
        fetched[-1].write_bytes(content)
        fetched[-1].chmod(0o600)
    return fetched


def test_imported_files_of_a_bundle_come_to_their_places(trial: Trial) -> None:
    contents = {NASTY: b"one", "deep/x\n'": b"two", "-y": b""}
    with_imported(trial, contents)
    specs = [trial.spec("cat z plain alias", bundles=("b",)) for _ in range(6)]
    started = [trial.start(spec) for spec in specs]
    ended = [trial.end(spec, process) for spec, process in zip(specs, started, strict=True)]
    assert [(one.returned, one.log) for one in ended] == [(0, "zzown")] * 6
    for path, content in contents.items():
        place = trial.workspace / path
        assert place.read_bytes() == content
        status = place.lstat()
        assert (status.st_mode & 0o7777, status.st_mtime, status.st_nlink) == (0o755, 0, 1)
    assert not (trial.workspace / bundle_path("b")).exists()


def test_a_bundle_without_an_imported_file_is_not_taken_for_done(trial: Trial) -> None:
    fetched = with_imported(trial, {"x": b"one", "y": b"two"})
    fetched[1].unlink()
    ended = trial.run(trial.spec(bundles=("b",)))
    assert ended.sure.failed_step == "bundles"
    assert not any((trial.workspace / name).exists() for name in ("x", "y", "z"))
    with_imported(trial, {"x": b"one", "y": b"two"})
    assert trial.run(trial.spec("cat x y", bundles=("b",))).log == "onetwo"


@pytest.mark.parametrize("inline", [False, True])
def test_a_bundle_goes_through_no_link(trial: Trial, inline: bool) -> None:
    """A job made `out/latest -> step-9`; here, that is another directory now."""
    safe = trial.write("out/step-9/deep/x", "safe")
    for name, target in (("latest", "step-9"), ("it's\nnew", "nowhere"), ("kept", "step-9")):
        (trial.workspace / "out" / name).symlink_to(target)
    (trial.workspace / "x").symlink_to(safe)
    new = {"out/latest/deep/x": b"new", "out/it's\nnew/x": b"1", "out/step-9/y": b"2", "x": b"3"}
    bundle = packed(new)
    trial.upload("b", bundle)
    spec = trial.spec("cat out/latest/*/x out/kept/deep/x", bundles=() if inline else ("b",))
    ended = trial.run(replace(spec, inline=bundle if inline else b""))
    assert ended.log == "newsafe"
    assert safe.read_text() == "safe"
    assert not any((trial.workspace / path).is_symlink() for path in ("out/latest", "x"))
    assert (trial.workspace / "out/it's\nnew/x").read_text() == "1"


def test_many_jobs_replace_a_link_at_once(trial: Trial) -> None:
    """Those that find it gone, or a directory in its place, go on."""
    (trial.workspace / "target").mkdir()
    files: dict[str, bytes | None] = {f"d{n}/f": b"x" for n in range(40)}
    for n in range(40):
        (trial.workspace / f"d{n}").symlink_to("target")
    specs = [trial.spec("cat d*/f | wc -c", inline=packed(files)) for _ in range(6)]
    started = [trial.start(spec) for spec in specs]
    ended = [trial.end(spec, process) for spec, process in zip(specs, started, strict=True)]
    assert [(one.returned, one.log) for one in ended] == [(0, "40\n")] * 6
    assert list((trial.workspace / "target").iterdir()) == []


def test_outputs_with_odd_names_travel(trial: Trial) -> None:
    outputs = tuple(OutputFile(f"out/{name}") for name in ODD)
    for name in ODD:
        trial.write(f"made/{name}", f"content of {name}")
    command = "cp -r made/. out"
    limits = replace(QUICK, marker_bytes=0, archive_file_bytes=0)
    for spec in (
        trial.spec(command, outputs=outputs),
        trial.spec(command, outputs=outputs, limits=limits),
        trial.spec(command, outputs=(OutputFile("out", directory=True),)),
    ):
        ended = trial.run(spec)
        assert ended.returned == 0
        assert ended.sure.missing_outputs == ()
        entries = by_path(ended.sure)
        data = small(ended.sure)
        if spec.limits is limits:
            data = archived(trial, spec.paths.archive)
            assert entries["out/a b"].place == entries["out/-rf"].place == "alone"
            data |= {"out/" + n: (trial.workspace / "out" / n).read_bytes() for n in ODD}
            assert {p for p, e in entries.items() if e.place == "alone"} == {
                f"out/{name}" for name in ("-rf", "--", "*", "a b", " ")
            }
        for name in ODD:
            text = f"content of {name}".encode()
            entry = entries[f"out/{name}"]
            assert (entry.type, entry.size) == ("f", len(text))
            assert entry.sha256 == hashlib.sha256(text).hexdigest()
            assert data[f"out/{name}"] == text


def test_each_output_goes_where_it_fits(trial: Trial) -> None:
    limits = replace(QUICK, marker_bytes=100, archive_file_bytes=1000)
    names = ("tiny", "more", "middle", "large", "large'quoted")
    spec = trial.spec(
        'for n in 60:tiny 60:more 1000:middle 1001:large "1001:large\'quoted"; do'
        ' head -c ${n%%:*} /dev/urandom > "${n#*:}"; done',
        outputs=tuple(OutputFile(name) for name in names),
        limits=limits,
    )
    marker = trial.run(spec).sure
    entries = by_path(marker)
    places = {name: entries[name].place for name in names}
    assert places == {
        "tiny": "marker",
        "more": "archive",
        "middle": "archive",
        "large": "alone",
        "large'quoted": "archive",
    }
    archive = trial.workspace / spec.paths.archive
    assert marker.archive_size == archive.stat().st_size
    assert marker.archive_sha256 == hashlib.sha256(archive.read_bytes()).hexdigest()
    held = archived(trial, spec.paths.archive)
    assert sorted(held) == ["large'quoted", "middle", "more"]
    for name in names:
        content = (trial.workspace / name).read_bytes()
        assert entries[name].sha256 == hashlib.sha256(content).hexdigest()
        assert (held | small(marker)).get(name, content) == content


def test_a_directory_travels_with_all_that_is_in_it(trial: Trial) -> None:
    command = (
        "mkdir -p d/empty d/sub; echo a > d/a; echo b > d/sub/.b; ln -s ../a d/sub/link;"
        " ln d/a d/h; chmod 750 d/a; mkfifo d/fifo"
    )
    spec = trial.spec(command, outputs=(OutputFile("d", directory=True),))
    marker = trial.run(spec).sure
    entries = by_path(marker)
    kinds = {path: entry.type for path, entry in entries.items()}
    assert kinds == {
        "d": "d",
        "d/a": "f",
        "d/h": "f",
        "d/empty": "d",
        "d/sub": "d",
        "d/sub/.b": "f",
        "d/sub/link": "l",
    }
    assert entries["d/sub/link"].target == "../a"
    assert entries["d/a"].mode == 0o750
    assert entries["d"].place == entries["d/sub/link"].place == "none"
    assert small(marker) == {"d/a": b"a\n", "d/h": b"a\n", "d/sub/.b": b"b\n"}


def test_an_output_in_another_one_travels_once_and_has_its_directory(trial: Trial) -> None:
    trial.workspace.joinpath("tree").mkdir()
    trial.workspace.joinpath("tree/old").touch()
    spec = trial.spec(
        "[ ! -e tree/old ] && echo x > 'tree/a b/c'",
        outputs=(OutputFile("tree/a b/c"), OutputFile("tree", directory=True)),
    )
    paths = [entry.path for entry in trial.run(spec).sure.files]
    assert sorted(paths) == ["tree", "tree/a b", "tree/a b/c"]


def test_a_link_as_an_output_brings_what_it_points_to(trial: Trial) -> None:
    limits = replace(QUICK, marker_bytes=3)
    spec = trial.spec(
        "echo abc > a; echo x > b; ln -s a la; ln -s b lb; ln -s nowhere lost",
        outputs=(OutputFile("la"), OutputFile("lb"), OutputFile("lost")),
        limits=limits,
    )
    marker = trial.run(spec).sure
    assert {p: (e.type, e.size) for p, e in by_path(marker).items()} == {
        "la": ("f", 4),
        "lb": ("f", 2),
    }
    assert marker.missing_outputs == ("lost",)
    assert small(marker) == {"lb": b"x\n"}
    assert archived(trial, spec.paths.archive) == {"la": b"abc\n"}


def test_missing_outputs_are_told_and_do_not_fail(trial: Trial) -> None:
    outputs = (
        OutputFile(f"not {NASTY}"),
        OutputFile("there"),
        OutputFile("t", "touched"),
        OutputFile("l", "log"),
    )
    ended = trial.run(trial.spec("touch there", outputs=outputs))
    assert ended.returned == 0
    assert ended.sure.missing_outputs == (f"not {NASTY}",)
    assert list(by_path(ended.sure)) == ["there"]


def test_of_a_failed_job_only_logs_travel(trial: Trial) -> None:
    outputs = (OutputFile("out"), OutputFile("logs/x", "log"), OutputFile("logs/y", "log"))
    ended = trial.run(trial.spec("echo o > out; echo l > logs/x; exit 2", outputs=outputs))
    assert small(ended.sure) == {"logs/x": b"l\n"}
    assert ended.sure.missing_outputs == ()


def test_the_end_of_the_log_travels(trial: Trial) -> None:
    limits = replace(QUICK, log_tail_bytes=10)
    ended = trial.run(trial.spec("seq 100000; echo the end >&2", limits=limits))
    assert ended.sure.log == b"0\nthe end\n"
    assert ended.sure.log_bytes == len(ended.log)
    assert ended.sure.started is not None
    assert ended.sure.ended is not None
    assert ended.sure.started <= ended.sure.ended


def test_an_unreadable_output_is_told_without_a_checksum(trial: Trial) -> None:
    trial.checksums("exit 1\n")
    ended = trial.run(trial.spec("echo x > out", outputs=(OutputFile("out"),)))
    assert [(entry.path, entry.sha256) for entry in ended.sure.files] == [("out", "")]


@pytest.mark.parametrize(
    ("limit", "place"), [("ulimit -f 4", "alone"), ('[ "$1" = -cf ] || ulimit -f 4', "archive")]
)
def test_a_marker_that_has_no_room_holds_less(trial: Trial, limit: str, place: str) -> None:
    """A limit on the size of files stands for a quota."""
    spec = trial.spec("head -c 20000 /dev/urandom > out", outputs=(OutputFile("out"),))
    trial.program("tar", f'#!/bin/bash\n{limit}\nexec /bin/tar "$@"\n')
    ended = trial.run(spec)
    assert (ended.returned, ended.sure.bare) == (0, False)
    assert [(entry.path, entry.place) for entry in ended.sure.files] == [("out", place)]
    held = set(archived(trial, spec.paths.archive)) if ended.sure.archive_size else set()
    assert held == ({"out"} if place == "archive" else set())


@pytest.mark.parametrize("code", [0, 7])
def test_a_marker_without_any_room_tells_the_code(trial: Trial, code: int) -> None:
    trial.program("tar", "#!/bin/bash\nexit 2\n")
    ended = trial.run(trial.spec(f"echo x > out; exit {code}", outputs=(OutputFile("out"),)))
    assert ended.returned == code
    assert ended.sure == Marker(exit_code=code, bare=True)


def test_a_marker_of_meta_alone(trial: Trial) -> None:
    trial.program("tail", "#!/bin/bash\nexit 1\n")
    ended = trial.run(trial.spec("echo said; exit 4"))
    assert ended.sure.bare
    assert ended.sure.exit_code == 4
    assert ended.sure.host
    assert ended.sure.started


def test_a_limit_on_the_size_of_files_ends_in_a_marker(trial: Trial) -> None:
    script = 'ulimit -f 1; exec "$@"'
    spec = trial.spec("echo x > out; head -c 100000 /dev/zero > big", outputs=(OutputFile("out"),))
    ended = trial.end(spec, trial.start(spec, shell=("bash", "-c", script, "bash")))
    assert ended.sure.exit_code != 0
    assert ended.returned == ended.sure.exit_code


def group_of_the_user() -> int:
    """Another group than the user's own, if he has one."""
    others = range(1, 100) if os.getuid() == 0 else os.getgroups()
    return next((group for group in others if group != os.getgid()), os.getgid())


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o2700), (True, 0o2750)])
def test_a_groups_directory_stays_its_own(trial: Trial, shared: bool, mode: int) -> None:
    """Project directories have setgid, and quotas are counted by the group of each file."""
    spec = trial.spec(
        "mkdir d/e; echo 1 > d/e/f; cat x/y/in > small; head -c 70000 /dev/zero > large",
        inputs=(InputFile("x/y/in", 2),),
        outputs=(OutputFile("d", directory=True), OutputFile("small"), OutputFile("large")),
        bundles=("b-1",),
        inline=packed({"other/file": b"1"}),
        secrets=("TOKEN",),
        umask=0o027,
        shared=shared,
        limits=replace(QUICK, marker_bytes=1000),
    )
    trial.upload("b-1", packed({"x/y/in": b"in", "x/empty": None}))
    secrets = trial.workspace / spec.paths.secrets
    secrets.parent.mkdir(parents=True)
    secrets.write_text("TOKEN=1\n")
    group = group_of_the_user()
    for path in (trial.workspace, *trial.workspace.rglob("*")):
        os.chown(path, -1, group)
        path.chmod(0o2700 if path.is_dir() else 0o600)
    before = set(trial.workspace.rglob("*"))
    assert trial.run(spec).sure.exit_code == 0
    made = set(trial.workspace.rglob("*")) - before
    assert len(made) > 12
    for path in made:
        status = path.lstat()
        assert status.st_gid == group, path
        assert not path.is_dir() or status.st_mode & 0o2000, path
        assert not status.st_mode & 0o007, path
    work = trial.workspace / spec.paths.work
    assert {p.stat().st_mode & 0o7777 for p in work.rglob("*") if p.is_dir()} == {mode}


# Data that are too long for a script: they lie beside it, and count only if they are whole.


MANY = 1200
"""So many names make each list of files too long for the script."""


def job(trial: Trial, *, upload_bytes: int = 4 << 20) -> JobSpec:
    names = [f"{NASTY}/{'long' * 20}-{n}" for n in range(MANY)]
    for name in names:
        trial.write(f"in/{name}", "data")
    sha256 = hashlib.sha256(b"data").hexdigest()
    return trial.spec(
        "echo ran >> ran; cp -r in/. out",
        inputs=tuple(InputFile(f"in/{name}", 4, sha256=sha256) for name in names),
        outputs=tuple(OutputFile(f"out/{name}") for name in names),
        limits=replace(QUICK, upload_bytes=upload_bytes),
    )


@pytest.mark.parametrize("upload_bytes", [4 << 20, 1000])
def test_long_lists_lie_beside_the_script(trial: Trial, upload_bytes: int) -> None:
    spec = job(trial, upload_bytes=upload_bytes)
    rendered = render_script(spec)
    assert len(rendered.text.encode()) < PART_BYTES
    assert all(len(content) <= upload_bytes for content in rendered.beside.values())
    ended = trial.run(spec)
    assert ended.returned == 0, ended.log
    assert len(ended.sure.files) >= MANY
    # They are checked: one that is missing is noticed by its name.
    gone = spec.inputs[-1].path
    (trial.workspace / gone).unlink()
    again = trial.run(replace(spec, paths=trial.spec().paths))
    assert again.sure.failed_step == "inputs"
    assert list(again.sure.missing_inputs) == [gone]


def test_a_short_job_has_nothing_beside_its_script(trial: Trial) -> None:
    assert not render_script(trial.spec()).beside


def damaged(trial: Trial, spec: JobSpec, damage: str) -> None:
    """Put the lists of a job in place, not all of them as they should be."""
    files = dict(render_script(spec).beside)
    *_, last = files
    cut = files[last][: len(files[last]) // 2]
    files[last] = {"empty": b"", "cut": cut, "another": gzip.compress(b"_m_inputs=()\n")}[damage]
    for path, content in files.items():
        trial.write(path).write_bytes(content)


@pytest.mark.parametrize("damage", ["empty", "cut", "another"])
def test_a_job_without_its_whole_lists_does_not_start(trial: Trial, damage: str) -> None:
    """It ends as one does that finds no workspace: it is submitted again, with new lists."""
    spec = job(trial, upload_bytes=1000)
    damaged(trial, spec, damage)
    ended = trial.run(spec)
    assert (ended.returned, ended.entries) == (0, ())
    assert "missing or damaged: the job did not start" in ended.output
    assert not (trial.workspace / "ran").exists()


def test_lists_may_appear_late_on_a_node(trial: Trial) -> None:
    spec = job(trial)
    spec = replace(spec, limits=replace(spec.limits, visible_s=300))
    damaged(trial, spec, "cut")
    process = trial.start(spec)
    for path, content in render_script(spec).beside.items():
        trial.write(path).write_bytes(content)
    assert trial.end(spec, process).returned == 0
    assert trial.workspace.joinpath("ran").read_text() == "ran\n"
