"""What a job writes to a directory is told while it runs, and whatever goes wrong costs nothing."""

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

import pytest

from snakemake_executor_plugin_mantik.jobs import packs
from snakemake_executor_plugin_mantik.jobs.packs import Pack, TarDamaged, read_packs
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec, LiveDirectory, OutputFile
from snakemake_executor_plugin_mantik.tracking.store import GROWING
from tests.support.trial import NASTY, QUICK, Trial, packed, session, signal_session, wait_until

STORE = "log"
QUICK_LIVE = replace(QUICK, live_s=1, live_file_bytes=1000)
NAME = NASTY.replace("\n", " ")
"""Without a newline: what has one in its name comes when the job is over."""
WAIT = 'wait_for() { until [ -e "$1" ]; do sleep 0.05; done; }; '


def spec_of(trial: Trial, command: str, **limits: int) -> JobSpec:
    """A job that logs to a directory in which something lies already."""
    trial.write(f"{STORE}/7/run/meta.yaml", "there before\n")
    return trial.spec(
        WAIT + command,
        outputs=(OutputFile(STORE, "log", directory=True, keep=True),),
        live=LiveDirectory(STORE, GROWING),
        limits=replace(QUICK_LIVE, **limits),
    )


def appear(trial: Trial, path: str, text: str) -> None:
    """Write a file that no look sees half."""
    (trial.workspace / path).parent.mkdir(parents=True, exist_ok=True)
    trial.write("part", text).rename(trial.workspace / path)


@dataclass
class Reader:
    """Reads the packs of an attempt as the controller does."""

    trial: Trial
    spec: JobSpec
    read: int = 0
    piece: int = 0
    requests: list[int] = field(default_factory=list)

    @property
    def told(self) -> int:
        """How much there is, as a listing of the claims tells."""
        path = self.trial.workspace / self.spec.paths.live
        return path.stat().st_size if path.exists() else 0

    def packs(self) -> Iterator[Pack]:
        """What is new."""
        told = self.told
        while self.read < told:
            if self.read - self.piece >= packs.PIECE_BYTES:
                self.piece = self.read
            self.requests.append(self.piece)
            content = (self.trial.workspace / self.spec.paths.piece(self.piece)).read_bytes()
            for pack in read_packs(content[self.read - self.piece : told - self.piece]):
                self.read += pack.size
                yield pack

    def files(self, into: dict[str, bytes]) -> dict[str, bytes]:
        """The same as files, in `into`."""
        for pack in self.packs():
            for file in pack.files:
                before = into.get(str(file.path), b"")
                if file.start is None:
                    into[str(file.path)] = file.content
                else:
                    assert file.start <= len(before), file
                    into[str(file.path)] = before[: file.start] + file.content
        return into


def begun(trial: Trial, spec: JobSpec) -> "tuple[subprocess.Popen[str], Reader]":
    """A job whose directory has been looked at once, and who reads what it tells."""
    process = trial.start(spec)
    wait_until((trial.workspace / spec.paths.work / "live" / "seen").exists)
    return process, Reader(trial, spec)


def test_what_is_new_comes_and_nothing_twice(trial: Trial) -> None:
    metric = f"{STORE}/7/run/metrics/loss/{NAME}"
    other = f"{STORE}/7/run/params/{NAME}"
    for path in (metric, other):
        (trial.workspace / path).parent.mkdir(parents=True, exist_ok=True)
    spec = spec_of(trial, "wait_for go")
    process, reader = begun(trial, spec)
    found: dict[str, bytes] = {}

    appear(trial, metric, "1 0.5 1\n2 0.")
    appear(trial, other, "3")
    trial.write(f"{other}\nsecond line", "with all the rest")
    wait_until(lambda: reader.told)
    first = reader.told
    wait_until(lambda: {*reader.files(found)} == {metric[4:], other[4:]})
    with (trial.workspace / metric).open("ab") as lines:
        lines.write(b"25 2\n")
    appear(trial, f"{STORE}/7/run/artifacts/large", "x" * 1001)
    wait_until(lambda: reader.told > first)
    seen: set[str] = set()
    grown: dict[str, tuple[int | None, bytes]] = {}

    def all_come() -> bool:
        for pack in reader.packs():
            seen.update(map(str, pack.later))
            grown.update({str(f.path): (f.start, f.content) for f in pack.files})
        return bool(seen and grown)

    wait_until(all_come)
    trial.write("go")
    ended = trial.end(spec, process)

    assert found[other[4:]] == b"3"
    # What lay there from the start, and what is too large, are not told of.
    assert {*found} == {metric[4:], other[4:]}
    assert seen == {"7/run/artifacts/large"}
    assert grown == {metric[4:]: (len("1 0.5 1\n2 0."), b"25 2\n")}
    assert ended.sure.exit_code == 0
    assert {e.path for e in ended.sure.files if e.type == "f"} == {
        metric, other, f"{other}\nsecond line", f"{STORE}/7/run/meta.yaml",
        f"{STORE}/7/run/artifacts/large",
    }  # fmt: skip
    # When it is over all of it has come with the marker.
    assert ended.entries == (spec.paths.attempt_id, f"{spec.paths.attempt_id}.0")


