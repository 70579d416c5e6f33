"""Values that a Snakefile gives to an entry point's parameters.

A text may hold placeholders, as in a shell command of Snakemake: `{wildcards.alpha}`,
`{input.data}`, `{output[0]}`, `{threads}`, `{resources.mem_mb}`. `{{` and `}}` are braces. A
function takes the wildcards and, by name, input, output, threads and resources; the value that it
returns is used unchanged.
"""

import inspect
import os
import re
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from ..common.humanize import humanize_count
from .entry import escape_braces, suggest, unsendable_characters

_ROOTS: Final = ("wildcards", "input", "output", "threads", "resources")
"""Allowed names in placeholders: what Snakemake passes to a function in `params:`."""

_FILES: Final = ("input", "output")
_NAMED: Final = re.compile(r"[.\[]")


@dataclass(frozen=True)
class TemplateWords:
    """A resolved value.

    Attributes:
        words: words for the process: one, or one for each file of `{input.many}`.
        raw: the value for records, with paths as the rule or the MLproject file gives them.
        paths: whether the words name files of the job, already relative to the project's folder.
    """

    words: tuple[str, ...]
    raw: str
    paths: bool = False


def parse_value(given: object) -> "ParameterValue":
    """Parse a value from a Snakefile.

    Raises:
        ValueError: it is not a text, number, bool, path or function; a text has wrong placeholders;
            a function has wrong parameters; or it cannot be a process's argument.
    """
    if isinstance(given, str):
        return _Template(given)
    if callable(given):
        return _Function(given)
    return _Template(escape_braces(_text(given)))


def _text(given: object) -> str:
    """Convert a plain value to text, as MLflow does."""
    if isinstance(given, (str, int, float, Path)):
        text = str(given)
        if complaint := unsendable_characters(text):
            raise ValueError(complaint)
        return text
    found = type(given).__name__
    hint = ": join its items into a text" if isinstance(given, (list, tuple)) else ""
    raise ValueError(f"has to be a text, a number, a bool or a function, found {found}{hint}")


class _Function:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        try:
            names = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            raise ValueError("is a function whose parameters cannot be determined") from None
        unknown = [name for name in names[1:] if name not in _ROOTS[1:]]
        if not names or unknown:
            allowed = ", ".join(_ROOTS[1:])
            raise ValueError(
                f"is a function: it has to take wildcards first, then any of {allowed}"
            )
        self._asks = names[1:]
        self.needs = frozenset(("wildcards", *names[1:]))

    def resolve(
        self,
        things: Mapping[str, Any],
        relative: Callable[[str], str],  # noqa: ARG002
    ) -> TemplateWords:
        named = {name: things[name] for name in self._asks}
        text = _text(self._function(things["wildcards"], **named))
        return TemplateWords((text,), text)

    def outline(self, wildcards: Any) -> str:
        if self._asks:
            return f"<function of {', '.join(self._asks)}>"
        return _text(self._function(wildcards))


@dataclass(frozen=True)
class _Field:
    text: str
    spec: str

    @property
    def root(self) -> str:
        return _NAMED.split(self.text, maxsplit=1)[0]


class _Template:
    """A text with placeholders.

    Attributes:
        needs: which of `_ROOTS` it depends on.
    """

    def __init__(self, text: str) -> None:
        if complaint := unsendable_characters(text):
            raise ValueError(complaint)
        try:
            self._parts = list(_parts(text))
        except ValueError as error:
            raise ValueError(
                f"cannot be read, {text!r} ({error}): write {{{{ and }}}} for braces"
            ) from None
        self.needs = frozenset(part.root for part in self._parts if isinstance(part, _Field))

    def resolve(self, things: Mapping[str, Any], relative: Callable[[str], str]) -> TemplateWords:
        """Return the value for a job.

        Args:
            things: the job's wildcards, input etc. by the names in `_ROOTS`, at least those in
                `needs`.
            relative: converts a file's path to one relative to the project's folder.

        Raises:
            ValueError: the value cannot be resolved.
        """
        if len(self._parts) == 1 and isinstance(part := self._parts[0], _Field):
            found = _look_up(part, things)
            if part.root in _FILES:
                files = tuple(_files(found))
                return TemplateWords(tuple(map(relative, files)), " ".join(files), paths=True)
            return _checked(_formatted(found, part))
        shown, raw = "", ""
        for part in self._parts:
            if isinstance(part, str):
                text, path = part, part
            else:
                text, path = _in_text(part, _look_up(part, things), relative)
            shown, raw = shown + path, raw + text
        return _checked(raw, shown, paths=bool(self.needs & set(_FILES)))

    def outline(self, wildcards: Any) -> str:
        """Return the value as far as wildcards determine it; it changes if the source does."""
        known = {"wildcards": wildcards}
        return "".join(
            part
            if isinstance(part, str)
            else _formatted(_look_up(part, known), part)
            if part.root == "wildcards"
            else f"{{{part.text}:{part.spec}}}"
            for part in self._parts
        )


