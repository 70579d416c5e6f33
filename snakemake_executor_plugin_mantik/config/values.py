"""Types of the values in a backend config, with their validation.

A document's scalars arrive as text, boolean or a number that remembers how it was written
(`reading.Written…`). Each error message names the allowed values and the one found.
"""

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Annotated, Final, TypeVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator, ValidationError, WithJsonSchema
from pydantic_core import InitErrorDetails, PydanticCustomError

from ..jobs.quoting import code_end
from ..jobs.script import BASH_OWN, VARIABLE_BYTES, VARIABLE_NAME
from . import units

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,9}")
# Options reach bash as written: these characters must be in quotes.
_OPERATORS: Final = set(";&|<>()`")
_SHOWN: Final = 60


_T = TypeVar("_T")


def describe_value(value: object) -> str:
    """Describe `value` in a few words for a message: `the text 'x'`, `a list`."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, str):
        return f"the text {value[:_SHOWN]!r}{'…' if len(value) > _SHOWN else ''}"
    if isinstance(value, bool):
        return as_written(value)
    if isinstance(value, (int, float)):
        return f"the number {as_written(value)[:_SHOWN]}"
    if isinstance(value, (list, tuple)):
        return "a list"
    return "a mapping" if isinstance(value, Mapping) else "something else"


def not_allowed(allowed: str, value: object) -> ValueError:
    """Return an error that names the allowed values and the one found."""
    return ValueError(f"has to be {allowed}, found {describe_value(value)}")


def as_written(value: float | bool | str) -> str:
    """Return a scalar as written: numbers keep their digits, booleans are `true` and `false`."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(getattr(value, "written", value))


def _sendable(text: str) -> str:
    """Return `text`, if a process's environment and a UTF-8 file can hold it."""
    if "\0" in text:
        raise ValueError("has a NUL character in it, which no process accepts")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("has half a character in it (a lone surrogate)")
    return text


def parse_text(value: object, allowed: str = "a text") -> str:
    """Return a non-empty text without blanks around it; a number is returned as written.

    Raises:
        ValueError: `value` is neither text nor number, is empty, or holds a NUL character or a lone
            surrogate.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise not_allowed(f"{allowed} in quotes" if isinstance(value, bool) else allowed, value)
    text = _sendable(as_written(value)).strip()
    if not text:
        raise ValueError(f"is empty; it has to be {allowed}")
    return text


def _line(value: object, allowed: str = "a text") -> str:
    text = parse_text(value, allowed)
    if not text.isprintable():
        raise not_allowed("one line without control characters", text)
    return text


def _name(value: object) -> str:
    text = _line(value, "a name")
    if set(text) & set(" '\"\\#"):
        raise ValueError(
            f"may hold no blanks, quotes, backslashes or #; found {describe_value(text)}"
        )
    return text


def _names(value: object) -> str:
    return ",".join(map(_name, value)) if isinstance(value, list) and value else _name(value)


def _url(value: object) -> str:
    if isinstance(value, str) and "@" in value.partition("?")[0]:
        raise ValueError(  # does not show the text, which may hold a password
            "has credentials in it; remove them, and put them into the environment variables "
            "MANTIK_… or the keyring"
        )
    text = _line(value, "a URL")
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or " " in text:
        raise not_allowed("a URL that begins with https://", text)
    return text.rstrip("/")


def is_loopback(url: str) -> bool:
    """Return whether the URL's host is this machine."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_confidential(url: str) -> bool:
    """Return whether a URL is safe for secrets: https, or http to this machine.

    False also for text that is not a URL.
    """
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and (
            parts.scheme == "https" or (parts.scheme == "http" and is_loopback(url))
        )
    except ValueError:
        return False


def _address(value: object) -> str:
    url = _url(value)
    if not is_confidential(url):
        raise ValueError(
            f"is {describe_value(url)}, which is not an https:// address: credentials could be read"
            " in transit; use https:// (http:// is only for this machine)"
        )
    if "?" in url or "#" in url:
        raise ValueError(f"has a query or a fragment; remove it; found {describe_value(url)}")
    return url


def parse_integer(value: object, lowest: int) -> int:
    """Return a whole number of at least `lowest` and below 10**9, also from a text.

    Raises:
        ValueError: `value` is something else.
    """
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        number = int(value)
    if number is None or not lowest <= number < 10**9:
        most = " and below a billion" if number is not None and number >= 10**9 else ""
        raise not_allowed(f"a whole number of {lowest} or more{most}", value)
    return int(number)


def _measured(value: object, parse: Callable[[str], int]) -> int:
    scalar = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    try:
        return parse(as_written(value) if scalar else "")  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{error}, found {describe_value(value)}") from None


