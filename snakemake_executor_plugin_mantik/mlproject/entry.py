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

from snakemake_executor_plugin_mantik.mlproject.quoting import quoted_placeholders

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
