"""Load projects in a Snakefile, and turn their entry points into parameters of rules."""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import ConfigError, MantikError, Mistake

from .bound_entry_point import BoundEntryPoint, ParamsFunction
from .entry import PARAMETER, SCRIPTS, EntryPoint, script_entry, suggest, unsendable_characters
from .reading import ProjectFile, read_project

RULE: Final = str(Path(__file__).with_name("rule.smk"))
"""The bundled rule `mlproject`, for `module … : snakefile: mlproject.RULE`."""


def load(
    path: str | os.PathLike[str], *, exclude: tuple[str, ...] | list[str] = (), warn: bool = True
) -> "Project":
    """Read a project and check its MLproject file.

    Args:
        path: the project's folder, or its MLproject file; relative to the file of the caller, which
            is the Snakefile.
        exclude: patterns as in `.gitignore`, relative to the project's folder, of files that are
            not its sources: jobs need not run again when they change.
        warn: whether to warn about likely mistakes in the MLproject file.

    Raises:
        ConfigError: with all mistakes of the MLproject file; or the folder cannot be read.
    """
    caller = sys._getframe(1)
    shown = os.fspath(path)
    base = os.path.dirname(caller.f_code.co_filename)
    if not os.path.isabs(base):
        base = os.getcwd()  # the caller has no file: an interactive prompt
    folder = Path(base, shown)
    if _is_file(folder):
        folder, shown = folder.parent, os.path.dirname(shown) or "."
    try:
        found = read_project(folder, shown, _warn if warn else None)
    except MantikError as error:
        raise error.with_traceback(None) from None  # our own lines would not help
    return Project(folder, found, shown, exclude, caller.f_globals.get("workflow"))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long or holds a NUL character
        return False


def _warn(text: str) -> None:
    logging = sys.modules.get("snakemake.logging")
    if logging is not None:
        logging.logger.warning(text)
    else:
        print(text, file=sys.stderr)  # noqa: T201


class Project:
    """A project folder, with the entry points of its MLproject file.

    Attributes:
        folder: absolute path, links resolved.
        name: name in the MLproject file, else the folder's name.
        entry_points: entry points of the MLproject file by name, without the folder's scripts.
        environment: the environment that the MLproject file asks for; None if there is none.
    """

    def __init__(
        self,
        folder: Path,
        file: ProjectFile,
        shown: str,
        exclude: tuple[str, ...] | list[str] = (),
        workflow: Any = None,
    ) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.name = file.name or self.folder.name
        self.entry_points = file.entry_points
        self.environment = file.environment
        self._file = file
        self._shown = str(os.path.join(shown, file.path.name)) if file.path else shown
        self._exclude = tuple(exclude)
        self._workflow = workflow
        self._definitions: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Project({str(self.folder)!r})"

    def entry_point(
        self, name: str = "main", extra: Mapping[str, object] | None = None, /, **arguments: object
    ) -> dict[str, Any]:
        """Return the parameters of a rule that runs an entry point.

        Use it as `params: **project.entry_point(…)`.

        Args:
            name: an entry point of the MLproject file, or a script of the project.
            extra: parameters that the entry point does not declare: they are appended to its
                command as `--name value`.
            arguments: values of its parameters: texts with the placeholders of a shell command
                (`{input.data}`, `{output[0]}`, `{wildcards.alpha}`, `{threads}`,
                `{resources.mem_mb}`; `{{` for a brace), numbers, or functions as in `params:`.

        Raises:
            ConfigError: with every parameter that is unknown, missing or wrong, as far as this is
                known before there is a job.
        """
        try:
            entry = self.entry(name)
            given = BoundEntryPoint(self, entry, arguments, extra or {})
        except MantikError as error:
            raise error.with_traceback(None) from None  # our own lines would not help
        plain = ("wildcards",)
        return {
            "command": ParamsFunction(given.command, given.asks, given),
            "entry_point": ParamsFunction(lambda wildcards: entry.name, plain),  # noqa: ARG005
            "definition": ParamsFunction(
                lambda wildcards: self.definition(entry),  # noqa: ARG005
                plain,
            ),
            "arguments": ParamsFunction(given.outline, plain),
            "project": ParamsFunction(lambda wildcards: str(self.relative_folder()), plain),  # noqa: ARG005
            PARAMETER: ParamsFunction(given.call, given.asks),
        }

    def entry(self, name: str) -> EntryPoint:
        """Return an entry point of the MLproject file, or the one for a script.

        Raises:
            ConfigError: `name` is neither.
        """
        if name in self.entry_points:
            return self.entry_points[name]
        if name in self._file.broken:
            raise ConfigError(list(self._file.broken[name]), do="Correct the MLproject file")
        script = script_entry(name)
        if script is None:
            known = suggest(name, self.entry_points)
            suffixes = ", ".join(SCRIPTS)
            message = f"there is no entry point {name!r}{known}, and it is no script ({suffixes})"
            if self._file.path is None:
                message = f"there is no MLproject file, and {name!r} is no script ({suffixes})"
            raise ConfigError([Mistake(self._shown, "", message)])
        if unsendable_characters(name) or not (self.folder / name).is_file():
            hint = suggest(name, self.entry_points)
            message = f"there is no script {name!r} in the project{hint}"
            raise ConfigError([Mistake(self._shown, "", message)])
        return script

    def definition(self, entry: EntryPoint) -> str:
        """Return a hash of an entry point and of the project's sources, cached in this object.

        Raises:
            UserError: the sources cannot be read or are too large, or `exclude` is wrong.
        """
        if entry.name not in self._definitions:
            from .project_sources import project_digest

            parts = [
                entry.name, entry.command,
                [(p.name, p.type, p.default) for p in entry.parameters.values()],
                project_digest(self.folder, self._file.path, self._exclude, self._workflow),
            ]  # fmt: skip
            text = json.dumps(parts, ensure_ascii=True)
            self._definitions[entry.name] = hashlib.sha256(text.encode()).hexdigest()
        return self._definitions[entry.name]

    def relative_folder(self) -> PurePosixPath:
        """Return the folder, relative to the workflow's working directory."""
        return PurePosixPath(os.path.relpath(self.folder, os.path.realpath(os.curdir)))

    @property
    def shown(self) -> str:
        """The project's name in messages: its MLproject file or folder, as `load` got it."""
        return self._shown


def find_bound_entry_point(params: Any) -> BoundEntryPoint | None:
    """Return the entry point in a rule's unevaluated parameters (`rule.params`); None for none."""
    given = getattr(getattr(params, "command", None), "given", None)
    return given if isinstance(given, BoundEntryPoint) else None


def folder_mistake(folder: PurePosixPath) -> str:
    """Return why a project's folder is not uploaded to sites; empty if it is.

    `folder` is relative to the working directory. The message is to follow "rule NAME".
    """
    if folder.parts[:1] == ("..",):
        return (
            f"runs an entry point of the project {folder}, which is outside the working"
            " directory, so it is not uploaded"
        )
    if any(part.startswith(".") for part in folder.parts):
        return (
            f"runs an entry point of the project {folder}, whose folder is hidden: hidden files are"
            " not uploaded"
        )
    return ""
