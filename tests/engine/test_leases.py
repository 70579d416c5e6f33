"""A workspace has one owner, and one controller at a time leads it."""

import asyncio
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from snakemake_executor_plugin_mantik.common.errors import PlaceTaken, SiteRejected, SiteUnreachable
from snakemake_executor_plugin_mantik.engine.leases import Lease
from snakemake_executor_plugin_mantik.engine.place import Place, Places
from snakemake_executor_plugin_mantik.engine.request import Outcome
from snakemake_executor_plugin_mantik.engine.site_runner import SiteRunner
from snakemake_executor_plugin_mantik.engine.workflow_context import WorkflowContext
from snakemake_executor_plugin_mantik.jobs.paths import ATTEMPTS, PLACE
from snakemake_executor_plugin_mantik.journal import AttemptRecord, AttemptState, Journal, database
from snakemake_executor_plugin_mantik.sites.base import Entry
from tests.support.controller import CONFIG, request
from tests.support.laptop import Session, no_project_files
from tests.support.simulated import Fate, Fault, SimulatedPlanner, SimulatedSite, World

LONG_S = 5000.0


class Seat:
    """A controller: a journal and its access to a world."""

    def __init__(self, world: World, workdir: Path, name: str = "sim", url: str = "url") -> None:
        self.world, self.workdir, self.name, self.url = world, workdir, name, url
        self.journal = Journal(workdir / ".snakemake/mantik")
        self.said: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.site = SimulatedSite(world, name)
        state = workdir / ".snakemake/mantik"
        self.places = Places(
            WorkflowContext(self.journal, workdir, state, self.said.append, self._none)
        )

    async def _none(self, records: Sequence[AttemptRecord]) -> None:
        await self.work.canceller.give_up(records)

    async def lead(self, site: SimulatedSite | None = None) -> Place:
        """Lead the place, look after it and work there."""
        site = site or self.site
        facts = await site.open()
        url = self.url if site is self.site else f"{self.url} of {site.name}"
        place = await self.places.at(site, facts, CONFIG.site, url)
        self.journal.set_site(site.name, url, facts.workspace, place.id)
        planner = SimulatedPlanner(CONFIG, None, self.workdir, self.world)
        self.work = SiteRunner(site, facts, planner, place, self.places)
        self.tasks.append(asyncio.create_task(place.spare.keep()))
        return place

    async def job(self, number: int, *inputs: str, **values: Any) -> Outcome:
        asked = replace(request(number, *inputs), site=self.work.site.name, **values)
        outcome = await self.work.run(asked)
        await self.work.commit(outcome, asked)
        return outcome

    def die(self) -> None:
        for task in self.tasks:
            task.cancel()
        if hasattr(self, "work"):
            self.work.watcher.close()
        self.journal.close()


Seats = Callable[..., Seat]


@pytest.fixture
def seat(tmp_path: Path, world: World) -> Iterator[Seats]:
    """Makes as many controllers as a test wants; one takes the seat of another in its folder."""
    seats: dict[str, Seat] = {}
    with ExitStack() as stack:

        def sit(folder: str, **values: str) -> Seat:
            (tmp_path / folder).mkdir(exist_ok=True)
            if folder in seats:
                seats[folder].die()
            made = seats[folder] = Seat(world, tmp_path / folder, **values)
            stack.callback(made.die)
            return made

        yield sit


def copied(workdir: Path, name: str) -> None:
    shutil.copytree(workdir, workdir.parent / name)


async def planned(seat: Seat, number: int) -> None:
    seat.site.fault = lambda method, about: "unreachable" if method == "make_directory" else ""
    job = asyncio.create_task(seat.job(number))
    await asyncio.sleep(65.0)  # the place's spare has been written
    job.cancel()
    await asyncio.wait([job])
    seat.site.fault = lambda method, about: ""
    assert seat.journal.all_open_attempts()[-1].state is AttemptState.PLANNED


LED = "another controller of this workflow leads"


async def unlocked(seat: Seats, folder: str) -> Seat:
    """A controller that was refused, and whose user has typed `smk-mantik unlock`."""
    refused = seat(folder)
    before = set(refused.world.files)
    with pytest.raises(PlaceTaken, match=LED) as error:
        await refused.lead()
    assert "smk-mantik unlock" in str(error.value), "what to do"
    assert set(refused.world.files) == before
    [about] = refused.journal.locked()
    assert about.startswith("site sim, /ws: ")
    refused.journal.unlock()
    assert not refused.journal.locked()
    return seat(folder)


