"""Only whole markers of the right attempt are believed."""

import gzip
import io
import lzma
import subprocess
import tarfile
import tracemalloc
import uuid
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snakemake_executor_plugin_mantik.jobs import markers
from snakemake_executor_plugin_mantik.jobs.library import library_path
from snakemake_executor_plugin_mantik.jobs.markers import MOST_NEW, MarkerInvalid, read_marker
from snakemake_executor_plugin_mantik.jobs.spec import InputFile, OutputFile
from tests.support.inotify import CREATE, MODIFY, MOVED_TO, Watch
from tests.support.trial import NASTY, Trial

ATTEMPT = str(uuid.UUID(int=7))
META = (
    f"version=1\nattempt={ATTEMPT}\nexit_code=0\nfailed_step=\nsignal=\nstarted=1.5\nended=2.5\nhost=n1\n"
    "scheduler_job=4\nsite_job=5\nfiles=1\nlacking=0\narchive_size=0\narchive_sha256=\nlog_bytes=3\n"
)
RECORD = b"marker\0f\x002\x00644\0\0\x001.5\0x\0"


def made(members: list[tuple[str, bytes]], *extra: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.GNU_FORMAT) as tar:
        for info in extra:
            tar.addfile(info)
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def marker(meta: str = META, files: bytes = RECORD, small: bytes = b"ab") -> bytes:
    members = [("meta", meta.encode()), ("missing", b""), ("lacking", b""), ("files", files)]
    return made([*members, ("log", b"log"), ("./x", small)])


def read(content: bytes) -> markers.Marker:
    return read_marker(content, attempt_id=ATTEMPT, exit_code=0)


def test_a_whole_marker_is_read() -> None:
    found = read(marker())
    assert (found.started, found.ended, found.host) == (1.5, 2.5, "n1")
    assert (found.scheduler_job, found.site_job, found.log, found.log_bytes) == (
        "4",
        "5",
        b"log",
        3,
    )
    assert [(entry.path, data) for entry, data in found.small_outputs()] == [("x", b"ab")]
    assert found.cpu is None


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        ("1m2.500s 0m0.250s", 62.75),
        ("0m0,001s 60m0,000s", 3600.001),
        ("", None),
        ("1m2.5s", None),
        ("-1m2.500s 0m0.250s", None),
        ("0m1e5s 0m0.000s", None),
    ],
)
def test_cpu_time_is_what_bash_says(told: str, seconds: float | None) -> None:
    found = read(marker(f"{META}cpu={told}\n")).cpu
    assert found == (pytest.approx(seconds) if seconds is not None else None)


def test_no_cut_marker_is_believed(trial: Trial) -> None:
    spec = trial.spec("echo log; echo x > out", outputs=(OutputFile("out"), OutputFile(NASTY)))
    trial.run(spec)
    whole = (trial.workspace / spec.paths.marker(0)).read_bytes()
    assert read_marker(whole, attempt_id=spec.paths.attempt_id, exit_code=0).missing_outputs == (
        NASTY,
    )
    for cut in range(1, len(whole)):
        with pytest.raises(MarkerInvalid):
            read_marker(whole[:cut], attempt_id=spec.paths.attempt_id, exit_code=0)
    with pytest.raises(MarkerInvalid):
        read_marker(whole + whole[:7], attempt_id=spec.paths.attempt_id, exit_code=0)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_damaged_marker_is_taken_for_another(at: int, change: int) -> None:
    whole = bytearray(marker())
    whole[at % len(whole)] ^= change
    try:
        found = read(bytes(whole))
    except MarkerInvalid:
        return
    assert found == read(marker())  # the header of gzip holds bytes without meaning


@pytest.mark.parametrize("content", [b"", b"owner=4711-n1-7\nsite_job=5\n"])
def test_a_name_alone_is_a_marker(content: bytes) -> None:
    found = read_marker(content, attempt_id=ATTEMPT, exit_code=9)
    assert (found.exit_code, found.bare, found.files) == (9, True, ())


