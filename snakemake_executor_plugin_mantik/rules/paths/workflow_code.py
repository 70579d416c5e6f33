"""Collect the files of a workflow's code for a Snakemake at a site, and map their paths.

The files are Snakefiles and their includes, config files, scripts and wrappers. Those in the
working directory have the same path in the workspace. Other local files are below `ELSEWHERE`
under their whole path, so that relative paths between them stay valid. Remote files (for example
a module on GitHub) are fetched on this machine and go into the source cache of the site's Snakemake
(`rules/onsite/nested_snakemake.py`), so compute nodes need no access to them.
"""

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snakemake import wrapper
from snakemake.io import is_flagged
from snakemake.sourcecache import (
    HostingProviderFile,
    LocalSourceFile,
    SourceFile,
    infer_source_file,
)
from snakemake.utils import format as formatted

from ...common.errors import UserError
from ...config.model import BackendConfig
from ...engine.request import Upload
from ...jobs.paths import FILES_DIRECTORY, file_path
from .. import Job
from ..context import select_small_files
from .job_paths import JobPaths

ELSEWHERE = f"{FILES_DIRECTORY}/elsewhere"
"""Directory of local files from outside the working directory, each under its whole path."""


@dataclass
class WorkflowCode:
    """The files of a workflow's code, and their paths at a site.

    Attributes:
        workdir: the workflow's working directory.
        inputs: files in the working directory.
        uploads: other files, by their paths in the workspace.
        cached: path of a source in Snakemake's source cache, and its path in the workspace.
    """

    workdir: Path
    inputs: dict[str, None] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    cached: dict[str, str] = field(default_factory=dict)

    def place(self, path: str | os.PathLike[str]) -> str:
        absolute = os.path.abspath(path)
        inside = os.path.relpath(absolute, self.workdir)
        return ELSEWHERE + absolute if inside.split(os.sep)[0] == ".." else inside

    def add(self, path: str | os.PathLike[str]) -> str:
        place = self.place(path)
        if place.startswith(ELSEWHERE):
            self.uploads[place] = Upload(place, local=Path(os.path.abspath(path)))
        else:
            self.inputs[place] = None
        return place

    def add_source(self, source: SourceFile, cache: Any) -> str:
        """Add a local or remote source, and return its path in the workspace.

        Snakemake's source `cache` fetches a remote one.

        Raises:
            UserError: the source cannot be fetched.
        """
        if isinstance(source, LocalSourceFile):
            absolute = source.abspath()
            place = self.add(absolute.path)
            # The code may name the file by its absolute path, which is another one at the site.
            self.cached[absolute.get_cache_path()] = place
            return place
        try:
            return self._add_cached(source.get_cache_path(), Path(cache.get_path(source)))
        except Exception as error:  # from git, or from the library of any scheme
            raise UserError(
                f"it cannot be fetched ({error})", where=str(source),
                do="Check that it exists and can be reached from this machine",
            ) from error  # fmt: skip

    def _add_cached(self, entry: str, local: Path) -> str:
        place = file_path(local.read_bytes(), local.name)
        self.uploads[place] = Upload(place, local=local)
        self.cached[entry] = place
        return place

    def add_directory(self, directory: Path, config: BackendConfig) -> None:
        """Add the small files of a directory outside the working directory.

        Raises:
            UserError: the files are too large together.
        """
        if not self.place(directory).startswith(ELSEWHERE):
            return  # files of the working directory are uploaded as sources anyway
        for path in select_small_files(directory, self.workdir, config):
            self.add(path)

    def add_cache(
        self, cache: Any, included: Iterable[SourceFile], without: tuple[str, ...]
    ) -> None:
        """Add the files of Snakemake's source cache, for example of `workflow.source_path()`.

        `included` are the Snakefiles, `without` prefixes of entries to skip.
        """
        runtime = Path(cache.runtime_cache_path)
        for path in _files(runtime):
            entry = path.relative_to(runtime).as_posix()
            if entry.startswith(without):
                continue
            scheme, _, rest = entry.partition("/")
            if scheme == "file" and os.path.exists(f"/{rest}"):
                self.add_source(LocalSourceFile(f"/{rest}"), cache)
            else:
                self._add_cached(entry, path)
        # Persistently cached files are in another directory, which all workflows share.
        for source in included:
            if isinstance(source, HostingProviderFile) and source.is_persistently_cacheable():
                kept = Path(cache.cache_path)
                revision = source.get_cache_path()[: -len(source.path)]
                for path in _files(kept / revision):
                    entry = path.relative_to(kept).as_posix()
                    if not entry.startswith(without):
                        self._add_cached(entry, path)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def find_workflow_code(workflow: Any, workdir: Path, config: BackendConfig) -> WorkflowCode:
    """Collect the code that all jobs of a workflow need, with the site's Exclude and limits.

    Raises:
        UserError: a file cannot be fetched, or files are too large.
    """
    found = WorkflowCode(workdir)
    included = list(workflow.included)
    main = included[0]
    if isinstance(main, LocalSourceFile):
        found.add_directory(Path(main.path).absolute().parent, config)
    for source in included:
        found.add_source(source, workflow.sourcecache)
    for path in [*workflow.configfiles, *workflow.overwrite_configfiles]:
        found.add(resolve_recorded(workflow, path))
    if pepfile := getattr(workflow, "pepfile", None):
        project = resolve_recorded(workflow, pepfile)
        found.add(project)
        found.add_directory(project.parent, config)  # it names further files beside it
    found.add_cache(workflow.sourcecache, included, tuple(_of_rules(workflow)))
    return found


