"""The environments that MLproject files ask for, where a site is to use them."""

import os
from pathlib import Path

from hpc_sandbox import shims
from tests.e2e.test_environments import ENGINE
from tests.jobs.test_venv import PYTHON
from tests.support import condas
from tests.support.workflows import UNTRACKED, Project, tells

SNAKEFILE = """
from snakemake_executor_plugin_mantik import mlproject

module mantik:
    snakefile: mlproject.RULE

rule all:
    input: "conda.txt", "python.txt", "docker.txt"

use rule mlproject from mantik as conda with:
    output: "conda.txt"
    params: **mlproject.load("projects/conda").entry_point("main", out="{output}")

use rule mlproject from mantik as python with:
    output: "python.txt"
    params: **mlproject.load("projects/python").entry_point("main", out="{output}")

use rule mlproject from mantik as docker with:
    output: "docker.txt"
    params: **mlproject.load("projects/docker").entry_point("main", out="{output}")
"""


def write_project(project: Project, name: str, environment: str, command: str) -> None:
    project.write(
        f"projects/{name}/MLproject",
        f"{environment}\nentry_points:\n  main:\n    parameters: {{out: path}}\n"
        f"    command: '{command} > {{out}}'\n",
    )


def test_each_project_in_its_own(project: Project, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    condas.install(programs, "conda")
    for name, text in (("apptainer", ENGINE), ("python3.12", PYTHON), ("python3", PYTHON)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    project.config.write_text(
        f"""{project.place.config}
Environment:
  Python: {tmp_path}/venv
  Variables: {{PATH: "{programs}:{shims.PROGRAMS}:{os.environ["PATH"]}"}}
"""
    )
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").write_text("export VIRTUAL_ENV=/of/config\n")
    project.extra.update(UNTRACKED)
    project.write("Snakefile", SNAKEFILE)
    write_project(project, "conda", "conda_env: conda.yaml", "echo $(tool)")
    project.write("projects/conda/conda.yaml", "some words")
    write_project(project, "python", "python_env: env/py.yaml", "echo $VIRTUAL_ENV")
    project.write(
        "projects/python/env/py.yaml",
        'python: "3.12"\nbuild_dependencies: [wheel]\ndependencies: [-r ../req.txt, ./own]\n',
    )
    project.write("projects/python/req.txt", "numpy\n")
    project.write("projects/python/own/pyproject.toml")
    write_project(
        project,
        "docker",
        "docker_env: {image: ml/all, volumes: [/a:/b]}",
        "echo ${{IMAGE-}} $VIRTUAL_ENV",
    )

    methods = ("--mantik-software-deployment", "conda", "apptainer", "venv")
    output = project.run(*methods).ok().output

    workspace = project.workspace.resolve()
    assert project.read("conda.txt").startswith("some words from ")
    assert project.read("docker.txt").startswith("pulled docker://ml/all")
    made = project.read("python.txt").strip()
    assert made.startswith(f"{workspace}/.mantik/python/projects/python/env/py.yaml/")
    log = Path(f"{made}.log").read_text()
    tells(log, f"{programs}/python3.12 -m venv", "pip of  in python")
    (pip,) = workspace.glob(".mantik/files/*/requirements.txt")
    assert pip.read_text() == "wheel\n-r ../../../projects/python/req.txt\n./own\n"
    assert (pip.parent / "../../../projects/python/req.txt").read_text() == "numpy\n"
    tells(
        output,
        "Entry points of projects/python/MLproject run in its python_env: env/py.yaml.",
        "Ignoring volumes in docker_env of projects/docker/MLproject: mount directories with",
    )

    output = project.run("--forceall").ok().output
    assert project.read("python.txt") == "/of/config\n"
    told = "Ignoring conda_env: conda.yaml of projects/conda/MLproject: its entry points run in"
    tells(
        output,
        f"{told} Python {tmp_path}/venv, as the backend config of {project.place.name} says; pass"
        " --mantik-software-deployment conda to use it.",
        "pass --mantik-software-deployment venv to use it.",
        "pass --mantik-software-deployment apptainer to use it.",
    )

    project.write("projects/python/env/py.yaml", "dependencies: [-r none.txt]\n")
    output = project.run("--forceall", *methods).failed()
    tells(
        output,
        "nothing submitted",
        "rule python runs an entry point of projects/python/MLproject, but its python_env cannot be"
        " used: the file 'env/none.txt' of 'env/py.yaml' was not found",
    )
