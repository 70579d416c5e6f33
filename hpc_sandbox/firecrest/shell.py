"""Run commands on the login node, as firecREST does over one ssh connection.

No shell runs: a command is a function in a thread. A shell's effects on arguments are imitated
where users notice them.
"""

import asyncio
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..settings import FirecrestSettings
from .answers import Failure

_T = TypeVar("_T")

_NO_CHANNEL = "Unable to open a new SSH channel."
TIMEOUT_STATUS = 124
"""Exit status of a command that `timeout` ended."""
_STATUSES = (
    ("No such file or directory", 404), ("Permission denied", 403),
    ("Operation not permitted", 403), ("File exists", 400), ("invalid user", 400),
)  # fmt: skip
"""firecREST's HTTP status for a command's error: the first text found in it decides, else 500."""


class CommandError(Exception):
    """A command ended with an exit status other than 0; the message is its stderr."""

    def __init__(self, status: int, stderr: str) -> None:
        super().__init__(stderr)
        self.status = status

    def failure(self) -> Failure:
        message = f"Remote process failed with exit status:{self.status}"
        if str(self):
            message += f" and error message:{str(self).strip()}"
        found = (status for text, status in _STATUSES if text in str(self))
        if self.status == TIMEOUT_STATUS:
            return Failure(408, message)
        return Failure(next(found, 500), message)


class LoginNode:
    """The login node of a system, with the limits of ssh's sessions and of firecREST's timeout.

    Attributes:
        roots: its file systems, the first one with the home directories.
        home: the user's home directory, where transfer jobs run and write their logs.
    """

    def __init__(self, name: str, directory: Path, user: str, settings: FirecrestSettings) -> None:
        """Create the file systems in `directory`."""
        self.name = name
        self.settings = settings
        self.roots = [directory / "home", directory / "scratch"]
        self.home = self.roots[0] / user
        for root in self.roots:
            (root / user).mkdir(parents=True, exist_ok=True)
        self._busy = 0

    def check(self, path: str) -> str:
        """Return a path, or raise `Failure` if it is relative or not below `roots`.

        It resolves `..`, but not links.
        """
        if not path.startswith("/"):
            raise Failure(400, f"The provided path ({path}) is not an absolute path.")
        normal = os.path.normpath(path)
        if not any(Path(normal).is_relative_to(root) for root in self.roots):
            raise Failure(
                400,
                f"The provided path ({normal}) does not match any of the defined filesystem paths "
                f"for the requested system ({self.name}).",
            )
        return path

    async def run(self, command: Callable[..., _T], *paths: str, **options: Any) -> _T:
        """Call a command on files in a thread, with `paths` as a shell reads them.

        Raise `Failure` if the command fails or takes too long, or no session is left.
        """
        await self.occupy()
        try:
            async with asyncio.timeout(self.settings.command_timeout):
                return await asyncio.to_thread(lambda: command(*map(as_quoted, paths), **options))
        except CommandError as error:
            raise error.failure() from error
        except TimeoutError as error:
            raise too_slow() from error

    async def occupy(self, sessions: int = 1, more: float = 0.0) -> None:
        """Take the time of a command and `more` seconds, on this many sessions of the connection.

        Raise a 424 if too few sessions are left, or a 408 if it takes longer than firecREST waits.
        """
        if self._busy + sessions > self.settings.max_sessions:
            raise Failure(424, _NO_CHANNEL)
        self._busy += sessions
        time = self.settings.command_time + more
        try:
            await asyncio.sleep(min(time, self.settings.command_timeout))
        finally:
            self._busy -= sessions
        if time > self.settings.command_timeout:
            raise too_slow()


def too_slow() -> Failure:
    """Return the failure of a command without input that took longer than firecREST waits."""
    return Failure(408, "Command execution timeout limit exceeded.")


def channel_closed() -> Failure:
    """Return the failure of a command with input (sbatch, upload) that took too long."""
    return Failure(500, "('Channel not open for sending',)", unhandled=True)


def as_quoted(path: str) -> str:
    """Return the path that a shell makes of `'PATH'`: firecREST does not escape single quotes.

    An even number of quotes gives another path. Raise `CommandError` for an odd number, a null
    byte, or a path that splits into words.
    """
    if "\0" in path:
        raise CommandError(2, "bash: -c: line 1: unexpected null byte")
    if "'" not in path:
        return path
    if path.count("'") % 2 == 0:
        words = shlex.split(f"'{path}'")
        if len(words) == 1:
            return words[0]
    raise CommandError(
        2,
        "bash: -c: line 1: unexpected EOF while looking for matching `''\n"
        "bash: -c: line 2: syntax error: unexpected end of file",
    )
