"""No file whatever ends in a traceback, and what is written is what a process sees."""

import json
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from snakemake_executor_plugin_mantik.cli import _app
from snakemake_executor_plugin_mantik.cli.check import examine
from snakemake_executor_plugin_mantik.cli.plan import render_preview
from snakemake_executor_plugin_mantik.common.errors import MantikError
from snakemake_executor_plugin_mantik.config.environment_keys import (
    ApptainerConfig,
    EnvironmentConfig,
)
from snakemake_executor_plugin_mantik.config.model import (
    BackendConfig,
    FirecrestConfig,
    ResourcesConfig,
)
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.engine.forecast import ATTEMPT
from snakemake_executor_plugin_mantik.jobs.library import library_path, read_library
from snakemake_executor_plugin_mantik.jobs.paths import workspace_below, workspace_root
from snakemake_executor_plugin_mantik.jobs.script import BASH_OWN
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
    Firecrest=part(FirecrestConfig),
    Resources=part(ResourcesConfig, Queue=WORDS),
    Environment=part(EnvironmentConfig, Apptainer=part(ApptainerConfig, Path=WORDS)),
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
    st.dictionaries(st.sampled_from(ResourcesConfig.key_names()), WORDS, max_size=2),
    st.dictionaries(st.sampled_from(EnvironmentConfig.key_names()), WORDS, max_size=2),
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


def script_of(folder: Path, command: str, **environment: Any) -> str:
    """Return a job's script, for a workspace beside the config in `folder`."""
    workspace = folder / WORKSPACE
    (workspace / ".mantik/attempts/0").mkdir(parents=True)
    (workspace / library_path()).write_bytes(read_library())
    config = folder / "config.json"
    document = {
        "UnicoreApiUrl": "https://h.example.org/rest/core",
        "Resources": {"Queue": "q"},
        "Environment": environment,
        "Site": {"Workspace": workspace_root(str(workspace))},
    }
    config.write_text(json.dumps(document))
    report = examine(str(config), folder)
    assert report.loaded is not None, report.mistakes
    return render_preview(report.loaded, [], folder, command).script


def seen_by_a_process(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    """Return the environment of a job's command, through all that a run goes through."""
    script = script_of(folder, "cat /proc/self/environ", Variables=variables)
    subprocess.run(
        ["bash", "-c", script], env={"PATH": os.environ["PATH"]}, check=True, timeout=600
    )
    log = folder / WORKSPACE / ".mantik/work/0" / ATTEMPT / "log"
    return dict(item.decode().partition("=")[::2] for item in log.read_bytes().split(b"\0") if item)


WORD = st.text(
    st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), min_size=1, max_size=12
)
WORKSPACE = workspace_below("work space")

SHOW_WORDS = """#!/bin/bash
shift; while [ "$1" != "$IMAGE" ]; do printf '%s\\0' "$1"; shift; done > "$WORDS"
"""


def in_double_quotes(word: str) -> str:
    return '"' + re.sub(r'([\\"`$])', r"\\\1", word) + '"'


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(WORD, st.sampled_from([shlex.quote, in_double_quotes])), max_size=8))
def test_apptainer_gets_the_words_of_its_options(
    words: list[tuple[str, Callable[[str], str]]],
) -> None:
    """Any words, quoted for bash in one way or another, from the file to the program."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "bin").mkdir()
        (folder / "bin/apptainer").write_text(SHOW_WORDS)
        (folder / "bin/apptainer").chmod(0o755)
        options = " \n".join(["--first", *(quote(word) for word, quote in words), "$MINE/x"])
        image = {"Path": f"{folder}/i.sif", "Type": "remote", "Options": options}
        Path(image["Path"]).touch()
        script = script_of(folder, "true", Apptainer=image, Variables={"MINE": "a  b*"})
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        given = {"PATH": path, "WORDS": str(folder / "words"), "IMAGE": image["Path"]}
        subprocess.run(["bash", "-c", script], env=given, check=True, timeout=600)
        seen = (folder / "words").read_bytes().decode().split("\0")[:-1]
        assert seen == ["--first", *(word for word, _ in words), "a  b*/x"]


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.from_regex(r"T_[A-Z0-9]{1,5}", fullmatch=True), TEXTS, max_size=20))
def test_a_process_sees_what_the_file_says(variables: dict[str, str]) -> None:
    """From the file to the process, and the real bash."""
    with tempfile.TemporaryDirectory() as folder:
        seen = seen_by_a_process(Path(folder), variables)
        assert {name: value for name, value in seen.items() if name[:2] == "T_"} == variables


# What bash knows of itself, wherever it runs, and some that people set.
NAMES = subprocess.run(
    ["bash", "-c", "compgen -v; [[ a =~ a ]]; read x < /dev/null; compgen -v"],
    env={}, capture_output=True, text=True, check=True,
).stdout.split()  # fmt: skip
COMMON = {"HOME", "LANG", "TZ", "ENV", "PYTHONPATH", "CDPATH", "GLOBIGNORE"}
OTHERS = {"PS4", "PATH", "TMPDIR"}
"""As they are written, but not for root, only if they are a path, only if it is a directory."""


def test_a_process_sees_any_name_that_is_not_refused(tmp_path: Path) -> None:
    tried = sorted({*NAMES, *COMMON, "_m_main", "code", "MANTIK_X"} - OTHERS)
    variables = {name: "7 x" for name in tried if name not in BASH_OWN}
    assert len(variables) > len(COMMON)
    seen = seen_by_a_process(tmp_path, variables)
    assert {name: seen.get(name) for name in variables} == variables
