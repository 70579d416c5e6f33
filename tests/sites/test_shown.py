"""What `smk-mantik render` shows is what a site is sent: submissions to servers, compared."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.config.environment import (
    job_environment,
    job_resources,
    script_limits,
)
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.engine.forecast import (
    ATTEMPT,
    Preview,
    make_preview,
    plain_request,
)
from snakemake_executor_plugin_mantik.engine.plan import Planner, make_submission
from snakemake_executor_plugin_mantik.jobs.paths import AttemptPaths, workspace_below
from snakemake_executor_plugin_mantik.jobs.resources import merge_resources
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec
from snakemake_executor_plugin_mantik.sites.base import Site, Submission
from snakemake_executor_plugin_mantik.sites.unicore.connection import SESSION_EXPIRED
from tests.support.benches import firecrest_site, in_use, unicore_site
from tests.support.unicoreserver import UnicoreX

COMMAND = "echo 'it is' $HOME | cat; exit 3"
ASKED: dict[str, Any] = {
    "Resources": {"Queue": "batch", "Runtime": "10m", "Nodes": 1, "CPUsPerNode": 2},
    "Environment": {
        "Variables": {"A": 'it\'s "$HOME"', "B": 0.5},
        "PreRunCommandOnComputeNode": ["echo before"],
        "PostRunCommandOnComputeNode": "echo after",
    },
}


def config_of(api: dict[str, Any], workspace: str, scheduler: str, **more: Any) -> BackendConfig:
    site = {"Workspace": workspace, "Scheduler": scheduler}
    return BackendConfig.model_validate({**api, **ASKED, **more, "Site": site})


def shown(config: BackendConfig) -> Preview:
    return make_preview(Planner(config, "sandbox", Path("/project")), plain_request("hpc", COMMAND))


def submission(config: BackendConfig, workspace: str) -> Submission:
    """The same job as a run would have it, put together without the preview."""
    spec = JobSpec(
        paths=AttemptPaths(0, ATTEMPT),
        workspace=workspace,
        name="render",
        command=COMMAND,
        resources=replace(merge_resources(job_resources(config), {}, 1), account="sandbox"),
        environment=job_environment(config, Path("/project")),
        limits=script_limits(config),
    )
    return make_submission(spec)


@contextmanager
def submissions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The bodies of the submissions that are sent meanwhile, as they are on the wire.

    One that is answered with the end of a session, which others may have pushed out, is none.
    """
    seen: list[dict[str, Any]] = []
    send = httpx.AsyncClient.send

    async def watched(client: httpx.AsyncClient, request: httpx.Request, **more: Any) -> Any:
        answer = await send(client, request, **more)
        submits = request.method == "POST" and request.url.path.endswith("/jobs")
        if submits and answer.status_code != SESSION_EXPIRED:
            seen.append(json.loads(request.content))
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(httpx.AsyncClient, "send", watched)
        yield seen


async def submitted(site: Site, config: BackendConfig) -> str:
    """Submit the job to the site; the workspace that it was made for."""
    async with in_use(site):
        facts = await site.open()
        job = await site.submit(submission(config, facts.workspace))
        await site.cancel([job])
        return facts.workspace


def test_firecrest(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = f"{sandbox.directory}/hpc2/scratch/mantik/{tmp_path.name}"
    api = {"Firecrest": {"ApiUrl": "https://f.org", "TokenUrl": "https://t.org", "Machine": "hpc2"}}
    config = config_of(api, workspace, "slurm")
    with submissions(monkeypatch) as seen:
        there = asyncio.run(submitted(firecrest_site(sandbox, "x", Workspace=workspace), config))
    assert there == workspace_below(workspace)
    made = shown(config)
    assert seen == [made.submission]
    assert made.script == seen[0]["job"]["script"]
    assert "#SBATCH --account=sandbox\n" in made.script


@pytest.mark.parametrize("scheduler", ["slurm", "none"])
def test_unicore(
    unicorex: UnicoreX,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheduler: Literal["slurm", "none"],
) -> None:
    workspace = str(unicorex.directory / "scratch" / tmp_path.name)
    login = {**ASKED["Environment"], "PreRunCommandOnLoginNode": ["true", "cd ."]}
    config = config_of({"UnicoreApiUrl": unicorex.url}, workspace, scheduler, Environment=login)
    site = unicore_site(unicorex, "x", Workspace=workspace, scheduler=scheduler)
    with submissions(monkeypatch) as seen:
        assert asyncio.run(submitted(site, config)) == workspace_below(workspace)
    made = shown(config)
    (sent,) = seen
    told = dict(made.submission)
    # Of the resources the server is sent those only that its queue knows, for it refuses others.
    assert sent.pop("Resources", {}).items() <= told.pop("Resources").items()
    assert sent == told
    if scheduler == "slurm":
        head, _, _ = made.script.partition("# Job: ")
        assert sent["Imports"][1]["Data"].startswith(head)
