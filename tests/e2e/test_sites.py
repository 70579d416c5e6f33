"""One workflow over two sites of different APIs: each rule where it belongs, files where needed."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_sandbox.faults import Fault
from hpc_sandbox.firecrest.site import FirecrestServer
from hpc_sandbox.server import Sandbox
from snakemake_executor_plugin_mantik.journal import AttemptRecord
from tests.real.centre import Centre
from tests.support.places import REAL, MakeProject
from tests.support.workflows import FILES_STAY, Place, Project, Running, tells, until

UPLOADS = {"hpc1": "PUT storages/*/files", "hpc2": "POST filesystem/ops/upload"}
"""The requests that bring a file to a site; UNICORE's sets permissions, too."""


@pytest.fixture
def two(project: Project, firecrest_place: Place) -> Project:
    """A project at `hpc1`, UNICORE, and `hpc2`, firecREST."""
    second = project.directory.parent / "hpc2.yaml"
    second.write_text(firecrest_place.config)
    project.sites = [str(second)]
    return project


@pytest.fixture
def healing(sandbox: Sandbox) -> Iterator[Sandbox]:
    yield sandbox
    sandbox.faults.clear()


@dataclass
class Ledger:
    """What the servers themselves recorded since the last look."""

    sandbox: Sandbox

    def __post_init__(self) -> None:
        self._seen = {name: Counter[str]() for name in UPLOADS}
        self._runs = dict.fromkeys(UPLOADS, 0)
        self.requests()
        self.runs()

    def requests(self) -> dict[str, Counter[str]]:
        now = {name: Counter(self.sandbox.record(name)["requests"]) for name in UPLOADS}
        new = {name: now[name] - self._seen[name] for name in UPLOADS}
        self._seen = now
        return new

    def uploads(self) -> dict[str, int]:
        return {name: new[UPLOADS[name]] for name, new in self.requests().items()}

    def runs(self) -> dict[str, list[tuple[float, float]]]:
        """When jobs started and ended, by site: seconds since the epoch."""
        found = {}
        for name in UPLOADS:
            runs = self.sandbox.record(name)["runs"]
            found[name] = [(run["started"], run["ended"]) for run in runs[self._runs[name] :]]
            self._runs[name] = len(runs)
        return found

    def counts(self) -> dict[str, int]:
        return {name: len(runs) for name, runs in self.runs().items()}


def where(project: Project) -> dict[str, str]:
    return {record.rule: record.site for record in project.attempts}


CHOICES = """
    rule all:
        input: "value.txt", "1.of", "2.of", "unnamed.txt"

    rule value:
        output: "value.txt"
        resources: mantik_site="hpc2"
        shell: "touch {output}"

    rule function1:
        output: "{n,1}.of"
        resources: mantik_site=lambda wildcards: "hpc" + wildcards.n
        shell: "touch {output}"

    rule function2:
        output: "{n,2}.of"
        resources: mantik_site=lambda wildcards: "hpc" + wildcards.n
        shell: "touch {output}"

    rule unnamed:
        output: "unnamed.txt"
        shell: "touch {output}"
"""


def test_ways_to_choose_a_site(two: Project, sandbox: Sandbox) -> None:
    two.write("Snakefile", CHOICES)
    ledger = Ledger(sandbox)

    two.run().ok()
    assert ledger.counts() == {"hpc1": 2, "hpc2": 2}
    assert where(two) == {
        "function1": "hpc1", "unnamed": "hpc1", "function2": "hpc2", "value": "hpc2"
    }  # fmt: skip

    ran = two.run(
        "--forceall", "--default-resources", "mantik_site=hpc2", "--set-resources",
        "value:mantik_site=hpc1",
    ).ok()  # fmt: skip
    assert ledger.counts() == {"hpc1": 2, "hpc2": 2}, ran.output
    assert where(two) == {
        "function1": "hpc1", "value": "hpc1", "function2": "hpc2", "unnamed": "hpc2"
    }  # fmt: skip


