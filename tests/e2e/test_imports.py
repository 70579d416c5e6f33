"""Large files from site to site without this machine: one server fetches them from the other."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_sandbox.faults import Fault
from hpc_sandbox.server import Sandbox
from hpc_sandbox.settings import SandboxSettings, SiteOption, Timing
from snakemake_executor_plugin_mantik.jobs.paths import workspace_root
from tests.real.centre import tsi
from tests.real.centre.firecrest import SOFTWARE as FIRECREST
from tests.support.command import smk_mantik
from tests.support.places import MakeProject, unicorex_place
from tests.support.unicoreserver import trust
from tests.support.unicorex import SOFTWARE as UNICOREX
from tests.support.unicorex import own_unicorex
from tests.support.workflows import FILES_STAY, Place, Project, place_in, tells, until

SITES = {"one": "unicore", "two": "unicore", "three": "firecrest", "four": "firecrest"}
SIZE = 20_000_000
SHOWN = "19.1 MiB"
MADE_AT = 1_600_000_000

SNAKEFILE = """
    rule sum:
        input: "results/tool"
        output: "sum.txt"
        resources: mantik_site="{other}"
        shell: "sha256sum < {{input}} > {{output}}; stat -c '%a %Y' {{input}} >> {{output}}"

    rule make:
        output: "results/tool"
        resources: mantik_site="{first}"
        shell:
            "head -c {size} /dev/urandom > {{output}}; chmod 755 {{output}};"
            " touch -d @{made} {{output}}"
"""


def boxed(directory: Path, trusted: str = "", transfer_time: float = 0.0) -> Sandbox:
    settings = SandboxSettings(trusted=trusted, timing=Timing(transfer_time=transfer_time))
    return Sandbox(directory, [SiteOption(*site) for site in SITES.items()], settings)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """Sites whose operators trust each other."""
    with boxed(tmp_path_factory.mktemp("imports"), trusted="each other") as made:
        yield made


Between = Callable[[Place, Place], Project]


@pytest.fixture
def between(project_at: MakeProject) -> Between:
    """Makes a project whose file is made at one site and read at another."""
    return lambda first, other: crossing(project_at(first), first, other)


def crossing(made: Project, first: Place, other: Place) -> Project:
    names = {"first": first.name, "other": other.name}
    made.write("Snakefile", SNAKEFILE.format(**names, size=SIZE, made=MADE_AT))
    second = made.config.with_name(f"{other.name}.yaml")
    second.write_text(other.config)
    made.sites = [str(second)]
    made.extra |= other.environment
    return made


def verify(project: Project, other: Place) -> None:
    content = (project.workspace / "results/tool").read_bytes()
    there = project.workspace_at(other)
    sum_ = hashlib.sha256(content).hexdigest()
    assert (there / "sum.txt").read_text() == f"{sum_}  -\n755 {MADE_AT}\n"
    assert (there / "results/tool").stat().st_nlink == 1, "no second name takes room"
    assert not [*(there / ".mantik").rglob("imported")], "the bundle is gone"
    here = [path for path in project.directory.rglob("*") if path.is_file()]
    assert max(path.stat().st_size for path in here) < SIZE / 10, "nothing of it came here"


def plan(project: Project) -> str:
    configs = [str(project.config), *project.sites]
    return smk_mantik(project, "plan", "--mantik-backend-config", *configs, *FILES_STAY).output


@pytest.mark.software(tsi.SOFTWARE)
@pytest.mark.software(FIRECREST)
def test_a_real_server_imports(
    firecrest_centre_place: Place, unicore_centre_place: Place, between: Between
) -> None:
    """UNICORE/X, with its TSI, fetches from the object store of the real firecREST."""
    project = between(firecrest_centre_place, unicore_centre_place)

    ran = project.run(*FILES_STAY).ok()

    told = f"Moving results/tool ({SHOWN}) to site {unicore_centre_place.name}, from server to"
    tells(ran.output, told)
    assert "through this machine" not in ran.output
    verify(project, unicore_centre_place)


@pytest.mark.software(FIRECREST)
def test_a_job_at_a_real_site_fetches(firecrest_centre_place: Place, between: Between) -> None:
    """A job of the real Slurm, with the directives of the real firecREST's transfer jobs."""
    first = firecrest_centre_place
    other = replace(first, name="other", storage=first.storage / "elsewhere")
    project = between(first, other)
    with Path(project.sites[0]).open("a") as config:
        config.write(
            f"  Workspace: {workspace_root(str(project.workspace_at(other)))}\n"
        )  # below Site:

    ran = project.run(*FILES_STAY).ok()

    tells(ran.output, f"Moving results/tool ({SHOWN}) to site other, from server to server")
    assert "through this machine" not in ran.output
    verify(project, other)


@pytest.mark.nightly
@pytest.mark.software(UNICOREX)
@pytest.mark.parametrize("trusting", [True, False])
def test_real_servers_import_from_each_other(
    tmp_path: Path, between: Between, trusting: bool
) -> None:
    with own_unicorex(tmp_path / "a", 1) as source, own_unicorex(tmp_path / "b", 1) as target:
        for one, another in (source, target), (target, source):
            if trusting:
                trust(one, another)
            one.start()
        other = replace(unicorex_place(target), name="other")
        project = between(unicorex_place(source), other)

        ran = project.run(*FILES_STAY).ok()

        way = "from server to server" if trusting else "through this machine"
        tells(ran.output, f"Moving results/tool ({SHOWN}) to site other, {way}.")
        assert ("through this machine" in ran.output) != trusting
        verify(project, other)


