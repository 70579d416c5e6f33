"""Load projects in a Snakefile, and turn their entry points into parameters of rules.

A rule's job runs again when the project's sources change: the files in its folder that an entry
point depends on. They are chosen like the files of the working directory to upload
(`staging.project_files`), but without the products of the workflow's rules: an output in the
project's folder is no reason to make it again. The MLproject file counts through the entry point
itself, a Snakefile through Snakemake's own check of its rules.
"""

import fnmatch
import hashlib
import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ..common.errors import ConfigError, MantikError, Mistake, UserError
from ..jobs.paths import at_or_above
from ..jobs.quoting import path_argument
from .entry import (
    PARAMETER,
    SCRIPTS,
    Call,
    EntryPoint,
    Parameter,
    escape_braces,
    script_entry,
    suggest,
    unsendable_characters,
)
from .reading import ProjectFile, read_project
from .values import ParameterValue, TemplateWords, parse_value, path_in_folder

_UNDECLARED: Final = (
    "is not a parameter of {}{}: correct the name, or pass it in the mapping after the entry"
    " point's name to append it to the command"
)

_FILE_LIMIT: Final = 16 << 20
"""A larger file is data, not a source: name it as an input of the rules that read it."""

TOTAL_LIMIT: Final = 512 << 20
"""Maximum bytes of all sources of a project, which are read whenever a workflow starts."""

_NO_SOURCES: Final = ("Snakefile", "*.smk", "*.pyc", "mlflow.db", "*.mantik-part*")
"""Files of Snakemake, Python, MLflow and this executor."""


class BoundEntryPoint:
    """An entry point with a rule's values for its parameters."""

    def __init__(
        self,
        project: "Project",
        entry: EntryPoint,
        arguments: Mapping[str, object],
        extra: Mapping[str, object],
    ) -> None:
        self.project = project
        self.entry = entry
        self._mistakes: list[Mistake] = []
        self._values: dict[str, ParameterValue] = {}
        self._extra: dict[str, ParameterValue] = {}
        self._defaults: set[str] = set()  # paths in them are relative to the project's folder
        undeclared = arguments if entry.script else {}
        for name, given in arguments.items():
            if name in entry.parameters:
                self._take(self._values, name, given)
            elif not entry.script:
                hint = suggest(name, entry.parameters) or ", which has none"
                self._notify(name, _UNDECLARED.format(entry.name, hint))
        for name, given in {**undeclared, **extra}.items():
            if name in entry.parameters:
                self._notify(name, "is a parameter of the entry point: pass it as one")
            else:
                self._take(self._extra, str(name), given)
        for parameter in entry.parameters.values():
            if parameter.name not in arguments:
                self._take_default(parameter)
        for name, value in self._values.items():
            if not value.needs:
                self._check(name, value.resolve({}, str).words)
        if self._mistakes:
            raise ConfigError(self._mistakes)
        needs = {need for v in (*self._values.values(), *self._extra.values()) for need in v.needs}
        optional = [need for need in ("threads", "resources") if need in needs]
        # Snakemake passes what a function's signature names, and evaluates resources only then.
        self.asks = ("wildcards", "input", "output", *optional)

    def _take(self, values: dict[str, ParameterValue], name: str, given: object) -> None:
        try:
            values[name] = parse_value(given)
        except ValueError as error:
            self._notify(name, str(error))

    def _take_default(self, parameter: Parameter) -> None:
        if parameter.default is None:
            self._notify(parameter.name, "has no value and no default: pass a value")
        else:
            self._take(self._values, parameter.name, escape_braces(parameter.default))
            self._defaults.add(parameter.name)

    def _check(self, name: str, words: tuple[str, ...]) -> None:
        parameter = self.entry.parameters[name]
        hint = ", its default: pass a value" if name in self._defaults else ""
        for word in words:
            if complaint := parameter.mistake(word):
                self._notify(name, f"{complaint}{hint}")

    def _notify(self, name: str, message: str) -> None:
        self._mistakes.append(Mistake(self.project.shown, f"{self.entry.name}.{name}", message))

    def check(self, wildcards: Any) -> None:
        """Check the values that depend only on wildcards.

        Raises:
            ConfigError: with all mistakes in them.
        """
        self._mistakes = []
        for name, value in self._values.items():
            if value.needs <= {"wildcards"}:
                self._check(name, self._resolve(name, value, {"wildcards": wildcards}).words)
        self._end()

    def outline(self, wildcards: Any) -> dict[str, str]:
        """Return the values as far as the wildcards determine them.

        They change when an argument changes; but of a function that takes more than wildcards, only
        the names of the parameters appear.
        """
        self.check(wildcards)
        values = {**self._values, **self._extra}
        return {name: values[name].outline(wildcards) for name in sorted(values)}

    def command(self, wildcards: Any, **things: Any) -> str:
        """Return the shell command of a job.

        Raises:
            ConfigError: a value is wrong.
            UserError: the values do not fit the command's placeholders.
        """
        words = self._all(wildcards, things)
        extra = {name: words[name].words for name in self._extra}
        values = {
            name: self._in_folder(self.entry.parameters[name], words[name], things)
            for name in self._values
        }
        self._end()
        folder = str(self.project.relative_folder())
        try:
            command = self.entry.shell_command(values, extra)
        except ValueError as error:
            where = f"{self.project.shown}: {self.entry.name}"
            raise UserError(str(error), where=where, do="Correct the MLproject file") from None
        if folder == ".":
            return command
        return f"cd {shlex.quote(path_argument(folder))} || exit 1\n{command}"

    def call(self, wildcards: Any, **things: Any) -> Call:
        words = self._all(wildcards, things)
        return Call(
            project=self.project.relative_folder(),
            name=self.project.name,
            entry_point=self.entry.name,
            definition=self.project.definition(self.entry),
            arguments={name: found.raw for name, found in words.items()},
        )

    def _all(self, wildcards: Any, things: Mapping[str, Any]) -> dict[str, TemplateWords]:
        self._mistakes = []
        known = {"wildcards": wildcards, **things}
        values = {**self._values, **self._extra}
        words = {name: self._resolve(name, value, known) for name, value in values.items()}
        for name in self._values:
            self._check(name, words[name].words)
        self._end()
        return words

    def _resolve(
        self, name: str, value: ParameterValue, things: Mapping[str, Any]
    ) -> TemplateWords:
        folder = str(self.project.folder)
        try:
            return value.resolve(things, lambda path: path_in_folder(folder, path))
        except ValueError as error:
            self._notify(name, str(error))
            return TemplateWords(("",), "")

    def _in_folder(
        self, parameter: Parameter, words: TemplateWords, things: Mapping[str, Any]
    ) -> tuple[str, ...]:
        """Return the words for a process in the project's folder."""
        if parameter.type != "path" or words.paths or parameter.name in self._defaults:
            return words.words
        found = []
        named = [*things.get("input", ()), *things.get("output", ())]
        known = {os.path.normpath(str(path)) for path in named}
        for word in words.words:
            path = word.removeprefix("file://")
            there = os.path.exists(path) or known & {*at_or_above(os.path.normpath(path))}
            if not os.path.isabs(path) and not there:
                self._notify(
                    parameter.name,
                    f"there is no file {path!r} in the working directory: correct the path, or"
                    " name it as an input or output of the rule, and write {input.NAME} or"
                    " {output.NAME}",
                )
            found.append(path_in_folder(str(self.project.folder), path))
        return tuple(found)

    def _end(self) -> None:
        if self._mistakes:
            raise ConfigError(list(dict.fromkeys(self._mistakes)))