def leases(world: World) -> list[str]:
    return [path for path in world.files if path.startswith(f"{PLACE}/")]


async def test_another_workflow_is_refused_before_anything_is_sent(seat: Seats) -> None:
    await seat("first").lead()
    before = dict(seat("first-look").world.files)
    second = seat("second")
    with pytest.raises(PlaceTaken, match="another workflow owns") as error:
        await second.lead()
    assert "/first on " in str(error.value), "its name"
    assert "Site: Workspace" in str(error.value), "what to do"
    assert second.world.files == before
    assert set(second.site.calls) <= {"open", "list", "get"}


@pytest.mark.parametrize("copies", [False, True])
async def test_of_two_that_come_at_once_one_at_most_leads(
    seat: Seats, copies: bool, tmp_path: Path
) -> None:
    """Whatever the moments at which each writes and looks."""
    for step in range(12):
        names = [f"{step}-{n}" for n in "ab"]
        if copies:
            (tmp_path / names[0]).mkdir()
            with closing(Journal(tmp_path / names[0] / ".snakemake/mantik")):
                pass
            copied(tmp_path / names[0], names[1])
        seats = [seat(name) for name in names]

        async def come(one: Seat, after: float) -> Place:
            await asyncio.sleep(after)
            return await one.lead()

        led = await asyncio.gather(
            come(seats[0], 0.0), come(seats[1], 0.025 * step), return_exceptions=True
        )
        assert sum(isinstance(one, Place) for one in led) <= 1, (step, led)
        assert all(isinstance(one, Place | PlaceTaken) for one in led), led
        for one in seats:
            one.die()
        seats[0].world.files.clear()


class LateSite(SimulatedSite):
    """A site whose listings show what lay there some time ago."""

    lag_s = 0.0

    async def list(self, path: str) -> dict[str, Entry]:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        seen = await super().list(path)
        history: dict[str, list[tuple[float, dict[str, Entry]]]] = vars(self.world).setdefault(
            "listed", {}
        )
        history.setdefault(path, [(-math.inf, {})]).append((asked, seen))
        return [found for at, found in history[path] if at <= asked - self.lag_s][-1]


async def test_two_that_come_at_once_where_files_show_late(seat: Seats) -> None:
    """Neither leads before a listing has shown its lease, and so the other one's."""
    seats = [seat(name) for name in "ab"]
    sites = [LateSite(one.world) for one in seats]
    for site in sites:
        site.lag_s = 30.0
    led = await asyncio.gather(
        *(one.lead(site) for one, site in zip(seats, sites, strict=True)), return_exceptions=True
    )
    assert sum(isinstance(one, Place) for one in led) <= 1, led
    assert all(isinstance(one, Place | PlaceTaken) for one in led), led


async def test_nobody_leads_where_no_listing_shows_a_lease(seat: Seats) -> None:
    one = seat("a")
    site = LateSite(one.world)
    site.lag_s = LONG_S
    with pytest.raises(SiteRejected, match="has not listed them for 2 min"):
        await one.lead(site)


async def test_next_run_takes_the_next_number(seat: Seats) -> None:
    first = seat("flow")
    place = await first.lead()
    first.die()
    again = seat("flow")
    assert (await again.lead()).id == place.id
    assert again.site.calls == {"open": 1, "list": 3, "put": 1, "remove": 1}


@pytest.mark.parametrize(("method", "wrong"), [("list", "empty"), ("put", "damaged")])
@pytest.mark.parametrize("second", [False, True])
async def test_a_wrong_listing_and_a_lost_lease_give_a_place_no_second_one(
    seat: Seats, method: str, wrong: Fault, second: bool
) -> None:
    """Nor at a site of another name that sees the same place, in the same run."""
    first = seat("flow")
    place = await first.lead()
    again = seat("flow")
    other = SimulatedSite(first.world, "other")
    faulty = other if second else again.site
    faults: Iterator[Fault] = iter([wrong])
    faulty.fault = lambda called, about: next(faults, "") if called == method else ""
    assert (await again.lead()).lead.lease.place == place.id
    assert (await again.lead(other)).id == place.id
    await asyncio.sleep(LONG_S)
    [lease] = [o for path in first.world.files if (o := Lease.of(path.rpartition("/")[2]))]
    assert lease == again.work.place.lead.lease
    assert lease.term == 1
    await again.work.place.lead.assure()


