"""A project's sources: which files of its folder an entry point's result depends on.

They are chosen as the executor chooses what goes up of the working directory
(`staging.sources.candidates`), without what rules of the workflow make, so that an output in the
project's folder is no reason to make it again. The MLproject file counts through the entry point
itself, a Snakefile through Snakemake's own look at its rules.
"""

import fnmatch
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.staging.secret_files import EVERYTHING, NOTHING
from snakemake_executor_plugin_mantik.staging.sources import list_candidates

_FILE_LIMIT: Final = 16 << 20
"""Bytes above which a file is data and no source: name it as an input of the rules that read it."""

TOTAL_LIMIT: Final = 512 << 20
"""Bytes of all sources of a project; their content is read whenever a workflow starts."""

_NO_SOURCES: Final = ("Snakefile", "*.smk", "*.pyc", "mlflow.db", "*.mantik-part*")
"""What is there of Snakemake, Python and MLflow themselves."""


def project_digest(
    folder: Path, file: Path | None, exclude: Sequence[str] = (), workflow: Any = None
) -> str:
    """A hash of the names, contents and execution bits of a project's sources.

    Args:
        folder: the project's folder, links resolved.
        file: its MLproject file, which is left out.
        exclude: patterns of files that are left out, as in `.gitignore`.
        workflow: Snakemake's workflow: what its rules make is left out.

    Raises:
        UserError: a source cannot be read, or they are too large.
    """
    total, gathered = 0, hashlib.sha256()
    ours = file.name if file is not None else ""
    # Whether a site includes what seems to hold a secret is not known: count it.
    made = _Made(folder, workflow)
    for path, size in list_candidates(folder, _excluded(exclude), made, include=EVERYTHING):
        name = os.path.basename(path)
        if size > _FILE_LIMIT or path == ours or any(fnmatch.fnmatch(name, p) for p in _NO_SOURCES):
            continue
        total += size
        if total > TOTAL_LIMIT:
            raise UserError(
                f"the sources of the project are larger than {TOTAL_LIMIT >> 20} MiB",
                where=str(folder),
                do="Move data out of the project's folder, or leave it out: mlproject.load(…,"
                ' exclude=["data/"])',
            )
        gathered.update(_entry(folder, path))
    return gathered.hexdigest()


def _entry(folder: Path, path: str) -> bytes:
    local = folder / path
    try:
        with local.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
            executable = os.fstat(file.fileno()).st_mode & 0o100 != 0
    except OSError as error:
        raise UserError(
            f"a source of the project cannot be read ({error.strerror or error})",
            where=str(local),
            do="See to it that it is readable, or leave it out with mlproject.load(…, exclude=[…])",
        ) from None
    named = os.fsencode(path)
    return b"%d:%s:%d:%s" % (len(named), named, executable, content)


def _excluded(patterns: Sequence[str]) -> Any:
    if not patterns:
        return NOTHING
    from snakemake_executor_plugin_mantik.config.exclude import Exclude, read_patterns

    try:
        return Exclude(read_patterns(list(patterns)))
    except ValueError as error:
        told = "; ".join(each["msg"] for each in getattr(error, "errors", list)()) or str(error)
        raise UserError(
            told, where="mlproject.load(…, exclude=…)", do="Correct the pattern"
        ) from None


class _Made:
    """Says of paths in a project's folder whether a rule of the workflow makes them.

    The patterns of all rules are asked and not the jobs of a run, which are others when other files
    are asked for.
    """

    def __init__(self, folder: Path, workflow: Any) -> None:
        self._prefix = os.path.relpath(folder, os.path.realpath(os.curdir))
        self._patterns: list[Any] = []
        for rule in getattr(workflow, "rules", ()):
            made = [*rule.output, *rule.log, *([rule.benchmark] if rule.benchmark else [])]
            self._patterns += [each for each in made if isinstance(each, str)]

    def __contains__(self, path: object) -> bool:
        at = os.path.normpath(os.path.join(self._prefix, str(path)))
        return any(_matches(pattern, at) for pattern in self._patterns)


def _matches(pattern: Any, path: str) -> bool:
    # A path is Snakemake's as it is written; a pattern like ./x or a//b would not match otherwise.
    return bool(pattern.match(path)) or os.path.normpath(str(pattern)) == path