def test_much_of_a_growing_file_comes_in_parts_and_a_shorter_one_anew(trial: Trial) -> None:
    metric = f"{STORE}/7/run/metrics/loss"
    spec = spec_of(trial, "wait_for go")
    process, reader = begun(trial, spec)
    starts: list[int | None] = []
    found = bytearray()

    def comes(content: bytes) -> bool:
        for pack in reader.packs():
            for file in pack.files:
                starts.append(file.start)
                del found[file.start :]
                found.extend(file.content)
        return bytes(found) == content

    lines = b"".join(b"%04d\n" % number for number in range(500))
    trial.write(metric, lines.decode())
    wait_until(lambda: comes(lines))
    assert starts == [0, 1000, 2000]
    trial.write(metric, "begun anew\n")
    wait_until(lambda: comes(b"begun anew\n"))
    trial.write("go")
    assert trial.end(spec, process).sure.exit_code == 0


def test_a_job_that_logs_nothing_tells_of_nothing(trial: Trial) -> None:
    claim = trial.workspace / (spec := spec_of(trial, "wait_for go")).paths.claim
    process = trial.start(spec)
    wait_until(lambda: claim.exists() and claim.read_text().endswith("..."))

    assert Reader(trial, spec).told == 0
    assert not list((trial.workspace / spec.paths.work / "live").glob("piece.*"))
    trial.write("go")
    marker = trial.end(spec, process).sure
    assert marker.exit_code == 0
    assert not [entry.path for entry in marker.files if entry.path.startswith(STORE)]
    assert not (trial.workspace / STORE).exists()


@pytest.mark.parametrize(
    "command",
    [
        f"printf x > {STORE}/7/run/more",
        f"printf 'There before\n' > {STORE}/7/run/meta.yaml",
        f"mv {STORE}/7/run {STORE}/7/other",
        f"printf x > {STORE}/7/run/more; exit 3",
    ],
)
def test_whatever_a_job_has_changed_comes_back(trial: Trial, command: str) -> None:
    marker = trial.run(spec_of(trial, command)).sure

    there = {str(p.relative_to(trial.workspace)) for p in (trial.workspace / STORE).rglob("*")}
    assert there
    assert {e.path for e in marker.files} == there | {STORE}


@pytest.mark.parametrize("fails", ["*%T@?%P*", "*-quit"])
def test_a_listing_that_fails_loses_nothing(trial: Trial, fails: str) -> None:
    text = f'#!/bin/bash\ncase "$*" in {fails}) exit 1 ;; esac\nexec /bin/find "$@"\n'
    trial.program("find", text)
    command = "true" if fails == "*-quit" else f"printf x > {STORE}/more"

    marker = trial.run(spec_of(trial, command)).sure

    assert f"{STORE}/7/run/meta.yaml" in {entry.path for entry in marker.files}


def test_pieces_follow_each_other_and_come_to_an_end(trial: Trial) -> None:
    spec = spec_of(trial, "wait_for go", live_file_bytes=60_000, live_bytes=250_000)
    process, reader = begun(trial, spec)
    found: dict[str, bytes] = {}
    expected: dict[str, bytes] = {}
    at = trial.workspace / spec.paths.work / "live"

    while not (at / "full").exists():
        name, told = f"7/run/{len(expected)}", reader.told
        # Random bytes: what does not become smaller when it is packed.
        expected[name] = os.urandom(50_000)
        part = trial.workspace / "part"
        part.write_bytes(expected[name])
        part.rename(trial.workspace / STORE / name)
        wait_until(lambda: reader.told > told or (at / "full").exists())  # noqa: B023 - at once
        reader.files(found)

    assert len(expected) == 5
    expected.popitem()
    assert found == expected
    assert len(set(reader.requests)) == 2
    trial.write("go")
    assert trial.end(spec, process).sure.exit_code == 0


