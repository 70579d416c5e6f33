"""The life of a UNICORE job, from READY to SUCCESSFUL or FAILED, and its properties in REST."""

import asyncio
import os
import secrets
import shutil
import signal
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from . import processes, scripts, shims
from .batch import BatchJob, BatchState, CancelError
from .description import (
    Command,
    Description,
    DescriptionError,
    Staged,
    check_resources,
    parse_description,
)
from .sbatch import SbatchError
from .tsi import TsiError, TsiUnavailableError, submission_failed

if TYPE_CHECKING:
    from .unicore import UnicoreServer

_DIRECTORY_ATTEMPTS = 3
"""Number of attempts to create a job's directory while the TSI does not answer."""
_IMPORT_EXCHANGES = 3
_SUBMIT_ATTEMPTS = 4
"""Number of attempts to submit a job that the scheduler refuses; as in the real server."""
_SUBMIT_EXCHANGES = 8
"""Exchanges with the TSI per submission; at the real speed, two or three jobs a second."""
_SCRIPT_MODE = 0o600

_PROCESSING_FAILED = "Processing failed: eu.unicore.xnjs.ems.ExecutionException: "
_NOT_NORMAL = (
    "Failed: Job did not complete normally on BSS, please check standard error file and job log "
    "for more information."
)


_UNREAD = Description(name="N/A", job_type="n/a")


class _Failed(Exception):  # noqa: N818
    """Ends a job as FAILED; the text is its `statusMessage`."""