def test_site_that_follows_from_a_file_that_is_still_to_be_made(two: Project) -> None:
    two.write(
        "Snakefile",
        """
        rule all:
            input: "other.txt", "late.txt", "good.txt"

        rule other:
            output: "other.txt"
            shell: "sleep 1; touch {output}"

        rule decide:
            output: "site.txt", "good-site.txt"
            resources: mantik_site="hpc2"
            shell: "echo hpc9 > {output[0]}; echo hpc2 > {output[1]}"

        rule late:
            input: "site.txt"
            output: "late.txt"
            resources: mantik_site=lambda wildcards, input: open(input[0]).read().strip()
            shell: "touch {output}"

        use rule late as good with:
            input: "good-site.txt"
            output: "good.txt"
        """,
    )

    said = two.run("--keep-going").failed()

    tells(said, "there is no site 'hpc9'", "the known ones are hpc1, hpc2")
    assert where(two) == {"other": "hpc1", "decide": "hpc2", "good": "hpc2"}
    assert two.exists("other.txt"), said
    assert not two.exists("late.txt")


CROSSING = """
    rule all:
        input: "sum1", "sum2a", "sum2b", "stays.sum"

    rule make:
        output: "a.bin", "unused.bin"
        shell: "head -c 3000000 /dev/urandom > {output[0]}; cp {output[0]} {output[1]}"

    rule sum1:
        input: "a.bin"
        output: "sum1"
        shell: "sha256sum < {input} > {output}"

    rule sum2:
        input: "a.bin"
        output: "sum2{x}"
        resources: mantik_site="hpc2"
        shell: "sha256sum < {input} > {output}"

    rule stays:
        output: "stays.bin"
        resources: mantik_site="hpc2"
        shell: "head -c 3000000 /dev/urandom > {output}"

    rule use:
        input: "stays.bin"
        output: "stays.sum"
        resources: mantik_site="hpc2"
        shell: "sha256sum < {input} > {output}"
"""


def test_files_cross_once_and_only_when_needed(
    two: Project, sandbox: Sandbox, firecrest_place: Place
) -> None:
    two.write("Snakefile", CROSSING)
    ledger = Ledger(sandbox)

    ran = two.run().ok()

    # The lease, library and project files; at UNICORE the workspace's permissions, at firecREST
    # a.bin.
    assert ledger.uploads() == {"hpc1": 4, "hpc2": 4}, ran.output
    assert two.read("sum1") == two.read("sum2a") == two.read("sum2b")
    assert not (two.workspace / "stays.bin").exists()
    there = two.workspace_at(firecrest_place)
    assert (there / "a.bin").read_bytes() == (two.directory / "a.bin").read_bytes()
    assert not (there / "unused.bin").exists()

    ran = two.run("--forcerun", "sum2", "use").ok()
    assert ledger.uploads() == {"hpc1": 0, "hpc2": 1}, f"the lease alone: {ran.output}"

    two.run("--forcerun", "make").ok()
    assert ledger.uploads() == {"hpc1": 1, "hpc2": 2}, "made anew, so it crosses once more"
    assert two.read("sum1") == two.read("sum2a") == two.read("sum2b")


OUTAGE = r"""
    rule all:
        input: "away.txt", "here3.txt"

    rule away:
        output: "away.txt"
        resources: mantik_site="SITE"
        shell: "echo 1 >> ran.txt; until [ -e go ]; do sleep 0.1; done; cp ran.txt {output}"

    rule here:
        output: "here1.txt"
        shell: "until [ -e go ]; do sleep 0.1; done; echo here > {output}"

    rule next:
        input: "here{n}.txt"
        output: "here{n}.next"
        shell: "cp {input} {output}"

    rule chain2:
        input: "here1.next"
        output: "here2.txt"
        shell: "cp {input} {output}"

    rule chain3:
        input: "here2.next"
        output: "here3.txt"
        shell: "cp {input} {output}"
"""


@pytest.mark.parametrize("away", ["hpc1", pytest.param("hpc2", marks=pytest.mark.nightly)])
def test_outage_of_a_site_holds_up_its_own_jobs_only(
    two: Project, healing: Sandbox, sandbox_place: Place, firecrest_place: Place, away: str
) -> None:
    places = {"hpc1": sandbox_place, "hpc2": firecrest_place}
    other = next(name for name in places if name != away)
    two.write("Snakefile", OUTAGE.replace("SITE", away))
    running = two.start("--default-resources", f"mantik_site={other}")
    workspaces = {name: two.workspace_at(place) for name, place in places.items()}
    until((workspaces[away] / "ran.txt").exists, "the job that runs")

    outage = healing.faults.add(Fault("drop_before", path=f"^/{away}/", count=None))
    for workspace in workspaces.values():
        until(workspace.exists, "the workspace")
        (workspace / "go").touch()
    until(lambda: two.exists("here3.txt"), "the other site's jobs")
    running.says(f"Site {away} has not answered for")
    assert not two.exists("away.txt")
    assert running.process.poll() is None
    assert outage.happened
    healing.faults.clear()

    said = running.end().ok().output
    tells(said, f"Site {away} answers again")
    assert f"Site {other} " not in said
    assert two.read("away.txt") == "1\n"


