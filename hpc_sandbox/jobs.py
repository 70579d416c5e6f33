"""The life of a UNICORE job, from READY to SUCCESSFUL or FAILED, and its properties in REST."""

import asyncio
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import scripts
from .batch import BatchJob, BatchState, CancelError
from .description import (
    Command,
    Description,
    DescriptionError,
    parse_description,
    waits_for_client,
)
from .login import run_on_login_node
from .resources import check_resources
from .staging import (
    StagingError,
    refused,
    stage_in,
    stage_out,
)
from .submitting import (
    JobSubmitter,
    job_batch_script,
    submit_job,
)
from .tsi import TsiError

_DIRECTORY_ATTEMPTS = 3
"""Number of attempts to create a job's directory while the TSI does not answer."""
_IMPORT_EXCHANGES = 3

_PROCESSING_FAILED = "Processing failed: eu.unicore.xnjs.ems.ExecutionException: "
_NOT_NORMAL = (
    "Failed: Job did not complete normally on BSS, please check standard error file and job log "
    "for more information."
)


class _Failed(Exception):  # noqa: N818
    """Ends a job as FAILED; the text is its `statusMessage`."""


@dataclass
class UnicoreJob:
    """One UNICORE job.

    Attributes:
        id: the last part of the job's URL.
        json: the description as submitted.
        directory: the job's working directory.
        owner: DN of the user.
        batch: the scheduler's job, None before its submission.
        batch_ids: the scheduler's ids of all submissions.
    """

    id: str
    json: dict[str, Any]
    directory: Path
    owner: str
    tags: list[str]
    termination: float
    status: str = "READY"
    status_message: str = ""
    exit_code: int | None = None
    name: str = "N/A"
    job_type: str = "n/a"
    queue: str = "N/A"
    batch: BatchJob | None = None
    batch_ids: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    submitted: float = field(default_factory=time.time)
    ended: float | None = None
    hidden: bool = False
    submissions: int = 1
    _started: asyncio.Event = field(default_factory=asyncio.Event)
    _looked: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None
    _on_login_node: bool = False

    @property
    def done(self) -> bool:
        """Return whether the job has ended according to REST."""
        return self.status in ("SUCCESSFUL", "FAILED")

    @property
    def batch_id(self) -> str:
        """Return the `batchSystemID` of REST."""
        if self._on_login_node:
            return f"INTERACTIVE_{self.id}"
        return str(self.batch.id) if self.batch else "N/A"

    def note(self, text: str) -> None:
        now = time.strftime("%a %b %d %H:%M:%S UTC %Y", time.gmtime())
        self.log.append(f"{now}: {text}")

    def begin(self, site: JobSubmitter) -> None:
        """Start processing the job; the answer to the submission does not wait for it."""
        self.note("Created with type 'JSON'")
        self.note(f"Client: Name: {self.owner}")
        if not waits_for_client(self.json):
            self._started.set()
        if site.tsi.up:
            self.directory.mkdir(parents=True, mode=0o700)
        self._task = asyncio.create_task(self._live(site))

    def start(self) -> None:
        """Continue a job that waits for the client's files; has no effect on others."""
        self._started.set()

    def look(self) -> None:
        """Notify the job that the server has just read the states of all jobs."""
        self._looked.set()

    async def abort(self, site: JobSubmitter, *, ignored: bool = False) -> None:
        """End an unfinished job, or only report so if `ignored`; keep its directory."""
        if self.done:
            return
        self.note("Got 'abort' request.")
        if not ignored:
            await self._cancel_batch(site)
        await self._stop_task()
        self._end("FAILED", "Job aborted.")

    async def destroy(self, site: JobSubmitter) -> None:
        await self._cancel_batch(site)
        await self._stop_task()
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)

    async def _stop_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _cancel_batch(self, site: JobSubmitter) -> None:
        # Of several scheduler jobs the server knows the last one only.
        if self.batch is not None:
            with suppress(CancelError):
                await site.scheduler.cancel(self.batch.id)

    def _end(self, status: str, message: str = "") -> None:
        self.status_message = message
        self.status = status
        self.ended = time.time()
        self.note(f"Status set to DONE - {'success' if status == 'SUCCESSFUL' else 'failure'}.")

    async def _live(self, site: JobSubmitter) -> None:
        try:
            await asyncio.sleep(site.settings.timing.processing)
            await self._make_directory(site)
            await self._process(site)
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

    async def _make_directory(self, site: JobSubmitter) -> None:
        for left in reversed(range(_DIRECTORY_ATTEMPTS)):
            try:
                await site.tsi.exchange()
                self.directory.mkdir(parents=True, mode=0o700, exist_ok=True)
                return
            except TsiError as error:
                then = "Re-trying." if left else "Giving up."
                self.note(f"Problem creating working directory: {error}. {then}")
                if not left:
                    raise
            await asyncio.sleep(site.settings.timing.tsi_retry)

    async def _process(self, site: JobSubmitter) -> None:
        try:
            description = parse_description(self.json)
        except DescriptionError as error:
            raise _Failed(f"Processing failed: {error}") from error
        self.name, self.job_type = description.name, description.shown_type
        self.note(f"Created job directory <{self.directory}/>")
        await self._stage(site, description)
        await self._started.wait()
        self.status = "QUEUED"
        self.note("Status set to PENDING.")
        await self._command(site, description.before, description, "Pre-command")
        try:
            queue = check_resources(description.resources, site.scheduler.partitions).name
        except ValueError as error:
            reason = f"{error} (Invalid resource request)"
            self.note(f"Could not submit job: {reason}")
            raise _Failed(f"{_PROCESSING_FAILED}{reason}") from error
        if description.executable:
            if description.job_type == "ON_LOGIN_NODE":
                await self._run_on_login_node(site, description)
            else:
                await self._run_in_batch(site, description, queue)
        self.status = "STAGINGOUT"
        for item in description.exports:
            try:
                await asyncio.to_thread(stage_out, item, self.directory, site.local_path)
            except StagingError as error:
                raise _Failed(f"Stage-out failed: {error}") from error
        await self._command(site, description.after, description, "Post-command")

    async def _stage(self, site: JobSubmitter, description: Description) -> None:
        if not description.imports:
            return
        self.status = "STAGINGIN"
        # Workers serve in order: files of waiting jobs are staged before this job is submitted.
        async with site.workers:
            for item in description.imports:
                self.note(f"Started filetransfer [{item.source} -> {item.target}]")
                try:
                    await site.tsi.exchange(_IMPORT_EXCHANGES)
                    await asyncio.to_thread(stage_in, item, self.directory, site.local_path)
                except TsiError as error:
                    target = f"{self.directory}//{item.target}"
                    text = f"Inline import to '{target}' failed: {error}"
                    raise _Failed(f"Staging in failed. Reason: {refused(item, text)}") from error
                except StagingError as error:
                    raise _Failed(f"Staging in failed. Reason: {error}") from error
        self.status = "READY"

    async def _command(
        self, site: JobSubmitter, command: Command | None, description: Description, which: str
    ) -> None:
        if command is None or not command.on_login_node:
            return
        self.note(f"Launched {which.lower().replace('-', ' ')} <{command.text}>")
        name = f"{which.partition('-')[0].upper()}_0"
        (self.directory / f".UNICORE_{name}").mkdir(exist_ok=True)
        script = scripts.command_script(command, description, self.directory, name)
        async with site.workers:
            await site.tsi.exchange()
        code = await self._login_node(site, script, scripts.command_exit_code(name))
        if code and not command.ignore_failure:
            raise _Failed(
                f"{which}(s) failed: [Command exited with non-zero exit code: <{code}>. More "
                f"information might be available in the job's working directory "
                f"'{self.directory}/']"
            )

    async def _run_on_login_node(self, site: JobSubmitter, description: Description) -> None:
        self._on_login_node = True
        self.status = "RUNNING"
        script = scripts.unicore_script(description, self.directory, site.user_variables)
        code = await self._login_node(site, script, scripts.EXIT_CODE_FILE, description)
        self._judge(code, description)

    async def _login_node(
        self,
        site: JobSubmitter,
        script: str,
        exit_code_file: str,
        description: Description | None = None,
    ) -> int:
        code = await run_on_login_node(
            script,
            self.directory,
            site.user_variables,
            stdout=description.stdout if description else None,
            stderr=description.stderr if description else None,
            exit_code_file=exit_code_file,
        )
        if code is None:
            await asyncio.sleep(site.settings.timing.death_lag)
            raise _Failed(_NOT_NORMAL)
        return code

    async def _run_in_batch(self, site: JobSubmitter, description: Description, queue: str) -> None:
        script = job_batch_script(description, self.directory, site.user_variables, queue)
        self.note(f"Command is:\n{script}")
        self.batch = await submit_job(script, self, site)
        self.note(f"Submitted executable: {description.executable}")
        self._judge(await self._follow(site, self.batch), description)

    async def _follow(self, site: JobSubmitter, batch: BatchJob) -> int:
        """Follow the scheduler only when the server reads its states, and return the exit code."""
        while not batch.state.final:
            await self._next_look()
            if batch.state is BatchState.RUNNING:
                self.status = "RUNNING"
            if self.queue == "N/A" and batch.state in (BatchState.PENDING, BatchState.RUNNING):
                details = await site.scheduler.details(batch.id)
                self.queue = (details or {}).get("Partition", self.queue)
        await self._next_look()
        code = self._exit_code()
        if code is None:
            # The job ended without an exit code: the server waits, and shows the old status.
            await asyncio.sleep(site.settings.timing.death_lag)
            code = self._exit_code()
        if code is None:
            self.note(
                f"JobState={batch.state.value} Reason={batch.reason} ExitCode={batch.exit_text}"
            )
            raise _Failed(_NOT_NORMAL)
        return code

    async def _next_look(self) -> None:
        self._looked.clear()
        await self._looked.wait()

    def _exit_code(self) -> int | None:
        try:
            return int((self.directory / scripts.EXIT_CODE_FILE).read_text())
        except (OSError, ValueError):
            return None

    def _judge(self, code: int, description: Description) -> None:
        self.exit_code = code
        self.note(f"Exit code {code}")
        if code and not description.ignore_exit_code:
            raise _Failed(
                f"User application exited with non-zero exit code: <{code}>. More information "
                f"might be available in the job's working directory '{self.directory}/'"
            )

    async def details(self, site: JobSubmitter) -> dict[str, str]:
        """Return the current fields of `scontrol show job`, or raise `TsiUnavailableError`."""
        if self.batch:
            await site.tsi.exchange()
        found = await site.scheduler.details(self.batch.id) if self.batch else None
        return found or {"rawDetailsData": "N/A"}
