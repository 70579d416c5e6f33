"""Why jobs ended that wrote no exit code, asked of the sandbox: it enforces limits like Slurm."""

import asyncio
import time
import uuid

import pytest

from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase, Submission
from snakemake_executor_plugin_mantik.sites.credentials import Password
from snakemake_executor_plugin_mantik.sites.unicore import UnicoreSite

MEMORY_HOG = "python3 -c 'x = bytearray(400 << 20); import time; time.sleep(60)'\n"


@pytest.mark.parametrize(
    ("script", "resources", "reason"),
    [
        ("sleep 60\n", Resources(runtime_s=1), Reason.TIME_LIMIT),
        (MEMORY_HOG, Resources(memory_mib_per_node=100), Reason.OUT_OF_MEMORY),
        ("exit 0\n", Resources(queue="no-such-queue"), Reason.REJECTED),
        ("kill -9 $$\n", Resources(), Reason.EXIT_CODE),
    ],
)
def test_reason(sandbox: Sandbox, script: str, resources: Resources, reason: Reason) -> None:
    state = asyncio.run(end_of(sandbox, script, resources))
    assert state.reason is reason
    assert state.detail


def test_what_slurm_writes_of_memory_is_told(sandbox: Sandbox) -> None:
    words = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch"
    script = f"echo begun >&2; echo '{words}' >&2; kill -9 $$\n"
    state = asyncio.run(end_of(sandbox, script, Resources()))
    assert (state.reason, state.detail) == (Reason.OUT_OF_MEMORY, words)


async def end_of(sandbox: Sandbox, script: str, resources: Resources) -> JobState:
    site = UnicoreSite(
        "sandbox",
        sandbox.url("hpc1"),
        Password(*sandbox.credentials("hpc1")),
        workspace_name="explained",
        settings=SiteSettings(),
    )
    try:
        await site.open()
        job = await site.submit(Submission(str(uuid.uuid4()), "x", script, resources))
        deadline = time.monotonic() + 100
        while (await site.states([job]))[job].phase is not Phase.ENDED:
            assert time.monotonic() < deadline, "the job does not end"
            await asyncio.sleep(0.1)
        return await site.explain(job)
    finally:
        await site.close()
