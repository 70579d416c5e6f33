"""Check the arguments that a rule gives to an entry point, and build the command of a job."""

import inspect
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

from snakemake_executor_plugin_mantik.common.errors import (
    ConfigError,
    MantikError,
    Mistake,
    UserError,
)

from .entry import Call, EntryPoint, Parameter, ProjectEnvironment, suggest
from .values import ParameterValue, TemplateWords, parse_value, path_in_folder

_EXTRA: Final = (
    "correct the name, or pass it in the mapping after the entry point's name to append it to the"
    " command"
)


class ProjectLike(Protocol):
    """The project that an entry point belongs to; `project.Project` is one."""

    folder: Path
    name: str
    environment: ProjectEnvironment | None

    @property
    def shown(self) -> str:
        """The project's name in messages."""

    def definition(self, entry: EntryPoint) -> str:
        """Return a hash of the entry point and of the project's sources."""

    def relative_folder(self) -> PurePosixPath:
        """Return the folder, relative to the working directory."""


class BoundEntryPoint:
    """An entry point with a rule's values for its parameters."""

    def __init__(
        self,
        project: ProjectLike,
        entry: EntryPoint,
        arguments: Mapping[str, object],
        extra: Mapping[str, object],
    ) -> None:
        self.project = project
        self.entry = entry
        self._mistakes: list[Mistake] = []
        self._values: dict[str, ParameterValue] = {}
        self._extra: dict[str, ParameterValue] = {}
        undeclared = arguments if entry.script else {}
        for name, given in arguments.items():
            if name in entry.parameters:
                self._take(self._values, name, given)
            elif not entry.script:
                self._notify(name, _undeclared(name, entry))
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
            self._values[parameter.name] = _Default(parameter.default)

    def _check(self, name: str, words: tuple[str, ...]) -> None:
        parameter = self.entry.parameters[name]
        for word in words:
            if complaint := parameter.mistake(word):
                self._notify(name, complaint)

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
                words = self._resolve(name, value, {"wildcards": wildcards})
                self._check(name, words.words)
        self._end()

    def outline(self, wildcards: Any) -> dict[str, str]:
        """Return the values as far as the wildcards determine them.

        They change when an argument changes; but of a function that takes more than wildcards, only
        the names of the parameters appear.

        Raises:
            ConfigError: some values are wrong.
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
        return f"cd {_quoted_folder(folder)} || exit 1\n{command}"

    def call(self, wildcards: Any, **things: Any) -> Call:
        words = self._all(wildcards, things)
        self._end()
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
        value = self._values[parameter.name]
        if parameter.type != "path" or words.paths or isinstance(value, _Default):
            return words.words
        found = []
        for word in words.words:
            known = {
                os.path.normpath(str(path))
                for name in ("input", "output")
                for path in things.get(name, ())
            }
            path = word.removeprefix("file://")
            if not os.path.isabs(path) and not _is_there(path, known):
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
            mistakes = dict.fromkeys(self._mistakes)
            raise ConfigError(list(mistakes))


class _Default(ParameterValue):
    """The default of a parameter; a path in it is relative to the project's folder."""

    needs = frozenset()

    def __init__(self, text: str) -> None:
        self._text = text

    def resolve(self, things: Mapping[str, Any], relative: Callable[[str], str]) -> TemplateWords:
        del things, relative
        return TemplateWords((self._text,), self._text)

    def outline(self, wildcards: Any) -> str:
        del wildcards
        return self._text


def _is_there(path: str, known: set[str]) -> bool:
    parts = PurePosixPath(os.path.normpath(path))
    return (
        os.path.exists(path) or str(parts) in known or any(str(p) in known for p in parts.parents)
    )


def _undeclared(name: str, entry: EntryPoint) -> str:
    if not entry.parameters:
        return f"is not a parameter of {entry.name}, which has none: {_EXTRA}"
    return f"is not a parameter of {entry.name}{suggest(name, entry.parameters)}: {_EXTRA}"


def _quoted_folder(folder: str) -> str:
    return shlex.quote(f"./{folder}" if folder.startswith("-") else folder)


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
