"""Entry points of an MLproject: typed parameters, commands, environments, and calls of them."""

import os
import re
import shlex
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import yaml

from ..common.errors import UserError, did_you_mean, find_alike

TYPES: Final = ("string", "float", "int", "path", "uri")
"""The types to suggest; some have synonyms, and MLflow accepts any other name, too."""

_INTEGERS: Final = frozenset({"int", "integer", "long"})
_FLOATS: Final = frozenset({"float", "double"})
_WIDE: Final = re.compile(r"[0-9]{5,}")

SCRIPTS: Final = {
    ".py": "python {}",
    ".sh": "bash {}",
    ".R": "Rscript -e \"mlflow::mlflow_source('{}')\" --args",
}
"""The commands of files that are entry points by themselves, by suffix, as in MLflow."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of an entry point.

    Attributes:
        type: name of its type, `string` if the file gives none.
        default: default value; None if a value is required.
    """

    name: str
    type: str = "string"
    default: str | None = None

    def mistake(self, text: str) -> str:
        """Return the mistake in the value `text`; empty if there is none."""
        if complaint := unsendable_characters(text):
            return complaint
        if self.type in _FLOATS and not _is_number(text, float):
            return f"has to be a number, found {text!r}"
        if self.type in _INTEGERS and not _is_number(text, int):
            return f"has to be a whole number, found {text!r}"
        if self.type == "uri" and not _scheme(text):
            return f"has to be a URI such as s3://bucket/key, found {text!r}"
        if self.type == "path" and _scheme(text) not in ("", "file"):
            return (
                f"is of type path, but {text!r} is not on this machine: make it an input of the"
                " rule (with a storage plugin), or give the parameter the type uri"
            )
        return ""


@dataclass(frozen=True)
class EntryPoint:
    """An entry point of a project.

    Attributes:
        name: its name in the MLproject file, or the path of a script in the project.
        command: a text with placeholders, as for Python's `str.format`.
        parameters: by name, in the file's order.
        script: whether it is a script without an entry in an MLproject file.
    """

    name: str
    command: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    script: bool = False

    def shell_command(
        self, values: Mapping[str, Sequence[str]], extra: Mapping[str, Sequence[str]]
    ) -> str:
        """Return the command for the shell, with each word of a value quoted.

        Args:
            values: the words of every parameter; mostly one each.
            extra: the words of further parameters, which are appended as `--name words`.

        Raises:
            ValueError: the values do not fit the command's placeholders.
        """
        quoted = {name: shlex.join(words) for name, words in values.items()}
        try:
            command = self.command.format(**quoted)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"the values do not fit the command ({error})") from None
        # A folded YAML text ends with a line break, which would separate the further parameters.
        appended = [f"--{shlex.quote(name)} {shlex.join(words)}" for name, words in extra.items()]
        return " ".join([command.rstrip(), *appended])


def script_entry(name: str) -> EntryPoint | None:
    """Return the entry point for a script; None if `name` does not have the suffix of one."""
    command = SCRIPTS.get(os.path.splitext(name)[1])
    if command is None:
        return None
    return EntryPoint(name, escape_braces(command.format(shlex.quote(name))), script=True)


def escape_braces(text: str) -> str:
    """Return a text with placeholders that stands for this text itself."""
    return text.replace("{", "{{").replace("}", "}}")


def command_mistakes(command: str, parameters: Iterable[str]) -> Iterator[str]:
    """Yield the mistakes in a command whose placeholders may name `parameters`."""
    known = list(parameters)
    try:
        names = list(dict.fromkeys(_fields(command)))
    except ValueError as error:
        yield f"cannot be read ({error}): write {{{{ and }}}} for braces that are not placeholders"
        return
    wrong = [name for name in names if name not in known]
    for name in wrong:
        yield _unknown_placeholder(name, command, known)
    if wrong:
        return
    if _WIDE.search("".join(spec or "" for _, _, spec, _ in string.Formatter().parse(command))):
        yield "has a placeholder wider than 9999 characters"
        return
    try:
        command.format(**dict.fromkeys(known, "x"))
    except IndexError:
        pass  # {name[5]} may fit the real value
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        yield f"has a placeholder that does not accept a text ({error})"
    for name, where in quoted_placeholders(command):
        yield f"{{{name}}} stands {where}, but values are quoted already: write only {{{name}}}"


