"""How the end of an attempt becomes known, in virtual time."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import (
    PlaceTaken,
    SiteError,
    SiteRejected,
    SiteUnreachable,
)
from snakemake_executor_plugin_mantik.config.settings import SiteSettings
from snakemake_executor_plugin_mantik.engine import evidence
from snakemake_executor_plugin_mantik.engine.evidence import LOOK, Evidence, Finding
from snakemake_executor_plugin_mantik.engine.site_retry import SiteRetry
from snakemake_executor_plugin_mantik.engine.watch import INTERRUPTED_WAIT_S, SPACING_S, Watcher
from snakemake_executor_plugin_mantik.jobs.paths import parse_marker_name
from snakemake_executor_plugin_mantik.jobs.reasons import Reason
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec, Resources
from snakemake_executor_plugin_mantik.journal import AttemptRecord, AttemptState, Journal
from snakemake_executor_plugin_mantik.sites.base import Entry, JobState, Submission
from tests.support.simulated import Fate, Fault, SimulatedSite, World
from tests.support.virtualtime import run

DAY_S = 86400.0
WITHIN_S = 30.0
"""How soon an end without a marker has to be known."""


class Bench:
    def __init__(self, world: World, journal: Journal) -> None:
        self.world = world
        self.site = SimulatedSite(world)
        self.journal = journal
        self.said: list[str] = []
        self.waits: list[str] = []
        self.pending: list[str] = []
        self.began: list[bool] = []
        self.logged: list[tuple[float, int]] = []
        self.settings = SiteSettings()
        clock = asyncio.get_running_loop().time
        self.watcher = Watcher(
            self.site, self.settings, SiteRetry("sim", self.said.append, clock),
            journal.submitted, clock,
            on_logged=lambda _, size: self.logged.append((self.now, size)),
            on_waiting=lambda _, why: self.waits.append(why),
            on_pending=lambda _, why, __: self.pending.append(why),
            on_started=lambda _, began: self.began.append(began),
        )  # fmt: skip

    def new(self, name: str = "job") -> AttemptRecord:
        record = self.journal.new_attempt(
            site="sim", job=name, rule="r", name=name, fingerprint="f"
        )
        self.world.specs[record.id] = JobSpec(record.paths, "/ws", name, "true")
        self.world.make_directory(record.paths.attempts)
        return record

    def sent(self, name: str = "job") -> tuple[AttemptRecord, str]:
        record = self.new(name)
        return record, self.world.submit(Submission(record.id, name, "", Resources()))

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()


@pytest.fixture
async def bench(tmp_path: Path, world: World) -> AsyncIterator[Bench]:
    with closing(Journal(tmp_path / "journal")) as journal:
        bench = Bench(world, journal)
        async with asyncio.timeout(100 * DAY_S):
            yield bench
        bench.watcher.close()


def fated(world: World, fate: Fate, seconds: float = 100.0) -> None:
    world.fate, world.duration = lambda spec: fate, lambda spec: seconds


async def end_of(bench: Bench) -> Evidence:
    record, site_job = bench.sent()
    return await bench.watcher.watch(record, [site_job])


@pytest.mark.parametrize("since", [0.0, DAY_S])
async def test_an_end_that_the_last_listing_showed_is_known_at_once(
    bench: Bench, since: float
) -> None:
    """One that was seen long ago is looked for again."""
    fated(bench.world, Fate())
    (early, job), (late, other) = bench.sent("early"), bench.sent("late")
    await bench.watcher.watch(late, [other])
    cycles = bench.watcher.cycles
    await asyncio.sleep(since)
    end = await bench.watcher.watch(early, [job])
    assert (bench.watcher.cycles > cycles) == (since > 0)
    assert (end.found, end.exit_code, len(end.ids)) == (Finding.MARKER, 0, 1)


@pytest.mark.parametrize("known", [[], ["never-heard-of"]])
async def test_a_submission_whose_answer_was_lost_is_kept_alive(
    bench: Bench, known: list[str]
) -> None:
    """It is the first one, or follows another one."""
    fated(bench.world, Fate(starts=(0.5,)), 3 * DAY_S)
    record, job = bench.sent()
    end = await bench.watcher.watch(record, known, sent=len(known) + 1)
    assert end.ids == [*known, job]
    assert end.exit_code == 0


@pytest.mark.parametrize("trouble", ["unreachable", "rejected"])
async def test_extension_is_asked_again_where_it_failed(bench: Bench, trouble: Fault) -> None:
    fated(bench.world, Fate(), 3 * DAY_S)

    def fault(method: str, about: str) -> Fault:
        return trouble if method == "extend" and bench.now < 7200 else ""

    bench.site.fault = fault
    end = await end_of(bench)
    assert bool(bench.said) == (trouble == "rejected"), bench.said
    assert end.exit_code == 0


async def test_killed_soon_after_a_long_wait_is_known_as_soon(bench: Bench) -> None:
    fated(bench.world, Fate((3 * DAY_S,), killed_after=50), 3000)
    end = await end_of(bench)
    assert bench.now - 3 * DAY_S < 50 + WITHIN_S + 15, (
        "the long wait in the queue must not make us slow"
    )
    assert end.claimed


async def test_attempt_without_a_trace_vanishes_later_each_time(bench: Bench) -> None:
    waits = []
    for sent in (1, 2, 3, 20):
        begun = bench.now
        end = await bench.watcher.watch(bench.new(), [], sent=sent)
        assert end.found is Finding.VANISHED
        waits.append(bench.now - begun)
    assert [round(w / 120) for w in waits[:3]] == [1, 2, 4], waits
    assert waits[3] < 1.2 * DAY_S, "it is tried once a day at least"


@pytest.mark.parametrize("error", [SiteUnreachable("no list", status=500), SiteRejected("no")])
async def test_unknown_is_submitted_again_where_the_site_cannot_list_jobs(
    bench: Bench, error: SiteError
) -> None:
    async def find(names: Mapping[str, str]) -> dict[str, list[str]]:
        raise error

    bench.site.find = find  # type: ignore[method-assign]
    begun = bench.now
    end = await bench.watcher.watch(bench.new(), [])
    assert bench.now - begun <= bench.settings.timing.unknown_wait_s + WITHIN_S
    (line,) = bench.said
    assert "cannot list your jobs" in line
    assert end.found is Finding.VANISHED


async def test_what_cannot_be_revoked_is_not_given_up(bench: Bench) -> None:
    """No inodes left at the site: a refused mkdir is no claim."""
    fated(bench.world, Fate(refused=True))

    def fault(method: str, about: str) -> Fault:
        return "rejected" if method == "make_directory" and bench.now < 5000 else ""

    bench.site.fault = fault
    end = await end_of(bench)
    assert bench.now >= 5000
    assert not end.claimed


async def test_trouble_with_one_does_not_stop_the_others(bench: Bench) -> None:
    fated(bench.world, Fate(killed_after=10))
    record, site_job = bench.sent()

    def fault(method: str, about: str) -> Fault:
        return "rejected" if about in (broken.paths.claim, broken.id) else ""

    broken = bench.new()
    bench.site.fault = fault
    stuck = asyncio.ensure_future(bench.watcher.watch(broken, []))
    end = await bench.watcher.watch(record, [site_job])
    assert bench.now < 600
    assert not stuck.done()
    assert end.found is Finding.ENDED


async def test_mistake_of_ours_does_not_leave_jobs_waiting_for_ever(bench: Bench) -> None:
    fated(bench.world, Fate())
    bench.site.fault = lambda method, about: "bug" if method == "list" else ""
    with pytest.raises(KeyError):
        await end_of(bench)
    bench.site.fault = lambda method, about: ""
    assert (await end_of(bench)).exit_code == 0, "and the watcher goes on"


async def test_job_watched_again_while_it_is_examined_is_not_forgotten(bench: Bench) -> None:
    """Another controller takes over, and the job is tried again, before a request is answered."""
    fated(bench.world, Fate(refused=True))
    record, site_job = bench.sent()
    again: list[asyncio.Future[Evidence]] = []

    def fault(method: str, about: str) -> Fault:
        if method == "make_directory" and not again:
            bench.watcher.fail(PlaceTaken("another controller leads"))
            again.append(bench.watcher.watch(record, [site_job]))
        return ""

    bench.site.fault = fault
    with pytest.raises(PlaceTaken):
        await bench.watcher.watch(record, [site_job])
    assert (await again[0]).found is Finding.REVOKED


async def test_one_listing_per_cycle_whatever_the_number_of_attempts(bench: Bench) -> None:
    fated(bench.world, Fate(starts=(1.0,)))
    sent = [bench.sent(f"job-{n}") for n in range(200)]
    waiting = [bench.watcher.watch(record, [i]) for record, i in sent]
    await asyncio.gather(*waiting)
    assert bench.site.calls["list"] == bench.watcher.cycles


async def test_interval_grows_with_quiet_and_stays_within_limits(bench: Bench) -> None:
    fated(bench.world, Fate(starts=(4000.0,)))
    record, site_job = bench.sent()
    waiting = asyncio.ensure_future(bench.watcher.watch(record, [site_job]))
    seen = []
    for pause in (0, 100, 2000):
        await asyncio.sleep(pause)
        seen.append(round(bench.watcher.interval()))
    assert seen == [1, 10, 15]
    await waiting


async def test_what_a_job_logs_is_seen_soon_even_after_a_long_silence(bench: Bench) -> None:
    fated(bench.world, Fate(), 6 * 3600.0)
    record, site_job = bench.sent()
    ending = bench.watcher.watch(record, [site_job], live=True)
    await asyncio.sleep(5 * 3600)
    begun = bench.now
    bench.world.files[record.paths.live] = bytes(100)
    await asyncio.sleep(60)

    assert [size for _, size in bench.logged[:1]] == [100]
    assert bench.logged[0][0] - begun <= bench.settings.poll_s + 1
    assert (await ending).exit_code == 0


@pytest.mark.parametrize("lag", [False, True], ids=["", "behind"])
@pytest.mark.parametrize("after", [2, 5000])
async def test_killed_without_a_word_is_known_within_half_a_minute(
    bench: Bench, lag: bool, after: float
) -> None:
    fated(bench.world, Fate(killed_after=after), 30_000)
    bench.site.states_lag = lag
    end = await end_of(bench)
    assert bench.now <= after + WITHIN_S + 5, "it is in the queue for some seconds"
    assert (end.found, end.claimed) == (Finding.ENDED, True)
    assert end.state is not None
    assert end.state.reason is Reason.OUT_OF_MEMORY


async def test_killed_is_known_although_a_second_submission_waits(bench: Bench) -> None:
    """What happens to a job that did not make the claim says nothing of the one that did."""
    fates = [Fate(killed_after=50), Fate(starts=(5000.0,))]
    bench.world.fate = lambda spec: fates.pop(0)
    bench.world.duration = lambda spec: 30_000.0
    record, first = bench.sent()
    second = bench.world.submit(Submission(record.id, "job", "", Resources()))
    end = await bench.watcher.watch(record, [first, second], sent=2)
    assert bench.now <= 50 + WITHIN_S + 5
    assert end.state is not None
    assert end.state.reason is Reason.OUT_OF_MEMORY


async def test_jobs_that_run_are_not_asked_about(bench: Bench) -> None:
    fated(bench.world, Fate(), 6 * 3600.0)
    bench.site.states_lag = True
    record, site_job = bench.sent()
    ending = bench.watcher.watch(record, [site_job])
    await asyncio.sleep(60)
    before = bench.site.calls["states"], bench.site.calls["explain"]
    await asyncio.sleep(5 * 3600)
    assert (bench.site.calls["states"], bench.site.calls["explain"]) == before
    assert (await ending).exit_code == 0


async def test_asking_about_many_that_wait_does_not_grow_with_their_number(bench: Bench) -> None:
    fated(bench.world, Fate(starts=(5000.0,)))
    bench.site.states_lag = True
    ids: list[str] = []
    count = bench.site.states

    async def states(asked: Sequence[str]) -> dict[str, JobState]:
        ids.extend(asked)
        return await count(asked)

    bench.site.states = states  # type: ignore[assignment, method-assign]
    sent = [bench.sent(f"job-{n}") for n in range(400)]
    waiting = [bench.watcher.watch(record, [i]) for record, i in sent]
    await asyncio.sleep(1000)
    ids.clear()
    before = bench.site.calls["explain"]
    await asyncio.sleep(1000)
    assert len(ids) <= 1000 / SPACING_S
    assert bench.site.calls["explain"] - before <= 1000 / 10
    await asyncio.gather(*waiting)


async def test_submission_that_another_process_did_not_live_to_see_is_repeated_soon(
    bench: Bench,
) -> None:
    end = await bench.watcher.watch(bench.new(), [], interrupted=True)
    assert bench.now <= INTERRUPTED_WAIT_S + 5
    assert end.found is Finding.VANISHED


@pytest.mark.parametrize("lag", [False, True])
async def test_a_job_that_cannot_start_is_reported_once(bench: Bench, lag: bool) -> None:
    fated(bench.world, Fate(starts=(4000.0,), waits=("ReqNodeNotAvail", False)))
    bench.site.states_lag = lag
    record, job = bench.sent()
    end = await bench.watcher.watch(record, [job], sent=1)
    assert end.exit_code == 0, "it did start, later"
    assert bench.waits == ["ReqNodeNotAvail", ""]
    assert (bench.pending, bench.began) == (["ReqNodeNotAvail"], [True])


async def test_a_job_that_waits_its_turn_has_a_reason_but_no_obstacle(bench: Bench) -> None:
    fated(bench.world, Fate(starts=(400.0,)))
    record, job = bench.sent()
    await bench.watcher.watch(record, [job], sent=1)
    assert (bench.pending, bench.waits) == (["Priority"], [])


@pytest.mark.parametrize("late", [False, True])
async def test_since_when_a_job_runs_is_known_only_if_its_start_was_watched(
    bench: Bench, late: bool
) -> None:
    fated(bench.world, Fate(starts=(1500.0,), stalled=(1.0, 900.0)))
    record, job = bench.sent()
    await asyncio.sleep(2000.0 if late else 1000.0)
    await bench.watcher.watch(record, [job], interrupted=True)
    assert bench.began == [not late]


async def test_what_an_earlier_run_reported_is_not_reported_again_and_over_with_the_start(
    bench: Bench,
) -> None:
    fated(bench.world, Fate(starts=(400.0,), waits=("ReqNodeNotAvail", False)))
    record, job = bench.sent()
    known = replace(record, waits="ReqNodeNotAvail")
    await bench.watcher.watch(known, [job], sent=1)
    assert bench.waits == [""]


async def test_many_jobs_that_cannot_start_cost_a_few_questions_and_each_is_heard_of(
    bench: Bench,
) -> None:
    """Where each job's details cost a request; a job that was not asked about keeps its reason."""
    fated(bench.world, Fate(starts=(4000.0,), waits=("ReqNodeNotAvail", False)))
    bench.site.states_lag = True
    ends = []
    for n in range(30):
        record, job = bench.sent(f"job {n}")
        ends.append(bench.watcher.watch(record, [job], sent=1))
    await asyncio.sleep(1000.0)
    assert bench.waits == ["ReqNodeNotAvail"] * 30
    assert bench.site.calls["explain"] <= 5 * bench.site.calls["states"]
    for end in ends:
        end.cancel()