ParameterValue: TypeAlias = _Template | _Function


def _parts(text: str) -> Iterator[str | _Field]:
    gathered = ""
    for plain, name, spec, conversion in string.Formatter().parse(text):
        gathered += plain
        if name is None:
            continue
        if gathered:
            yield gathered
            gathered = ""
        part = _Field(name, spec or "")
        if conversion or "{" in part.spec:
            raise ValueError(f"{{{name}}} cannot be converted here")
        if part.root not in _ROOTS:
            raise ValueError(_unknown(part.root))
        if part.text == part.root and part.root in ("wildcards", "resources"):
            raise ValueError(f"{{{part.root}}} has to name one, as in {{{part.root}.NAME}}")
        yield part
    if gathered or not text:
        yield gathered


def _unknown(root: str) -> str:
    if root in ("params", "log", "config"):
        return f"{{{root}…}} is not known here; only {', '.join(_ROOTS)} are"
    likely = suggest(root, _ROOTS) if root else ""
    return f"{{{root}}} is not known here; perhaps {{wildcards.{root or 'NAME'}}}{likely}"


def _look_up(part: _Field, things: Mapping[str, Any]) -> Any:
    try:
        found, _ = string.Formatter().get_field(part.text, (), things)
    except (LookupError, AttributeError, TypeError, ValueError):
        keys: Any = getattr(things.get(part.root), "keys", list)()
        known = [f"{part.root}.{name}" for name in keys if not str(name).startswith("_")]
        raise ValueError(f"the job has no {part.text}{suggest(part.text, known)}") from None
    return found


def _formatted(found: Any, part: _Field) -> str:
    if not isinstance(found, (str, int, float)):
        raise ValueError(f"{{{part.text}}} is not a text or a number")  # noqa: TRY004
    try:
        return format(found, part.spec)
    except ValueError as error:
        raise ValueError(f"{{{part.text}:{part.spec}}} cannot be formatted ({error})") from None


def _files(found: Any) -> list[str]:
    if isinstance(found, (str, Path)):
        return [str(found)]
    if callable(found):
        raise ValueError("names a method of the list, not a file of the job")  # noqa: TRY004
    return [str(each) for each in found]


def _in_text(part: _Field, found: Any, relative: Callable[[str], str]) -> tuple[str, str]:
    """Resolve a placeholder amid other text: as written, and for the project's folder."""
    if part.root not in _FILES:
        text = _formatted(found, part)
        return text, text
    files = _files(found)
    if len(files) != 1:
        raise ValueError(
            f"{{{part.text}}} names {humanize_count(len(files), 'file')}, which cannot stand amid"
            " other text: name one"
        )
    return files[0], relative(files[0])


def _checked(raw: str, word: str | None = None, *, paths: bool = False) -> TemplateWords:
    if complaint := unsendable_characters(raw):
        raise ValueError(complaint)
    return TemplateWords((raw if word is None else word,), raw, paths)


def path_in_folder(folder: str, path: str) -> str:
    """Convert `path` from the working directory to `folder`; absolute paths stay.

    Links in the working directory's path are resolved, so that `..` leads to the right place.
    """
    if os.path.isabs(path):
        return path
    found = os.path.relpath(os.path.join(os.path.realpath(os.curdir), path), folder)
    if path.endswith("/"):
        found += "/"
    return f"./{found}" if found.startswith("-") else found