def spoil(workdir: Path) -> None:
    for path in (workdir / ".snakemake/mantik").glob(
        "journal.sqlite*"
    ):  # what was written last lies beside
        path.write_bytes(b"no journal" * 1000)


async def test_a_journal_made_anew_leads_the_next_term_without_asking(seat: Seats) -> None:
    """It does not know which numbers of contents the damaged one has given."""
    first = seat("flow")
    place = await first.lead()
    assert place.lead.term == 1
    first.die()
    spoil(first.workdir)
    again = seat("flow")
    begun = asyncio.get_running_loop().time()
    found = await again.lead()
    assert (found.id, found.lead.term) == (place.id, 2)
    assert asyncio.get_running_loop().time() - begun < 1, "nobody was waited for"
    assert again.said == []


async def test_a_copy_whose_journal_is_made_anew_is_refused(seat: Seats, tmp_path: Path) -> None:
    first = seat("flow")
    await first.lead()
    copied(tmp_path / "flow", "copy")
    spoil(tmp_path / "copy")
    with pytest.raises(PlaceTaken, match=LED):
        await seat("copy").lead()


async def test_two_servers_at_one_directory_are_one_place(seat: Seats) -> None:
    """What one has sent, or its job has made, the other one reads without a transfer."""
    flow = seat("flow", name="juwels")
    (flow.workdir / "data").write_text("seven")
    first = await flow.lead()
    assert (await flow.job(1, "data")).succeeded
    other = SimulatedSite(flow.world, "jureca")
    second = await flow.lead(other)
    assert second is first
    assert (await flow.job(2, "data", "out/1")).succeeded
    sent = [spec for spec in flow.world.specs.values() if spec.inline]
    assert [spec.name for spec in sent] == ["job-1"]


@pytest.mark.parametrize("names", [("sim",), ("sim", "other")])
def test_names_of_one_place_look_after_it_together(tmp_path: Path, names: Sequence[str]) -> None:
    """How often an idle controller looks whether it leads does not depend on how many there are."""
    session = Session(dict.fromkeys(names, World()), tmp_path, CONFIG, one_client=True)

    async def idle() -> None:
        await session.engine.opened(no_project_files(), *names)
        await asyncio.sleep(LONG_S)
        await session.engine.closed(tidy=False)

    session.run(idle())
    assert LONG_S / 150 <= session.sites["sim"].calls["list"] <= LONG_S / 100


@pytest.mark.parametrize("noted", [False, True])
async def test_a_copy_leads_when_its_user_says_that_the_other_one_has_ended(
    seat: Seats, world: World, tmp_path: Path, noted: bool
) -> None:
    """It follows jobs that run, and those that the place's spare names; others end at their start.

    The spare is a minute old at most.
    """
    world.duration = lambda spec: LONG_S
    world.fate = lambda spec: Fate(starts=(10.0 if spec.name == "job-1" else 1000.0,))
    flow = seat("flow")
    await flow.lead()
    copied(tmp_path / "flow", "copy")
    jobs = [asyncio.create_task(flow.job(number)) for number in (1, 2)]
    await asyncio.sleep(100.0 if noted else 50.0)
    waits = next(j.spec.paths.attempt_id for j in world.jobs.values() if j.spec.name == "job-2")
    flow.die()
    for job in jobs:
        job.cancel()
    copy = await unlocked(seat, "copy")
    assert (await copy.lead()).lead.term == 2
    assert "job-1" in copy.said[-1]
    assert ("job-2" in copy.said[-1]) is noted
    assert all([(await copy.job(number)).succeeded for number in (1, 2)])
    assert [run.job for run in world.runs] == ["job-1", "job-2"]
    assert (world.runs[-1].attempt_id == waits) is noted
    copy.die()
    with pytest.raises(PlaceTaken, match=LED) as error:
        await seat("flow").lead()
    assert "/copy on " in str(error.value)
    assert ", since 2" in str(error.value)


