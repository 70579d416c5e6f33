"""Read a run's backend config, from a file or from the values that `mlflow run` passes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from snakemake_executor_plugin_mantik.common.errors import ConfigError, Mistake, UserError
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.config.reading import (
    KINDS,
    check_site_name,
    parse_backend_config,
    read_config_named,
    split_spec,
)

_FROM_ENVIRONMENT: Final = "SNAKEMAKE_MANTIK_BACKEND_CONFIG"
"""The variable that Snakemake's option --mantik-backend-config reads, too."""

_UNNAMED: Final = "site"
"""The name of a site whose backend config is given as values without a name."""

_MLFLOW: Final = frozenset(
    ("ENV_MANAGER", "SYNCHRONOUS", "DOCKER_ARGS", "STORAGE_DIR", "build_image", "docker_auth")
)
"""Keys that MLflow adds to the values for backends that build environments."""

_OURS: Final = ("config", "site", "account", "extra", "wait")
_SHOWN: Final = "backend config"


@dataclass(frozen=True)
class ChosenConfig:
    """A backend config and the options given with it.

    Attributes:
        site: the site's name.
        content: the config's text.
        suffix: its format, as a file suffix.
        config: the parsed values.
        source: the file's absolute path; empty if there was no file.
        account: the compute budget account; empty: the environment's.
        extra: parameters that the entry point does not declare.
        wait: whether to wait for the run's end, whatever MLflow does.
    """

    site: str
    content: bytes
    suffix: str
    config: BackendConfig
    source: str = ""
    account: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    wait: bool = False


def config_of_file(spec: str, environ: Mapping[str, str]) -> ChosenConfig:
    """Read the backend config that `[NAME=]FILE` names; if `spec` is empty, the environment's.

    Raises:
        UserError: no config or several are named, or it has mistakes.
    """
    if not spec:
        named = environ.get(_FROM_ENVIRONMENT, "").split()
        if len(named) != 1:
            found = "none" if not named else f"{len(named)} in {_FROM_ENVIRONMENT}"
            raise UserError(
                f"a run needs one backend config, found {found}",
                do="Pass it with --site [NAME=]FILE",
            )
        spec = named[0]
    name, file = split_spec(spec)
    wrong = [Mistake(file or spec, "", told)] if (told := check_site_name(name)) else []
    try:
        # The files that it names are checked in the snapshot, later.
        loaded = read_config_named(name, file, Path(), project=None)
    except ConfigError as error:
        raise ConfigError([*wrong, *error.mistakes]) from None
    if wrong:
        raise ConfigError(wrong)
    path = loaded.path
    return ChosenConfig(name, path.read_bytes(), path.suffix.lower(), loaded.config, str(path))


def config_of_values(values: Mapping[str, Any], environ: Mapping[str, str]) -> ChosenConfig:
    """Read the backend config that `mlflow run` passes.

    Args:
        values: the keys of a Compute Backend Config, or `config`, the path of one. Either may come
            with `site` (its name), `account`, `extra` and `wait`.
        environ: names the config if the values do not.

    Raises:
        UserError: with all mistakes found.
    """
    given = {name: value for name, value in values.items() if name not in _MLFLOW}
    ours = {name: given.pop(name) for name in _OURS if name in given}
    wrong = []
    for name in ("config", "site", "account"):
        if not isinstance(ours.get(name, ""), str):
            wrong.append(Mistake(_SHOWN, name, f"has to be a text, found {ours[name]!r}"))
    if not isinstance(ours.get("wait", False), bool):
        wrong.append(Mistake(_SHOWN, "wait", f"has to be true or false, found {ours['wait']!r}"))
    if not isinstance(ours.get("extra", {}), Mapping):
        wrong.append(Mistake(_SHOWN, "extra", f"has to be a mapping, found {ours['extra']!r}"))
    if "config" in ours and given:
        both = f"names a file, but keys of a config are given as well: {', '.join(map(str, given))}"
        wrong.append(Mistake(_SHOWN, "config", both))
    if wrong:
        raise ConfigError(wrong)
    name = ours.get("site", "")
    if given:
        chosen = _of_keys(given, name or _UNNAMED)
    else:
        file = ours.get("config", "")
        chosen = config_of_file(f"{name}={file}" if name and file else file, environ)
    return ChosenConfig(
        chosen.site, chosen.content, chosen.suffix, chosen.config, chosen.source,
        account=ours.get("account", ""),
        extra={str(name): str(value) for name, value in ours.get("extra", {}).items()},
        wait=ours.get("wait", False),
    )  # fmt: skip


def _of_keys(given: Mapping[str, Any], name: str) -> ChosenConfig:
    if told := check_site_name(name):
        raise ConfigError([Mistake(_SHOWN, "site", told)])
    content = json.dumps(given, indent=2, ensure_ascii=False).encode()
    config, _ = parse_backend_config(content, KINDS[".json"], None, shown=_SHOWN)
    return ChosenConfig(name, content, ".json", config)
