"""Read backend configs from files and report all mistakes of all files at once."""

import builtins
import keyword
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from ..common.errors import ConfigError, Mistake
from ..common.secret_names import is_secret
from .documents import DocumentError, find_duplicates, read_document
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
