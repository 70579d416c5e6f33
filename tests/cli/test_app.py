"""Options of `smk-mantik` itself."""

from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from snakemake_executor_plugin_mantik.cli import _app


def test_the_version() -> None:
    done = CliRunner().invoke(_app(), ["--version"])
    assert (done.exit_code, done.stdout) == (
        0,
        f"smk-mantik {version('snakemake-executor-plugin-mantik')}\n",
    )


@pytest.mark.parametrize("words", [["-h"], ["check", "-h"], ["runs", "submit", "-h"]])
def test_help_has_a_short_option(words: list[str]) -> None:
    done = CliRunner().invoke(_app(), words)
    assert done.exit_code == 0, done.output
    assert "--help" in done.stdout