@pytest.mark.parametrize(
    ("first", "other", "way"),
    [
        ("one", "two", "from server to server"),  # between others with a fault, below
        ("one", "three", "through this machine"),  # firecREST fetches nothing that needs trust
    ],
)
def test_the_way_from_site_to_site(
    box: Sandbox, between: Between, first: str, other: str, way: str
) -> None:
    project = between(place_in(box, first), place_in(box, other))
    project.run(*FILES_STAY, "results/tool").ok()

    allowed = " if they allow it" * way.startswith("from")
    tells(plan(project), f"1 to move from other sites, {way}{allowed} ({SHOWN})")
    ran = project.run(*FILES_STAY).ok()

    tells(ran.output, f"Moving results/tool ({SHOWN}) to site {other}, {way}")
    ways = ("from server to server", "through this machine")
    assert [each in ran.output for each in ways] == [each == way for each in ways]
    verify(project, place_in(box, other))


def test_an_import_that_fails_is_replaced_by_a_stream(box: Sandbox, between: Between) -> None:
    """Errors of Java repeat the address."""
    project = between(place_in(box, "three"), place_in(box, "one"))
    message = "URISyntaxException at index 9: http://store/o?X-Amz-Signature=secret"
    fault = box.faults.add(Fault("refuse", "POST", "/transfers$", status=400, message=message))

    ran = project.run(*FILES_STAY).ok()

    box.faults.clear()
    assert fault.happened == fault.count
    tells(
        ran.output,
        "Site one cannot fetch results/tool from the other site's server",
        "URISyntaxException",
        f"Moving results/tool ({SHOWN}) to site one, through this machine.",
    )
    assert "Signature" not in ran.output
    verify(project, place_in(box, "one"))


WAYS = {
    "firecrest-unicore": ("three", "one", "/store/"),
    "unicore-unicore": ("one", "two", r"/files/.*results/tool"),
    "firecrest-firecrest": ("three", "four", "/store/"),
}
"""From which site to which one, and what the path of the request for the file has in it."""
BEGIN = {"one": "/transfers$", "two": "/transfers$", "four": "/compute/four/jobs$"}
"""The end of the path with which an import begins; at firecREST, a job like all others."""


FAULTS = ("cut", "expired", "refused", "lost")
IN_CI = [
    ("firecrest-firecrest", "cut"), ("firecrest-unicore", "expired"),
    ("unicore-unicore", "refused"), ("firecrest-unicore", "lost"),
]  # fmt: skip
"""Each fault and each way; the others vary them."""
ONE_WAY = [
    "unicore-unicore",
    *(pytest.param(w, marks=pytest.mark.nightly) for w in WAYS if w[0] == "f"),
]


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        pytest.param(way, fault, marks=() if (way, fault) in IN_CI else pytest.mark.nightly)
        for way in WAYS
        for fault in FAULTS
    ],
)
def test_faults_of_imports(box: Sandbox, way: str, fault: str, between: Between) -> None:
    """Whatever happens, all of the file comes, and it comes once."""
    first, other, reads = WAYS[way]
    project = between(place_in(box, first), place_in(box, other))
    project.run(*FILES_STAY, "results/tool").ok()
    # The job at firecREST goes on, after 1, 2, ... seconds, until it gives up.
    times = 5 if other == "four" else 1
    met = box.faults.add(
        {
            "cut": Fault("cut", "GET", reads, bytes=SIZE // 2),
            "expired": Fault("refuse", "GET", reads, status=403, count=times),
            "refused": Fault("refuse", "POST", BEGIN[other], status=400),
            "lost": Fault("drop_after", "POST", BEGIN[other]),
        }[fault]
    )
    begun = box.faults.add(Fault("delay", "POST", BEGIN[other], count=None))

    ran = project.run(*FILES_STAY).ok()

    box.faults.clear()
    assert met.happened == met.count
    by_servers = fault == "lost" or (fault, other) == ("cut", "four")
    assert ("through this machine" in ran.output) != by_servers, ran.output
    again = {"cut": 1, "expired": 1, "refused": 0, "lost": 0}[fault]
    assert begun.happened == again + (other == "four"), "one import, and a job"
    assert "Signature" not in ran.output
    verify(project, place_in(box, other))


@pytest.mark.parametrize("way", ONE_WAY)
def test_killed_while_a_file_is_imported(box: Sandbox, way: str, between: Between) -> None:
    """Where the site's answer is unknown, too, the next run begins no second import."""
    first, other, _ = WAYS[way]
    project = between(place_in(box, first), place_in(box, other))
    project.run(*FILES_STAY, "results/tool").ok()
    lost = box.faults.add(Fault("drop_after", "POST", BEGIN[other]))
    begun = box.faults.add(Fault("delay", "POST", BEGIN[other], count=None))
    bundles = project.workspace_at(place_in(box, other)) / ".mantik/bundles"
    running = project.start(*FILES_STAY)
    until(lambda: [*bundles.glob("*/*/imported/*")], "the imported file")
    running.kill()
    assert lost.happened

    ran = project.run(*FILES_STAY, "--rerun-incomplete", "--nolock").ok()

    box.faults.clear()
    assert begun.happened == (other == "four"), "the job alone"
    assert "through this machine" not in ran.output
    verify(project, place_in(box, other))
