"""Read files that others write."""

from pathlib import Path


def read_end(path: Path, most: int) -> bytes:
    """Return the last bytes of a file, `most` at most; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            return file.read()
    except OSError:
        return b""