@pytest.mark.parametrize("lag", [False, True])
async def test_a_job_that_would_wait_for_ever_fails_and_never_runs(bench: Bench, lag: bool) -> None:
    fated(bench.world, Fate(starts=(4000.0,), waits=("PartitionTimeLimit", True)))
    bench.site.states_lag = lag
    record, job = bench.sent()
    end = await bench.watcher.watch(record, [job], sent=1)
    assert end.state is not None
    assert (end.found, end.state.reason) == (Finding.ENDED, Reason.REJECTED)
    assert "PartitionTimeLimit" in end.state.detail
    assert bench.now < 600
    await asyncio.sleep(DAY_S)
    assert not bench.world.runs


WARNED = Fate(killed_after=5.0, reason=Reason.TIME_LIMIT, warned=True)
ENDED_S = 9.0
"""When one that runs for five seconds has ended, warned or not."""


@pytest.mark.parametrize(("fate", "code"), [(Fate(), 0), (WARNED, 143)])
async def test_a_marker_that_is_seen_only_after_a_write_counts_before_the_schedulers_word(
    bench: Bench, fate: Fate, code: int
) -> None:
    """An NFS client shows an old directory until it has written to it: the last look decides, if
    the site does not say for a moment that nothing lies there.

    Where the scheduler says that something ended the job, that look comes soon.
    """
    fated(bench.world, fate, 5.0 if fate.killed_after is None else 100.0)
    record, job = bench.sent()
    shown, wrong = bench.site.list, iter([True])

    async def old(path: str) -> dict[str, Entry]:
        entries = await shown(path)
        written = f"{record.paths.attempts}/{LOOK}" in bench.world.files
        if written and next(wrong, False):
            return {}
        return {n: e for n, e in entries.items() if written or parse_marker_name(n) is None}

    bench.site.list = old  # type: ignore[method-assign]
    end = await bench.watcher.watch(record, [job], sent=1)
    assert (end.found, end.exit_code) == (Finding.MARKER, code)
    waited = bench.now - ENDED_S
    assert (waited < bench.settings.timing.marker_grace_s) == (fate is WARNED), waited


