"""Makes a virtual environment with Snakemake in a workspace.

A job of `smk-mantik bootstrap` runs it there, with the Python of the backend config's environment:

    bootstrap_job.py REPORT DIRECTORY SNAKEMAKE [--wheels FOLDER] [PACKAGE …]
    bootstrap_job.py REPORT

The second form only tells what Python that is. REPORT is written as JSON either way. The new
environment sees all that the other one has, so that a `run:` still finds its packages. It needs
Python 3.7, to be able to say that one is too old.
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
"""The first Python that Snakemake 9 runs with."""


def end(message: str) -> None:
    """Say what went wrong, and fail."""
    sys.stderr.write(f"mantik: {message}\n")
    sys.exit(1)


def package_version(python: str, name: str) -> str:
    """The version of a package that a Python has; empty for none."""
    ask = f"from importlib.metadata import version; print(version({name!r}))"
    try:
        answer = subprocess.run(
            [python, "-c", ask], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
        )
    except OSError:
        return ""
    return answer.stdout.decode(errors="replace").strip()


def make(directory: str) -> str:
    """Make an empty environment that sees this one's packages; its Python."""
    made_with = f"{sys.executable}, Python {platform.python_version()}"
    sys.stdout.write(f"Making {directory} with {made_with}.\n")
    sys.stdout.flush()
    shutil.rmtree(directory, ignore_errors=True)
    words = [sys.executable, "-m", "venv", "--system-site-packages", directory]
    if subprocess.call(words) != 0:
        end(
            f"{sys.executable} cannot make virtual environments (its modules venv and ensurepip"
            " are needed). Name another Python in the backend config's Environment: Modules, Python"
            " or Apptainer"
        )
    python = os.path.join(directory, "bin", "python")
    if sys.prefix != sys.base_prefix:
        # Of a virtual environment the new one inherits what is below it, but not its own packages.
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        place = subprocess.check_output([python, "-c", ask]).decode().strip()
        with open(os.path.join(place, "environment.pth"), "w") as file:
            file.write("".join(f"{path}\n" for path in site.getsitepackages()))
    return python


def install(python: str, packages: list[str], wheels: str) -> None:
    """Install packages: from a folder of wheels, or from the package index."""
    words = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    if wheels:
        words += ["--no-index", "--find-links", wheels]
    if subprocess.call([*words, *packages]) != 0:
        way = "" if wheels else ". If this node has no way to the internet, add --from-here"
        end(f"pip could not install {' '.join(packages)}; what it said is above{way}")


def main() -> None:
    """Make what is missing, and tell what there is."""
    report, *words = sys.argv[1:]
    told = {
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
                f"{sys.executable} is Python {told['python']}, and Snakemake needs"
                f" {OLDEST[0]}.{OLDEST[1]}. Name another one in the backend config's Environment:"
                " Modules, Python or Apptainer"
            )
        told["result"] = ensure(directory, wanted, packages, wheels)
    with open(report, "w") as file:
        json.dump(told, file)


def ensure(directory: str, wanted: str, packages: list[str], wheels: str) -> str:
    """See to it that there is a Snakemake; in words, what was done."""
    if package_version(sys.executable, "snakemake") == wanted and not packages:
        return f"its environment has Snakemake {wanted} itself, nothing had to be made"
    python = os.path.join(directory, "bin", "python")
    if package_version(python, "snakemake") == wanted and not packages:
        return f"{directory} is there already, with Snakemake {wanted}"
    if not package_version(python, "pip"):
        python = make(directory)
    install(python, [f"snakemake=={wanted}", *packages], wheels)
    if subprocess.call([python, "-c", "import snakemake.cli"]) != 0:
        end(f"Snakemake was installed in {directory}, but cannot be imported there")
    return f"{directory} has Snakemake {wanted} now"


if __name__ == "__main__":
    main()
