"""Quote values that bash is to expand (`Site: Expand`)."""

import re
from typing import Final

_BACKQUOTES: Final = r"`(?:[^`\\]|\\.)*`"
# In double quotes: what stays, and what has to be escaped.
_TEXT: Final = re.compile(rf"\\[\\$`\"]|{_BACKQUOTES}|\$\(|\"|\\\Z", re.DOTALL)
# In `$(…)`, and in double quotes there.
_CODE: Final = re.compile(rf"\\.|{_BACKQUOTES}|'[^']*'|\$?\(|[)\"]", re.DOTALL)
_QUOTED_IN_CODE: Final = re.compile(rf"\\.|{_BACKQUOTES}|\$\(|\"", re.DOTALL)


def quote_expanded(value: str) -> str:
    """Put a value into double quotes, so that bash expands it to one word.

    Double quotes in the value are part of it, except in `$(…)` and backquotes, which hold code.
    """
    parts, at = [], 0
    while match := _TEXT.search(value, at):
        start, end = match.span()
        parts.append(value[at:start])
        if match[0] == "$(":
            end = _code_end(value, start)
        elif len(match[0]) == 1:
            parts.append("\\")
        parts.append(value[start:end])
        at = end
    return f'"{"".join(parts)}{value[at:]}"'


def _code_end(text: str, at: int) -> int:
    """Return the end of the `$(…)` that begins at `at`; that of the text if it is not closed."""
    is_open = ["("]
    at += 2
    while is_open:
        quoted = is_open[-1] == '"'
        match = (_QUOTED_IN_CODE if quoted else _CODE).search(text, at)
        if match is None:
            return len(text)
        at = match.end()
        if match[0] == ")" or (quoted and match[0] == '"'):
            is_open.pop()
        elif match[0] in ('"', "(", "$("):
            is_open.append(match[0][-1])
    return at
