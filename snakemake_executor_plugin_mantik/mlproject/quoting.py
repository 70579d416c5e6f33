"""Which placeholders of a command stand where the shell would not read a quoted value as one."""

import re
import string
from collections.abc import Iterator
from typing import Final

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
