"""Read files of requirements, of which pip makes a virtual environment at a site."""

import os
import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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


class RequirementsError(Exception):
    """A file of requirements cannot be used; the message follows the name of the file's key."""


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
        RequirementsError: a file or directory is missing, or lies outside the project folder.
    """
    files: dict[str, None] = {path: None}
    folders: dict[str, None] = {}
    _follow(text, path, project, files, folders)
    return Requirements(tuple(files)[1:], tuple(folders))


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
        RequirementsError: a file or directory is missing, or lies outside the project folder.
    """
    files: dict[str, None] = {}
    folders: dict[str, None] = {}
    _read(posixpath.normpath(path), "", project, files, folders)
    return Requirements(tuple(files), tuple(folders))


def _read(
    path: str, by: str, project: Path, files: dict[str, None], folders: dict[str, None]
) -> None:
    if path in files:
        return
    text = _text(path, by, project)
    files[path] = None
    _follow(text, path, project, files, folders)


def _follow(
    text: str, path: str, project: Path, files: dict[str, None], folders: dict[str, None]
) -> None:
    for line in _lines(text):
        if (included := _FILE_OPTION.fullmatch(line)) is not None:
            name = _plain(included["path"])
            if "://" not in name:
                _read(_inside(posixpath.join(posixpath.dirname(path), name), path), path, project,
                      files, folders)  # fmt: skip
        elif (package := _local(_EDITABLE.sub("", line, count=1))) is not None:
            place = _inside(package["path"].strip(), path)
            if (project / place).is_dir():
                folders[place] = None
            elif (project / place).is_file():
                files[place] = None
            else:
                raise RequirementsError(
                    f"the package {package['path'].strip()!r} of {path!r} was not found; it is"
                    f" relative to the project folder {project}"
                )


def _local(line: str) -> re.Match[str] | None:
    return _LOCAL.fullmatch(line) or _PLAIN_LOCAL.fullmatch(line)


def _text(path: str, by: str, project: Path) -> str:
    of = f" of {by!r}" if by else ""
    try:
        return (project / path).read_text("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise RequirementsError(
            f"the file {path!r}{of} was not found; the path is relative to the project folder"
            f" {project}"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        raise RequirementsError(f"the file {path!r}{of} cannot be read: {error}") from None


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
        raise RequirementsError(f"{path!r} in {by!r} is outside the project folder")
    return place
