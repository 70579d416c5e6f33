"""The memory of a job, as its script samples it."""

import subprocess
import sys

from snakemake_executor_plugin_mantik.jobs.library import library_path
from tests.support.trial import Trial

MIB = 1 << 20
SEEN = "until grep -Eq {} .mantik/work/*/*/memory 2> /dev/null; do sleep 0.05; done"


def test_the_most_memory_of_all_processes_is_in_the_marker(trial: Trial) -> None:
    # Two processes at a time; one of them ends before the job does.
    hold = f"{sys.executable} -c 'import sys; held = b\"x\" * (90 << 20); sys.stdin.read()'"
    seen = SEEN.format("'^(1[89]|[2-9][0-9])[0-9]{7}$'")
    trial.write("job", f"mkfifo p q; {hold} < p & {hold} < q & exec 3> p 4> q\n{seen}\n")
    ended = trial.run(trial.spec(". ./job; exec 3>&-; wait %1; exec 4>&-; wait"))
    assert ended.sure.exit_code == 0, ended.log
    assert ended.sure.memory is not None
    assert 180 * MIB <= ended.sure.memory < 400 * MIB


def sampled(trial: Trial, command: str) -> str:
    """The output of a command that calls the script's own function for a sample."""
    script = f". ./{library_path()}\n_m_work=. _m_attempt=t _m_most=0 _m_memory_stat=\n{command}\n"
    ended = subprocess.run(
        ["bash", "-c", script],
        check=False,
        cwd=trial.workspace,
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert ended.stderr == ""
    return ended.stdout


def test_memory_is_unknown_where_srun_starts_processes(trial: Trial) -> None:
    start = "cp /bin/sleep srun; ./srun 600 & until grep -q srun /proc/$!/comm; do :; done"
    later = "kill $!; wait $! 2> /dev/null; (_m_sample_memory); cat memory"
    command = f"{start}; (_m_sample_memory); [ -e memory ] || echo unknown; {later}"
    unknown, known = sampled(trial, command).split()
    assert unknown == "unknown"
    assert int(known) > 1 << 20


def test_the_kernels_account_of_a_slurm_job_counts(trial: Trial) -> None:
    trial.write("v2", "anon 1000\nfile 5000000\nshmem 24\nsock 7\n")
    trial.write("v1", "cache 9\nrss 9\ntotal_cache 99999\ntotal_rss 700\ntotal_shmem 1\n")
    command = "for _m_memory_stat in v1 v2 v1; do _m_sample_memory; cat memory; done"
    assert sampled(trial, command).split() == ["701", "1024", "1024"]
