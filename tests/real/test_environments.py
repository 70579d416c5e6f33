"""Environment modules and virtual environments as they really are, on Slurm through both APIs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import require
from tests.support.workflows import UNTRACKED, Project, tells

MODULES = Path("/usr/share/modules/init/bash")

MODULEFILE = """\
#%Module
conflict tool
prepend-path PATH {directory}/bin
setenv TOOL {version}
"""


def site(project: Project, environment: str) -> None:
    """Give the site of a project an environment, lines of its mapping."""
    project.extra.update(UNTRACKED)
    project.config.write_text(f"{project.place.config}Environment:\n{environment}")


@pytest.mark.software("environment modules")
class TestModules:
    @pytest.fixture
    def modules(self, tmp_path: Path) -> str:
        """A program in two versions, the first one the default; the line that leads to them."""
        require([] if MODULES.exists() else ["environment-modules"], "module load")
        files = tmp_path / "module files" / "tool"
        files.mkdir(parents=True)
        for version in ("1.0", "2.0"):
            directory = tmp_path / f"tool-{version}"
            (directory / "bin").mkdir(parents=True)
            program = directory / "bin" / "tool"
            program.write_text(f"#!/bin/sh\necho tool {version}\n")
            program.chmod(0o755)
            text = MODULEFILE.format(directory=directory, version=version)
            (files / version).write_text(text)
        (files / ".version").write_text('#%Module\nset ModulesVersion "1.0"\n')
        return f"  Variables:\n    MODULEPATH: {files.parent}\n"

    def test_versions(self, on_slurm: Project, modules: str) -> None:
        site(on_slurm, f"{modules}  Modules: [tool]\n")
        show = "(tool; echo $TOOL $LOADEDMODULES) > {output}"
        on_slurm.write(
            "Snakefile",
            f"""
            rule all:
                input: "config.txt", "rule.txt"
            rule of_the_config:
                output: "config.txt"
                shell: "{show}"
            rule of_the_rule:
                output: "rule.txt"
                envmodules: "tool/2.0"
                shell: "{show}"
            """,
        )

        on_slurm.run("--mantik-software-deployment", "env-modules").ok()

        assert on_slurm.read("config.txt") == "tool 1.0\n1.0 tool/1.0\n"
        assert on_slurm.read("rule.txt") == "tool 2.0\n2.0 tool/2.0\n"

    def test_missing(self, on_slurm: Project, modules: str) -> None:
        site(on_slurm, f"{modules}  Modules: [tool/2.0, nothing/3.0]\n")
        on_slurm.write("Snakefile", 'rule one:\n    output: "x"\n    shell: "touch {output}"\n')

        said = on_slurm.run().failed()

        tells(said, "not all modules could be loaded: tool/2.0 nothing/3.0", "Unable to locate")


@pytest.mark.software("Python venv")
class TestVenv:
    SNAKEFILE = """
        rule one:
            output: "out.txt"
            shell:
                "python -c 'import only_there as it, sys; print(sys.prefix, it.WORD)' > {output}"
    """

    @pytest.mark.parametrize("where", ["absolute", "relative"])
    def test_is_activated(self, on_slurm: Project, where: str) -> None:
        directory = (
            on_slurm.workspace / "env dir" / "venv"
            if where == "relative"
            else on_slurm.place.server / "venvs" / on_slurm.workspace.parents[3].name
        )
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
        (packages,) = directory.glob("lib/python*/site-packages")
        (packages / "only_there.py").write_text("WORD = 'found'\n")
        path = "env dir/venv" if where == "relative" else str(directory)
        site(on_slurm, f'  Python: "{path}"\n')
        on_slurm.write("Snakefile", self.SNAKEFILE)

        on_slurm.run().ok()

        assert on_slurm.read("out.txt") == f"{directory} found\n"
        shutil.rmtree(directory)