async def test_only_the_lease_that_the_user_was_told_of_is_followed(
    seat: Seats, tmp_path: Path
) -> None:
    """And only by the journal that noted it."""
    await seat("flow").lead()
    copied(tmp_path / "flow", "copy")
    await unlocked(seat, "copy")
    copied(tmp_path / "copy", "another")
    await unlocked(seat, "another")
    await seat("flow").lead()
    await (await unlocked(seat, "copy")).lead()
    await (await unlocked(seat, "flow")).lead()
    for folder in ("copy", "another"):
        with pytest.raises(PlaceTaken, match=LED):
            await seat(folder).lead()


@pytest.mark.parametrize("step", ["submits", "waits"])
async def test_a_former_controller_that_lives_notices_at_its_next_step(
    seat: Seats, world: World, tmp_path: Path, step: str
) -> None:
    world.duration = lambda spec: LONG_S
    flow = seat("flow")
    place = await flow.lead()
    copied(tmp_path / "flow", "copy")
    job = asyncio.create_task(flow.job(1))
    await asyncio.sleep(100.0)
    copy = await unlocked(seat, "copy")
    await copy.lead()
    sent = flow.site.calls["submit"]
    if step == "submits":
        await asyncio.sleep(100.0)
        with pytest.raises(PlaceTaken, match=LED):
            await flow.job(2)
    if step == "waits":
        with pytest.raises(PlaceTaken, match=LED):
            await asyncio.wait_for(job, 200.0)
    assert "/copy on " in str(place.lead.deposed)
    assert flow.site.calls["submit"] == sent
    job.cancel()
    assert (await copy.job(1)).succeeded
    assert [run.job for run in world.runs] == ["job-1"]


async def test_a_former_controller_removes_nothing_at_its_end(
    seat: Seats, world: World, tmp_path: Path
) -> None:
    """What has ended for it, the other one may not have seen yet."""
    world.duration = lambda spec: 200.0
    flow = seat("flow")
    place = await flow.lead()
    job = asyncio.create_task(flow.job(1))
    await asyncio.sleep(100.0)
    copied(tmp_path / "flow", "copy")
    assert (await job).succeeded
    copy = await unlocked(seat, "copy")
    await copy.lead()
    await place.tidy()
    assert (await copy.job(1)).succeeded
    assert [run.job for run in world.runs] == ["job-1"]


@pytest.mark.parametrize("known", ["term", "number"])
async def test_a_controller_that_could_not_look_does_so_before_its_next_step(
    seat: Seats, known: str
) -> None:
    """One with the same journal, too, where files cannot be locked."""
    flow = seat("flow")
    place = await flow.lead()
    lease = place.lead.lease
    later = replace(lease, number=lease.number + 1)
    if known == "term":
        later = replace(lease, term=lease.term + 1, instance="b" * 16)
    flow.world.write(later.path, b"it\n")
    place.lead.doubt()
    flow.site.fault = lambda method, about: "unreachable" if method == "list" else ""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(place.lead.assure(), 10.0)
    flow.site.fault = lambda method, about: ""
    with pytest.raises(PlaceTaken, match=f"{LED} this workspace: it"):
        await place.lead.assure()
    assert {lease.path, later.path} <= set(flow.world.files)


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("runs", [False, True])
async def test_what_two_copies_have_planned_belongs_to_the_one_that_submits_it(
    seat: Seats, world: World, tmp_path: Path, runs: bool, given_up: bool, changed: bool
) -> None:
    """The other one follows it if it runs, whatever became of it there; else it never starts.

    If the job has changed since, it is ended first. A plan may run without a sign of life.
    """
    stalled = (20.0, 500.0) if changed and not given_up else (0.0, 0.0)
    world.fate = lambda spec: Fate(starts=(10.0 if runs else 1000.0,), stalled=stalled)
    world.duration = lambda spec: LONG_S
    flow = seat("flow")
    await flow.lead()
    await planned(flow, 1)
    copied(tmp_path / "flow", "copy")
    copy = seat("copy")
    if given_up:
        [record] = copy.journal.all_open_attempts()
        copy.journal.abandoned(record.id, "cancelled")
    job = asyncio.create_task(flow.job(1))
    await asyncio.sleep(50.0 if runs else 0.5)
    [first] = flow.world.jobs.values()
    job.cancel()
    flow.die()
    copy = await unlocked(seat, "copy")
    await copy.lead()
    if not runs:
        await asyncio.sleep(LONG_S)
        assert not copy.world.runs
    command = "another" if changed else request(1).command
    assert (await copy.job(1, command=command)).succeeded
    run = copy.world.runs[-1]
    assert len(copy.world.runs) == 1 + (runs and changed)
    assert all(one.ended <= run.begun for one in copy.world.runs[:-1] if one.ended is not None)
    same = (runs or not given_up) and not changed
    assert (run.attempt_id == first.spec.paths.attempt_id) is same


