"""Read YAML 1.2 and JSON documents as plain values.

A mapping remembers duplicate keys, and a number how it was written. YAML is limited to what JSON
has, too: no tags of programming languages, no merge keys, no lists or mappings as keys. Aliases are
supported. Scalars follow the YAML 1.2 core schema, so `no`, `on`, `12:30:00` and `2026-01-01` are
texts. A scalar that is a key is always a text.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, YAMLError

_MAX_BYTES: Final = 256 << 10
"""Maximum size of a document: a larger file is not a backend config and would take long to read."""

_MAX_DEPTH: Final = 50
"""Maximum depth of nesting, so that a document cannot exhaust the stack."""

_NULL: Final = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLEANS: Final = {
    word: value
    for value, words in ((True, "true True TRUE"), (False, "false False FALSE"))
    for word in words.split()
}
_INTEGER: Final = re.compile(r"[-+]?[0-9]{1,300}|0o[0-7]{1,300}|0x[0-9a-fA-F]{1,300}")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL: Final = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_VERSION: Final = re.compile(r"^%YAML[ \t]+[0-9.]{1,20}", re.MULTILINE)
_TAGS: Final = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")
)


class DocumentError(ValueError):
    """The document cannot be read at all; the message names the position and the reason."""


class WrittenInt(int):
    """A whole number that remembers how it was written."""

    written: str


class WrittenFloat(float):
    """A number with a fraction or an exponent that remembers how it was written."""

    written: str


class Table(dict[str, Any]):
    """A mapping of a document; `twice` holds its duplicate keys."""

    def __init__(self) -> None:
        super().__init__()
        self.twice: list[str] = []

    def add(self, key: str, value: Any) -> None:
        """Add an entry, unless the key exists: then only note it as a duplicate."""
        if key in self:
            self.twice.append(key)
        else:
            self[key] = value


def read_document(text: bytes, kind: str, odd: list[str] | None = None) -> Any:
    """Read a document of `kind` json or yaml: a `Table`, list, text, number, boolean or None.

    Mistakes in YAML that do not prevent reading are added to `odd`, to report them with others:
    tags, which are dropped, and keys that are not texts, dropped with their values.

    Raises:
        DocumentError: the document is too large, not UTF-8 or not well-formed; or it has such
            mistakes and `odd` is None.
    """
    if len(text) > _MAX_BYTES:
        raise DocumentError(f"is larger than {_MAX_BYTES >> 10} KiB, so not a backend config")
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"is not UTF-8 (byte {error.start + 1})") from None
    return _read_json(decoded) if kind == "json" else _read_yaml(decoded, odd)


def find_duplicates(value: Any) -> list[tuple[str, ...]]:
    """Return the paths of all duplicate keys in `value`."""
    found: list[tuple[str, ...]] = []
    seen: set[int] = set()  # aliases repeat a value
    waiting: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, (Table, list)) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Table):
                found += [(*path, key) for key in dict.fromkeys(value.twice)]
            items = value.items() if isinstance(value, Table) else enumerate(value, 1)
            waiting += [((*path, str(key)), item) for key, item in items]
    return sorted(found)


def _integer(written: str) -> WrittenInt | str:
    if not _INTEGER.fullmatch(written):  # more than 300 digits
        return written
    base = 8 if written.startswith("0o") else 16 if written.startswith("0x") else 10
    number = WrittenInt(int(written, base))
    number.written = written
    return number


def _float(written: str) -> WrittenFloat:
    number = WrittenFloat(written.lower().replace(".inf", "inf").replace(".nan", "nan"))
    number.written = written
    return number


def _read_json(text: str) -> Any:
    if not text.strip():
        return None
    try:
        return json.loads(
            text,
            object_pairs_hook=_table,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_no_number,
        )
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise DocumentError(f"is not well-formed JSON: {error.msg} ({place})") from None
    except RecursionError:
        raise DocumentError(f"is nested deeper than {_MAX_DEPTH} levels") from None


def _table(pairs: list[tuple[str, Any]]) -> Table:
    table = Table()
    for key, value in pairs:
        table.add(key, value)
    return table


def _no_number(name: str) -> Any:
    raise DocumentError(f"is not well-formed JSON: {name} is not a number in JSON")


def _read_yaml(text: str, odd: list[str] | None) -> Any:
    builder = _Builder()
    try:
        value = builder.build(YAML(typ="safe", pure=True).parse(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = " ".join(str(error.problem or error.context or "syntax error").split())
        raise DocumentError(f"is not well-formed YAML: {problem}{place}") from None
    except YAMLError as error:
        problem = " ".join(str(error).split())[:200]
        raise DocumentError(f"is not well-formed YAML: {problem}") from None
    except DocumentError:
        raise
    except AssertionError as error:  # ruamel raises it for an unsupported version of YAML
        match = _VERSION.search(text)
        problem = f"it has {' '.join(match[0].split())}" if match else str(error)
        raise DocumentError(
            f"is YAML of an unsupported version: {problem}; write %YAML 1.2 or remove that line"
        ) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        # The parser fails on some broken documents, such as an escape beyond Unicode.
        raise DocumentError(f"is not well-formed YAML ({type(e).__name__}: {e})") from None
    if builder.odd and odd is None:
        raise DocumentError(builder.odd[0])
    if odd is not None:
        odd += builder.odd
    return value


class _NoText:
    """A placeholder for a key that is not a text; its value is dropped."""


class _Builder:
    """Build the value of a YAML document from the parser's events, without recursion."""

    def __init__(self) -> None:
        self.anchors: dict[str, Any] = {}
        self.root: list[Any] = []
        self.open: list[tuple[Table | list[Any], str | None]] = []
        self.keys: list[str | _NoText | None] = []
        self.documents = 0
        self.odd: list[str] = []

    def build(self, stream: Iterator[Any]) -> Any:
        for event in stream:
            match event:
                case events.DocumentStartEvent():
                    self.documents += 1
                    if self.documents > 1:
                        raise DocumentError(f"holds more than one document {_place(event)}")
                case events.ScalarEvent():
                    self._check_tag(event)
                    self._put(event, _scalar(event))
                case events.AliasEvent():
                    self._put_alias(event)
                case events.MappingStartEvent():
                    self._start(event, Table())
                case events.SequenceStartEvent():
                    self._start(event, [])
                case events.MappingEndEvent() | events.SequenceEndEvent():
                    value, anchor = self.open.pop()
                    self.keys.pop()
                    if anchor:
                        self.anchors[anchor] = value
                case _:
                    pass
        return self.root[0] if self.root else None

    def _start(self, event: Any, value: Table | list[Any]) -> None:
        self._check_tag(event)
        if len(self.open) >= _MAX_DEPTH:
            raise DocumentError(f"is nested deeper than {_MAX_DEPTH} levels {_place(event)}")
        self._place_value(event, value)
        # An anchor is valid only after the end of its value, so that no value can contain itself.
        self.anchors.pop(event.anchor, None)
        self.open.append((value, event.anchor))
        self.keys.append(None)

    def _put(self, event: Any, value: Any) -> None:
        if self.open and isinstance(self.open[-1][0], Table) and self.keys[-1] is None:
            self.keys[-1] = event.value
        else:
            self._place_value(event, value)
        if event.anchor:
            self.anchors[event.anchor] = value

    def _put_alias(self, event: Any) -> None:
        if event.anchor not in self.anchors:
            raise DocumentError(f"has an alias *{event.anchor} without an anchor {_place(event)}")
        self._place_value(event, self.anchors[event.anchor])

    def _place_value(self, event: Any, value: Any) -> None:
        if not self.open:
            self.root.append(value)
            return
        container = self.open[-1][0]
        if isinstance(container, list):
            container.append(value)
            return
        key = self.keys[-1]
        if key is None:
            self.odd.append(f"has a key that is not a text {_place(event)}")
            self.keys[-1] = _NoText()
            return
        if isinstance(key, str):
            container.add(key, value)
        self.keys[-1] = None

    def _check_tag(self, event: Any) -> None:
        tag = event.tag
        if tag is not None and str(tag) != "!" and str(tag) not in _TAGS:
            self.odd.append(f"has the tag {tag}, which is not supported; remove it {_place(event)}")


def _place(event: Any) -> str:
    return f"(line {event.start_mark.line + 1}, column {event.start_mark.column + 1})"


def _scalar(event: Any) -> Any:
    text = str(event.value)
    tag = str(event.tag) if event.tag is not None else ""
    if tag.endswith(":str") or tag == "!" or (event.style and not tag):
        return text
    if text in _NULL or text in _BOOLEANS:
        return _BOOLEANS.get(text)
    if _INTEGER.fullmatch(text):
        return _integer(text)
    return _float(text) if _FLOAT.fullmatch(text) or _SPECIAL.fullmatch(text) else text
