"""Quote text for bash: values as they are, and values in which bash is to expand something."""

import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Final

from ..common.errors import UserError

_BACKQUOTES: Final = r"`(?:[^`\\]|\\.)*`"
# In double quotes: what stays, and what has to be escaped.
_TEXT: Final = re.compile(rf"\\[\\$`\"]|{_BACKQUOTES}|\$\(|\"|\\\Z", re.DOTALL)
# In `$(…)`, and in double quotes there.
_CODE: Final = re.compile(rf"\\.|{_BACKQUOTES}|'[^']*'|\$?\(|[)\"]", re.DOTALL)
_QUOTED_IN_CODE: Final = re.compile(rf"\\.|{_BACKQUOTES}|\$\(|\"", re.DOTALL)
_OPENING: Final = re.compile(rf"\\.|{_BACKQUOTES}|`|\$[({{]", re.DOTALL)

_VARIABLE = r"\$(?:[A-Za-z_][A-Za-z0-9_]*|\{[A-Za-z_][A-Za-z0-9_]*\})"
_PLAIN_WORD = re.compile(rf"(?:[A-Za-z0-9_@%+=:,./^-]|{_VARIABLE})+")
_IN_QUOTES = re.compile(rf"({_VARIABLE})|([\\\"`$])")
# In double quotes, a backslash before any other character is a literal backslash.
_ESCAPED = re.compile(r'\\([\\$`"])')
# The parts of a word: in single quotes, in double quotes, after a backslash, unquoted.
_PARTS = re.compile(
    r"""'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|\\(?P<escaped>.)|(?P<bare>[^'"\\]+|.)""",
    re.DOTALL,
)


def path_argument(path: str) -> str:
    """Prefix a relative path with `./`, so that no program takes it for an option.

    Slashes at its end are removed.
    """
    path = path.rstrip("/") or "/"
    return path if path.startswith("/") else f"./{path.removeprefix('./')}"


def shell_quote(text: str, what: str) -> str:
    """Quote the text as one word of bash; `what` names it in the error."""
    encode_text(text, what)
    return shlex.quote(text)


def encode_text(text: str, what: str) -> bytes:
    """Encode the text as UTF-8; bytes of file names that are not UTF-8 stay as they are."""
    if "\0" in text:
        raise UserError(f"{what} holds a NUL character", do="Remove it")
    return text.encode("utf-8", "surrogateescape")


def quote_words(words: Iterable[str], what: str) -> str:
    """Quote each of some words, as the elements of an array of bash."""
    return " ".join(shell_quote(word, what) for word in words)


def quote_paths(paths: Iterable[str], what: str = "a path") -> str:
    """Quote each of some paths, so that no program takes one for an option."""
    return quote_words(map(path_argument, paths), what)


def quote_expandable(word: str) -> str:
    """Quote a word that may hold quotes of bash, so that only `$NAME` and `${NAME}` expand.

    `~` and `~/…` expand as well, because Apptainer does not know the home directory. `~user`, `~+`
    and `NAME=~/…` do not, although bash would expand them.
    """
    encode_text(word, "an option of Apptainer")
    if word == "~":
        return word
    home = "~/" if word.startswith("~/") else ""
    rest = "".join(map(_part, _PARTS.finditer(word.removeprefix(home))))
    return f"{home}{rest}" or "''"


def _part(match: re.Match[str]) -> str:
    """Quote one part of a word: text in one kind of quotes, or unquoted."""
    if match["bare"] is not None:
        bare = match["bare"]
        return bare if _PLAIN_WORD.fullmatch(bare) else f'"{_in_double_quotes(bare)}"'
    if match["double"] is None:
        return shlex.quote(match["single"] if match["escaped"] is None else match["escaped"])
    pieces = _ESCAPED.split(match["double"])  # every second one is an escaped character
    return "".join(
        f'"{_in_double_quotes(piece)}"' if number % 2 == 0 else shlex.quote(piece)
        for number, piece in enumerate(pieces)
        if piece or len(pieces) == 1
    )


