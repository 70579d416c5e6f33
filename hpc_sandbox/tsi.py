"""The TSI of a UNICORE site: the server's process on the login node, for its files and jobs.

The errors are literally those of UNICORE/X 3.0.0 with the Slurm TSI 11.2.0. Most repeat the whole
command and end with the cause.
"""

import asyncio
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .faults import spoil

_FILE_MODE = 0o640
"""Mode of each file after an upload, whatever it was before: the TSI sets it with each piece."""
_DIRECTORY_MODE = 0o750

_AT_OPENING = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors that occur before a file is written."""
_REPORTED = "\n (Command execution on TSI reported an error)"
_MODULES = ("ACL", "BSS", "IO", "Log", "Server", "Utils")


def change_mode(path: Path, mode: int) -> None:
    """Give a file or directory the permissions `mode`; a directory keeps its setgid bit."""
    now = path.stat().st_mode
    path.chmod(mode & 0o777 | (now & stat.S_ISGID if stat.S_ISDIR(now) else 0))


class TsiError(Exception):
    """A request to the TSI failed; the message is the end of UNICORE's message."""


class TsiUnavailableError(TsiError):
    """The TSI does not answer."""

    def __init__(self) -> None:
        super().__init__(
            "eu.unicore.xnjs.tsi.TSIUnavailableException: Error communicating to the TSI"
        )


class Tsi:
    """The TSI of one site.

    Attributes:
        up: whether the TSI answers.
        module_path: the directory of the TSI's modules, which is the PYTHONPATH of batch jobs.
    """

    def __init__(self, directory: Path, user: Mapping[str, str], round_trip: float) -> None:
        """Create the TSI's modules in `directory`.

        `user` holds USER and HOME; `round_trip` is the duration of one exchange in seconds.
        """
        self.up = True
        self.module_path = directory
        self._user, self._home = user["USER"], user["HOME"]
        self._round_trip = round_trip
        directory.mkdir(parents=True, exist_ok=True)
        for name in _MODULES:
            text = f'raise ImportError("this is {name} of the TSI, not a module of yours")\n'
            (directory / f"{name}.py").write_text(text)

    async def exchange(self, count: int = 1) -> None:
        """Wait for the duration of `count` exchanges, or raise `TsiUnavailableError`."""
        self.check()
        if self._round_trip:
            await asyncio.sleep(count * self._round_trip)
            self.check()

    def check(self) -> None:
        if not self.up:
            raise TsiUnavailableError

    # --- files: each method raises TsiError ----------------------------------------------------

    def make_directory(self, path: Path) -> None:
        """Create a directory with its parents; an existing one is no error."""
        with self._running(
            f"/bin/mkdir -p -m 750 {quoted(path)}",
            lambda e: f"/bin/mkdir: cannot create directory ‘{culprit(path, e)}’: {e.strerror}",
        ):
            if not path.is_dir():
                path.mkdir(_DIRECTORY_MODE, parents=True)
                change_mode(path, _DIRECTORY_MODE)

    def remove(self, path: Path) -> None:
        """Remove a file or a directory tree; a missing one is no error."""
        with self._running(
            f"/bin/rm -rf {quoted(path)}",
            lambda e: f"/bin/rm: cannot remove {quoted(Path(e.filename or path))}: {e.strerror}",
        ):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                with suppress(NotADirectoryError):
                    path.unlink(missing_ok=True)

    def change_mode(self, path: Path, letters: str) -> None:
        """Change the permissions to `letters`, as in `rwxr-x---`."""
        parts = zip("ugo", (letters[start : start + 3] for start in (0, 3, 6)), strict=True)
        script = "\n".join(
            f"/bin/chmod {who}={what.replace('-', '')} {quoted(path)}" for who, what in parts
        )
        says = f"/bin/chmod: changing permissions of {quoted(path)}: "
        with self._running(script, lambda e: "\n".join([f"{says}{e.strerror}"] * 3)):
            change_mode(path, int("".join("0" if c == "-" else "1" for c in letters), 2))

    def move(self, source: Path, target: Path, *, copy: bool) -> None:
        command = "cp" if copy else "mv"
        with self._running(
            f"umask 27\n/bin/{command} {quoted(source)} {quoted(target)}",
            lambda e: f"/bin/{command}: cannot stat {quoted(source)}: {e.strerror}",
        ):
            if not copy:
                source.rename(target)
            elif source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            else:
                shutil.copyfile(source, target)

    @contextmanager
    def writing(self, path: Path) -> Iterator[IO[bytes]]:
        """Open a file to be written in place; an error keeps the part that was written."""
        expanded = str(path).replace("$HOME", self._home)
        try:
            spoil(_AT_OPENING)
            opened = os.open(expanded, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _FILE_MODE)
        except OSError as error:
            reply = f"[Errno {error.errno}] {error.strerror}: '{expanded}'\n"
            raise TsiError(
                f"java.io.IOException: Execution on TSI <localhost> failed. "
                f"Reply was TSI_FAILED: {reply}"
            ) from error
        try:
            with os.fdopen(opened, "wb") as file:
                yield file
                spoil()
            with suppress(OSError):
                change_mode(path, _FILE_MODE)
        except OSError as error:
            text = f"[Errno {error.errno}] {error.strerror}"
            raise TsiError(f"java.io.IOException: TSI_FAILED: {text}") from error

    @contextmanager
    def _running(self, script: str, words: Callable[[OSError], str]) -> Iterator[None]:
        """Turn an OSError into the error of a script; `words` returns the script's stderr."""
        try:
            spoil()
            yield
        except OSError as error:
            command = (
                f"#!/bin/bash -l\n#TSI_EXECUTESCRIPT\n#TSI_SCRIPT\n{script}\n\n"
                f"#TSI_IDENTITY {self._user} {self._user}:DEFAULT_GID\n\n"
            )
            raise TsiError(
                "eu.unicore.xnjs.tsi.TSIProblem: TSI on <localhost>: Command failed: "
                f"{_failed(command, words(error))}{_REPORTED}"
            ) from error


def submission_failed(stderr: str, submit_id: str) -> str:
    """Return UNICORE's message for a job that sbatch refused."""
    command = f"sbatch ./bss_submit_{submit_id}"
    return f"TSI on <localhost>: {_failed(command, stderr)}{_REPORTED}"


def _failed(command: str, stderr: str) -> str:
    text = f"TSI_FAILED: Command '{command}' failed with code 1: {stderr.rstrip()}\n"
    return text.replace("\n", ":")


def quoted(path: Path) -> str:
    """Return a path as a word of a script."""
    return "'" + str(path).replace("'", "'\\''") + "'"


def culprit(path: Path, error: OSError) -> str:
    """Return the path in mkdir's error: a file in place of a parent, else where it failed."""
    above = next((p for p in (path, *path.parents) if os.path.lexists(p)), path)
    return str(above if not above.is_dir() else error.filename or path)
