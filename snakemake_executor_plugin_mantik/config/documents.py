"""Read YAML 1.2 and JSON documents as plain values.

A mapping remembers duplicate keys, and a number how it was written. YAML is limited to what JSON
has, too: no tags of programming languages, no merge keys, no lists or mappings as keys. Aliases are
supported. Scalars follow the YAML 1.2 core schema, so `no`, `on`, `12:30:00` and `2026-01-01` are
texts. A scalar that is a key is always a text.
"""

import json
import re
from collections.abc import Iterable
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import Node, ScalarNode, SequenceNode
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

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


class DocumentError(Exception):
    """The document cannot be read at all; the message names the position and the reason."""


class WrittenInt(int):
    """A whole number that remembers how it was written."""

    written: str


class WrittenFloat(float):
    """A number with a fraction or an exponent that remembers how it was written."""

    written: str


class Table(dict[str, Any]):
    """A mapping of a document; `twice` holds its duplicate keys."""

    def __init__(self, pairs: Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__()
        self.twice: list[str] = []
        for key, value in pairs:
            self.add(key, value)

    def add(self, key: str, value: Any) -> None:
        """Add an entry, unless the key exists: then only note it as a duplicate."""
        if key in self:
            self.twice.append(key)
        else:
            self[key] = value


def read_document(text: bytes, kind: str, odd: list[str]) -> Any:
    """Read a document of `kind` json or yaml: a `Table`, list, text, number, boolean or None.

    Mistakes in YAML that do not prevent reading are added to `odd`, to report them with others:
    tags, which are dropped, and keys that are not texts, dropped with their values.

    Raises:
        DocumentError: the document is too large, not UTF-8 or not well-formed.
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
            object_pairs_hook=Table,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_no_number,
        )
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise DocumentError(f"is not well-formed JSON: {error.msg} ({place})") from None
    except RecursionError:
        raise DocumentError(f"is nested deeper than {_MAX_DEPTH} levels") from None


def _no_number(name: str) -> Any:
    raise DocumentError(f"is not well-formed JSON: {name} is not a number in JSON")


_PLAIN: Final = Tag(suffix="plain")


class _Resolver(VersionedResolver):
    """Leaves plain scalars without a tag to `_scalar`."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        plain = kind is ScalarNode and implicit[0]
        return _PLAIN if plain else super().resolve(kind, value, implicit)


def _read_yaml(text: str, odd: list[str]) -> Any:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _Resolver
    yaml.composer.warn_double_anchors = False
    try:
        node = yaml.compose(text)
        return _value(node, odd, {}) if node is not None else None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = " ".join(str(error.problem or error.context or "syntax error").split())
        problem = problem.removeprefix("but ")
        raise DocumentError(f"is not well-formed YAML: {problem}{place}") from None
    except YAMLError as error:
        problem = " ".join(str(error).split())[:200]
        raise DocumentError(f"is not well-formed YAML: {problem}") from None
    except RecursionError:
        raise DocumentError(f"is nested deeper than {_MAX_DEPTH} levels") from None
    except AssertionError as error:  # ruamel raises it for an unsupported version of YAML
        match = _VERSION.search(text)
        problem = f"it has {' '.join(match[0].split())}" if match else str(error)
        raise DocumentError(
            f"is YAML of an unsupported version: {problem}; write %YAML 1.2 or remove that line"
        ) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        # The parser fails on some broken documents, such as an escape beyond Unicode.
        raise DocumentError(f"is not well-formed YAML ({type(e).__name__}: {e})") from None


def _value(node: Node, odd: list[str], made: dict[int, Any], depth: int = 1) -> Any:
    """Return the value of a node, the same for each alias; one in itself is nested too deep."""
    if id(node) in made:
        return made[id(node)]
    if depth > _MAX_DEPTH:
        raise DocumentError(f"is nested deeper than {_MAX_DEPTH} levels {_place(node)}")
    if node.tag != _PLAIN and str(node.tag) not in _TAGS:
        odd.append(f"has the tag {node.tag}, which is not supported; remove it {_place(node)}")
    value: Any = Table()
    if isinstance(node, ScalarNode):
        value = _scalar(node)
    elif isinstance(node, SequenceNode):
        value = [_value(item, odd, made, depth + 1) for item in node.value]
    else:
        for key, item in node.value:
            if isinstance(key, ScalarNode):
                _value(key, odd, made, depth)
                value.add(str(key.value), _value(item, odd, made, depth + 1))
            else:
                odd.append(f"has a key that is not a text {_place(key)}")
    made[id(node)] = value
    return value


def _place(node: Node) -> str:
    return f"(line {node.start_mark.line + 1}, column {node.start_mark.column + 1})"


def _scalar(node: ScalarNode) -> Any:
    text = str(node.value)
    if str(node.tag).endswith(":str"):  # quoted, or no scalar of another kind
        return text
    if text in _NULL or text in _BOOLEANS:
        return _BOOLEANS.get(text)
    if _INTEGER.fullmatch(text):
        return _integer(text)
    return _float(text) if _FLOAT.fullmatch(text) or _SPECIAL.fullmatch(text) else text
