"""Read MLproject files as MLflow does, and report every mistake with its line and key.

MLflow reads them with PyYAML, whose YAML 1.1 has rules of its own (`yes` is True, 010 is 8, `<<`
merges). So this module uses PyYAML, too, and not the stricter `config.reading`. It accepts what
MLflow accepts and can run, and warns about likely mistakes.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from ..common.errors import ConfigError, Mistake
from .entry import (
    TYPES,
    EntryPoint,
    EnvironmentKey,
    Parameter,
    ProjectEnvironment,
    command_mistakes,
    suggest,
)

_FILE_NAME: Final = "MLproject"
_ENVIRONMENTS: Final[tuple[EnvironmentKey, ...]] = ("python_env", "conda_env", "docker_env")
MAX_BYTES: Final = 256 << 10
"""A larger file is refused."""
_MAX_VALUES: Final = 100_000
"""A file with more values is refused; an alias counts as many values as it stands for."""

_KEYS: Final = ("name", "entry_points", *_ENVIRONMENTS, "databricks_spark_job")
_KNOWN_TYPES: Final = (*TYPES, "str", "integer", "long", "double", "bool", "boolean")
_READ_ERRORS: Final = (ValueError, OverflowError, LookupError, TypeError, AttributeError)
"""Errors of PyYAML's own code for a date like 2026-99-99 or an escape beyond Unicode."""


@dataclass(frozen=True)
class ProjectFile:
    """The content of an MLproject file.

    Attributes:
        path: the file; None if the folder has none, so that only its scripts can run.
        name: the project's name; empty if not given.
        entry_points: by name, in the file's order.
        environment: the environment; None if the file names none.
        broken: mistakes of entry points that cannot be run, by name.
    """

    path: Path | None = None
    name: str = ""
    entry_points: Mapping[str, EntryPoint] = field(default_factory=dict)
    environment: ProjectEnvironment | None = None
    broken: Mapping[str, tuple[Mistake, ...]] = field(default_factory=dict)


def read_project(
    folder: Path, shown: str | None = None, warn: Callable[[str], object] = str
) -> ProjectFile:
    """Read the MLproject file of a folder.

    Args:
        folder: the project's folder.
        shown: name of the folder in messages; by default `folder`.
        warn: receives each likely mistake, with file, key and line, even if the file has others.

    Raises:
        ConfigError: with all mistakes of the file; or the folder or file cannot be read. Mistakes
            of one entry point are only warnings if another one has none, as MLflow ignores them.
    """
    called = shown if shown is not None else str(folder)
    try:
        names = sorted(
            (name for name in os.listdir(folder) if name.lower() == _FILE_NAME.lower()),
            key=lambda name: (name != _FILE_NAME, name),
        )
        path = next((folder / name for name in names if (folder / name).is_file()), None)
        if path is None:
            return ProjectFile()
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError([Mistake(called, "", "there is no such folder")]) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError([Mistake(called, "", f"cannot be read: {reason}")]) from None
    file = os.path.join(called, path.name)
    reader = _Reader(file, folder)
    try:
        found = reader.read(content)
    except RecursionError:
        raise ConfigError([Mistake(file, "", "is nested too deep")]) from None
    for warning in dict.fromkeys(reader.warnings):
        warn(warning)
    of_entries = [mistake for mistakes in reader.broken.values() for mistake in mistakes]
    if reader.mistakes or (of_entries and not found[1]):
        raise ConfigError([*reader.mistakes, *of_entries], do="Correct the MLproject file")
    for mistake in of_entries:
        warn(f"{mistake}; this entry point cannot be run")
    return ProjectFile(path, *found, reader.broken)