def read_snakefiles(workflow: Any) -> Iterator[str]:
    """Yield the texts of a workflow's Snakefiles."""
    for source in workflow.included:
        with workflow.sourcecache.open(source) as file:
            yield file.read()


def enters_workdir(workflow: Any) -> bool:
    """Return whether a Snakefile has changed the working directory with `workdir:`."""
    return not os.path.samefile(workflow.workdir_init, os.curdir)


def resolve_recorded(workflow: Any, path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a file that Snakemake recorded when it read the Snakefiles.

    A relative one is relative to the directory that Snakemake was started in, or to that of
    `workdir:`, if it was recorded after that directive.
    """
    before = Path(workflow.workdir_init, path)
    return before if before.exists() else Path(os.path.abspath(path))


def _of_rules(workflow: Any) -> Iterator[str]:
    """Yield prefixes of source cache entries that belong to single rules: scripts, environments.

    Snakemake adds these entries when jobs are submitted. If they counted as code of the workflow, a
    job would look changed in the next run, and would not be reattached.
    """
    prefix = workflow.workflow_settings.wrapper_prefix
    for rule in workflow.rules:
        named = [rule.script or rule.notebook, getattr(rule.conda_env, "file", None)]
        for path in filter(None, named):
            if "{" in str(path):
                continue  # depends on the job's wildcards
            entry: str = infer_source_file(infer_source_file(path), rule.basedir).get_cache_path()
            yield entry.removesuffix(".yaml").removesuffix(".yml")
        if rule.is_wrapper:
            yield wrapper.get_path(rule.wrapper, prefix).get_cache_path()


def resolve_source(path: Any, job: Any) -> SourceFile:
    """Return the source that a `script:`, `notebook:` or `cwl:` of a job names."""
    values = {"wildcards": job.wildcards, "params": job.params}
    if isinstance(path, SourceFile):
        return infer_source_file(path.format(**values), job.rule.basedir)
    return infer_source_file(infer_source_file(formatted(path, **values)), job.rule.basedir)


def is_source_file(path: Any) -> bool:
    """Return whether a path of a rule comes from `workflow.source_path()`."""
    return bool(is_flagged(path, "sourcecache_entry"))


def upload_source_files(job: Job, text: str, places: JobPaths) -> tuple[str, dict[str, Upload]]:
    """Rewrite the paths of source files in a command (`text`); return the files to upload by path.

    Snakemake copies files of `workflow.source_path()` into a cache, which exists on this machine
    only and has another name in each run, and gives a rule the copy's path.

    Raises:
        UserError: the command names a path in Snakemake's cache that is not a file.
    """
    uploads: dict[str, Upload] = {}
    for root in _cache_roots(job):
        if root not in text:
            continue
        # The path of source_path("../x") contains `..`.
        text = re.sub(
            rf"{re.escape(root)}[^\s'\"]*", lambda found: os.path.normpath(found[0]), text
        )
        for copy in sorted(map(str, _files(Path(root))), key=len, reverse=True):
            quoted = shlex.quote(copy)
            if copy in text or quoted in text:
                place = file_path(Path(copy).read_bytes(), os.path.basename(copy))
                uploads[place] = Upload(place, local=Path(copy))
                there = f"{places.workspace}/{place}"
                if quoted != copy:
                    text = text.replace(quoted, shlex.quote(there))
                text = text.replace(copy, there)
        if root in text:
            raise UserError(
                f"the command names a path in Snakemake's cache of source files, {root}, that is"
                " not a file",
                where=f"rule {job.rule.name}",
                do="Pass each file to workflow.source_path() by itself. Use {input:q} or"
                " {params.NAME:q} if its path contains a blank or a quote",
            )
    return text, uploads


def stable_paths(job: Job, text: str) -> str:
    """Remove the caches' paths from a text, since they are different in the next run."""
    for root in _cache_roots(job):
        text = text.replace(root, "")
    return text


def _cache_roots(job: Job) -> tuple[str, str]:
    """Return the cache of this run, and that of all runs, which may contain the first."""
    cache = job.rule.workflow.sourcecache
    return f"{cache.runtime_cache_path}/", f"{cache.cache_path}/"
