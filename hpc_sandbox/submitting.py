"""Submit UNICORE jobs to the scheduler: write batch scripts, and repeat failed submissions."""

import asyncio
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from . import scripts
from .batch import BatchJob, BatchScheduler
from .description import Description
from .sbatch import SbatchError
from .settings import SandboxSettings
from .tsi import (
    Tsi,
    TsiError,
    TsiUnavailableError,
    submission_failed,
)

_ATTEMPTS = 4
"""Number of attempts to submit a job that the scheduler refuses; as in the real server."""
_EXCHANGES = 8
"""Exchanges with the TSI per submission; at the real speed, two or three jobs a second."""


class JobSubmitter(Protocol):
    """The interface of a site that jobs use."""

    settings: SandboxSettings
    scheduler: BatchScheduler
    user_variables: dict[str, str]
    tsi: Tsi
    workers: asyncio.Semaphore
    submitting: asyncio.Lock

    def local_path(self, url: str) -> Path | None: ...


class SubmittedJob(Protocol):
    """The interface of a job that a submission uses; see `UnicoreJob`."""

    directory: Path
    submissions: int
    batch_ids: list[int]

    def note(self, text: str) -> None: ...


async def submit_job(script: str, job: SubmittedJob, site: JobSubmitter) -> BatchJob:
    """Submit a batch script `job.submissions` times, and return the last scheduler job.

    Raise `TsiError` if at each attempt the scheduler refuses it or the TSI does not answer.
    """
    variables = {"PYTHONPATH": str(site.tsi.module_path)}
    attempt = 1
    while True:
        try:
            async with site.workers, site.submitting:
                await site.tsi.exchange(_EXCHANGES)
                for _ in range(job.submissions):
                    batch = await site.scheduler.submit(
                        script, job.directory, environment=variables
                    )
                    job.batch_ids.append(batch.id)
            return batch
        except SbatchError as error:
            reason = submission_failed(str(error), secrets.token_hex(3).upper())
            problem = TsiError(f"eu.unicore.xnjs.tsi.TSIProblem: {reason}")
        except TsiUnavailableError as error:
            reason, problem = "Error communicating to the TSI", error
        if attempt == _ATTEMPTS:
            job.note(f"Could not submit job: {reason}")
            raise problem
        job.note(f"Submit attempt {attempt} (of {_ATTEMPTS - 1}) failed: {reason}")
        attempt += 1
        await asyncio.sleep(site.settings.timing.resubmit_delay)


def job_batch_script(
    description: Description, directory: Path, user: Mapping[str, str], queue: str
) -> str:
    """Return the script for sbatch: UNICORE's own with the TSI's options.

    For a RAW job: its own file with a call of UNICORE's script at the end.
    """
    own = scripts.unicore_script(description, directory, user)
    if description.job_type != "RAW":
        return scripts.tsi_batch_script(description, directory, own, queue)
    file = directory / f"TSI_submit_{int(time.time() * 1000)}"
    file.write_text(own)
    file.chmod(0o700)
    bss = directory / description.bss_file
    text = bss.read_text() if bss.is_file() else ""
    quoted = "'" + str(file).replace("'", "'\\''") + "'"
    return f"{text}\n{quoted}\n"
