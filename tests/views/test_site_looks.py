"""What looks at a site cost, and what they show."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.connections import connect
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.journal import read_history
from snakemake_executor_plugin_mantik.sites.authentication import Credential
from snakemake_executor_plugin_mantik.sites.base import JobState, Phase
from snakemake_executor_plugin_mantik.views.sites import SiteLooks
from snakemake_executor_plugin_mantik.views.workflow import Condition, Sight, overview_jobs
from tests.support.controller import Controller, request, simulate
from tests.support.simulated import Fate, World


@pytest.mark.parametrize("lag", [False, True])
def test_each_look_is_one_request_whatever_the_number_of_jobs(tmp_path: Path, lag: bool) -> None:
    """Nothing is asked about a job whose marker was seen, and nothing without open jobs."""
    starts = iter([10.0, 2000.0, 2000.0])
    world = World(lambda spec: Fate(starts=(next(starts),), stalled=(1.0, 900.0)))

    async def play(controller: Controller) -> None:
        jobs = [asyncio.create_task(controller.job(request(n))) for n in range(3)]
        await asyncio.sleep(500.0)
        site, records = controller.site, read_history(tmp_path / ".snakemake/mantik")
        site.states_lag = lag
        looks = SiteLooks(site, {}, {})
        phases: list[Counter[Condition | None]] = []
        for _ in range(2):
            before = site.calls.copy()
            await looks.look(records)
            new = site.calls - before
            assert sum(new.values()) == 1, new
            phases.append(Counter(sight.condition for sight in looks.sights.values()))
        assert phases[-1] == {Condition.RUNNING: 1, Condition.WAITING: 2}
        reasons = {sight.pending for sight in looks.sights.values()}
        assert reasons == ({""} if lag else {"", "Priority"})
        assert all(outcome.succeeded for outcome in await asyncio.gather(*jobs))

        before = site.calls.copy()
        await looks.look([])
        assert site.calls == before

    simulate(tmp_path, world, play)


def test_a_claim_counts_more_than_a_list_of_jobs_that_lags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(controller: Controller) -> None:
        job = asyncio.create_task(controller.job(request(1)))
        await asyncio.sleep(3.5)
        records = read_history(tmp_path / ".snakemake/mantik")

        async def lagging(ids: Sequence[str]) -> dict[str, JobState]:
            return {i: JobState(Phase.WAITING, pending="Priority") for i in ids}

        monkeypatch.setattr(controller.site, "glance", lagging)
        looks = SiteLooks(controller.site, {}, {})
        phases = []
        for _ in range(3):
            await looks.look(records)
            [sight] = looks.sights.values()
            phases.append((sight.condition, sight.pending))
        assert phases == [(Condition.WAITING, "Priority"), *2 * [(Condition.RUNNING, "")]]
        await job

    simulate(tmp_path, World(lambda spec: Fate(stalled=(1.0, 5.0))), play)


def test_of_several_submissions_of_a_job_the_one_that_runs_counts(tmp_path: Path) -> None:
    """Whichever the journal names last: another one ended at once, without the claim."""

    async def play(controller: Controller) -> None:
        job = asyncio.create_task(controller.job(request(1)))
        await asyncio.sleep(3.5)
        assert (await controller.job(request(2))).succeeded
        runs, ended = read_history(tmp_path / ".snakemake/mantik")
        both = replace(runs, site_jobs=(*runs.site_jobs, *ended.site_jobs))
        looks = SiteLooks(controller.site, {}, {})
        for _ in range(3):
            await looks.look([both])
            [sight] = looks.sights.values()
            assert sight.condition is Condition.RUNNING
        await job

    durations = {"job-1": 1000.0, "job-2": 1.0}
    simulate(tmp_path, World(duration=lambda spec: durations[spec.name]), play)


def test_what_is_said_of_a_job_does_not_change_with_the_kind_of_the_look(tmp_path: Path) -> None:
    """Its node was lost: the list of jobs says that it ended, and its claim lies there."""

    async def play(controller: Controller) -> None:
        job = asyncio.create_task(controller.job(request(1)))
        await asyncio.sleep(30.0)
        job.cancel()
        await asyncio.sleep(100.0)
        looks = SiteLooks(controller.site, {}, {})
        seen = []
        for _ in range(4):
            await looks.look(read_history(tmp_path / ".snakemake/mantik"))
            [sight] = looks.sights.values()
            seen.append(sight.condition)
        assert seen == [Condition.OVER] * 4

    fate = Fate(killed_after=40.0, reason=Reason.NODE_FAILURE, warned=False)
    simulate(tmp_path, World(lambda spec: fate, lambda spec: 1000.0), play)


def test_a_marker_counts_more_than_the_scheduler(tmp_path: Path) -> None:
    """A job that has ended is not asked about again; one that runs does not wait again."""

    async def play(controller: Controller) -> None:
        job = asyncio.create_task(controller.job(request(1)))
        await asyncio.sleep(3.5)
        job.cancel()  # nobody fetches what it makes, as without a controller
        records = read_history(tmp_path / ".snakemake/mantik")
        looks = SiteLooks(controller.site, {}, {})
        for _ in range(2):
            await looks.look(records)
        [sight] = looks.sights.values()
        [seen] = overview_jobs(records, controlled=False, sights=looks.sights)
        assert (sight.condition, seen.condition) == (Condition.RUNNING, Condition.RUNNING)
        for _ in range(2):
            await asyncio.sleep(60.0)
            await looks.look(records)
        assert list(looks.sights.values()) == [Sight(Condition.OVER, 0)]
        before = controller.site.calls.copy()
        await looks.look(records)
        assert controller.site.calls == before
        [seen] = overview_jobs(records, controlled=False, sights=looks.sights)
        assert seen.words == (
            "ended at the site with exit code 0; the next run fetches its results"
        )

    simulate(tmp_path, World(lambda spec: Fate(stalled=(1.0, 5.0))), play)


def test_beside_a_controller_nobody_is_asked_to_log_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last lines of jobs are not worth a question in the middle of a table."""

    class Login(Credential):
        interactive = True

        def login(self) -> None:
            raise AssertionError("asked")

    monkeypatch.setattr(connect, "find_site_credentials", lambda *_: {"sim": Login()})
    loaded: Any = None

    async def opened() -> None:
        await connect.open_site_again("sim", loaded, tmp_path, may_ask=False)

    with pytest.raises(UserError, match="needs a login in a browser"):
        asyncio.run(opened())
