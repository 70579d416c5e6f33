"""`smk-mantik check`: report mistakes in backend configs before anything is submitted."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ..common.errors import ConfigError, Mistake, UserError, printable
from ..config.environment import describe_software
from ..config.environment_keys import OPTION_KEYS, EnvironmentConfig
from ..config.model import BackendConfig
from ..config.reading import LoadedConfig, check_site_name, read_config_named, split_spec
from .check_site import Finding, check_connection
from .shared import WRONG, AsJson, Project, warn

_MARKS = {"ok": "", "note": "", "warning": "(!) "}


@dataclass
class CheckReport:
    """The results for one file."""

    file: str
    loaded: LoadedConfig | None = None
    warnings: list[str] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    findings: Sequence[Finding] = ()

    @property
    def wrong(self) -> bool:
        """Whether the file has a mistake, or the site cannot run its jobs."""
        return bool(self.mistakes) or any(f.verdict == "wrong" for f in self.findings)

    def as_json(self) -> dict[str, Any]:
        config = self.loaded.config if self.loaded else None
        answer: dict[str, Any] = {
            "file": self.file,
            "valid": not self.mistakes,
            "site": self.loaded.name if self.loaded else None,
            "api": config.api if config else None,
            "queue": config.resources.queue if config else None,
            "summary": _summary(config) if config else None,
            "mistakes": [{"key": m.key, "message": m.message} for m in self.mistakes],
            "warnings": self.warnings,
        }
        return answer | ({"findings": [asdict(f) for f in self.findings]} if self.findings else {})


def check(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE…",
            help="Backend configs, each FILE or NAME=FILE; default: those of the profile that"
            " snakemake would use here.",
        ),
    ] = None,
    project: Project = Path(),
    with_site: Annotated[
        bool,
        typer.Option(
            "--connect", help="Also connect to the site with your credentials; submits no job."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check backend configs: print one line for a valid file, else all mistakes (exit code 2)."""
    if not files:
        from ..adapter.planning import read_settings

        files = read_settings().backend_config
    if not files:
        raise UserError(
            "neither the command nor a profile here names a Compute Backend Config",
            do="Name one, or write one and a profile with smk-mantik init",
        )
    reports = [examine(file, project) for file in files]
    for report in reports:
        if with_site and report.loaded is not None and not report.mistakes:
            report.findings = check_connection(report.loaded, project)
    if as_json:
        typer.echo(json.dumps({"files": [report.as_json() for report in reports]}, indent=2))
    else:
        for report in reports:
            _notify(report)
    if any(report.wrong for report in reports):
        raise typer.Exit(WRONG)


def examine(spec: str, project: Path) -> CheckReport:
    """Check a file without connecting to the site.

    A valid file has a mistake all the same if NAME in NAME=FILE cannot be the name of a site, and a
    warning if its own name cannot.
    """
    # An existing file takes precedence, even if its path looks like NAME=FILE.
    plain = os.path.isfile(spec)
    name, file = (Path(spec).stem, spec) if plain else split_spec(spec)
    report = CheckReport(file)
    complaint = check_site_name(name)
    report.mistakes = [Mistake(file, "", complaint)] if complaint and not plain else []
    try:
        report.loaded = read_config_named(name, file, Path(), project=project)
    except ConfigError as error:
        report.mistakes += error.mistakes
        return report
    report.warnings = list(report.loaded.warnings)
    if complaint and plain:  # the file is valid, but a run needs NAME=FILE
        report.warnings.append(f"{file}: {complaint}")
    for where, environment in report.loaded.config.keyed_environments:
        found = [*_unreadable_hooks(environment, where), *_of_slurm(environment, where)]
        if not report.loaded.config.site.expand:
            found += _literal(environment, where)
        report.warnings += [f"{file}: {warning}" for warning in found]
    return report


def _summary(config: BackendConfig) -> str:
    """Describe a config in one line: `UNICORE, queue booster, Apptainer env/train.sif`."""
    machine = f"firecREST, machine {config.firecrest.machine}" if config.firecrest else "UNICORE"
    parts = [machine, f"queue {config.resources.queue}"]
    parts += describe_software(config.environment)
    if config.environments:
        parts.append(f"environments {', '.join(config.environments)}")
    return ", ".join(parts)


def _notify(report: CheckReport) -> None:
    for warning in report.warnings:
        warn(f"warning: {warning}")
    for mistake in report.mistakes:
        warn(str(mistake))
    if report.loaded is not None and not report.mistakes:
        typer.echo(f"{report.file}: {_summary(report.loaded.config)}")
    for finding in report.findings:
        text = printable(finding.text)  # may quote a server
        if finding.verdict == "wrong":
            typer.echo(f"{report.file}: {finding.topic}: {text}", err=True)
        else:
            typer.echo(f"  {finding.topic + ':':<13} {_MARKS[finding.verdict]}{text}")


