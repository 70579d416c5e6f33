"""Make a systemd unit that starts the scheduler when the user's machine starts."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import jinja2

SERVICE: Final = "mantik-schedule.service"
_SET: Final = ("XDG_DATA_HOME", "MANTIK_RUNS", "MLFLOW_TRACKING_URI")
"""Variables that locate data and servers. Credentials are not written into a unit."""


def systemd_unit(environ: Mapping[str, str]) -> str:
    """Return a unit file for the user's systemd, with the paths and servers in `environ`."""
    from snakemake_executor_plugin_mantik.tracking.run import tracking_target

    where = {name: environ[name] for name in _SET if environ.get(name)}
    if "MLFLOW_TRACKING_URI" in where:
        where["MLFLOW_TRACKING_URI"] = tracking_target(environ, Path.cwd()).uri
    words = [sys.executable, "-P", "-m", "snakemake_executor_plugin_mantik", "schedule", "run"]
    template = (Path(__file__).parent / f"{SERVICE}.j2").read_text(encoding="utf-8")
    filled: str = jinja2.Template(template, keep_trailing_newline=True).render(
        command=" ".join(systemd_quote(word).replace("$", "$$") for word in words),
        environment=[systemd_quote(f"{name}={value}") for name, value in where.items()],
        path=systemd_quote(f"PATH={environ.get('PATH', os.defpath)}"),
    )
    return filled


def systemd_quote(word: str) -> str:
    """Quote a word for systemd (systemd.syntax(7)), where % begins a specifier."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
