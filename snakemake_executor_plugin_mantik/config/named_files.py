"""Read the files of a project that a backend config names: definitions and requirements.

Facts about Environment Definition Files (EDF) of the Container Engine are from CSCS's documentation
(docs.cscs.ch, software/container-engine/edf): a file inherits from `base_environment`, with mounts
appended; relative paths begin with `./` and are relative to the directory in which `srun` is
called, which is the workspace; `${NAME}` is expanded at the site.
"""

import os
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..common.errors import UserError

_DEEPEST: Final = 10
"""How many levels of `base_environment` the Container Engine follows."""

_VARIABLE: Final = re.compile(r"\$\{(\w+)[^}]*\}|\$(\w+)")

_FILE_OPTION: Final = re.compile(
    r"(?:-r|-c|--requirement|--constraint)(?:[ \t=]+|(?=\S))(?P<path>.+)"
)
_EDITABLE: Final = re.compile(r"(?:-e|--editable)[ \t=]+")
# pip takes these for paths, even without a slash: `.`, `./package`, `../package[extra] ; marker`.
_LOCAL: Final = re.compile(r"(?P<path>\.{1,2}(?:/[^\[;]*?)?)(?:\[[^\]]*\])?(?:\s*;.*|\s+#.*|\s)*")
# pip takes these for paths, too, unless they have a scheme or a variable: `wheels/own.whl`.
_PLAIN_LOCAL: Final = re.compile(
    r"(?P<path>[^-/\s:;\[$@][^\s:;\[$@]*(?:/[^\s:;\[$@]*|\.(?:whl|zip|tgz|tar\.(?:gz|bz2|xz))))"
    r"(?:\[[^\]]*\])?(?:\s.*|;.*)?"
)


class NamedFileError(UserError):
    """A file cannot be used; `what` follows the name of the key that names it."""

    def __init__(self, what: str) -> None:
        super().__init__(what, do="Correct the file")


