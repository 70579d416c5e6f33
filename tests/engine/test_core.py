"""The engine's thread: every job has one outcome, whatever breaks."""

import gc
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from snakemake_executor_plugin_mantik.common.errors import MantikError, PlaceTaken
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.config.settings import Timing
from snakemake_executor_plugin_mantik.engine import place
from snakemake_executor_plugin_mantik.engine.core import Engine
from snakemake_executor_plugin_mantik.engine.request import JobNumber, JobRequest, Outcome
from snakemake_executor_plugin_mantik.jobs.spec import JobSpec, ScriptLimits
from snakemake_executor_plugin_mantik.journal import AttemptState, Journal, read_history
from snakemake_executor_plugin_mantik.staging.project_files import ProjectFiles
from snakemake_executor_plugin_mantik.storage import access
from tests.support.controller import CONFIG, request
from tests.support.simulated import Fate, Fault, SimulatedPlanner, SimulatedSite, World
from tests.support.trial import wait_until

# These tests take real time: a world in which it runs a hundred times as fast as the engine's.
QUICK = CONFIG.model_copy(
    update={
        "site": CONFIG.site.model_copy(
            update={"timing": Timing(poll_min_s=0.02, marker_grace_s=0.1, fetch_wait_s=0.1)}
        )
    }
)


def at_once(_: JobSpec) -> Fate:
    return Fate(starts=(0.0,))


@pytest.fixture
def world() -> World:
    return World(at_once, lambda spec: 0.1)


Start = Callable[[], Engine]


@pytest.fixture
def start(world: World, tmp_path: Path) -> Iterator[Start]:
    engines = []

    def new() -> Engine:
        engine = make(world, tmp_path)
        engines.append(engine)
        engine.open(["sim"], lambda _: ProjectFiles((), 0, ()))
        return engine

    yield new
    for engine in engines:
        engine.close(tidy=False)


sites: dict[Path, SimulatedSite] = {}


def make(world: World, workdir: Path, notify: Callable[[str], None] = lambda _: None) -> Engine:
    site = sites[workdir] = SimulatedSite(world)
    planner = SimulatedPlanner(QUICK, None, workdir, world)
    return Engine(
        {"sim": (site, planner)},
        journal=Journal(workdir / ".snakemake/mantik"),
        workdir=workdir,
        state=workdir / ".snakemake/mantik",
        notify=notify,
    )


def at(
    named: Mapping[str, tuple[World, str]], workdir: Path
) -> dict[str, tuple[SimulatedSite, SimulatedPlanner]]:
    """Sites by name, each with a world and a workspace."""
    return {
        name: (SimulatedSite(world, name, workspace), SimulatedPlanner(QUICK, None, workdir, world))
        for name, (world, workspace) in named.items()
    }


def outcomes(engine: Engine, *requests: JobRequest) -> dict[JobNumber, Outcome]:
    for job in requests:
        engine.submit(job)
    found: dict[JobNumber, Outcome] = {}

    def all_here() -> bool:
        found.update({o.number: o for o in engine.collect()})
        return len(found) == len(requests)

    wait_until(all_here)
    return found


def answered(workdir: Path) -> None:
    wait_until(
        lambda: (
            {r.state for r in read_history(workdir / ".snakemake/mantik")}
            == {AttemptState.SUBMITTED}
        )
    )


def refuse_output(method: str, path: str) -> Fault:
    return "rejected" if (method, path) == ("get", "out/1") else ""


@pytest.mark.parametrize("forced", [False, True])
def test_what_could_not_be_fetched_is_fetched_by_the_next_run_or_computed_if_forced(
    start: Start, world: World, tmp_path: Path, forced: bool
) -> None:
    """The site refuses for longer than anybody waits: the job is not computed again for that."""
    world.place = lambda path: "alone"
    engine = start()
    sites[tmp_path].fault = refuse_output
    found = outcomes(engine, request(1))[1]
    assert not found.succeeded
    assert "succeeded, but its outputs could not be fetched" in found.message
    assert "snakemake --forcerun" in found.message
    engine.commit(found)
    engine.close(tidy=True)

    assert outcomes(start(), replace(request(1), forced=forced))[1].succeeded

    assert (tmp_path / "out/1").exists()
    assert len(world.runs) == 1 + forced


