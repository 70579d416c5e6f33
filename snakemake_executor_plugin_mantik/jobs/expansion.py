"""Quote values that bash is to expand (`Site: Expand`)."""

import re
import shlex
from typing import Final

_BACKQUOTES: Final = r"`(?:[^`\\]|\\.)*`"
# In double quotes: what stays, and what has to be escaped.
_TEXT: Final = re.compile(rf"\\[\\$`\"]|{_BACKQUOTES}|\$\(|\"|\\\Z", re.DOTALL)
# In `$(…)`, and in double quotes there.
_CODE: Final = re.compile(rf"\\.|{_BACKQUOTES}|'[^']*'|\$?\(|[)\"]", re.DOTALL)
_QUOTED_IN_CODE: Final = re.compile(rf"\\.|{_BACKQUOTES}|\$\(|\"", re.DOTALL)
_EXPANDS: Final = re.compile(r"[$`]")
_OPENING: Final = re.compile(rf"\\.|{_BACKQUOTES}|`|\$[({{]", re.DOTALL)
_LITERAL: Final = re.compile(r"[\\$`]")


def expands(text: str) -> bool:
    """Return whether bash may expand something in a text."""
    return _EXPANDS.search(text) is not None


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
    return _LITERAL.sub(r"\\\g<0>", value)


def quote_word(word: str) -> str:
    """Quote a word that may hold quotes of bash, so that bash expands it to one word.

    In contrast to `quote_expandable`, it may hold code, `$(…)`. Of tildes only `~` and `~/` at its
    beginning are expanded.
    """
    if word == "~":
        return word
    at = 2 if word.startswith("~/") else 0
    parts = [word[:at]]
    while at < len(word):
        end = _part_end(word, at)
        part = word[at:end]
        if part[0] == "\\" or part == "'":
            part = shlex.quote(part[part[0] == "\\" :])
        elif part[0] not in "'\"":
            part = f'"{part}"'
        parts.append(part)
        at = end
    return "".join(parts) or "''"


def find_code(word: str, *, quoted: bool = False) -> str:
    """Return the first part of a word that holds code, `$(…)`; only a `quoted` part, or none."""
    at = 0
    while at < len(word):
        end = _part_end(word, at)
        part = word[at:end]
        if "$(" in part and part[0] not in "'\\" and (part[0] == '"') == quoted:
            return part
        at = end
    return ""


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
    parts, at = [], 0
    while at < len(word):
        end = _part_end(word, at)
        parts += [word[at:end]] if word[at] not in "'\\" else []
        at = end
    return find_unclosed("".join(parts))


def _part_end(word: str, at: int) -> int:
    """Return the end of a part of a word: quoted in one way, or unquoted, possibly with code."""
    if word[at] == "\\":
        return at + 2
    if word[at] == "'":
        return (word.find("'", at + 1) + 1) or len(word)
    quoted = word[at] == '"'
    end = at + quoted
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