def _unknown_placeholder(name: str, command: str, known: Sequence[str]) -> str:
    if not name or name.isdigit():
        return "has a placeholder without a name: write {parameter}, or {{ and }} for braces"
    if f"${{{name}" in command:
        return f"names the shell's variable ${{{name}}}: write ${{{{{name}}}}} instead"
    return (
        f"has the placeholder {{{name}}}, but there is no such parameter{suggest(name, known)}:"
        " declare it, or write {{ and }} for braces"
    )


def _fields(text: str) -> Iterator[str]:
    """Yield the names in a text's placeholders, including those in format specifications."""
    for _, name, spec, _ in string.Formatter().parse(text):
        if name is not None:
            yield re.split(r"[.\[]", name, maxsplit=1)[0]
            yield from _fields(spec or "")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name that `name` resembles, or a list of all known names."""
    names = [str(each) for each in known]
    if likely := find_alike(name, names):
        return did_you_mean(likely)
    return f" (there are {', '.join(names)})" if names else ""


def unsendable_characters(text: str) -> str:
    """Return why a text cannot be a word of a command; empty if it can."""
    if "\0" in text:
        return "has a NUL character in it, which no process accepts"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has half a character in it (a lone surrogate)"
    return ""


def _scheme(text: str) -> str:
    with suppress(ValueError):
        return urlsplit(text).scheme
    return ""


def _is_number(text: str, kind: type[int] | type[float]) -> bool:
    with suppress(ValueError):
        kind(text)
        return True
    return False


_FIELD: Final = "\0"
"""Stands for a placeholder; a blank replaces this character in the command's own text."""

_HEREDOC: Final = re.compile(r"<<(?!<)(-?)[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|\\?([\w.-]+))")
_BEFORE_WORDS: Final = frozenset(" \t\n;&|()<>")
_PLAIN, _SINGLE, _DOUBLE, _ANSI, _BACK = "(", "'", '"', "$'", "`"
_COMMAND, _BRACES = "$(", "${"
_COMMANDS: Final = (_PLAIN, _COMMAND)
_OPENED_BY: Final = {"$(": _COMMAND, "<(": _COMMAND, ">(": _COMMAND, "${": _BRACES, "$'": _ANSI}
_QUOTES: Final = "inside quotes"
_BACKSLASH: Final = "after a backslash"
_TWICE: Final = re.compile(r">&[ \t]*[^ \t\d-]")
"""What bash expands a second time may follow: the name of a file for output and errors."""
_WHERE: Final = {
    _SINGLE: _QUOTES, _DOUBLE: _QUOTES, _ANSI: _QUOTES, _BACK: "inside backquotes",
}  # fmt: skip


def quoted_placeholders(command: str) -> Iterator[tuple[str, str]]:
    """Yield the placeholders inside quotes or after a backslash, and a phrase for where.

    `$(…)` inside double quotes is a command of its own, whose words are not quoted. Comments and
    here-documents are ignored.

    Raises:
        ValueError: `command` is malformed.
    """
    text, names = "", []
    for plain, name, _, _ in string.Formatter().parse(command):
        text += plain.replace(_FIELD, " ")
        if name is not None:
            text += _FIELD
            names.append(re.split(r"[.\[]", name, maxsplit=1)[0])
    places = [where for at, where in _scan(text) if text[at] == _FIELD]
    found = [(name, where) for name, where in zip(names, places, strict=True) if where]
    yield from dict.fromkeys(found)


def _scan(text: str) -> Iterator[tuple[int, str]]:
    """Yield each placeholder's position, and where it stands; empty if it may stand there."""
    at, inside, pending = 0, [_PLAIN], list[re.Match[str]]()
    begins = True  # whether a word may begin here, and a comment
    while at < len(text):
        kind, depth, begun, begins = inside[-1], len(inside), not begins, False
        place = _WHERE.get(kind) or (_WHERE[_BACK] if _BACK in inside else "")
        step = 1
        if text[at] == _FIELD:
            yield (
                at,
                place or "after >& (write &> instead)" * bool(_TWICE.search(text, 0, at + 1)),
            )
        elif text[at] == "\\" and kind != _SINGLE:
            step, place = 2, place or _BACKSLASH
            begins = not begun and text[at + 1 : at + 2] == "\n"
        elif kind in _COMMANDS and (step := _plain_step(text, at, pending, begun)):
            begins = text[at] != "<"
        else:
            step = _turn(inside, text[at : at + 2])
            if len(inside) > depth:
                begins = inside[-1] in _COMMANDS
            else:  # what follows a substitution belongs to the same word
                begins = kind in _COMMANDS and text[at] in _BEFORE_WORDS
                begins = begins and (len(inside) == depth or kind == _PLAIN)
        for skipped in range(at + 1, min(at + step, len(text))):
            if text[skipped] == _FIELD:
                yield skipped, place
        at += step


