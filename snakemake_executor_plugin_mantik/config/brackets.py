"""Bracket sets of a pattern, `[a-z]` and `[[:digit:]]`, as git reads them.

pathspec hands such sets to Python's regular expressions as they are, which know neither classes nor
backslashes there, and refuse a range that ends before it starts. So they are read here, by the
rules of git's own matcher (git/git, wildmatch.c).
"""

import re
from itertools import count
from typing import Final

_CLASSES: Final = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": r"\ \t",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": r"\x21-\x7e",
    "lower": "a-z",
    "print": r"\x20-\x7e",
    "punct": r"\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e",
    "space": r"\ \t\n\r",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}
"""Of ASCII alone; no other letter is one to git, and its blanks are these four."""

_NOTHING: Final = "(?!)"


class InvalidSetError(ValueError):
    """A set does not end, or names a class that does not exist: git matches nothing then."""


def replace_sets(pattern: str) -> tuple[str, dict[str, str]]:
    """The pattern with one character for each of its sets, and their regular expressions.

    The characters are of a private area and not in the pattern; nobody takes them for anything.

    Raises:
        NoSetError: one of its sets is none.
    """
    unused = (sign for number in count(0xF0000) if (sign := chr(number)) not in pattern)
    signs: dict[str, str] = {}
    text, at, anchored = "", 0, False
    while at < len(pattern):
        end = at + 1
        if pattern[at] == "[":
            expression, end = _set(pattern, at + 1)
            anchored |= "/" in pattern[at:end]
            sign = next(unused)
            signs[sign] = expression
            text += sign
        else:
            end += pattern[at] == "\\"
            text += pattern[at:end]
        at = end
    if anchored:  # a slash makes a pattern one from the top, in a set too
        text = f"!/{text[1:]}" if text.startswith("!") else f"/{text}"
    return text, signs


def _set(pattern: str, at: int) -> tuple[str, int]:
    """The regular expression of the set whose `[` lies before `at`, and where it has ended."""
    negated = pattern[at : at + 1] in ("!", "^")
    at += negated
    parts: list[str] = []
    start = ""  # the character that a range would start with
    first = True
    while first or pattern[at : at + 1] != "]":
        first = False
        if start and pattern[at] == "-" and pattern[at + 1 : at + 2] not in ("", "]"):
            end, at = _character(pattern, at + 1)
            if start <= end:
                parts.append(f"{re.escape(start)}-{re.escape(end)}")
            start = ""
        elif (named := _class(pattern, at)) is not None:
            parts.append(_CLASSES[named])
            start, at = "", at + len(f"[:{named}:]")
        else:
            start, at = _character(pattern, at)
            parts.append(re.escape(start))
        if at >= len(pattern):
            raise InvalidSetError
    inside = "".join(parts)
    if negated:
        return f"[^/{inside}]", at + 1
    # No set matches a slash.
    return f"(?!/)[{inside}]" if inside else _NOTHING, at + 1


def _character(pattern: str, at: int) -> tuple[str, int]:
    """The character at `at`, after a backslash the next one, and where it has ended."""
    at += pattern[at : at + 1] == "\\"
    if at >= len(pattern):
        raise InvalidSetError
    return pattern[at], at + 1


def _class(pattern: str, at: int) -> str | None:
    """The name of the class that starts at `at`; None: what is there is no class."""
    if not pattern.startswith("[:", at):
        return None
    end = pattern.find("]", at + 2)
    if end < 0:
        raise InvalidSetError
    inside = pattern[at + 2 : end]
    if not inside.endswith(":"):
        return None
    if inside[:-1] not in _CLASSES:
        raise InvalidSetError
    return inside[:-1]
