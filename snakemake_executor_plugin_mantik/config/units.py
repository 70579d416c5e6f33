"""Convert times and sizes between text and numbers, for people and for UNICORE.

All units of memory and size are 1024-based: `12G`, `12GB` and `12GiB` are the same, as in Slurm and
UNICORE. Messages of `ValueError` name what is allowed, and are written to follow the name of a key.
"""

import re
from typing import Final

_MIB: Final = 1 << 20

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES: Final = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

# Nine digits are more than any machine has, and keep seconds and MiB below 2**63.
_DURATION: Final = re.compile(r"([0-9]{1,9})([smhd])")
_AMOUNT: Final = re.compile(r"([0-9]{1,9})([kmgt])(?:i?b)?", re.IGNORECASE)
_PLAIN: Final = re.compile(r"([0-9]{1,15})b?", re.IGNORECASE)
_DIGITS: Final = re.compile(r"[0-9]{1,9}")
_SIZE: Final = re.compile(r"([0-9]{1,15})([kmgt])(?:i?b)?", re.IGNORECASE)


def parse_duration(text: str) -> int:
    """Return the seconds of a time such as `90s`, `30m`, `12h` or `2d`.

    Raises:
        ValueError: `text` is not one whole number with one unit, or is zero.
    """
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise ValueError(
            "has to be a whole number with a single unit, one of s, m, h, d (90s, 30m, 12h, 2d)"
        )
    seconds = int(match[1]) * _SECONDS[match[2]]
    if not seconds:
        raise ValueError("has to be longer than zero (90s, 30m, 12h, 2d)")
    return seconds


def format_duration(seconds: int) -> str:
    """Return the shortest text that `parse_duration` reads as `seconds`: 43200 is `12h`."""
    unit = next(unit for unit in "dhms" if seconds % _SECONDS[unit] == 0)
    return f"{seconds // _SECONDS[unit]}{unit}"


def is_plain_number(text: str) -> bool:
    """Return whether a text is a whole number without a unit."""
    return _DIGITS.fullmatch(text.strip()) is not None


def parse_memory(text: str) -> int:
    """Return an amount of memory such as `512M`, `64G`, `64GB` or `64GiB` in MiB, rounded up.

    A number without a unit is MiB, as for mantik's backend behind firecREST and for Slurm.

    Raises:
        ValueError: `text` is written in another way, or is zero.
    """
    match = _AMOUNT.fullmatch(f"{text.strip()}M" if is_plain_number(text) else text.strip())
    if not match:
        raise ValueError(
            "has to be a whole number with one of the units K, M, G, T (also KiB or KB and so on, "
            "all of them 1024-based), for example 64G"
        )
    mib = -(-int(match[1]) * _BYTES[match[2].lower()] // _MIB)
    if not mib:
        raise ValueError("has to be more than zero, for example 64G")
    return mib


def parse_size(text: str) -> int:
    """Return the bytes of a size such as `256K`, `8M` or `1GiB`; the default unit is bytes.

    Raises:
        ValueError: `text` is written in another way.
    """
    if match := _PLAIN.fullmatch(text.strip()):
        return int(match[1])
    if match := _SIZE.fullmatch(text.strip()):
        return int(match[1]) * _BYTES[match[2].lower()]
    raise ValueError(
        "has to be a whole number of bytes, or one with a unit out of K, M, G, T "
        "(also KiB or KB and so on, all of them 1024-based), for example 8M"
    )


def format_size(size: int) -> str:
    """Return the shortest text that `parse_size` reads as `size` bytes: 262144 is `256K`."""
    for unit in "tgmk":
        if size and size % _BYTES[unit] == 0:
            return f"{size // _BYTES[unit]}{unit.upper()}"
    return str(size)
