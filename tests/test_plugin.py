"""Snakemake finds the plugin in every kind of install, and importing it costs next to nothing."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.adapter import snakemake_errors
from snakemake_executor_plugin_mantik.common.errors import UserError

ROOT = Path(__file__).parents[1]
PACKAGE = "snakemake_executor_plugin_mantik"
STORAGE = "snakemake_storage_plugin_mantik"
SANDBOX = "hpc_sandbox"


def python(*arguments: str, at: Path, **environment: str) -> str:
    """What a Python started in the directory `at` prints."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=at,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def test_both_distributions_and_the_citation_have_one_version() -> None:
    """release-please raises all of them."""
    raised = json.loads((ROOT / "release-please-config.json").read_text())["packages"]["."]
    files = ["pyproject.toml", *(each["path"] for each in raised["extra-files"])]
    assert files == ["pyproject.toml", "packaging/storage-plugin/pyproject.toml", "CITATION.cff"]
    found = [
        re.search(r'^version(?: =|:) "?([0-9.]+)', (ROOT / f).read_text(), re.M) for f in files
    ]
    versions = [match[1] if match else "" for match in found]
    known = json.loads((ROOT / ".release-please-manifest.json").read_text())["."]
    assert versions == [known] * 3


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    directory = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--wheel-dir"]
    python("-m", "pip", "wheel", *options, str(directory), str(ROOT), at=directory)
    (found,) = directory.glob("*.whl")
    return found


def test_snakemake_lists_the_editable_install(tmp_path: Path) -> None:
    said = python("-m", "snakemake", "--help", at=tmp_path)

    assert "--mantik-backend-config" in said
    (executors,) = [line for line in said.splitlines() if "{" in line and "local,dryrun" in line][
        :1
    ]
    assert "mantik" in executors


def test_snakemake_lists_the_wheel(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--target", str(installed)]
    python("-m", "pip", "install", *options, str(wheel), at=tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()

    where = python("-c", f"import {PACKAGE} as p; print(p.__file__)", at=empty,
                   PYTHONPATH=str(installed))  # fmt: skip
    said = python("-m", "snakemake", "--help", at=empty, PYTHONPATH=str(installed))

    assert Path(where.strip()).is_relative_to(installed)
    assert "--mantik-backend-config" in said
    assert (installed / "bin" / "smk-mantik").exists()


def test_the_wheel_has_all_files_and_no_others(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    ours = {
        path.relative_to(ROOT).as_posix()
        for package in (PACKAGE, STORAGE, SANDBOX)
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    ours |= {f"{PACKAGE}/{f.relative_to(ROOT)}" for f in (ROOT / "docs").rglob("*") if f.is_file()}
    assert {
        name for name in names if name.startswith((f"{PACKAGE}/", f"{STORAGE}/", f"{SANDBOX}/"))
    } == ours
    assert f"{PACKAGE}/py.typed" in names
    assert f"{PACKAGE}/jobs/bash/main.sh" in names
    assert f"{SANDBOX}/shims/bin/srun" in names
    assert {name.partition("/")[0] for name in names} - {PACKAGE, STORAGE, SANDBOX} == {
        f"{PACKAGE}-0.1.0.dist-info"
    }


def test_importing_the_plugin_imports_nothing_heavy(tmp_path: Path) -> None:
    code = f"""
import sys, time
import snakemake_interface_executor_plugins.settings
import snakemake_interface_executor_plugins.executors.remote
before = time.process_time()
import {PACKAGE}
seconds = time.process_time() - before
heavy = ["mlflow", "pyunicore", "httpx", "pydantic", "jinja2", "rich", "typer", "keyring", "pandas"]
print(seconds, [name for name in heavy if name in sys.modules])
"""
    seconds, _, loaded = python("-c", code, at=tmp_path).strip().partition(" ")

    assert loaded == "[]"
    assert float(seconds) < 0.3


def test_the_process_that_tells_mlflow_imports_nothing_that_talks_to_sites(tmp_path: Path) -> None:
    code = f"""
import sys
import {PACKAGE}.tracking.process, {PACKAGE}.tracking.publishing
print([name for name in sys.modules if name.startswith(("{PACKAGE}.sites", "{PACKAGE}.config"))])
"""
    assert python("-c", code, at=tmp_path).strip() == "[]"


@pytest.mark.parametrize(("found", "fine"), [("9.17.3", False), ("9.18.1", True), ("10.0", True)])
def test_a_snakemake_that_is_too_old_is_told_in_one_sentence(
    found: str, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snakemake_errors, "version", lambda name: found)
    if fine:
        snakemake_errors.check_snakemake_version()
        return
    with pytest.raises(UserError, match=r"9\.17\.3 is too old .* needs 9\.18 or newer\. Type: pip"):
        snakemake_errors.check_snakemake_version()