def test_a_site_that_is_away_when_a_run_starts_holds_up_its_own_jobs_only(
    two: Project, healing: Sandbox
) -> None:
    """Once an earlier run has used it: a wrong address is a mistake."""
    two.write(
        "Snakefile",
        """
        rule make:
            output: "{site}.{n}"
            resources: mantik_site=lambda wildcards: wildcards.site
            shell: "pwd > {output}"
        """,
    )
    away = Fault("drop_before", path="^/hpc2/", count=None)
    healing.faults.add(away)
    tells(two.run("hpc1.1", "hpc2.1").failed(), "Check")
    assert not two.exists("hpc1.1")
    healing.faults.clear()
    two.run("hpc2.1").ok()

    healing.faults.add(away)
    running = two.start("hpc1.1", "hpc2.2")
    until(lambda: two.exists("hpc1.1"), "the other site's job")
    running.says("Site hpc2 is away (")
    running.says("Site hpc2 has not answered for")
    healing.faults.clear()
    running.end().ok()
    assert two.read("hpc2.2") == two.read("hpc2.1")


ELSEWHERE = """
    rule late:
        output: "late.txt"
        resources: mantik_site="any"
        shell: "echo ran >> late; until [ -e go ]; do sleep 0.1; done; touch {output}"

    rule stays:
        output: "stays.{n}"
        resources: mantik_site="hpc2"
        shell: "echo ran >> ran.{wildcards.n}; touch {output}"

    rule reads:
        input: "stays.1"
        output: "reads.txt"
        resources: mantik_site="any"
        shell: "touch {output}"

    rule here:
        output: "here.txt"
        resources: mantik_site="hpc1"
        shell: "touch {output}"
"""


@pytest.mark.parametrize("what", ["a job that runs there", "an input", "what it has made lately"])
def test_what_is_at_a_site_that_is_away_waits_for_it(
    two: Project, healing: Sandbox, firecrest_place: Place, what: str
) -> None:
    two.write("Snakefile", ELSEWHERE)
    state = two.directory / ".snakemake/mantik"
    there = two.workspace_at(firecrest_place)
    options: tuple[str, ...] = ()
    match what:
        case "a job that runs there":
            options, target = KILLED_OPTIONS, "late.txt"
            running = two.start(*options, target)
            until((there / "late").exists, "the job")
            running.kill()
        case "an input":
            options, target = FILES_STAY, "reads.txt"
            two.run(*options, "stays.1").ok()
        case _:
            options, target = FILES_STAY, "stays.2"
            two.run(*options, "stays.1").ok()
            shutil.copytree(state, two.directory / "older")
            two.run(*options, target).ok()
            shutil.rmtree(state)
            (two.directory / "older").rename(state)

    healing.faults.add(Fault("drop_before", path="^/hpc2/", count=None))
    running = two.start(*options, "here.txt", target)
    until(lambda: any(r.rule == "here" and r.outcome for r in two.attempts), "the other site's job")
    assert running.process.poll() is None
    healing.faults.clear()
    if there.exists():
        (there / "go").touch()
    ended = running.end()
    if target == "stays.2":  # the journal learned of it after Snakemake had decided
        tells(ended.failed(), "Start again: what is there is not made again")
        ended = two.run(*options, target)
        assert (there / "ran.2").read_text() == "ran\n"
    ended.ok()


