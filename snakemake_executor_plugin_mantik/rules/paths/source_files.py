"""Upload files of `workflow.source_path()`, which are beside a Snakefile, wherever that is.

Snakemake copies them into a cache and gives a rule the copy's path. The cache exists on this
machine only and has another name in each run. So each cached file that a command names is uploaded
with the job, and its path in the command is replaced by the one at the site.
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

from .. import Job


def is_source_file(path: Any) -> bool:
    """Return whether a path of a rule comes from `workflow.source_path()`."""
    return bool(is_flagged(path, "sourcecache_entry"))


def upload_source_files(
    job: Job, text: str, workspace: Callable[[], str]
) -> tuple[str, tuple[Upload, ...]]:
    """Rewrite the paths of source files in a command (`text`), and return the files to upload.

    `workspace`, called only if needed, returns its absolute path without a trailing slash.

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
                f"the command names a path in Snakemake's cache of source files, {root}, that is"
                " not a file",
                where=f"rule {job.rule.name}",
                do="Pass each file to workflow.source_path() by itself. Use {input:q} or"
                " {params.NAME:q} if its path contains a blank or a quote",
            )
    return text, tuple(uploads.values())


def stable_paths(job: Job, text: str) -> str:
    """Remove the caches' paths from a text, since they are different in the next run."""
    for root in _cache_roots(job):
        text = text.replace(root, "")
    return text


def _cache_roots(job: Job) -> tuple[str, str]:
    """Return the cache of this run, and that of all runs, which may contain the first."""
    cache = job.rule.workflow.sourcecache
    return f"{cache.runtime_cache_path}/", f"{cache.cache_path}/"


def _files(root: str) -> Iterator[str]:
    for folder, _, names in os.walk(root):
        yield from (os.path.join(folder, name) for name in names)
