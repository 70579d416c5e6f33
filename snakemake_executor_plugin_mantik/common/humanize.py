"""Bytes and seconds as people read them."""


def humanize_size(number: float) -> str:
    """Bytes as people read them: `3.2 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def humanize_duration(seconds: float) -> str:
    """Seconds as people read them: `4 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