def test_more_than_a_pack_holds_comes_with_the_next_looks(trial: Trial) -> None:
    size = 1 << 20
    spec = spec_of(trial, "wait_for go", live_file_bytes=size)
    made = trial.workspace / "made"
    made.mkdir()
    expected = {f"7/{number}" for number in range(6)}
    for path in expected:
        (made / path[2:]).write_bytes(bytes(size))
    process, reader = begun(trial, spec)
    found: list[set[str]] = []

    # All of them at once, as a look sees them.
    (trial.workspace / STORE / "7").rename(made / "before")
    made.rename(trial.workspace / STORE / "7")

    def all_come() -> bool:
        found.extend({str(file.path) for file in pack.files} for pack in reader.packs())
        return expected <= set().union(*found)

    wait_until(all_come)

    assert max(len(names & expected) for names in found) * size <= packs.PACK_BYTES + size
    assert sum(len(names & expected) for names in found) == len(expected)
    trial.write("go")
    assert trial.end(spec, process).sure.exit_code == 0


def test_what_changes_or_goes_while_it_is_packed_holds_up_nothing(trial: Trial) -> None:
    log = trial.workspace / STORE
    # What is being packed is another file by the time that tar has ended, or gone before it begins.
    trial.program(
        "tar",
        f"""#!/bin/bash
case "$*" in */live*) ;; *) exec /bin/tar "$@" ;; esac
cd -- {shlex.quote(str(log))} && rm -f gone.* && cd -- "$OLDPWD" || exit 2
/bin/tar "$@" || exit 2
[ -e go ] || [ -e changed ] || {{ : > changed; echo 2 > {STORE}/whole; exit 1; }}
""",
    )
    goes_on = f"n=0; until [ -e go ]; do : > {STORE}/gone.$((n += 1)); sleep 0.05; done"
    spec = spec_of(trial, f"wait_for begin; echo 1 > {STORE}/whole; {goes_on}")
    process, reader = begun(trial, spec)
    trial.write("begin")
    seen: list[bytes] = []

    def comes(content: bytes) -> bool:
        seen.extend(f.content for p in reader.packs() for f in p.files if str(f.path) == "whole")
        return content in seen

    wait_until(lambda: comes(b"2\n"))
    trial.write("go")

    # The one that tar was not content with came, and so did what it had become.
    assert len(seen) > 1
    assert seen[-1] == b"2\n"
    assert trial.end(spec, process).sure.exit_code == 0


def test_a_directory_that_the_job_removes_and_makes_again_is_told_of(trial: Trial) -> None:
    metric = f"{STORE}/7/run/metrics/loss"
    command = (
        f"wait_for one; mkdir -p {STORE}/7/run/metrics; echo 1 1 1 > {metric}; wait_for two;"
        f" rm -r {STORE}; wait_for three; mkdir -p {STORE}/7/run/metrics; echo 2 > {metric};"
        " wait_for go"
    )
    spec = spec_of(trial, command)
    process, reader = begun(trial, spec)
    claim = trial.workspace / spec.paths.claim
    found: dict[str, bytes] = {}

    trial.write("one")
    wait_until(lambda: reader.files(found) == {metric[4:]: b"1 1 1\n"})
    trial.write("two")
    wait_until(lambda: not (trial.workspace / STORE).exists())
    # Looks go on while there is nothing to look at, and so does the job.
    beats = claim.read_text().count(".")
    wait_until(lambda: claim.read_text().count(".") > beats + 2)
    trial.write("three")
    wait_until(lambda: reader.files(found) == {metric[4:]: b"2\n"})

    trial.write("go")
    assert trial.end(spec, process).sure.exit_code == 0