class ParamsFunction:
    """A function for a rule's `params:` whose signature has the parameters `asks`.

    If a function takes input, output, threads or resources, Snakemake does not run a job again when
    its value changes (`Rule._is_deriving_function`); for other functions it does.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        asks: tuple[str, ...],
        given: BoundEntryPoint | None = None,
    ) -> None:
        self.given = given
        self._function = function
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in asks])

    def __call__(self, wildcards: Any, **things: Any) -> Any:
        try:
            return self._function(wildcards, **things)
        except MantikError as error:
            # Snakemake shows every line of the traceback; those of this package do not help users.
            raise error.with_traceback(None) from None


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
    if os.path.isfile(folder):
        folder, shown = folder.parent, os.path.dirname(shown) or "."
    try:
        found = read_project(folder, shown, _warn if warn else str)
    except MantikError as error:
        raise error.with_traceback(None) from None  # our own lines would not help
    return Project(folder, found, shown, exclude, caller.f_globals.get("workflow"))


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
        shown: its name in messages: its MLproject file or folder, as `load` got it.
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
        self.shown = str(os.path.join(shown, file.path.name)) if file.path else shown
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
            "definition": ParamsFunction(lambda wildcards: self.definition(entry), plain),  # noqa: ARG005
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
            raise ConfigError([Mistake(self.shown, "", message)])
        if unsendable_characters(name) or not (self.folder / name).is_file():
            hint = suggest(name, self.entry_points)
            message = f"there is no script {name!r} in the project{hint}"
            raise ConfigError([Mistake(self.shown, "", message)])
        return script

    def definition(self, entry: EntryPoint) -> str:
        """Return a hash of an entry point and of the project's sources, cached in this object.

        Raises:
            UserError: the sources cannot be read or are too large, or `exclude` is wrong.
        """
        if entry.name not in self._definitions:
            parts = [
                entry.name, entry.command,
                [(p.name, p.type, p.default) for p in entry.parameters.values()],
                project_digest(self.folder, self._file.path, self._exclude, self._workflow),
            ]  # fmt: skip
            text = json.dumps(parts, ensure_ascii=True)
            self._definitions[entry.name] = hashlib.sha256(text.encode()).hexdigest()
        return self._definitions[entry.name]

    def relative_folder(self) -> PurePosixPath:
        return PurePosixPath(os.path.relpath(self.folder, os.path.realpath(os.curdir)))


def find_bound_entry_point(params: Any) -> BoundEntryPoint | None:
    """Return the entry point in a rule's unevaluated parameters (`rule.params`); None for none."""
    given = getattr(getattr(params, "command", None), "given", None)
    return given if isinstance(given, BoundEntryPoint) else None


def folder_mistake(folder: PurePosixPath) -> str:
    """Return why a project's folder is not uploaded to sites; empty if it is.

    `folder` is relative to the working directory. The message is to follow "rule NAME".
    """
    if not any(part.startswith(".") for part in folder.parts):
        return ""
    why = "whose folder is hidden: hidden files are not uploaded"
    if folder.parts[0] == "..":
        why = "which is outside the working directory, so it is not uploaded"
    return f"runs an entry point of the project {folder}, {why}"


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
    # Imported here because loading a project does not need them.
    from ..staging.project_files import list_candidates
    from ..staging.secret_files import EVERYTHING

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
        gathered.update(_digest_source(folder, path))
    return gathered.hexdigest()


def _digest_source(folder: Path, path: str) -> bytes:
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
    from ..staging.secret_files import NOTHING

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
