"""Runs what a script: or notebook: rule would run at a site, in a directory of this machine."""

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from snakemake.iocontainers import (
    InputFiles,
    Log,
    Namedlist,
    OutputFiles,
    Params,
    ResourceList,
    Wildcards,
)
from snakemake.sourcecache import LocalSourceFile, SourceCache

from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.jobs.paths import WORK
from snakemake_executor_plugin_mantik.rules.kinds.script_file import find_script_file
from snakemake_executor_plugin_mantik.rules.kinds.scripts import script_command
from snakemake_executor_plugin_mantik.rules.paths.job_paths import JobPaths

CONFIG = BackendConfig.model_validate(
    {
        "UnicoreApiUrl": "https://hpc.example.org/rest/core",
        "Resources": {"Queue": "batch"},
        "Site": {"ProjectFilesLimit": "4M"},
    }
)
"""Of a site whose limits for files beside a script are small."""


def named(kind: type[Namedlist], *items: object, **names: object) -> Any:
    """One of Snakemake's lists; a list among the named ones is a range with a name."""
    made = kind(toclone=items)
    for name, value in names.items():
        begin = len(made)
        made.extend(value if type(value) is list else [value])
        made._set_name(name, begin, end=len(made) if type(value) is list else None)
    return made


@dataclass
class ScriptRule:
    """A rule with a script, and a job of it. The working directory has to be the current one.

    Attributes:
        path: of the script, as the rule names it.
        notebook: whether it is one.
        given: what the job has, by Snakemake's name for it.
    """

    path: str
    notebook: bool = False
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def job(self) -> Any:
        cache = Path.cwd().with_name("cache")
        rule = SimpleNamespace(
            name="tested",
            script=None if self.notebook else self.path,
            notebook=self.path if self.notebook else None,
            is_script=not self.notebook,
            is_notebook=self.notebook,
            basedir=LocalSourceFile(os.getcwd()),
            workflow=SimpleNamespace(
                sourcecache=SourceCache(cache, cache),
                included=[],
                storage_registry=SimpleNamespace(_storages={}),
            ),
            expand_params=lambda *_: (self.given.get("params"), False),
            module_globals={"config": self.given.get("config", {})},
        )
        resources = ResourceList(fromdict={"_cores": 2, "_nodes": 1, "tmpdir": "<TBD>"})
        lists = {
            "input": named(InputFiles, "in put.txt", other="b.txt"),
            "output": named(OutputFiles, "out.txt"),
            "log": Log(),
            "params": named(Params, text='it\'s "quoted" $HOME ü', numbers=[1, 2]),
            "wildcards": named(Wildcards, name="w"),
            "resources": resources,
            "threads": 2,
        }
        dag = SimpleNamespace(is_edit_notebook_job=lambda _: False)
        return SimpleNamespace(rule=rule, dag=dag, wildcards_dict={}, **{**lists, **self.given})

    def text(
        self, iteration: int | None = None, workspace: str = "/workspace"
    ) -> tuple[str, tuple[Upload, ...]]:
        """What runs, and the files that it needs."""
        places = JobPaths(Path.cwd(), lambda: workspace)
        job = self.job
        return script_command(job, find_script_file(job), places, iteration, CONFIG)

    def run(
        self,
        site: Path,
        environment: Mapping[str, str] | None = None,
        shell: Sequence[str] = ("bash", "-c"),
    ) -> "subprocess.CompletedProcess[str]":
        """Run it in `site`, which gets what goes up and whose Python has the standard library."""
        text, uploads = self.text(workspace=str(site))
        for upload in uploads:
            target = site / upload.path
            target.parent.mkdir(parents=True, exist_ok=True)
            content = upload.content
            if content is None:
                assert upload.local is not None
                content = upload.local.read_bytes()
            target.write_bytes(content)
        (site / WORK).mkdir(parents=True, exist_ok=True)
        (site / "tmp").mkdir(exist_ok=True)
        path = f"{_bare_python().name}/bin:{os.environ['PATH']}"
        kept = {"PATH": path, "HOME": os.environ["HOME"]}
        return subprocess.run(
            [*shell, text],
            cwd=site,
            env={**kept, "TMPDIR": str(site / "tmp"), **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )


@cache
def _bare_python() -> "tempfile.TemporaryDirectory[str]":
    """A Python environment without any package, so that this machine's own do not matter."""
    directory = tempfile.TemporaryDirectory(prefix="bare-python-")
    venv.create(directory.name, symlinks=True)
    return directory


OWN_PYTHON = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
"""An environment whose Python is that of the tests."""
