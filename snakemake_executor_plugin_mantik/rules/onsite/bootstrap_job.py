"""Make a virtual environment with Snakemake in a workspace.

A job of `smk-mantik bootstrap` runs this file with the Python of the backend config's environment:

    bootstrap_job.py REPORT DIRECTORY SNAKEMAKE [--wheels FOLDER] [PACKAGE …]
    bootstrap_job.py REPORT

The second form only describes that Python. Both write REPORT as JSON if they succeed. The new
environment includes the packages of the old one, so that a `run:` still finds them. This file
supports Python 3.7, so that it can report a Python that is too old.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import site
import subprocess
import sys

OLDEST = (3, 11)
"""The oldest Python that Snakemake 9 supports."""


def end(message: str) -> None:
    """Write an error message, and exit with code 1."""
    sys.stderr.write(f"mantik: {message}\n")
    sys.exit(1)


def package_version(python: str, name: str) -> str:
    """Return the version of a package in the environment of `python`, empty if not installed."""
    ask = f"from importlib.metadata import version; print(version({name!r}))"
    try:
        answer = subprocess.run(
            [python, "-c", ask], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
        )
    except OSError:
        return ""
    return answer.stdout.decode(errors="replace").strip()


def make(directory: str) -> str:
    """Make an environment with this one's packages anew, and return the path of its Python."""
    made_with = f"{sys.executable}, Python {platform.python_version()}"
    sys.stdout.write(f"Making {directory} with {made_with}.\n")
    sys.stdout.flush()
    shutil.rmtree(directory, ignore_errors=True)
    words = [sys.executable, "-m", "venv", "--system-site-packages", directory]
    if subprocess.call(words) != 0:
        end(
            f"{sys.executable} cannot make virtual environments (it needs the modules venv and"
            " ensurepip). Set another Python in the backend config's Environment: Modules, Python"
            " or Apptainer"
        )
    python = os.path.join(directory, "bin", "python")
    if sys.prefix != sys.base_prefix:
        # Made from a virtual environment, the new one inherits the base Python's packages, but not
        # those of that environment.
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        place = subprocess.check_output([python, "-c", ask]).decode().strip()
        with open(os.path.join(place, "environment.pth"), "w") as file:
            file.write("".join(f"{path}\n" for path in site.getsitepackages()))
    return python


def install(python: str, packages: list[str], wheels: str) -> None:
    """Install packages from the folder `wheels`, or from the package index if that is empty."""
    words = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if wheels:
        words += ["--no-index", "--find-links", wheels]
    if subprocess.call([*words, *packages]) != 0:
        way = "" if wheels else ". If this node has no access to the internet, add --from-here"
        end(f"pip could not install {' '.join(packages)}; see its output above{way}")


def main() -> None:
    """Make the environment if requested, and write the report."""
    report, *words = sys.argv[1:]
    facts = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "libc": platform.libc_ver(),
        "executable": sys.executable,
    }
    if words:
        directory, wanted, *packages = words
        wheels = ""
        if packages[:1] == ["--wheels"]:
            wheels, packages = packages[1], packages[2:]
        if sys.version_info[:2] < OLDEST:
            end(
                f"{sys.executable} is Python {facts['python']}, and Snakemake needs"
                f" {OLDEST[0]}.{OLDEST[1]}. Set another one in the backend config's Environment:"
                " Modules, Python or Apptainer"
            )
        facts["result"] = ensure(directory, wanted, packages, wheels)
    with open(report, "w") as file:
        json.dump(facts, file)


def ensure(directory: str, wanted: str, packages: list[str], wheels: str) -> str:
    """Make sure that an environment has Snakemake and `packages`; return what was done, in words.

    Without `packages`, do nothing if this Python's environment has the wanted version already.
    """
    if package_version(sys.executable, "snakemake") == wanted and not packages:
        return f"its environment already has Snakemake {wanted}, nothing to do"
    python = os.path.join(directory, "bin", "python")
    if package_version(python, "snakemake") == wanted and not packages:
        return f"{directory} already exists, with Snakemake {wanted}"
    if not package_version(python, "pip"):
        python = make(directory)
    install(python, [f"snakemake=={wanted}", *packages], wheels)
    if subprocess.call([python, "-c", "import snakemake.cli"]) != 0:
        end(f"Snakemake was installed in {directory}, but cannot be imported; see the error above")
    return f"{directory} has Snakemake {wanted} now"


if __name__ == "__main__":
    main()