async def test_tidying_leaves_what_another_journal_made(seat: Seats, tmp_path: Path) -> None:
    flow = seat("flow")
    place = await flow.lead()
    flow.world.write(f"{ATTEMPTS}/17/{'0' * 36}", b"owner=x\n")
    assert (await flow.job(1)).succeeded
    await place.tidy()
    left = [p for p in flow.world.files if p.startswith(f"{ATTEMPTS}/")]
    assert left == [f"{ATTEMPTS}/17", f"{ATTEMPTS}/17/{'0' * 36}"]


async def test_claims_of_a_lost_journal_are_not_written_over(seat: Seats) -> None:
    flow = seat("flow")
    flow.world.write(f"{ATTEMPTS}/0/{'0' * 36}", b"owner=x\n")
    with pytest.raises(PlaceTaken, match="whose journal"):
        await flow.lead()
    assert not leases(flow.world)


async def test_what_another_controller_has_numbered_is_older_after_a_takeover(
    seat: Seats, tmp_path: Path
) -> None:
    flow = seat("flow")
    (flow.workdir / "data").write_text("mine")
    await flow.lead()
    assert (await flow.job(1, "data")).succeeded
    flow.die()
    copied(tmp_path / "flow", "copy")
    copy = await unlocked(seat, "copy")
    await copy.lead()
    copy.die()
    copy.world.write("data", b"other")
    copy.world.write(".mantik/newer/data.n", b"7\n")
    flow = await unlocked(seat, "flow")
    await flow.lead()
    assert (await flow.job(2, "data")).succeeded
    assert flow.world.files["data"] == b"mine"


async def test_a_lease_that_was_swept_is_written_again(seat: Seats) -> None:
    flow = seat("flow")
    place = await flow.lead()
    [lease] = leases(flow.world)
    flow.world.remove(PLACE)
    await asyncio.sleep(200.0)
    assert leases(flow.world) == [lease]
    assert place.lead.deposed is None


@pytest.mark.parametrize("smaller", [True, False])
async def test_who_leads_gives_way_to_nobody_who_comes_by_a_wrong_listing(
    seat: Seats, smaller: bool
) -> None:
    """Although its own next listing shows nobody, either."""

    def hide(site: SimulatedSite, times: int) -> None:
        faults: Iterator[Fault] = iter(["empty"] * times)
        site.fault = lambda method, about: next(faults, "") if about == PLACE else ""

    flow = seat("flow")
    place = await flow.lead()
    comers = (seat(f"other-{n}") for n in range(50))
    other = next(o for o in comers if (o.journal.instance < flow.journal.instance) == smaller)
    hide(other.site, 2)
    coming = asyncio.create_task(other.lead())
    await asyncio.sleep(5.0 if smaller else 0.0)
    hide(flow.site, 2)
    place.lead.doubt()
    await place.lead.assure()
    with pytest.raises(PlaceTaken, match="another workflow owns"):
        await coming
    assert (await flow.job(1)).succeeded


async def test_who_led_a_swept_place_gives_way_where_listings_are_slow(seat: Seats) -> None:
    flow = seat("flow")
    place = await flow.lead()
    flow.world.remove(PLACE)
    await seat("other").lead()
    flow.site.fault = lambda method, about: "slowly" if about == PLACE else ""
    place.lead.doubt()
    with pytest.raises(PlaceTaken, match="another workflow owns"):
        await place.lead.assure()
    assert len(leases(flow.world)) == 1