def test_bug_in_one_job_does_not_stop_the_others(
    start: Start, tmp_path: Path, world: World
) -> None:
    engine = start()
    site = sites[tmp_path]
    tag: list[str] = []

    def fault(method: str, about: str) -> Fault:
        if method == "submit" and world.specs[about].name == "job-1":
            tag.append(about)
            return "bug"
        return ""

    site.fault = fault
    found = outcomes(engine, request(0), request(1), request(2))
    assert [found[n].succeeded for n in range(3)] == [True, False, True]
    assert "please report" in found[1].message
    assert "KeyError" in found[1].message


def test_bug_in_the_watcher_is_told_and_the_jobs_are_taken_up(
    start: Start, tmp_path: Path, world: World
) -> None:
    engine = start()
    sites[tmp_path].fault = lambda method, about: "bug" if method == "list" else ""
    found = outcomes(engine, request(0), request(1))
    assert not any(outcome.succeeded for outcome in found.values())
    assert "please report" in found[0].message
    engine.close(tidy=False)

    assert all(o.succeeded for o in outcomes(start(), request(0), request(1)).values())

    assert len(world.runs) == 2, "nothing ran twice"


def test_site_that_does_not_open(world: World, tmp_path: Path) -> None:
    engine = make(world, tmp_path)
    sites[tmp_path].fault = lambda method, about: "unauthorized" if method == "open" else ""
    with pytest.raises(MantikError, match="who are you"):
        engine.open(["sim"], lambda _: ProjectFiles((), 0, ()))
    sites[tmp_path].fault = lambda method, about: ""
    assert outcomes_after_open(engine).succeeded, "it may have more luck later"
    engine.close(tidy=False)


def test_site_that_says_nothing_when_it_is_opened(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "OPEN_WAIT_S", 0.2)
    engine = make(world, tmp_path)
    sites[tmp_path].fault = lambda method, about: "hang" if method == "open" else ""
    with pytest.raises(MantikError, match="has not answered") as told:
        engine.open(["sim"], lambda _: ProjectFiles((), 0, ()))
    assert "nothing was submitted" in str(told.value)
    engine.open([], lambda _: ProjectFiles((), 0, ()))
    [of_job] = outcomes(engine, request(0)).values()
    assert "has not answered" in of_job.message
    assert "nothing was submitted" not in of_job.message, "other jobs of the run may have been"
    engine.close(tidy=False)


def outcomes_after_open(engine: Engine) -> Outcome:
    engine.open(["sim"], lambda _: ProjectFiles((), 0, ()))
    return outcomes(engine, request(1))[1]


def test_jobs_that_an_earlier_run_left_and_nobody_needs_are_told(tmp_path: Path) -> None:
    world = World(lambda spec: Fate(starts=(0.0 if spec.name == "job-1" else 1e9,)), lambda _: 0.1)
    said: list[str] = []
    for number in (0, 1):
        engine = make(world, tmp_path, said.append)
        engine.open(["sim"], lambda _: ProjectFiles((), 0, ()))
        if number == 0:
            engine.submit(request(0))
            answered(tmp_path)
        else:
            engine.commit(outcomes(engine, request(1))[1])
        engine.close(tidy=number == 1)
    [left] = [line for line in said if "may still run" in line]
    assert "that this run does not need and that may still run: job-0. See smk-mantik jobs" in left


