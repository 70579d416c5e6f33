"""Read backend configs from files and report all mistakes of all files at once.

Their YAML 1.2 or JSON is read as plain values: a mapping remembers duplicate keys, and a number how
it was written. YAML is limited to what JSON has, too: no tags of programming languages, no merge
keys, no lists or mappings as keys. Aliases are supported. Scalars follow the YAML 1.2 core schema,
so `no`, `on`, `12:30:00` and `2026-01-01` are texts. A scalar that is a key is always a text.
"""

import builtins
import json
import keyword
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import Node, ScalarNode, SequenceNode
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from ..common.errors import ConfigError, Mistake
from ..common.secret_names import is_secret
from .exclude import Exclude
from .model import ENVIRONMENT_NAME, BackendConfig
from .named_files import read_requirements
from .units import is_plain_number

KINDS: Final = {".yaml": "yaml", ".yml": "yaml", ".json": "json"}
_NOT_THERE: Final = "there is no such file: correct the path, or create one with smk-mantik init"

# Names with a meaning in Snakemake's expressions for resources: `site=max` would not be a text.
_TAKEN: Final = frozenset(
    ("attempt", "input", "resources", "rulename", "threads", "wildcards", *dir(builtins))
)
# Further names of variables that likely hold secrets; the job description and the script show them.
# Excludes TOKENIZERS_PARALLELISM and MAX_TOKENS, whose tokens are those of language models, and
# TOKEN_FILE, which is a path.
_SECRET: Final = re.compile(
    r"(?:^|_)PASS(?:_|$)|TOKEN(?![A-Z]|_(?:FILE|PATH|DIR|LENGTH|LIMIT|COUNT))", re.IGNORECASE
)

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


class NoConfig(ConfigError):  # noqa: N818 - reads as what it says
    """Neither the command line nor the profile or the environment names a backend config."""

    def __init__(self) -> None:
        super().__init__(
            [Mistake("--mantik-backend-config", "", "no Compute Backend Config was given")],
            do="Write one with 'smk-mantik init' and name it with this option, in a profile, or in"
            " SNAKEMAKE_MANTIK_BACKEND_CONFIG",
        )


@dataclass(frozen=True)
class LoadedConfig:
    """A backend config with its name.

    Attributes:
        name: the site's name, as in rules.
        path: absolute path of the file.
        config: its values.
        warnings: values that are allowed but likely unintended; each warning begins with the file
            and the key.
    """

    name: str
    path: Path
    config: BackendConfig
    warnings: tuple[str, ...] = ()


def read_backend_config(
    path: Path, project: Path | None = None, *, shown: str | None = None
) -> tuple[BackendConfig, list[str]]:
    """Read the backend config in the file `path`.

    Args:
        path: the file; its suffix (.yaml, .yml, .json) determines the format.
        project: check that the files named in the config exist; their paths are absolute or
            relative to this project folder. None skips the check.
        shown: name of the file in messages; by default `path`.

    Returns:
        The config, and warnings.

    Raises:
        ConfigError: with all mistakes of the file.
    """
    file = shown if shown is not None else str(path)
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError([Mistake(file, "", _of_no_kind(path))])
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError([Mistake(file, "", _NOT_THERE)]) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError([Mistake(file, "", f"cannot be read: {reason}")]) from None
    return parse_backend_config(content, kind, project, shown=file)


def _of_no_kind(path: Path) -> str:
    """Return the message for a path without the suffix of a backend config."""
    for suffix in KINDS:
        if (meant := Path(f"{path}{suffix}")).is_file():
            return f"is not a backend config: did you mean {meant.name}?"
    if path.suffix or path.exists():
        kinds = f"the file type {path.suffix!r} is not supported; use .yaml, .yml or .json"
        return f"{kinds} (put targets of Snakemake after '--')"
    return f"{_NOT_THERE} (put targets of Snakemake after '--')"


def parse_backend_config(
    content: bytes, kind: str, project: Path | None = None, *, shown: str
) -> tuple[BackendConfig, list[str]]:
    """Like `read_backend_config`, for the content of a file of `kind` yaml or json."""
    odd: list[str] = []
    try:
        raw = read_document(content, kind, odd)
    except DocumentError as error:
        raise ConfigError([Mistake(shown, "", str(error))]) from None
    if raw is None and not odd:
        empty = "is empty; it has to hold a mapping with at least Resources and the API"
        raise ConfigError([Mistake(shown, "", empty)])
    found = [("", text) for text in odd]
    found += [
        (".".join(keys), "is a duplicate key: keep one of them") for keys in find_duplicates(raw)
    ]
    config = None
    try:
        config = BackendConfig.model_validate(raw, context=project)
    except ValidationError as error:
        found += [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]
    if project is not None and config is not None and not found:
        found += _not_uploaded(config, project)
    if found or config is None:
        raise ConfigError(
            [Mistake(shown, key, " ".join(message.split())) for key, message in found]
        )
    return config, [f"{shown}: {warning}" for warning in _warnings(raw, config)]