class _Reader:
    """Read one document and collect its mistakes."""

    def __init__(self, file: str, folder: Path) -> None:
        self._file = file
        self._folder = folder
        self.mistakes: list[Mistake] = []
        self.broken: dict[str, tuple[Mistake, ...]] = {}
        self.warnings: list[str] = []
        self._constructor = yaml.SafeLoader("")

    def read(self, content: bytes) -> tuple[str, dict[str, EntryPoint], ProjectEnvironment | None]:
        try:
            root = _document(content)
        except ValueError as error:
            raise ConfigError([Mistake(self._file, "", str(error))]) from None
        entries = self._mapping(root, "")
        self._warn_of_unknown(entries, "", _KEYS)
        name = self._value(entries["name"], "name") if "name" in entries else None
        points: dict[str, EntryPoint] = {}
        if "entry_points" in entries:
            for key, node in self._mapping(entries["entry_points"], "entry_points").items():
                before = len(self.mistakes)
                point = self._entry_point(key, node)
                if len(self.mistakes) > before:
                    self.broken[key] = tuple(self.mistakes[before:])
                    del self.mistakes[before:]
                elif point is not None:
                    points[key] = point
        environment = self._environment(entries)
        if "databricks_spark_job" in entries:
            node = entries["databricks_spark_job"]
            self._warn(node, "databricks_spark_job", "is ignored: it is only for Databricks")
        return "" if name is None else str(name), points, environment

    def _entry_point(self, name: str, node: Any) -> EntryPoint | None:
        key = f"entry_points.{name}"
        entries = self._mapping(node, key)
        if not isinstance(node, yaml.MappingNode):
            return None
        self._warn_of_unknown(entries, f"{key}.", ("command", "parameters"))
        declared = entries.get("parameters")
        parameters = {} if declared is None else self._parameters(declared, f"{key}.parameters")
        if "command" not in entries:
            self._notify(node, key, "has no command")
            return None
        command = self._value(entries["command"], f"{key}.command")
        if not isinstance(command, str):
            self._unfit(entries["command"], f"{key}.command", "a text", command)
            return None
        for complaint in command_mistakes(command, parameters):
            self._notify(entries["command"], f"{key}.command", complaint)
        return EntryPoint(name, command, parameters)

    def _parameters(self, node: Any, key: str) -> dict[str, Parameter]:
        found: dict[str, Parameter] = {}
        for name, each in self._mapping(node, key).items():
            where = f"{key}.{name}"
            kind: Any = "string"
            default: Any = None
            if isinstance(each, yaml.MappingNode):
                entries = self._mapping(each, where)
                self._warn_of_unknown(entries, f"{where}.", ("type", "default"))
                if "type" in entries:
                    kind = self._value(entries["type"], f"{where}.type")
                if "default" in entries:
                    default = self._value(entries["default"], f"{where}.default")
            else:
                kind = self._value(each, where)
                if not isinstance(kind, str):
                    wanted = "the name of a type, or a mapping with type and default"
                    self._unfit(each, where, wanted, kind)
                    continue
            if kind not in _KNOWN_TYPES:
                hint = suggest(str(kind), TYPES)
                self._warn(each, where, f"has the type {kind!r}, which is not checked{hint}")
            # Whether its default fits is checked where it is used: rules may pass another value.
            found[name] = Parameter(name, str(kind), None if default is None else str(default))
        return found

    def _environment(self, entries: Mapping[str, Any]) -> ProjectEnvironment | None:
        given = [name for name in _ENVIRONMENTS if name in entries]
        if len(given) > 1:
            message = f"is one of {len(given)} environments ({', '.join(given)}): keep one"
            self._notify(entries[given[1]], given[1], message)
        found = None
        for name in given:
            value = self._value(entries[name], name)
            if not value:
                continue
            if name == "docker_env":
                found = self._docker(entries[name], value)
            elif not isinstance(value, str):
                self._unfit(entries[name], name, "the path of a file", value)
            elif not os.path.exists(os.path.join(self._folder, value)):
                self._notify(entries[name], name, f"there is no file {value!r} in the project")
            else:
                found = ProjectEnvironment(name, value)
        return found

    def _docker(self, node: Any, value: Any) -> ProjectEnvironment | None:
        if not isinstance(value, dict):
            self._unfit(node, "docker_env", "a mapping with image", value)
            return None
        if not value.get("image"):
            self._notify(node, "docker_env", "has no image")
        if (volumes := value.get("volumes")) and not _list_of(volumes, str):
            self._unfit(node, "docker_env.volumes", "a list of texts", volumes)
        if (names := value.get("environment")) and not _list_of(names, str, list):
            allowed = "a list of names and of pairs [name, value]"
            self._unfit(node, "docker_env.environment", allowed, names)
        if not isinstance(image := value.get("image"), str):
            return None
        more = tuple(key for key in ("volumes", "environment") if value.get(key))
        return ProjectEnvironment("docker_env", image, more)

    def _mapping(self, node: Any, key: str) -> dict[str, Any]:
        """Return the nodes of a mapping by key, with PyYAML's rules for `<<` and duplicates."""
        if not isinstance(node, yaml.MappingNode):
            value = self._value(node, key)
            hint = "; leave the key out" if value is None and key else ""
            self._unfit(node, key, "a mapping", value, hint)
            return {}
        written = [each.value for each, _ in node.value if isinstance(each, yaml.ScalarNode)]
        for twice in sorted({each for each in written if each != "<<" and written.count(each) > 1}):
            self._warn(node, f"{key}.{twice}".strip("."), "is given twice; the last one counts")
        try:
            self._constructor.flatten_mapping(node)
        except (yaml.YAMLError, *_READ_ERRORS) as error:
            self._notify(node, key, _reason(error))
            return {}
        return {str(self._value(each, key)): value for each, value in node.value}

    def _value(self, node: Any, key: str) -> Any:
        try:
            return self._constructor.construct_object(node, deep=True)
        except (yaml.YAMLError, *_READ_ERRORS) as error:
            # The old constructor would refuse the remaining nodes as recursive.
            self._constructor = yaml.SafeLoader("")
            self._notify(node, key, _reason(error))
            return None

    def _unfit(self, node: Any, key: str, allowed: str, found: object, hint: str = "") -> None:
        self._notify(node, key, f"has to be {allowed}, found {_describe(found)}{hint}")

    def _notify(self, node: Any, key: str, message: str) -> None:
        place = f" (line {node.start_mark.line + 1})" if node is not None else ""
        mistake = Mistake(self._file, key, " ".join(message.split()) + place)
        if mistake not in self.mistakes:
            self.mistakes.append(mistake)

    def _warn(self, node: Any, key: str, message: str) -> None:
        self.warnings.append(f"{self._file}: {key}: {message} (line {node.start_mark.line + 1})")

    def _warn_of_unknown(self, entries: Mapping[str, Any], at: str, known: Sequence[str]) -> None:
        for key in entries.keys() - {*known}:
            hint = suggest(key, known)
            self._warn(entries[key], f"{at}{key}", f"is unknown to MLflow{hint}")


