"""Rewrite a job's paths to those at its site: lists of paths, parameters, and any text.

Stored files have plain names already (`plain`). Lists are mapped path by path. Functions of
parameters are called again with the mapped paths, and their result is used if it differs in the
paths only. All other text, above all the command, is searched for whole paths: the job's own, those
below or beside them, and those below the working directory.

With `snakemake --directory results` a workflow's scripts are outside the working directory, and
commands call them as `{workflow.basedir}/scripts/train.py`. Such a file is uploaded with the files
of its directory and the packages that it imports. If a command names a directory, all its small
files are uploaded.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from snakemake.exceptions import RuleException
from snakemake.sourcecache import LocalSourceFile
from snakemake_interface_common.exceptions import WorkflowError

from ...common.errors import UserError
from ...config.model import BackendConfig
from ...engine.request import Upload
from ...jobs.paths import OURS, local_path
from ...storage.paths import find_dataset
from .. import Job
from ..context import select_small_files
from ..kinds.script_file import ScriptFile
from .job_paths import (
    BEFORE,
    JobPaths,
    command_text,
    expand_params,
    is_kept_in_storage,
    make_plain,
    map_texts,
    plain_params,
)
from .workflow_code import is_source_file, upload_source_files

_SYSTEM = ("/bin", "/boot", "/etc", "/lib", "/opt", "/run", "/sbin", "/usr", "/var")
"""Directories that each site has of its own. A text that names other files there means the site's.
"""

_BEHIND = r"(?![\w.~@%+\-])"
_WHOLE = r"(?![\w.~@%+\-/])"
_ONE_BELOW = rf"{_BEHIND}(?!/[^/\s'\"]+/[^\s'\"])"

_LETTER = r"[^\s'\";|&<>()`]"
"""Characters that an unquoted path may contain."""
_NAME = r"[^\s'\";|&<>()`/]"

_CHANGES_DIRECTORY = re.compile(r"(?<![\w./-])(?:cd|pushd)\s")


@dataclass(frozen=True)
class RewrittenPaths:
    """A job's files and parameters with the paths of its site.

    Attributes:
        input, output, log: Snakemake's own lists, with their names, of plain strings.
        params: the same for the parameters.
        text: maps the paths in a text.
    """

    input: Any
    output: Any
    log: Any
    params: Any
    text: Callable[[str], str]

    def value(self, value: Any) -> Any:
        return map_texts(value, self.text)


def rewrite_paths(job: Job, places: JobPaths, resources: Any = None) -> RewrittenPaths:
    """Map a job's files and parameters to the paths of its site.

    If `resources` are given, including those that only the node knows, parameters that depend on
    them are evaluated again. The functions of the result raise `UserError` if the meaning of a path
    in a text is uncertain.
    """
    moved: dict[str, str] = {}
    trees: set[str] = set()

    def mapped(path: Any) -> str:
        text = command_text(path)
        if (dataset := find_dataset(path)) is not None:
            moved[text] = dataset.path
            return dataset.path
        if is_kept_in_storage(path) or is_source_file(path):
            return text
        called = places.at_site(text)
        if called != text:
            moved[text] = called
            if getattr(path, "is_directory", False) or os.path.isdir(text):
                trees.add(text)
        return called

    made, output, log = (
        type(names)(toclone=names, custom_map=mapped) for names in (job.input, job.output, job.log)
    )
    finder = _Finder(job.rule.name, places, moved, trees)
    plain = make_plain(job) or str
    params = plain_params(job, resources)
    if moved or finder.finds(params):
        params = _params(
            params, lambda: expand_params(job, (made, output), resources), finder, moved
        )
    return RewrittenPaths(made, output, log, params, lambda text: finder.text(plain(text)))


def _params(
    params: Any, with_mapped: Callable[[], Any], finder: "_Finder", moved: Mapping[str, str]
) -> Any:
    """Use parameters evaluated with mapped paths where these differ in the paths only.

    In all others, map the paths in their strings.
    """
    again = params
    # Functions that read files do not find them under the mapped names.
    with suppress(WorkflowError, RuleException):
        again = with_mapped()
    # In any context: an entry point of an MLproject puts `../` before paths.
    back = _Pattern(((new, old, _BEHIND) for new, old in _stems(moved)), before="")

    def of_paths(made: Any, value: Any) -> bool:
        # `repr` can compare values of any type, including arrays.
        return repr(made) != repr(value) == repr(map_texts(made, back.replace))

    values = iter(
        made if of_paths(made, value) else map_texts(value, finder.text)
        for value, made in zip_longest(params, again)
    )
    return type(params)(toclone=params, custom_map=lambda _: next(values))


def _stems(moved: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Yield the new and old prefix of each path, without the common end of both."""
    for old, new in moved.items():
        olds, news = old.split("/"), new.split("/")
        while len(olds) > 1 and len(news) > 1 and olds[-1] == news[-1]:
            del olds[-1], news[-1]
        yield "/".join(news), "/".join(olds)


class _Pattern:
    """Replaces texts, the longest first."""

    def __init__(self, replacements: Iterable[tuple[str, str, str]], before: str = BEFORE) -> None:
        """Take triples of the old text, the new text, and the pattern that must follow."""
        self._replacements: dict[str, str] = {}
        alternatives: dict[str, str] = {}
        for old, new, behind in replacements:
            if old and old not in alternatives:
                alternatives[old] = f"{re.escape(old)}{behind}"
                self._replacements[old] = new
        longest = sorted(alternatives, key=len, reverse=True)
        choice = "|".join(alternatives[old] for old in longest)
        self._regex = re.compile(f"{before}(?:{choice})") if choice else None

    def replace(self, text: str) -> str:
        if self._regex is None:
            return text
        return self._regex.sub(lambda match: self._replacements[match[0]], text)

    def found(self, text: str) -> list[str]:
        return self._regex.findall(text) if self._regex is not None else []


