"""Commands in containers that srun starts, with a fake of the plugins that really start them."""

import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.script import render_script
from snakemake_executor_plugin_mantik.jobs.spec import Container, Environment, OutputFile, Segment
from tests.support import slurmplugins
from tests.support.needs import require
from tests.support.trial import Trial

INNER = """#!/bin/bash
export -n ALL
for word; do
  case $word in --export=*) [ "$word" = --export=ALL ] || ALL=no ;; --*) ;; *) break ;; esac
  shift
done
[ -z "$ALL" ] || exec env -i PATH="$PATH" FAKE_MOUNTS="$FAKE_MOUNTS" "$@"
exec "$@"
"""
"""Stands for the srun of a Slurm: it starts one task."""

MISSING = Container("Pyxis", "env/x.sqsh", is_file=True)
ALLOCATION = {"SLURM_JOB_ID": "17", "SLURM_CPUS_ON_NODE": "4", "MINE": "of the job"}


@pytest.fixture
def plugins(trial: Trial) -> Trial:
    require(slurmplugins.lacking(), "a fake container")
    trial.program("srun", INNER)
    trial.program("scancel", "#!/bin/sh\nexit 1\n")
    trial.plugins = slurmplugins.install(trial.bin.parent / "plugins")  # type: ignore[attr-defined]
    return trial


def pyxis(trial: Trial, image: str = "nvcr.io#nvidia/pytorch:24", **more: object) -> Environment:
    container, plugins = Container("Pyxis", image), (trial.plugins,)  # type: ignore[attr-defined]
    values = {"container": container, "before_on_compute": plugins, **more}
    return Environment(**values)  # type: ignore[arg-type]


def engine(trial: Trial, mounts: str) -> Environment:
    trial.write("env/edf.toml", f'image = "ubuntu"\n{mounts}')
    container = Container("ContainerEngine", "env/edf.toml", is_file=True)
    return Environment(container=container, before_on_compute=(trial.plugins,))  # type: ignore[attr-defined]


SHOW = r"""
pwd > where; id -u > who
echo "$FROM_IMAGE $TASTE $MINE $TOKEN" > variables; echo "$VENV" >> variables
touch /new 2> root || true; touch "$TMPDIR/new" && echo "$TMPDIR" > tmp
echo hello > out; exit 5
"""


def test_the_command_sees_the_workspace_and_what_the_job_sets(plugins: Trial) -> None:
    plugins.write("venv/bin/activate", "VENV=active; export VENV\n")
    environment = pyxis(plugins, variables={"FROM_IMAGE": "it's\nmine"}, python="venv")
    spec = plugins.spec(
        SHOW,
        environment=environment,
        variables={"TASTE": "of the rule"},
        secrets=("TOKEN",),
        outputs=(OutputFile("out"),),
    )
    plugins.write(spec.paths.secrets, "TOKEN=secret\n")

    ended = plugins.run(spec, env={**ALLOCATION, "TMPDIR": str(plugins.bin)})

    assert (ended.returned, ended.sure.failed_step) == (5, ""), ended.log
    read = {name: (plugins.workspace / name).read_text() for name in ("where", "variables", "tmp")}
    assert read["where"] == f"{plugins.workspace}\n"
    assert read["variables"] == "it's\nmine of the rule of the job secret\nactive\n"
    assert read["tmp"] == f"{plugins.workspace}/{spec.paths.work}/scratch\n"
    assert "Read-only" in (plugins.workspace / "root").read_text()


def test_a_definition_is_named_by_its_whole_path(plugins: Trial) -> None:
    spec = plugins.spec("pwd; echo done", environment=engine(plugins, ""))
    missing = plugins.run(spec, env=ALLOCATION)
    assert (missing.sure.failed_step, missing.returned) == ("container", 1), missing.log
    assert "is not among the mounts" in missing.log
    folder = plugins.bin.parent  # its name has nothing that TOML and the fake stumble over
    spec = plugins.spec(
        "pwd; echo done", environment=engine(plugins, f'mounts = ["{folder}:{folder}"]')
    )
    ended = plugins.run(spec, env=ALLOCATION)
    assert (ended.returned, ended.log) == (0, f"{plugins.workspace}\ndone\n")