async def test_a_controller_finds_out_that_another_workflow_came_to_the_swept_place(
    seat: Seats,
) -> None:
    flow = seat("flow")
    place = await flow.lead()
    flow.world.purge()
    other = seat("other")
    await other.lead()
    await asyncio.sleep(100.0)
    with pytest.raises(PlaceTaken, match="another workflow owns") as error:
        await flow.job(1)
    assert "/other on " in str(error.value)
    assert place.lead.deposed is error.value
    assert (await other.job(2)).succeeded
    assert [run.job for run in flow.world.runs] == ["job-2"]


@pytest.mark.parametrize("lives", [False, True])
async def test_a_copy_is_refused_where_the_lease_was_swept_and_claims_were_not(
    seat: Seats, world: World, tmp_path: Path, lives: bool
) -> None:
    """One that lives writes its lease again, which the user has not been told of."""
    world.duration = lambda spec: LONG_S
    world.fate = lambda spec: Fate(starts=(10.0 if spec.name == "job-1" else 1000.0,))
    flow = seat("flow")
    await flow.lead()
    flow.die()
    copied(tmp_path / "flow", "copy")
    for folder in ("copy", "flow"):
        await (await unlocked(seat, folder)).lead()
    flow = seat("flow")
    place = await flow.lead()
    jobs = [asyncio.create_task(flow.job(number)) for number in (1, 2)]
    await asyncio.sleep(100.0)
    flow.world.remove(PLACE)
    if not lives:
        for job in jobs:
            job.cancel()
        flow.die()
    copy = await unlocked(seat, "copy")
    if lives:
        await asyncio.sleep(200.0)
        with pytest.raises(PlaceTaken, match=LED):
            await copy.lead()
        assert place.lead.deposed is None
        assert all(outcome.succeeded for outcome in await asyncio.gather(*jobs))
        return
    await copy.lead()
    outcomes = await asyncio.gather(copy.job(1), copy.job(2))
    assert all(outcome.succeeded for outcome in outcomes)
    assert [run.job for run in world.runs] == ["job-1", "job-2"]
    copy.die()
    world.remove(PLACE)
    world.write(f"{ATTEMPTS}/17/{'0' * 36}", b"owner=x\n")
    await unlocked(seat, "copy")  # once more


async def test_a_place_is_found_by_any_of_its_sites(seat: Seats) -> None:
    flow = seat("flow")
    place = await flow.lead()
    flow.journal.set_site("aaa", "url", "/ws", place.id)
    flow.journal.set_site("zzz", "url", "/ws", place.id)
    tried: list[str] = []
    down: set[str] = {"aaa", "sim"}

    async def open_site(name: str) -> None:
        tried.append(name)
        if name in down:
            raise SiteUnreachable(f"{name} has not answered")
        found._known[place.id] = place

    found = Places(flow.places.workflow, open_site)
    assert await found._find(place.id) is place
    assert await found._find(place.id) is place
    assert tried.count("zzz") == 1
    down.add("zzz")
    found = Places(flow.places.workflow, open_site)
    with pytest.raises(SiteUnreachable, match="has not answered"):
        await found._find(place.id)


STATE = ".snakemake/mantik"


async def test_a_run_whose_journal_was_removed_under_it_finds_out_that_another_one_leads(
    seat: Seats, world: World, tmp_path: Path
) -> None:
    """Where directories cannot be locked, nothing else tells it."""
    world.duration = lambda spec: LONG_S
    flow = seat("flow")
    await flow.lead()
    job = asyncio.create_task(flow.job(1))
    await asyncio.sleep(50.0)
    (tmp_path / "flow" / STATE).rename(tmp_path / "lost")
    with mock.patch.object(database, "_take_directory", return_value=True):
        other = Seat(flow.world, tmp_path / "flow")
    faults: Iterator[Fault] = iter(["unreachable"])
    other.site.fault = lambda called, about: next(faults, "") if called == "get" else ""
    await other.lead()
    assert (await other.job(1)).succeeded
    with pytest.raises(PlaceTaken):
        await job
    with pytest.raises(PlaceTaken):
        await flow.job(2)
    other.die()
    assert [run.job for run in flow.world.runs] == ["job-1"]