def split_words(text: str) -> tuple[str, ...]:
    """Split `text` into words as bash would, but keep quotes and `$VARS`.

    The words are written into a script unchanged, where bash removes the quotes and expands
    variables. A line break separates words, like a blank. Code, `$(…)`, is part of a word.

    Raises:
        ValueError: a quote is not closed, a line or the text ends with a backslash, or a character
            that ends a command or begins a comment is not quoted.
    """
    words: list[str] = []
    word, quote = "", ""
    escapes = dollar = False
    characters = enumerate(text)
    for at, character in characters:
        after_dollar, dollar = dollar, not quote and character == "$"
        end = code_end(text, at) if text.startswith("$(", at) and quote != "'" else None
        if end is not None:
            word += text[at:end]
            dollar = False
            for _ in range(end - at - 1):
                next(characters)
        elif quote:
            word += character
            if character == "\\" and escapes:
                word += next(characters, (0, ""))[1]
            elif character == quote:
                quote = ""
        elif character.isspace():
            words, word = [*words, word] if word else words, ""
        elif character in _OPERATORS or (character == "#" and not word):
            raise ValueError(f"has an unquoted {character!r} in it; put quotes around that word")
        elif character == "\\":
            following = next(characters, (0, ""))[1]
            if following in ("", "\n"):
                raise ValueError("has a backslash at the end of a line; leave it out")
            word += character + following
        else:
            quote = character if character in "'\"" else ""
            escapes = quote == '"' or after_dollar  # $'…' has escapes, '…' has none
            word += character
    if quote:
        raise ValueError(f"has a quote {quote} that is not closed")
    return (*words, word) if word else tuple(words)


def refuse_values(found: Iterable[tuple[tuple[str, ...], str]]) -> None:
    """Raise one `ValidationError` with all mistakes in `found`, if there are any.

    Each is a pair: the keys below this one, and the message.
    """
    details = [
        InitErrorDetails(type=PydanticCustomError("config", message), loc=keys, input=None)
        for keys, message in found
    ]
    if details:
        raise ValidationError.from_exception_data("config", details)


def read_list(items: object, read: Callable[[object], _T], allowed: str) -> tuple[_T, ...]:
    """Apply `read` to each item.

    Raises:
        ValueError: `items` is no list; `allowed` says what it has to be.
        ValidationError: with the mistakes of all items, each with the number of its item.
    """
    if not isinstance(items, list | tuple):
        raise not_allowed(allowed, items)
    values: list[_T] = []
    found: list[tuple[tuple[str, ...], str]] = []
    for number, item in enumerate(items, 1):
        try:
            values.append(read(item))
        except ValueError as error:
            found.append(((), f"entry {number} {error}"))
    refuse_values(found)
    return tuple(values)


def one_of(*words: str) -> BeforeValidator:
    """Return the validation of a text that is one of `words`, in any case."""

    def read(value: object) -> str:
        name = parse_text(value).lower()
        if name not in words:
            raise not_allowed(f"{', '.join(words[:-1])} or {words[-1]}", value)
        return name

    return BeforeValidator(read)


def parse_options(value: object) -> tuple[str, ...]:
    """Return the words of a text, or of a list of texts.

    Raises:
        ValueError: `value` is neither, or cannot be split into words.
    """
    if isinstance(value, str):
        return split_words(_sendable(value))
    words = read_list(value, lambda t: split_words(parse_text(t)), "a text or a list of texts")
    return tuple(chain.from_iterable(words))


def _modules(value: object) -> tuple[str, ...]:
    lines = read_list(value, _line, "a list of module names")
    return tuple(name for line in lines for name in line.split())


