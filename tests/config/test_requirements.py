"""What is uploaded for a virtual environment, and what is wrong with it before anything is sent."""

from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import ConfigError
from snakemake_executor_plugin_mantik.config.environment import environment_uploads
from snakemake_executor_plugin_mantik.config.named_files import (
    NamedFileError,
    read_requirements,
    rebase_requirements,
)
from snakemake_executor_plugin_mantik.config.reading import parse_backend_config

CONFIG = """
UnicoreApiUrl: https://hpc.example.org:8080/SITE/rest/core
Resources: {Queue: batch}
Environment: {Python: {Path: venv, Requirements: requirements/main.txt}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for path in (*FILES[1:], "package/pyproject.toml", "vendor/tool/pyproject.toml"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/pyvenv.cfg").touch()
    write(
        tmp_path,
        "# -r comment.txt",
        "--no-index",
        "-rbase.txt",
        "-c ../limits.txt  # these",
        "-r https://example.org/more.txt",
        "numpy >= 2 ; \\",
        "  python_version > '3.9'",
        "./wheels/a.whl",
        "-e ./package[more] ; sys_platform == 'linux'",
        "-e .",
        "wheels/b.whl --hash=sha256:00",
        "own.tar.gz",
        "-e vendor/tool",
        "tool @ git+https://example.org/a/b.git",
        "https://example.org/c.whl",
        "${WHEELS}/d.whl",
        "/at/site/e.whl",
    )
    return tmp_path


def write(project: Path, *lines: str) -> None:
    (project / "requirements/main.txt").write_text("\n".join([*lines, ""]))


FILES = (
    "requirements/main.txt", "requirements/base.txt", "limits.txt", "wheels/a.whl", "wheels/b.whl",
    "own.tar.gz",
)  # fmt: skip


def test_all_that_pip_reads_is_uploaded(project: Path) -> None:
    found = read_requirements("./requirements/main.txt", project)
    assert found.files == FILES
    assert found.folders == ("package", ".", "vendor/tool")
    # A virtual environment of this machine does not matter: another one is made at the site.
    config, warnings = parse_backend_config(CONFIG.encode(), "yaml", project, shown="c")
    assert not warnings
    uploads = environment_uploads(config.environment, project)
    assert uploads == tuple((project / path, path) for path in FILES)


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("-r more.txt", "'requirements/more.txt' of 'requirements/main.txt' was not found"),
        ("-r ../../more.txt", "outside the project folder"),
        ("./none", "'./none' of 'requirements/main.txt' was not found"),
        ("wheels/none.whl", "'wheels/none.whl' of 'requirements/main.txt' was not found"),
        ("none.whl", "'none.whl' of 'requirements/main.txt' was not found"),
        ("-e ../elsewhere", "outside the project folder"),
    ],
)
def test_what_is_not_there_is_a_mistake(project: Path, line: str, mistake: str) -> None:
    write(project, line)
    with pytest.raises(NamedFileError, match=mistake):
        read_requirements("requirements/main.txt", project)
    with pytest.raises(ConfigError) as caught:
        parse_backend_config(CONFIG.encode(), "yaml", project, shown="c")
    assert [each.key for each in caught.value.mistakes] == ["Environment.Python.Requirements"]


def test_a_package_that_is_not_uploaded_is_a_mistake(project: Path) -> None:
    text = f"{CONFIG}Exclude: [package/]\n"
    with pytest.raises(ConfigError, match="'package', which is not uploaded "):
        parse_backend_config(text.encode(), "yaml", project, shown="c")


def test_a_path_with_blanks_stays_one_path() -> None:
    text = "-r 'more of it.txt'\n-c limits.txt\nnumpy\n"
    rebased = rebase_requirements(text, "../my project")
    assert rebased == "-r '../my project/more of it.txt'\n-c '../my project/limits.txt'\nnumpy\n"
