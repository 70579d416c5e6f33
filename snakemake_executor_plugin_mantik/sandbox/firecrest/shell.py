"""Commands on the login node, as firecREST runs them over one ssh connection.

Nothing is run by a shell: a command is a function in a thread. What a shell would make of its
arguments is imitated where users meet it.
"""

import asyncio
import shlex
from collections.abc import Callable
from typing import TypeVar

from snakemake_executor_plugin_mantik.sandbox.firecrest.answers import Failure
from snakemake_executor_plugin_mantik.sandbox.settings import FirecrestSettings

_T = TypeVar("_T")

_NO_CHANNEL = "Unable to open a new SSH channel."
TIMEOUT_STATUS = 124
"""Exit status of a command that `timeout` has ended."""
_STATUSES = (
    ("No such file or directory", 404),
    ("Permission denied", 403),
    ("Operation not permitted", 403),
    ("File exists", 400),
    ("invalid user", 400),
)
"""What firecREST makes of a command's error: the first text that is in it decides, else 500."""


class CommandError(Exception):
    """A command ended with another exit status than 0; the text is what it wrote to stderr."""

    def __init__(self, status: int, stderr: str) -> None:
        super().__init__(stderr)
        self.status = status

    def failure(self) -> Failure:
        """What firecREST answers."""
        message = f"Remote process failed with exit status:{self.status}"
        if str(self):
            message += f" and error message:{str(self).strip()}"
        found = (status for text, status in _STATUSES if text in str(self))
        if self.status == TIMEOUT_STATUS:
            return Failure(408, message)
        return Failure(next(found, 500), message)


class Shell:
    """Runs commands, as many at a time as ssh has sessions and as long as firecREST waits."""

    def __init__(self, settings: FirecrestSettings) -> None:
        self._settings = settings
        self._busy = 0

    async def run(self, command: Callable[[], _T]) -> _T:
        """The result of a command on files, which is called in a thread.

        Raises:
            Failure: what firecREST answers if it fails, takes too long or is one too many.
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
        """Take the time of a command, and `more` seconds, on so many of the connection's sessions.

        Raises:
            Failure: 424 if there are not so many left, 408 if it takes longer than firecREST waits.
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
    """A command without input took longer than firecREST waits."""
    return Failure(408, "Command execution timeout limit exceeded.")


def channel_closed() -> Failure:
    """A command with input (sbatch, upload) took longer than firecREST waits."""
    return Failure(500, "('Channel not open for sending',)", unhandled=True)


def as_quoted(path: str) -> str:
    """The path that a command gets that was written as `'PATH'`: single quotes are not escaped.

    Raises:
        CommandError: for an odd number of quotes; for an even number it is another path.
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
