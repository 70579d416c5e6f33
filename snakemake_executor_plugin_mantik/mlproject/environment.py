"""The environment that an MLproject file asks for, as MLflow reads it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from snakemake_executor_plugin_mantik.common.errors import UserError

EnvironmentKey = Literal["python_env", "conda_env", "docker_env"]


@dataclass(frozen=True)
class ProjectEnvironment:
    """An environment of an MLproject file.

    Attributes:
        key: its key.
        value: the path of its file in the project's folder, or the name of the image.
        more: further keys of `docker_env`, which are not used here.
    """

    key: EnvironmentKey
    value: str
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.key}: {self.value}"


@dataclass(frozen=True)
class PythonEnv:
    """The content of the file that `python_env` names.

    Attributes:
        version: the version of Python; empty if not given.
        requirements: what pip installs, a line each.
    """

    version: str
    requirements: tuple[str, ...]


def read_python_env(folder: Path, name: str) -> PythonEnv:
    """Read the file `name` of a project's folder.

    Raises:
        UserError: it cannot be read, or has another form.
    """
    try:
        # Without types: a version like 3.10 is no number.
        content = yaml.load((folder / name).read_text("utf-8"), yaml.BaseLoader)  # noqa: S506 - texts alone
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _unusable(name, " ".join(str(error).split())) from None
    content = {} if content in (None, "") else content
    if not isinstance(content, dict):
        raise _unusable(name, "it has to be a mapping with python and dependencies")
    lines: list[str] = []
    for key in ("build_dependencies", "dependencies"):
        several = content.get(key) or []
        if not isinstance(several, list) or not all(isinstance(line, str) for line in several):
            raise _unusable(name, f"{key} has to be a list of requirements")
        lines += several
    return PythonEnv(str(content.get("python") or ""), tuple(lines))


def _unusable(name: str, why: str) -> UserError:
    return UserError(f"its python_env {name} cannot be used: {why}", do="Correct the file")
