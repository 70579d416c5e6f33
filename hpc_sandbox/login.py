"""Run commands on the login node, as processes outside the batch system."""

import asyncio
import os
import signal
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from . import processes, shims


async def run_on_login_node(
    script: str,
    directory: Path,
    user: Mapping[str, str],
    *,
    stdout: str | None,
    stderr: str | None,
    exit_code_file: str,
) -> int | None:
    """Run a script in `directory` and return the exit code that it wrote; None if it wrote none.

    `stdout` and `stderr` are files in `directory`; None discards the output. The script writes its
    exit code to `exit_code_file` in `directory`. Cancellation kills all processes of the script.
    """
    mark = uuid.uuid4().hex
    environment = shims.shim_environment({**user, processes.MARK: mark})
    with tempfile.TemporaryDirectory(prefix="mantik-sandbox-") as scratch:
        file = Path(scratch) / "command"
        file.write_text(script)
        code_file = directory / exit_code_file
        with (
            (directory / stdout if stdout else Path(os.devnull)).open("wb") as out,
            (directory / stderr if stderr else Path(os.devnull)).open("wb") as err,
        ):
            process = await asyncio.create_subprocess_exec(
                "/bin/bash",
                str(file),
                cwd=directory,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        try:
            await process.wait()
        except asyncio.CancelledError:
            processes.signal_job(process.pid, signal.SIGKILL)
            await process.wait()
            processes.kill_rest(process.pid, mark)
            raise
        if not code_file.exists() or not code_file.read_text().strip().isdigit():
            return None
        return int(code_file.read_text())