def _plain_step(text: str, at: int, pending: list[re.Match[str]], begun: bool) -> int:
    """Return the length of what to skip at `at`, where a word has `begun`; 0 if there is nothing.

    Skip comments, the operators `<<WORD` and `<<<`, and the bodies of here-documents.
    """
    if text[at] == "#" and not begun:
        return len(text[at:].split("\n", 1)[0])
    if text[at] == "\n" and pending:
        end = _bodies_end(text, at + 1, pending)
        pending.clear()
        return end - at
    if found := _HEREDOC.match(text, at):
        pending.append(found)
        return found.end() - at
    return 3 if text.startswith("<<<", at) else 0


def _turn(inside: list[str], two: str) -> int:
    """Open or close a quote or substitution; return how many characters that takes."""
    kind, one = inside[-1], two[0]
    if kind in (_SINGLE, _ANSI):
        if one == "'":
            inside.pop()
    elif one == "`":
        if _BACK in inside:
            del inside[inside.index(_BACK) :]
        else:
            inside.append(_BACK)
    elif two in ("$$", "$(") or (two in _OPENED_BY and kind != _DOUBLE):
        inside += [_OPENED_BY[two]] if two in _OPENED_BY else []
        return 2
    elif one == kind == _DOUBLE:
        inside.pop()
    elif one in (_SINGLE, _DOUBLE, _PLAIN) and kind != _DOUBLE:
        inside.append(one)
    elif len(inside) > 1 and (kind in _COMMANDS if one == ")" else one + kind == "}${"):
        inside.pop()
    return 1


def _bodies_end(text: str, at: int, begun: list[re.Match[str]]) -> int:
    """Return the end of the here-documents whose bodies begin at `at`; ignore unclosed ones."""
    for each in begun:
        tabs = r"\t*" if each[1] else ""
        word = re.escape(each[2] or each[3] or each[4])
        end = re.compile(rf"^{tabs}{word}$", re.MULTILINE).search(text, at)
        at = end.end() if end else at
    return at


PARAMETER: Final = "call"
"""The name of the call in a rule's `params`."""


@dataclass(frozen=True)
class Call:
    """A call of an entry point.

    Attributes:
        project: the project's folder, relative to the workflow's working directory.
        name: the project's name from its MLproject file, else the folder's.
        entry_point: the entry point's name, or the path of a script in the project.
        definition: a hash of the entry point and of the project's sources.
        arguments: the values of all parameters, defaults included, not quoted for a shell. Relative
            paths start at the workflow's working directory, those in defaults at the project's
            folder.
    """

    project: PurePosixPath
    name: str
    entry_point: str
    definition: str
    arguments: Mapping[str, str]


def read_call(params: Any) -> Call | None:
    """Return the call in a job's evaluated parameters, `job.params` or a mapping; None for none."""
    found = (
        params.get(PARAMETER) if isinstance(params, Mapping) else getattr(params, PARAMETER, None)
    )
    return found if isinstance(found, Call) else None


EnvironmentKey = Literal["python_env", "conda_env", "docker_env"]


@dataclass(frozen=True)
class ProjectEnvironment:
    """An environment of an MLproject file.

    Attributes:
        value: the path of its file in the project's folder, or the name of the image.
        more: further keys of `docker_env`, which are not used here.
    """

    key: EnvironmentKey
    value: str
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.key}: {self.value}"


def read_python_env(folder: Path, name: str) -> tuple[str, list[str]]:
    """Read the file `name` of a project's folder.

    Return the version of Python, empty if not given, and what pip installs, a line each.

    Raises:
        UserError: it cannot be read, or has another form.
    """
    try:
        # Without types: a version like 3.10 is no number.
        content = yaml.load((folder / name).read_text("utf-8"), yaml.BaseLoader)  # noqa: S506 - texts alone
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _unusable(name, " ".join(str(error).split())) from None
    content = {} if content in (None, "") else content
    if not isinstance(content, dict):
        raise _unusable(name, "it has to be a mapping with python and dependencies")
    lines: list[str] = []
    for key in ("build_dependencies", "dependencies"):
        several = content.get(key) or []
        if not isinstance(several, list) or not all(isinstance(line, str) for line in several):
            raise _unusable(name, f"{key} has to be a list of requirements")
        lines += several
    return str(content.get("python") or ""), lines


def _unusable(name: str, why: str) -> UserError:
    return UserError(f"its python_env {name} cannot be used: {why}", do="Correct the file")
