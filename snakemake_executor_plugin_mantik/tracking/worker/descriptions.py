"""Read YAML written by a job: MLflow's descriptions of runs, models and data sets.

Deep nesting kills a process that reads it with libyaml, as MLflow does, and a few lines with
aliases can expand beyond any memory. So each file is scanned before it is loaded.
"""

from pathlib import Path
from typing import Any, Final

import yaml
from yaml.tokens import (
    AliasToken,
    BlockEndToken,
    BlockMappingStartToken,
    BlockSequenceStartToken,
    FlowMappingEndToken,
    FlowMappingStartToken,
    FlowSequenceEndToken,
    FlowSequenceStartToken,
)

_LONGEST: Final = 4 << 20
"""The largest description, in bytes; those of data sets hold a schema and a profile."""
MAX_YAML_DEPTH: Final = 50
"""The deepest nesting of lists and mappings."""

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""MLflow reads with it, and it is ten times as fast as the loader in Python. Its scanner goes from
token to token, at any depth."""
_BEGIN: Final = (
    BlockMappingStartToken,
    BlockSequenceStartToken,
    FlowMappingStartToken,
    FlowSequenceStartToken,
)
_END: Final = (BlockEndToken, FlowMappingEndToken, FlowSequenceEndToken)


def read_mapping(path: Path, *, aliases: bool = False) -> dict[Any, Any] | None:
    """Read a mapping; return None if the file holds something else or cannot be read.

    A file with YAML aliases is read only if `aliases` is set.
    """
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST or not _is_tame(path, aliases):
            return None
        known = yaml.load(path.read_bytes(), _LOADER)  # noqa: S506 - a safe one
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    return known if isinstance(known, dict) else None


def _is_tame(path: Path, aliases: bool) -> bool:
    depth = 0
    with path.open("rb") as file:
        for token in yaml.scan(file, _LOADER):
            depth += isinstance(token, _BEGIN) - isinstance(token, _END)
            if depth > MAX_YAML_DEPTH or (isinstance(token, AliasToken) and not aliases):
                return False
    return True
