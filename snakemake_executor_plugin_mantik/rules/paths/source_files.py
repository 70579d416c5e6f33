"""Files of `workflow.source_path()`: what lies beside a Snakefile, wherever that is.

Snakemake copies them into a cache and gives a rule the copy's path. The cache is of this machine
and has another name in each run, so for a site each of its files is one that goes along with the
job, and its name in a text is that of the file's place there.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from snakemake.io import is_flagged

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.engine.request import Upload
from snakemake_executor_plugin_mantik.jobs.paths import file_path
from snakemake_executor_plugin_mantik.rules import Job


def is_source_file(path: Any) -> bool:
    """Whether a path of a rule is one that `workflow.source_path()` gave."""
    return bool(is_flagged(path, "sourcecache_entry"))


def upload_source_files(
    job: Job, text: str, workspace: Callable[[], str]
) -> tuple[str, tuple[Upload, ...]]:
    """A command as a site knows it, and the source files that it names.

    Args:
        job: the Snakemake job whose command it is.
        text: the command with paths of this machine.
        workspace: tells the absolute path of the workspace; without a slash at its end; asked
            only if that is needed.

    Raises:
        UserError: it names something else in Snakemake's cache.
    """
    uploads: dict[str, Upload] = {}
    for root in _cache_roots(job):
        if root not in text:
            continue
        # Of source_path("../x") there is a `..` in the path.
        text = re.sub(
            rf"{re.escape(root)}[^\s'\"]*", lambda found: os.path.normpath(found[0]), text
        )
        for copy in sorted(_files(root), key=len, reverse=True):
            quoted = shlex.quote(copy)
            if copy in text or quoted in text:
                place = file_path(Path(copy).read_bytes(), os.path.basename(copy))
                uploads[place] = Upload(place, local=Path(copy))
                there = f"{workspace()}/{place}"
                if quoted != copy:
                    text = text.replace(quoted, shlex.quote(there))
                text = text.replace(copy, there)
        if root in text:
            raise UserError(
                f"the command names a place in Snakemake's cache of source files, {root}, and no"
                " file in it",
                where=f"rule {job.rule.name}",
                do="Give each file to workflow.source_path() by itself; a blank or a quote in its"
                " path needs {input:q} or {params.NAME:q}",
            )
    return text, tuple(uploads.values())


def stable_paths(job: Job, text: str) -> str:
    """A text that is the same in the next run, whose cache has another name."""
    for root in _cache_roots(job):
        text = text.replace(root, "")
    return text


def _cache_roots(job: Job) -> tuple[str, str]:
    """The caches: of this run, which may lie in the other one, and of all runs."""
    cache = job.rule.workflow.sourcecache
    return f"{cache.runtime_cache_path}/", f"{cache.cache_path}/"


def _files(root: str) -> Iterator[str]:
    for folder, _, names in os.walk(root):
        yield from (os.path.join(folder, name) for name in names)