@pytest.mark.parametrize("program", ["tar", "find"])
def test_a_look_that_hangs_or_fails_holds_up_nothing(trial: Trial, program: str) -> None:
    begun = trial.start_folder / "begun"
    hangs = f'case "$*" in *{STORE}*) : > {begun}; exec sleep 1000 ;; esac'
    if program == "tar":
        hangs = hangs.replace(f"*{STORE}*", "*/live*")
    trial.program(program, f'#!/bin/bash\n[ -e go ] || {hangs}\nexec /bin/{program} "$@"\n')
    trial.write(f"{STORE}/7/run/metrics/a")
    command = f"sleep 1; echo 1 >> {STORE}/7/run/metrics/a; wait_for go"
    spec = spec_of(trial, command)
    if program == "find":
        trial.program("find", '#!/bin/bash\n[ -e go ] || exit 1\nexec /usr/bin/find "$@"\n')
    claim = trial.workspace / spec.paths.claim
    process = trial.start(spec)
    if program == "tar":
        wait_until(begun.exists)
    before = claim.read_text().count(".") if claim.exists() else 0
    wait_until(lambda: claim.exists() and claim.read_text().count(".") > before + 3)

    # Before it is over: a look that works again reports what is new.
    assert Reader(trial, spec).told == 0
    trial.write("go")
    assert trial.end(spec, process).sure.exit_code == 0
    signal_session(process.pid, signal.SIGKILL)


def test_half_a_pack_is_written_anew(trial: Trial) -> None:
    # A disk that is full for a while: the first piece is cut.
    cut = (
        '#!/bin/bash\ncase "$*" in */pack) if [ ! -e {0} ]; then : > {0}; head -c 20 "${{@: -1}}";'
        ' exit 1; fi ;; esac\nexec /bin/cat "$@"\n'
    ).format(trial.start_folder / "cut")
    trial.program("cat", cut)
    spec = spec_of(trial, f"sleep 1.5; mkdir {STORE}/x; echo 1 > {STORE}/x/y; wait_for go")
    process = trial.start(spec)
    reader = Reader(trial, spec)
    wait_until((trial.start_folder / "cut").exists)
    wait_until(lambda: reader.told)

    assert reader.files({}) == {"x/y": b"1\n"}
    trial.write("go")
    assert trial.end(spec, process).sure.exit_code == 0


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip at all",
        packed({"./../../escaped": b"x"}),
        packed({"part/0/../../../escaped": b"x"}),
        packed({"/etc/passwd": b"x"}),
        packed({"later": b"../x\0"}),
    ],
    # A gzip has the time in it; all workers have to call a test the same.
    ids=["no gzip", "above", "part above", "absolute", "later above"],
)
def test_what_no_job_script_makes_is_not_taken(content: bytes) -> None:
    with pytest.raises(TarDamaged):
        list(read_packs(content))


def test_a_pack_that_unpacks_to_more_than_it_may_is_none() -> None:
    with pytest.raises(TarDamaged, match="it unpacks to"):
        list(read_packs(packed({"./zeros": bytes(packs.LONGEST_PACK)})))


def test_a_pack_that_is_cut_is_left_to_the_next_time() -> None:
    one, two = packed({"./a": b"1"}), packed({"part/17/b/c": b"2"})

    found = list(read_packs(one + two[:-1]))

    assert [pack.size for pack in found] == [len(one)]
    assert [pack.files[0].path for pack in read_packs(one + two)] == [
        PurePosixPath("a"), PurePosixPath("b/c"),
    ]  # fmt: skip
    assert [pack.files[0].start for pack in read_packs(one + two)] == [None, 17]


def test_commands_beside_a_job(trial: Trial) -> None:
    """One runs once; what it has left running ends with the job, another user's never begins."""
    spec = trial.spec(WAIT + "wait_for go", limits=QUICK)
    folder = trial.workspace / spec.paths.asked
    folder.mkdir(parents=True)
    other = folder / "other.sh"
    other.write_text("touch other\n")
    if os.getuid() == 0:
        os.chown(other, 65534, -1)
    else:
        other.unlink()
    process = trial.start(spec)
    for name, line in {"one": "pwd; exit 3", "two": "touch begun; sleep 600"}.items():
        (folder / f"{name}.new").write_text(f"exec timeout 900 bash -c {shlex.quote(line)}\n")
        (folder / f"{name}.new").rename(folder / f"{name}.sh")
    wait_until((folder / "one.code").exists)
    wait_until((trial.workspace / "begun").exists)
    trial.write("go")
    assert trial.end(spec, process).sure.exit_code == 0
    assert (folder / "one.out").read_text() == f"{trial.workspace}\n"
    assert (folder / "one.code").read_text() == "3\n"
    assert not (folder / "two.code").exists()
    assert not (trial.workspace / "other").exists()
    wait_until(lambda: not session(process.pid))
