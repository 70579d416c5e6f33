"""What can be said of the sandbox on Slurm without a Slurm; tests/real has the rest."""

from pathlib import Path

import pytest

from hpc_sandbox import slurm
from hpc_sandbox.settings import Partition, SandboxError

SHOWN = (
    "JobId=7 JobName=a b=c (1) UserId=root(0) JobState=FAILED Reason=NonZeroExitCode "
    "Dependency=(null) Restarts=0 ExitCode=7:0 CPUs/Task=2 ReqB:S:C:T=0:0:*:* "
    "Comment=said x=y WorkDir=/a b/c StdOut=/a b/c/out "
)


def test_fields_of_scontrol() -> None:
    told = slurm.fields(SHOWN)

    assert told["JobName"] == "a b=c (1)"
    assert (told["JobState"], told["ExitCode"], told["CPUs/Task"]) == ("FAILED", "7:0", "2")
    assert told["WorkDir"] == "/a b/c"
    assert slurm.fields("") == {}


def test_a_name_does_not_forge_a_state() -> None:
    assert slurm.fields("JobId=7 JobState=RUNNING Comment=x JobState=COMPLETED")["JobState"] == (
        "RUNNING"
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:05", 5),
        ("10:00", 600),
        ("1:00:00", 3600),
        ("1-00:00:00", 86400),
        ("infinite", 365 * 86400),
        ("n/a", 365 * 86400),
    ],
)
def test_seconds(text: str, seconds: int) -> None:
    assert slurm.seconds_of(text) == seconds


SINFO = """#!/bin/sh
cat << EOF
devel|2:00:00|30:00|2|48|95000|(null)
batch*|1-00:00:00|1:00:00|8|128|515000|gpu:a100:4(S:0-1)
batch*|1-00:00:00|1:00:00|4|256|257000|(null)
EOF
"""


def install(directory: Path, sinfo: str) -> None:
    directory.mkdir()
    for name in slurm.COMMANDS:
        program = directory / name
        program.write_text(sinfo)
        program.chmod(0o755)


def test_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "bin", SINFO)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    assert slurm.partitions() == (
        Partition("batch", 86400, 3600, nodes=12, cpus=256, memory_mib=515000, gpus=4),
        Partition("devel", 7200, 1800, nodes=2, cpus=48, memory_mib=95000, gpus=0),
    )


def test_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="this machine has no sbatch, scancel"):
        slurm.partitions()


def test_slurm_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "bin", "#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(SandboxError, match="does not answer: Unable to contact"):
        slurm.partitions()
