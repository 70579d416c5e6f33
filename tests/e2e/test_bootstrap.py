"""`smk-mantik bootstrap`: a Snakemake in the workspace, where the site's environment has none."""

import base64
import hashlib
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.workflows import UNTRACKED, WAIT_S, Project, Ran, tells

# It makes virtual environments, which takes most of a minute.
pytestmark = pytest.mark.software("Python venv")

SNAKEFILE = """\
rule out:
    output: "out.txt"
    run:
        import sys
        with open(output[0], "w") as file:
            print(sys.prefix, file=file)
"""


def wheel(folder: Path) -> None:
    """Write a wheel named snakemake that leads to the one of the tests: nothing is downloaded."""
    release = version("snakemake")
    info = f"snakemake-{release}.dist-info"
    files = {
        "of_the_tests.pth": f"{sysconfig.get_path('purelib')}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: snakemake\nVersion: {release}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{name},sha256={digest.decode()},{len(text)}\n"
    with zipfile.ZipFile(folder / f"snakemake-{release}-py3-none-any.whl", "w") as archive:
        for name, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(name, text)


@pytest.fixture
def bare(project: Project, tmp_path: Path) -> Project:
    """A project at a site without Snakemake, on a machine whose index is a folder."""
    (tmp_path / "index").mkdir()
    wheel(tmp_path / "index")
    project.extra |= {
        **UNTRACKED,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index"),
        "PIP_CONFIG_FILE": "/dev/null",
    }
    return project


def bootstrap(project: Project, *arguments: str) -> Ran:
    words = ["bootstrap", f"hpc1={project.config}", *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "snakemake_executor_plugin_mantik", *words],
        cwd=project.directory, env=project.environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    return Ran(done.returncode, done.stdout)


def test_without_and_with_a_way_to_packages_and_again(bare: Project) -> None:
    bare.write("Snakefile", SNAKEFILE)
    config = bare.config.read_text()
    bare.config.write_text(f'{config}Environment: {{Variables: {{PIP_NO_INDEX: "1"}}}}\n')
    said = bootstrap(bare)
    assert said.code == 2
    tells(said.output, "add --from-here", "smk-mantik bootstrap hpc1: nothing was installed")
    assert "Traceback" not in said.output

    said = bootstrap(bare, "--from-here").ok()
    tells(said.output, "Checking the version of Python at hpc1", "Fetching", "has Snakemake")
    bare.run().ok()
    assert bare.read("out.txt").strip().startswith(str(bare.workspace / ".mantik" / "snakemake-"))
    tells(bootstrap(bare).ok().output, "already exists")