def _commands(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (parse_text(value),)
    return read_list(
        value,
        # In a list `true` is the command of that name.
        lambda item: parse_text(as_written(item) if isinstance(item, bool) else item),
        "of type str or list (a command or a list of them)",
    )


def _variables(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise not_allowed("a mapping of names to values", value)
    found: list[tuple[tuple[str, ...], str]] = []
    variables: dict[str, str] = {}
    for key, item in value.items():
        name = str(key)
        if not VARIABLE_NAME.fullmatch(name):
            found.append(
                ((name,), "is not a name of a variable: use letters, digits and _, no digit first")
            )
        elif name in BASH_OWN:
            found.append(((name,), "is set by bash itself, so the command would not see it"))
        elif not isinstance(item, (str, int, float)):
            found.append(((name,), f"has to be a text, found {describe_value(item)}"))
        else:
            try:
                variables[name] = _sendable(as_written(item))
                if len(f"{name}={variables[name]}".encode()) > VARIABLE_BYTES:
                    found.append(((name,), f"is longer than {VARIABLE_BYTES} bytes; use a file"))
            except ValueError as error:
                found.append(((name,), str(error)))
    refuse_values(found)
    return variables


_WHOLE: Final = {
    "type": ["integer", "string"],
    "pattern": r"^\s*\+?[0-9]{1,9}\s*$",
    "maximum": 10**9 - 1,
}

_SCALAR: Final = {"type": ["string", "number"]}
SCALAR: Final = WithJsonSchema(_SCALAR)
"""The JSON Schema of a text, which may be written as a number."""
LIST: Final = WithJsonSchema({"type": "array", "items": _SCALAR})
"""The JSON Schema of a list of texts and numbers."""


def text_or_list_schema(*kinds: str) -> WithJsonSchema:
    """Return the JSON Schema of a text, or of a list of texts and values of the types `kinds`."""
    items = {"type": ["string", *kinds]}
    return WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": items}]})


def _amount_schema(pattern: str, minimum: int) -> WithJsonSchema:
    return WithJsonSchema({"type": ["string", "integer"], "pattern": pattern, "minimum": minimum})


def words_schema(*words: str) -> WithJsonSchema:
    """Return the JSON Schema of one of `words`, in any case, with optional blanks around it."""
    patterns = "|".join(map(_any_case, words))
    either = {"type": "string", "pattern": rf"^\s*({patterns})\s*$"}
    return WithJsonSchema({"anyOf": [{"enum": list(words)}, either]})


def _any_case(word: str) -> str:
    """Return a case-insensitive pattern of a word: patterns of JSON Schema have no flags."""
    return "".join(f"[{c.upper()}{c}]" if c.isalpha() else re.escape(c) for c in word)


_HTTP: Final = f"{_any_case('http')}://"
_HTTPS: Final = f"{_any_case('https')}://"
_THIS_MACHINE: Final = rf"({_any_case('localhost')}|127\.[0-9]+\.[0-9]+\.[0-9]+|\[::1\])"


Text = Annotated[str, BeforeValidator(_line), SCALAR]
"""One line of text."""

Name = Annotated[str, BeforeValidator(_name), SCALAR]
"""A name for a scheduler's directive: no blanks, quotes, backslashes or #."""

Names = Annotated[
    str,
    BeforeValidator(_names),
    WithJsonSchema({"anyOf": [_SCALAR, {"type": "array", "items": _SCALAR, "minItems": 1}]}),
]
"""One name, or a list that becomes one text with commas."""

Url = Annotated[
    str,
    BeforeValidator(_url),
    WithJsonSchema({"type": "string", "pattern": rf"^\s*({_HTTP}|{_HTTPS})[^\s/?#]"}),
]
"""A URL without credentials; trailing slashes are removed."""

Address = Annotated[
    str,
    BeforeValidator(_address),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": rf"^\s*({_HTTPS}[^\s/?#][^?#]*|{_HTTP}{_THIS_MACHINE}([:/][^?#]*)?)\s*$",
        }
    ),
]
"""The URL of a server that receives credentials: https, or http on this machine."""

Positive = Annotated[
    int, BeforeValidator(partial(parse_integer, lowest=1)), WithJsonSchema({**_WHOLE, "minimum": 1})
]
"""A whole number of one or more."""

Count = Annotated[
    int, BeforeValidator(partial(parse_integer, lowest=0)), WithJsonSchema({**_WHOLE, "minimum": 0})
]
"""A whole number of zero or more."""

Duration = Annotated[
    int,
    BeforeValidator(partial(_measured, parse=units.parse_duration)),
    WithJsonSchema({"type": "string", "pattern": r"^\s*[0-9]+[smhd]\s*$"}),
]
"""Seconds, written as a number with a unit."""

Memory = Annotated[
    int,
    BeforeValidator(partial(_measured, parse=units.parse_memory)),
    _amount_schema(r"^\s*[0-9]+([KMGTkmgt]([Ii]?[Bb])?)?\s*$", minimum=1),
]
"""MiB, written as a number with a unit, or as MiB."""

Size = Annotated[
    int,
    BeforeValidator(partial(_measured, parse=units.parse_size)),
    _amount_schema(r"^\s*[0-9]+([KMGTkmgt][Ii]?)?[Bb]?\s*$", minimum=0),
]
"""Bytes, written as a number with or without a unit."""

CommandWords = Annotated[
    tuple[str, ...], BeforeValidator(parse_options), text_or_list_schema("number")
]
"""Words for a command line, written as a text or a list of texts."""

Modules = Annotated[tuple[str, ...], BeforeValidator(_modules), LIST]
"""Names of environment modules."""

Commands = Annotated[
    tuple[str, ...], BeforeValidator(_commands), text_or_list_schema("number", "boolean")
]
"""Bash commands, written as a text or a list of texts."""

Variables = Annotated[
    dict[str, str],
    BeforeValidator(_variables),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^{VARIABLE_NAME.pattern}$"},
            "additionalProperties": {"type": ["string", "number", "boolean"]},
        }
    ),
]
"""Environment variables; values are texts, numbers as written, or booleans (`true`, `false`)."""