@pytest.mark.parametrize(
    ("values", "env", "step", "said"),
    [
        ({"image": "missing"}, ALLOCATION, "container", "failed to import"),
        ({}, {"SLURM_JOB_ID": ""}, "container", "there is no srun here"),
        ({"python": "nowhere"}, ALLOCATION, "python", "no virtual environment nowhere"),
        ({"container": MISSING}, ALLOCATION, "container", "there is no file"),
    ],
)
def test_what_keeps_a_container_from_starting_is_no_failure_of_the_command(
    plugins: Trial, values: dict[str, Any], env: dict[str, str], step: str, said: str
) -> None:
    ended = plugins.run(plugins.spec("echo no", environment=pyxis(plugins, **values)), env=env)
    assert (ended.returned, ended.sure.failed_step) == (1, step), ended.log
    assert said in ended.log


def test_a_command_in_a_container_is_asked_to_end(plugins: Trial) -> None:
    command = "trap 'sleep 1; echo bye; exit 7' TERM; echo > running; while :; do sleep 0.1; done"
    spec = plugins.spec(command, environment=pyxis(plugins))
    ended = plugins.signalled(spec, signal.SIGTERM, env=ALLOCATION)
    assert (ended.returned, ended.sure.signal) == (7, "TERM")
    assert "bye" in ended.log


def test_only_programs_that_handle_the_warning_get_it(plugins: Trial) -> None:
    """The signal reaches the whole process group of a task."""
    command = "trap 'echo > ckpt/warned; exit 0' USR1; echo > running; while :; do sleep 0.1; done"
    spec = plugins.spec(
        command,
        environment=pyxis(plugins),
        segment=Segment(0, 2, ("ckpt/",), 3600, 120),
        outputs=(OutputFile("model"), OutputFile("ckpt", "checkpoint", directory=True, keep=True)),
    )
    ended = plugins.signalled(spec, signal.SIGUSR1, env=ALLOCATION)
    assert ended.sure.go_on == "time_limit", ended.log
    assert (plugins.workspace / "ckpt/warned").exists()
    assert "User defined signal" not in ended.log


def test_a_container_lasts_until_the_program_has_saved_its_state(plugins: Trial) -> None:
    """The shell around the program ends at once."""
    plugins.write(
        "train.sh", "trap 'sleep 1; echo > ckpt/whole; exit' TERM; echo > running; sleep 60 & wait"
    )
    spec = plugins.spec(
        "bash train.sh; echo done",
        environment=pyxis(plugins),
        segment=Segment(0, 2, ("ckpt/",), 3600, 120),
        outputs=(OutputFile("ckpt", "checkpoint", directory=True, keep=True),),
    )
    ended = plugins.signalled(spec, signal.SIGTERM, env=ALLOCATION)
    assert (ended.sure.exit_code, ended.sure.changed) == (143, True), ended.log
    assert "ckpt/whole" in [entry.path for entry in ended.sure.files]


def test_options_for_srun(trial: Trial, tmp_path: Path) -> None:
    container = Container(
        "Pyxis", "a#b", mounts=("/x:/y:ro", "$D:/d"), options=("--no-container-mount-home",)
    )
    spec = trial.spec(
        "mpiexec x", launches=True, workspace="/w s",
        environment=Environment(container=container), datasets=("/data",),
    )  # fmt: skip
    script = render_script(spec).text
    [options] = [line for line in script.splitlines() if line.startswith("_m_options=")]
    [words] = shlex.split(options.removeprefix("_m_options="))
    assert words == (
        "'--container-image=a#b'"
        " --container-mounts=/x:/y:ro,$D:/d,/data:/data:ro,'/w s:/w s'"
        " --no-container-mount-home"
    )
    with pytest.raises(UserError, match="comma or a colon"):
        render_script(trial.spec(workspace="/a,b", environment=Environment(container=container)))