UNFIT = [
    marker(META.replace(ATTEMPT, str(uuid.UUID(int=8)))),
    marker(META.replace("exit_code=0", "exit_code=1")),
    marker(META.replace("version=1", "version=2")),
    marker(META.replace("files=1", "files=2")),
    marker(META.replace("files=1", "files=many")),
    marker(META.replace("lacking=0", "lacking=1")),
    marker(META.replace("started=1.5", "started=noon")),
    marker(META.replace("started=1.5", "started=inf")),
    marker(META.replace("started=1.5", "started=nan")),
    marker(META.replace("log_bytes=3", "log_bytes=" + "9" * 5000)),
    marker(files=RECORD.replace(b"\x002\0", b"\0" + b"2" * 5000 + b"\0")),
    marker(META.replace("log_bytes=3", "log_bytes=-3")),
    marker(files=RECORD[:-1]),
    marker(files=RECORD + b"x\0"),
    marker(files=RECORD.replace(b"marker", b"nearby")),
    marker(files=RECORD.replace(b"644", b"rwx")),
    marker(files=RECORD.replace(b"\x002\0", b"\0-2\0")),
    marker(files=RECORD.replace(b"\0f\0", b"\0d\0")),
    marker(files=RECORD.replace(b"\0x\0", b"\0../../y\0")),
    marker(small=b"abc"),
    marker(files=RECORD.replace(b"644\0\0", b"644\0" + b"0" * 64 + b"\0")),
    made([("log", b"")]),
    made([]),
    b"not gzip",
    gzip.compress(b"not a tar" * 1000),
    gzip.compress(b""),
]


@pytest.mark.parametrize("content", UNFIT, ids=[str(number) for number in range(len(UNFIT))])
def test_what_does_not_fit_is_refused(content: bytes) -> None:
    with pytest.raises(MarkerInvalid):
        read(content)


def test_hostile_members_do_no_harm() -> None:
    link = tarfile.TarInfo("./x")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    hard = tarfile.TarInfo("./x")
    hard.type, hard.linkname = tarfile.LNKTYPE, "/etc/passwd"
    device = tarfile.TarInfo("meta")
    device.type = tarfile.CHRTYPE
    strange = [tarfile.TarInfo(name) for name in ("/etc/evil", "../evil", "a/../../evil")]
    members = [("meta", META.encode()), ("missing", b""), ("lacking", b""), ("files", RECORD)]
    content = made([*members, ("log", b"log"), ("./x", b"ab")], link, hard, device, *strange)
    assert read(content) == read(marker())


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markers, "MARKER_LIMIT", 1 << 20)
    with pytest.raises(MarkerInvalid, match="more than"):
        read(gzip.compress(b"\0" * (2 << 20)))


def header(kind: bytes, length: int = 0, pax: dict[str, str] | None = None) -> bytes:
    """The header of an entry `meta` that is no plain file."""
    member = tarfile.TarInfo("meta")
    member.type, member.size, member.pax_headers = kind, length, pax or {}
    return member.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)


def sparse() -> bytes:
    """The old form of a file with a hole of 8 GiB, and nothing else."""
    block = bytearray(header(tarfile.GNUTYPE_SPARSE))
    block[386:410] = b"00000000000\0" * 2
    block[483:495] = b"77777777777\0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