MOVING = """
    localrules: ready

    rule all:
        input: "1.held", "2.held", "moved.txt", "next.txt"

    rule ready:
        output: "ready.txt"
        shell: "until [ -e busy ]; do sleep 0.1; done; touch {output}"

    rule hold:
        output: "{n}.held"
        resources: mantik_site="hpc2"
        shell: "echo {wildcards.n} >> holding; until [ -e go ]; do sleep 0.1; done; touch {output}"

    rule moves:
        input: "ready.txt"
        output: "moved.txt"
        resources: mantik_site="hpc2,hpc1", mantik_wait="2s"
        shell: "echo ran >> {output}; until [ -e on ]; do sleep 0.1; done"

    rule next:
        input: "moved.txt"
        output: "next.txt"
        resources: mantik_site="hpc2,hpc1", mantik_wait="90m"
        shell: "cp {input} {output}"
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_job_that_does_not_start_in_time_goes_to_the_next_site(
    two: Project, sandbox_place: Place, firecrest_place: Place, killed: bool
) -> None:
    """Its place was taken by others. What waited for it there is submitted again, too."""
    two.write("Snakefile", MOVING)
    options = ("--nolock", "--rerun-incomplete", "--retries", "0")
    wrong = two.run("--set-resources", "next:mantik_wait=soon", "moves:mantik_site=hpc2,hpc9")
    tells(wrong.failed(), "nothing submitted", "mantik_wait='soon' has to be", "no site 'hpc9'")
    wrong = two.run("--set-resources", "next:mantik_wait=soon", "next:mantik_site='any'")
    tells(wrong.failed(), "nothing submitted", "mantik_wait='soon' has to be")
    beyond = two.run("--set-resources", "next:mem_mb=10000000").failed()
    tells(beyond, "nothing submitted", "rule next at hpc1: memory: ")
    running = two.start(*options)
    busy = two.workspace_at(firecrest_place) / "holding"
    until(lambda: busy.exists() and len(busy.read_text().split()) == 2, "both slots")
    two.write("busy", "")
    running.says(
        "moves: withdrawn from hpc2, where it had not started after 2.0 s; it goes to hpc1"
    )
    other = two.workspace_at(sandbox_place)
    until((other / "moved.txt").exists, "the job at the next site")
    if killed:  # it is found at the site that it went to
        running.kill()
        running = two.start(*options)
        running.says("moves: reattached at hpc1")
    (other / "on").touch()
    (busy.parent / "go").touch()
    said = running.end().ok().output
    assert two.read("moved.txt") == two.read("next.txt") == "ran\n", said
    attempts = [
        (r.rule, r.site, r.state.final, r.outcome) for r in two.attempts if r.rule == "moves"
    ]
    assert [(site, final) for _, site, final, _ in attempts] == [("hpc2", True), ("hpc1", True)]
    assert attempts[1][3] == "succeeded"
    assert where(two)["next"] == "hpc2"


@pytest.mark.parametrize("at", REAL)
def test_a_job_that_slurm_does_not_start_goes_to_the_next_site(
    at: str, request: pytest.FixtureRequest, sandbox_place: Place, project_at: MakeProject
) -> None:
    """By `--begin`, which the sandbox's scheduler does not know."""
    place: Place = request.getfixturevalue(f"{at}_place")
    centre: Centre = request.getfixturevalue("centre")
    credentials = {k: v for k, v in sandbox_place.environment.items() if "_HPC1_" in k}
    project = project_at(place, credentials)
    second = project.directory.parent / "hpc1.yaml"
    second.write_text(sandbox_place.config)
    project.sites = [str(second)]
    project.write(
        "Snakefile",
        f"""
        rule moves:
            output: "moved.txt"
            resources:
                mantik_site="{place.name},hpc1", mantik_wait="5s",
                slurm_extra="--begin=now+1hour --comment=later"
            shell: "echo ran >> {{output}}"
        """,
    )
    said = project.run().ok().output
    tells(said, f"moves: withdrawn from {place.name}", "it goes to hpc1", "moves: done at hpc1")
    assert project.read("moved.txt") == "ran\n"
    waited, ran = project.attempts
    assert (waited.site, ran.site) == (place.name, "hpc1")
    until(lambda: not centre.queued(waited.site_jobs), "Slurm to forget it")
    assert not (project.workspace / "moved.txt").exists()


