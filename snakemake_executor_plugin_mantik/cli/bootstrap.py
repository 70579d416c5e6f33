"""`smk-mantik bootstrap`: install Snakemake in the workspace at a site, for nested Snakemakes."""

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ..common.errors import UserError
from ..common.state_directory import STATE, make_private
from ..config.reading import read_configs
from ..mlproject.single_rule import RUNS, snakemake_command
from ..rules.onsite import bootstrap_job
from .shared import ForSnakemake, is_config

_TEMPLATE: Final = """\
# Made by `smk-mantik bootstrap`, for this command line alone.
rule bootstrap:
    input:
        program={program!r},
        wheels={wheels!r},
    output:
        {report!r},
    params:
        words={words!r},
    resources:
        **{resources},
    shell:
        "$(command -v python3 || echo python) {{input.program:q}} {{output:q}} {{params.words}}"
"""


def bootstrap(
    site: Annotated[
        str,
        typer.Argument(
            help="The site: its name in the workflow, or its backend config as [NAME=]FILE."
        ),
    ],
    snakemake: ForSnakemake = None,
    *,
    from_here: Annotated[
        bool,
        typer.Option(
            "--from-here",
            help="Download the packages here and upload them: for compute nodes without internet.",
        ),
    ] = False,
    package: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="PACKAGE", help="A further package, as for pip; repeatable."
        ),
    ] = None,
) -> None:
    """Install a Snakemake at a site, for the rules that need one there.

    A job at the site makes a virtual environment in the workflow's workspace, with the version of
    Snakemake that is installed here. Rules that need one use it if the environment in the backend
    config has no Snakemake.
    """
    from snakemake import __version__

    from ..rules.kinds.nested_snakemake import BOOTSTRAPPED
    from ..rules.preflight import MissingSnakemake

    known = read_configs([site], Path()) if is_config(site) else {}
    name = next(iter(known), site)
    specs = [f"snakemake=={__version__}", *(package or [])]
    run = partial(_run_job, (name, site if known else ""), snakemake or [])
    words = [BOOTSTRAPPED, __version__]
    wheels: list[str] = []
    if from_here:
        typer.echo(f"Checking the version of Python at {name}.")
        there = run("ask", [], [])
        folder = STATE / "wheels" / f"{there['python'].rpartition('.')[0]}-{there['machine']}"
        typer.echo(f"Fetching wheels for Python {there['python']}, {there['machine']}.")
        wheels = [str(path) for path in _fetched(specs, there, folder)]
        words += ["--wheels", str(folder)]
    report = run("make", [*words, *(package or [])], wheels)
    MissingSnakemake(STATE, {}).forget(name)
    typer.echo(f"{name}: {report['result']}.")


def _run_job(
    site: tuple[str, str], options: list[str], what: str, words: list[str], wheels: list[str]
) -> dict[str, Any]:
    """Run a job of one rule at a site with Snakemake, like any other job; return its report.

    `site` is its name, and its backend config, empty if the workflow knows it; `what` names the
    step and its files; `words` are the program's arguments after the report.
    """
    from ..rules.resources import SITE_RESOURCE

    name, config = site
    directory = RUNS / f"bootstrap-{name}"
    make_private(STATE)
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "bootstrap_job.py"
    program.write_bytes(Path(bootstrap_job.__file__).read_bytes())
    report = directory / f"{what}.json"
    snakefile = directory / f"{what}.smk"
    quoted = " ".join(map(shlex.quote, words))
    snakefile.write_text(
        _TEMPLATE.format(
            program=str(program), report=str(report), wheels=wheels, words=quoted,
            resources={} if config else {SITE_RESOURCE: name},
        )
    )  # fmt: skip
    own = ["--forceall", "--executor", "mantik", "--jobs", "1", "--mantik-track", "none"]
    command = snakemake_command(snakefile, config, [*own, *options])
    sys.stdout.flush()
    if subprocess.run(command, check=False).returncode != 0:
        raise UserError(
            "nothing was installed, for the reason above", where=f"smk-mantik bootstrap {name}",
            do="Correct the cause and run the command again",
        )  # fmt: skip
    answer: dict[str, Any] = json.loads(report.read_text())
    return answer


def _fetched(specs: list[str], there: dict[str, Any], folder: Path) -> list[Path]:
    """Download wheels of packages and their dependencies for another machine; empty `folder` first.

    `there` describes that machine (`rules/onsite/bootstrap_job.py`). Raise UserError if pip fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary, "report.json")
        _pip("install", "--dry-run", "--ignore-installed", "--report", str(report), *specs)
        chosen = json.loads(report.read_text())["install"]
    wheels: list[str] = []
    others: list[str] = []
    for item in chosen:
        pinned = f"{item['metadata']['name']}=={item['metadata']['version']}"
        archive = item["download_info"]["url"].endswith(".whl")
        (wheels if archive else others).append(pinned)
    # Without a wheel: build one here, which runs there only if it is pure Python.
    for pinned in others:
        _pip("wheel", "--no-deps", "--wheel-dir", str(folder), pinned)
    if wheels:
        target = ["--python-version", there["python"].rpartition(".")[0], "--implementation", "cp"]
        for tag in platforms(there):
            target += ["--platform", tag]
        _pip("download", "--no-deps", "--dest", str(folder), *target, *wheels)
    return sorted(folder.glob("*.whl"))


def platforms(there: dict[str, Any]) -> list[str]:
    """Return the platform tags (PEP 600) of the wheels that run on a Linux machine."""
    machine, (libc, version) = there["machine"], there["libc"]
    newest = int(version.split(".")[1]) if libc == "glibc" else 17
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, 4, -1)]
    return [*tags, f"manylinux2014_{machine}", f"linux_{machine}"]


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-input"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise UserError(
            f"pip cannot download the packages here: {done.stdout.strip()}",
            where=f"pip {words[0]}",
            do="Check that pip is installed here and can reach its index",
        )
