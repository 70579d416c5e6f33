"""Run commands on the login node, as firecREST does over one ssh connection.

No shell runs: a command is a function in a thread. A shell's effects on arguments are imitated
where users notice them.
"""

import asyncio
import shlex
from collections.abc import Callable
from typing import TypeVar

from ..settings import FirecrestSettings
from .answers import Failure

_T = TypeVar("_T")

_NO_CHANNEL = "Unable to open a new SSH channel."
TIMEOUT_STATUS = 124
"""Exit status of a command that `timeout` ended."""
_STATUSES = (
    ("No such file or directory", 404),
    ("Permission denied", 403),
    ("Operation not permitted", 403),
    ("File exists", 400),
    ("invalid user", 400),
)
"""firecREST's HTTP status for a command's error: the first text found in it decides, else 500."""


class CommandError(Exception):
    """A command ended with an exit status other than 0; the message is its stderr."""

    def __init__(self, status: int, stderr: str) -> None:
        super().__init__(stderr)
        self.status = status

    def failure(self) -> Failure:
        """Return firecREST's response."""
        message = f"Remote process failed with exit status:{self.status}"
        if str(self):
            message += f" and error message:{str(self).strip()}"
        found = (status for text, status in _STATUSES if text in str(self))
        if self.status == TIMEOUT_STATUS:
            return Failure(408, message)
        return Failure(next(found, 500), message)


class Shell:
    """Runs commands within the limits of ssh's sessions and of firecREST's timeout."""

    def __init__(self, settings: FirecrestSettings) -> None:
        self._settings = settings
        self._busy = 0

    async def run(self, command: Callable[[], _T]) -> _T:
        """Call a command on files in a thread and return its result.

        Raise `Failure` if the command fails or takes too long, or no session is left.
        """
        await self.occupy()
        try:
            async with asyncio.timeout(self._settings.command_timeout):
                return await asyncio.to_thread(command)
        except CommandError as error:
            raise error.failure() from error
        except TimeoutError as error:
            raise too_slow() from error

    async def occupy(self, sessions: int = 1, more: float = 0.0) -> None:
        """Take the time of a command and `more` seconds, on this many sessions of the connection.

        Raise a 424 if too few sessions are left, or a 408 if it takes longer than firecREST waits.
        """
        if self._busy + sessions > self._settings.max_sessions:
            raise Failure(424, _NO_CHANNEL)
        self._busy += sessions
        time = self._settings.command_time + more
        try:
            await asyncio.sleep(min(time, self._settings.command_timeout))
        finally:
            self._busy -= sessions
        if time > self._settings.command_timeout:
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