def _in_double_quotes(text: str) -> str:
    """Escape the text for double quotes, in which variables expand."""
    return _IN_QUOTES.sub(lambda match: match[1] or f"\\{match[2]}", text)


def expands(text: str) -> bool:
    """Return whether bash may expand something in a text."""
    return "$" in text or "`" in text


def quote_expanded(value: str) -> str:
    """Put a value into double quotes, so that bash expands it to one word.

    Double quotes in the value are part of it, except in `$(…)` and backquotes, which hold code.
    """
    parts, at = [], 0
    while match := _TEXT.search(value, at):
        start, end = match.span()
        parts.append(value[at:start])
        if match[0] == "$(":
            end = code_end(value, start) or len(value)
        elif len(match[0]) == 1:
            parts.append("\\")
        parts.append(value[start:end])
        at = end
    return f'"{"".join(parts)}{value[at:]}"'


def keep_literal(value: str) -> str:
    """Return a value that `quote_expanded` makes a word of in which nothing is expanded."""
    return re.sub(r"[\\$`]", r"\\\g<0>", value)


def quote_word(word: str) -> str:
    """Quote a word that may hold quotes of bash, so that bash expands it to one word.

    In contrast to `quote_expandable`, it may hold code, `$(…)`. Of tildes only `~` and `~/` at its
    beginning are expanded.
    """
    if word == "~":
        return word
    parts = ["~/"] if word.startswith("~/") else []
    for part in _parts(word.removeprefix("~/")):
        if part[0] == "\\" or part == "'":
            parts.append(shlex.quote(part[part[0] == "\\" :]))
        else:
            parts.append(part if part[0] in "'\"" else f'"{part}"')
    return "".join(parts) or "''"


def find_code(word: str) -> str:
    """Return the first unquoted part of a word that holds code, `$(…)`, or none."""
    return next((p for p in _parts(word) if "$(" in p and p[0] not in "'\\\""), "")


def find_unclosed(text: str) -> str:
    """Return what opens code or a variable in a text and is not closed, or none."""
    at = 0
    while match := _OPENING.search(text, at):
        opening, at = match[0], match.end()
        if opening == "$(" and (end := code_end(text, match.start())) is not None:
            at = end
        elif opening in ("$(", "`") or (opening == "${" and "}" not in text[at:]):
            return opening
    return ""


def find_unclosed_in_word(word: str) -> str:
    """Like `find_unclosed`, for a word that may hold quotes of bash."""
    return find_unclosed("".join(part for part in _parts(word) if part[0] not in "'\\"))


def _parts(word: str) -> Iterator[str]:
    """Yield the parts of a word: quoted in one way, or unquoted, possibly with code."""
    while word:
        end = _part_end(word)
        yield word[:end]
        word = word[end:]


def _part_end(word: str) -> int:
    """Return the end of the first part of a word."""
    if word[0] == "\\":
        return 2
    if word[0] == "'":
        return (word.find("'", 1) + 1) or len(word)
    quoted = word[0] == '"'
    end = int(quoted)
    while end < len(word):
        if word.startswith("$(", end):
            end = code_end(word, end) or end + 2
        elif quoted and word[end] == "\\":
            end += 2
        elif quoted and word[end] == '"':
            return end + 1
        elif not quoted and word[end] in "'\"\\":
            break
        else:
            end += 1
    return end


def code_end(text: str, at: int) -> int | None:
    """Return the end of the `$(…)` that begins at `at`; None if it is not closed."""
    is_open = ["("]
    at += 2
    while is_open:
        quoted = is_open[-1] == '"'
        match = (_QUOTED_IN_CODE if quoted else _CODE).search(text, at)
        if match is None:
            return None
        at = match.end()
        if match[0] == ")" or (quoted and match[0] == '"'):
            is_open.pop()
        elif match[0] in ('"', "(", "$("):
            is_open.append(match[0][-1])
    return at
