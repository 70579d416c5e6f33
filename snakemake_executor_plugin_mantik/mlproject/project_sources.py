"""Find and hash a project's sources: the files in its folder that an entry point depends on.

They are chosen like the files of the working directory to upload (`staging.sources`), but without
the products of the workflow's rules: an output in the project's folder is no reason to make it
again. The MLproject file counts through the entry point itself, a Snakefile through Snakemake's own
check of its rules.
"""

import fnmatch
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..common.errors import UserError
from ..staging.secret_files import EVERYTHING, NOTHING
from ..staging.sources import list_candidates

_FILE_LIMIT: Final = 16 << 20
"""A larger file is data, not a source: name it as an input of the rules that read it."""

TOTAL_LIMIT: Final = 512 << 20
"""Maximum bytes of all sources of a project, which are read whenever a workflow starts."""

_NO_SOURCES: Final = ("Snakefile", "*.smk", "*.pyc", "mlflow.db", "*.mantik-part*")
"""Files of Snakemake, Python, MLflow and this executor."""


def project_digest(
    folder: Path, file: Path | None, exclude: Sequence[str] = (), workflow: Any = None
) -> str:
    """Return a hash of the names, contents and execution bits of a project's sources.

    Args:
        folder: the project's folder, links resolved.
        file: its MLproject file, which is left out.
        exclude: patterns of files to leave out, as in `.gitignore`.
        workflow: Snakemake's workflow; products of its rules are left out.

    Raises:
        UserError: a source cannot be read, they are too large, or `exclude` is wrong.
    """
    total, gathered = 0, hashlib.sha256()
    ours = file.name if file is not None else ""
    # It is unknown whether a site includes files that seem to hold secrets: count them.
    made = _Made(folder, workflow)
    for path, size in list_candidates(folder, _excluded(exclude), made, include=EVERYTHING):
        name = os.path.basename(path)
        if size > _FILE_LIMIT or path == ours or any(fnmatch.fnmatch(name, p) for p in _NO_SOURCES):
            continue
        total += size
        if total > TOTAL_LIMIT:
            raise UserError(
                f"the files of the project are larger than {TOTAL_LIMIT >> 20} MiB",
                where=str(folder),
                do="Move data out of the project's folder, or exclude it: mlproject.load(…,"
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
            do="Make it readable, or exclude it: mlproject.load(…, exclude=[…])",
        ) from None
    named = os.fsencode(path)
    return b"%d:%s:%d:%s" % (len(named), named, executable, content)


def _excluded(patterns: Sequence[str]) -> Any:
    if not patterns:
        return NOTHING
    from ..config.exclude import Exclude, read_patterns

    try:
        return Exclude(read_patterns(list(patterns)))
    except ValueError as error:
        what = "; ".join(each["msg"] for each in getattr(error, "errors", list)()) or str(error)
        raise UserError(
            what, where="mlproject.load(…, exclude=…)", do="Correct the pattern"
        ) from None


class _Made:
    """The paths in a project's folder that a rule of the workflow can make.

    They follow from the patterns of all rules, not from the jobs of a run, because jobs depend on
    the requested targets.
    """

    def __init__(self, folder: Path, workflow: Any) -> None:
        self._prefix = os.path.relpath(folder, os.path.realpath(os.curdir))
        rules = getattr(workflow, "rules", ())
        made = (each for rule in rules for each in (*rule.output, *rule.log, rule.benchmark))
        self._patterns: list[Any] = [each for each in made if isinstance(each, str) and each]

    def __contains__(self, path: object) -> bool:
        at = os.path.normpath(os.path.join(self._prefix, str(path)))
        # Snakemake's patterns keep paths as written, so one like ./x or a//b would not match.
        return any(p.match(at) or os.path.normpath(str(p)) == at for p in self._patterns)