@dataclass
class UnicoreJob:
    """One UNICORE job.

    Attributes:
        id: the last part of the job's URL.
        json: the description as submitted.
        owner: DN of the user.
        description: the description as the server reads it.
        batch: the scheduler's job, None before its submission.
        started: set when a job continues that waits for the client's files.
        looked: set when the server has just read the states of all jobs.
    """

    site: "UnicoreServer"
    id: str
    json: dict[str, Any]
    directory: Path
    owner: str
    tags: list[str]
    termination: float
    status: str = "READY"
    status_message: str = ""
    exit_code: int | None = None
    description: Description = _UNREAD
    queue: str = "N/A"
    batch: BatchJob | None = None
    scheduler_ids: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    submitted: float = field(default_factory=time.time)
    ended: float | None = None
    hidden: bool = False
    submissions: int = 1
    started: asyncio.Event = field(default_factory=asyncio.Event)
    looked: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None
    _on_login_node: bool = False

    @property
    def name(self) -> str:
        return self.description.name

    @property
    def batch_id(self) -> str:
        if self._on_login_node:
            return f"INTERACTIVE_{self.id}"
        return str(self.batch.id) if self.batch else "N/A"

    def note(self, text: str) -> None:
        now = time.strftime("%a %b %d %H:%M:%S UTC %Y", time.gmtime())
        self.log.append(f"{now}: {text}")

    def begin(self) -> None:
        """Start processing the job; the answer to the submission does not wait for it."""
        self.note("Created with type 'JSON'")
        self.note(f"Client: Name: {self.owner}")
        if str(self.json.get("haveClientStageIn", "")).lower() != "true":
            self.started.set()
        if self.site.tsi.up:
            self.directory.mkdir(parents=True, mode=0o700)
        self._task = asyncio.create_task(self._live())

    async def abort(self, *, ignored: bool = False) -> None:
        """End an unfinished job, or only report so if `ignored`; keep its directory."""
        if self.status in ("SUCCESSFUL", "FAILED"):
            return
        self.note("Got 'abort' request.")
        if not ignored:
            await self._cancel_batch()
        await self._stop_task()
        self._end("FAILED", "Job aborted.")

    async def destroy(self) -> None:
        await self._cancel_batch()
        await self._stop_task()
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)

    async def _stop_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _cancel_batch(self) -> None:
        # Of several scheduler jobs the server knows the last one only.
        if self.batch is not None:
            with suppress(CancelError):
                await self.site.scheduler.cancel(self.batch.id)

    def _end(self, status: str, message: str = "") -> None:
        self.status_message = message
        self.status = status
        self.ended = time.time()
        self.note(f"Status set to DONE - {'success' if status == 'SUCCESSFUL' else 'failure'}.")

    async def _live(self) -> None:
        try:
            await asyncio.sleep(self.site.settings.timing.processing)
            await self._make_directory()
            await self._process()
        except _Failed as failed:
            self.note(f"ERROR: {failed}")
            self._end("FAILED", str(failed))
        except TsiError as error:
            self.note("ERROR: Error communicating to the TSI")
            self._end("FAILED", f"Processing failed: {error}")
        except OSError as error:
            self._end("FAILED", f"{_PROCESSING_FAILED}{error}")
        else:
            self._end("SUCCESSFUL")

    async def _make_directory(self) -> None:
        for left in reversed(range(_DIRECTORY_ATTEMPTS)):
            try:
                await self.site.tsi.exchange()
                self.directory.mkdir(parents=True, mode=0o700, exist_ok=True)
                return
            except TsiError as error:
                then = "Re-trying." if left else "Giving up."
                self.note(f"Problem creating working directory: {error}. {then}")
                if not left:
                    raise
            await asyncio.sleep(self.site.settings.timing.tsi_retry)

    async def _process(self) -> None:
        try:
            description = self.description = parse_description(self.json)
        except DescriptionError as error:
            raise _Failed(f"Processing failed: {error}") from error
        self.note(f"Created job directory <{self.directory}/>")
        await self._stage_in()
        await self.started.wait()
        self.status = "QUEUED"
        self.note("Status set to PENDING.")
        await self._command(description.before, "Pre-command")
        try:
            queue = check_resources(description.resources, self.site.scheduler.partitions).name
        except ValueError as error:
            reason = f"{error} (Invalid resource request)"
            self.note(f"Could not submit job: {reason}")
            raise _Failed(f"{_PROCESSING_FAILED}{reason}") from error
        if description.executable:
            if description.job_type == "ON_LOGIN_NODE":
                await self._run_on_login_node()
            else:
                await self._run_in_batch(queue)
        self.status = "STAGINGOUT"
        for item in description.exports:
            try:
                await asyncio.to_thread(self._export, item)
            except OSError as error:
                raise _Failed(f"Stage-out failed: {_refused(item, error)}") from error
        await self._command(description.after, "Post-command")

    async def _stage_in(self) -> None:
        if not self.description.imports:
            return
        self.status = "STAGINGIN"
        # Workers serve in order: files of waiting jobs are staged before this job is submitted.
        async with self.site.workers:
            for item in self.description.imports:
                self.note(f"Started filetransfer [{item.source} -> {item.target}]")
                try:
                    await self.site.tsi.exchange(_IMPORT_EXCHANGES)
                    await asyncio.to_thread(self._import, item)
                except TsiError as error:
                    reason = f"Inline import to '{self.directory}//{item.target}' failed: {error}"
                    raise _Failed(f"Staging in failed. Reason: {_refused(item, reason)}") from error
                except OSError as error:
                    if item.must_succeed:
                        reason = _refused(item, error)
                        raise _Failed(f"Staging in failed. Reason: {reason}") from error
        self.status = "READY"

    def _import(self, item: Staged) -> None:
        target = self.directory / item.target.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if item.data is not None or item.source.startswith("inline:"):
            target.write_text(item.data or "")
            target.chmod(_SCRIPT_MODE)
        else:
            shutil.copyfile(self._path(item.source), target)
        if len(item.permissions) >= 3:
            letters = zip((4, 2, 1), item.permissions, strict=False)
            target.chmod(sum(bit for bit, letter in letters if letter != "-") << 6)

    def _export(self, item: Staged) -> None:
        target = self._path(item.target)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.directory / item.source.lstrip("/"), target)

    def _path(self, url: str) -> Path:
        """Return the file behind a URL: a local one, or one of the site's storages."""
        parts = urlsplit(url)
        if parts.scheme == "file":
            return Path(unquote(parts.path))
        if (path := self.site.local_path(url)) is not None:
            return path
        raise OSError(f"the sandbox does not transfer {parts.scheme or 'plain'} URLs")

    async def _command(self, command: Command | None, which: str) -> None:
        if command is None or not command.on_login_node:
            return
        self.note(f"Launched {which.lower().replace('-', ' ')} <{command.text}>")
        name = f"{which.partition('-')[0].upper()}_0"
        (self.directory / f".UNICORE_{name}").mkdir(exist_ok=True)
        script = scripts.command_script(command, self.description, self.directory, name)
        async with self.site.workers:
            await self.site.tsi.exchange()
        code = await self._login_node(script, scripts.command_exit_code(name))
        if code and not command.ignore_failure:
            raise _Failed(
                f"{which}(s) failed: [Command exited with non-zero exit code: <{code}>. More "
                f"information might be available in the job's working directory "
                f"'{self.directory}/']"
            )

    async def _run_on_login_node(self) -> None:
        self._on_login_node = True
        self.status = "RUNNING"
        asked, user = self.description, self.site.user_variables
        script = scripts.unicore_script(asked, self.directory, user)
        output = (asked.stdout, asked.stderr)
        self._judge(await self._login_node(script, scripts.EXIT_CODE_FILE, output))

    async def _login_node(
        self,
        script: str,
        exit_code_file: str,
        output: tuple[str, str] = (os.devnull, os.devnull),
    ) -> int:
        """Run a script outside the batch system, and return the exit code that it wrote to a file.

        `output` and `exit_code_file` are files in the job's directory. Cancellation kills all
        processes of the script.
        """
        mark = uuid.uuid4().hex
        environment = shims.shim_environment({**self.site.user_variables, processes.MARK: mark})
        with tempfile.TemporaryDirectory(prefix="mantik-sandbox-") as scratch:
            file = Path(scratch) / "command"
            file.write_text(script)
            out, err = (self.directory / (name or os.devnull) for name in output)
            with out.open("wb") as stdout, err.open("wb") as stderr:
                process = await asyncio.create_subprocess_exec(
                    "/bin/bash", str(file), cwd=self.directory, env=environment,
                    stdin=asyncio.subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                    start_new_session=True,
                )  # fmt: skip
            try:
                await process.wait()
            except asyncio.CancelledError:
                processes.signal_job(process.pid, signal.SIGKILL)
                await process.wait()
                processes.kill_rest(process.pid, mark)
                raise
        code = self._exit_code(exit_code_file)
        if code is None:
            await asyncio.sleep(self.site.settings.timing.death_lag)
            raise _Failed(_NOT_NORMAL)
        return code

    async def _run_in_batch(self, queue: str) -> None:
        asked, user = self.description, self.site.user_variables
        script = scripts.batch_script(asked, self.directory, user, queue)
        self.note(f"Command is:\n{script}")
        self.batch = await self._submit(script)
        self.note(f"Submitted executable: {asked.executable}")
        self._judge(await self._follow(self.batch))

    async def _submit(self, script: str) -> BatchJob:
        """Submit a batch script `submissions` times, and return the last scheduler job.

        Raise `TsiError` if at each attempt the scheduler refuses it or the TSI does not answer.
        """
        variables = {"PYTHONPATH": str(self.site.tsi.module_path)}
        for attempt in range(1, _SUBMIT_ATTEMPTS + 1):
            try:
                async with self.site.workers, self.site.submitting:
                    await self.site.tsi.exchange(_SUBMIT_EXCHANGES)
                    for _ in range(self.submissions):
                        batch = await self.site.scheduler.submit(
                            script, self.directory, environment=variables
                        )
                        self.scheduler_ids.append(batch.id)
                return batch
            except SbatchError as error:
                reason = submission_failed(str(error), secrets.token_hex(3).upper())
                problem = TsiError(f"eu.unicore.xnjs.tsi.TSIProblem: {reason}")
            except TsiUnavailableError as error:
                reason, problem = "Error communicating to the TSI", error
            if attempt < _SUBMIT_ATTEMPTS:
                self.note(f"Submit attempt {attempt} (of {_SUBMIT_ATTEMPTS - 1}) failed: {reason}")
                await asyncio.sleep(self.site.settings.timing.resubmit_delay)
        self.note(f"Could not submit job: {reason}")
        raise problem

    async def _follow(self, batch: BatchJob) -> int:
        """Follow the scheduler only when the server reads its states, and return the exit code."""
        while not batch.state.final:
            await self._next_look()
            if batch.state is BatchState.RUNNING:
                self.status = "RUNNING"
            if self.queue == "N/A" and batch.state in (BatchState.PENDING, BatchState.RUNNING):
                details = await self.site.scheduler.details(batch.id)
                self.queue = (details or {}).get("Partition", self.queue)
        await self._next_look()
        code = self._exit_code()
        if code is None:
            # The job ended without an exit code: the server waits, and shows the old status.
            await asyncio.sleep(self.site.settings.timing.death_lag)
            code = self._exit_code()
        if code is None:
            self.note(
                f"JobState={batch.state.value} Reason={batch.reason} ExitCode={batch.exit_text}"
            )
            raise _Failed(_NOT_NORMAL)
        return code

    async def _next_look(self) -> None:
        self.looked.clear()
        await self.looked.wait()

    def _exit_code(self, file: str = scripts.EXIT_CODE_FILE) -> int | None:
        try:
            return int((self.directory / file).read_text())
        except (OSError, ValueError):
            return None

    def _judge(self, code: int) -> None:
        self.exit_code = code
        self.note(f"Exit code {code}")
        if code and not self.description.ignore_exit_code:
            raise _Failed(
                f"User application exited with non-zero exit code: <{code}>. More information "
                f"might be available in the job's working directory '{self.directory}/'"
            )

    async def details(self) -> dict[str, str]:
        """Return the current fields of `scontrol show job`, or raise `TsiUnavailableError`."""
        if self.batch:
            await self.site.tsi.exchange()
        found = await self.site.scheduler.details(self.batch.id) if self.batch else None
        return found or {"rawDetailsData": "N/A"}


def _refused(item: Staged, reason: object) -> str:
    return f"Filetransfer FAILED: [{item.source} -> {item.target}] error message: {reason}"
