"""Reads YAML that a job wrote: MLflow's descriptions of runs, models and data sets.

What is nested deeply ends a process that reads it with libyaml, as MLflow does, and a few lines
with aliases can stand for more than any memory holds: so a file is looked through before it is
read.
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
"""Bytes of a description; the largest are those of data sets, with their schema and profile."""
MAX_YAML_DEPTH: Final = 50
"""Lists and mappings in each other."""

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast as what is written in Python, and what MLflow reads with. To look through a
file it goes from token to token, however deeply they are nested."""
_BEGIN: Final = (
    BlockMappingStartToken,
    BlockSequenceStartToken,
    FlowMappingStartToken,
    FlowSequenceStartToken,
)
_END: Final = (BlockEndToken, FlowMappingEndToken, FlowSequenceEndToken)


def read_mapping(path: Path, *, aliases: bool = False) -> dict[Any, Any] | None:
    """The mapping that a file holds; None: it holds something else, or cannot be read.

    Args:
        path: the file.
        aliases: whether it may have aliases.
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
