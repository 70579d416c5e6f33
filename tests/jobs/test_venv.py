"""A virtual environment is made of requirements before the command, or the job says why not."""

import pytest

from snakemake_executor_plugin_mantik.jobs.script import render_script
from snakemake_executor_plugin_mantik.jobs.spec import Environment
from tests.support.trial import Trial, wait_until

PYTHON = r"""#!/bin/bash
# A stand-in for python3, and in the environments that it makes for their python.
case $2 in
  venv)
    mkdir -p "$3/bin" && cp -- "$0" "$3/bin/python"
    printf 'export VIRTUAL_ENV=%q PATH=%q:$PATH\n' "$3" "$3/bin" > "$3/bin/activate" ;;
  pip)
    echo "pip of $A in ${PWD##*/}"
    case $(cat "${@: -1}") in
      *broken*) echo "ERROR: No matching distribution found for broken"; exit 1 ;;
    esac ;;
esac
"""


@pytest.fixture
def node(trial: Trial) -> Trial:
    trial.program("python3", PYTHON)
    trial.write("r.txt", "one")
    return trial


def environment(**more: object) -> Environment:
    return Environment(python="my venv", requirements=("r.txt",), **more)  # type: ignore[arg-type]


COMMAND = 'path=$(type -P python); echo "${VIRTUAL_ENV##*/python/} ${path##*/python/}"'


def test_it_is_made_for_each_content_once(node: Trial) -> None:
    # A command before the job may leave a shell in which little works.
    hostile = environment(
        variables={"A": "variable"}, before_on_compute=("cd /; set -eu -f -C -o pipefail; IFS=/",)
    )
    first = node.run(node.spec(COMMAND, environment=hostile))
    again = node.run(node.spec(COMMAND, environment=environment()))
    node.write("r.txt", "two")
    other = node.run(node.spec(COMMAND, environment=environment()))
    assert [run.returned for run in (first, again, other)] == [0, 0, 0], first.log
    place = again.log.split(" my venv")[0]
    assert again.log == f"{place} {place}/bin/python\n"
    assert first.log.endswith(again.log)
    assert place not in other.log
    assert "mantik: Environment: Python: makes the virtual environment my venv in" in first.log
    log = (node.workspace / f".mantik/python/{place}.log").read_text()
    assert f"pip of variable in {node.workspace.name}\n" in log
    assert "pip install -r r.txt" in log


def test_what_pip_says_last_is_in_the_log(node: Trial) -> None:
    node.write("r.txt", "broken")
    ended = node.run(node.spec("touch not-reached", environment=environment()))
    assert ended.sure.failed_step == "python"
    assert ended.returned == ended.sure.exit_code == 1
    assert "ERROR: No matching distribution found for broken" in ended.log
    assert "the virtual environment could not be made" in ended.log
    assert not (node.workspace / "not-reached").exists()


def test_a_job_asked_to_end_meanwhile_leaves_nothing_half_made(node: Trial) -> None:
    node.program("python3", PYTHON.replace('echo "pip', 'touch pip-runs; sleep 60; echo "pip'))
    spec = node.spec(environment=environment())
    process = node.start(spec)
    wait_until((node.workspace / "pip-runs").exists)
    process.terminate()
    ended = node.end(spec, process)
    assert ended.returned == 143
    node.program("python3", PYTHON)
    again = node.run(node.spec(COMMAND, environment=environment()))
    assert again.returned == 0, again.log
    assert again.log.endswith("/2/bin/python\n")


def test_other_modules_need_another_one(trial: Trial) -> None:
    texts = [
        render_script(trial.spec(environment=environment(modules=modules))).text
        for modules in ((), ("CUDA/13",))
    ]
    assert "_m_modules=(CUDA/13)" in texts[1]
    assert "CUDA/13" not in texts[0]


def test_what_a_purge_has_left_is_made_again_once_beside_the_jobs_that_use_it(node: Trial) -> None:
    reads = "touch runs; until [ -e go ]; do sleep 0.1; done; type -P python"
    user_spec = node.spec(reads, environment=environment())
    user = node.start(user_spec)
    wait_until((node.workspace / "runs").exists)
    [purged] = node.workspace.glob(".mantik/python/*/*/1/bin/activate")
    purged.unlink()
    specs = [node.spec(COMMAND, environment=environment()) for _ in range(2)]
    started = [(spec, node.start(spec)) for spec in specs]
    both = [node.end(*one) for one in started]
    (node.workspace / "go").touch()
    ended = node.end(user_spec, user)
    for run in both:
        assert run.returned == 0, run.log
        assert run.log.endswith("/2/bin/python\n")
    assert any("files of the virtual environment" in run.log for run in both)
    assert sum("Python: makes the" in run.log for run in both) == 1
    assert ended.returned == 0, ended.log
    assert ended.log.endswith("/1/bin/python\n")
