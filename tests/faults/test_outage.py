"""Ten minutes of outage in each phase, in virtual time: the run pauses, and then it goes on."""

import asyncio
from pathlib import Path

import pytest

from tests.support.controller import Controller, request, simulate
from tests.support.simulated import Fault, World

OUTAGE_S = 600.0

PHASES = {
    "stage": ("make_directory", "put"),
    "submit": ("submit",),
    "watch": ("list",),
    "fetch": ("get",),
    "cancel": ("cancel",),
}
"""The call of a site that an outage begins with."""


@pytest.mark.parametrize("fault", ["unreachable", "lost", "busy", "unauthorized", "not found"])
@pytest.mark.parametrize("phase", PHASES)
def test_outage(phase: str, fault: Fault, tmp_path: Path) -> None:
    lasts = 5000.0 if phase == "cancel" else 50.0
    world = World(duration=lambda spec: lasts, place=lambda path: "alone")
    (tmp_path / "large").write_bytes(b"x" * 600_000)
    (tmp_path / "large2").write_bytes(bytes(range(256)) * 2400)
    jobs = [request(0, "large"), request(1, "large2"), request(2)]
    began: list[float] = []

    async def play(controller: Controller) -> list[bool]:
        loop = asyncio.get_running_loop()

        def out(method: str, about: str) -> Fault:
            if not began and method in PHASES[phase]:
                began.append(loop.time())
            return fault if began and loop.time() < began[0] + OUTAGE_S else ""

        if phase == "cancel":
            running = [asyncio.create_task(controller.work.run(job)) for job in jobs]
            while len(world.runs) < len(jobs):
                await asyncio.sleep(1)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            controller.site.fault = out
            left = await controller.work.canceller.cancel(
                controller.journal.all_open_tries(), 1200.0
            )
            return [not left]
        controller.site.fault = out
        return [o.succeeded for o in await asyncio.gather(*map(controller.job, jobs))]

    said: list[str] = []

    async def noted(controller: Controller) -> list[bool]:
        controller.said = said
        return await play(controller)

    assert all(simulate(tmp_path, world, noted)), said
    assert world.now > OUTAGE_S
    how = "exit 143" if phase == "cancel" else "exit 0"
    assert [run.how for run in world.runs] == [how] * len(jobs)
