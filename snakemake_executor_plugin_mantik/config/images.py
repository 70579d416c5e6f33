"""What a local Apptainer image says of itself."""

from pathlib import Path
from typing import Final

_MAGIC: Final = b"SIF_MAGIC\0"
_LAUNCH_BYTES: Final = 32
_ARCHITECTURE: Final = slice(45, 47)
_NAMES: Final = {
    b"01": "386",
    b"02": "amd64",
    b"03": "arm",
    b"04": "arm64",
    b"05": "ppc64",
    b"06": "ppc64le",
    b"11": "s390x",
    b"12": "riscv64",
}
"""Codes of the global header of the Singularity Image Format (sylabs/sif, pkg/sif/arch.go)."""


def read_architecture(image: Path) -> str | None:
    """The processor architecture that an image was built for, as Go names it; None: not known."""
    try:
        with image.open("rb") as file:
            header = file.read(_ARCHITECTURE.stop)
    except (OSError, ValueError):
        return None
    if header[_LAUNCH_BYTES:][: len(_MAGIC)] != _MAGIC:
        return None
    return _NAMES.get(header[_ARCHITECTURE])