BOMBS = {
    "sparse": sparse(),
    "sparse, new form": header(
        tarfile.REGTYPE, pax={"GNU.sparse.map": "0,0", "GNU.sparse.size": "99999999999"}
    ),
    "sparse without a size": header(tarfile.REGTYPE, pax={"GNU.sparse.map": "x"}),
    "headers of headers": (header(tarfile.GNUTYPE_LONGNAME, 1) + b"a" + b"\0" * 511) * 5000,
    "header of a gigabyte": header(tarfile.GNUTYPE_LONGNAME, 1 << 30),
    "longer than it is": header(tarfile.REGTYPE, pax={"size": "9" * 14}),
    "packed twice": lzma.compress(header(tarfile.REGTYPE)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_no_tar_takes_more_than_it_holds(kind: str) -> None:
    content = gzip.compress(BOMBS[kind] + b"\0" * 1024)
    tracemalloc.start()
    try:
        with pytest.raises(MarkerInvalid):
            read(content)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["files", "lacking", "missing"])
def test_lists_are_not_endless(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(markers, "MOST_ENTRIES", 3)
    lists = {"files": b"", "lacking": b"", "missing": b"", name: b"\0" * 25}
    meta = META.replace("files=1", "files=0")
    with pytest.raises(MarkerInvalid, match="too long"):
        read(made([("meta", meta.encode()), *lists.items(), ("log", b"log")]))


def test_a_link_within_a_directory_has_its_target() -> None:
    found = read(marker(files=b"none\0l\x000\x00777\0\0../a b\x001.5\0d/l\0"))
    assert replace(found.files[0], size=0) == markers.OutputEntry(
        "d/l", "l", 0, 0o777, "", "none", "../a b", 1_500_000_000
    )


@pytest.mark.parametrize("rest", [b"7\x001.5\0", b"7\x001.5\x00644\0half", b"odd\0\x00644\0b\0"])
def test_a_cut_list_of_new_files_costs_no_outputs(rest: bytes) -> None:
    lists = {"files": b"", "lacking": b"", "missing": b"", "new": b"5\x001.5\x00644\0a\0" + rest}
    meta = META.replace("files=1", "files=0")
    found = read(made([("meta", meta.encode()), *lists.items(), ("log", b"log")]))
    assert [entry.path for entry in found.new] == ["a"]


# A marker is seen whole or not at all: it gets its name last, by a rename.


@pytest.mark.parametrize("code", [0, 3])
def test_nothing_is_written_under_a_markers_name(trial: Trial, code: int) -> None:
    spec = trial.spec(
        f"head -c 300000 /dev/urandom > large; echo x > small; exit {code}",
        outputs=(OutputFile("large"), OutputFile("small")),
    )
    with Watch(trial.attempts) as watch:
        assert trial.run(spec).returned == code
        seen = list(watch.events())
    marker = f"{spec.paths.attempt_id}.{code}"
    done = [mask for name, mask in seen if name == marker]
    assert [mask & MOVED_TO for mask in done] == [MOVED_TO], seen
    assert not [mask for mask in done if mask & (CREATE | MODIFY)]


# New files beside the outputs, as a job's script lists them.


COMMAND = f"""
echo out > res/out; mkdir -p tree/inner made/deeper; echo of it > tree/inner/file
echo log > res/log; echo changed > input
touch -d 2001-01-01 made/deeper/old made/deeper; echo one > made/one.json
echo x > .hidden; mkdir .secret made/__pycache__; echo x | tee .secret/x > made/__pycache__/x.pyc
ln -s made/one.json link
mkdir -p a/b/c/d/e; echo x > a/b/near; echo x > a/b/c/d/e/far
echo x > res/{NASTY!r}; echo x > $'not \\xff utf-8'
""".replace(repr(NASTY), "'a b'\\''\"\n#%*$HOME`ü;-'")


def test_only_new_files_that_are_no_outputs_are_listed(trial: Trial) -> None:
    trial.write("before/old")
    trial.write("input")
    outputs = (
        OutputFile("res/out"), OutputFile("res/log", "log"), OutputFile("tree", directory=True)
    )  # fmt: skip
    spec = trial.spec(
        COMMAND, inputs=(InputFile("input", changed=True),), outputs=outputs,
    )  # fmt: skip

    ended = trial.run(spec)

    found = {entry.path: entry for entry in ended.sure.new}
    assert set(found) == {
        "a/b/near", "made/deeper/old", "made/one.json", f"res/{NASTY}", "not \udcff utf-8"
    }, ended.log  # fmt: skip
    assert found["made/one.json"].size == 4
    assert found["made/deeper/old"].modified_ns == 978307200 * 10**9
    assert {entry.path for entry in ended.sure.files} == {
        "res/out", "res/log", "tree", "tree/inner", "tree/inner/file"
    }  # fmt: skip


def test_a_failed_command_lists_nothing(trial: Trial) -> None:
    ended = trial.run(trial.spec("echo x > new; exit 3"))
    assert ended.sure.new == ()


@pytest.mark.parametrize(("others", "lasts", "found"), [(60_000, 0, set()), (3_500, 3, {"new"})])
def test_a_short_job_does_not_look_at_what_very_many_have_made(
    trial: Trial, others: int, lasts: int, found: set[str]
) -> None:
    """The longer a job ran, the more names it looks at."""
    (trial.workspace / "res").mkdir()
    subprocess.run(
        f"seq {others} | xargs touch", shell=True, cwd=trial.workspace / "res", check=True
    )
    spec = trial.spec(
        f"sleep {lasts}; echo x > res/out; echo x > new", outputs=(OutputFile("res/out"),)
    )
    assert {entry.path for entry in trial.run(spec).sure.new} == found


def test_a_clock_that_is_set_back_keeps_no_new_file_from_being_listed(trial: Trial) -> None:
    back = f". ./{library_path()}; _m_started=200.5 _m_ended=100.5; _m_search . -printf .; _m_found"
    said = subprocess.run(
        ["bash", "-c", f"{back}; echo $_m_names"],
        cwd=trial.workspace,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (said.stdout, said.stderr) == ("5000\n", "")


def test_very_many_are_not_all_listed(trial: Trial) -> None:
    ended = trial.run(trial.spec("mkdir many; cd many; touch $(seq 600)"))
    assert len(ended.sure.new) == MOST_NEW