def test_cancel_tells_what_does_not_confirm(
    start: Start, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snakemake_executor_plugin_mantik.engine.core.CANCEL_WAIT_S", 0.5)
    world.duration = lambda spec: 1000.0
    engine = start()
    engine.submit(request(1))
    wait_until(lambda: world.runs)
    answered(tmp_path)
    sites[tmp_path].fault = lambda method, about: "unreachable"

    left = engine.cancel()

    assert [record.name for record in left] == ["job-1"]
    engine.close(tidy=False)
    with_journal = Journal(tmp_path / ".snakemake/mantik")
    assert len(with_journal.all_open_attempts()) == 1, "the next run takes it up"
    with_journal.close()


def test_cancel_names_the_jobs_of_a_site_that_could_not_be_opened(
    start: Start, world: World, tmp_path: Path
) -> None:
    world.duration = lambda spec: 1000.0
    first = start()
    first.submit(request(1))
    wait_until(lambda: world.runs)
    first.close(tidy=False)
    second = make(world, tmp_path)
    sites[tmp_path].fault = lambda method, about: "unreachable"
    second.submit(request(1))

    assert [record.name for record in second.cancel(at_once=True)] == ["job-1"]
    second.close(tidy=False)


def test_cancel_names_the_jobs_of_a_place_that_another_controller_leads(
    start: Start, world: World
) -> None:
    world.duration = lambda spec: 1000.0
    engine = start()
    engine.submit(request(1))
    wait_until(lambda: world.runs)
    engine._runners["sim"].place.lead.deposed = PlaceTaken("another controller leads there")

    assert [record.name for record in engine.cancel()] == ["job-1"]
    assert not any(run.ended for run in world.runs)


def test_cancelling_that_is_not_waited_for_ends_with_the_engine(
    start: Start, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A second Ctrl-C comes while the first one's jobs are being ended."""
    world.fate = lambda spec: Fate(starts=(0.0,), deaf=True)
    world.duration = lambda spec: 1e9
    engine = start()
    engine.submit(request(1))
    wait_until(lambda: bool(world.runs))
    waiting = engine._call(engine._cancel(1e9))
    wait_until(lambda: any(job.promised for job in world.jobs.values()))
    engine.close(tidy=False)
    with pytest.raises(CancelledError):
        waiting.result(0)
    gc.collect()
    assert caplog.messages == []


def test_what_nobody_asks_for_any_more_is_told(start: Start, world: World, tmp_path: Path) -> None:
    world.duration = lambda spec: 1000.0
    engine = start()
    for number in range(7):
        engine.submit(request(number))
    wait_until(lambda: len(world.runs) == 7)
    engine.close(tidy=False)
    said: list[str] = []
    again = make(world, tmp_path, said.append)
    again.open(["sim"], lambda _: ProjectFiles((), 0, ()))
    again.submit(request(0))
    wait_until(lambda: "0" in "".join(r.job for r in read_history(tmp_path / ".snakemake/mantik")))
    again.close()

    [line] = [line for line in said if "does not need" in line]
    assert "job-0" not in line
    assert "job-1, job-2, job-3, job-4, job-5 and 1 more. See smk-mantik jobs" in line


def test_what_is_left_at_another_site_may_still_run(
    start: Start, world: World, tmp_path: Path
) -> None:
    world.duration = lambda spec: 1000.0
    engine = start()
    engine.submit(request(1))
    wait_until(lambda: world.runs)
    engine.close(tidy=False)

    other = World(at_once, lambda spec: 0.1)
    said: list[str] = []
    again = Engine(
        at({"else": (other, "/else")}, tmp_path), journal=Journal(tmp_path / ".snakemake/mantik"),
        workdir=tmp_path, state=tmp_path / ".snakemake/mantik", notify=said.append,
    )  # fmt: skip
    again.open(["else"], lambda _: ProjectFiles((), 0, ()))
    assert outcomes(again, replace(request(1), site="else"))[1].succeeded
    again.close()

    left, _ = read_history(tmp_path / ".snakemake/mantik")
    assert (left.may_run, left.left_where) == (True, "/ws")
    assert any(f"smk-mantik cancel {left.id}" in line for line in said)


@pytest.mark.parametrize("one_client", [False, True])
def test_names_of_one_place_keep_their_own_settings(
    world: World, tmp_path: Path, one_client: bool
) -> None:
    (tmp_path / "data").write_bytes(os.urandom(3000))
    inline = {"small": 100, "large": 100_000}
    clients = {name: SimulatedSite(world, "client" if one_client else name) for name in inline}
    sites = {}
    for number, (name, limit) in enumerate(inline.items()):
        values = {
            "timing": replace(
                QUICK.site.timing,
                inline_limit_bytes=limit,
                script=ScriptLimits(heartbeat_s=7 + number),
            ),
            "term_grace_s": 5 + number,
        }
        config = QUICK.model_copy(
            update={
                "site": QUICK.site.model_copy(update=values),
                "unicore_api_url": "https://one" if one_client else f"https://{name}",
            }
        )
        client = clients["small"] if one_client else clients[name]
        sites[name] = (client, SimulatedPlanner(config, None, tmp_path, world))
    state = tmp_path / ".snakemake/mantik"
    engine = Engine(
        sites, journal=Journal(state), workdir=tmp_path, state=state,
        notify=lambda _: None,
    )  # fmt: skip
    try:
        engine.open([*sites], lambda _: ProjectFiles((), 0, ()))
        jobs = [replace(request(n, "data"), site=site) for n, site in enumerate(sites)]
        assert all(o.succeeded for o in outcomes(engine, *jobs).values())
    finally:
        engine.close(tidy=False)
    limits = {spec.name: spec.limits for spec in world.specs.values()}
    assert [limits[f"job-{n}"].heartbeat_s for n in (0, 1)] == [7, 8]
    assert [limits[f"job-{n}"].grace_s for n in (0, 1)] == [5, 6]
    bundled = {spec.name: bool(spec.bundles) for spec in world.specs.values()}
    assert bundled["job-0"], "its script is too small for it"
    with closing(Journal(tmp_path / ".snakemake/mantik")) as journal:
        assert len({site.place for site in journal.sites().values()}) == 1


@pytest.mark.parametrize("machine", ["daint", "eiger"])
def test_ids_of_jobs_are_those_of_a_machine(tmp_path: Path, machine: str) -> None:
    """Another one behind the same URL may know other jobs by them."""

    def server(name: str) -> str:
        url = "https://fire.example"
        firecrest = {"ApiUrl": f"{url}/v2", "TokenUrl": f"{url}/token", "Machine": name}
        given = {"Firecrest": firecrest, "Resources": {"Queue": "q"}}
        return BackendConfig.model_validate(given).server

    with closing(Journal(tmp_path)) as journal:
        journal.set_site("cscs", server("daint"), "/ws", "place")
        record = journal.new_attempt(site="cscs", job="j", rule="r", name="j", fingerprint="f")
        journal.submitting(record.id, "q")
        journal.submitted(record.id, "17")
        over = journal.new_attempt(site="cscs", job="k", rule="r", name="k", fingerprint="f")
        journal.submitted(over.id, "16")
        journal.done(over.id)
        assert journal.set_site("cscs", server(machine), "/ws", "place") == []
        [known] = journal.all_open_attempts()
        assert known.site_jobs == (("17",) if machine == "daint" else ())
        [shown] = journal.attempts([over.id])
        assert shown.site_jobs == ("16",), "nothing is asked about it any more"


def test_storage_makes_its_requests_with_the_engines_clients(
    start: Start, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second client would log in again, and be counted by the server's limits again."""
    world.write("results/model", b"made")
    engine = start()
    [at_site] = engine.places
    threads: set[str] = set()

    def asked(method: str, about: str) -> Fault:
        threads.add(threading.current_thread().name)
        return ""

    sites[tmp_path].fault = asked
    monkeypatch.setattr(access, "open_site_again", lambda *_: pytest.fail("a second client"))

    with closing(access.Access(tmp_path, print)) as there:
        there.use(engine)
        assert [*there.list(at_site.id, "results")] == ["model"]
        there.download(at_site.id, [("results/model", tmp_path / "model", 4, "")], int)
        there.remove(at_site.id, "results/model")
        there.use(None)

    assert (tmp_path / "model").read_bytes() == b"made"
    assert "results/model" not in world.files
    assert threads == {"mantik-engine"}