async def test_where_nothing_can_be_written_the_last_look_has_to_do(bench: Bench) -> None:
    fated(bench.world, Fate(killed_after=5.0))
    record, job = bench.sent()
    bench.site.fault = lambda method, about: "rejected" if method == "put" else ""
    end = await bench.watcher.watch(record, [job], sent=1)
    assert end.found is Finding.ENDED
    assert end.state is not None
    assert end.state.reason is Reason.OUT_OF_MEMORY
    assert f"{record.paths.attempts}/{LOOK}" not in bench.world.files


# Who holds a claim, as the controller reads it.


RECORD = AttemptRecord("t1", "sim", 0, "job", "train", "train", "f", AttemptState.SUBMITTED)
CLAIM = b"owner=n1-77\nsite_job=42\nscheduler_job=1234\nhost=n1\n"


def owner(content: bytes | None) -> evidence.ClaimOwner | None:
    world = World(lambda _: Fate(), lambda _: 1.0)
    if content is not None:
        world.files[RECORD.paths.claim] = content
    return run(evidence.read_owner(SimulatedSite(world), RECORD))


def test_the_job_that_it_names_holds_it_however_often_it_has_beaten() -> None:
    assert owner(CLAIM) == owner(CLAIM + b"....") == evidence.ClaimOwner("42", "1234")


@pytest.mark.parametrize("shown", range(len(CLAIM)))
def test_a_slow_file_system_shows_a_part_of_it(shown: int) -> None:
    """1234 is not 12: whoever is taken for the owner by half a number would end the attempt."""
    assert owner(CLAIM[:shown]) is None


def test_there_is_none() -> None:
    assert owner(None) is None
