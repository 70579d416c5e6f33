"""The library of bash that all job scripts of this version use (`bash/*.sh`)."""

import hashlib
from functools import cache
from importlib.resources import files
from typing import Final

from .paths import BELOW_TOP, OURS

SUM_DIGITS: Final = 32
"""Digits of an input's checksum that a script has: 128 bits, for many inputs in one script."""
_VALUES: Final = f"_m_sum_digits={SUM_DIGITS} _m_below_top={BELOW_TOP}\n"
_COMMON: Final = (
    "common", "claim", "heartbeat", "inputs", "outputs", "segment", "command", "main",
)  # fmt: skip
_RARE: Final = ("live", "benchmark", "once", "shadow", "group")
_BRIEF: Final = """\
# Scripts that set _m_brief need no more; reading the rest is a tenth of what a short job costs.
[ -z "${_m_brief-}" ] || return 0
"""


@cache
def read_library() -> bytes:
    """Return the library: functions only."""
    folder = files(__package__) / "bash"
    common, rare = (
        [(folder / f"{part}.sh").read_text("utf-8").rstrip() + "\n" for part in parts]
        for parts in (_COMMON, _RARE)
    )
    return "\n".join([_VALUES, *common, _BRIEF, *rare]).encode()


def library_path() -> str:
    """Return its path in a workspace, where other versions may lie beside it."""
    return f"{OURS}/lib-{library_checksum()}.sh"


@cache
def library_checksum() -> str:
    """Return the beginning of its SHA-256, which a script compares before it reads the library."""
    return hashlib.sha256(read_library()).hexdigest()[:12]


def use_library() -> str:
    """Return bash that reads the library in a workspace, or in a shadow directory."""
    return f". ./{library_path()}"
