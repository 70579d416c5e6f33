"""What a workflow's code is made of beside the rule itself, and where that lies at a site.

Snakefiles, what they include, config files, scripts and wrappers. Those in the working directory
have their place in the workspace, which mirrors it. Other local ones lie below `ELSEWHERE` under
their whole path, so that one finds the other by a relative path as it does here. What is no local
file (a module on GitHub, say) was fetched here and goes into the source cache of the site's
Snakemake (`rules/onsite/full_job.py`): compute nodes need no way to it.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snakemake import wrapper
from snakemake.sourcecache import (
    HostingProviderFile,
    LocalSourceFile,
    SourceFile,
    infer_source_file,
)

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.config.exclude import Exclude, Include
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.jobs.paths import FILES_DIRECTORY, file_path
from snakemake_executor_plugin_mantik.rules.context import report_withheld
from snakemake_executor_plugin_mantik.staging import sources

ELSEWHERE = f"{FILES_DIRECTORY}/elsewhere"
"""Holds local files that are not in the working directory, each under its whole path."""


@dataclass
class WorkflowCode:
    """Files that the code of a workflow consists of, and what they are at a site.

    Attributes:
        workdir: the workflow's working directory.
        inputs: those in it.
        uploads: the others, by their paths in the workspace.
        cached: where Snakemake's source cache looks for a source, and its path in the workspace.
    """

    workdir: Path
    inputs: dict[str, None] = field(default_factory=dict)
    uploads: dict[str, Upload] = field(default_factory=dict)
    cached: dict[str, str] = field(default_factory=dict)

    def place(self, path: str | os.PathLike[str]) -> str:
        """The path in the workspace of a local file or directory."""
        absolute = os.path.abspath(path)
        inside = os.path.relpath(absolute, self.workdir)
        return ELSEWHERE + absolute if inside.split(os.sep)[0] == ".." else inside

    def add(self, path: str | os.PathLike[str]) -> str:
        """Take a local file along; its path in the workspace."""
        place = self.place(path)
        if place.startswith(ELSEWHERE):
            self.uploads[place] = Upload(place, local=Path(os.path.abspath(path)))
        else:
            self.inputs[place] = None
        return place

    def add_source(self, source: SourceFile, cache: Any) -> str:
        """Take a source along, wherever it is; its path in the workspace.

        Args:
            source: the source.
            cache: Snakemake's source cache, that fetches what is no local file.

        Raises:
            UserError: it cannot be had here.
        """
        if isinstance(source, LocalSourceFile):
            absolute = source.abspath()
            place = self.add(absolute.path)
            # For a path that the code names as a whole: it is another one at the site.
            self.cached[absolute.get_cache_path()] = place
            return place
        try:
            local = Path(cache.get_path(source))
            return self._add_cached(source.get_cache_path(), local)
        except Exception as error:  # of git, of any scheme's library
            raise UserError(
                f"it cannot be fetched ({error})", where=str(source),
                do="See whether it is there and can be reached from this machine",
            ) from error  # fmt: skip

    def _add_cached(self, entry: str, local: Path) -> str:
        place = file_path(local.read_bytes(), local.name)
        self.uploads[place] = Upload(place, local=local)
        self.cached[entry] = place
        return place

    def add_directory(self, directory: Path, config: BackendConfig) -> None:
        """Take along the small files of a directory elsewhere, as those of the working directory.

        Raises:
            UserError: they are too large together.
        """
        if not self.place(directory).startswith(ELSEWHERE):
            return  # they are sources already
        chosen = sources.select_sources(
            directory, Exclude(config.exclude), products={os.path.relpath(self.workdir, directory)},
            file_limit=config.site.source_file_limit_bytes,
            total_limit=config.site.sources_limit_bytes,
            include=Include(config.site.include),
        )  # fmt: skip
        report_withheld(str(directory), chosen.withheld)
        for path in chosen.paths:
            self.add(directory / path)

    def add_cache(
        self, cache: Any, included: Iterable[SourceFile], without: tuple[str, ...]
    ) -> None:
        """Take along what Snakemake has in its source cache, as of `workflow.source_path()`.

        Args:
            cache: Snakemake's.
            included: the Snakefiles.
            without: beginnings of entries that are left out.
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
        # What is cached for good lies elsewhere, beside that of other workflows.
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
    """What all jobs of a workflow need of its code.

    Args:
        workflow: Snakemake's.
        workdir: the workflow's working directory.
        config: of the site, for what is left out.

    Raises:
        UserError: something of it cannot be had, or is too large.
    """
    found = WorkflowCode(workdir)
    included = list(workflow.included)
    main = included[0]
    if isinstance(main, LocalSourceFile):
        found.add_directory(Path(main.path).absolute().parent, config)
    for source in included:
        found.add_source(source, workflow.sourcecache)
    for path in [*workflow.configfiles, *workflow.overwrite_configfiles]:
        found.add(path)
    if pepfile := getattr(workflow, "pepfile", None):
        found.add(pepfile)
    found.add_cache(workflow.sourcecache, included, tuple(_of_rules(workflow)))
    return found


def _of_rules(workflow: Any) -> Iterator[str]:
    """How entries of the source cache begin that single rules bring: scripts, environments.

    They come into it as jobs are sent. With them a job would be another one in the next run, and
    not be taken up again.
    """
    prefix = workflow.workflow_settings.wrapper_prefix
    for rule in workflow.rules:
        named = [rule.script or rule.notebook, getattr(rule.conda_env, "file", None)]
        for path in filter(None, named):
            if "{" in str(path):
                continue  # it is known for single jobs only
            entry: str = infer_source_file(infer_source_file(path), rule.basedir).get_cache_path()
            yield entry.removesuffix(".yaml").removesuffix(".yml")
        if rule.is_wrapper:
            yield wrapper.get_path(rule.wrapper, prefix).get_cache_path()


def resolve_source(path: Any, job: Any) -> SourceFile:
    """The source that a `script:`, `notebook:` or `cwl:` of a job names."""
    from snakemake.utils import format as formatted

    values = {"wildcards": job.wildcards, "params": job.params}
    if isinstance(path, SourceFile):
        return infer_source_file(path.format(**values), job.rule.basedir)
    return infer_source_file(infer_source_file(formatted(path, **values)), job.rule.basedir)