def read_configs(
    specs: Sequence[str], base: Path, *, check_files: bool = True
) -> dict[str, LoadedConfig]:
    """Read the backend configs that `specs` name, each as `FILE` or `NAME=FILE`.

    Args:
        specs: files, relative to `base`; the default NAME is the file's stem.
        base: the project folder.
        check_files: whether the files named in configs (local image, CA file) must exist.

    Returns:
        The configs by name, in the order of `specs`.

    Raises:
        ConfigError: with all mistakes of all files and names.
    """
    mistakes: list[Mistake] = []
    loaded: dict[str, LoadedConfig] = {}
    first: dict[str, str] = {}
    for spec in specs:
        name, file = split_spec(spec)
        if complaint := check_site_name(name):
            mistakes.append(Mistake(file or spec, "", complaint))
        elif name in first:
            mistakes.append(
                Mistake(file, "", f"is named {name}, as is {first[name]}; use OTHERNAME={file}")
            )
        first.setdefault(name, file)
        try:
            found = read_config_named(name, file, base, project=base if check_files else None)
            loaded.setdefault(name, found)
        except ConfigError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ConfigError(mistakes)
    return loaded


def read_config_named(name: str, file: str, base: Path, *, project: Path | None) -> LoadedConfig:
    """Read one backend config, without checking `name`; for `project` see `read_backend_config`.

    `file` is relative to `base`; messages show it as given.

    Raises:
        ConfigError: with all mistakes of the file.
    """
    try:
        path = base.absolute() / Path(file).expanduser()
    except RuntimeError:
        raise ConfigError([Mistake(file, "", "there is no such user")]) from None
    config, warnings = read_backend_config(path, project, shown=file)
    return LoadedConfig(name, path, config, tuple(warnings))


def split_spec(spec: str) -> tuple[str, str]:
    """Split a spec into name and file; a `=` after a `/` belongs to the file's path."""
    name, equals, file = spec.partition("=")
    if equals and "/" not in name:
        return name.strip(), file.strip()
    return Path(spec.strip()).stem, spec.strip()


def check_site_name(name: str) -> str:
    """Return the reason why `name` cannot be the name of a site; empty if it can."""
    if not ENVIRONMENT_NAME.fullmatch(name):
        return (
            f"{name!r} cannot be the name of a site: use a letter, then letters, digits, - and _; "
            "write NAME=FILE"
        )
    if name in _TAKEN or keyword.iskeyword(name):
        return (
            f"{name!r} cannot be the name of a site: it has another meaning in Snakemake's "
            "resources; write NAME=FILE"
        )
    return ""


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


def _not_uploaded(config: BackendConfig, project: Path) -> Iterator[tuple[str, str]]:
    """Yield mistakes about packages that an environment is made of and that are not uploaded."""
    exclude = Exclude(config.exclude)
    for key, environment in config.keyed_environments:
        python = environment.python
        if python is None or python.requirements is None:
            continue
        for folder in read_requirements(python.requirements, project).folders:
            parts = [] if folder == "." else folder.split("/")
            above = ["/".join(parts[: n + 1]) for n in range(len(parts))]
            hidden = any(part.startswith(".") for part in parts)
            if hidden or any(exclude.matches(path, is_dir=True) for path in above):
                yield (
                    f"{key}.Python.Requirements",
                    f"names the package {folder!r}, which is not uploaded "
                    f"({'it is hidden' if hidden else 'Exclude matches it'})",
                )


def _warnings(raw: Any, config: BackendConfig) -> Iterator[str]:
    resources = config.resources
    if "Memory" in raw["Resources"]:
        yield "Resources.Memory: is read as MemoryPerNode; use that name"
    for key in ("MemoryPerNode", "Memory"):
        written = str(getattr(given := raw["Resources"].get(key), "written", given)).strip()
        if is_plain_number(written):
            yield f"Resources.{key}: {written} has no unit and means MiB; write {written}M"
    if config.unicore_api_url and not config.unicore_api_url.endswith("/rest/core"):
        yield "UnicoreApiUrl: does not end with /rest/core, the path of UNICORE's REST API"
    for keys, name in (
        (key, variable)
        for key, environment in config.keyed_environments
        for variable in environment.variables
    ):
        if is_secret(name) or _SECRET.search(name):
            yield (
                f"{keys}.Variables.{name}: looks like a secret, and everyone who can read the "
                "job can read it here; name it under envvars: in the Snakefile instead"
            )
    if resources.total_cpus and resources.nodes and resources.cpus_per_node:
        product = resources.nodes * resources.cpus_per_node
        if product != resources.total_cpus:
            yield (
                f"Resources.TotalCPUs: {resources.total_cpus} is not Nodes times CPUsPerNode "
                f"({product}); jobs request {product}"
            )


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