ANYWHERE = """
    localrules: ready

    rule all:
        input: "1.held", "2.held", "chosen.txt"

    rule ready:
        output: "ready.txt"
        shell: "until [ -e busy ]; do sleep 0.1; done; touch {output}"

    rule hold:
        output: "{n}.held"
        resources: mantik_site=lambda wildcards: "hpc2" if wildcards.n in "12" else "hpc1"
        shell: "echo {wildcards.n} >> holding; until [ -e go ]; do sleep 0.1; done; touch {output}"

    rule chosen:
        input: "ready.txt"
        output: "chosen.txt"
        resources: mantik_site="any"
        shell: "echo ran >> {output}"

    rule waits:
        input: "ready.txt"
        output: "waits.txt"
        resources: mantik_site="any", mantik_wait="2s"
        shell: "echo ran >> {output}"

    rule free:
        output: "free.txt"
        resources: mantik_site="any"
        shell: "touch {output}"

    rule narrow:
        output: "narrow.txt"
        resources: mantik_site="any", mantik_environment="special"
        shell: "echo $MARK > {output}"
"""
KILLED_OPTIONS = ("--nolock", "--rerun-incomplete", "--retries", "0")


def fill(two: Project, *places: Place, targets: tuple[str, ...] = ()) -> Running:
    """Start `ANYWHERE` and let it occupy both slots of each place; then it goes on."""
    running = two.start(*KILLED_OPTIONS, *targets)
    holding = [two.workspace_at(place) / "holding" for place in places]
    until(lambda: all(f.exists() and len(f.read_text().split()) == 2 for f in holding), "the slots")
    two.write("busy", "")
    return running


def test_a_job_for_any_site_goes_where_it_is_expected_to_start_first(
    two: Project, firecrest_place: Place
) -> None:
    """Where nodes are free if a site says so; not to the one that is full."""
    two.write("Snakefile", ANYWHERE)
    two.run("free.txt").ok()
    assert where(two)["free"] == "hpc2"
    running = fill(two, firecrest_place)
    until(lambda: two.exists("chosen.txt"), "the job at the other site")
    (two.workspace_at(firecrest_place) / "go").touch()
    running.end().ok()
    assert where(two)["chosen"] == "hpc1"


def test_a_job_for_any_site_is_found_at_the_one_that_was_chosen(
    two: Project, healing: Sandbox, firecrest_place: Place
) -> None:
    """After kill -9 before it could be submitted, although the other site is the better one now."""
    two.write("Snakefile", ANYWHERE)
    refused = Fault("drop_before", method="POST", path=r"^/hpc1/.*/jobs$", count=None)
    healing.faults.add(refused)
    running = fill(two, firecrest_place)
    until(lambda: refused.happened > 0, "the submission")
    running.kill()
    assert where(two)["chosen"] == "hpc1"
    (two.workspace_at(firecrest_place) / "go").touch()
    two.run(*KILLED_OPTIONS, "--until", "hold").ok()  # hpc2 is free again
    healing.faults.clear()
    two.run(*KILLED_OPTIONS).ok()
    assert two.read("chosen.txt") == "ran\n"
    assert {r.site for r in two.attempts if r.rule == "chosen"} == {"hpc1"}


def test_a_job_for_any_site_keeps_its_place_at_the_last_one(
    two: Project, sandbox_place: Place, firecrest_place: Place
) -> None:
    """After kill -9 and longer than `mantik_wait`, although the site that it has left is free."""

    def waits() -> list[AttemptRecord]:
        return [record for record in two.attempts if record.rule == "waits"]

    two.write("Snakefile", ANYWHERE)
    held = {"hpc2": ("1.held", "2.held"), "hpc1": ("3.held", "4.held")}
    targets = (*held["hpc1"], *held["hpc2"], "waits.txt")
    running = fill(two, firecrest_place, sandbox_place, targets=targets)
    until(lambda: len(waits()) == 2 and waits()[1].site_jobs, "the job at the next site")
    left, last = waits()
    until(lambda: time.time() > last.created + 2, "the end of mantik_wait")
    running.kill()
    running = two.start(*KILLED_OPTIONS, *targets)
    running.says(f"waits: reattached at {last.site}")
    spaces = {place.name: two.workspace_at(place) for place in (firecrest_place, sandbox_place)}
    (spaces[left.site] / "go").touch()
    until(lambda: all(map(two.exists, held[left.site])), "free slots")
    (spaces[last.site] / "go").touch()
    said = running.end().ok().output
    assert [r.site_jobs for r in waits()] == [left.site_jobs, last.site_jobs], said
    assert two.read("waits.txt") == "ran\n"


def test_a_job_for_any_site_does_not_go_to_one_that_is_away(two: Project, healing: Sandbox) -> None:
    two.write("Snakefile", ANYWHERE)
    healing.faults.add(Fault("drop_before", path="^/hpc2/", count=None))
    said = two.run("free.txt").ok().output
    tells(said, "hpc2", "Jobs that may run at any site go to others meanwhile.")
    assert where(two)["free"] == "hpc1"