def _document(content: bytes) -> yaml.Node:
    """Return the document, or raise ValueError with the reason that it cannot be read at all."""
    if len(content) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES >> 10} KiB")
    try:
        root = yaml.compose(content.decode(), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start + 1})") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = " ".join(str(error.problem or error.context or "syntax error").split())
        raise ValueError(f"is not well-formed YAML: {problem}{place}") from None
    except (yaml.YAMLError, *_READ_ERRORS) as error:
        problem = " ".join(str(error).split())[:200]
        raise ValueError(f"is not well-formed YAML: {problem}") from None
    if root is None:
        raise ValueError("is empty; it has to hold a mapping with entry_points")
    if _size(root) > _MAX_VALUES:
        raise ValueError(f"holds more than {_MAX_VALUES} values")
    return root


def _reason(error: Exception) -> str:
    problem = getattr(error, "problem", None) or error
    return f"cannot be read ({' '.join(str(problem).split())[:200]})"


def _list_of(value: object, *kinds: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kinds) for item in value)


def _describe(value: object) -> str:
    if isinstance(value, str):
        return f"the text {value[:60]!r}"
    kinds = {type(None): "nothing", dict: "a mapping"} | dict.fromkeys((list, tuple, set), "a list")
    return kinds.get(type(value), f"{str(value)[:60]!r}")


def _size(root: Any) -> int:
    """Count the values, with each alias expanded."""
    known: dict[int, int] = {}

    def size(node: Any) -> int:
        if isinstance(node, tuple):  # a key and its value
            return size(node[0]) + size(node[1])
        if id(node) not in known:
            known[id(node)] = _MAX_VALUES + 1  # a node that contains itself is infinite
            children = node.value if isinstance(node, yaml.CollectionNode) else ()
            known[id(node)] = 1 + sum(map(size, children))
        return known[id(node)]

    return size(root)
