"""Build the wheel and the sdist, and run the demo's pipeline from each in clean environments.

`make release-check` starts it: the wheel with each Python that it finds, the sdist with the first.
Set PYTHONS to name the interpreters.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
STORAGE = ROOT / "packaging/storage-plugin"
DEMO = "workflows/digits"
VERSIONS = range(11, 15)
SHOWN = 4000
"""How much of a failed command's output is shown, in characters."""


def main() -> int:
    """Check the distributions; return the number of failures."""
    pythons = os.environ.get("PYTHONS", "").split() or find_pythons()
    with tempfile.TemporaryDirectory(prefix="mantik-release-") as directory:
        work = Path(directory)
        for source in (ROOT, STORAGE):
            run([sys.executable, "-m", "build", "--outdir", str(work / "dist"), str(source)])
        (wheel,) = (work / "dist").glob("*executor*.whl")
        (sdist,) = (work / "dist").glob("*executor*.tar.gz")
        (storage,) = (work / "dist").glob("*storage*.whl")
        print(f"Built {wheel.name}, {size(wheel)}, and {sdist.name}, {size(sdist)}.", flush=True)
        checks = [(python, wheel) for python in pythons] + [(pythons[0], sdist)]
        failures = [
            (python, distribution.name, error)
            for number, (python, distribution) in enumerate(checks)
            if (error := check(python, distribution, storage, work / str(number)))
        ]
    for python, distribution, error in failures:
        print(f"{distribution} fails with {python}:\n{error}", file=sys.stderr)
    return len(failures)


def find_pythons() -> list[str]:
    """Return the interpreters on the path that the package supports and that start."""
    names = [f"python3.{minor}" for minor in VERSIONS]
    return [name for name in names if starts(name)] or [sys.executable]


def starts(python: str) -> bool:
    """Return whether an interpreter is there; a version manager's stand-in may lead nowhere."""
    if not shutil.which(python):
        return False
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def check(python: str, distribution: Path, storage: Path, work: Path) -> str:
    """Install a distribution and run the demo with it; return what failed, or nothing.

    `storage` is the storage plugin's entry in the catalogue, which depends on it.
    """
    begun = time.monotonic()
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in {"PYTHONPATH", "VIRTUAL_ENV"} and not name.startswith(("MANTIK_", "MLFLOW_"))
    }
    inside = str(work / "venv/bin/python")
    demo = work / DEMO
    listed = subprocess.run(
        ["git", "ls-files", "-z", DEMO], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, work / name)
    try:
        run([python, "-m", "venv", str(work / "venv")], env=clean)
        wheels = f"{distribution}[demo]", str(storage)
        run([inside, "-m", "pip", "install", "--quiet", *wheels], env=clean)
        run([inside, "-m", "pip", "check"], env=clean)
        run([inside, str(demo / "demo.py")], env=clean, cwd=work)
        run([str(work / "venv/bin/smk-mantik"), "jobs", "-d", str(demo)], env=clean)
        if not (demo / "results/report.md").is_file():
            return "The demo has ended without its report"
    except subprocess.CalledProcessError as error:
        return f"{error}\n{error.output[-SHOWN:]}"
    packages = len(list(work.glob("venv/lib/python*/site-packages/*.dist-info")))
    took = time.monotonic() - begun
    print(f"{distribution.name}, {python}: {packages} packages, {took:.0f} s", flush=True)
    return ""


def run(
    command: Sequence[str], *, env: dict[str, str] | None = None, cwd: Path | None = None
) -> None:
    """Run a command; raise `subprocess.CalledProcessError` with its output if it fails."""
    subprocess.run(
        command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=True,
    )  # fmt: skip


def size(file: Path) -> str:
    return f"{file.stat().st_size / 1024:.0f} KiB"


if __name__ == "__main__":
    sys.exit(main())