@dataclass
class _Finder:
    """Finds the paths of one job in texts."""

    _rule: str
    _places: JobPaths
    _moved: Mapping[str, str]
    _trees: set[str]

    def finds(self, value: Any) -> bool:
        return bool(self._moved) or self._places.workdir in str(value)

    def text(self, text: str) -> str:
        """Map the paths in a text.

        Raises:
            UserError: the meaning of a path in the text is uncertain.
        """
        if not self.finds(text):
            return text
        text = self._plainly(text)
        found = self._pattern.found(text)
        upwards = [path for path in found if path.startswith("..")]
        if upwards and _CHANGES_DIRECTORY.search(text):
            raise UserError(
                f"the command changes its directory and names {upwards[0]}, which has another path"
                " at a site",
                where=f"rule {self._rule}",
                do="Use {input} or {output} instead of the path, or an absolute path",
            )
        return self._pattern.replace(text)

    def _plainly(self, text: str) -> str:
        """Normalize paths such as `WORKDIR/../x` in a text, unless links change their meaning.

        With `--snakefile ../workflow/Snakefile`, `workflow.basedir` is such a path.
        """
        if f"{self._places.workdir}/" not in text or "/.." not in text:
            return text
        within = rf"{BEFORE}{re.escape(self._places.workdir)}(?:/{_LETTER}*)?"
        way = rf"{within}/\.\.(?!{_NAME}){_LETTER}*"

        def plain(match: re.Match[str]) -> str:
            path = os.path.normpath(match[0])
            return path if os.path.realpath(path) == os.path.realpath(match[0]) else match[0]

        return re.sub(way, plain, text)

    @cached_property
    def _pattern(self) -> _Pattern:
        return _Pattern(self._replacements())

    def _replacements(self) -> Iterable[tuple[str, str, str]]:
        places = self._places
        # The workspace may be below the working directory, as that of a sandbox.
        yield places.workspace, places.workspace, _BEHIND
        if places.workdir != "/":
            yield places.workdir, places.workspace, _BEHIND
        folders: dict[tuple[str, str], str] = {}
        for old, new in self._moved.items():
            folder, name = os.path.split(old)
            beside = folder, os.path.dirname(new)
            if beside not in folders:
                folders[beside] = self._reach(folder) if os.path.basename(new) == name else ""
            # Files need no pattern of their own if their whole directory is replaced.
            if folders[beside] != _BEHIND:
                yield old, new, _BEHIND if old in self._trees else _WHOLE
        yield from ((*beside, behind) for beside, behind in folders.items() if behind)

    def _reach(self, folder: str) -> str:
        """Return the pattern that must follow a moved file's directory in paths to map, or ''."""
        shared = folder in ("", "/", "/tmp") or not set(folder) - set("./")  # noqa: S108
        if shared or any(f"{folder}/".startswith(f"{root}/") for root in _SYSTEM):
            return ""
        broad = os.path.realpath(folder)
        home = os.path.expanduser("~")
        if any(f"{path}/".startswith(f"{broad}/") for path in (home, self._places.workdir)):
            return _ONE_BELOW
        return _BEHIND


_BELOW = r"(?:/[^\s'\"`$;|&<>()*?\[{]*)?"
"""Pattern of the text behind a Snakefile's directory, up to the end of the word or a glob in it."""


def upload_named_files(
    job: Job, text: str, places: JobPaths, config: BackendConfig
) -> tuple[str, tuple[Upload, ...]]:
    """Rewrite the paths of source files, and of files beside Snakefiles, and return these files.

    Snakefiles in the working directory do not count. In `text`, the command, the job's own paths
    are mapped already. Limits, and for whole directories the Exclude patterns, are those of
    `config`.

    Raises:
        UserError: the files are too large together, or `upload_source_files` raises.
    """
    text, uploads = upload_source_files(job, text, places)

    def taken(match: re.Match[str]) -> str:
        path = os.path.normpath(match[0])
        place = places.place(path)
        if not os.path.exists(path) or place is None or not place.startswith(f"{OURS}/"):
            return match[0]
        for file in _with_surroundings(Path(path), places, config):
            at = places.place(file)
            if at is not None:
                uploads[at] = Upload(at, local=local_path(at, Path(places.workdir)))
        return places.at_site(path) + match[0][len(match[0].rstrip("/")) :]

    for root in _outside_folders(job, places):
        if root in text:
            text = re.sub(f"{BEFORE}{re.escape(root)}{_BEHIND}{_BELOW}", taken, text)
    return text, tuple(uploads.values())


def _outside_folders(job: Job, places: JobPaths) -> list[str]:
    """Return the directories of Snakefiles outside the working directory, the longest first."""
    included = [s for s in job.rule.workflow.included if isinstance(s, LocalSourceFile)]
    folders = {os.path.dirname(os.path.abspath(source.path)) for source in included}
    own = f"{places.workdir.rstrip('/')}/"
    return sorted((f for f in folders if not f"{f}/".startswith(own)), key=len, reverse=True)


def _with_surroundings(path: Path, places: JobPaths, config: BackendConfig) -> list[Path]:
    if path.is_dir():
        return select_small_files(path, Path(places.workdir), config)
    python = path.suffix == ".py"
    text = path.read_text(errors="replace") if python else ""
    script = ScriptFile(path.name, text, "python" if python else None, path.parent, None, None)
    return [path, *(beside for _, beside in script.beside(config))]