async def test_a_refused_spare_keeps_no_job_from_being_submitted(seat: Seats, world: World) -> None:
    flow = seat("flow")
    await flow.lead()
    await asyncio.sleep(330.0)
    spare = f"{PLACE}/spare."
    flow.site.fault = lambda method, about: "rejected" if about.startswith(spare) else ""
    assert (await flow.job(1)).succeeded


@pytest.mark.parametrize("copied", ["before the run", "in it", "before a refusal"])
@pytest.mark.parametrize("starts", [10.0, 1000.0])
async def test_an_older_copy_of_the_journal_that_is_put_back_doubles_nothing(
    seat: Seats, world: World, tmp_path: Path, starts: float, copied: str
) -> None:
    """A job that runs is followed; what still waits starts under an older term, and ends."""
    refused = Fate(at_once=True)
    world.fate = lambda spec: refused if spec.name == "job-2" else Fate(starts=(starts,))
    world.duration = lambda spec: LONG_S
    flow = seat("flow")
    await flow.lead()
    if copied != "before the run":  # which has had nothing to do for a while
        await asyncio.sleep(330.0)
    shutil.copytree(tmp_path / "flow" / STATE, tmp_path / "older")
    if copied == "before the run":
        flow.die()
        flow = seat("flow")
        await flow.lead()
    if copied == "before a refusal":
        with pytest.raises(SiteRejected):
            await flow.job(2)
        await asyncio.sleep(35.0)
    job = asyncio.create_task(flow.job(1))
    await asyncio.sleep(20.0)
    job.cancel()
    await asyncio.wait([job])
    flow.die()
    shutil.rmtree(tmp_path / "flow" / STATE)
    (tmp_path / "older").rename(tmp_path / "flow" / STATE)
    flow = seat("flow")
    await flow.lead()
    assert (await flow.job(1)).succeeded
    assert [run.job for run in world.runs] == ["job-1"]


async def test_a_spare_that_was_read_in_part_is_not_believed_later(
    seat: Seats, world: World, tmp_path: Path
) -> None:
    """It names a job that was not known, so that the same job was submitted again."""
    world.fate = lambda spec: Fate(starts=(1000.0 if world.now < 300.0 else 1.0,))
    world.duration = lambda spec: LONG_S
    flow = seat("flow")
    await flow.lead()
    older = tmp_path / "older"
    shutil.copytree(tmp_path / "flow" / STATE, older)

    async def submit(seconds: float) -> None:
        job = asyncio.create_task(flow.job(1))
        await asyncio.sleep(seconds)
        job.cancel()
        await asyncio.wait([job])
        flow.die()
        shutil.rmtree(tmp_path / "flow" / STATE)
        shutil.copytree(older, tmp_path / "flow" / STATE)

    await submit(200.0)
    [spare] = [path for path in world.files if "/spare." in path]
    whole, world.files[spare] = world.files[spare], b"damaged\n"
    await asyncio.sleep(200.0)
    flow = seat("flow")
    await flow.lead()
    world.files[spare] = whole
    await submit(20.0)
    flow = seat("flow")
    await flow.lead()
    await asyncio.sleep(LONG_S / 2)
    assert [run.job for run in world.runs] == ["job-1"]


async def test_what_a_found_job_reads_is_not_replaced_under_it(
    seat: Seats, world: World, tmp_path: Path
) -> None:
    """Its claim says what it reads, though the journal knows no file at the place."""
    world.duration = lambda spec: LONG_S if spec.name == "job-2" else 10.0
    flow = seat("flow")
    await flow.lead()
    assert (await flow.job(1)).succeeded
    job = asyncio.create_task(flow.job(2, "out/1"))
    await asyncio.sleep(20.0)
    job.cancel()
    await asyncio.wait([job])
    flow.die()
    shutil.rmtree(tmp_path / "flow" / STATE)
    world.files = {path: of for path, of in world.files.items() if "/spare." not in path}
    flow = seat("flow")
    await flow.lead()
    assert (await flow.job(1, command="make 1 anew")).succeeded
    ended = "job-2: the job that an earlier run submitted to sim is ended"
    assert [said for said in flow.said if ended in said]
    reader, again = world.runs[1:]
    assert reader.ended is not None
    assert reader.ended <= again.begun