def test_a_site_that_cannot_run_a_job_for_any_is_left_out(two: Project) -> None:
    two.write("Snakefile", ANYWHERE)
    none = two.run("narrow.txt").failed()
    tells(none, "nothing submitted", "rule narrow at hpc1: ", "rule narrow at hpc2: ", "'special'")
    special = "Environments: {special: {Variables: {MARK: here}}}\n"
    two.config.write_text(two.place.config + special)
    two.run("narrow.txt").ok()
    assert (where(two)["narrow"], two.read("narrow.txt")) == ("hpc1", "here\n")


NAMES = """
    rule all:
        input: "a.sum", "b.sum"

    rule sum_a:
        input: "data.bin", "small.txt"
        output: "a.sum"
        shell: "sha256sum {input} > {output}; echo $MARK $SLURM_JOB_PARTITION > a.mark"

    rule sum_b:
        input: "data.bin", "a.sum"
        output: "b.sum"
        resources: mantik_site="b"
        shell: "cat {input[1]} a.mark > {output}; echo $MARK $SLURM_JOB_PARTITION >> {output}"
"""


def test_two_names_of_one_api_share_client_and_workspace(
    firecrest: Project, sandbox: Sandbox
) -> None:
    name = firecrest.place.name
    for variable, value in firecrest.place.environment.items():
        api = "FIRECREST" if name == "hpc2" else "UNICORE"
        firecrest.extra[variable.replace(name.upper(), api)] = value
    texts = {
        "a": firecrest.place.config + "Environment:\n  Variables: {MARK: of a}\n",
        "b": firecrest.place.config.replace("Queue: batch", "Queue: devel")
        + "Environment:\n  Variables: {MARK: of b}\n",
    }
    for site, text in texts.items():
        firecrest.write(f"{site}.yaml", text)
    firecrest.write("data.bin").write_bytes(os.urandom(3_000_000))
    firecrest.write("small.txt", "small\n")
    firecrest.write("Snakefile", NAMES)
    ledger = Ledger(sandbox)
    server = sandbox.site(name)
    tokens = server.tokens.issued if isinstance(server, FirecrestServer) else 0

    ran = firecrest.run(
        "--executor", "mantik", "--jobs", "4", "--mantik-backend-config", "a.yaml", "b.yaml",
        plain=True,
    ).ok()  # fmt: skip

    # Lease, library, project files and one bundle; UNICORE's workspace's permissions are set once,
    # too.
    assert ledger.uploads()[name] == (4 if name == "hpc2" else 5), ran.output
    assert ran.output.count("Project files for ") == 1
    assert firecrest.read("b.sum").splitlines()[-2:] == ["of a batch", "of b devel"]
    assert {record.site for record in firecrest.attempts} == {"a", "b"}
    if isinstance(server, FirecrestServer):
        assert server.tokens.issued == tokens + 1


def test_limits_of_each_site_hold(two: Project, firecrest_place: Place) -> None:
    second = Path(two.sites[0])
    second.write_text(firecrest_place.config + "  MaxJobs: 1\n")
    two.write(
        "Snakefile",
        """
        rule all:
            input: expand("{n}.{site}", n=range(3), site=["hpc1", "hpc2"])

        rule job:
            output: "{n}.{site}"
            resources: mantik_site=lambda wildcards: wildcards.site
            # So many are to run at the same time where they may, however slow the machine is. A job
            # that is not alone where it has to be finds the directory of the other one.
            params:
                together=lambda wildcards: 2 if wildcards.site == "hpc1" else 1,
                begin=lambda wildcards: "true" if wildcards.site == "hpc1" else "mkdir alone",
                end=lambda wildcards: "true" if wildcards.site == "hpc1" else "rmdir alone"
            shell:
                "{params.begin}; touch begun.{wildcards.n}; "
                "until [ $(ls begun.* | wc -l) -ge {params.together} ]; do sleep 0.1; done; "
                "sleep 0.5; touch {output}; {params.end}"

        rule large:
            output: "large"
            resources: mantik_site="hpc2", nodes=9
            shell: "touch {output}"
        """,
    )
    two.run().ok()

    said = two.run("large").failed()
    tells(said, "rule large at hpc2: nodes: 9 requested", "nothing submitted")
