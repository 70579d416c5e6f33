"""How busy a job's GPUs are, as its script samples it; programs stand in for GPUs here."""

import subprocess
from dataclasses import replace

import pytest

from snakemake_executor_plugin_mantik.jobs.library import read_library
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec, LiveDirectory, OutputFile, Resources
from tests.support.trial import QUICK, Trial

STORE = "its store"
METRICS = f"{STORE}/0/run/metrics"
QUERY = "--query-gpu=utilization.gpu"
# What nvidia-smi prints for three GPUs, one of which does not report how busy it is.
SAMPLES = "50\\n[N/A]\\n71\\n"
HEARTBEATS = (
    "claim=$(echo .mantik/attempts/*/*); size=$(stat -c %s $claim); "
    "until (( $(stat -c %s $claim) > size + 1 )); do sleep 0.05; done"
)
SEEN = "until [ -e .mantik/work/*/*/gpus ]; do sleep 0.05; done"


def smi(trial: Trial, then: str, lines: str = SAMPLES) -> None:
    """A stand-in for nvidia-smi, which notes in the workspace how it was called."""
    text = f'#!/bin/bash\necho "$*" >> called\nprintf "{lines}"\n{then}\n'
    trial.program("nvidia-smi", text)


def job(trial: Trial, command: str = SEEN, *, live: bool = False) -> JobSpec:
    spec = trial.spec(command, resources=Resources(gpus_per_node=2))
    if not live:
        return spec
    return replace(
        spec,
        live=LiveDirectory(STORE, "/metrics/", METRICS),
        outputs=(OutputFile(STORE, "log", directory=True, keep=True),),
    )


def gpu_functions() -> str:
    text = read_library().decode().partition("# ---- GPUs")[2]
    return f"# {text.partition('# ----')[0].partition(chr(10))[2]}"


def test_the_mean_use_of_gpus_is_in_the_marker(trial: Trial) -> None:
    smi(trial, 'sleep 0.2; printf "80\\n"; exec sleep 600')
    more = "until grep -q ' 3$' .mantik/work/*/*/gpus; do sleep 0.05; done 2> /dev/null"
    ended = trial.run(job(trial, more), env={"CUDA_VISIBLE_DEVICES": "0,3"})
    assert ended.sure.exit_code == 0, ended.log
    assert ended.sure.gpu_busy == 67.0
    called = (trial.workspace / "called").read_text()
    assert called == f"--id=0,3 --format=csv,noheader,nounits {QUERY} --loop={QUICK.heartbeat_s}\n"


def test_their_mean_is_a_metric_of_its_run(trial: Trial) -> None:
    smi(trial, "exec sleep 600")
    ended = trial.run(job(trial, f"mkdir -p '{METRICS}'; {SEEN}", live=True))
    assert ended.sure.exit_code == 0, ended.log
    found = {
        path.name: path.read_text().split()
        for path in (trial.workspace / METRICS / "system").iterdir()
    }
    assert {name: words[1:] for name, words in found.items()} == {
        "gpu_utilization_percentage": ["60", "0"]
    }
    assert all(len(words[0]) == 13 and words[0].isdecimal() for words in found.values())
    # What is listed is what is there: the sampling has ended before.
    listed = {entry.path for entry in ended.sure.files if entry.type == "f"}
    assert f"{METRICS}/system/gpu_utilization_percentage" in listed


@pytest.mark.parametrize("lines", ["", "No devices were found\\n", "[Unknown Error]\\n5"])
def test_a_driver_that_fails_or_hangs_disturbs_nothing(trial: Trial, lines: str) -> None:
    # A process that waits for a driver cannot be ended; this one ignores what can be ignored.
    smi(trial, "trap '' TERM INT HUP PIPE; exec sleep 600" if not lines else "exit 9", lines)
    ended = trial.run(job(trial, f"until [ -e called ]; do sleep 0.05; done; {HEARTBEATS}"))
    assert ended.sure.exit_code == 0, ended.log
    assert ended.sure.gpu_busy is None
    assert ended.sure.memory is not None


def test_a_heartbeat_that_was_killed_does_not_hold_the_job_up(trial: Trial) -> None:
    smi(trial, "echo $PPID > heartbeat; mv heartbeat killed; exec sleep 600")
    kill = "until [ -s killed ]; do sleep 0.05; done; kill -KILL $(cat killed)"
    ended = trial.run(job(trial, kill))
    assert ended.sure.exit_code == 0, ended.log


def test_a_sampling_that_ended_long_ago_is_not_killed(trial: Trial) -> None:
    """Its number may be another process's by then."""
    command = f"""{gpu_functions()}
        _m_print_gpus() {{ :; }}
        _m_now() {{ _m_time=1.0; }}
        kill() {{ echo "kill $*"; }}
        _m_work=. _m_gpus_wanted=yes; _m_begin_gpus
        [ -n "$_m_gpu_process" ] && echo begun
        while [ -n "$_m_gpus" ]; do _m_sample_gpus; sleep 0.01; done
        _m_end_gpus"""
    ended = subprocess.run(
        ["bash", "-c", command], cwd=trial.workspace, text=True, capture_output=True, check=True,
        timeout=600,
    )  # fmt: skip
    assert ended.stdout == "begun\n"
    assert (trial.workspace / "gpus.end").exists()


def test_nothing_is_sampled_without_gpus(trial: Trial) -> None:
    smi(trial, "exec sleep 600")
    assert trial.run(trial.spec(":")).sure.gpu_busy is None
    assert not (trial.workspace / "called").exists()


def test_the_kernels_files_of_amd_are_read(trial: Trial) -> None:
    trial.write("drm/card0-DP-1/device/vendor", "0x1002\n")
    for card, busy in enumerate((10, 20)):
        device = f"drm/card{card}/device"
        trial.write(f"{device}/drm/renderD{128 + card}/dev")
        trial.write(f"{device}/gpu_busy_percent", f"{busy}\n")
    # The control group of the job denies it another card.
    (trial.workspace / "dri").mkdir()
    (trial.workspace / "dri/renderD129").touch()
    functions = gpu_functions().partition("_m_begin_gpus()")[0]
    start = f"{functions}\n_m_drm=drm _m_dri=dri _m_heartbeat_s=0.1"
    command = f'{start}; exec 3< <(_m_print_gpus); read -r line <&3; kill $!; echo "$line"'
    ended = subprocess.run(
        ["bash", "-c", command], cwd=trial.workspace, text=True, capture_output=True, check=True,
        timeout=600,
    )  # fmt: skip
    assert ended.stdout == "20\n"
