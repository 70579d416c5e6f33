"""Entry points of an MLproject: their typed parameters and the command that they become."""

import difflib
import os
import re
import shlex
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

TYPES: Final = ("string", "float", "int", "path", "uri")
"""The types that are checked or mean something; MLflow lets any other name through."""

_INTEGERS: Final = frozenset({"int", "integer", "long"})
_FLOATS: Final = frozenset({"float", "double"})
_WIDE: Final = re.compile(r"[0-9]{5,}")

SCRIPTS: Final = (".py", ".sh", ".R")
"""Files that are entry points by themselves, as for MLflow."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of an entry point.

    Attributes:
        name: its name.
        type: its type's name, `string` where the file gives none.
        default: the text that serves where no value is given; None: a value is required.
    """

    name: str
    type: str = "string"
    default: str | None = None

    def mistake(self, text: str) -> str:
        """What is wrong with the value `text`; empty if nothing is."""
        if complaint := unsendable_characters(text):
            return complaint
        if self.type in _FLOATS and not _is_number(text, float):
            return f"has to be a number, found {text!r}"
        if self.type in _INTEGERS and not _is_number(text, int):
            return f"has to be a whole number, found {text!r}"
        if self.type == "uri" and not _scheme(text):
            return f"has to be a URI such as s3://bucket/key, found {text!r}"
        if self.type == "path" and _is_remote(text):
            return (
                f"names something that is not on this machine, {text!r}, and is of type path:"
                " make it an input of the rule (with a storage plugin), or give the parameter the"
                " type uri"
            )
        return ""


@dataclass(frozen=True)
class EntryPoint:
    """An entry point of a project.

    Attributes:
        name: its name in the MLproject file, or the path of a script in the project.
        command: a text with placeholders, as for Python's `str.format`.
        parameters: by name, in the file's order.
        script: whether it is a script that no MLproject file speaks of.
    """

    name: str
    command: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    script: bool = False

    def shell_command(
        self, values: Mapping[str, Sequence[str]], extra: Mapping[str, Sequence[str]]
    ) -> str:
        """The command for the shell, each word of a value quoted.

        Args:
            values: the words of every parameter; mostly one each.
            extra: the words of further parameters, which go to the end as `--name words`.

        Raises:
            ValueError: the command cannot be made of these values.
        """
        quoted = {name: shlex.join(words) for name, words in values.items()}
        try:
            command = self.command.format(**quoted)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"the command cannot be made of these values ({error})") from None
        # A folded YAML text ends with a line break, which would cut the further parameters off.
        appended = [f"--{shlex.quote(name)} {shlex.join(words)}" for name, words in extra.items()]
        return " ".join([command.rstrip(), *appended])


def script_entry(name: str) -> EntryPoint | None:
    """The entry point that a script is; None if `name` does not end like one."""
    suffix = os.path.splitext(name)[1]
    if suffix not in SCRIPTS:
        return None
    program = {".py": "python", ".sh": "bash"}.get(suffix)
    command = (
        f"{program} {shlex.quote(name)}"
        if program
        else f"Rscript -e \"mlflow::mlflow_source('{shlex.quote(name)}')\" --args"
    )
    escaped = command.replace("{", "{{").replace("}", "}}")
    return EntryPoint(name, escaped, script=True)


def command_mistakes(command: str, parameters: Iterable[str]) -> Iterator[str]:
    """What is wrong with a command whose placeholders may name `parameters`."""
    known = list(parameters)
    try:
        names = list(dict.fromkeys(_fields(command)))
    except ValueError as error:
        yield f"cannot be read ({error}): write {{{{ and }}}} for braces that are no placeholder"
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
        yield f"has a placeholder that no text can fill ({error})"
    for name, where in quoted_placeholders(command):
        yield f"{{{name}}} stands {where}; values are quoted already: write it without"


def _unknown_placeholder(name: str, command: str, known: Sequence[str]) -> str:
    if not name or name.isdigit():
        return "has a placeholder without a name: write {parameter}, or {{ and }} for braces"
    if f"${{{name}" in command:
        return f"names the shell's variable ${{{name}}}: write ${{{{{name}}}}} for it"
    return (
        f"has the placeholder {{{name}}}, but there is no such parameter{suggest(name, known)}:"
        " declare it, or write {{ and }} for braces"
    )