_READ_S: Final = 10.0
"""Seconds that bash may take to read one command."""

_HOOKS: Final = ("before_on_login", "before_on_compute", "after_on_compute", "after_on_login")


_EXPANDABLE: Final = re.compile(r"\$(?:[A-Za-z_]|\{[A-Za-z_]|\()")
"""What a shell expands."""
_ONLY_BY_SHELL: Final = re.compile(r"\$\(|\$\{[A-Za-z_][A-Za-z0-9_]*[^A-Za-z0-9_}]")
"""What a shell expands and options do not: they expand variables."""


def _literal(environment: EnvironmentConfig, where: str) -> Iterator[str]:
    """Yield a warning for each value that a shell would expand, as mantik's own backend did."""
    apptainer, python = environment.apptainer, environment.python
    paths = {
        "Apptainer.Path": apptainer.path if apptainer and apptainer.type == "remote" else "",
        "Python.Path": python.path if python and python.path.startswith("/") else "",
    }
    several = (environment.apptainer, environment.container_engine, environment.pyxis)
    options = [
        (key, word)
        for key, section in zip(OPTION_KEYS, several, strict=True)
        for word in (section.options if section else ())
        if _ONLY_BY_SHELL.search(word) and not word.startswith("'")
    ]
    for key, value in (
        *((key, path) for key, path in paths.items() if _EXPANDABLE.search(path)),
        *((f"{key}.Options", word) for key, word in options),
    ):
        yield (
            f"{where}.{key}: {value!r} is used as it is, and nothing in it is expanded; set Site:"
            " Expand to true to expand it on the node"
        )
    for name, value in environment.variables.items():
        if _EXPANDABLE.search(value):
            yield (
                f"{where}.Variables.{name}: {value!r} is set as it is, and nothing in it is"
                f" expanded; set Site: Expand to true to expand all variables on the node, or"
                f" write `export {name}=…` in PreRunCommandOnComputeNode"
            )


_BY_SBATCH: Final = {
    "PARTITION": "Queue", "TIMELIMIT": "Runtime", "QOS": "QoS", "RESERVATION": "Reservation",
    "CONSTRAINT": "NodeConstraints", "MEM_PER_NODE": "MemoryPerNode",
    "GPUS_PER_NODE": "GPUsPerNode", "GPUS": "GPUsPerNode", "GRES": "GPUsPerNode",
}  # fmt: skip
"""Ends of names of variables of `sbatch`, and the keys of Resources that request the same."""

_ALLOCATION: Final = re.compile(r"SLURM_(JOB_\w+|JOBID|N?NODES|NPROCS|CPUS_\w+|MEM_\w+|GPUS\w*)")
"""Variables by which Slurm tells a job what it has been given."""


def _of_slurm(environment: EnvironmentConfig, where: str) -> Iterator[str]:
    """Yield a warning for each variable of Slurm that a job's script sets in vain, or wrongly.

    `SLURM_NTASKS_PER_NODE` and `SLURM_NTASKS` are requested (`with_tasks_of`).
    """
    for name in environment.variables:
        if name.startswith("SBATCH_"):
            key = _BY_SBATCH.get(name.removeprefix("SBATCH_"))
            instead = f"set Resources: {key} instead" if key else "remove it"
            yield (
                f"{where}.Variables.{name}: it has no effect, since sbatch reads it before the job"
                f" exists; {instead}"
            )
        elif _ALLOCATION.fullmatch(name):
            yield (
                f"{where}.Variables.{name}: it hides from the command and from srun what Slurm has"
                " given to the job; request that in Resources, and remove it"
            )


def _unreadable_hooks(environment: EnvironmentConfig, where: str) -> Iterator[str]:
    """Yield a warning for each command that is not valid bash; none if bash is not installed.

    `bash -n` only reads and runs nothing. Each command is checked by itself, since each has to be
    complete.
    """
    bash = shutil.which("bash")
    for hook in _HOOKS if bash else ():
        for number, command in enumerate(getattr(environment, hook), 1):
            if complaint := _complaint(str(bash), command):
                key = f"{where}.{EnvironmentConfig.model_fields[hook].alias}"
                yield f"{key}: command {number} is not valid bash: {complaint}"


def _complaint(bash: str, command: str) -> str:
    try:
        done = subprocess.run(
            [bash, "-n"], input=command.encode(), capture_output=True, timeout=_READ_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    if done.returncode == 0:
        return ""
    return re.sub(r"^.*?line \d+: ", "", lines[0]) if lines else "syntax error"