def _read_text(path: str, of: str, project: Path) -> str:
    try:
        return (project / path).read_text("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise NamedFileError(
            f"the file {path!r}{of} was not found; the path is relative to the project folder"
            f" {project}"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        raise NamedFileError(f"the file {path!r}{of} cannot be read: {error}") from None


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
        NamedFileError: one of them is missing or invalid, there is no image, or there are no
            mounts.
    """
    found = _read_edf(path, project, 0)
    if found.whole and not found.image:
        raise NamedFileError(f"the file {path!r} names no image, so there would be no container")
    if found.whole and not found.mounts:
        raise NamedFileError(
            f"the file {path!r} has no mounts, so the container would not see the workspace; add "
            'its file system, such as mounts = ["/capstor/scratch:/capstor/scratch"]'
        )
    return found


def _read_edf(path: str, project: Path, level: int) -> Edf:
    if level > _DEEPEST:
        raise NamedFileError(
            f"base_environment is nested more than {_DEEPEST} levels deep, at {path!r}"
        )
    try:
        document = tomllib.loads(_read_text(path, "", project))
    except tomllib.TOMLDecodeError as error:
        raise NamedFileError(f"the file {path!r} is not valid TOML: {error}") from None
    files: list[str] = []
    image, whole = "", True
    mounts: list[str] = []
    for base in _texts(document, "base_environment", path):
        if not base.startswith("./"):
            whole = False  # by its name or absolute: it lies at the site
            continue
        _stay_inside(base, path)
        below = _read_edf(base, project, level + 1)
        files += [base, *below.files]
        image, whole = below.image or image, whole and below.whole
        mounts += below.mounts
    given = document.get("image", "")
    if not isinstance(given, str):
        raise NamedFileError(f"image in {path!r} has to be a text")
    if given.startswith("./"):
        _stay_inside(given, path)
        if not (project / given).is_file():
            raise NamedFileError(
                f"the image {given!r} of {path!r} was not found; it is relative to the project "
                f"folder {project}"
            )
        files.append(given)
    mounts += _texts(document, "mounts", path)
    return Edf(tuple(dict.fromkeys(files)), given or image, tuple(mounts), whole)


def _texts(document: dict[str, Any], key: str, path: str) -> list[str]:
    value = document.get(key, [])
    several = [value] if isinstance(value, str) and key == "base_environment" else value
    if not isinstance(several, list) or not all(isinstance(item, str) for item in several):
        raise NamedFileError(f"{key} in {path!r} has to be a list of texts")
    return [item for item in several if item]


def _stay_inside(path: str, by: str) -> None:
    if ".." in path.split("/"):
        raise NamedFileError(f"{path!r} in {by!r} leaves the project folder; use a path inside it")


def may_mount(mounts: Iterable[str], workspace: str, user: str = "") -> bool:
    """Return whether one of `mounts` may contain the workspace, an absolute path at the site.

    `user` stands for `${USER}`, if known. A mount with other variables may.
    """
    for mount in mounts:
        text = _VARIABLE.sub(
            lambda found: user if user and (found[1] or found[2]) == "USER" else "$", mount
        )
        source, _, rest = text.partition(":")
        place = rest.partition(":")[0] or source
        if "$" in place or f"{workspace}/".startswith(f"{place.rstrip('/')}/"):
            return True
    return False


@dataclass(frozen=True)
class Requirements:
    """What a file of requirements needs of the project. Paths are relative to its folder.

    Attributes:
        files: the file itself, then others that it names: requirements, constraints, packages.
        folders: directories of packages.
    """

    files: tuple[str, ...]
    folders: tuple[str, ...]


def follow_requirements(text: str, path: str, project: Path) -> Requirements:
    """Like `read_requirements`, for the text of a file; the files are those that it names.

    Raises:
        NamedFileError: a file or directory is missing, or lies outside the project folder.
    """
    found = _Follower(project, {path: None})
    found.follow(text, path)
    return Requirements(tuple(found.files)[1:], tuple(found.folders))


def rebase_requirements(text: str, folder: str) -> str:
    """Return the text of a file that lies elsewhere, from where `folder` is the first one's."""

    def rebased(line: str) -> str:
        match = _FILE_OPTION.fullmatch(line.strip())
        path = _plain(match["path"]) if match is not None else ""
        if match is None or "://" in path:
            return line
        place = posixpath.normpath(posixpath.join(folder, path))
        return match[0][: match.start("path")] + shlex.quote(place)

    return "".join(f"{rebased(line)}\n" for line in text.splitlines())


def read_requirements(path: str, project: Path) -> Requirements:
    """Read the file `path`, relative to the project folder, and those that it includes.

    As with `pip install -r` in the project folder, included files are relative to the file that
    names them, and packages to the project folder.

    Raises:
        NamedFileError: a file or directory is missing, or lies outside the project folder.
    """
    found = _Follower(project)
    found.read(posixpath.normpath(path), "")
    return Requirements(tuple(found.files), tuple(found.folders))


@dataclass
class _Follower:
    project: Path
    files: dict[str, None] = field(default_factory=dict)
    folders: dict[str, None] = field(default_factory=dict)

    def read(self, path: str, by: str) -> None:
        if path not in self.files:
            text = _read_text(path, f" of {by!r}" if by else "", self.project)
            self.files[path] = None
            self.follow(text, path)

    def follow(self, text: str, path: str) -> None:
        for line in _lines(text):
            plain = _EDITABLE.sub("", line, count=1)
            if included := _FILE_OPTION.fullmatch(line):
                name = _plain(included["path"])
                if "://" not in name:
                    place = posixpath.join(posixpath.dirname(path), name)
                    self.read(_inside(place, path), path)
            elif package := _LOCAL.fullmatch(plain) or _PLAIN_LOCAL.fullmatch(plain):
                given = package["path"].strip()
                place = _inside(given, path)
                if (self.project / place).is_dir():
                    self.folders[place] = None
                elif (self.project / place).is_file():
                    self.files[place] = None
                else:
                    raise NamedFileError(
                        f"the package {given!r} of {path!r} was not found; it is relative to the"
                        f" project folder {self.project}"
                    )


def _lines(text: str) -> Iterator[str]:
    """Yield the lines without comments; a backslash at the end of a line continues it."""
    for line in text.replace("\\\n", "").splitlines():
        if (stripped := line.strip()) and not stripped.startswith("#"):
            yield stripped


def _plain(path: str) -> str:
    """Return the path of an option without quotes and comment."""
    return re.sub(r"\s+#.*", "", path).strip("'\"")


def _inside(path: str, by: str) -> str:
    place = posixpath.normpath(path)
    if place.split("/")[0] == ".." or os.path.isabs(place):
        raise NamedFileError(f"{path!r} in {by!r} is outside the project folder")
    return place