def _fields(text: str) -> Iterator[str]:
    """The names in the placeholders of a text, also in those of their format specifications."""
    for _, name, spec, _ in string.Formatter().parse(text):
        if name is not None:
            yield re.split(r"[.\[]", name, maxsplit=1)[0]
            yield from _fields(spec or "")


def suggest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that `name` resembles, or at all of them."""
    names = [str(each) for each in known]
    likely = difflib.get_close_matches(name, names, n=1)
    if likely:
        return f" (did you mean {likely[0]}?)"
    return f" (there are {', '.join(names)})" if names else ""


def unsendable_characters(text: str) -> str:
    """Why a text cannot be a word of a command; empty if it can."""
    if "\0" in text:
        return "has a NUL character in it, which no process can be given"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "has half a character in it (a lone surrogate)"
    return ""


def _is_remote(text: str) -> bool:
    """Whether a value of type path is no path on this machine."""
    return _scheme(text) not in ("", "file")


def _scheme(text: str) -> str:
    try:
        return urlsplit(text).scheme
    except ValueError:
        return ""


def _is_number(text: str, kind: type[int] | type[float]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


_FIELD: Final = "\0"
"""Stands for a placeholder; no command has this character."""

_HEREDOC: Final = re.compile(r"<<(?!<)(-?)[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|\\?([\w.-]+))")
_BEFORE_COMMENT: Final = frozenset(" \t\n;&|()")
_PLAIN, _SINGLE, _DOUBLE, _ANSI, _BACK = "(", "'", '"', "$'", "`"
_QUOTES: Final = "inside of quotes"
_BACKSLASH: Final = "behind a backslash"
_WHERE: Final = {
    _SINGLE: _QUOTES, _DOUBLE: _QUOTES, _ANSI: _QUOTES, _BACK: "inside of backquotes",
}  # fmt: skip


def quoted_placeholders(command: str) -> Iterator[tuple[str, str]]:
    """The placeholders of a command that stand inside of quotes, and the words for where.

    `$(…)` inside of double quotes is a command of its own, whose words are not quoted. Comments
    and here-documents are left alone.

    Args:
        command: a text with placeholders, as for Python's `str.format`.

    Raises:
        ValueError: the text is none.
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
    """Each placeholder's position, and where it stands; empty: where it may."""
    at, inside, pending = 0, [_PLAIN], list[re.Match[str]]()
    while at < len(text):
        kind = inside[-1]
        place = _WHERE.get(kind) or (_WHERE[_BACK] if _BACK in inside else "")
        step = 1
        if text[at] == _FIELD:
            yield at, place
        elif text[at] == "\\" and kind != _SINGLE:
            step, place = 2, place or _BACKSLASH
        else:
            step = _plain_step(text, at, pending) if kind == _PLAIN else 0
            step = step or _turn(inside, text[at : at + 2])
        for skipped in range(at + 1, min(at + step, len(text))):
            if text[skipped] == _FIELD:
                yield skipped, place
        at += step


def _plain_step(text: str, at: int, pending: list[re.Match[str]]) -> int:
    """How many characters belong to a comment or a here-document; 0: it is none."""
    if text[at] == "#" and (at == 0 or text[at - 1] in _BEFORE_COMMENT):
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
    """Begin or end what the shell begins or ends here; how many characters that takes."""
    kind, one = inside[-1], two[0]
    if kind in (_SINGLE, _ANSI):
        if one == "'":
            inside.pop()
    elif one == "`":
        if _BACK in inside:
            del inside[inside.index(_BACK) :]
        else:
            inside.append(_BACK)
    elif two in ("$$", "$(") or (two == "$'" and kind != _DOUBLE):
        inside += {"$(": [_PLAIN], "$'": [_ANSI]}.get(two, [])
        return 2
    elif one == kind == _DOUBLE:
        inside.pop()
    elif one in (_SINGLE, _DOUBLE, _PLAIN) and kind != _DOUBLE:
        inside.append(one)
    elif one == ")" and len(inside) > 1 and kind == _PLAIN:
        inside.pop()
    return 1


def _bodies_end(text: str, at: int, begun: list[re.Match[str]]) -> int:
    """Where the here-documents end whose bodies begin at `at`; one without an end is none."""
    for each in begun:
        tabs = r"\t*" if each[1] else ""
        word = re.escape(each[2] or each[3] or each[4])
        end = re.compile(rf"^{tabs}{word}$", re.MULTILINE).search(text, at)
        at = end.end() if end else at
    return at
