"""Commands before and after a job that bash cannot even read, told before a job meets them."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Final

from snakemake_executor_plugin_mantik.config.model import EnvironmentConfig

_READ_S: Final = 10.0
"""How long bash may take to read one command, seconds."""

_HOOKS: Final = ("before_on_login", "before_on_compute", "after_on_compute", "after_on_login")


def unreadable_hooks(environment: EnvironmentConfig) -> Iterator[str]:
    """A warning for each command that is no bash, beginning with its key; none without bash here.

    Nothing is run: `bash -n` only reads. Each command is read for itself, as it will be run.
    """
    bash = shutil.which("bash")
    for field in _HOOKS if bash else ():
        for number, command in enumerate(getattr(environment, field), 1):
            if complaint := _complaint(str(bash), command):
                key = f"Environment.{EnvironmentConfig.model_fields[field].alias}"
                yield f"{key}: command {number} is nothing that bash can read: {complaint}"


def _complaint(bash: str, command: str) -> str:
    try:
        done = subprocess.run(
            [bash, "-n"], input=command.encode(), capture_output=True, timeout=_READ_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    told = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode == 0:
        return ""
    return re.sub(r"^.*?line \d+: ", "", told[0]) if told else "syntax error"
