"""No file whatever ends in a traceback, and what is written is what a process sees."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from snakemake_executor_plugin_mantik.cli import _app
from snakemake_executor_plugin_mantik.cli.check import examine
from snakemake_executor_plugin_mantik.cli.render import rendered
from snakemake_executor_plugin_mantik.config.model import (
    Apptainer,
    BackendConfig,
    Environment,
    Firecrest,
    Resources,
)
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.engine.preview import TRY
from snakemake_executor_plugin_mantik.errors import MantikError
from tests.support.trial import NASTY

WORDS = st.sampled_from(
    ["a", "1", "0", "-1", "64G", "1h", "~", "$A", "a b", "/abs/x", "../up", "rel/p", "i.sif", "#",
     "a'b", "https://h.example.org/rest/core", "docker://x", "local", "remote", "pbs", "none", "\\",
     "a&b", "x" * 300, "\0", "\ud800", "é", "no", "!*", "**/", "exit 3", "a\nb"]
)  # fmt: skip
SCALARS = st.one_of(
    WORDS, st.text(max_size=20), st.integers(), st.floats(), st.booleans(), st.none()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def part(kind: Any, **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    names = {name: fixed.get(name, VALUES) for name in kind.key_names()}
    return st.fixed_dictionaries({}, optional=names)


DOCUMENTS = part(
    BackendConfig,
    UnicoreApiUrl=st.one_of(st.just("https://h.example.org/rest/core"), VALUES),
    Firecrest=part(Firecrest),
    Resources=part(Resources, Queue=WORDS),
    Environment=part(Environment, Apptainer=part(Apptainer, Path=WORDS)),
    Site=part(SiteSettings, Scheduler=WORDS),
)
# With few mistakes, so that most of them get as far as a script.
NEARLY = st.builds(
    lambda resources, environment, exclude, site: {
        "UnicoreApiUrl": "https://h.example.org/rest/core",
        "Resources": {"Queue": "q", **resources},
        "Environment": environment,
        "Exclude": exclude,
        "Site": site,
    },
    st.dictionaries(st.sampled_from(Resources.key_names()), WORDS, max_size=2),
    st.dictionaries(st.sampled_from(Environment.key_names()), WORDS, max_size=2),
    st.lists(WORDS, max_size=1),
    st.fixed_dictionaries({}, optional={"Scheduler": st.sampled_from(["slurm", "pbs", "none"])}),
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "i.sif").write_text("")
    (folder / NASTY).write_text("")
    return folder


def survives(content: bytes, suffix: str, project: Path) -> None:
    config = project / f"config{suffix}"
    config.write_bytes(content)
    render = ["render", str(config), "--project", str(project), "--command", "x", "--json"]
    for words in (["check", str(config), "--project", str(project)], render):
        done = CliRunner().invoke(_app(), words)
        assert done.exit_code in (0, 1, 2)
        if done.exception is not None:
            assert isinstance(done.exception, (SystemExit, MantikError)), words
        if words[0] == "render" and done.exit_code == 0:
            assert json.loads(done.stdout)["script"].startswith("#!/bin/bash")


RELAXED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@RELAXED
@given(st.one_of(DOCUMENTS, NEARLY, VALUES), st.sampled_from([".json", ".yaml"]))
def test_no_document_ends_in_a_traceback(project: Path, document: Any, suffix: str) -> None:
    survives(json.dumps(document).encode(), suffix, project)


@RELAXED
@given(NEARLY, st.data())
def test_no_broken_document_ends_in_a_traceback(
    project: Path, document: Any, data: st.DataObject
) -> None:
    whole = json.dumps(document, indent=1).encode()
    cut = data.draw(st.integers(0, len(whole)))
    junk = data.draw(st.binary(max_size=5))
    survives(whole[:cut] + junk + whole[cut + len(junk) :], ".yaml", project)


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.from_regex(r"T_[A-Z0-9]{1,5}", fullmatch=True), TEXTS, max_size=20))
def test_a_process_sees_what_the_file_says(variables: dict[str, str]) -> None:
    """From the file to the process, through all that a run goes through, and the real bash."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder, "work space")
        (workspace / ".mantik/tries/0").mkdir(parents=True)
        document = {
            "UnicoreApiUrl": "https://h.example.org/rest/core",
            "Resources": {"Queue": "q"},
            "Environment": {"Variables": variables},
            "Site": {"Workspace": str(workspace)},
        }
        config = Path(folder, "config.json")
        config.write_text(json.dumps(document))
        report = examine(str(config), Path(folder))
        assert report.loaded is not None, report.mistakes
        shown = rendered(report.loaded, [], Path(folder), "cat /proc/self/environ", "")
        assert shown.variables == variables
        subprocess.run(
            ["bash", "-c", shown.script], env={"PATH": os.environ["PATH"]}, check=True, timeout=60
        )
        log = workspace / ".mantik/work/0" / TRY / "log"
        pairs = (item.partition(b"=") for item in log.read_bytes().split(b"\0"))
        seen = {name.decode(): value.decode() for name, _, value in pairs if name[:2] == b"T_"}
        assert seen == variables
