"""Runs the command `smk-mantik` in this process, which saves its imports."""

import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.cli import main
from tests.support.workflows import Project, Ran


def smk_mantik(project: Project, *arguments: str) -> Ran:
    variables = {**project.place.environment, **project.extra}
    return smk_mantik_in(project.directory, *arguments, variables=variables)


def smk_mantik_in(directory: Path, *arguments: str, variables: Mapping[str, str] = {}) -> Ran:
    said, code = StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, Path(os.devnull).open() as nobody:
        patch.chdir(directory)
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["smk-mantik", *arguments])
        patch.setattr(sys, "stdin", nobody)
        with redirect_stdout(said), redirect_stderr(said):
            try:
                main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0
    return Ran(code, said.getvalue())
