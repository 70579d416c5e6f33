"""Read Environment Definition Files (EDF) of the Container Engine that lie on this machine.

Facts are from CSCS's documentation (docs.cscs.ch, software/container-engine/edf): a file inherits
from `base_environment`, with mounts appended; relative paths begin with `./` and are relative to
the directory in which `srun` is called, which is the workspace; `${NAME}` is expanded at the site.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_DEEPEST: Final = 10
"""How many levels of `base_environment` the Container Engine follows."""

_VARIABLE: Final = re.compile(r"\$\{(\w+)[^}]*\}|\$(\w+)")


class EdfError(Exception):
    """A definition cannot be used; the message follows the name of the file's key."""


@dataclass(frozen=True)
class Edf:
    """What is known here of a definition and those that it inherits from.

    Attributes:
        files: files of the project that it names, definitions and images: they are uploaded, too.
        image: the image; empty if a definition at the site names it.
        mounts: as written, `SOURCE:DESTINATION[:FLAGS]`.
        whole: whether all definitions that it inherits from are known.
    """

    files: tuple[str, ...]
    image: str
    mounts: tuple[str, ...]
    whole: bool


def read_edf(path: str, project: Path) -> Edf:
    """Read the definition `path`, relative to the project folder, and its local base definitions.

    Raises:
        EdfError: one of them is missing or invalid, there is no image, or there are no mounts.
    """
    found = _read(path, project, 0)
    if found.whole and not found.image:
        raise EdfError(f"the file {path!r} names no image, so there would be no container")
    if found.whole and not found.mounts:
        raise EdfError(
            f"the file {path!r} has no mounts, so the container would not see the workspace; add "
            'its file system, such as mounts = ["/capstor/scratch:/capstor/scratch"]'
        )
    return found


def _read(path: str, project: Path, level: int) -> Edf:
    if level > _DEEPEST:
        raise EdfError(f"base_environment is nested more than {_DEEPEST} levels deep, at {path!r}")
    document = _load(path, project)
    files: list[str] = []
    image, whole = "", True
    mounts: list[str] = []
    for base in _texts(document, "base_environment", path):
        if not base.startswith("./"):
            whole = False  # by its name or absolute: it lies at the site
            continue
        _inside(base, path)
        below = _read(base, project, level + 1)
        files += [base, *below.files]
        image, whole = below.image or image, whole and below.whole
        mounts += below.mounts
    given = document.get("image", "")
    if not isinstance(given, str):
        raise EdfError(f"image in {path!r} has to be a text")
    if given.startswith("./"):
        _inside(given, path)
        if not (project / given).is_file():
            raise EdfError(
                f"the image {given!r} of {path!r} was not found; it is relative to the project "
                f"folder {project}"
            )
        files.append(given)
    mounts += _texts(document, "mounts", path)
    return Edf(tuple(dict.fromkeys(files)), given or image, tuple(mounts), whole)


def _load(path: str, project: Path) -> dict[str, Any]:
    try:
        with (project / path).open("rb") as file:
            return tomllib.load(file)
    except (FileNotFoundError, NotADirectoryError, ValueError, OSError) as error:
        if isinstance(error, tomllib.TOMLDecodeError | UnicodeDecodeError):
            raise EdfError(f"the file {path!r} is not valid TOML: {error}") from None
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise EdfError(
                f"the file {path!r} was not found; the path is relative to the project folder "
                f"{project}"
            ) from None
        raise EdfError(f"the file {path!r} cannot be read: {error}") from None


def _texts(document: dict[str, Any], key: str, path: str) -> list[str]:
    value = document.get(key, [])
    several = [value] if isinstance(value, str) and key == "base_environment" else value
    if not isinstance(several, list) or not all(isinstance(item, str) for item in several):
        raise EdfError(f"{key} in {path!r} has to be a list of texts")
    return [item for item in several if item]


def _inside(path: str, by: str) -> None:
    if ".." in path.split("/"):
        raise EdfError(f"{path!r} in {by!r} leaves the project folder; use a path inside it")


def may_mount(mounts: Iterable[str], workspace: str, user: str = "") -> bool:
    """Return whether one of `mounts` may contain the workspace, an absolute path at the site.

    `user` stands for `${USER}`, if known. A mount with other variables may.
    """
    return any(
        "$" in place or f"{workspace}/".startswith(f"{place.rstrip('/')}/")
        for place in _destinations(mounts, user)
    )


def _destinations(mounts: Iterable[str], user: str) -> Iterator[str]:
    for mount in mounts:
        text = _VARIABLE.sub(
            lambda found: user if user and (found[1] or found[2]) == "USER" else "$", mount
        )
        source, _, rest = text.partition(":")
        yield rest.partition(":")[0] or source
