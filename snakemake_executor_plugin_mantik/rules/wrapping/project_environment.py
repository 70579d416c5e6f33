"""Use the environment of an MLproject for the jobs that run its entry points."""

import posixpath
from collections.abc import Collection
from pathlib import Path
from typing import Final

from snakemake_interface_executor_plugins.settings import DeploymentMethod

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.named_files import (
    NamedFileError,
    follow_requirements,
    rebase_requirements,
)
from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.jobs.deployment import wrap_venv
from snakemake_executor_plugin_mantik.jobs.paths import file_path
from snakemake_executor_plugin_mantik.mlproject.entry import read_python_env
from snakemake_executor_plugin_mantik.mlproject.project import Project, find_bound_entry_point

from .. import Job
from ..context import Method

METHODS: Final[dict[str, Method]] = {
    "python_env": "venv",
    "conda_env": DeploymentMethod.CONDA,
    "docker_env": DeploymentMethod.APPTAINER,
}
"""What deploys an environment, by its key in an MLproject file."""


def find_project(job: Job, methods: Collection[Method]) -> Project | None:
    """Return the project of a job's entry point if its environment is to be deployed."""
    given = find_bound_entry_point(getattr(job.rule, "params", None))
    environment = given.project.environment if given is not None else None
    if given is None or environment is None or METHODS[environment.key] not in methods:
        return None
    return given.project


def wrap_python_env(
    project: Project, command: str, *, rule: str
) -> tuple[str, tuple[Upload, ...], tuple[str, ...]]:
    """Return bash that runs the command in a project's `python_env`, and files that it needs.

    Raises:
        UserError: the file of the environment, or one that it names, cannot be used.
    """
    environment = project.environment
    assert environment is not None, "a project without an environment was asked for it"
    name, folder = environment.value, str(project.relative_folder())
    asked = read_python_env(project.folder, name)
    text = "".join(f"{line}\n" for line in asked.requirements)
    try:
        found = follow_requirements(text, posixpath.normpath(name), project.folder)
    except NamedFileError as error:
        raise UserError(f"its python_env cannot be used: {error}", do="Correct the file") from None
    # The file that pip reads lies three levels below the workspace (`file_path`).
    base = posixpath.normpath(posixpath.join("../../..", folder, posixpath.dirname(name)))
    content = rebase_requirements(text, base).encode()
    upload = Upload(file_path(content, "requirements.txt"), content=content)
    inputs = tuple(posixpath.normpath(posixpath.join(folder, path)) for path in found.files)
    wrapped = wrap_venv(
        posixpath.normpath(posixpath.join(folder, name)),
        (upload.path, *inputs),
        command,
        rule=rule,
        folder=folder,
        version=".".join(asked.version.split(".")[:2]),
    )
    return wrapped, (upload,), inputs


def python_env_mistake(project: Project, workdir: Path) -> str | None:
    """Return why a project's environment cannot be made, as words after "rule NAME", or None."""
    environment = project.environment
    if environment is None or environment.key != "python_env":
        return None
    try:
        _, _, inputs = wrap_python_env(project, "", rule="")
    except UserError as error:
        return f"runs an entry point of {project.shown}, but {error.what}"
    outside = [path for path in inputs if not (workdir / path).is_file()]
    return f"needs {outside[0]} for {environment}, which does not exist" if outside else None
