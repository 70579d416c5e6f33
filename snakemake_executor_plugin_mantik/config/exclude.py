"""Decide which files of the project folder are uploaded, by git's rules for `.gitignore`.

Patterns mean the same as in one `.gitignore` at the top of the project folder: the last one that
matches decides, and `!` includes again, except below an excluded directory. pathspec reads them.

pathspec passes bracket sets (`[a-z]`, `[[:digit:]]`) unchanged to Python's regular expressions.
These support neither classes nor backslashes in sets and refuse a range whose end is before its
start. So this module translates sets, by the rules of git's own matcher (git/git, wildmatch.c).
"""

import re
from collections.abc import Sequence
from itertools import count
from typing import Final

from pathspec import GitIgnoreSpec, RegexPattern

from .values import as_written, describe_value, parse_text, read_list

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
"""Git's classes are ASCII only, and its whitespace is only these four characters."""

_NOTHING: Final = "(?!)"


class _InvalidSetError(ValueError):
    """A set has no end or an unknown class; git matches nothing then."""


def _replace_sets(pattern: str) -> tuple[str, dict[str, str]]:
    """Replace each set of the pattern by one character; return their regular expressions, too.

    The characters are from a private-use area of Unicode and do not occur in the pattern.
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
    if anchored:  # a slash anchors a pattern to the top, even in a set
        text = f"!/{text[1:]}" if text.startswith("!") else f"/{text}"
    return text, signs


def _set(pattern: str, at: int) -> tuple[str, int]:
    """Translate the set whose `[` is before `at`; return the position after it, too."""
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
            raise _InvalidSetError
    inside = "".join(parts)
    if negated:
        return f"[^/{inside}]", at + 1
    # No set matches a slash.
    return f"(?!/)[{inside}]" if inside else _NOTHING, at + 1


def _character(pattern: str, at: int) -> tuple[str, int]:
    """Return the character at `at`, or the one after a backslash, and the position after it."""
    at += pattern[at : at + 1] == "\\"
    if at >= len(pattern):
        raise _InvalidSetError
    return pattern[at], at + 1


def _class(pattern: str, at: int) -> str | None:
    """Return the name of the class that starts at `at`; None if none does."""
    end = pattern.find("]", at + 2)
    inside = pattern[at + 2 : end]
    if not pattern.startswith("[:", at) or (end >= 0 and not inside.endswith(":")):
        return None
    if end < 0 or inside[:-1] not in _CLASSES:
        raise _InvalidSetError
    return inside[:-1]


_NEVER_SENT: Final = (".git/", ".snakemake/", ".mantik/")
"""Excluded by default because no job needs them; `!.git/` includes one again."""


def read_patterns(value: object) -> tuple[str, ...]:
    """Check the patterns of the key `Exclude` or `Include`.

    Raises:
        ValueError: `value` is not a list of patterns, or a pattern cannot match as intended.
    """
    return read_list(value, _pattern, "a list of patterns")


def _pattern(value: object) -> str:
    parse_text(value, "a pattern")
    # Blanks may be intended.
    text = as_written(value) if isinstance(value, (int, float)) else str(value)
    positive = text.removeprefix("!")
    if positive.startswith("/"):
        raise ValueError(
            f"is absolute ({text!r}); patterns are relative to the project folder: "
            "a name matches anywhere in it, a/b from its top"
        )
    if "\n" in text or "\r" in text:
        raise ValueError(f"has a line break in it, found {describe_value(text)}")
    if ".." in positive.split("/"):
        raise ValueError(f"leaves the project folder, found {describe_value(text)}")
    if "." in positive.rstrip(" ").rstrip("/").split("/"):
        raise ValueError(f"has . as a part, so git matches nothing; remove it; found {text!r}")
    if "***" in text or "//" in text:
        raise ValueError(f"has *** or // in it, which mean nothing clear; found {text!r}")
    if text.startswith("#"):
        raise ValueError(
            f"is a comment in .gitignore; write \\# at its start; found {describe_value(text)}"
        )
    try:
        _compiled(text)
    except ValueError as error:
        raise ValueError(
            f"is not a pattern that git accepts ({error}); found {describe_value(text)}"
        ) from None
    return text


class _Rule:
    """One pattern, compared with an entry itself and not with the directories above it.

    pathspec's expressions also match everything below a matching directory. That is right for a
    single pattern but wrong for several: after `*` and `!data/` git enters `data` and still ignores
    its content. The group `ps_d` marks such a match in pathspec's expressions.
    """

    def __init__(self, pattern: str) -> None:
        text = _stripped(pattern)
        self.only_directories = text.endswith("/")
        if text.endswith("/**/"):  # git matches the directories below; pathspec the top, too
            text += "*/"
        self.excludes, expression = _compiled(text)
        # DOTALL: names of files may hold line breaks.
        ended = f"(?:{expression})\\Z" if "ps_d" in expression else expression
        self._match = re.compile(ended, re.DOTALL).search

    def speaks_of(self, path: str, *, is_dir: bool) -> bool:
        if self.only_directories:
            return is_dir and bool(self._match(f"{path}/"))
        return bool(self._match(path))


def _stripped(pattern: str) -> str:
    """Remove the trailing blanks that git ignores."""
    stripped = pattern.rstrip(" ")
    return f"{stripped} " if stripped.endswith("\\") and stripped != pattern else stripped


def _compiled(pattern: str) -> tuple[bool, str]:
    """Return whether the pattern excludes, and pathspec's expression for it, if git accepts it."""
    try:
        text, sets = _replace_sets(pattern)
    except _InvalidSetError:
        return False, _NOTHING
    compiled = next(iter(GitIgnoreSpec.from_lines([text]).patterns), None)
    if not isinstance(compiled, RegexPattern) or compiled.regex is None:
        return False, _NOTHING
    expression = str(compiled.regex.pattern)
    for sign, characters in sets.items():
        expression = expression.replace(sign, characters)
    return bool(compiled.include), expression


class Exclude:
    """Match excluded paths; paths are relative to the project folder, with `/`."""

    def __init__(self, patterns: Sequence[str], *, before: Sequence[str] = _NEVER_SENT) -> None:
        """Compile `patterns` that `read_patterns` has checked, after those in `before`."""
        # The last rule that matches an entry decides.
        self._rules = [_Rule(pattern) for pattern in reversed((*before, *patterns))]
        self._seen: dict[str, bool] = {}

    def matches(self, path: str, *, is_dir: bool = False) -> bool:
        """Return whether `path` or a directory that contains it is excluded."""
        parent = path.rpartition("/")[0]
        if parent:
            if parent not in self._seen:
                self._seen[parent] = self.matches(parent, is_dir=True)
            if self._seen[parent]:
                return True
        rules = (rule for rule in self._rules if rule.speaks_of(path, is_dir=is_dir))
        return next((rule.excludes for rule in rules), False)


class Include(Exclude):
    """Match included paths (`Site: Include`), by the same rules."""

    def __init__(self, patterns: Sequence[str]) -> None:
        super().__init__(patterns, before=())
