"""Containers that srun starts, on a real Slurm, whose srun refuses options that it does not know.

Only the plugins themselves are fakes (`tests/support/slurmplugins.py`).
"""

from dataclasses import replace

import pytest

from snakemake_executor_plugin_mantik.jobs.paths import parse_marker_name
from snakemake_executor_plugin_mantik.jobs.script import render_script
from snakemake_executor_plugin_mantik.jobs.spec import Container, Environment, JobSpec
from tests.real import slurm
from tests.support import slurmplugins
from tests.support.needs import require
from tests.support.trial import Trial
from tests.support.workflows import until

pytestmark = pytest.mark.software("Slurm")


def submit(spec: JobSpec, trial: Trial, cluster: slurm.Slurm, *options: str) -> int:
    script = trial.start_folder / f"{spec.paths.attempt_id}.sh"
    script.write_bytes(render_script(spec).text.encode())
    output = f"--output={trial.start_folder}/out"
    said = cluster.run("sbatch", "--parsable", output, "--time=5", *options, str(script))
    return int(said.strip())


def ended(spec: JobSpec, trial: Trial) -> tuple[str, str]:
    def codes() -> list[int]:
        # Other files of the attempt begin with its id, too.
        markers = [parse_marker_name(path.name) for path in trial.attempts.iterdir()]
        return [one[1] for one in markers if one and one[0] == spec.paths.attempt_id]

    code = until(codes, "the job has ended")[0]
    return str(code), (trial.workspace / spec.paths.log).read_text()


def test_tasks_in_containers_and_their_end(trial: Trial, real_slurm: slurm.Slurm) -> None:
    require(slurmplugins.lacking(), "a fake container")
    plugins = slurmplugins.install(trial.bin.parent / "plugins")
    folder = trial.bin.parent / "a workspace"
    trial.move(folder)
    environment = Environment(
        container=Container("Pyxis", "ubuntu", options=("--label",)),
        before_on_compute=(plugins,),
        variables={"FROM_IMAGE": "mine"},
    )
    end = "trap 'sleep 2; echo bye; exit 7' TERM; while :; do sleep 0.1; done"
    command = f'echo "$FROM_IMAGE $PWD" > up.$SLURM_PROCID; {end}'
    several = trial.spec(command, environment=environment)
    number = submit(several, trial, real_slurm, "--ntasks=2")
    ups = [folder / "up.0", folder / "up.1"]
    until(lambda: all(up.exists() and up.read_text() for up in ups), "both tasks run")
    assert {up.read_text() for up in ups} == {f"mine {folder}\n"}

    real_slurm.run("scancel", "--signal=TERM", "--batch", str(number))

    code, log = ended(several, trial)
    assert (code, log.count(": bye")) == ("7", 2), log

    once = replace(
        trial.spec('echo "$SLURM_NTASKS"; nproc', environment=environment), launches=True
    )
    submit(once, trial, real_slurm, "--ntasks-per-node=2", "--cpus-per-task=1")
    code, log = ended(once, trial)
    assert (code, log.splitlines()[0]) == ("0", "0: 1"), log
