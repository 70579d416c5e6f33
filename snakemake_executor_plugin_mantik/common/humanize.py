"""Readable numbers, sizes and durations."""


def humanize_count(number: int, one: str, many: str = "") -> str:
    """Format a number of things: `1 file`, `2,000 files`; `many` if it is not `one` and an s.

    With the words that agree with it: `humanize_count(n, "file stays", "files stay")`.
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def humanize_size(number: float) -> str:
    """Format bytes: `3.2 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def humanize_duration(seconds: float) -> str:
    """Format seconds: `4.0 s`, `3 min 20 s`, `2 h 5 min`, `24 h`, `3 days`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return _two(whole, 60, "min", 1, "s")
    if whole < 48 * 3600:
        return _two(whole, 3600, "h", 60, "min")
    return _two(whole, 86400, "days", 3600, "h")


def _two(whole: int, large: int, large_unit: str, small: int, small_unit: str) -> str:
    count, rest = divmod(whole, large)
    rest //= small
    return f"{count} {large_unit} {rest} {small_unit}" if rest else f"{count} {large_unit}"
